"""What Inductor generates code for."""

from __future__ import annotations

from torch import Tag
from torch.fx import Node

from autoshard.cost_model.program import Operation
from autoshard.cost_model.sizes import size_of

_REDUCTIONS = frozenset(
    f"aten.{name}"
    for name in (
        "sum.dim_IntList", "sum.default", "mean.dim", "mean.default", "amax.default", "amin.default", "var_mean.correction",
        "any.dim", "any.default", "var.correction", "prod.dim_int", "argmax.default", "argmin.default"
    )
)
_MOVES = frozenset(
    f"aten.{name}"
    for name in (
        "clone.default", "copy.default", "copy_.default", "cat.default", "embedding.default", "gather.default", "index.Tensor",
        "full.default", "full_like.default", "arange.default", "iota.default", "constant_pad_nd.default", "index_select.default",
        "slice_scatter.default", "select_scatter.default", "zeros.default", "scalar_tensor.default", "empty.memory_format",
        "scatter.value", "new_zeros.default", "ones.default", "where.self"
    )
) | {"prims.iota.default", "prims.convert_element_type.default", "prims.inductor_random.default"}


def fusible(operation: Operation) -> bool:
    """True of what Inductor generates code for, so that it can share a kernel with others."""
    name = operation.name
    tags = getattr(operation.node.target, "tags", ())
    return Tag.pointwise in tags or name in _REDUCTIONS or name in _MOVES or name.startswith("prims.")


def is_generated(operation: Operation) -> bool:
    """True of a kernel that code is generated for, of one operation or of several."""
    return operation.code is not None and fusible(operation)


def reduces(operation: Operation) -> bool:
    """True of a sum or the like over elements."""
    return operation.name in _REDUCTIONS


def sums_columns(operation: Operation) -> bool:
    """True of a sum over rows that leaves the innermost dimension as it is: a bias's gradient is one."""
    given = operation.node.args[0] if operation.node.args else None
    if not reduces(operation) or not isinstance(given, Node) or len(operation.node.args) < 2:
        return False
    dims, value = operation.node.args[1], given.meta["val"]
    summed = {d % value.dim() for d in (dims if isinstance(dims, (list, tuple)) else [dims])}  # type: ignore[operator]
    long = [d for d in range(value.dim()) if size_of(value.shape[d]) != 1]
    return bool(summed) and bool(long) and min(long, key=lambda d: (size_of(value.stride(d)) != 1, -d)) not in summed
