"""From a graph to something that runs: AOTAutograd, our passes around the partition, then Inductor or eager."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from functorch.compile import aot_module_simplified, min_cut_rematerialization_partition
from torch.fx import GraphModule

from autoshard import torch_internals
from autoshard.console import Phases
from autoshard.errors import AutoshardError, PeerLostError
from autoshard.passes import graphs
from autoshard.passes.base import Context, Phase
from autoshard.passes.manager import PassManager
from autoshard.version import __version__


@dataclass(frozen=True)
class Compilation:
    """One graph to compile: the passes and what they need to know, and whether Inductor generates code."""

    manager: PassManager
    context: Context
    inductor: bool
    phases: Phases

    def compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A callable with the graph's signature; its backward hangs on what it returns."""
        gm = self.manager.run("traced", gm, self.context)
        with torch_internals.without_autograd_cache():
            run = self._inductor(gm, inputs) if self.inductor else self._eager(gm, inputs)
        return _naming_lost_peers(run)

    def partition(self, joint: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """The joint passes, then torch's partitioner, which follows the tags that they left."""
        joint = self.manager.run("joint", joint, self.context)
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        torch_internals.put_random_states_first(forward, backward)
        graphs.fill_examples(forward)
        graphs.fill_examples(backward)
        return forward, backward

    def _split(self, gm: GraphModule, phase: Phase) -> GraphModule:
        context = replace(self.context, phase=phase)
        if phase == "inference":
            gm = self.manager.run("joint", gm, context)
        return self.manager.run("split", gm, context)

    def _eager(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def compiler(phase: Phase) -> Callable[..., Any]:
            def compile_one(graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
                with self.phases.phase(phase, _size(graph)):
                    return _boxed(self._split(graph, phase))

            return compile_one

        return aot_module_simplified(  # type: ignore[no-any-return]
            gm,
            inputs,
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            partition_fn=self.partition,
            keep_inference_input_mutations=True,
        )

    def _inductor(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def inner(graph: GraphModule, graph_inputs: Sequence[Any], **kwargs: Any) -> Any:
            phase: Phase = "forward"
            if kwargs.get("is_inference"):
                phase = "inference"
            elif kwargs.get("is_backward"):
                phase = "backward"
            with self.phases.phase(phase, _size(graph)):
                graph = self._split(graph, phase)
                compiled = torch_internals.inner_inductor(graph, graph_inputs, **kwargs)
            return torch_internals.wrap_compiled(compiled, _naming_lost_peers)

        identity = f"autoshard {__version__} {self.context.plan.hash} {self.manager.spec}"
        patches = {
            "custom_partitioner_fn": Partitioner(self.partition, identity),
            # Inductor would undo the planned order of collectives.
            "reorder_for_peak_memory": False,
            "reorder_for_locality": False,
        }
        return torch_internals.compile_with_inductor(gm, inputs, inner, patches)


def _size(gm: GraphModule) -> str:
    return f"{len(gm.graph.nodes)} nodes"


class Partitioner(torch_internals.CustomPartitionerFn):  # type: ignore[misc]
    """Our partition in the form that Inductor takes; `identity` keeps caches of other plans apart."""

    def __init__(self, partition: Callable[..., Any], identity: str) -> None:
        self._partition, self._identity = partition, identity

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """The forward and the backward graph of a joint one."""
        return self._partition(gm, joint_inputs, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Partitioner:
        return self  # Inductor copies its configuration when it writes debug output

    def __reduce__(self) -> Any:
        return str, (self._identity,)  # and pickles it into its cache's keys

    def uuid(self) -> str:
        """What a cache entry of Inductor's belongs to."""
        return self._identity


def _boxed(gm: GraphModule) -> Callable[[list[Any]], Any]:
    """Runs a graph op by op, frees its inputs when they were last used, and names peers that are lost."""

    def run(args: list[Any]) -> Any:
        return torch.fx.Interpreter(gm).boxed_run(args)

    guarded = _naming_lost_peers(run)
    guarded._boxed_call = True  # type: ignore[attr-defined]
    return guarded


_SIGNS_OF_LOSS = ("gloo", "nccl", "connection closed", "connection reset", "timed out waiting")


def _naming_lost_peers(run: Callable[..., Any]) -> Callable[..., Any]:
    """Turns the transport's error into PeerLostError, which says what it means for the job."""

    @functools.wraps(run)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except AutoshardError:
            raise
        except RuntimeError as error:
            if any(sign in str(error).lower() for sign in _SIGNS_OF_LOSS):
                raise PeerLostError(
                    f"rank {torch.distributed.get_rank()} lost another process of the job in a collective "
                    f"(it died, or did not come within the timeout); look at its own log. ({error})"
                ) from error
            raise

    return guarded


def has_compiler() -> bool:
    """True if Inductor will find a C++ compiler."""
    return any(shutil.which(c) for c in (os.environ.get("CXX", "g++"), "g++", "clang++", "c++"))
