"""What changes between compiled loops, or between their steps, changes what they compute, as without a compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.diff.compiled_runs import MARKS, X, both, layer, made
from torchopt_dist.core import programs
from torchopt_dist.diff.adjoints._loop import Loop

pytestmark = MARKS
SCALE = 2.0
TABLE = {"scale": 2.0}


class Case(SimpleNamespace):
    """A module, an object and functions, which a loss may use."""

    scale = 2.0

    def scaled(self, x: Tensor) -> Tensor:
        return self.scale * x


class Scaled:
    """An object that has nothing but its class."""

    scale = 2.0

    def times(self, x: Tensor) -> Tensor:
        return self.scale * x


def helper(x: Tensor, by: float = 2.0, *, more: float = 1.0) -> Tensor:
    return by * more * x


def other_helper(x: Tensor, by: float = 2.0, *, more: float = 1.0) -> Tensor:
    return by * more * x + 1


def output(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).sum()


def tripled(_module: nn.Module, _inputs: Any, result: Tensor) -> Tensor:
    return 3 * result


def row(loss: Callable[..., Any], change: Callable[[Any, pytest.MonkeyPatch], Any]) -> Any:
    return loss, change


CHANGES: dict[str, Any] = {
    "hook": row(output, lambda net, _: net.register_forward_hook(tripled)),
    "hook before": row(
        output, lambda net, _: net.register_forward_pre_hook(lambda _, given: (3 * given[0],))
    ),
    "hook of a part": row(output, lambda net, _: net[0].register_forward_hook(tripled)),
    "forward of torch's class": row(
        output, lambda _, patch: patch.setattr(nn.Linear, "forward", lambda own, x: 3 * x * own.weight)
    ),
    "mode of a part": row(output, lambda net, _: net[1].eval()),
    "mode": row(output, lambda net, _: net.eval()),
    "part": row(output, lambda net, _: net.append(nn.Tanh())),
    "number of a part": row(output, lambda net, _: setattr(net[1], "p", 0.0)),
    "global number": row(
        lambda net, x: SCALE * output(net, x), lambda _, patch: patch.setitem(globals(), "SCALE", 3.0)
    ),
    "entry": row(
        lambda net, x: TABLE["scale"] * output(net, x), lambda _, patch: patch.setitem(TABLE, "scale", 3.0)
    ),
    "helper": row(
        lambda net, x: helper(output(net, x)),
        lambda _, patch: patch.setitem(globals(), "helper", other_helper),
    ),
    "helper's defaults": row(
        lambda net, x: helper(output(net, x)), lambda _, patch: patch.setattr(helper, "__defaults__", (3.0,))
    ),
    "helper's keyword": row(
        lambda net, x: helper(output(net, x)),
        lambda _, patch: patch.setattr(helper, "__kwdefaults__", {"more": 3.0}),
    ),
    "helper's code": row(
        lambda net, x: helper(output(net, x)),
        lambda _, patch: patch.setattr(helper, "__code__", other_helper.__code__),
    ),
    "number of a class": row(
        lambda net, x: Scaled().times(output(net, x)), lambda _, patch: patch.setattr(Scaled, "scale", 3.0)
    ),
    "method of a class": row(
        lambda net, x: Scaled().times(output(net, x)),
        lambda _, patch: patch.setattr(Scaled, "times", lambda _, x: 3 * x),
    ),
    "method of a class by an object": row(
        functools.partial(lambda scaled, net, x: scaled.times(output(net, x)), Scaled()),
        lambda _, patch: patch.setattr(Scaled, "times", lambda _, x: 3 * x),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_two_loops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, change = CHANGES[name]
    net = layer(nn.Dropout(1.0)) if "mode" in name or name == "number of a part" else layer()

    def run(compile: bool) -> list[Tensor]:
        result = todist.inner_loop(loss, todist.sgd(lr=0.1), net, [X, X], compile=compile)
        return [result.losses.detach(), *(p.detach() for p in result.params.parameters())]

    before = both(run)
    assert made
    change(net, monkeypatch)
    assert not torch.equal(both(run)[0], before[0])


def test_a_hook_that_is_taken_away_and_one_of_another_module() -> None:
    net, other = layer(), layer()
    handles = [module.register_forward_hook(tripled) for module in (net, other)]

    def run(compile: bool) -> list[Tensor]:
        def loss(net: nn.Module, x: Tensor) -> Tensor:
            return (net(x) * other(x).detach()).sum()

        return [todist.inner_loop(loss, todist.sgd(lr=0.01), net, [X], compile=compile).losses]

    both(run)
    for handle in handles:
        handle.remove()
        both(run)


def test_hooks_for_all_modules() -> None:
    net = layer()

    def run(compile: bool) -> list[Tensor]:
        return [todist.inner_loop(output, todist.sgd(lr=0.1), net, [X], compile=compile).losses]

    before = both(run)
    handle = nn.modules.module.register_module_forward_hook(tripled)
    try:
        assert not torch.equal(both(run)[0], before[0])
    finally:
        handle.remove()
    assert torch.equal(both(run)[0], before[0])


def test_a_module_that_gets_a_parametrization() -> None:
    class Tripled(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 3 * w

    net = layer()

    def run(compile: bool) -> list[Tensor]:
        return [todist.inner_loop(output, todist.sgd(lr=0.1), net, [X], compile=compile).losses]

    both(run)
    nn.utils.parametrize.register_parametrization(net[0], "weight", Tripled())
    both(run)


@pytest.mark.parametrize("adjoint", [todist.Replayed(), todist.Recorded()], ids=repr)
def test_where_compiling_does_not_pay_it_is_said_once_with_both_times(
    adjoint: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    w = torch.ones(1, requires_grad=True)
    seconds = {"without": 0.0}

    def timed(function: Callable[[], Any]) -> tuple[Any, float]:
        return function(), seconds.get(function.__name__, 0.003)

    def run(steps: int, compile: bool) -> list[Tensor]:
        torch.manual_seed(0)
        result = todist.inner_loop(
            lambda w: (w * torch.rand(1)).square().sum(),
            todist.sgd(lr=0.1),
            w,
            steps,
            adjoint=adjoint,
            compile=compile,
        )
        return [result.losses.detach(), torch.rand(1)]

    monkeypatch.setattr(programs, "timed", timed)
    for plain, steps, count in ((0.004, 30, 0), (0.002, 10, 0), (0.002, 11, 1), (0.001, 30, 1)):
        if count == 0:
            programs.programs_of.cache_clear()
        seconds["without"] = plain
        both(functools.partial(run, steps))
        said = [one.getMessage() for one in caplog.records if one.name == "torchopt_dist"]
        assert len(said) == count
    assert said == [
        "an inner loop with compile=True takes 3 ms a step, and 2 ms without it: "
        "unless its backward pass gains by it, it does not pay here"
    ]


NUMBER = 2.0
WHOLE = 2


def of_global(w: Tensor) -> Tensor:
    return NUMBER * (w**2).sum()


def of_whole_global(w: Tensor) -> Tensor:
    return WHOLE * (w**2).sum()


def with_global(name: str, value: Any) -> Any:
    globals()[name] = value
    return of_whole_global if name == "WHOLE" else of_global, todist.sgd(lr=0.01)


def with_default(value: Any) -> Any:
    def loss(w: Tensor, by: Any = value) -> Tensor:
        return by * (w**2).sum()

    return loss, todist.sgd(lr=0.01)


class Powers(nn.Module):
    """A module that has a number."""

    def __init__(self, by: Any) -> None:
        super().__init__()
        self.by = by

    def forward(self, w: Tensor) -> Tensor:
        return self.by * (w**2).sum()


NUMBERS: dict[str, Callable[[int], Any]] = {
    "a learning rate": lambda k: (lambda w: (w**2).sum(), todist.sgd(lr=0.01 * k)),
    "a number of momentum": lambda k: (lambda w: (w**2).sum(), todist.sgd(lr=0.01, momentum=0.1 * k)),
    "a schedule's": lambda k: (lambda w: (w**2).sum(), todist.sgd(lr=lambda step: 0.01 * k * 0.9**step)),
    "a closure's": lambda k: (lambda w: 0.5 * k * (w**2).sum(), todist.sgd(lr=0.01)),
    "a whole one": lambda k: (lambda w: k * (w**2).sum(), todist.sgd(lr=0.01)),
    "an entry": lambda k: (
        functools.partial(lambda of, w: of[0] * (w**2).sum(), [0.5 * k]),
        todist.sgd(lr=0.01),
    ),
    "a global": lambda k: with_global("NUMBER", 0.5 * k),
    "a whole global": lambda k: with_global("WHOLE", k),
    "a default": lambda k: with_default(0.5 * k),
    "a whole default": with_default,
    "a module's": lambda k: (Powers(0.5 * k), todist.sgd(lr=0.01)),
    "a whole one of a module": lambda k: (Powers(k), todist.sgd(lr=0.01)),
    "an index": lambda k: (lambda w: w[k % 2] ** 2 + w.sum(), todist.sgd(lr=0.01)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_changes_is_an_input_of_the_second_program(name: str) -> None:
    w = torch.ones(2, requires_grad=True)
    counts = []
    for k in (3, 4, 5, 6, 3):

        def run(compile: bool, k: int = k) -> list[Tensor]:
            loss, optimizer = NUMBERS[name](k)
            result = todist.inner_loop(loss, optimizer, w, 2, compile=compile)
            return [result.losses, result.params]

        both(run)
        counts.append(len(made))
    assert counts == [counts[0], *[2 * counts[0]] * 4]  # momentum has one more, of the first step


def test_one_program_too_many_switches_no_other_off(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a number decides, so it is no input."""
    monkeypatch.setattr(programs, "LIMIT", 3)
    w = torch.ones(2, requires_grad=True)

    def run(times: int, compile: bool) -> list[Tensor]:
        def loss(w: Tensor) -> Tensor:
            return torch.stack([(w**2).sum() for _ in range(times)]).sum()

        result = todist.inner_loop(loss, todist.sgd(lr=0.01), w, 5, compile=compile)
        return [result.losses, result.params]

    for times in (1, 2, 3):
        both(functools.partial(run, times))
    assert len(made) == 3
    with pytest.warns(UserWarning, match="since `times` differs from that in each of its 3 programs"):
        both(functools.partial(run, 4))
    both(functools.partial(run, 5))  # said once
    monkeypatch.setattr(Loop, "recorded_step", None)
    for times in (1, 2, 3):
        run(times, True)
    assert not [record for record in caplog.records if "limit" in record.getMessage()]


def test_one_shape_too_many_switches_no_other_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is that of the environment variable, which may rise while the process runs."""
    monkeypatch.setenv("TODIST_COMPILE_LIMIT", "2")
    w = torch.ones(1, requires_grad=True)

    def run(rows: int, compile: bool) -> list[Tensor]:
        given = [torch.ones(rows)] * 2
        return [
            todist.inner_loop(
                lambda w, x: (w * x).sum() ** 2, todist.sgd(lr=0.01), w, given, compile=compile
            ).losses
        ]

    for rows in (1, 2):
        both(functools.partial(run, rows))
    with pytest.warns(
        UserWarning,
        match="since its batch differs from that in each of its 2 programs: .* TODIST_COMPILE_LIMIT=4",
    ):
        both(functools.partial(run, 3))
    for rows in (1, 2):
        both(functools.partial(run, rows))
    assert len(made) == 2
    monkeypatch.setenv("TODIST_COMPILE_LIMIT", "3")
    for rows in (3, 2, 1):
        both(functools.partial(run, rows))
    assert len(made) == 3
    for wrong in ("0", "many", "-1"):
        monkeypatch.setenv("TODIST_COMPILE_LIMIT", wrong)
        with pytest.raises(
            ValueError, match=f"TODIST_COMPILE_LIMIT must be a number from 1 on, got '{wrong}'"
        ):
            run(1, True)


def test_what_is_one_too_many_is_told_by_the_program_that_is_most_like_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TODIST_COMPILE_LIMIT", "2")
    w = torch.ones(2, requires_grad=True)

    def run(mode: str, power: bool, x: Tensor, compile: bool) -> list[Tensor]:
        def loss(w: Tensor, x: Tensor) -> Tensor:
            made = (w * x).sum() ** (2 if power else 1)
            return made if mode == "a" else -made

        return [todist.inner_loop(loss, todist.sgd(lr=0.01), w, [x], compile=compile).losses]

    for mode, power in (("a", True), ("b", False)):
        both(functools.partial(run, mode, power, X[0]))
    with pytest.warns(UserWarning, match="since `power` differs from that in each of its 2 programs"):
        both(functools.partial(run, "a", False, X[0]))
