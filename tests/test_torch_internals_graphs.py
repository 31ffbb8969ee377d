"""One test for each private name of AOTAutograd, Inductor and what graphs are made of: a torch release that moves one fails here."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import pytest
import torch
from functorch.compile import aot_module_simplified, make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._library.fake_class_registry import FakeScriptObject
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard import torch_internals


def test_rename_finds_a_free_name() -> None:
    graph = torch.fx.Graph()
    first, second = (graph.call_function(torch.relu, ()) for _ in range(2))
    torch_internals.rename(first, "again")
    torch_internals.rename(second, "again")
    assert (first.name, second.name) == ("again", "again_1")


def test_fake_tensors_have_no_values() -> None:
    with torch_internals.FakeTensorMode():
        assert isinstance(torch.ones(2), torch_internals.FakeTensor)


def test_input_position_names_plain_inputs() -> None:
    seen: list[int | None] = []

    def compiler(gm: Any, inputs: Any) -> Any:
        seen.extend(torch_internals.input_position(n) for n in gm.graph.find_nodes(op="placeholder"))
        return make_boxed_func(gm)

    def backend(gm: Any, inputs: Any) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=compiler)

    torch.compile(lambda x, y: x * y, backend=backend)(torch.ones(2), torch.ones(2))
    assert seen == [0, 1]


def test_written_position_names_one_of_those_that_share_memory() -> None:
    seen: list[int | None] = []

    def compiler(gm: Any, inputs: Any) -> Any:
        seen.extend(torch_internals.written_position(n) for n in gm.graph.find_nodes(op="placeholder"))
        return make_boxed_func(gm)

    def backend(gm: Any, inputs: Any) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=compiler)

    whole = torch.zeros(2, 3)
    torch.compile(lambda x, part, whole: part.add_(x) + whole.sum(), backend=backend)(torch.ones(3), whole[0], whole)
    assert len(seen) == 2 and 0 in seen and (1 in seen or 2 in seen)


def test_gradient_places_name_the_inputs() -> None:
    seen: list[dict[int, int]] = []

    def partition(joint: Any, inputs: Any, **keywords: Any) -> Any:
        seen.append(torch_internals.gradient_places(joint.graph))
        return min_cut_rematerialization_partition(joint, inputs, **keywords)

    def backend(gm: Any, inputs: Any) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=lambda gm, _: make_boxed_func(gm), partition_fn=partition)

    x, y, z = torch.ones(2, requires_grad=True), torch.ones(2), torch.ones(2, requires_grad=True)
    torch.compile(lambda x, y, z: x * y + z, backend=backend)(x, y, z)
    assert seen == [{0: 1, 2: 3}]  # behind the result, one for each input


def test_an_input_among_the_results_is_left_as_it_lies() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.conv2d(x, w.relu()), w

    def strides(left: bool) -> tuple[int, ...]:
        given = [torch.randn(32, 16, 3, 3), torch.randn(4, 16, 8, 8)]
        gm = make_fx(step, tracing_mode="fake")(*given)
        examples = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
        if left:
            torch_internals.leave_as_they_lie(gm.graph, {gm.graph.find_nodes(op="placeholder")[0]})
        return torch_internals.inner_inductor(gm, examples)(given)[1].stride()  # type: ignore[no-any-return]

    assert strides(left=True) == (144, 9, 3, 1) and strides(left=False) == (144, 1, 48, 16)


@pytest.mark.parametrize(("repeats", "size", "loops"), [("", 64, 1), ("mm", 48, 2), ("mul", 32, 2)])
def test_what_backward_repeats_says_what_inductor_joins(repeats: str, size: int, loops: int) -> None:
    """A sum and what waits for a matmul read one small tensor. Sizes differ since a cache knows graphs by their operations only."""

    def backward(x: torch.Tensor, w: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + row, (x @ w) * row

    given = [torch.randn(size, size), torch.randn(size, size), torch.randn(size)]
    gm = make_fx(backward, tracing_mode="fake")(*given)
    for node in gm.graph.nodes:
        node.meta["partitioner_tag"] = "is_forward" if node.name == repeats else "is_backward"
    examples = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    compiled = torch_internals.inner_inductor(gm, examples, is_backward=True)
    assert compiled.source_code.count("for(int64_t x0=") == loops
    torch.testing.assert_close(list(compiled(list(given))), list(backward(*given)))


def test_inductor_takes_our_partitioner_and_inner_step() -> None:
    seen = []

    class Partitioner(torch_internals.CustomPartitionerFn):  # type: ignore[misc]
        def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
            from functorch.compile import min_cut_rematerialization_partition

            seen.append("partition")
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> str:
            return "a test"

    def wrapper(run: Any) -> Any:
        return lambda inputs: seen.append("run") or run(inputs)

    def inner(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        seen.append("backward" if kwargs.get("is_backward") else "forward")
        return torch_internals.wrap_compiled(torch_internals.inner_inductor(gm, inputs, **kwargs), wrapper)

    def backend(gm: Any, inputs: Any) -> Any:
        patches = {"custom_partitioner_fn": Partitioner()}
        with torch_internals.without_autograd_cache():
            return torch_internals.compile_with_inductor(gm, inputs, inner, patches)

    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend=backend)(x).backward()
    later, at_once = ["run", "backward", "run"], ["backward", "run", "run"]  # than forward, or together with it
    assert seen in (["partition", "forward", *later], ["partition", "forward", *at_once])
    torch.testing.assert_close(x.grad, torch.ones(3).cos())


def test_graphs_write_their_code_when_they_are_called() -> None:
    with torch_internals.code_when_called():
        lazy = make_fx(torch.sin)(torch.ones(3))
    usual = make_fx(torch.sin)(torch.ones(3))
    assert "_code" not in vars(lazy) and "_code" in vars(usual)
    torch.testing.assert_close(lazy(torch.ones(3)), torch.ones(3).sin())
    assert "sin" in lazy.code


def test_what_is_computed_twice_is_there_once() -> None:
    traced = make_fx(lambda x: (x.sin() + x.sin()) * x.cos())(torch.ones(3)).graph
    once = torch_internals.without_repeats(traced)
    assert [n.name for n in once.nodes] == [n.name for n in traced.nodes if n.name != "sin_1"]
    assert len(traced.find_nodes(op="call_function", target=torch.ops.aten.sin.default)) == 2


def _saving(names: list[str], **values: Any) -> torch.fx.GraphModule:
    """A graph of inputs alone that gives back the last of them, each with its fake value."""
    graph = torch.fx.Graph()
    for name in names:
        graph.placeholder(name).meta["val"] = values.get(name, torch.ones(2))
    graph.output(tuple(graph.nodes))
    return torch.fx.GraphModule({}, graph)


def test_random_states_are_saved_among_the_tensors() -> None:
    """That torch's own order needs it: test_checkpointing.py's dropout, on torch 2.13."""
    values = {"mesh": FakeScriptObject(None, "DeviceMesh", None), "n": 3}
    forward = _saving(["loss", "x", "mesh", "state", "n"], **values)
    backward = _saving(["n", "x", "mesh", "rng_state_output_0", "tangent"], **values)
    torch_internals.put_random_states_first(forward, backward)
    assert [n.name for n in forward.graph.output_node().args[0]] == ["loss", "x", "state", "mesh", "n"]
    inputs = [n.name for n in backward.graph.find_nodes(op="placeholder")]
    assert inputs == ["n", "x", "rng_state_output_0", "mesh", "tangent"]


def test_random_states_are_found_on_both_sides() -> None:
    from torch._prims import rng_prims

    forward, backward = _saving(["x"]), _saving(["rng_state_output_0", "rng_state_output_1", "tangent"])
    (x,) = forward.graph.find_nodes(op="placeholder")
    with forward.graph.inserting_before(forward.graph.output_node()):
        calls = [forward.graph.call_function(rng_prims.run_and_save_rng_state, (torch.ops.aten.rand_like.default, x)) for _ in range(2)]
        states = [forward.graph.call_function(operator.getitem, (call, 0)) for call in calls]
        for call in calls:
            forward.graph.call_function(operator.getitem, (call, 1))
    given = backward.graph.find_nodes(op="placeholder")
    assert torch_internals.random_states(forward, backward) == list(zip(states, given[:2]))


def test_a_random_call_is_seen_through_what_keeps_its_state() -> None:
    from torch._prims import rng_prims

    graph, dropout = torch.fx.Graph(), torch.ops.aten.native_dropout.default
    x, state = graph.placeholder("x"), graph.placeholder("state")
    given = (x, 0.1, True)
    saves = graph.call_function(rng_prims.run_and_save_rng_state, (dropout, *given))
    takes = graph.call_function(rng_prims.run_with_rng_state, (state, dropout, *given))
    safe = graph.call_function(rng_prims.graphsafe_run_with_rng_state, (dropout, *given), {"rng_state": state})
    plain = graph.call_function(dropout, given)
    found = [torch_internals.random_call(node) for node in (saves, takes, safe, plain)]
    assert found == [torch_internals.RandomCall(dropout, given, {}, saved) for saved in (True, False, False)] + [None]


def test_what_is_there_twice_can_be_left() -> None:
    with torch_internals.repeats_stay():
        assert not torch._functorch.config.cse
    assert torch._functorch.config.cse


def test_is_view_tells_views_from_copies_and_writes() -> None:
    aten = torch.ops.aten
    assert torch_internals.is_view(aten.t.default)
    assert not any(torch_internals.is_view(op) for op in (aten.add.Tensor, aten.add_.Tensor, len))


def test_an_op_without_a_result_is_told() -> None:
    assert torch_internals.gives_nothing(torch.ops.aten._assert_scalar.default)
    assert not any(map(torch_internals.gives_nothing, (torch.ops.aten.add.Tensor, torch.relu)))


def test_share_memory_sees_views() -> None:
    x, y = torch.ones(2, 2), torch.ones(2, 2)
    assert torch_internals.share_memory([x.t()], [x]) and torch_internals.share_memory([x, x[0]], [])
    assert not torch_internals.share_memory([x], [y])


def test_a_tensor_in_transforms_of_functions_is_unwrapped() -> None:
    seen: list[torch.Tensor] = []

    def look(row: torch.Tensor) -> torch.Tensor:
        seen.append(row)
        assert torch_internals.unwrapped(row) is not row and torch_internals.storage_of(row) == torch_internals.storage_of(x)
        return row.sum()

    x = torch.ones(2, 3)
    torch.vmap(torch.func.grad(look))(x)
    assert len(seen) == 1 and torch_internals.unwrapped(x) is x


def test_a_trace_that_goes_on_serves_a_graph_inside_a_backend() -> None:
    found = []

    def backend(gm: Any, inputs: Any) -> Any:
        tracing = torch_internals.Tracing.here()
        examples = [tracing.like(n.meta["example_value"]) for n in gm.graph.find_nodes(op="placeholder")]
        with tracing.entered():
            aot_module_simplified(gm, examples, fw_compiler=lambda graph, _: found.append(graph) or make_boxed_func(graph))
        return gm

    assert torch.compile(lambda x: x.permute(1, 0) + 1, backend=backend)(torch.ones(2, 3)).shape == (3, 2)
    (graph,) = found
    run: Any = torch_internals.inductor_alone(graph, is_inference=True)
    (out,) = run([torch.ones(2, 3)])
    assert out.stride() == graph.graph.output_node().args[0][0].meta["val"].stride()


def test_boxed_code_empties_the_list_of_inputs() -> None:
    gm = torch.fx.symbolic_trace(lambda x, y: x + y)
    given = [torch.ones(2), torch.ones(2)]
    assert torch_internals.boxed(gm)(given).tolist() == [2, 2]
    assert given == []


class Wrapped(nn.Sequential):
    """Its forward is called with all arguments in a tuple, the module among them."""

    def forward(*arguments: Any) -> Any:
        return nn.Sequential.forward(*arguments)


@pytest.mark.parametrize("kind", [nn.Sequential, Wrapped])
def test_nodes_of_a_joint_graph_say_whose_they_are(kind: type[nn.Sequential]) -> None:
    found = []

    def read(joint: torch.fx.GraphModule, inputs: object, **keywords: object) -> object:
        found.extend(n for n in joint.graph.nodes if n.op == "call_function")
        return min_cut_rematerialization_partition(joint, inputs, **keywords)

    def backend(gm: torch.fx.GraphModule, inputs: object) -> object:
        return aot_module_simplified(gm, inputs, fw_compiler=lambda graph, _: graph, partition_fn=read)

    torch.compiler.reset()
    torch.compile(kind(nn.Linear(4, 4), nn.Tanh()), backend=backend)(torch.randn(2, 4))
    (tanh,) = (n for n in found if n.target is torch.ops.aten.tanh.default)
    (grad,) = (n for n in found if n.target is torch.ops.aten.mm.default and torch_internals.is_backward(n))
    assert torch_internals.module_path(tanh) == "1" and not torch_internals.is_backward(tanh)
    assert torch_internals.module_path(grad) == "0"


def test_calls_of_a_module_are_counted() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Tanh(), nn.Linear(2, 2))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](self.layers[0](x)).sin()  # type: ignore[no-any-return]

    seen: list[tuple[str, int, int]] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in gm.graph.nodes:
            if node.op == "call_function":
                seen.append((torch_internals.module_path(node), *(torch_internals.module_call(node, m) for m in ("layers.0", "other"))))
        return gm.forward

    torch.compile(Twice(), backend=backend)(torch.ones(2))
    inside = [("layers.0.0", 0, 0), ("layers.0.1", 0, 0), ("layers.0.0", 1, 0), ("layers.0.1", 1, 0)]
    assert [entry for entry in seen if entry[0].startswith("layers")] == inside


def test_budgets_of_activations_can_be_left_out() -> None:
    """Both of torch's whole partitions, and that of a region."""
    w = torch.ones(8, 8, requires_grad=True)

    def saved(left_out: bool, region: bool = False, **options: Any) -> int:
        found: list[int] = []

        def partition(joint: Any, inputs: Any, **keywords: Any) -> Any:
            for node in joint.graph.nodes if region else ():
                node.meta["memory_budget"], node.meta["custom"] = 0.0, {"_region_activation_memory_budget": 0.0, "mine": 1}
            with torch._functorch.config.patch(options), torch_internals.without_budgets(joint) if left_out else contextlib.nullcontext():
                forward, backward = min_cut_rematerialization_partition(joint, inputs, **keywords)
            if region and left_out:
                assert all(n.meta["custom"] == {"mine": 1} and "memory_budget" not in n.meta for n in joint.graph.nodes)
            found.append(len(forward.graph.output_node().args[0]) - keywords["num_fwd_outputs"])
            return forward, backward

        def backend(gm: Any, inputs: Any) -> Any:
            return aot_module_simplified(gm, inputs, fw_compiler=lambda gm, _: make_boxed_func(gm), partition_fn=partition)

        torch.compiler.reset()
        torch.compile(lambda x: torch.tanh(torch.tanh(x @ w) @ w).sum(), backend=backend)(torch.ones(1024, 8))
        return found[0]

    usual = saved(False)
    assert saved(False, activation_memory_budget=0.0) < usual
    assert saved(True, activation_memory_budget=0.0) == saved(True, region=True) == saved(True, aggressive_recomputation=True) == usual


def test_decompositions_of_what_has_one() -> None:
    aten = torch.ops.aten
    found = torch_internals.decompositions_of([aten.silu_backward, aten.mm])
    assert aten.silu_backward.default in found and aten.mm.default not in found


def test_schemas_say_what_an_operator_takes() -> None:
    found = torch_internals.schema_of(torch.ops.aten.add_.Tensor)
    assert [a.name for a in found.arguments] == ["self", "other", "alpha"] and found.is_mutable
    assert torch_internals.schema_of(operator.getitem) is None


def test_writes_in_place_are_counted() -> None:
    whole = torch.zeros(4)
    view = whole[1:]
    assert torch_internals.times_written(whole) == 0
    view.add_(1)
    assert torch_internals.times_written(whole) == torch_internals.times_written(view) == 1
    whole.data.add_(1)
    assert torch_internals.times_written(whole) == 1


def test_dimensions_are_in_the_order_in_which_they_lie() -> None:
    assert torch_internals.order_of_strides(torch.ones(2, 3, 4).permute(2, 0, 1)) == [1, 2, 0]
    assert torch_internals.order_of_strides(torch.ones(2, 3)) == [0, 1]


def test_so_are_open_ones() -> None:
    seen: list[list[int]] = []

    def backend(gm: Any, inputs: Any) -> Any:
        seen.append(torch_internals.order_of_strides(inputs[-1].transpose(0, 1)))
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend, dynamic=True)(torch.ones(3, 4))
    assert seen == [[1, 0]]
