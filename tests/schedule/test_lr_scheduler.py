"""``ScheduleLR``: what schedules say, in the groups of an optimizer, beside torch's own schedulers."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

import torchopt_dist as todist
from tests.rows import each_row
from tests.schedule.rows import every_row
from torchopt_dist.schedule import (
    ScheduleLR,
    cosine_decay,
    exponential_decay,
    join_schedules,
    linear_schedule,
    piecewise_constant_schedule,
    polynomial_schedule,
    warmup_cosine,
)

OPTIMIZERS = [torch.optim.SGD, todist.SGD, torch.optim.Adam]


def parameter():
    p = torch.zeros(2, requires_grad=True)
    p.grad = torch.ones(2)
    return p


def rates(scheduler, optimizer, steps):
    """The learning rate before each step and after the last one, of the first group."""
    out = [float(optimizer.param_groups[0]["lr"])]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        out.append(float(optimizer.param_groups[0]["lr"]))
        assert [float(lr) for lr in scheduler.get_last_lr()] == [
            float(group["lr"]) for group in optimizer.param_groups
        ]
    return out


@every_row
@each_row("cls", OPTIMIZERS)
def test_the_rate_is_what_the_schedule_says(row, cls):
    schedule = row.make(**row.values)
    optimizer = cls([parameter()], lr=123.0)
    scheduler = ScheduleLR(optimizer, schedule)
    assert isinstance(scheduler, LRScheduler)
    assert rates(scheduler, optimizer, 12) == [schedule(count) for count in range(13)]


def warmup_then_cosine(optimizer):
    rise = LinearLR(optimizer, start_factor=0.25, end_factor=1.0, total_iters=3)
    return SequentialLR(optimizer, [rise, CosineAnnealingLR(optimizer, T_max=7, eta_min=0.1)], [3])


TWINS = {
    "CosineAnnealingLR": (
        partial(CosineAnnealingLR, T_max=10, eta_min=0.1),
        cosine_decay(0.4, decay_steps=10, alpha=0.25),
    ),
    "ExponentialLR": (partial(ExponentialLR, gamma=0.8), exponential_decay(0.4, 0.8)),
    "StepLR": (
        partial(StepLR, step_size=3, gamma=0.5),
        exponential_decay(0.4, 0.5, transition_steps=3, staircase=True),
    ),
    "PolynomialLR": (
        partial(PolynomialLR, total_iters=6, power=2.0),
        polynomial_schedule(0.4, 0.0, 2.0, transition_steps=6),
    ),
    "LinearLR": (
        partial(LinearLR, start_factor=0.25, end_factor=0.75, total_iters=6),
        linear_schedule(0.1, 0.3, transition_steps=6),
    ),
    "SequentialLR": (warmup_then_cosine, warmup_cosine(0.1, 0.4, 3, 10, end_value=0.1)),
    "MultiStepLR": (
        partial(MultiStepLR, milestones=[2, 5], gamma=0.5),
        join_schedules([lambda _: 0.4, lambda _: 0.2, lambda _: 0.1], [2, 5]),
    ),
    "MultiStepLR, by factors": (
        partial(MultiStepLR, milestones=[2, 5], gamma=0.5),
        piecewise_constant_schedule(0.4, {2: 0.5, 5: 0.5}),
    ),
}


@each_row(("torchs", "schedule"), TWINS.values(), ids=TWINS)
def test_torchs_own_schedulers(torchs, schedule):
    ours, theirs = torch.optim.SGD([parameter()], lr=9.0), torch.optim.SGD([parameter()], lr=0.4)
    got = rates(ScheduleLR(ours, schedule), ours, 10)
    assert got == pytest.approx(rates(torchs(theirs), theirs, 10), rel=1e-12, abs=1e-15)
    torch.testing.assert_close(ours.param_groups[0]["params"], theirs.param_groups[0]["params"])


@each_row("cls", OPTIMIZERS)
def test_groups_with_a_schedule_each(cls):
    optimizer = cls([{"params": [parameter()]}, {"params": [parameter()], "lr": 7.0}], lr=1.0)
    scheduler = ScheduleLR(optimizer, [linear_schedule(1.0, 0.0, 4), exponential_decay(0.5, 0.5)])
    assert scheduler.get_last_lr() == [1.0, 0.5]
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups] == [0.75, 0.25]


def test_one_schedule_serves_a_group_that_comes_later_and_a_list_does_not():
    optimizer = todist.SGD([parameter()], lr=1.0)
    one, listed = ScheduleLR(optimizer, linear_schedule(1.0, 0.0, 4)), None
    listed = ScheduleLR(optimizer, [linear_schedule(1.0, 0.0, 4)])
    optimizer.add_param_group({"params": [parameter()]})
    optimizer.step()
    one.step()
    assert one.get_last_lr() == [0.75, 0.75]
    with pytest.raises(ValueError, match="`schedule` must be one schedule, or one for each group: 2, got 1"):
        listed.step()


def test_a_rate_that_is_a_tensor_stays_that_tensor_and_one_that_is_a_number_a_number():
    lr = torch.tensor(1.0)
    groups = [{"params": [parameter()], "lr": lr}, {"params": [parameter()], "lr": 1.0}]
    optimizer = torch.optim.SGD(groups)
    peak = torch.tensor([0.5], requires_grad=True)
    scheduler = ScheduleLR(optimizer, linear_schedule(peak, 0.0, 4))
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.375
    assert not lr.requires_grad
    assert type(optimizer.param_groups[1]["lr"]) is float
    assert scheduler.get_last_lr()[0] is not lr


@each_row("cls", OPTIMIZERS)
def test_resumption_from_a_state_dict(cls):
    def begin():
        optimizer = cls([parameter()], lr=1.0)
        return optimizer, ScheduleLR(optimizer, warmup_cosine(0.1, 0.9, 2, 9))

    optimizer, scheduler = begin()
    straight = rates(scheduler, optimizer, 8)

    optimizer, scheduler = begin()
    before = rates(scheduler, optimizer, 3)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["scheduler"]["last_epoch"] == 3
    assert "schedule" not in saved["scheduler"]

    optimizer, scheduler = begin()
    scheduler.load_state_dict(saved["scheduler"])
    optimizer.load_state_dict(saved["optimizer"])
    assert scheduler.get_last_lr() == before[-1:]
    assert before + rates(scheduler, optimizer, 5)[1:] == straight


def test_last_epoch_is_torchs():
    optimizer = torch.optim.SGD([{"params": [parameter()], "initial_lr": 1.0}], lr=1.0)
    scheduler = ScheduleLR(optimizer, linear_schedule(1.0, 0.0, 10), last_epoch=3)
    theirs = torch.optim.SGD([{"params": [parameter()], "initial_lr": 1.0}], lr=1.0)
    assert scheduler.last_epoch == ExponentialLR(theirs, 0.5, last_epoch=3).last_epoch == 4
    assert scheduler.get_last_lr() == [pytest.approx(0.6)]


@each_row("again", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_pickle_and_deepcopy(again):
    optimizer = torch.optim.SGD([parameter()], lr=1.0)
    scheduler = ScheduleLR(optimizer, linear_schedule(1.0, 0.0, 4))
    rates(scheduler, optimizer, 1)
    optimizer, scheduler = again((optimizer, scheduler))
    assert scheduler.optimizer is optimizer
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


@each_row("cls", OPTIMIZERS)
def test_in_a_sequence(cls):
    optimizer = cls([parameter()], lr=0.8)
    parts = [ScheduleLR(optimizer, linear_schedule(0.1, 0.4, 3)), ExponentialLR(optimizer, 0.5)]
    parts.append(ScheduleLR(optimizer, linear_schedule(0.6, 0.0, 2)))
    sequence = SequentialLR(optimizer, parts, [3, 5])
    want = [0.1, 0.2, 0.3, 0.8, 0.4, 0.6, 0.3, 0.0]
    assert rates(sequence, optimizer, 7) == pytest.approx(want)


def test_in_a_chain_it_overrides_those_before():
    optimizer = torch.optim.SGD([parameter()], lr=0.8)
    parts = [ExponentialLR(optimizer, 0.5), ScheduleLR(optimizer, linear_schedule(1.0, 0.0, 4))]
    assert rates(ChainedScheduler(parts), optimizer, 4) == [1.0, 0.75, 0.5, 0.25, 0.0]


def constant(count):
    return 0.5


@each_row(
    ("optimizer", "schedule", "error", "message"),
    [
        (None, constant, TypeError, "`optimizer` must be a torch.optim.Optimizer, got NoneType"),
        (
            {"lr": constant},
            constant,
            TypeError,
            "`optimizer` must have a number .* got a schedule in group 0",
        ),
        ({"lr": 1.0}, 0.5, TypeError, "`schedule` must be a schedule or a list of schedules, got float"),
        ({"lr": 1.0}, [0.5], TypeError, r"`schedule\[0\]` must be callable, got float"),
        ({"lr": 1.0}, [], ValueError, "`schedule` must be one schedule, or one for each group: 1, got 0"),
        ({"lr": 1.0}, [constant] * 2, ValueError, "`schedule` must be one schedule, .* got 2"),
        ({"lr": 1.0}, lambda _: torch.ones(2), ValueError, r"`schedule` must return one element, .*\(2,\)"),
    ],
)
def test_bad_arguments_are_refused(optimizer, schedule, error, message):
    if optimizer is not None:
        optimizer = todist.SGD([parameter()], **optimizer)
    with pytest.raises(error, match=message):
        ScheduleLR(optimizer, schedule)


def test_an_optimizer_without_a_rate_is_refused():
    class Fixed(torch.optim.Optimizer):
        def step(self, closure=None):
            pass

    with pytest.raises(ValueError, match="`optimizer` must have an `lr` in each group, got none in group 0"):
        ScheduleLR(Fixed([parameter()], {}), constant)
