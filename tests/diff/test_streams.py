"""Batches that can be read once: the loop of a list of them, or an error that says which adjoints take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torchopt_dist as todist
from tests.diff.adjoint_table import ALL, STEPS, Problem, gradients
from tests.rows import each_row
from torchopt_dist.diff.adjoints import Adjoint

ONCE = {name: adjoint for name, adjoint in ALL.items() if adjoint.batches_again is not None}
AGAIN = {name: adjoint for name, adjoint in ALL.items() if name not in ONCE}
# Away from a minimum no conjugate gradients are found.
ONCE["implicit"] = todist.Implicit(todist.linear_solve.solve_inv(), not_converged="ignore")
ONCE["implicit, the last two"] = todist.Implicit(
    todist.linear_solve.solve_inv(), batches=2, not_converged="ignore"
)


class Reader(Problem):
    """The problem of the table, whose batches are constants."""

    def run_on(self, adjoint: Adjoint, batches: Any, **options: Any) -> todist.typing.InnerLoopResult:
        meta = {"weights": self.weights, "head": self.head}
        return todist.inner_loop(
            self.loss, self.optimizer, self.params, batches, meta=meta, adjoint=adjoint, **options
        )


@each_row("stop", [None, lambda number, _: number == 2], ids=["to the end", "stopped"])
@each_row("name", ONCE)
@pytest.mark.filterwarnings("ignore:.Implicit.* gives no gradient")  # to the rate
def test_a_stream_is_a_list_of_its_batches(name: str, stop: Any) -> None:
    found = []
    for as_stream in (False, True):
        problem = Reader("module", "adam")
        xs: Any = [x.detach() for x in problem.xs]
        result = problem.run_on(ONCE[name], iter(xs) if as_stream else xs, stop=stop, steps=STEPS)
        of = problem.tensors()
        found.append((gradients(problem.outer(result.params), of), result.losses))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert len(found[0][1]) == (STEPS if stop is None else 3)


@each_row("name", AGAIN)
def test_adjoints_that_run_steps_again_name_those_that_do_not(name: str) -> None:
    problem = Reader("module", "adam")
    with pytest.raises(TypeError) as caught:
        problem.run_on(AGAIN[name], DataLoader(TensorDataset(problem.xs[0].detach())))
    text = str(caught.value)
    assert f"with todist.{type(AGAIN[name]).__name__}, which runs steps again, got DataLoader: `list" in text
    named = {type(adjoint).__name__ for adjoint in ONCE.values()}
    assert all(f"todist.{kind}" in text for kind in named)
    with torch.no_grad():  # nothing is run again
        problem.run_on(AGAIN[name], iter([x.detach() for x in problem.xs]), steps=STEPS)


def test_a_loader_gives_the_batches_of_a_plain_loop() -> None:
    data = torch.arange(12.0).reshape(12, 1)
    loader = DataLoader(TensorDataset(data), batch_size=3, shuffle=True)
    torch.manual_seed(3)
    wanted = [x.flatten().tolist() for (x,) in loader]
    seen: list[list[float]] = []

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(batch[0].flatten().tolist())
        made: torch.Tensor = net(batch[0]).square().mean()
        return made

    net = nn.Linear(1, 1)
    torch.manual_seed(3)
    assert todist.inner_loop(loss, todist.sgd(lr=0.001), net, loader, seed=1).losses.shape == (4,)
    assert seen == wanted
    torch.manual_seed(3)
    todist.MetaSGD(net, lr=0.001).run(loss, loader)
    assert seen[4:] == wanted
    torch.manual_seed(3)
    todist.inner_loop(loss, todist.sgd(lr=0.001), net, loader, steps=2)
    assert seen[8:] == wanted[:2]


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(1)


def mean_loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = net(x).mean()
    return made


@each_row(
    ("batches", "options", "kind", "told"),
    [
        (
            lambda: DataLoader(Endless(), batch_size=2),
            {},
            ValueError,
            "`steps` must say how many steps there are, since `batches` is a DataLoader, which has no length",
        ),
        (
            lambda: (torch.ones(2, 1) for _ in range(2)),
            {"steps": 3},
            ValueError,
            "`batches` must have one batch for each step: the generator ended at step 2 of 3",
        ),
        (lambda: iter(()), {"steps": 3}, ValueError, "the tuple_iterator ended at step 0 of 3"),
        (
            lambda: None,
            {},
            TypeError,
            "must be a sequence, an iterable, a function of the step's number or a number of steps, got NoneType",
        ),
    ],
)
def test_what_ends_too_soon_and_what_is_no_stream(
    batches: Callable[[], Any], options: Any, kind: type[Exception], told: str
) -> None:
    with pytest.raises(kind, match=told):
        todist.inner_loop(mean_loss, todist.sgd(lr=0.1), nn.Linear(1, 1), batches(), **options)


def test_a_stream_without_steps_is_not_read() -> None:
    rest = iter([torch.ones(1)])
    todist.inner_loop(mean_loss, todist.sgd(lr=0.1), nn.Linear(1, 1), rest, steps=0)
    assert len(list(rest)) == 1


def test_an_adjoint_that_says_too_little_gets_an_error() -> None:
    class Twice(todist.Recorded):
        def run(self, loop: Any) -> Any:
            loop.batch(2)
            return super().run(loop)

    rest = iter([torch.ones(1)] * 3)
    with pytest.raises(
        RuntimeError, match="a list_iterator, can be read once, and the batch of step 0 is needed"
    ):
        todist.inner_loop(mean_loss, todist.sgd(lr=0.1), nn.Linear(1, 1), rest, steps=3, adjoint=Twice())
