"""Decision: which results of a model its loop is not expected to differentiate.

A result that the model goes on with on the way to another one is there to be looked at: logits beside a loss, a decoder's keys and
values. What nothing in the model goes on with would be of no use if the loop did not. This decides nothing but forecasts: a job finds
out in each backward (see [Note: Results that nobody uses] in leave_out.py).
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph, GraphModule, Node

from autoshard import torch_internals
from autoshard.passes.leave_out import is_added


def unused(graph: Graph, inside: Callable[[Node], GraphModule]) -> list[Node]:
    """Tangents of a joint or backward graph that a loop is expected not to give; never all. inside: see `is_added`."""
    tangents = torch_internals.tangents(graph)
    added = [tangent for tangent in tangents if is_added(tangent, inside)]
    return added if len(added) < len(tangents) else []
