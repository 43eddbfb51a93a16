"""``progress=True`` and ``callback=``: each step is told once, whatever runs again, and shown where one looks."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist.core import programs
from torchopt_dist.process import progress_bar

STEPS = 5
ADJOINTS = [
    todist.Recorded(),
    todist.Replayed(),
    todist.Truncated(2),
    todist.FirstOrder(),
    todist.Reptile(),
    todist.FiniteDifference(),
    todist.SAMA(),
    todist.Implicit(not_converged="ignore"),
    todist.EvolutionStrategies(sigma=0.1, samples=2),
    todist.PersistentEvolutionStrategies(sigma=0.1, samples=2, unroll=2),
]


def run(adjoint: Any = None, **options: Any) -> tuple[Any, Tensor]:
    """A loop, and the gradient of its scale and of where it starts."""
    lr = torch.tensor(0.1, requires_grad=True)
    w = torch.tensor([1.0, 2.0], requires_grad=True)

    def loss(w: Tensor) -> Tensor:
        return (lr * w.square()).sum()

    result = todist.inner_loop(
        loss, todist.sgd(lr=0.1), w, STEPS, meta=lr, adjoint=adjoint or todist.Recorded(), seed=0, **options
    )
    found = torch.autograd.grad(result.params.sum(), (lr, w), allow_unused=True, materialize_grads=True)
    return result, torch.cat([gradient.reshape(-1) for gradient in found])


@each_row("adjoint", ADJOINTS)
@each_row("stop", [None, lambda number, loss: number == 3])
def test_each_step_is_told_once_and_nothing_is_changed(adjoint: Any, stop: Any) -> None:
    told: list[tuple[int, float, bool]] = []

    def callback(number: int, loss: Tensor) -> bool:
        told.append((number, loss.item(), loss.requires_grad))
        return True  # which ends nothing

    torch.manual_seed(0)
    expected, of_expected = run(adjoint, stop=stop)
    torch.manual_seed(0)
    result, gradient = run(adjoint, stop=stop, callback=callback)
    assert [number for number, _, _ in told] == list(range(len(expected.losses)))
    assert len(told) == (STEPS if stop is None else 4)
    assert [loss for _, loss, _ in told] == pytest.approx(expected.losses.tolist())
    assert not any(requires_grad for *_, requires_grad in told)
    assert torch.equal(result.params, expected.params)
    assert torch.equal(gradient, of_expected)


def test_without_grad_mode_and_in_an_optimizer_s_run() -> None:
    told: list[int] = []

    def callback(number: int, loss: Tensor) -> None:
        told.append(number)

    with torch.no_grad():
        todist.inner_loop(
            lambda w: w**2, todist.sgd(lr=0.1), torch.ones((), requires_grad=True), 3, callback=callback
        )
    net = torch.nn.Linear(1, 1)
    todist.MetaSGD(net, lr=0.1).run(lambda net: net(torch.ones(2, 1)).square().mean(), 2, callback=callback)
    assert told == [0, 1, 2, 0, 1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_compiled_loop_tells_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "kernels", lambda _captured, graph, _inputs: graph)
    told: list[int] = []
    w = torch.ones(3, requires_grad=True)
    todist.inner_loop(
        lambda w: w.square().sum(),
        todist.sgd(lr=0.1),
        w,
        3,
        compile=True,
        callback=lambda number, loss: told.append(number),
    )
    assert told == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("progress", [True, False])
@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
@pytest.mark.parametrize("way", ["inner_loop", "run"])
def test_a_compilation_says_so_in_a_pipe(
    progress: bool, level: int, way: str, shown: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On standard error, unless the log says it already."""
    monkeypatch.setattr(programs, "kernels", lambda _captured, graph, _inputs: graph)
    programs.programs_of.cache_clear()
    pipe, net = shown(io.StringIO()), torch.nn.Linear(1, 1)
    optimizer = todist.MetaSGD(net, lr=0.1)
    given: dict[str, Any] = {"compile": True, "progress": progress, "adjoint": todist.Replayed()}
    with caplog.at_level(level, logger="torchopt_dist"):
        if way == "run":
            optimizer.run(lambda net: net(torch.ones(2, 1)).square().mean(), 2, **given)
        else:
            net = todist.inner_loop(
                lambda net: net(torch.ones(2, 1)).square().mean(), todist.sgd(lr=0.1), net, 2, **given
            ).params
        before = len(pipe.getvalue().splitlines())
        next(net.parameters()).sum().backward()
    lines = pipe.getvalue().splitlines()
    told = [record.getMessage() for record in caplog.records if record.name == "torchopt_dist"]
    if level == logging.INFO:
        assert not lines
        assert told
    elif not progress:
        assert not lines
    else:
        assert (
            lines[0] == "torchopt_dist: compiling an inner loop, which takes some 5 to 45 s at its first call"
        )
        assert re.fullmatch(r"torchopt_dist: compiled an inner loop in \d+\.\d s", lines[1])
        assert len(lines) > before, "the derivative of a step is compiled in the backward pass"


@pytest.mark.parametrize("adjoint", [todist.Recorded(), todist.Replayed()], ids=["recorded", "replayed"])
def test_inside_vmap_a_step_is_told_once_with_the_loss_of_the_sample(adjoint: Any) -> None:
    told: list[tuple[int, int]] = []

    def adapted(w: Tensor) -> Tensor:
        return todist.inner_loop(
            lambda w: w**2,
            todist.sgd(lr=0.1),
            w,
            3,
            adjoint=adjoint,
            callback=lambda number, loss: told.append((number, loss.dim())),
            progress=True,
        ).params

    torch.func.vmap(adapted)(torch.ones(4, requires_grad=True)).sum().backward()
    assert told == [(0, 0), (1, 0), (2, 0)]


def test_inside_vmap_the_loss_that_is_shown_is_the_mean_of_the_samples(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bar, "LOG_SECONDS", 0.0)
    bar = progress_bar.StepsBar("steps", 2)
    with caplog.at_level(logging.INFO, logger=progress_bar.__name__):
        torch.vmap(lambda loss: (bar(0, loss), loss)[1])(torch.tensor([1.0, 2.0]))
        torch.func.grad(lambda loss: (bar(1, loss), loss)[1])(torch.tensor(3.0))
    inside, hidden = caplog.messages
    assert "loss 1.5," in inside
    assert "loss" not in hidden


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[[io.StringIO], io.StringIO]:
    """Standard error becomes such a stream, and each step is shown."""

    def replaced(stream: io.StringIO) -> io.StringIO:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(progress_bar, "SHOW_SECONDS", 0.0)
        monkeypatch.setattr(progress_bar, "LOG_SECONDS", 0.0)
        monkeypatch.setenv("RANK", "0")
        return stream

    return replaced


class Cell(io.StringIO):
    """Stands for the stream of a notebook's cell, which is no terminal."""

    __module__ = "ipykernel.iostream"


@pytest.mark.parametrize("stream", [Terminal, Cell])
def test_a_terminal_and_a_cell_have_a_bar_with_the_loss(
    stream: type[io.StringIO], shown: Any, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = shown(stream())
    with caplog.at_level(logging.INFO):
        run(progress=True)
    assert "inner_loop" in terminal.getvalue()
    assert f"{STEPS}/{STEPS}" in terminal.getvalue()
    assert "loss 0." in terminal.getvalue()
    assert not caplog.records


def test_a_file_has_lines_of_the_log(shown: Any, caplog: pytest.LogCaptureFixture) -> None:
    file = shown(io.StringIO())
    with caplog.at_level(logging.INFO, logger=progress_bar.__name__):
        run(progress=True)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == STEPS
    assert lines[0].startswith(f"inner_loop: step 1 of {STEPS}, loss 0.5, ")
    assert lines[-1].endswith(", 0 s left")
    assert file.getvalue() == ""


def test_another_rank_logs_though_it_shares_the_terminal(
    shown: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = shown(Terminal())
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.INFO, logger=progress_bar.__name__):
        run(progress=True)
    assert len(caplog.records) == STEPS
    assert "step 1 of" not in terminal.getvalue()


def test_the_last_step_is_shown_however_quick_the_loop_is(
    shown: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown(io.StringIO())
    monkeypatch.setattr(progress_bar, "LOG_SECONDS", 1000.0)
    with caplog.at_level(logging.INFO, logger=progress_bar.__name__):
        run(progress=True)
    (record,) = caplog.records
    assert f"step {STEPS} of {STEPS}" in record.getMessage()


def test_a_bar_goes_after_an_error(shown: Any) -> None:
    terminal = shown(Terminal())

    def callback(number: int, loss: Tensor) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(progress=True, callback=callback)
    assert terminal.getvalue().endswith("\r")  # the line is empty again


def test_wrong_arguments_and_no_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="`progress` must be True or False, got str 'yes'"):
        run(progress="yes")
    with pytest.raises(
        TypeError, match="`callback` must be a function of a step's number and its loss, got int"
    ):
        run(callback=3)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="progress=True needs tqdm"):
        run(progress=True)
