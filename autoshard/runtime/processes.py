"""The processes of the job: starting the group, the meshes, and ending well."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import os
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import torch_internals
from autoshard.errors import ConfigError, UnsupportedError
from autoshard.runtime import launched
from autoshard.runtime.agreement import Agreement
from autoshard.runtime.presence import Patience, job_store, say_who
from autoshard.runtime.waiting import Answering, wait_until

_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_QUIET_SECONDS = 0.2  # see [Note: Ending well]
_END_SECONDS = 60.0  # at most, for which a process that is done waits for others


@dataclass(frozen=True)
class World:
    """Who this process is in the job."""

    rank: int
    size: int
    device_type: str

    def agreement(self, topic: str, what: str, patience: Patience) -> Agreement:
        """One of all processes of the job, which come to `what`. topic: the same on all of them and new for each."""
        return Agreement(job_store(""), self.rank, self.size, topic, what, patience)


def _launched() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_size() -> int:
    """How many processes the job has, as far as this one can tell."""
    if dist.is_initialized():
        return dist.get_world_size()
    return (launched.said("WORLD_SIZE", 1) if _launched() else None) or 1


def launched_rank() -> int:
    """Which of them this one is, before it joined them too."""
    if dist.is_initialized():
        return dist.get_rank()
    return (launched.said("RANK") if _launched() else None) or 0


def on_one_machine() -> bool:
    """Whether all processes of the job are on this machine, as far as the launcher says."""
    return said_of_this_node() == launched_size()


def said_of_this_node() -> int | None:
    """How many of the job's processes are on this machine, if the launcher says it."""
    return launched.said("LOCAL_WORLD_SIZE", 1)


def per_node(hosts: Sequence[str]) -> int:
    """How many ranks in a row each machine has, as far as the launcher says, or else by the ranks' hosts; one where machines have
    different numbers of them, so that all that goes between ranks is taken to go between machines."""
    said = said_of_this_node()
    counts = {len(list(run)) for _, run in itertools.groupby(hosts)} if said is None else {min(said, len(hosts))}
    count = counts.pop() if len(counts) == 1 else 1
    return count if len(hosts) % count == 0 else 1


def join(device: torch.device, patience: Patience) -> World:
    """This process's place in the job; starts a process group if a launcher's variables are there and no
    group is. NCCL for models on GPUs, with gloo for what they keep on CPUs, and gloo for models on CPUs. DisagreementError, by
    name, if some process does not come to it; UnsupportedError if the group that is there carries GPUs' tensors otherwise;
    ConfigError if some of the launcher's variables are there and others are not.
    """
    if dist.is_initialized():
        end_well()
        _refuse_slow_transport(device)
        return _in_the_group(device)
    _refuse_half_a_launch()
    if launched_size() > 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL takes the one that is current
        timeout = timedelta(seconds=patience.timeout)
        store = _meet(patience)
        store.set_timeout(timeout)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout, store=store, rank=launched_rank(), world_size=launched_size())
        end_well()
    return _in_the_group(device) if dist.is_initialized() else World(0, 1, device.type)


def _in_the_group(device: torch.device) -> World:
    say_who(job_store(""), dist.get_rank())
    return World(dist.get_rank(), dist.get_world_size(), device.type)


def _refuse_half_a_launch() -> None:
    """Without its rank each process would train alone, in silence."""
    size = os.environ.get("WORLD_SIZE", "1")
    missing = [name for name in _LAUNCHERS if name not in os.environ]
    if size != "1" and missing:
        raise ConfigError(
            f"environment: WORLD_SIZE is {size!r}, and {missing[0]} is not set; legal: all of {', '.join(_LAUNCHERS)}, as torchrun "
            "sets them, or a process group of your own before the first call"
        )


def _refuse_slow_transport(device: torch.device) -> None:
    """Of gloo, which would copy each message through the host, no plan for GPUs knows."""
    if device.type == "cuda" and dist.get_world_size() > 1 and (found := torch_internals.transport_of("cuda")) in ("", "gloo"):
        raise UnsupportedError(
            f"process group: tensors on GPUs go by {found or 'nothing'}; legal: init_process_group('nccl'), or none, and autoshard "
            "starts one"
        )


def _meet(patience: Patience) -> Any:
    """Waits until every process wants the group: torch, which would wait too, cannot say for whom."""
    store, rank, size, number = patience.wait_for_store(), launched_rank(), launched_size(), next(_count_groups)
    Agreement(store, rank, size, f"job{number}", "the job", patience).reach({}, lambda _: "")
    return dist.PrefixStore(f"group{number}", store)  # type: ignore[attr-defined]  # where no address is of one that was destroyed


_count_groups = itertools.count()


def build_mesh(device_type: str, axes: tuple[tuple[str, int], ...], timeout: float | None = None) -> DeviceMesh:
    """The mesh of all processes with the plan's axes, outermost first. timeout: seconds in which its collectives over gloo must end, if
    none was said before. See [Note: gloo in turn].

    [Note: Shared groups] The first mesh with these axes makes process groups, which stay as long as torch's own; a later model's is of
    the same ones. Several models' collectives on one group pair by their order alone, as one model's do; they are begun in the order of
    the program. Processes that call models in different orders would, with a group for each model, wait for each other for ever. What is
    sent from each to each has the timeout that its group was made with, which nothing changes later; so the first that was said is that
    of all groups.
    """
    sizes, names = tuple(size for _, size in axes), tuple(name for name, _ in axes)
    assert dist.get_world_size() == math.prod(sizes), "check_plan_fits comes first"
    if timeout is not None:
        _timeouts.setdefault(dist.group.WORLD, timedelta(seconds=timeout))
    if dist.group.WORLD not in _made:  # there may have been others before
        torch_internals.forget_meshes()
    made, ranks = _made.setdefault(dist.group.WORLD, {}), torch.arange(math.prod(sizes), device="cpu").view(sizes)
    if (device_type, axes) in made:
        groups = [torch_internals.group_named(name) for name in made[device_type, axes]]
    elif device_type == "cpu" and torch_internals.transport_of("cpu") == "gloo":
        groups = _groups_in_turn(ranks)
    else:
        groups = init_device_mesh(device_type, sizes, mesh_dim_names=names).get_all_groups()
    made[device_type, axes] = tuple(group.group_name for group in groups)
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)


def _groups_in_turn(ranks: Tensor) -> list[dist.ProcessGroup]:
    """Those of this process along each axis, and one of everyone, if there was none."""
    timeout, backend = _timeouts.get(dist.group.WORLD), torch_internals.gloo_in_turn()
    along = [ranks.movedim(axis, -1).reshape(-1, size).tolist() for axis, size in enumerate(ranks.shape)]
    groups = [dist.new_subgroups_by_enumeration(lines, timeout, backend)[0] for lines in along]
    if dist.group.WORLD not in _in_turn:
        ours = groups[0] if len(groups) == 1 else dist.new_group(timeout=timeout, backend=backend)
        _in_turn[dist.group.WORLD] = ours.group_name
    return groups


# By torch's group of all processes: the name of our own one, those of the groups of meshes, and the timeout that was said first. Nothing
# here keeps a group: see [Note: Ending well].
_in_turn: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_made: weakref.WeakKeyDictionary[Any, dict[tuple[str, tuple[tuple[str, int], ...]], tuple[str, ...]]] = weakref.WeakKeyDictionary()
_timeouts: weakref.WeakKeyDictionary[Any, timedelta] = weakref.WeakKeyDictionary()


def name_of_everyone() -> str:
    """The c10d name of the group of all processes; "" without one. Over gloo, once there is a mesh, not torch's own: see
    [Note: gloo in turn]."""
    if not dist.is_initialized():
        return ""
    everyone: Any = dist.group.WORLD
    return _in_turn.get(everyone, everyone.group_name)


_ending = False


def end_well() -> None:
    """Arranges, once, that a job that finished also exits with 0.

    [Note: Ending well] gloo's worker threads may drop their last work, tensors with Python objects, while
    Python finalises, and the process then aborts (1 exit of 4 on torch 2.11, 1 of 20 on 2.13). Waiting for all
    processes, then leaving the interpreter to those threads for a moment before and after the group is
    destroyed, avoids it. After an error there is nobody to wait for.
    """
    global _ending
    if not _ending:
        _ending = True
        atexit.register(_end, os.getpid())


def _end(process: int) -> None:
    if os.getpid() != process:  # a copy of it, of which the others know nothing
        return
    if not dist.is_initialized():
        time.sleep(_QUIET_SECONDS)
        return
    store = Answering(job_store("autoshard/exit"), _END_SECONDS)
    if getattr(sys, "last_value", None) is not None:
        with contextlib.suppress(RuntimeError):  # the host of the store may be what is gone
            store.set("all", "")
        return
    _wait_for_everyone(store, dist.get_world_size())
    time.sleep(_QUIET_SECONDS)
    dist.destroy_process_group()
    time.sleep(_QUIET_SECONDS)


def _wait_for_everyone(store: Any, size: int, seconds: float = _END_SECONDS) -> None:
    """A barrier of `size` processes through the store, which one that is gone cannot hold up for longer than this. They are
    counted, and the last one says so, or the first that failed: if each looked for all, 1,000 would ask for a million keys at each look."""
    with contextlib.suppress(RuntimeError, TimeoutError):  # the host of the store may be gone: that too is an end
        if store.add("done", 1) == size:
            store.set("all", "")
        wait_until(lambda: bool(store.check(["all"])), seconds, late=lambda: None, failed=TimeoutError)
