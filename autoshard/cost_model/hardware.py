"""Hardware: what a device holds and what its links carry, as far as a first model needs it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Link:
    """seconds = latency + bytes / bandwidth, a message.

    scatters: False where the transport carries out a reduce-scatter as an all-reduce, as gloo does (measured:
    8 MB over two hosts at 1 Gbit/s take 72 ms against the all-reduce's 70).
    """

    latency: float
    bandwidth: float
    scatters: bool = True


@dataclass(frozen=True)
class Device:
    """memory: bytes. inside, across: links within a node and between nodes, per process."""

    name: str
    memory: int
    inside: Link
    across: Link


GIB = 1024**3

# Memory and link rates from the vendors' data sheets (NVLink per direction; 400 Gbit/s NDR per GPU across);
# latencies are typical of NCCL rings. "cpu" is gloo over loopback and 1 Gbit/s, as bench/ measures it.
DEVICES = {
    "h100": Device("h100", 80 * GIB, Link(10e-6, 450e9), Link(20e-6, 50e9)),
    "h200": Device("h200", 141 * GIB, Link(10e-6, 450e9), Link(20e-6, 50e9)),
    "a100": Device("a100", 80 * GIB, Link(10e-6, 300e9), Link(20e-6, 25e9)),
    "a100-40": Device("a100-40", 40 * GIB, Link(10e-6, 300e9), Link(20e-6, 25e9)),
    "l4": Device("l4", 24 * GIB, Link(15e-6, 32e9), Link(30e-6, 12.5e9)),
    "rtx4090": Device("rtx4090", 24 * GIB, Link(15e-6, 32e9), Link(30e-6, 3e9)),
    "cpu": Device("cpu", 0, Link(200e-6, 2e9, False), Link(500e-6, 125e6, False)),
}


@dataclass(frozen=True)
class Topology:
    """nodes × processes a node, all with one kind of device."""

    nodes: int
    per_node: int
    device: Device

    @property
    def world(self) -> int:
        """Processes in all."""
        return self.nodes * self.per_node

    @property
    def slowest(self) -> Link:
        """The link that bounds a ring over all processes."""
        return self.device.across if self.nodes > 1 else self.device.inside


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still take: of the GPU, or its share of the host's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(pages) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def device_named_like(name: str) -> Device:
    """The preset whose name occurs in what a driver calls the device, such as "NVIDIA H100 80GB HBM3"."""
    words = name.lower().replace(" ", "").replace("geforce", "")
    for key in sorted(DEVICES, key=len, reverse=True):
        if key in words:
            return DEVICES[key]
    return DEVICES["cpu"] if "cpu" in words else DEVICES["a100"]
