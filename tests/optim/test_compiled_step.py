"""``torch.compile(optimizer.step)`` → the steps of the plain one, whatever a scheduler makes of the options."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from tests.optim.table import ROWS
from torchopt_dist import ops
from torchopt_dist.schedule import linear_schedule
from torchopt_dist.schedule.lr_scheduler import ScheduleLR

SCHEDULERS = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 2),  # down to 0
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),  # moves the momentum, too
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2], 0.5),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 8),  # likewise
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "SWALR": lambda o: SWALR(o, 0.05, 3),
    "ScheduleLR": lambda o: ScheduleLR(o, linear_schedule(0.1, 0.0, 2)),
}
pytestmark = [pytest.mark.filterwarnings("ignore:Detected call of:UserWarning"), pytest.mark.compiles]
WITH_A_KERNEL = [
    name
    for name, row in ROWS.items()
    if "fused" in inspect.signature(row.plain).parameters and ops.is_available("adam")
]


def compare(row, options, schedulers, steps=3, *, begun=False, **compiling):
    """Take the schedulers one after another, on a compiled step and on a plain one.

    Steps that have ``begun`` have a state already, which an eager step has made.
    """
    sides = []
    for _ in range(2):
        params = [torch.tensor(value, requires_grad=True) for value in ([1.0, -2.0], 0.5)]
        sides.append((params, row.plain(params, **options)))
    moves = [
        optimizer.step for _, optimizer in sides
    ]  # not those that a scheduler puts there, which count calls
    moves[1] = torch.compile(moves[1], backend="eager", **compiling)
    seen = set()
    for params, optimizer in sides if begun else ():
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    for name in schedulers:
        for _, optimizer in sides:
            optimizer.param_groups[0].update(options)
            for key in ("initial_lr", "max_lr", "min_lr"):
                optimizer.param_groups[0].pop(key, None)
        pair = [SCHEDULERS[name](optimizer) for _, optimizer in sides]
        for step in range(steps):
            for (params, _), move, scheduler in zip(sides, moves, pair, strict=True):
                for p in params:
                    p.grad = torch.full_like(p, 0.5 + step)
                move()
                scheduler.step(*([float(step)] if name == "ReduceLROnPlateau" else []))
            seen.add(sides[0][1].param_groups[0]["lr"])
    assert len(seen) >= steps
    for params, optimizer in sides if begun else ():
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()  # one that is not compiled, after those that are
    for got, want in zip(sides[1][0], sides[0][0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        *(
            pytest.param(name, None, marks=[] if name in ("SGD", "Adam") else pytest.mark.nightly)
            for name in ROWS
        ),
        *((name, True) for name in WITH_A_KERNEL),
    ],
)
def test_every_class(name, fused):
    """Without a graph break, in two graphs, of which the second has ``lr`` as a symbol; or, fused, left to Python.

    For two classes the compiler finds out that ``lr`` changes, as for users; the others tell it.
    """
    torch._dynamo.utils.counters.clear()
    row = ROWS[name]
    options = {**list(row.options.values())[-1], **({"fused": True} if fused else {})}
    finds_out = name in ("SGD", "Adam")
    compare(
        row,
        options,
        ["ExponentialLR"] if fused else ["ExponentialLR", "CosineAnnealingLR"],
        begun=not finds_out or fused,
        fullgraph=not fused,
        dynamic=None if finds_out or fused else True,
    )
    counters = torch._dynamo.utils.counters
    if fused:
        assert counters["frames"]["total"] < 15  # not each function of the step
    else:
        assert counters["stats"]["unique_graphs"] <= (2 if finds_out else 1)


@pytest.mark.nightly
def test_every_scheduler():
    """An ``lr`` that changes is a symbol to the compiler, so the number of graphs does not grow with the steps."""
    with torch._dynamo.config.patch(recompile_limit=16):
        compare(ROWS["SGD"], ROWS["SGD"].options["momentum"], SCHEDULERS, fullgraph=True)
