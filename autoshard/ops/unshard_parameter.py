"""`unshard_parameter`: what stands for a sharded parameter in a graph as Dynamo gives it.

Dynamo takes a millisecond for each call that it follows, more where that is a DTensor's, and a model has many parameters. So the rows, the shape and `unshard` itself are one call to it, of which it asks no more than what is given;
`expand_unshards` writes them out before anything else reads the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autoshard import torch_internals
from autoshard.errors import UnsupportedError
from autoshard.ops.layout import Layout
from autoshard.torch_internals import FakeTensor


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def unshard_parameter(parameter: nn.Parameter, layout: str) -> Tensor:
    """A tensor like the whole parameter, for Dynamo's trace: no leaf, and no memory of the parameter's. UnsupportedError where it is run, or
    traced by a backend that does not know it: memory that nobody wrote to would be taken for weights."""
    if not isinstance(torch_internals.rows_of_each([parameter])[0], FakeTensor):
        raise UnsupportedError(
            "a model that autoshard trains was called inside of what torch.compile compiled with another backend, which knows nothing of "
            "its rows; legal: backend=autoshard.backend() there too, the model called outside of it, or all of it inside autoshard.gathered(model)"
        )
    spec = Layout.parse(layout)
    how: dict[str, Any] = {"dtype": spec.compute or parameter.dtype, "device": parameter.device, "requires_grad": parameter.requires_grad}
    shape = parameter.shape
    whole = torch.empty(shape, **how) if spec.sharded else torch.empty_strided(shape, parameter.stride(), **how)
    return whole.view_as(whole)
