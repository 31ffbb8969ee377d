"""Optimizers that exist when a model is sharded, and those that cannot step on shards."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Adafactor, Optimizer

from autoshard.errors import UnsupportedError
from autoshard.heap import alive, collect
from autoshard.kernels.multi_tensor import HALVES
from autoshard.runtime import factored, fused_step
from autoshard.runtime.buffers import take_rank_0_s
from autoshard.runtime.loaded import like_parameter
from autoshard.runtime.local_step import ELEMENTWISE, can_step_locally
from autoshard.runtime.lost_peers import naming_lost_peers

# Seen on torch 2.11 and 2.13: Adafactor, Rprop and Adagrad raise inside DTensor, Muon skips DTensors without a word.
_NOT_ON_DTENSORS = ("Adafactor", "Rprop", "Adagrad", "Muon", "LBFGS", "SparseAdam")


def holding(names: dict[int, str]) -> list[Optimizer]:
    """All optimizers in this process that hold one of these parameters (names by id), in an order that does not
    depend on the garbage collector, as those do not that are found: processes are compared by them. Where there are none it need
    not collect, which takes a while."""
    if found := [weakref.ref(optimizer) for optimizer in _holding(names)]:
        collect(found)
    there = [optimizer for one in found if (optimizer := one()) is not None]
    return sorted(there, key=lambda o: json.dumps(describe(o, names)))


def _holding(names: dict[int, str]) -> list[Optimizer]:
    return [o for o in alive(Optimizer) if any(id(p) in names for g in o.param_groups for p in g["params"])]


def describe(optimizer: Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """What must be equal on all processes."""
    return {
        "class": type(optimizer).__name__,
        "groups": [[names.get(id(p), "?") for p in g["params"]] for g in optimizer.param_groups],
        "state": sorted((names.get(id(p), "?"), _keys(state)) for p, state in optimizer.state.items() if state),
    }


def _keys(state: Any) -> str:
    """A user's own may keep something else than a dict."""
    return " ".join(sorted(map(str, state))) if isinstance(state, dict) else ""


def options_of(optimizer: Optimizer) -> dict[str, Any]:
    """What it steps by, which must be equal on all processes too: its groups' options, by name, as far as they can be said, and how many
    steps it counts, of which a state that one process alone loaded has others."""
    kind, found = type(optimizer).__name__, dict[str, Any]()
    for i, group in enumerate(optimizer.param_groups):
        found |= {f"{key} of group {i} of {kind}": _said(value) for key, value in group.items() if key != "params"}
        found[f"the count of steps of group {i} of {kind}"] = _said(_count_of_steps(optimizer, group["params"]))
    return found


def _count_of_steps(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> Any:
    """Of the first of them that has one."""
    states = (optimizer.state[p] for p in parameters if p in optimizer.state)
    return next((state["step"] for state in states if isinstance(state, dict) and "step" in state), None)


def _said(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_said(each) for each in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return value if isinstance(value, (int, float, str)) or value is None else type(value).__name__


def states_of(optimizer: Optimizer) -> int:
    """How many numbers of the parameter's size it will keep for each parameter, judged by its class; masters and what goes with
    them are of twice that size."""
    halves = any(p.dtype in HALVES for g in optimizer.param_groups for p in g["params"])
    count = _states_of(optimizer)
    return 2 * (count + 1) if halves and getattr(optimizer, "master_weights", False) else count


def _states_of(optimizer: Optimizer) -> int:
    kind = type(optimizer).__name__.lower()
    chosen = {key: any(g.get(key) for g in optimizer.param_groups) for key in ("momentum", "amsgrad", "centered")}
    if kind == "adafactor":
        return int(any(p.ndim > 2 for g in optimizer.param_groups for p in g["params"]))  # of matrices next to nothing
    if "sgd" in kind and kind != "asgd":
        return int(chosen["momentum"])
    if kind == "rmsprop":
        return 1 + chosen["momentum"] + chosen["centered"]
    return 1 if "lion" in kind or kind in ("adagrad", "asgd", "muon") else 2 + chosen["amsgrad"]


def stands_still(optimizer: Optimizer) -> bool:
    """True of a step that changes no parameter: torch.distributed.checkpoint takes one to make state to load into. A rate
    that lies on a GPU is not asked for, which would wait for it in each step; that one's lies on the CPU."""
    return all(_is_zero(group.get("lr")) for group in optimizer.param_groups)


def _is_zero(rate: Any) -> bool:
    """Not None, with which an optimizer chooses its own."""
    return rate is not None and not (isinstance(rate, Tensor) and rate.device.type != "cpu") and float(rate) == 0.0


def check_steps_on_shards(optimizer: Optimizer, closure: bool = False) -> None:
    """Refuses by name what fails, or does nothing, on DTensors and cannot step on rows."""
    if what := unable(optimizer, closure):
        itself = type(optimizer) in (*ELEMENTWISE, Adafactor)
        rows = ", or this one without hooks, closure or `differentiable`" if itself else ""
        raise UnsupportedError(
            f"optimizer {what} cannot step on sharded parameters; legal: those of autoshard.optim (Adafactor is one), those of torch.optim "
            f"that are elementwise ({', '.join(sorted(c.__name__ for c in ELEMENTWISE))}){rows}, or zero=0"
        )


def unable(optimizer: Optimizer, closure: bool = False) -> str:
    """What an optimizer is called that cannot step on rows; "" of one that can."""
    if fused_step.steps_itself(optimizer) or (not closure and (can_step_locally(optimizer) or factored.can_take_over(optimizer))):
        return ""
    kind = type(optimizer).__name__
    quantized = "8bit" in kind or "4bit" in kind or type(optimizer).__module__.startswith("bitsandbytes")
    if kind == "SGD" and any(g.get("fused") for g in optimizer.param_groups):
        return "SGD(fused=True)"
    return kind if kind in _NOT_ON_DTENSORS or quantized else ""


def first_unable(optimizers: Iterable[Optimizer]) -> str:
    """The first of these that cannot step on rows, by name; "" where all can."""
    return next(filter(None, map(unable, optimizers)), "")


class Repointer:
    """Points optimizers at the shards, parameter by parameter; their state becomes rank 0's, as parameters do."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._slots: dict[int, list[tuple[Optimizer, list[Any], int]]] = {}
        for optimizer in optimizers:
            fused_step.forget(optimizer)
            for group in optimizer.param_groups:
                for i, p in enumerate(group["params"]):
                    self._slots.setdefault(id(p), []).append((optimizer, group["params"], i))

    def replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """`new` takes the place of `old` in every optimizer. The state stays the same dict, which a step may have begun with: LBFGS
        calls its closure later. A collective."""
        for optimizer, params, i in self._slots.get(id(old), ()):
            params[i] = new
            if old in optimizer.state:
                state = optimizer.state.pop(old)
                state.update({k: _rank_0_s(k, state[k], old, new) for k in sorted(state, key=str)})  # some may have made it otherwise
                optimizer.state[new] = state


@naming_lost_peers
def _rank_0_s(key: str, value: Any, old: nn.Parameter, new: nn.Parameter) -> Any:
    """State of `old` on rank 0, lying as `new` does if it is of its size."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(new.data, DTensor) and like_parameter(key, value, old):
        return distribute_tensor(value, new.data.device_mesh, new.data.placements)
    sent = value.to(new.device)  # steps are counted on the CPU, from which NCCL does not send
    take_rank_0_s(sent)
    return value.copy_(sent)
