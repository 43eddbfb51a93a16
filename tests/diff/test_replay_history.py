"""A history that outlives its process: the same loop with the same folder, after an end, a kill, or a full disk."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

import torchopt_dist as todist
from tests.diff.adjoint_table import Problem, gradients
from tests.processes import python
from torchopt_dist.errors import CheckpointError

D = torch.float64
STEPS = 12


class Task:
    """A training whose examples have weights, with a count of the calls of its loss."""

    def __init__(self, optimizer: todist.GradientTransformation | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(8, 3, dtype=D, generator=generator), torch.arange(8, dtype=D) / 8
        self.first = torch.randn(3, dtype=D, generator=generator).requires_grad_()
        self.weights = torch.ones(8, dtype=D, requires_grad=True)
        self.optimizer = optimizer or todist.adamw(lr=0.05, eps_root=1e-8)
        self.calls = 0

    def loss(self, w):
        self.calls += 1
        kept = torch.nn.functional.dropout(self.x, 0.3)
        return (self.weights * ((kept @ w).tanh() - self.y) ** 2).mean()

    def run(self, adjoint, steps=STEPS, **options):
        options = {"meta": self.weights, "seed": 3, **options}
        return todist.inner_loop(self.loss, self.optimizer, self.first, steps, adjoint=adjoint, **options)

    def query(self, result, number=0):
        loss = result.params[number] + result.losses[4] if number else (result.params**3).sum()
        return torch.autograd.grad(loss, [self.weights, self.first])


def history(folder: Path, **options) -> todist.Replayed:
    return todist.Replayed(store=folder, keep=True, **options)


@pytest.fixture(params=["each step", "small steps"])
def unit(request, monkeypatch):
    if request.param == "each step":
        monkeypatch.setattr("torchopt_dist.diff.adjoints._store.SMALL", 0)
    return request.param


@pytest.mark.parametrize("options", [{}, {"snapshots": 3}], ids=["all", "three"])
def test_later_queries_are_answered_without_training_again(unit, options, tmp_path):
    task = Task()
    expected = [task.query(task.run(todist.Recorded()), number) for number in range(3)]
    first = Task()
    result = first.run(history(tmp_path, **options))
    torch.testing.assert_close(first.query(result), expected[0])
    files = {
        path.name: path.read_bytes()
        for path in tmp_path.iterdir()
        if path.suffix != ".pt" or "start" in path.name
    }
    for number in range(1, 3):
        later = Task()
        again = later.run(history(tmp_path, **options))
        assert later.calls == 0
        torch.testing.assert_close(again.params, result.params, rtol=0, atol=0)
        torch.testing.assert_close(again.losses, result.losses, rtol=0, atol=0)
        torch.testing.assert_close(again.state, result.state, rtol=0, atol=0)
        torch.testing.assert_close(later.query(again, number), expected[number])
        assert later.calls >= STEPS
    assert files == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name in files}
    assert not list(tmp_path.glob(".writing-*"))


@pytest.mark.parametrize("kind", ["tree", "module"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_every_kind_of_parameters_and_state(kind, optimizer, tmp_path):
    expected, found = [], []
    for adjoint, into in ((todist.Recorded(), expected), (history(tmp_path), []), (history(tmp_path), found)):
        problem = Problem(kind, optimizer)
        into.append(gradients(problem.outer(problem.run(adjoint).params), problem.tensors()))
    for what, gradient in expected[0].items():
        torch.testing.assert_close(found[0][what], gradient, rtol=1e-10, atol=1e-10)


def test_second_derivatives_and_many_queries_of_a_history(tmp_path):
    found = []
    for adjoint in (todist.Recorded(), history(tmp_path), history(tmp_path)):
        task = Task()
        result = task.run(adjoint)
        [many] = torch.autograd.grad(
            result.params, task.weights, torch.eye(3, dtype=D), is_grads_batched=True, retain_graph=True
        )
        [first] = torch.autograd.grad(result.params.sum(), task.weights, create_graph=True)
        found.append([many, *torch.autograd.grad((first**2).sum(), [task.weights, task.first])])
    torch.testing.assert_close(found[1:], [found[0]] * 2)


def test_a_schedule_and_a_stop(tmp_path):
    for number, options in enumerate(({}, {"stop": lambda number, loss: number == 6})):
        found = []
        for adjoint in (todist.Recorded(), *[history(tmp_path / str(number))] * 2):
            task = Task(todist.adamw(lr=lambda step: 0.05 / (1 + step), eps_root=1e-8))
            result = task.run(adjoint, **options)
            found.append([task.query(result), result.losses])
        assert len(result.losses) == (7 if options else STEPS)
        torch.testing.assert_close(found[1:], [found[0]] * 2)


KILLED = """
import os, signal, sys
from pathlib import Path

import torch
from tests.diff.test_replay_history import Task, history
from torchopt_dist.diff.adjoints import _store

_store.SMALL = 0
folder, at = Path(sys.argv[1]), int(sys.argv[2])
task = Task()
loss = task.loss


def dying(w):
    if task.calls == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss(w)


task.loss = dying
result = task.run(history(folder))
print(task.calls, flush=True)
torch.save([task.query(result), result.losses], folder / "found")
"""


def test_a_killed_loop_goes_on_where_it_was(tmp_path):
    ended = python("-c", KILLED, tmp_path, 7)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(["loop.json", *(f"start-{number}.pt" for number in range(8))])
    ended = python("-c", KILLED, tmp_path, -1)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [str(STEPS - 7)]
    task = Task()
    result = task.run(todist.Recorded())
    torch.testing.assert_close(torch.load(tmp_path / "found"), [task.query(result), result.losses])
    # Killed on the way back: the history is whole, and nothing is trained.
    ended = python("-c", KILLED, tmp_path, 5)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    later = Task()
    result = later.run(history(tmp_path))
    assert later.calls == 0
    torch.testing.assert_close(later.query(result), task.query(task.run(todist.Recorded())))


def other_loops():
    yield "steps", lambda task, adjoint: task.run(adjoint, steps=STEPS + 1)
    yield "seed", lambda task, adjoint: task.run(adjoint, seed=4)

    def wider(task, adjoint):
        task.first = torch.ones(4, dtype=D, requires_grad=True)
        task.run(adjoint)

    yield "parameters", wider

    def single(task, adjoint):
        task.first = task.first.detach().float().requires_grad_()
        task.run(adjoint)

    yield "parameters", single

    def momentum(task, adjoint):
        task.optimizer = todist.sgd(lr=0.1, momentum=0.9)
        task.run(adjoint)

    yield "state", momentum

    def other_weights(task, adjoint):
        task.weights = torch.full((8,), 2.0, dtype=D, requires_grad=True)
        task.run(adjoint)

    yield "first values", other_weights
    yield (
        "meta tensors",
        lambda task, adjoint: task.run(adjoint, meta=[task.weights, torch.ones(2, requires_grad=True)]),
    )


@pytest.mark.parametrize(("what", "run"), list(other_loops()))
def test_the_history_of_another_loop_is_refused_by_name(what, run, tmp_path):
    Task().run(history(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(
        ValueError, match=f"`store` must be a folder of this loop.* has the history of one with {what}"
    ):
        run(Task(), history(tmp_path))
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_loss_of_another_loop_is_noticed_on_the_way_back(tmp_path):
    Task().run(history(tmp_path))
    task = Task()
    task.y = task.y + 1
    with pytest.raises(RuntimeError, match=r"the loss of step \d+ was .* history"):
        task.query(task.run(history(tmp_path)))


@pytest.mark.usefixtures("unit")
def test_a_torn_folder_is_named(tmp_path):
    Task().run(history(tmp_path))
    middle = sorted(tmp_path.glob("start-*.pt"), key=lambda path: int(path.stem[6:]))[1]
    content = middle.read_bytes()
    for torn in (content[: len(content) // 2], b"", None):
        middle.unlink() if torn is None else middle.write_bytes(torn)
        with pytest.raises(
            CheckpointError, match=f"must be whole, but {middle.name} cannot be read .* remove the"
        ):
            Task().run(history(tmp_path))
    middle.write_bytes(content)
    Task().run(history(tmp_path))
    for text in ("", "[]", json.dumps({"of": 1})):
        (tmp_path / "loop.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"but loop.json cannot be read"):
            Task().run(history(tmp_path))


def test_a_file_that_goes_before_the_gradient_is_named(tmp_path):
    task = Task()
    result = task.run(history(tmp_path))
    (tmp_path / "start-0.pt").unlink()
    with pytest.raises(CheckpointError, match=r"start-0.pt cannot be read \(FileNotFoundError"):
        task.query(result)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("torchopt_dist.diff.adjoints._store.SMALL", 0)
    save, saved = torch.save, []

    def full(value, file):
        if len(saved) == 5:
            file.write(b"half of it")
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 832 vs 726")
        saved.append(file)
        save(value, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        OSError, match=r"with room for the history: start-5.pt.* what was written before is there"
    ):
        Task().run(history(tmp_path))
    assert len(list(tmp_path.glob("start-*.pt"))) == 5
    assert len(list(tmp_path.iterdir())) == 6
    monkeypatch.setattr(torch, "save", save)
    task = Task()
    result = task.run(history(tmp_path))
    assert task.calls == STEPS - 4
    torch.testing.assert_close(task.query(result), task.query(task.run(todist.Recorded())))


def test_wrong_arguments_are_named(tmp_path):
    for store in (None, "cpu"):
        with pytest.raises(ValueError, match="`store` must be a folder with `keep`, got"):
            todist.Replayed(store=store, keep=True)
    with pytest.raises(TypeError, match="`keep` must be True or False, got int 1"):
        todist.Replayed(store=tmp_path, keep=1)
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="`keep` must be False with `has_aux`"):
        todist.inner_loop(
            lambda w: (w.sum(), 1), todist.sgd(lr=0.1), w, 2, has_aux=True, adjoint=history(tmp_path)
        )
    assert not os.listdir(tmp_path)


@pytest.fixture
def always(monkeypatch):
    """Each segment is a step, and each is kept on the way back."""
    monkeypatch.setattr("torchopt_dist.diff.adjoints._store.SMALL", 0)
    monkeypatch.setattr("torchopt_dist.diff.adjoints._history.EVERY", 0.0)


class Cut(Exception):
    """Raised on the way back."""


def cut_off(task: Task, at: int, ask) -> None:
    """Ask for a gradient of a history that is there, and cut its way back off at the loss's call number ``at``."""
    loss, task.calls = task.loss, 0

    def cut(w):
        if task.calls == at:
            raise Cut
        return loss(w)

    task.loss = cut
    with pytest.raises(Cut):
        ask(task)
    task.loss, task.calls = loss, 0


def many(task, result):
    made = torch.stack([result.params.sum(), (result.params**2).sum()])
    return torch.autograd.grad(made, [task.weights, task.first], torch.eye(2, dtype=D), is_grads_batched=True)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("ask", [Task.query, many], ids=["one", "many"])
def test_a_way_back_goes_on_where_it_was_cut_off(ask, tmp_path):
    whole = Task()
    expected = ask(whole, whole.run(todist.Recorded()))
    Task().run(history(tmp_path))
    task = Task()
    cut_off(task, 8, lambda task: ask(task, task.run(history(tmp_path))))
    assert len(list(tmp_path.glob("way-back-*.pt"))) == 1
    # Cut off once more, and another query in between.
    cut_off(task, 2, lambda task: ask(task, task.run(history(tmp_path))))
    torch.testing.assert_close(
        torch.autograd.grad(task.run(history(tmp_path)).params[0], task.weights)[0],
        torch.autograd.grad(whole.run(todist.Recorded()).params[0], whole.weights)[0],
    )
    later = Task()
    torch.testing.assert_close(ask(later, later.run(history(tmp_path))), expected)
    assert later.calls == STEPS - 10
    assert not list(tmp_path.glob("way-back-*.pt"))
    assert not list(tmp_path.glob(".writing-*"))


@pytest.mark.usefixtures("always")
def test_only_the_same_gradient_goes_on(tmp_path):
    whole = Task()
    result = whole.run(todist.Recorded())
    Task().run(history(tmp_path))
    for place in (0, 1):  # the same gradients to begin with, of other tensors
        task = Task()
        cut_off(task, 5, lambda task: task.query(task.run(history(tmp_path))))
        made = task.run(history(tmp_path))
        source, other = [task.weights, task.first][place], [whole.weights, whole.first][place]
        [found] = torch.autograd.grad((made.params**3).sum(), source)
        [expected] = torch.autograd.grad((result.params**3).sum(), other, retain_graph=True)
        torch.testing.assert_close(found, expected)
    # Those of two losses begin with the same, and differ on the way.

    def with_loss(task, made, number):
        return torch.autograd.grad((made.params**3).sum() + made.losses[number], task.weights)

    cut_off(task, 5, lambda task: with_loss(task, task.run(history(tmp_path)), 8))
    made = task.run(history(tmp_path))
    torch.testing.assert_close(with_loss(task, made, 9), with_loss(whole, result, 9))
    # A recorded gradient, which is differentiated again, is gone through whole.
    cut_off(task, 5, lambda task: task.query(task.run(history(tmp_path))))
    seconds = []
    for one in (Task(), task):
        made = one.run(history(tmp_path) if one is task else todist.Recorded())
        [first] = torch.autograd.grad((made.params**3).sum(), one.weights, create_graph=True)
        seconds.append(torch.autograd.grad((first**2).sum(), [one.weights, one.first]))
    torch.testing.assert_close(*seconds)


@pytest.mark.usefixtures("always")
def test_a_way_back_that_cannot_be_kept_or_read_is_gone_again(tmp_path, monkeypatch):
    whole = Task()
    expected = whole.query(whole.run(todist.Recorded()))
    Task().run(history(tmp_path))
    task = Task()
    cut_off(task, 5, lambda task: task.query(task.run(history(tmp_path))))
    [file] = tmp_path.glob("way-back-*.pt")
    file.write_bytes(file.read_bytes()[:100])
    torch.testing.assert_close(task.query(task.run(history(tmp_path))), expected)
    assert task.calls == STEPS

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    result = task.run(history(tmp_path))
    monkeypatch.setattr(torch, "save", full)
    with pytest.warns(UserWarning, match="the way back could not be kept, and begins anew .* with room"):
        torch.testing.assert_close(task.query(result), expected)
