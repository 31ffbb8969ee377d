"""`autoshard::block`: a block of a model that was compiled once and is called many times, as one op of the graph.

[Note: Blocks as ops] A model's repeated blocks have the same graph. Each such graph is differentiated, partitioned and
compiled once; what calls it is `block`, whose gradient is `block_backward`. So the graph around them, on which
communication is planned, stays small, and compiling takes as long for 80 blocks as for two. `block` gives the block's
own results and behind them what its backward needs; what of that is an input of the block is not among its results,
so that a gathered parameter can still be dropped and gathered again.

[Note: Repeated blocks] `repeat_block` is a block's forward once more, for backward: what a block gave that was not saved. It draws the
numbers that the first call drew, since it begins with the states of generators that `random_state` took in front of that call, the
processor's and the GPU's. So it runs the same code, whatever that draws, and gives the same bits.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from autoshard.ops.part import Making


@dataclass(frozen=True)
class Value:
    """Where backward finds a tensor or a size. kind: an input tensor or an output of the block, one of its sizes, or
    dimension `dim` of a saved tensor or of a tangent."""

    kind: Literal["input", "output", "size", "saved", "tangent"]
    index: int
    dim: int = -1


@dataclass(frozen=True)
class Length:
    """A size that backward takes: `compute` of what is found at these places, itself if it is one of them."""

    places: tuple[Value, ...]
    compute: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Block:
    """A block that was compiled.

    forward(tensors and sizes in the order of `inputs`) gives `outputs`; the first `results` are the block's own.
    backward(sizes, saved, tangents) gives one gradient for each of `gradients`, positions among the input tensors; a tangent may be None.
    `sizes` and `saved` say where its arguments come from, `tangents` of which results. None: never differentiated.
    outputs: fake tensors, as are `gradient_examples`. repeats: whether forward is known to give the same if it is called again with
    the same random states. makings: of those outputs that are made of input tensors and constants alone; None of others.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Tensor, ...]
    results: int
    forward: Callable[[list[Any]], Sequence[Tensor]]
    backward: Callable[[list[Any]], Sequence[Tensor]] | None = None
    sizes: tuple[Length, ...] = ()
    saved: tuple[Value, ...] = ()
    tangents: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    gradient_examples: tuple[Tensor, ...] = field(default=())
    repeats: bool = True
    makings: tuple[Making | None, ...] = ()


_PROCESSOR_STATE, _CUDA_STATE = torch.get_rng_state().numel(), 16  # bytes; of CUDA's a seed and an offset
_blocks: weakref.WeakValueDictionary[str, Block] = weakref.WeakValueDictionary()
_keys: weakref.WeakKeyDictionary[Block, str] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def register(name: str, block: Block) -> str:
    """Makes a block known, for as long as somebody holds it; the key that graphs name it by, always the same. Never an older block's:
    its code may hold only for the sizes that another trace assumed."""
    if block not in _keys:
        _keys[block] = f"{name}.{next(_numbers)}"
        _blocks[_keys[block]] = block
    return _keys[block]


def block_named(key: str) -> Block:
    """The block that a graph names by this key."""
    return _blocks[key]


def run_block(tensors: Sequence[Tensor], sizes: Sequence[int], key: str, call: int) -> list[Tensor]:
    """What the block of this key computes from its input tensors and sizes, and what its backward needs of it.
    call: another number for each, since two calls with the same inputs may draw other random numbers. Tensors that are none of
    its inputs are not looked at."""
    made = _blocks[key]
    given = {"input": tensors, "size": sizes}
    return list(made.forward([given[v.kind][v.index] for v in made.inputs]))


def take_random_state(tensors: Sequence[Tensor], call: int) -> Tensor:
    """The states of the generators of the processor and of these tensors' GPUs, as bytes. call: another number for each block's."""
    return torch.cat([torch.get_rng_state(), *map(torch.cuda.get_rng_state, _gpus(tensors))])


def repeat(tensors: Sequence[Tensor], sizes: Sequence[int], key: str, state: Tensor) -> list[Tensor]:
    """The results of the block of this key once more, beginning with this random state."""
    gpus = _gpus(tensors)
    processor, *others = state.split([_PROCESSOR_STATE, *[_CUDA_STATE] * len(gpus)])
    with torch.random.fork_rng(gpus):
        torch.set_rng_state(processor)
        for gpu, other in zip(gpus, others):
            torch.cuda.set_rng_state(other, gpu)
        return run_block(tensors, sizes, key, 0)[: _blocks[key].results]


def _gpus(tensors: Sequence[Tensor]) -> list[torch.device]:
    """Whose generators a block may draw from, beside the processor's."""
    return list(dict.fromkeys(t.device for t in tensors if t.device.type == "cuda"))


def run_backward(
    saved: Sequence[Tensor], tangents: Sequence[Tensor | None], sizes: Sequence[int], key: str
) -> list[Tensor]:
    """The gradients of a block's inputs, those that it has. tangents: None of results that nobody differentiates."""
    run = _blocks[key].backward
    assert run is not None
    return list(run([*sizes, *saved, *tangents]))


block = torch.library.custom_op("autoshard::block", run_block, mutates_args=())
block_backward = torch.library.custom_op("autoshard::block_backward", run_backward, mutates_args=())
random_state = torch.library.custom_op("autoshard::random_state", take_random_state, mutates_args=())
repeat_block = torch.library.custom_op("autoshard::repeat_block", repeat, mutates_args=())

# Graphs that are run op by op call these instead: torch's dispatcher takes longer than some blocks do.
DIRECT: dict[Any, Callable[..., Any]] = {
    torch.ops.autoshard.block.default: run_block,
    torch.ops.autoshard.block_backward.default: run_backward,
    torch.ops.autoshard.random_state.default: take_random_state,
    torch.ops.autoshard.repeat_block.default: repeat,
}


@block.register_fake
def _(tensors: Sequence[Tensor], sizes: Sequence[int], key: str, call: int) -> list[Tensor]:
    return [_like(t) for t in _blocks[key].outputs]


@block_backward.register_fake
def _(saved: Sequence[Tensor], tangents: Sequence[Tensor | None], sizes: Sequence[int], key: str) -> list[Tensor]:
    return [_like(t) for t in _blocks[key].gradient_examples]


@random_state.register_fake
def _(tensors: Sequence[Tensor], call: int) -> Tensor:
    return torch.empty(_PROCESSOR_STATE + _CUDA_STATE * len(_gpus(tensors)), dtype=torch.uint8)


@repeat_block.register_fake
def _(tensors: Sequence[Tensor], sizes: Sequence[int], key: str, state: Tensor) -> list[Tensor]:
    made = _blocks[key]
    return [_like(t) for t in made.outputs[: made.results]]


def _like(example: Tensor) -> Tensor:
    return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.sizes, ctx.key, _ = inputs
    made = _blocks[ctx.key]
    ctx.count = len(tensors)
    given = {"input": tensors, "output": output}
    ctx.save_for_backward(*(given[v.kind][v.index] for v in made.saved))
    ctx.mark_non_differentiable(*(t for i, t in enumerate(output) if i not in made.tangents))


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    made, saved = _blocks[ctx.key], ctx.saved_tensors
    tangents = [grads[i].contiguous() for i in made.tangents]
    sources = {"saved": saved, "tangent": tangents}

    def size(place: Value) -> Any:
        return ctx.sizes[place.index] if place.kind == "size" else sources[place.kind][place.index].shape[place.dim]

    sizes = [length.compute(*map(size, length.places)) for length in made.sizes]
    found = torch.ops.autoshard.block_backward(saved, tangents, sizes, ctx.key)
    out: list[Tensor | None] = [None] * ctx.count
    for position, gradient in zip(made.gradients, found):
        out[position] = gradient
    return out, None if ctx.sizes else [], None, None  # torch takes an empty list for one of tensors


block.register_autograd(_backward, setup_context=_save)
