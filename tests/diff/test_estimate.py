"""``todist.estimate`` says from three steps what memory a whole loop takes, within 20 % of what is then allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import torchopt_dist as todist
from examples import adjoints as example
from tests.rows import each_row
from torchopt_dist.diff.adjoints._store import lengths
from torchopt_dist.diff.estimate import _again

REPLAYS: tuple[Any, ...] = (
    todist.Replayed(),
    todist.Replayed(snapshots=2),
    todist.Replayed(memory="3MB"),
    todist.Replayed(blocks="auto", snapshots=3),
)
OTHERS: tuple[Any, ...] = (
    todist.Recorded(),
    todist.Truncated(8),
    todist.Truncated(100),
    todist.FirstOrder(),
    todist.SAMA(),
    todist.EvolutionStrategies(2, 0.1),
)
RIDGE = todist.linear_solve.solve_cg(ridge=10.0, maxiter=20, not_converged="ignore")
IMPLICIT = todist.Implicit(RIDGE, not_converged="ignore")


def allocated(run: Any) -> int:
    """The most bytes that torch's allocator has given out at a time: another route than counting tensors."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = run()
    del kept
    events = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
    now = most = 0
    for one in sorted(events, key=lambda one: one.start_ns()):
        now += one.nbytes()
        most = max(most, now)
    return most


def counted(run: Any) -> int:
    """The most bytes of tensors that there were at a time, as the examples count them."""
    with example.PeakMemory() as memory:
        run()
    return memory.peak


def mlp() -> dict[str, Any]:
    """Adam on a network in blocks, with weights of the examples as meta, for a number of steps."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(6)), nn.Linear(96, 1))
    x, y, weights = torch.randn(192, 96), torch.randn(192, 1), torch.ones(192, 1, requires_grad=True)
    return {
        "loss": lambda net: (weights * (net(x) - y) ** 2).mean(),
        "optimizer": todist.adam(lr=1e-3),
        "params": net,
        "batches": 24,
        "meta": weights,
    }


def conv() -> dict[str, Any]:
    """SGD on Conv4 with BatchNorm, whose batches a function draws, and which returns its logits as well."""
    layers: list[nn.Module] = []
    for channels in (1, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    net = nn.Sequential(nn.Sequential(*layers, nn.Flatten()), nn.Linear(256, 5))
    scale = torch.ones(5, requires_grad=True)

    def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = net(batch[0]) * scale
        return F.cross_entropy(logits, batch[1]), logits.detach()

    def batches(step: int) -> tuple[Tensor, Tensor]:
        return torch.randn(64, 1, 28, 28), torch.arange(64) % 5

    return {
        "loss": loss,
        "optimizer": todist.sgd(lr=0.01, momentum=0.9),
        "params": net,
        "batches": batches,
        "steps": 20,
        "has_aux": True,
        "meta": scale,
    }


def digits() -> dict[str, Any]:
    """The problem of examples/adjoints.py, with 100 steps."""
    one = example.problem(100)
    rate, ridge = one.meta["class weights"], one.meta["log ridge"]
    return {
        "loss": lambda w: (
            (rate[one.y] * F.cross_entropy(one.x @ w, one.y, reduction="none")).mean()
            + ridge.exp() / 2 * w.square().sum()
        ),
        "optimizer": todist.sgd(lr=0.5, momentum=0.9),
        "params": torch.zeros(64, 10, dtype=torch.float64, requires_grad=True),
        "batches": 100,
        "meta": one.meta,
        "outer": lambda w: F.cross_entropy(one.held_out_x @ w, one.held_out_y),
    }


def whole(made: dict[str, Any], adjoint: Any) -> Any:
    """The whole loop, its outer loss and the backward pass."""
    given = {name: value for name, value in made.items() if name != "outer"}
    loss, params, batches = made["loss"], made["params"], made["batches"]
    result = todist.inner_loop(**given, adjoint=adjoint, seed=0)
    if "outer" in made:
        value = made["outer"](result.params)
    else:
        value = loss(result.params, batches(0))[0] if callable(batches) else loss(result.params)
    first = list(params.parameters()) if isinstance(params, nn.Module) else [params]
    wanted = [*(first if adjoint.first_has_gradient else []), *todist.pytree.flatten(made["meta"])[0]]
    return result, torch.autograd.grad(value, wanted, allow_unused=True)


@pytest.mark.parametrize(
    ("problem", "adjoints", "memory"),
    [
        (mlp, (*REPLAYS[1:], *OTHERS[3:5]), allocated),
        (digits, (REPLAYS[0], *OTHERS[:3], OTHERS[5], IMPLICIT), allocated),
        (conv, (REPLAYS[0], OTHERS[0]), counted),  # a convolution allocates what depends on the processor
        *(
            pytest.param(problem, adjoints, memory, marks=pytest.mark.nightly)
            for problem, adjoints, memory in (
                (mlp, (*REPLAYS, *OTHERS, IMPLICIT), allocated),
                (digits, (*REPLAYS[:3], *OTHERS, IMPLICIT), allocated),
                (conv, (*REPLAYS, *OTHERS[:2]), counted),
            )
        ),
    ],
)
def test_the_whole_loop_takes_what_was_estimated(problem: Any, adjoints: Any, memory: Any) -> None:
    torch.manual_seed(0)
    made = problem()
    rows = todist.estimate(**made, adjoints=adjoints)
    assert [row.adjoint for row in rows] == [*adjoints]
    off = {}
    for row in rows:
        assert row.memory is not None, row.why_not
        assert row.seconds is not None
        assert row.seconds > 0
        taken = memory(lambda row=row: whole(made, row.adjoint))
        if abs(row.memory - taken) > 0.2 * taken:
            off[row.name] = (row.memory, taken)
    assert off == {}


def test_what_a_loss_returns_beside_is_kept_of_each_step() -> None:
    w, scale = torch.ones(100, requires_grad=True), torch.ones(100, requires_grad=True)
    made: dict[str, Any] = {
        "loss": lambda w: ((scale * w).square().sum(), torch.zeros(50_000)),
        "optimizer": todist.sgd(lr=0.1),
        "params": w,
        "batches": 20,
        "meta": scale,
        "has_aux": True,
        "outer": torch.sum,
    }
    adjoints = [*REPLAYS[:2], todist.Truncated(2), todist.SAMA()]
    for row in todist.estimate(**made, adjoints=adjoints):
        taken = counted(lambda row=row: whole(made, row.adjoint))
        assert taken > 20 * 200_000
        assert row.memory == pytest.approx(taken, rel=0.2), row.name


def test_it_is_counted_how_many_steps_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchopt_dist.diff.adjoints._store.SMALL", 0)  # no steps are recorded together
    w = torch.tensor(0.3, requires_grad=True)
    for count, slots in ((1, 1), (7, 1), (7, 2), (30, 3), (30, 30), (64, 5)):
        calls: list[Tensor] = []

        def loss(w: Tensor, calls: list[Tensor] = calls) -> Tensor:
            calls.append(w)
            return w**2

        made = todist.inner_loop(loss, todist.sgd(lr=0.1), w, count, adjoint=todist.Replayed(snapshots=slots))
        torch.autograd.grad(made.params, w)
        parts = enumerate(lengths(count, slots, again=False))
        # Each step runs first, and once more with a graph.
        assert len(calls) - 2 * count == sum(_again(part, slots - place) for place, part in parts)


def small(**changed: Any) -> todist.typing.Estimates:
    w = torch.zeros(1000, requires_grad=True)
    target = torch.linspace(0, 1, 1000, requires_grad=True)
    arguments: dict[str, Any] = {
        "loss": lambda w: (w - target).square().sum(),
        "optimizer": todist.sgd(lr=0.1),
        "params": w,
        "batches": 100,
        "meta": target,
        **changed,
    }
    return todist.estimate(**arguments)


def test_what_fits_comes_the_fastest_first() -> None:
    found = small()
    recorded, *_ = found
    assert recorded.name == "Recorded()"
    assert recorded.memory is not None
    fits = found.fits(recorded.memory - 1)
    assert {row.name for row in found} - {row.name for row in fits} == {
        "Recorded()",
        "Replayed(blocks='auto')",
    }
    times = [row.seconds or 0.0 for row in fits]
    assert times == sorted(times)
    assert all(row.memory is not None and row.memory < recorded.memory for row in fits)
    assert not found.fits(10)
    assert isinstance(found.fits("1GiB"), todist.typing.Estimates)
    with pytest.raises(ValueError, match="`memory` must be like '2GiB'"):
        found.fits("8 gigs")
    assert [row.name for row in found if row.exact] == ["Recorded()", "Replayed()", "Replayed(snapshots=10)"]


def test_the_table_says_which_adjoint_does_not_work_and_why() -> None:
    header, *rows = str(small()).splitlines()
    assert header.split() == ["adjoint", "memory", "time", "exact"]
    assert rows[0].startswith("Recorded()  ")
    assert rows[-1].startswith(
        "Replayed(blocks='auto') does not work here: `blocks` need `params` to be a module"
    )
    alone = small(meta=None, adjoints=[todist.SAMA()], loss=lambda w: (w - 1).square().sum())
    assert str(alone) == (
        "SAMA() does not work here: nothing gets a gradient from it: list what is learned in `meta`"
    )


def test_an_iterator_of_batches_is_read_for_three_steps() -> None:
    net, scale = nn.Linear(100, 1), torch.ones(1, requires_grad=True)
    given = iter(torch.ones(50, 20, 100))
    found = todist.estimate(
        lambda net, x: (scale * net(x)).square().mean(),
        todist.adam(lr=0.1),
        net,
        given,
        steps=50,
        meta=scale,
        adjoints=[todist.Recorded(), todist.Replayed()],
    )
    assert len(list(given)) == 47
    recorded, replayed = found
    assert recorded.memory is not None
    assert recorded.memory > 50 * 20 * 100 * 4  # each batch is kept
    assert "which runs steps again" in replayed.why_not


def test_a_program_is_as_it_was_before() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    before = torch.get_rng_state()
    values = [one.clone() for one in net.parameters()]
    todist.estimate(lambda net: net(torch.randn(2, 4)).square().sum(), todist.adam(lr=0.1), net, 5)
    assert torch.equal(torch.get_rng_state(), before)
    assert [one.grad for one in net.parameters()] == [None, None]
    assert all(map(torch.equal, values, net.parameters()))


@each_row(
    ("changed", "error", "message"),
    [
        ({"loss": lambda w: w}, ValueError, "one element"),
        ({"optimizer": torch.optim.SGD}, TypeError, "todist.sgd"),
        ({"batches": [1, 2], "steps": 3}, ValueError, "one batch for each step"),
        ({"batches": lambda step: step}, ValueError, "`steps` must say how many"),
        ({"batches": lambda step: step, "steps": 0}, ValueError, "`steps` must be at least 1"),
    ],
)
def test_a_wrong_loop_is_an_error_and_no_row(changed: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        small(**changed)


def test_without_a_way_to_count_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils._python_dispatch, "TorchDispatchMode", None)
    with pytest.raises(NotImplementedError, match="`estimate` needs TorchDispatchMode"):
        small()


def test_an_adjoint_of_ones_own_has_a_name() -> None:
    class Own(todist.adjoints.Adjoint):
        def run(self, loop: Any) -> Any:
            return loop.run(loop.recorded_step, loop.first)

    (row,) = small(adjoints=[Own()])
    assert (row.name, row.exact) == ("Own()", False)
    assert row.memory == small(adjoints=[todist.Recorded()])[0].memory
