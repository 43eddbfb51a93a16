"""``ema``, ``multi_steps`` and ``apply_if_finite`` → loops written by hand, and torch's gradient accumulation."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

import torchopt_dist as todist
from tests.optim.programs import DOUBLE, losses, make
from torchopt_dist.transform import apply_if_finite, ema, multi_steps


def stream(count, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(shape, dtype=DOUBLE, generator=generator) for shape in shapes] for _ in range(count)]


@pytest.mark.parametrize("debias", [False, True])
def test_an_average_is_the_weighted_sum_of_all_updates(debias):
    decay = torch.tensor(0.8, dtype=DOUBLE, requires_grad=True)
    grads = stream(4, 3)

    def last(decay):
        impl = ema(decay, debias)
        state = impl.init(grads[0])
        for grad in grads:
            (average,), state = impl.update(grad, state, inplace=False)
        return average

    weights = [(1 - 0.8) * 0.8 ** (3 - i) for i in range(4)]
    want = sum(weight * grad for weight, (grad,) in zip(weights, grads, strict=True))
    torch.testing.assert_close(last(decay).detach(), want / (1 - 0.8**4) if debias else want)
    torch.testing.assert_close(last(0.8), last(decay).detach())
    assert gradcheck(last, (decay,))


def test_an_average_in_place_gives_updates_that_later_steps_may_overwrite():
    impl = ema(0.5, debias=False)
    w = [torch.zeros(1)]
    state = impl.init(w)
    with torch.no_grad():
        first, state = impl.update([torch.ones(1)], state)
        torch.testing.assert_close(first, [torch.tensor([0.5])])
        second, state = impl.update([torch.ones(1)], state)
    torch.testing.assert_close(second, [torch.tensor([0.75])])


@pytest.mark.parametrize("face", ["Optimizer", "MetaOptimizer"])
def test_gathered_steps_are_torch_s_with_accumulated_gradients(face):
    net, twin = make(DOUBLE), make(DOUBLE)
    impl = multi_steps(todist.chain(todist.transform.clip_grad_norm(0.5), todist.adam(lr=0.05)), 3)
    optimizer = (
        todist.Optimizer(net.parameters(), impl) if face == "Optimizer" else todist.MetaOptimizer(net, impl)
    )
    torchs = torch.optim.Adam(twin.parameters(), lr=0.05)
    begun = [p.detach().clone() for p in net.parameters()]
    for step, loss in enumerate(losses(DOUBLE, count=8)):
        if face == "Optimizer":
            optimizer.zero_grad()
            loss(net).backward()
            optimizer.step()
        else:
            optimizer.step(loss(net))
        (loss(twin) / 3).backward()
        if step % 3 == 2:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            torchs.step()
            torchs.zero_grad()
        if step == 1:
            assert all(torch.equal(p, q) for p, q in zip(net.parameters(), begun, strict=True))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-9, atol=1e-11)


def test_a_parameter_without_any_gradient_stays_with_its_state_and_one_with_some_gets_their_mean():
    impl = multi_steps(todist.sgd(lr=1.0, momentum=0.9), 2)
    state = impl.init([torch.zeros(1)] * 3)
    one = torch.ones(1)
    _, state = impl.update([one, one, None], state)
    updates, after = impl.update([one, None, None], state)
    torch.testing.assert_close(updates[:2], [-one, -one / 2])
    assert updates[2] is None
    assert after.inner_state[1].momentum_buffer[2] is state.inner_state[1].momentum_buffer[2]


def test_gathered_gradients_are_differentiated_through():
    """``w - lr * (w + 2 w) / 2``: the derivative is ``1 - 1.5 lr``."""
    w = torch.ones(1, dtype=DOUBLE, requires_grad=True)
    optimizer = todist.FuncOptimizer(multi_steps(todist.sgd(lr=0.1), 2))
    (same,) = optimizer.step((w**2).sum() / 2, (w,))
    (moved,) = optimizer.step((same**2).sum(), (same,))
    assert same is w
    torch.testing.assert_close(torch.autograd.grad(moved.sum(), w)[0].item(), 1 - 1.5 * 0.1)


def test_updates_that_are_not_finite_are_left_out_so_often_and_no_more():
    impl = apply_if_finite(todist.sgd(lr=1.0, momentum=0.5), 2)
    w = torch.zeros(2, requires_grad=True)
    optimizer = todist.Optimizer([w], impl)
    ends = []
    for grad in (1.0, torch.nan, torch.inf, 1.0, torch.inf):
        w.grad = torch.tensor([1.0, grad])
        optimizer.step()
        ends.append(w[1].item())
    assert ends == [-1.0, -1.0, -1.0, -2.5, -2.5]  # the momentum is that of the finite gradients
    for _ in range(2):
        optimizer.step()
    assert not w[1].isfinite()
    assert w[0].isfinite()


def test_counts_of_what_was_not_finite():
    impl = apply_if_finite(todist.sgd(lr=1.0), 1)
    good, bad = [torch.ones(1)], [torch.full((1,), torch.nan)]
    state, seen = impl.init(good), []
    for grad in (bad, good, bad, bad, bad):
        updates, state = impl.update(grad, state, params=good)
        seen.append((updates[0] is None, int(state.consecutive), int(state.total)))
    assert seen == [(True, 1, 1), (False, 0, 1), (True, 1, 2), (False, 0, 3), (True, 1, 4)]


def test_bad_arguments_are_refused():
    inner = todist.sgd(0.1)
    for make_it, error, text in (
        (lambda: multi_steps(inner, 0), ValueError, "`every` must be at least 1, got 0"),
        (lambda: multi_steps(inner, 1.5), TypeError, "`every` must be an int, got float"),
        (lambda: multi_steps(0.1, 2), TypeError, "`inner` must be a GradientTransformation"),
        (lambda: apply_if_finite(inner, -1), ValueError, "`max_consecutive` must be at least 0, got -1"),
        (lambda: apply_if_finite(inner, True), TypeError, "`max_consecutive` must be an int, got bool"),
        (lambda: apply_if_finite(0.1, 2), TypeError, "`inner` must be a GradientTransformation"),
        (lambda: ema(1.0), ValueError, "`decay` must be at least 0 and below 1"),
        (lambda: multi_steps(inner, 2).update([], ()), TypeError, "`state` must be a MultiStepsState"),
        (
            lambda: apply_if_finite(inner, 2).update([], ()),
            TypeError,
            "`state` must be an ApplyIfFiniteState",
        ),
    ):
        with pytest.raises(error, match=text):
            make_it()
