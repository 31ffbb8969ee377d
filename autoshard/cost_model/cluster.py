"""Cluster: nodes of devices and the links between them, in Python and as a YAML file."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from autoshard.cache import cache_folder, readable
from autoshard.cost_model.collectives import COLLECTIVES, Group, is_table_name
from autoshard.cost_model.hardware import DEVICES, RATES, Device, Link
from autoshard.cost_model.kernels import BY_DTYPE, DTYPES, KERNELS, REACHED_BANDWIDTH, REACHED_FLOPS, is_table
from autoshard.errors import ClusterError, nearest
from autoshard.units import amount_of


@dataclass(frozen=True)
class Cluster:
    """nodes × processes a node, one device each, all of one kind."""

    nodes: int
    per_node: int
    device: Device

    def __post_init__(self) -> None:
        for name in ("nodes", "per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
                raise ClusterError(f"{name}: {value!r} is not legal; legal: a whole number from 1 to 1,000,000")

    @property
    def world(self) -> int:
        """Processes in all."""
        return self.nodes * self.per_node

    def group(self, size: int, stride: int = 1) -> Group:
        """Of `size` processes, every `stride`-th of the job's, which fill node after node. Of all such groups the one on the most
        nodes: that which begins at the latest place of a node."""
        latest = self.per_node - 1 - max(math.gcd(size * stride, self.per_node) - stride, 0)
        nodes = min(self.nodes, size, (latest + (size - 1) * stride) // self.per_node + 1)
        return Group(size, nodes, min(stride, self.per_node) if nodes > 1 else 1)

    def levels(self, size: int, node: int) -> tuple[Group, Group]:
        """Of `size` processes, `node` of them on each node: those that have the same place on their nodes, and a node's."""
        return self.group(size // node, node), self.group(node)

    def to_yaml(self) -> str:
        """The cluster as text that `from_yaml` reads, meant to be edited by people too."""
        data = asdict(self)
        data["device"]["flops"] = dict(self.device.flops)
        data["device"]["tables"] = {name: [list(p) for p in table] for name, table in self.device.tables.items()}
        return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)

    @staticmethod
    def from_yaml(text: str) -> Cluster:
        """Inverse of `to_yaml`. A device may be a preset's name, or a mapping that has one as `preset` and says what
        differs, of its links and flops too. ClusterError names what is not legal."""
        try:
            data = yaml.load(text, _Loader)  # noqa: S506 - a safe one
        except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:  # of scalars that are no numbers or dates, and of depth
            raise ClusterError(f"cluster: not YAML: {' '.join(str(error).split())}") from error
        data = _mapping("cluster", data, ("nodes", "per_node", "device"))
        if "device" not in data:
            raise ClusterError(f"cluster: device is missing; legal: a mapping, or one of {', '.join(DEVICES)}")
        return Cluster(data.get("nodes", 1), data.get("per_node", 1), _device(data["device"]))

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """The cluster in a file. ClusterError names the file, and what is not legal in it."""
        try:
            return Cluster.from_yaml(Path(path).read_text())
        except OSError as error:
            raise ClusterError(f"cluster: {str(path)!r} cannot be read ({error.strerror}); legal: a YAML file") from error
        except (ClusterError, UnicodeDecodeError) as error:
            raise ClusterError(f"{path}: {error}") from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Of two values of one key none is taken."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in keys.items() if count > 1]:
            raise yaml.MarkedYAMLError(problem=f"{twice[0]!r} stands there twice", problem_mark=node.start_mark)
        return node


_MEASURED = "measured by autoshard calibrate"
TABLES = 4  # what tables of kernels are counted in: one more when that changes, and those of before say something else


def measured_by(torch_version: str) -> str:
    """The source of a device that `autoshard calibrate` measured."""
    return f"{_MEASURED}, tables {TABLES}, torch {torch_version}"


def cache_file(device: str) -> Path:
    """Where `autoshard calibrate` leaves what it measured of a kind of device on this machine; of CPUs, with as many
    threads as this process has."""
    threads = f"-{torch.get_num_threads()}-threads" if device == "cpu" else ""
    return cache_folder() / f"{platform.node()}-{device}{threads}-{TABLES}.yaml"


def measured_here(name: str) -> Device:
    """The device of this name as it was measured on this machine; its preset where it was not, or where that is no file that may be
    read. ClusterError names what is not legal in it."""
    return as_measured(preset(name))


def as_measured(device: Device) -> Device:
    """The same of a device of any name."""
    file = cache_file(device.name)
    return Cluster.load(file).device if readable(file) else device


def with_rate(cluster: Cluster, rate: float) -> Cluster:
    """The cluster, where its slowest links carry so many bytes a second. Rounded to a power of the square root of two, so that
    jobs on the same machines make the same plans, though no two measurements are equal."""
    name = "across" if cluster.nodes > 1 else "inside"
    link = replace(getattr(cluster.device, name), bandwidth=_rounded(rate))
    return replace(cluster, device=replace(cluster.device, **{name: link}))


def with_processor(cluster: Cluster, flops: Mapping[str, float], bandwidth: float) -> Cluster:
    """The cluster, where matmuls of what lies in no cache reach so many operations a second, by dtype, and sums so many bytes: a step's
    kernels do too, so the peaks of which they reach a part are above these. Rounded as rates of links are."""
    peaks = {dtype: _rounded(rate) / REACHED_FLOPS for dtype, rate in flops.items()}
    peak = _rounded(bandwidth) / REACHED_BANDWIDTH
    device = replace(cluster.device, flops={**cluster.device.flops, **peaks}, bandwidth=peak)
    return replace(cluster, device=device)


def _rounded(rate: float) -> float:
    return float(2 ** (round(2 * math.log2(rate)) / 2))


def preset(name: Any) -> Device:
    """The device of this name."""
    if not isinstance(name, str) or name not in DEVICES:
        raise ClusterError(f"device: {name!r} is not known; {nearest(name, tuple(DEVICES))}")
    return DEVICES[name]


def _device(data: Any) -> Device:
    if isinstance(data, str):
        return preset(data)
    names = tuple(f.name for f in fields(Device))
    data = _mapping("device", data, ("preset", *names))
    base = preset(data.pop("preset")) if "preset" in data else None
    if base is None:
        data.setdefault("kind", "cpu" if data.get("name") == "cpu" else "gpu")
        missing = [f.name for f in fields(Device) if f.name not in data and f.default is MISSING and f.default_factory is MISSING]
        if missing:
            raise ClusterError(f"device: {missing[0]} is missing; legal: all of them, or `preset` and what differs")
    made = {name: _field(name, value, base) for name, value in data.items()}
    source = str(made.get("source", ""))
    if source.startswith(_MEASURED) and f"tables {TABLES}," not in source:
        raise ClusterError(f"device: {source!r} counts kernels in another way than this version; run autoshard calibrate again")
    return replace(base, **{**made, "flops": {**base.flops, **made.get("flops", {})}}) if base else Device(**made)


def _field(name: str, value: Any, base: Device | None) -> Any:
    if name in ("inside", "across"):
        return _link(name, value, getattr(base, name, None))
    if name == "flops":
        rates = _mapping(name, value, RATES)
        return {dtype: _number(rate) for dtype, rate in rates.items()}
    if name == "tables":
        tables = _mapping(name, value, None)
        return {key: _table(key, points) for key, points in tables.items()}
    if name == "memory" and isinstance(value, str) and (size := amount_of(value)) is not None:
        return size
    return value if name in ("name", "source", "kind") else _number(value)


def _link(name: str, value: Any, base: Link | None) -> Link:
    """base: what is not said of it is as of this one."""
    said = {key: _number(v) for key, v in _mapping(name, value, tuple(f.name for f in fields(Link))).items()}
    if base is None and (missing := [key for key in ("latency", "bandwidth") if key not in said]):
        raise ClusterError(f"{name}: {missing[0]} is missing; legal: latency and bandwidth, or a device with a `preset`")
    try:
        return replace(base, **said) if base else Link(**said)
    except ClusterError as error:
        raise ClusterError(f"{name}.{error}") from error


def _number(value: Any) -> Any:
    """YAML takes 1e-6, without a point, for a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _table(name: str, points: Any) -> tuple[tuple[float, float], ...]:
    if not isinstance(name, str) or not (is_table(name) or is_table_name(name)):
        kernels, products = ", ".join(sorted(KERNELS)), ", ".join(sorted(BY_DTYPE))
        sent = f"{', '.join(COLLECTIVES)}, with .issue or not, with @8 or @16/2"
        raise ClusterError(f"tables: {name!r} is not known; legal: {kernels}, {products} with .{', .'.join(DTYPES)}, {sent}")
    if not isinstance(points, list | tuple):
        raise ClusterError(f"tables.{name}: {points!r} is not legal; legal: a list of [size, seconds]")
    return tuple(_point(name, point) for point in points)


def _point(name: str, point: Any) -> tuple[float, float]:
    numbers = [_number(v) for v in point] if isinstance(point, list | tuple) else []
    if len(numbers) != 2 or any(isinstance(v, bool) or not isinstance(v, int | float) for v in numbers):
        raise ClusterError(f"tables.{name}: {point!r} is not legal; legal: [size, seconds]")
    try:
        return float(numbers[0]), float(numbers[1])
    except OverflowError as error:  # of a whole number, which YAML may have of any length
        digits = len(str(max(numbers, key=abs)))
        raise ClusterError(f"tables.{name}: a number of {digits} digits is not legal; legal: [size, seconds]") from error


def _mapping(name: str, value: Any, legal: tuple[str, ...] | None) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ClusterError(f"{name}: {value!r} is not legal; legal: a mapping")
    for key in value:
        if legal is not None and key not in legal:
            raise ClusterError(f"{name}: {key!r} is not known; legal: {', '.join(legal)}")
    return dict(value)
