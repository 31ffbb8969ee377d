"""One test for each private name of what autograd does with compiled graphs: a torch release that moves one fails here."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from functorch.compile import aot_module_simplified, make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from autoshard import torch_internals


def test_tangents_are_held_until_backward_returns_or_not() -> None:
    """Those that nothing else holds: zeros, of a result that nothing was made of."""
    there: list[bool] = []

    def backward(gm: torch.fx.GraphModule, _: Any) -> Any:
        def run(given: list[Any]) -> Any:
            (zeros,) = [weakref.ref(x) for x in given if isinstance(x, torch.Tensor) and not x.any()]
            results = gm(*given)
            given.clear()
            there.append(zeros() is not None)
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ w
        return y.square().sum(), y.sin()

    torch.compiler.reset()
    compiled = torch.compile(both, backend=aot_autograd(fw_compiler=lambda gm, _: make_boxed_func(gm.forward), bw_compiler=backward))
    loss, unused = compiled(torch.randn(5, 3), torch.randn(3, 7, requires_grad=True))
    del unused
    loss.backward()
    assert there == [torch_internals.HOLDS_TANGENTS]


class _Two(nn.Module):
    """Two results, and a parameter for Dynamo to trace."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * y).t(), x.exp()


def _through_autograd(step: Any, backward: Any, dynamic: bool = False) -> Any:
    """`step` compiled, `backward` called with the graph of its backward, which gives what runs it."""

    def backend(gm: Any, inputs: Any) -> Any:
        return aot_module_simplified(
            gm, inputs, fw_compiler=lambda gm, _: make_boxed_func(gm), bw_compiler=lambda gm, _: backward(gm),
            partition_fn=min_cut_rematerialization_partition,
        )

    return torch.compile(step, backend=backend, dynamic=dynamic)


@pytest.mark.parametrize("left", [False, True])
def test_a_backward_may_keep_a_graph_late_where_what_is_saved_is_left(left: bool) -> None:
    def backward(gm: Any) -> Any:
        if left:
            torch_internals.leave_what_is_saved()
        return make_boxed_func(gm)

    compiled, x = _through_autograd(lambda x: (x @ x).exp() @ x, backward), torch.ones(2, 2, requires_grad=True)
    compiled(x).sum().backward()
    result = compiled(x).sum()
    with contextlib.nullcontext() if left else pytest.raises(RuntimeError, match="donated"):
        result.backward(retain_graph=True)
        result.backward()


def test_tangents_are_the_gradients_of_results() -> None:
    seen: list[list[tuple[int, ...]]] = []

    def backward(gm: Any) -> Any:
        seen.append([tuple(n.meta["val"].shape) for n in torch_internals.tangents(gm.graph)])
        return make_boxed_func(gm)

    _through_autograd(_Two(), backward)(torch.ones(2, 3, requires_grad=True), torch.ones(2, 3))[1].sum().backward()
    assert seen == [[(3, 2), (2, 3)]]


@pytest.mark.parametrize("differentiated", [0, 1])
def test_gradients_that_nobody_computes_are_left_undefined(differentiated: int) -> None:
    given: list[list[bool]] = []

    def backward(gm: Any) -> Any:
        def run(*values: Any) -> Any:
            given.append([value is None for value in values[-len(torch_internals.tangents(gm.graph)) :]])
            return [torch.ones(2, 3), None]

        return make_boxed_func(run)

    x, y = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3)
    step = _through_autograd(_Two(), backward)
    known = None
    for _ in range(2):
        results = step(x, y)
        known = torch_internals.leave_undefined(results, (x, y), known)
        results[differentiated].sum().backward()
    expected = [differentiated != 0, differentiated != 1]
    assert given == [expected, expected] and known is type(results[0].grad_fn)


class _Both(torch.autograd.Function):
    """Two results, of both of which its backward needs gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2 + gradients[1] * 3


def test_a_function_that_an_input_comes_from_gets_its_zeros() -> None:
    x = torch.ones(2, requires_grad=True)
    first, _ = _Both.apply(x)  # type: ignore[no-untyped-call]
    assert torch_internals.leave_undefined((first,), (first,)) is None
    first.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2]


def test_results_without_gradients_have_no_function() -> None:
    assert torch_internals.leave_undefined((torch.ones(2), 3, None), ()) is None


def test_sizes_are_computed_of_those_that_a_graph_is_given() -> None:
    seen: list[tuple[Any, list[Any]]] = []

    def backward(gm: Any) -> Any:
        tangent = torch_internals.tangents(gm.graph)[0]
        shape = tangent.meta["val"].shape
        with gm.graph.inserting_before(gm.graph.output_node()):
            sizes = torch_internals.sizes_in(gm.graph, [*shape, 7, shape[0] * 2 + 1])
        output = gm.graph.output_node()
        gradients, output.args = output.args[0], (tuple(sizes),)
        gm.recompile()

        def run(*values: Any) -> Any:
            seen.append((tuple(values[-1].shape), list(gm(*values))))
            return [None if gradient is None else torch.ones(5, 3) for gradient in gradients]

        return make_boxed_func(run)

    x = torch.ones(5, 3, requires_grad=True)
    _through_autograd(lambda x: x[1:].exp(), backward, dynamic=True)(x).sum().backward()
    assert seen == [((4, 3), [4, 3, 7, 9])]


def test_backwards_have_numbers() -> None:
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        y = x * 2
        y.register_hook(lambda _: seen.append(torch_internals.backward_here()))
        (y * 2).sum().backward()
    assert torch_internals.backward_here() == -1 and -1 not in seen and len(set(seen)) == 2


def test_compiled_autograd_gets_all_gradients() -> None:
    def backward(gm: Any) -> Any:
        return make_boxed_func(gm)

    x = torch.ones(2, 3, requires_grad=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        results = _through_autograd(_Two(), backward)(x, torch.ones(2, 3))
        assert torch_internals.leave_undefined(results, ()) is None
        results[0].sum().backward()
    assert x.grad is not None and x.grad.tolist() == torch.ones(2, 3).tolist()


def test_a_compilation_that_ended_can_be_entered_again() -> None:
    entered: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        entered.append((torch_internals.Tracing.here(), torch_internals.entering_again({"allow_buffer_reuse": False})))
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    tracing, enter = entered[0]
    before = torch._inductor.config.allow_buffer_reuse
    with torch.autocast("cpu"), enter():
        assert torch_internals.Tracing.here() == tracing
        assert not torch._inductor.config.allow_buffer_reuse and not torch.is_autocast_enabled("cpu")
    assert torch._inductor.config.allow_buffer_reuse == before
