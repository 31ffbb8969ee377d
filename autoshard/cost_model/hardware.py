"""Hardware: what a device holds, how fast it computes and moves, and what its links carry."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoshard.errors import ClusterError

GIB = 1024**3
RATES = ("bf16", "fp16", "tf32", "fp32", "fp64")
KINDS = ("gpu", "cpu")
Table = tuple[tuple[float, float], ...]  # (size, seconds), sizes rising


@dataclass(frozen=True)
class Link:
    """seconds = latency + bytes / bandwidth, a message, each way.

    scatters: False where the transport carries out a reduce-scatter as an all-reduce, as gloo does (measured:
    8 MB over two hosts at 1 Gbit/s take 72 ms against the all-reduce's 70).
    """

    latency: float
    bandwidth: float
    scatters: bool = True

    def __post_init__(self) -> None:
        _in_range("latency", self.latency, 0, 10, "seconds")
        _in_range("bandwidth", self.bandwidth, 1e3, 1e14, "bytes a second")
        if not isinstance(self.scatters, bool):
            raise ClusterError(f"scatters: {self.scatters!r} is not legal; legal: true, false")


@dataclass(frozen=True)
class Device:
    """memory: bytes; 0 is not known. flops: operations a second by dtype, dense matmuls at their peak; tf32: of convolutions in fp32,
    where that is faster. bandwidth: of its
    memory, bytes a second. launch: seconds that a kernel takes at least. inside, across: links within a node and between
    nodes, a process; their latency is that of one hop. message: seconds that a collective takes before its first hop.
    interference, drag: what compute, and what a collective, loses of each second in which both are at work. skew: the share of
    compute by which the slowest process is behind at a collective. wake: seconds from asking for a collective until what carries it
    out has begun, which a link that is busy has anyway. kind: one of KINDS. tables: what `autoshard calibrate` measured, see
    `cost_model/kernels.py`. source: of the figures.
    """

    name: str
    memory: int
    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    inside: Link
    across: Link
    source: str = ""
    message: float = 0.0
    interference: float = 0.0
    drag: float = 0.0
    skew: float = 0.0
    wake: float = 0.0
    kind: str = "gpu"
    tables: Mapping[str, Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            if not isinstance(value := getattr(self, name), str):
                raise ClusterError(f"{name}: {value!r} is not legal; legal: a text")
        if self.memory != 0:
            _in_range("memory", self.memory, 1e6, 1e14, "bytes ('80GB' is a legal text for so many), or 0 where it is not known")
        _in_range("bandwidth", self.bandwidth, 1e6, 1e15, "bytes a second")
        _in_range("launch", self.launch, 0, 1, "seconds")
        _in_range("message", self.message, 0, 1, "seconds")
        _in_range("interference", self.interference, 0, 10, "seconds a second")
        _in_range("drag", self.drag, 0, 10, "seconds a second")
        _in_range("skew", self.skew, 0, 10, "seconds a second")
        _in_range("wake", self.wake, 0, 1, "seconds")
        if self.kind not in KINDS:
            raise ClusterError(f"kind: {self.kind!r} is not legal; legal: {', '.join(KINDS)}")
        if not self.flops:
            raise ClusterError(f"flops: {{}} is not legal; legal: operations a second of one or more of {', '.join(RATES)}")
        for dtype, rate in self.flops.items():
            _in_range(f"flops.{dtype}", rate, 1e6, 1e18, "operations a second")
        for name, table in self.tables.items():
            _check_table(name, table)

    @property
    def is_cpu(self) -> bool:
        """Whether processors compute, whatever the device is called."""
        return self.kind == "cpu"


def _in_range(name: str, value: float, low: float, high: float, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ClusterError(f"{name}: {value!r} is not legal; legal: {low:g} to {high:g} {unit}")


def _check_table(name: str, table: Table) -> None:
    sizes = [size for size, _ in table]
    if not table or not all(a < b for a, b in itertools.pairwise([0, *sizes, math.inf])):
        raise ClusterError(f"tables.{name}: sizes {sizes} are not legal; legal: one or more, above 0 and each above the last")
    for _, seconds in table:
        _in_range(f"tables.{name}", seconds, 1e-12, 1e4, "seconds")
    for (_, before), (_, seconds) in itertools.pairwise(table):
        if seconds < before:
            raise ClusterError(f"tables.{name}: {seconds!r} after {before!r} is not legal; legal: seconds that do not fall as sizes rise")


def _gpu(
    name: str, gib: float, tflops: Mapping[str, float], tb_s: float, nv_gb_s: float, net_gb_s: float, source: str
) -> Device:
    """tflops: dense. nv_gb_s, net_gb_s: gigabytes a second each way, to the node's others and to the network."""
    inside = Link(2.5e-6 if nv_gb_s > 100 else 6e-6, nv_gb_s * 1e9)
    flops = {dtype: rate * 1e12 for dtype, rate in tflops.items()}
    return Device(name, int(gib * GIB), flops, tb_s * 1e12, 4e-6, inside, Link(10e-6, net_gb_s * 1e9), source, 12e-6)


# Dense rates (without sparsity), memory and links from the vendors' data sheets, named in `source`. fp32 is what torch's
# matmuls do by default, without TF32, to which its convolutions round (torch.backends.cudnn.allow_tf32). Latencies lie between those of the protocols that NCCL chooses among (its own tuning model
# has 1.9 and 3.4 us a hop over NVLink, 4 and 14 over a network, 12 before the first); a launch is typical of CUDA. Across: 400 Gbit/s a
# GPU where such nodes are sold with it (DGX H100), 200 for A100, 100 for the others. Measure yours by
# `autoshard calibrate`. "cpu" is one core with gloo over 1 Gbit/s, in round figures; what compute loses beside such a link's bytes
# is in bench/results/beside.md; skew and wake are as `autoshard calibrate` found them on two cores.
_PRESETS = (
    _gpu("h100", 80, {"bf16": 989, "fp16": 989, "fp32": 67, "tf32": 494.5}, 3.35, 450, 50, "NVIDIA H100 data sheet, SXM"),
    _gpu("h100-pcie", 80, {"bf16": 756, "fp16": 756, "fp32": 51, "tf32": 378}, 2.0, 64, 50, "NVIDIA H100 data sheet, PCIe"),
    _gpu("h200", 141, {"bf16": 989, "fp16": 989, "fp32": 67, "tf32": 494.5}, 4.8, 450, 50, "NVIDIA H200 data sheet, SXM"),
    _gpu("b200", 180, {"bf16": 2250, "fp16": 2250, "fp32": 75, "tf32": 1125}, 7.7, 900, 50, "NVIDIA HGX B200 data sheet, an eighth"),
    _gpu("a100", 80, {"bf16": 312, "fp16": 312, "fp32": 19.5, "tf32": 156}, 2.039, 300, 25, "NVIDIA A100 data sheet, 80 GB SXM"),
    _gpu("a100-40", 40, {"bf16": 312, "fp16": 312, "fp32": 19.5, "tf32": 156}, 1.555, 300, 25, "NVIDIA A100 data sheet, 40 GB SXM"),
    _gpu("a100-pcie", 80, {"bf16": 312, "fp16": 312, "fp32": 19.5, "tf32": 156}, 1.935, 32, 25, "NVIDIA A100 data sheet, 80 GB PCIe"),
    _gpu("v100", 32, {"fp16": 125, "fp32": 15.7}, 0.9, 150, 12.5, "NVIDIA V100 data sheet, SXM2"),
    _gpu("v100-pcie", 32, {"fp16": 112, "fp32": 14}, 0.9, 16, 12.5, "NVIDIA V100 data sheet, PCIe"),
    _gpu("l4", 24, {"bf16": 121, "fp16": 121, "fp32": 30.3, "tf32": 60}, 0.3, 32, 12.5, "NVIDIA L4 data sheet"),
    _gpu("rtx4090", 24, {"bf16": 165.2, "fp16": 165.2, "fp32": 82.6, "tf32": 82.6}, 1.008, 32, 12.5, "NVIDIA Ada whitepaper"),
    _gpu("mi300x", 192, {"bf16": 1307.4, "fp16": 1307.4, "fp32": 163.4}, 5.3, 448, 50, "AMD Instinct MI300X data sheet"),
    Device(
        "cpu", 0, {"fp32": 60e9, "bf16": 30e9}, 10e9, 5e-6, Link(200e-6, 2e9, False), Link(500e-6, 125e6, False), "round figures",
        message=300e-6, interference=0.2, skew=0.03, wake=500e-6, kind="cpu",
    ),
)
DEVICES = {device.name: device for device in _PRESETS}


def device_named_like(name: str, memory: int) -> Device:
    """The preset whose name is among the words of what a driver calls the device, such as "NVIDIA H100 80GB HBM3", with this memory.

    A device that no preset names keeps its own name, and the figures of the slowest GPU that has one stand for its: see
    `is_known`.
    """
    words = _words(name)
    fitting = [d for d in DEVICES.values() if words.issuperset(d.name.split("-"))]
    if not fitting:
        return replace(DEVICES["l4"], name=name, memory=memory, source="")
    return replace(max(fitting, key=lambda d: (len(d.name), -abs(d.memory - memory))), memory=memory)


def is_known(device: Device) -> bool:
    """False if the figures are another device's."""
    return bool(device.source)


def _words(name: str) -> set[str]:
    """Of a device's name: each, of "40GB" the number, and each two that follow each other as one, as of "RTX 4090"."""
    found = [word.removesuffix("gb") for word in re.findall("[a-z0-9]+", name.lower())]
    return {*found, *map("".join, itertools.pairwise(found))}
