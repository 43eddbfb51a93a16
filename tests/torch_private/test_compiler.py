"""What is lost where torch's compiler lacks a setting: it is hidden here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchopt_dist import torch_private as private
from torchopt_dist.core import programs
from torchopt_dist.core.meaning import Family, Meaning, RefusedError
from torchopt_dist.core.vjp import leaf_like

config = pytest.importorskip("torch._dynamo.config")


def test_the_settings_hold_inside_of_the_context_only() -> None:
    assert not config.trace_autograd_ops
    with private.tracing_gradients():
        assert config.trace_autograd_ops
    assert not config.trace_autograd_ops


def test_code_that_is_traced_in_the_context_knows_it() -> None:
    def value() -> int:
        return 1 if private.gradients_are_traced() else 2

    compiled = torch.compile(value, backend="eager", fullgraph=True)
    assert (value(), compiled()) == (2, 2)
    with private.tracing_gradients():
        assert (value(), compiled()) == (2, 1)


def test_a_leaf_is_one_that_a_gradient_is_taken_with_respect_to_also_where_it_is_traced() -> None:
    def twice(x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = leaf_like(x)
            (first,) = torch.autograd.grad((leaf**3).sum(), leaf, create_graph=True)
            return torch.autograd.grad(first.sum(), leaf)[0].detach()

    x = torch.tensor([1.0, 2.0])
    assert leaf_like(x).is_leaf
    assert not x.requires_grad
    programs.take_leaves_as_they_are()
    with private.tracing_gradients(), torch.no_grad():
        assert torch.compile(twice, backend="eager", fullgraph=True)(x).tolist() == [6.0, 12.0]


def test_a_setting_that_torch_lacks_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private.compiler, "_SETTINGS", (("torch._dynamo.config", "has_no_such_name", True),))
    with private.tracing_gradients():
        assert not hasattr(config, "has_no_such_name")


def test_the_samples_of_a_vmap_are_its_values_along_dimension_0() -> None:
    x = torch.arange(6.0).reshape(2, 3)

    def one(column: Tensor) -> Tensor:
        samples = private.traced_samples()
        assert samples is not None
        assert (samples.level, samples.size) == (1, 3)
        assert torch.equal(samples.values(column), x.T)
        return samples.tensor(2 * samples.values(column))

    assert private.traced_samples() is None
    assert torch.equal(torch.func.vmap(one, in_dims=1, out_dims=1)(x), 2 * x)


def test_without_the_name_what_is_traced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_are_functorch_transforms_active")
    with pytest.raises(AttributeError, match="_are_functorch_transforms_active"):
        private.traced_samples()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_without_the_function_tensors_with_a_history_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = pytest.importorskip("torch._dynamo.variables.torch")
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    outside = leaf.exp()

    def function(x: Tensor) -> Tensor:
        inside = x.view_as(x)
        return torch.autograd.grad((inside**2 * outside).sum(), inside, create_graph=True)[0]

    def made() -> Tensor:
        torch.compiler.reset()
        with private.tracing_gradients():
            compiled = torch.compile(function, backend="eager", fullgraph=True)
            return torch.autograd.grad(compiled(torch.ones(2, requires_grad=True)).sum(), leaf)[0]

    with private.tracing_gradients():
        pass
    torch.testing.assert_close(made(), 2 * leaf.exp())
    monkeypatch.setattr(torchs, "_collect_all_grad_fns", torchs._collect_all_grad_fns._torchs)
    monkeypatch.setattr(private.compiler, "_let_inputs_have_a_history", lambda: None)
    outside = leaf.exp()
    with pytest.raises(RuntimeError, match="external grad_fn"):
        made()


def test_what_a_compiled_function_was_made_of_is_known_unless_the_name_is_hidden() -> None:
    def function(x: Tensor) -> Tensor:
        return 2 * x

    compiled = torch.compile(function, backend="eager")
    assert private.original_of(compiled) is function
    assert private.original_of(function) is None
    del vars(compiled)["_torchdynamo_orig_callable"]
    assert private.original_of(compiled) is None


def test_one_program_too_many_is_told_from_a_refusal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def scaled(x: Tensor, by: float) -> Tensor:
        return by * x

    compiled = torch.compile(scaled, backend="eager", fullgraph=True, dynamic=False)
    with private.tracing_gradients():
        for number in range(config.recompile_limit):
            compiled(torch.ones(1), number + 0.5)
        with pytest.raises(Exception, match="Hard failure") as raised:
            compiled(torch.ones(1), -0.5)
    assert private.is_one_program_too_many(raised.value)
    assert not private.is_one_program_too_many(ValueError())
    assert not caplog.records


def test_a_whole_number_is_an_input_unless_the_name_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def kept(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def row(x: Tensor, number: int) -> Tensor:
        return x[number]

    def rows() -> list[float]:
        compiled = torch.compile(row, backend=kept, fullgraph=True)
        return [compiled(torch.arange(4.0), private.as_input(number)).item() for number in (2, 3)]

    assert rows() == [2.0, 3.0]
    assert len(graphs) == 1
    monkeypatch.delattr("torch.fx.experimental.sym_node.DynamicInt")
    torch.compiler.reset()
    assert rows() == [2.0, 3.0]
    assert len(graphs) > 2


def test_whether_the_compiler_sees_other_defaults_and_a_forward_of_an_instance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def helper(x: Tensor, scale: float = 2.0) -> Tensor:
        return scale * x

    parts = torch.nn.Sequential(torch.nn.Identity())
    compiled = torch.compile(lambda x: helper(parts(x)), backend="eager", fullgraph=True)
    assert compiled(torch.ones(())) == 2
    monkeypatch.setattr(helper, "__defaults__", (3.0,))
    seen = compiled(torch.ones(())) == 3
    monkeypatch.setitem(vars(parts[0]), "forward", lambda x: 7 * x)
    torch.compiler.reset()
    seen = seen and torch.compile(parts, backend="eager", fullgraph=True)(torch.ones(())) == 7
    assert seen or private.compiler_overlooks()
    assert not (seen and private.compiler_overlooks())


def test_arrays_of_numpy_are_known_among_the_inputs_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.ones(2, np.float32)
    graphs: list[Any] = []

    def noted(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compile(lambda x: x * torch.from_numpy(array), backend=noted, fullgraph=True)(torch.ones(2))
    ((_, user),) = private.users_of_arrays(graphs[0])
    assert user.target is torch.as_tensor
    private.compiler._imported.cache_clear()
    monkeypatch.delattr("torch._dynamo.source.NumpyTensorSource")
    assert private.source_of_arrays() is None
    assert not [*private.users_of_arrays(graphs[0])]
    with pytest.raises(RefusedError, match=r"the array is a numpy\.ndarray"):
        Meaning(Family(), [("the array", array)], None)
