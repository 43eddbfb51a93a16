"""What a trace makes of tensors and numbers, and what is lost where a name of torch's compiler is hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torchopt_dist as todist
from torchopt_dist import torch_private as private
from torchopt_dist.core import programs
from torchopt_dist.core.uncompiled import is_traced, tracing

pytest.importorskip("torch._dynamo.config")


def traced(function: Any, *values: Any) -> tuple[Any, Any]:
    """The graph of a function of tensors and numbers, and the condition under which it is for other numbers, too."""
    trace = private.Trace()
    inputs = [trace.tensor(x) if isinstance(x, Tensor) else trace.number(x) for x in values]
    return trace.graph(lambda *given: [function(*map_inputs(values, given))], inputs), trace.condition()


def map_inputs(values: Any, given: Any) -> list[Any]:
    return [
        x if isinstance(value, Tensor) else private.Trace.of_input(x)
        for value, x in zip(values, given, strict=True)
    ]


def as_input(number: Any) -> Any:
    return torch.tensor(number, dtype=torch.float64) if isinstance(number, float) else number


def test_what_is_traced_knows_it() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(is_traced())
        return x + 1

    with tracing():
        traced(function, torch.ones(1))
    torch.compile(function, backend="eager")(torch.ones(1))
    function(torch.ones(1))
    assert seen == [True, True, False]


@pytest.mark.parametrize("numbers", [(2, 5), (0.5, 2.5), (0, 1), (-1, 3)])
def test_a_number_is_an_input(numbers: tuple[Any, Any]) -> None:
    x = torch.arange(3.0)
    first, second = numbers
    graph, condition = traced(lambda x, number: x * number + number, x, first)
    torch.testing.assert_close(graph(x, as_input(second))[0], x * second + second)
    assert condition is None or condition([second])


@pytest.mark.parametrize("numbers", [(2, 5, 1), (2.5, 3.5, 0.5)])
def test_a_comparison_of_a_number_is_a_condition(numbers: tuple[Any, Any, Any]) -> None:
    x, (first, alike, other) = torch.arange(3.0), numbers
    graph, condition = traced(lambda x, number: x * number if number > 1.5 else -x, x, first)
    torch.testing.assert_close(graph(x, as_input(alike))[0], x * alike)
    assert condition([first])
    assert condition([alike])
    assert not condition([other])


def test_a_branch_that_depends_on_a_tensor_is_refused() -> None:
    with pytest.raises(Exception, match="data-dependent"):
        traced(lambda x: x if x.sum() > 1 else -x, torch.ones(2))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.fx.experimental.proxy_tensor", "make_fx"),
        ("torch.fx.experimental.symbolic_shapes", "ShapeEnv"),
        ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    ],
)
def test_without_a_name_what_is_to_be_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    monkeypatch.delattr(f"{module}.{name}")
    programs.programs_of.cache_clear()
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    with pytest.warns(UserWarning, match=f"runs as without it, since the compiler refuses it.*{name}"):
        made = todist.inner_loop(lambda w: (w**2).sum(), todist.sgd(lr=0.25), w, 2, compile=True)
    torch.testing.assert_close(made.params, w / 4)


def test_what_a_compiled_function_was_made_of_is_known_unless_the_name_is_hidden() -> None:
    def function(x: Tensor) -> Tensor:
        return 2 * x

    compiled = torch.compile(function, backend="eager")
    assert private.original_of(compiled) is function
    assert private.original_of(function) is None
    del vars(compiled)["_torchdynamo_orig_callable"]
    assert private.original_of(compiled) is None
