"""A compiled loop does once what it does beside computing, knows what its names meant, and is let go of."""

from __future__ import annotations

import functools
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import torchopt_dist as todist
from tests.diff.compiled_runs import MARKS, X, both, layer, made

pytestmark = MARKS


class Noted:
    """An object that somebody writes to."""

    last: Any = None


def noted(kind: str) -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    """A loss that does more than to compute, and what it has done."""
    log: list[Any] = []
    table: dict[str, Any] = {"n": 0}
    thing, count = Noted(), 0

    def loss(w: Tensor) -> Tensor:
        nonlocal count
        value = (w**2).sum()
        if kind == "a list":
            log.append(value.detach())
        elif kind == "a dictionary":
            table["n"] += 1
        elif kind == "an attribute":
            thing.last = value.detach()
        elif kind == "a variable":
            count += 1
        elif kind == "Python's random numbers":
            value = value * random.random()
        elif kind == "numpy's random numbers":
            value = value * np.random.rand()
        else:
            value = value * torch.rand((), generator=generator)
        return value

    generator = torch.Generator().manual_seed(0)
    return loss, lambda: [log, table, thing.last, count]


@pytest.mark.parametrize(
    ("kind", "why"),
    {
        "a list": "`log` changes when it runs",
        "a dictionary": r"`table`\['n'\] changes",
        "an attribute": "`thing`.* changes",
        "a variable": "`count` changes",
        "Python's random numbers": "random numbers of Python's",
        "numpy's random numbers": "or of numpy's",
        "a generator": "[gG]enerator",
    }.items(),
)
def test_a_loss_that_does_more_than_to_compute_is_refused_and_does_it_once(kind: str, why: str) -> None:
    """What the compiler's run of it has done is undone, and so are the numbers that it has drawn."""
    w = torch.ones(2, requires_grad=True)

    def run(compile: bool) -> list[Tensor]:
        random.seed(0)
        np.random.seed(0)
        loss, done = noted(kind)
        result = todist.inner_loop(loss, todist.sgd(lr=0.1), w, 3, compile=compile)
        return [
            result.losses.detach(),
            *torch.autograd.grad(result.params.sum(), w),
            torch.tensor(str(done()).count("tensor")),
        ]

    with pytest.warns(UserWarning, match=why):
        both(run)
    both(run)  # said once
    assert not made


def test_a_tensor_that_a_loss_changes_in_place_is_changed_once_a_step() -> None:
    w = torch.ones(2, requires_grad=True)

    def run(compile: bool) -> list[Tensor]:
        mean = torch.zeros(1, 1)
        batches = [X, 2 * X, 3 * X]

        def loss(w: Tensor, x: Tensor) -> Tensor:
            mean.mul_(0.5).add_(x)
            return (w * x).sum() ** 2

        result = todist.inner_loop(loss, todist.sgd(lr=0.01), w, batches, compile=compile)
        grads = torch.autograd.grad(result.params.sum(), w)
        return [result.losses.detach(), *grads, mean]

    both(run)
    assert made


@pytest.mark.parametrize("optimizer", [todist.adam(lr=0.05), todist.sgd(lr=0.05, momentum=0.9)])
def test_second_and_third_derivatives_of_recorded_steps(optimizer: Any) -> None:
    w = torch.tensor([0.5, -0.4], dtype=torch.float64, requires_grad=True)
    meta = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)

    def run(compile: bool) -> list[Tensor]:
        result = todist.inner_loop(
            lambda w: ((w - meta.sin()) ** 4).sum() + (w * meta).sum().cos(), optimizer, w, 3, compile=compile
        )
        first = torch.autograd.grad(result.params.cos().sum(), (w, meta), create_graph=True)
        second = torch.autograd.grad(sum(x.sin().sum() for x in first), (w, meta), create_graph=True)
        third = torch.autograd.grad(sum(x.exp().sum() for x in second), (w, meta))
        return [result.losses.detach(), *(x.detach() for x in (*first, *second, *third))]

    both(run)
    assert made


def test_names_that_are_bound_anew_before_the_backward_pass() -> None:
    """A program of the gradient is made of what was meant; where there is none yet, it is an error."""
    w = torch.ones(2, requires_grad=True)
    scale = 2.0

    def loss(w: Tensor) -> Tensor:
        return scale * (w**2).sum()

    kept = []
    for number in (2.0, 3.0):
        scale = number
        kept.append(todist.inner_loop(loss, todist.sgd(lr=0.1), w, 1, compile=True))
    for number, result in zip((2.0, 3.0), kept, strict=True):
        if number == 3.0:
            (grad,) = torch.autograd.grad(result.params.sum(), w)
            torch.testing.assert_close(grad, torch.full((2,), 1 - 0.2 * number))
        else:
            with pytest.raises(
                RuntimeError, match="`scale` has changed between a call with compile=True and"
            ):
                torch.autograd.grad(result.params.sum(), w, retain_graph=True)
            scale = number
            (grad,) = torch.autograd.grad(result.params.sum(), w)
            torch.testing.assert_close(grad, torch.full((2,), 1 - 0.2 * number))
            scale = 3.0


@pytest.mark.parametrize("order", [1, 2])
def test_a_tensor_that_is_bound_anew_before_the_backward_pass(order: int) -> None:
    """The gradient is that of the tensor that was meant, whether its program is there already or not."""
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def once(compile: bool) -> list[Tensor]:
        meta = first = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
        result = todist.inner_loop(
            lambda w: ((w * meta) ** 3).sum(), todist.sgd(lr=0.1), w, 2, compile=compile
        )
        meta = torch.tensor([5.0, 6.0], dtype=torch.float64, requires_grad=True)
        grads = torch.autograd.grad(result.params.cos().sum(), (w, first), create_graph=order > 1)
        if order > 1:
            grads = torch.autograd.grad(sum(x.sin().sum() for x in grads), (w, first))
        return [x.detach() for x in grads]

    def run(compile: bool) -> list[Tensor]:
        return [*once(compile), *once(compile)]

    both(run)
    assert made


def test_a_compiled_loop_in_the_loss_of_a_compiled_loop_is_a_part_of_its_program() -> None:
    """Without random numbers of its own; with them it is refused."""
    w = torch.tensor([0.5, -0.5], requires_grad=True)

    def run(seed: int | None, compile: bool) -> list[Tensor]:
        def loss(w: Tensor) -> Tensor:
            inner = todist.inner_loop(
                lambda v: ((v - w) ** 2).sum(), todist.sgd(lr=0.1), w * 2, 2, seed=seed, compile=compile
            )
            return inner.params.cos().sum()

        result = todist.inner_loop(loss, todist.sgd(lr=0.1), w, 2, compile=compile)
        return [result.losses.detach(), *torch.autograd.grad(result.params.sum(), w)]

    both(functools.partial(run, 0))
    assert made
    with pytest.warns(UserWarning, match="it draws a seed, as calls and inner loops do"):
        both(functools.partial(run, None))


def test_a_generator_of_this_thread_is_as_without_the_word_after_a_program_was_made() -> None:
    w = torch.ones(2, requires_grad=True)
    after = []
    for compile in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        todist.inner_loop(lambda w: (w * torch.rand(2)).sum(), todist.sgd(lr=0.1), w, 3, compile=compile)
        after.append((torch.rand(1).item(), random.random()))
    assert after[0] == after[1]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_where_tensors_have_tangents_the_loop_runs_as_it_is() -> None:
    def tangent(compile: bool) -> Tensor:
        with forward_ad.dual_level():
            w = forward_ad.make_dual(torch.tensor([1.0, 2.0]).requires_grad_(), torch.ones(2))
            result = todist.inner_loop(lambda w: (w**3).sum(), todist.sgd(lr=0.1), w, 2, compile=compile)
            return forward_ad.unpack_dual(result.params).tangent

    with pytest.warns(UserWarning, match="it is inside of a level of forward-mode differentiation"):
        torch.testing.assert_close(tangent(True), tangent(False))


def test_the_graph_of_a_loop_is_let_go_of_with_its_result() -> None:
    """Without a search for garbage."""
    net, w = layer(nn.Tanh()), torch.ones(1, requires_grad=True)

    def run() -> weakref.ref[Any]:
        result = todist.inner_loop(
            lambda net, x: (w * net(x)).sum() ** 2, todist.adam(lr=0.1), net, [X, X], meta=w, compile=True
        )
        torch.autograd.grad(result.params(X).sum(), w)
        return weakref.ref(result.params)

    run()
    gc.collect()
    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()
