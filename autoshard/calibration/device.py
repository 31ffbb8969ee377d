"""The device that is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from autoshard.cost_model.cluster import measured_by
from autoshard.cost_model.hardware import DEVICES, Device, Table, device_named_like
from autoshard.cost_model.kernels import passing
from autoshard.errors import ConfigError
from autoshard.runtime import launched
from autoshard.units import counted


def device_here() -> torch.device:
    """The launcher's choice of this host's GPUs, or the first; the CPU where there is none. ConfigError if it has fewer than that."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, count = launched.said("LOCAL_RANK") or 0, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"environment: LOCAL_RANK is {index}, and this host has {counted(count, 'GPU', 'GPUs')}; legal: one process a GPU")
    return torch.device("cuda", index)


def measured_device(device: torch.device, tables: Mapping[str, Table]) -> Device:
    """What the cost model is told of it. Of a GPU tables may still be missing."""
    source = measured_by(torch.__version__)
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return replace(device_named_like(found.name, found.total_memory), tables=tables, source=source)
    flops = {name: tables[f"matmul.{name}"][-1] for name in ("fp32", "bf16")}
    size, seconds = tables["pointwise"][-1]
    size *= 12 / passing(8, 4, device.type == "cpu")  # as operations count what they read and write
    rates = {name: point[0] / point[1] for name, point in flops.items()}
    return replace(DEVICES["cpu"], flops=rates, bandwidth=size / seconds, launch=2e-6, tables=tables, source=source)
