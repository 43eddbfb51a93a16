"""``docs/api/optimizers.md``: each link's line, computed by hand."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import torchopt_dist as todist
from tests.docs.promises.register import numbers, promises, same
from torchopt_dist import transform

says = partial(promises, "transform")
G = numbers(3.0, -4.0)
P = numbers(1.0, 2.0)


def steps(link: Any, *grads: Any, params: Any = P) -> list[Any]:
    """The updates of gradients one after another, at parameters that stay."""
    state, made = link.init(params), []
    for grad in grads:
        updates, state = link.update(grad, state, params=params, inplace=False)
        made.append(updates)
    return made


def step(link: Any, grad: Any = G, params: Any = P) -> Any:
    return steps(link, grad, params=params)[0]


@says("GradientTransformation")
def a_pair_of_pure_functions() -> None:
    link = transform.GradientTransformation(
        lambda params: 0, lambda updates, state, *, params=None, inplace=True: (2 * updates, state + 1)
    )
    init, update = link
    assert update(G, init(P))[1] == 1
    adam = todist.adam(lr=0.1)
    grad, state = G.clone(), adam.init(P)
    before = [leaf.clone() for leaf in todist.pytree.flatten(state)[0] if isinstance(leaf, Tensor)]
    adam.update(grad, state, params=P, inplace=False)
    same(grad, G)
    same([leaf for leaf in todist.pytree.flatten(state)[0] if isinstance(leaf, Tensor)], before)


@says("ChainedGradientTransformation")
def a_chain_in_a_chain_becomes_part_of_it() -> None:
    inner = todist.chain(transform.scale(2.0), transform.scale(3.0))
    same(step(todist.chain(inner, transform.scale(5.0))), 30 * G)
    assert len(todist.chain(inner, transform.scale(5.0)).init(P)) == 3


@says("EmptyState")
def no_state() -> None:
    assert transform.scale(2.0).init(P) == transform.EmptyState() == ()


@says("identity")
def leaves_gradients_as_they_are() -> None:
    assert step(transform.identity()) is G


@says("of_elements")
def a_declared_update_may_be_sharded() -> None:
    assert transform.of_elements()(lambda updates, state: (updates, state))(G, ()) == (G, ())


@says("clip_grad_norm")
def one_factor() -> None:
    same(step(transform.clip_grad_norm(1.0)), G / 5, rtol=1e-6, atol=0)
    same(step(transform.clip_grad_norm(9.0)), G)


@says("clip_grad_value")
def each_entry() -> None:
    same(step(transform.clip_grad_value(3.5)), numbers(3.0, -3.5))


@says("adaptive_grad_clip")
def norms_of_output_units() -> None:
    weight, grad = numbers(3.0, 4.0, 0.0, 1.0).view(2, 2), numbers(6.0, 8.0, 0.0, 0.01).view(2, 2)
    same(step(transform.adaptive_grad_clip(0.1), grad, weight), numbers(0.3, 0.4, 0.0, 0.01).view(2, 2))


@says("nan_to_num")
def not_finite() -> None:
    bad = numbers(math.nan, math.inf, 1.0)
    same(step(transform.nan_to_num(7.0, 8.0), bad, bad), torch.nan_to_num(bad, 7.0, 8.0))


@says("register_hook", "zero_nan_hook", "nan_to_num_hook")
def in_the_backward_pass() -> None:
    bad = numbers(math.nan, math.inf)
    hooks: dict[Any, Tensor] = {
        lambda grad: 2 * grad: 2 * bad,
        transform.zero_nan_hook: numbers(0.0, math.inf),
        transform.nan_to_num_hook(7.0, 8.0): numbers(7.0, 8.0),
    }
    for hook, expected in hooks.items():
        grad = G.clone().requires_grad_()
        update = step(transform.register_hook(hook), grad)
        same(update, grad)
        same(torch.autograd.grad(update, grad, bad)[0], expected, rtol=0, atol=0, equal_nan=True)


@says("centralize")
def without_the_mean() -> None:
    matrix = torch.arange(6.0, dtype=torch.float64).view(2, 3) ** 2
    same(step(transform.centralize(), matrix, matrix), matrix - matrix.mean(1, keepdim=True))
    assert step(transform.centralize()) is G or torch.equal(step(transform.centralize()), G)


@says("add_noise")
def variance() -> None:
    zeros = torch.zeros(200_000, dtype=torch.float64)
    first, second = steps(transform.add_noise(0.5, 1.0, seed=0), zeros, zeros, params=zeros)
    same(first.var(), numbers(0.5)[0], rtol=0.02, atol=0)
    same(second.var(), numbers(0.25)[0], rtol=0.02, atol=0)


@says("masked")
def some_leaves() -> None:
    tree = {"a": G, "b": G}
    same(
        step(transform.masked(transform.scale(2.0), {"a": True, "b": False}), tree, tree),
        {"a": 2 * G, "b": G},
    )


@says("partition")
def by_label() -> None:
    tree = {"a": G, "b": G}
    link = transform.partition({"x": transform.scale(2.0), "y": transform.scale(3.0)}, {"a": "x", "b": "y"})
    same(step(link, tree, tree), {"a": 2 * G, "b": 3 * G})


@says("inject_hyperparams")
def any_of_them_a_schedule() -> None:
    link = transform.inject_hyperparams(transform.clip_grad_value)(
        todist.schedule.linear_schedule(1.0, 2.0, 1)
    )
    same(steps(link, G, G), [numbers(1.0, -1.0), numbers(2.0, -2.0)])


@says("multi_steps")
def the_mean_of_so_many() -> None:
    made = steps(transform.multi_steps(transform.scale(-1.0), 2), G, 3 * G)
    assert made[0] is None  # which moves nothing
    same(made[1], -2 * G)


@says("apply_if_finite")
def left_out() -> None:
    made = steps(transform.apply_if_finite(transform.trace(0.5), 3), G, numbers(math.nan, 1.0), G)
    assert made[1] is None  # which moves nothing
    same(made[::2], [G, 1.5 * G])


@says("lookahead")
def slow_parameters() -> None:
    params = [P]
    link = transform.lookahead(transform.scale(-1.0), sync_period=2, slow_step_size=0.5)
    state = link.init(P)
    for _ in range(2):
        updates, state = link.update(G, state, params=params[-1], inplace=False)
        params.append(params[-1] + updates)
    same(params[1:], [P - G, P - G])  # half of the way to P - 2 G


@says("schedule_free")
def between() -> None:
    z = x = y = P
    link = transform.schedule_free(transform.scale(-0.1), b1=0.75)
    state = link.init(P)
    for t in range(1, 4):
        updates, state = link.update(2 * y, state, params=y, inplace=False)
        z = z - 0.2 * y
        x = x + (z - x) / t
        y = y + updates
        same(y, 0.25 * z + 0.75 * x)
        same(state.average, x)


@says("average_params")
def the_average() -> None:
    link = todist.chain(todist.sgd(lr=0.1), transform.average_params(0.75))
    state, params, average = link.init(P), P, None
    for _ in range(3):
        updates, state = link.update(G, state, params=params, inplace=False)
        params = params + updates
        average = params if average is None else 0.75 * average + 0.25 * params
    same(state[-1].average, average)


@says("ema")
def running_average() -> None:
    made = steps(transform.ema(0.75), G, 3 * G)
    same(made, [G, (0.75 * 0.25 * G + 0.25 * 3 * G) / (1 - 0.75**2)])


@says("trace")
def momentum() -> None:
    same(
        steps(transform.trace(0.5, dampening=0.25), G, 3 * G), [G, 0.5 * G + 0.75 * 3 * G]
    )  # the first is the gradient, whatever the dampening


@says("add_decayed_weights", "scale", "scale_by_learning_rate", "scale_by_schedule", "set_to_zero")
def factors() -> None:
    same(step(transform.add_decayed_weights(0.5)), G + 0.5 * P)
    same(step(transform.scale(3.0)), 3 * G)
    same(step(transform.scale_by_learning_rate(0.1)), -0.1 * G)
    same(steps(transform.scale_by_schedule(lambda step: step + 2.0), G, G), [2 * G, 3 * G])
    assert step(transform.set_to_zero(), [G, None], [P, P])[1] is None
    same(step(transform.set_to_zero()), 0 * G)


@says("orthogonalize")
def nearly_orthogonal() -> None:
    matrix = torch.linspace(0.1, 1.0, 8).diag()
    values = torch.linalg.svdvals(step(transform.orthogonalize(), matrix, matrix))
    assert (values > 0.3).all()
    assert (values < 1.5).all()


@says("scale_by_adadelta")
def adadelta() -> None:
    v, a, made = 0 * G, 0 * G, []
    for grad in (G, 2 * G):
        v = 0.8 * v + 0.2 * grad**2
        made.append((a + 0.01).sqrt() / (v + 0.01).sqrt() * grad)
        a = 0.8 * a + 0.2 * made[-1] ** 2
    same(steps(transform.scale_by_adadelta(0.8, 0.01), G, 2 * G), made)


def moments(b1: float, b2: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """``g``, ``m``, ``v`` of three steps."""
    m, v, made = 0 * G, 0 * G, []
    for grad in (G, 2 * G, -G):
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2
        made.append((grad, m, v))
    return made


GRADS = (G, 2 * G, -G)


@says("scale_by_adam")
def adam() -> None:
    expected = [
        m / (1 - 0.8**t) / ((v / (1 - 0.9**t) + 0.01).sqrt() + 0.1)
        for t, (_, m, v) in enumerate(moments(0.8, 0.9), 1)
    ]
    same(steps(transform.scale_by_adam(0.8, 0.9, 0.1, 0.01), *GRADS), expected)


@says("scale_by_adamax")
def adamax() -> None:
    u, expected = 0 * G, []
    for t, (grad, m, _) in enumerate(moments(0.8, 0.9), 1):
        u = torch.maximum(0.9 * u, grad.abs() + 0.1)
        expected.append(m / (1 - 0.8**t) / u)
    same(steps(transform.scale_by_adamax(0.8, 0.9, 0.1), *GRADS), expected)


@says("scale_by_adan")
def adan() -> None:
    b1, b2, b3 = 0.9, 0.8, 0.7
    m, d, n, old, expected = 0 * G, 0 * G, 0 * G, G, []
    for t, grad in enumerate(GRADS, 1):
        change, old = grad - old, grad
        m = b1 * m + (1 - b1) * grad
        d = b2 * d + (1 - b2) * change
        n = b3 * n + (1 - b3) * (grad + b2 * change) ** 2
        corrected = (each / (1 - b**t) for each, b in ((m, b1), (d, b2), (n, b3)))
        m_hat, d_hat, n_hat = corrected
        expected.append((m_hat + b2 * d_hat) / (n_hat.sqrt() + 0.1))
    same(steps(transform.scale_by_adan(b1, b2, b3, 0.1), *GRADS), expected)


@says("scale_by_lion")
def lion() -> None:
    m, expected = 0 * G, []
    for grad in GRADS:
        expected.append((0.9 * m + (1 - 0.9) * grad).sign())
        m = 0.8 * m + (1 - 0.8) * grad
    same(steps(transform.scale_by_lion(0.9, 0.8), *GRADS), expected)


@says("scale_by_radam")
def radam() -> None:
    b1, b2 = 0.8, 0.9
    longest = 2 / (1 - b2) - 1
    m, v, expected = 0 * G, 0 * G, []
    for t in range(1, 9):
        m, v = b1 * m + (1 - b1) * G, b2 * v + (1 - b2) * G**2
        rho = longest - 2 * t * b2**t / (1 - b2**t)
        direction = m / (1 - b1**t)
        if rho > 5:
            r = math.sqrt((rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho))
            direction = direction * r * math.sqrt(1 - b2**t) / (v.sqrt() + 0.1)
        expected.append(direction)
    same(steps(transform.scale_by_radam(b1, b2, 0.1), *[G] * 8), expected)


@says("scale_by_rms", "scale_by_stddev")
def rms() -> None:
    plain = [grad / (v.sqrt() + 0.1) for grad, _, v in moments(0.9, 0.9)]
    centered = [grad / ((v - m**2).sqrt() + 0.1) for grad, m, v in moments(0.9, 0.9)]
    same(steps(transform.scale_by_rms(0.9, 0.1), *GRADS), plain)
    same(steps(transform.scale_by_stddev(0.9, 0.1), *GRADS), centered)


@says("scale_by_rss")
def rss() -> None:
    same(
        steps(transform.scale_by_rss(eps=0.1), G, 2 * G),
        [G / (G.abs() + 0.1), 2 * G / ((5 * G**2).sqrt() + 0.1)],
    )


@says("scale_by_trust_ratio")
def trust_ratio() -> None:
    same(step(transform.scale_by_trust_ratio()), G * math.sqrt(5) / 5)
    same(step(transform.scale_by_trust_ratio(), G, 0 * P), G)
    with pytest.raises(ValueError, match="params"):
        transform.scale_by_trust_ratio().update(G, transform.EmptyState())
