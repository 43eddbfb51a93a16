"""Lookahead, schedule-free steps, averages, noise, clipping by unit: against torch's averages and differences."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchopt_dist as todist
from tests.optim.programs import DOUBLE, losses, make
from tests.rows import each_row
from torchopt_dist.transform import (
    adaptive_grad_clip,
    add_noise,
    average_params,
    centralize,
    lookahead,
    partition,
    schedule_free,
    set_to_zero,
)

WRAPPED: dict[str, Callable[[], Any]] = {
    "lookahead": lambda: lookahead(todist.adam(lr=0.05), 3, 0.4),
    "schedule free": lambda: schedule_free(todist.adamw(lr=0.05, betas=(0.0, 0.9), weight_decay=0.1), 0.8),
    "average": lambda: todist.chain(todist.sgd(lr=0.05, momentum=0.9), average_params(0.7)),
    "mean": lambda: todist.chain(todist.sgd(lr=0.05, momentum=0.9), average_params()),
    "noise": lambda: todist.chain(add_noise(0.01, 0.55, seed=3), todist.sgd(lr=0.05)),
    "adaptive": lambda: todist.chain(adaptive_grad_clip(0.05), todist.sgd(lr=0.5)),
    "centralized": lambda: todist.chain(centralize(), todist.adam(lr=0.05)),
}


def plain(impl: Any, dtype: torch.dtype = DOUBLE, count: int = 8) -> tuple[nn.Module, Any]:
    net = make(dtype)
    optimizer = todist.Optimizer(net.parameters(), impl)
    for loss in losses(dtype, count=count):
        optimizer.zero_grad()
        loss(net).backward()
        optimizer.step()
    return net, optimizer


@each_row("dtype", [torch.float32, DOUBLE, torch.complex64, torch.bfloat16])
@each_row("name", [name for name in WRAPPED if name != "noise"])  # whose leaves have places
def test_in_place_and_differentiable_and_copied_are_the_same(name: str, dtype: torch.dtype) -> None:
    wanted, _ = plain(WRAPPED[name](), dtype)
    begun = make(dtype)
    assert any(not torch.equal(p, q) for p, q in zip(wanted.parameters(), begun.parameters(), strict=True))
    net = make(dtype)
    optimizer = todist.MetaOptimizer(net, pickle.loads(pickle.dumps(WRAPPED[name]())))
    for loss in losses(dtype, count=8):
        optimizer.step(loss(net))
    tolerance = {"rtol": 0.05, "atol": 0.05} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for p, q in zip(net.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), **tolerance)
        assert p.dtype is dtype


@each_row("name", WRAPPED)
def test_a_run_that_is_saved_and_loaded_goes_on(name: str) -> None:
    wanted, _ = plain(WRAPPED[name](), count=8)
    net, saved = make(DOUBLE), None
    for part in (slice(0, 4), slice(4, 8)):
        optimizer = todist.Optimizer(net.parameters(), WRAPPED[name]())
        if saved is not None:
            optimizer.load_state_dict(copy.deepcopy(saved))
        for loss in list(losses(DOUBLE, count=8))[part]:
            optimizer.zero_grad()
            loss(net).backward()
            optimizer.step()
        saved = optimizer.state_dict()
    for p, q in zip(net.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


@each_row("decay", [None, 0.7])
def test_averages_are_those_of_torch(decay: float | None) -> None:
    impl = todist.chain(todist.sgd(lr=0.05, momentum=0.9), average_params(decay))
    net = make(DOUBLE)
    optimizer = todist.Optimizer(net.parameters(), impl)
    averaged = AveragedModel(net, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay))
    for loss in losses(DOUBLE, count=8):
        optimizer.zero_grad()
        loss(net).backward()
        optimizer.step()
        averaged.update_parameters(net)
    for p, q in zip(net.parameters(), averaged.module.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[p]["average"], q.detach())
        assert not torch.equal(p, q)


WEIGHTS = torch.tensor([[0.3, -1.0], [2.0, 0.7]], dtype=DOUBLE)
ADJOINTS = [todist.Recorded(), todist.Replayed(snapshots=2)]
DIFFERENTIABLE: dict[str, Callable[[Tensor], Any]] = {
    "lookahead": lambda h: lookahead(todist.sgd(lr=0.1 * h, momentum=0.5), 2, h),
    "schedule free": lambda h: schedule_free(todist.sgd(lr=0.1 * h), h),
    "average": lambda h: todist.chain(todist.sgd(lr=0.1 * h), average_params(h)),
    "noise": lambda h: todist.chain(add_noise(h, h, seed=1), todist.sgd(lr=0.1)),
    "adaptive": lambda h: todist.chain(adaptive_grad_clip(0.2 * h), todist.sgd(lr=0.5)),
    "centralized": lambda h: todist.chain(centralize(), todist.sgd(lr=h)),
}


@each_row("adjoint", ADJOINTS)
@each_row("name", DIFFERENTIABLE)
def test_derivatives_are_those_of_differences_to_order_2(name: str, adjoint: Any) -> None:
    data = torch.tensor([[1.0, 0.5], [-0.3, 2.0], [0.8, 0.1]], dtype=DOUBLE)

    def outer(w: Tensor, b: Tensor, h: Tensor) -> Tensor:
        result = todist.inner_loop(
            lambda p: (torch.tanh(data @ p["w"] + p["b"]) - 0.5).square().sum(),
            DIFFERENTIABLE[name](h),
            {"w": w, "b": b},
            4,
            adjoint=adjoint,
        )
        made = sum(p.square().sum() for p in result.params.values())
        if "average" in name or "free" in name:
            state = (
                result.state[-1]
                if isinstance(result.state[-1], tuple) and name == "average"
                else result.state
            )
            made = made + sum(p.sin().sum() for p in state.average.values())
        return made

    b = torch.tensor([0.2, -0.4], dtype=DOUBLE)
    h = torch.tensor(0.6, dtype=DOUBLE)
    points = tuple(x.clone().requires_grad_() for x in (WEIGHTS, b, h))
    assert torch.autograd.gradcheck(outer, points)
    if adjoint == todist.Recorded():
        assert torch.autograd.gradgradcheck(outer, points)


def test_lookahead_and_schedule_free_reach_a_minimum() -> None:
    for impl in (lookahead(todist.sgd(lr=0.2), 5), schedule_free(todist.sgd(lr=0.5))):
        w = torch.tensor([3.0, -2.0], requires_grad=True)
        optimizer = todist.Optimizer([w], impl)
        for _ in range(200):
            optimizer.zero_grad()
            (torch.tensor([1.0, 0.3]) * (w - 1).square()).sum().backward()
            optimizer.step()
        assert (w - 1).abs().max() < 0.1


def test_noise_has_the_variance_of_the_formula_and_is_the_same_again() -> None:
    impl = add_noise(0.04, 0.5, seed=0)
    zeros = [torch.zeros(20_000), torch.zeros(20_000, dtype=torch.complex64)]
    before = torch.get_rng_state()
    first, state = impl.update(zeros, impl.init(zeros))
    again, _ = impl.update(zeros, impl.init(zeros))
    fourth = first
    for _ in range(3):
        fourth, state = impl.update(zeros, state)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, first, again))
    for made, deviation in ((first, 0.2), (fourth, 0.2 / 4**0.25)):
        for part in (made[0], made[1].real, made[1].imag):
            assert part.std().item() == pytest.approx(deviation, rel=0.05)  # of 20,000: ten of its deviations
            assert abs(part.mean().item()) < 0.05 * deviation
    assert not torch.equal(add_noise(0.04, 0.5, seed=1).update(zeros, impl.init(zeros))[0][0], first[0])
    assert abs(torch.corrcoef(torch.stack([first[0], fourth[0]]))[0, 1]) < 0.05


def test_clipping_by_unit_and_zero_gradients_and_half_precision() -> None:
    w = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    impl = adaptive_grad_clip(0.1, eps=1e-2)
    g = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    clipped, _ = impl.update(g, impl.init(w), params=w)
    torch.testing.assert_close(clipped, torch.tensor([[0.6e-3, 0.8e-3], [0.0, 0.0]]))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(clipped.sum(), (g, w)))
    large = torch.full((2,), 300.0, dtype=torch.float16)
    found, _ = impl.update(large, impl.init(large), params=large)
    torch.testing.assert_close(found, torch.full((2,), 30.0, dtype=torch.float16))


def test_zero_updates_leave_a_part_where_it_is() -> None:
    impl = partition({"still": set_to_zero(), "moves": todist.sgd(lr=1.0)}, {"a": "still", "b": "moves"})
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    updates, _ = impl.update(params, impl.init(params), params=params)
    assert updates["a"].tolist() == [0, 0]
    assert updates["b"].tolist() == [-1, -1]
    assert set_to_zero().update({"a": None}, set_to_zero().init(params))[0] == {"a": None}


@each_row("name", ["lookahead", "schedule free", "average"])
def test_a_parameter_without_a_gradient_keeps_its_state_and_params_are_needed(name: str) -> None:
    impl = WRAPPED[name]()
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    state = impl.init(params)
    for _ in range(3):
        updates, state = impl.update({"a": torch.ones(2), "b": None}, state, params=params)
        assert updates["b"] is None
    kept = {"lookahead": "slow", "schedule free": "average", "average": "average"}[name]
    of = state[-1] if name == "average" else state
    assert torch.equal(getattr(of, kept)["b"], params["b"])
    assert not torch.equal(getattr(of, kept)["a"], params["a"])
    with pytest.raises(ValueError, match="`params` must be given to `update`"):
        impl.update(params, impl.init(params))
    with pytest.raises(TypeError, match="`state` must be a"):
        (impl.transformations[-1] if name == "average" else impl).update(params, (), params=params)


@each_row(
    ("call", "kind", "told"),
    [
        (
            lambda: lookahead(todist.adam),
            TypeError,
            "`inner` must be a GradientTransformation, got function adam",
        ),
        (lambda: lookahead(todist.sgd(lr=1.0), 0), ValueError, "`sync_period` must be at least 1, got 0"),
        (lambda: lookahead(todist.sgd(lr=1.0), 2.5), TypeError, "`sync_period` must be an int, got float"),
        (
            lambda: lookahead(todist.sgd(lr=1.0), 2, -1),
            ValueError,
            "`slow_step_size` must be at least 0, got -1",
        ),
        (lambda: schedule_free(todist.sgd(lr=1.0), 1.0), ValueError, "`b1` must be .*, got 1"),
        (lambda: schedule_free(3), TypeError, "`inner` must be a GradientTransformation, got int"),
        (lambda: average_params(1.0), ValueError, "`decay` must be .*, got 1"),
        (lambda: adaptive_grad_clip(-0.1), ValueError, "`clipping` must be at least 0, got -0.1"),
        (
            lambda: adaptive_grad_clip(0.1, "x"),
            TypeError,
            "`eps` must be a number or a tensor of one element, got str",
        ),
        (lambda: add_noise(-1, 1, 0), ValueError, "`eta` must be at least 0, got -1"),
        (lambda: add_noise(1, 1, 0.5), TypeError, "`seed` must be an integer, got float 0.5"),
        (lambda: add_noise(1, 1, -2), ValueError, "`seed` must be at least 0, got -2"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Any], kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        call()
