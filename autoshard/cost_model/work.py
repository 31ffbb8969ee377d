"""What one operation does: floating-point operations, bytes read and written, and of which kind of kernel it is.

FLOPs of matmuls, convolutions and attention are torch's own counts (torch.utils.flop_counter), so they agree with its
FlopCounterMode. Everything else is counted by the bytes that it moves, and by how many elements it computes a hard
function of (exp, tanh, erf), draws or makes a mask, which bound such kernels on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tag, Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves

from autoshard import torch_internals
from autoshard.cost_model.program import Operation, is_collective
from autoshard.cost_model.sizes import Size, bytes_of, product, size_of

Kind = Literal["matmul", "convolution", "attention", "pointwise", "reduction", "lookup", "copy", "random", "masked", "pack", "pack_cast", "view", "other", "collective", "wait"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# How long they take, in thirds of gelu's time, whose table stands for all: so it is on x86, of torch's kernels and Inductor's. Some of
# torch's make several passes, or sum in float64.
_HARD = {
    **dict.fromkeys(_names("rsqrt pow"), 1),
    **dict.fromkeys(_names("exp expm1 sigmoid silu sin cos _softmax _log_softmax _log_softmax_backward_data"), 2),
    **dict.fromkeys(_names("erf gelu log log1p log2 softplus"), 3),
    **dict.fromkeys(_names("silu_backward gelu_backward"), 5),
    **dict.fromkeys(_names("native_batch_norm_backward"), 6),
    **dict.fromkeys(_names("tanh mish"), 7),
    **dict.fromkeys(_names("_safe_softmax native_batch_norm _native_batch_norm_legit_functional"), 12),
}
_GROUPED = _names("_grouped_mm grouped_mm_fallback grouped_mm_fallback_backward")  # the latter two are transformers', in fp32
_MATMULS = _names("mm addmm bmm baddbmm _scaled_mm") | _GROUPED
_LOOKUPS = _names("""
    embedding embedding_dense_backward look_up_rows reduce_rows index _unsafe_index _unsafe_masked_index gather scatter scatter_add index_put
    _unsafe_index_put
    _unsafe_masked_index_put_accumulate index_select nll_loss_forward nll_loss_backward
""")
# read of the first about as much as they give
_PICKS = _names("embedding look_up_rows index _unsafe_index _unsafe_masked_index gather index_select nll_loss_forward")
_REDUCTIONS = _names("""
    sum mean amax amin var_mean var any all max min cumsum _softmax _log_softmax _safe_softmax _softmax_backward_data
    _log_softmax_backward_data native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
    native_batch_norm native_batch_norm_backward _native_batch_norm_legit_functional native_group_norm
    native_group_norm_backward sum_rows
""")
_DRAWN = _names("inductor_random inductor_randint rand rand_like randn randn_like")  # of which code is generated
_RANDOM = _names("native_dropout bernoulli bernoulli_ rand rand_like randn randn_like randint multinomial")
_COPIES = _names("""
    clone cat copy copy_ _to_copy constant_pad_nd full zeros ones empty full_like new_zeros new_ones new_empty arange
    zeros_like ones_like iota scalar_tensor slice_scatter slice_backward select_backward as_strided_scatter stack
""")
_IN_ROWS = _names("clone cat copy copy_ _to_copy full zeros ones full_like zeros_like ones_like new_zeros new_ones arange iota")  # as fast as any kernel, where what is next to each other stays so
_MASKED = _names("native_dropout_backward")  # whose mask is of booleans, which become numbers first
_PACKS = _names("pack_shards unpack_full pack_grads keep_part sum_direct sum_swapped")  # ours, which go part by part


@dataclass(frozen=True)
class Work:
    """kind: which table of kernels tells its time. hard: elements of functions that are costly to compute, as so many thirds
    of gelu's. serial: elements that generated code handles one by one: random numbers, and booleans that it stores. batch: how many
    matmuls it is, one after the other. written: to memory that nothing was read from. causal: attention, of which kernels may
    leave out half."""

    kind: Kind
    flops: Size
    read: Size
    written: Size
    hard: Size = 0
    dtype: str = "fp32"
    serial: Size = 0
    batch: Size = 1
    causal: bool = False

    def at(self, evaluate: Callable[[Size], Any]) -> Work:
        """The same with what its sizes come to."""
        read, written = evaluate(self.read), evaluate(self.written)
        hard, serial, batch = evaluate(self.hard), evaluate(self.serial), evaluate(self.batch)
        return replace(self, flops=evaluate(self.flops), read=read, written=written, hard=hard, serial=serial, batch=batch)

    @property
    def guessed(self) -> bool:
        """No rule was written for it, so its bytes stand for all that it costs."""
        return self.kind == "other"


VIEW = Work("view", 0, 0, 0)


def work_of(operation: Operation) -> Work:
    """The work of an operation, or of all parts of a fused kernel, whose inner values are neither read nor written."""
    node = operation.node
    if operation.parts[1:]:
        hard, serial = _sum(map(_hard, operation.parts)), _sum(map(_drawn, operation.parts)) + operation.masks
        kind: Kind = "reduction" if any(op_name(p) in _REDUCTIONS for p in operation.parts) else "pointwise"
        read, written = _sum(operation.read_bytes), _sum(operation.made_bytes)
        return Work(kind, 0, read, written, hard, _dtype(node), serial)
    written = _sum(bytes_of(t) for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor))
    given, picks = _given(node), op_name(node) in _PICKS
    read = _sum(map(bytes_of, given[1:])) + written if picks else _sum(map(bytes_of, given))
    serial, alone = _drawn(node) + operation.masks, kind_of(node)
    causal = alone == "attention" and bool(argument("is_causal", *_called(node)))
    return Work(alone, flops_of(node), read, written, _hard(node), _dtype(node), serial, _batch(node), causal)


def kind_of(node: Node) -> Kind:
    """The kind of kernel that a call runs."""
    name = op_name(node)
    if "kernel" in node.meta:
        return node.meta["kernel"]  # type: ignore[no-any-return]
    if is_collective(node):
        return "wait" if name == "wait_tensor" else "collective"
    if name in _MATMULS:
        return "matmul"
    if "convolution" in name:
        return "convolution"
    if name.startswith("_scaled_dot_product"):
        return "attention"
    if name in _PACKS:
        return "pack" if _dtypes(_given(node)) == _dtypes(tree_leaves(node.meta.get("val"))) else "pack_cast"
    if name in _IN_ROWS and not _turns(node):
        return "pointwise"
    found = (("reduction", _REDUCTIONS), ("lookup", _LOOKUPS), ("copy", _COPIES), ("random", _RANDOM), ("masked", _MASKED))
    for kind, names in found:
        if name in names:
            return kind  # type: ignore[return-value]
    alike = Tag.pointwise in getattr(node.target, "tags", ()) or name in _HARD or name in _DRAWN
    return "pointwise" if alike else "other"


def flops_of(node: Node) -> Size:
    """Floating-point operations of a call, as torch's FlopCounterMode counts them, but for a convolution's groups; 0 of what it does not
    count."""
    name = op_name(node)
    if name.startswith("_scaled_dot_product"):
        return _attending(node, backward=name.endswith("_backward"))
    if name in _GROUPED:
        return (2 if name.endswith("_backward") else 1) * _grouped(*(t.shape for t in _given(node)[:2]))
    target, args, kwargs = _called(node)
    count = flop_counter.flop_registry.get(getattr(target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
    counted = size_of(count(*args, **kwargs, out_val=_value(node)))
    if name != "convolution_backward" or args[-2] == 1 or not args[-1][1]:
        return counted
    of_weight = size_of(count(*args[:-1], [False, True, False], out_val=_value(node)))  # torch counts it as if there were no groups
    return counted - of_weight + of_weight // args[-2]


def _attending(node: Node, backward: bool) -> Size:
    """Each head of keys counts as often as there are heads of queries that read it. torch has no count of a CPU's attention, and 2.11
    none of such heads."""
    query, key, value = (t.shape for t in _given(node)[backward : backward + 3])
    key, value = (shape if len(shape) < 4 else torch.Size((shape[0], query[1], *shape[2:])) for shape in (key, value))
    if backward:
        return size_of(flop_counter.sdpa_backward_flop_count(_given(node)[0].shape, query, key, value))
    return size_of(flop_counter.sdpa_flop_count(query, key, value))


def _grouped(a: torch.Size, b: torch.Size) -> Size:
    """Of as many products as there are groups, which together have the rows, the columns or what is summed over of two matrices; or, of
    two batches, of each. torch (2.13) has no count of it."""
    each = 2 * product((*a[-2:], b[-1]))
    return each * size_of(a[0]) if len(a) == len(b) == 3 else each


def _turns(node: Node) -> bool:
    """Whether what lies next to each other in a copy does not in what is copied."""
    result = _result(node)
    if result is None:
        return False
    inner = [i for i in range(result.dim()) if size_of(result.stride(i)) == 1 and size_of(result.shape[i]) != 1]
    alike = [t for t in _given(node) if t.dim() == result.dim()]
    return any(size_of(t.stride(i)) not in (0, 1) for t in alike for i in inner)


def _batch(node: Node) -> Size:
    """How many matrices there are of each."""
    return size_of(_given(node)[-1].shape[0]) if op_name(node) in ("bmm", "baddbmm") else 1


def _hard(node: Node) -> Size:
    return _elements(node) * _HARD.get(op_name(node), 0)


def _drawn(node: Node) -> Size:
    return _elements(node) if op_name(node) in _DRAWN else 0


def _elements(node: Node) -> Size:
    first = _result(node)
    return product(first.shape) if first is not None else 0


def _result(node: Node) -> Tensor | None:
    """The first tensor that a call gives."""
    return next((t for t in tree_leaves(_value(node)) if isinstance(t, Tensor)), None)


def _value(node: Node) -> Any:
    """What a call gives, without a random state that it saves."""
    call, value = torch_internals.random_call(node), node.meta.get("val")
    return value[1] if call is not None and call.saves and value is not None else value


def _called(node: Node) -> tuple[Any, Any, Any]:
    """What a node calls, and with what; of a call under a random state, what that is of."""
    call = torch_internals.random_call(node)
    return (node.target, node.args, node.kwargs) if call is None else (call.operator, call.args, call.kwargs)


def argument(name: str, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call of an operator has by this name, given or by default; None of one that takes none."""
    schema = torch_internals.schema_of(operator)
    defaults = {a.name: a.default_value for a in schema.arguments} if schema is not None else {}
    return {**defaults, **dict(zip(defaults, args)), **kwargs}.get(name)


def op_name(node: Node) -> str:
    """What a node calls, without its overload: "mm"."""
    target, *_ = _called(node)
    packet = getattr(target, "overloadpacket", None)
    return packet.__name__ if packet is not None else str(getattr(target, "__name__", target))


def _given(node: Node) -> list[Tensor]:
    _, args, kwargs = _called(node)
    values = [a.meta.get("val") for a in tree_leaves((args, kwargs)) if isinstance(a, Node)]
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def _dtypes(values: Iterable[Any]) -> set[torch.dtype]:
    return {value.dtype for value in values if isinstance(value, Tensor)}


def _dtype(node: Node) -> str:
    first = _result(node)
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
    return names.get(first.dtype, "fp32") if first is not None else "fp32"


def _sum(sizes: Any) -> Size:
    total: Size = 0
    for size in sizes:
        total = total + size
    return total


