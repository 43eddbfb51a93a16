"""``diagnose=True``: norms of the outer gradient after each step, as of a loop by hand; explosions are told."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import torchopt_dist as todist
from tests.rows import each_row

DOUBLE = torch.float64
X = torch.linspace(-1, 1, 6, dtype=DOUBLE).reshape(3, 2)
STEPS = 4


def loss(params: dict[str, Tensor]) -> Tensor:
    return (torch.tanh(X @ params["w"] + params["b"]) - 0.5).square().mean()


def start() -> dict[str, Tensor]:
    return {
        "w": torch.tensor([0.3, -0.7], dtype=DOUBLE, requires_grad=True),
        "b": torch.tensor(0.1, dtype=DOUBLE, requires_grad=True),
    }


def outer(params: dict[str, Tensor]) -> Tensor:
    return params["w"].square().sum() + params["b"] ** 3


def by_hand() -> list[float]:
    params, kept = start(), []
    for _ in range(STEPS):
        grads = torch.autograd.grad(loss(params), list(params.values()), create_graph=True)
        params = {k: p - 0.5 * g for (k, p), g in zip(params.items(), grads, strict=True)}
        kept.append(list(params.values()))
    flat = torch.autograd.grad(outer(params), [p for step in kept for p in step])
    return [math.sqrt(sum(float(g.square().sum()) for g in flat[2 * i : 2 * i + 2])) for i in range(STEPS)]


@each_row(
    "adjoint",
    [todist.Recorded(), todist.Replayed(), todist.Replayed(snapshots=2), todist.Truncated(2)],
)
def test_the_norms_are_those_of_a_loop_by_hand(adjoint: Any) -> None:
    result = todist.inner_loop(loss, todist.sgd(lr=0.5), start(), STEPS, adjoint=adjoint, diagnose=True)
    assert isinstance(result, todist.typing.InnerLoopResult)
    assert result.gradient_norms.shape == (0,)
    outer(result.params).backward()
    found = result.gradient_norms
    wanted = torch.tensor(by_hand(), dtype=DOUBLE)
    if isinstance(adjoint, todist.Truncated):
        assert found[:2].isnan().all()
        found, wanted = found[2:], wanted[2:]
    torch.testing.assert_close(found, wanted)


def test_values_states_and_gradients_are_those_without() -> None:
    ends = []
    for diagnose in (False, True):
        params = start()
        first = todist.inner_loop(loss, todist.adam(lr=0.1), params, 2, diagnose=diagnose)
        again = todist.inner_loop(
            loss,
            todist.adam(lr=0.1),
            first.params,
            2,
            state=first.state,
            diagnose=diagnose,
            adjoint=todist.Replayed(),
        )
        grads = torch.autograd.grad(outer(again.params), list(params.values()))
        ends.append((grads, again.losses, again.params, todist.pytree.flatten(again.state)[0]))
    torch.testing.assert_close(ends[1], ends[0])
    net = torch.nn.Linear(2, 1).double()
    made = todist.MetaSGD(net, lr=0.1).run(lambda net: net(X).square().mean(), 3, diagnose=True)
    net(X).sum().backward()
    assert made.gradient_norms.shape == (3,)


def test_a_gradient_that_explodes_is_told_with_the_remedy_and_one_that_does_not_is_not() -> None:
    for lr, explodes in ((0.1, False), (3.0, True)):
        w = torch.tensor(1.0, dtype=DOUBLE, requires_grad=True)
        result = todist.inner_loop(lambda w: -(w**2), todist.sgd(lr=lr), w, 8, diagnose=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result.params.backward()
        told = [str(each.message) for each in caught]
        assert bool(told) is explodes, told
        if explodes:
            assert len(told) == 1
            assert "explodes: its norm is 1 after step 7 of the inner loop, the last one, and " in told[0]
            assert "lower the inner learning rate" in told[0]
        growth = result.gradient_norms[:-1] / result.gradient_norms[1:]
        torch.testing.assert_close(growth, torch.full((7,), 1 + 2 * lr, dtype=DOUBLE))


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="`diagnose` must be True or False, got int 1"):
        todist.inner_loop(loss, todist.sgd(lr=0.5), start(), 1, diagnose=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`diagnose` must be False with `compile`"):
        todist.inner_loop(loss, todist.sgd(lr=0.5), start(), 1, diagnose=True, compile=True)
    with pytest.raises(ValueError, match="`gradient_norms` are there after `inner_loop"):
        _ = todist.inner_loop(loss, todist.sgd(lr=0.5), start(), 1).gradient_norms
