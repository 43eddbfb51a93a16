"""Random inner loops have, by the adjoints that are not exact, the gradients of loops by hand, also in ``vmap``.

A loop by hand is one whose exact gradient is what the adjoint stands for: inner gradients are cut, or replaced by those
at another point. Optimizers are the random chains of ``tests/transform/test_random_chains.py``.
``TODIST_FUZZ_SEED=<seed>`` runs the loops from this seed on, and ``TODIST_FUZZ_LOOPS`` says how many.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import torchopt_dist as todist
from tests.transform.test_random_chains import Grads, Loop, draw, loss_of, start
from torchopt_dist import transform

MORE = os.environ.get("TODIST_FUZZ_LOOPS")
LOOPS = int(MORE or 8)
SEED = int(os.environ.get("TODIST_FUZZ_SEED") or (random.randrange(10**9) if MORE else 0))
TASKS, PAIRS, SIGMA, RIDGE, RATE = 2, 2, 0.05, 5.0, 0.05
ADJOINTS = {
    "truncated": todist.Truncated(2),
    "first order": todist.FirstOrder(),
    "reptile": todist.Reptile(),
    "finite difference": todist.FiniteDifference(eps=1e-4),
    "SAMA": todist.SAMA(alpha=1e-4),
    "implicit": todist.Implicit(
        todist.linear_solve.solve_inv(ridge=RIDGE), batches=2, not_converged="ignore"
    ),
    "evolution strategies": todist.EvolutionStrategies(samples=PAIRS, sigma=SIGMA),
}


class Drawn:
    """A chain, a loss with weights of its rows, and data for each task."""

    def __init__(self, seed: int) -> None:
        r = random.Random(seed)
        self.seed, (self.params, data, self.h) = seed, start(seed)
        torch.manual_seed(seed)
        self.links, self.loops = zip(*(draw(r, self.h) for _ in range(r.randint(1, 3))), strict=True)
        self.steps, self.stop = r.choice([1, 3, 4]), r.choice([None, None, 1])
        self.data = torch.randn(TASKS, self.steps, *data.shape, dtype=data.dtype)
        self.weight = torch.rand(2, dtype=data.dtype, requires_grad=True)
        self.keeps_near, self.vmap = r.random() < 0.3, r.random() < 0.4
        self.leaves = [*self.params.values(), self.weight, self.h]

    def loss(self, params: Grads, data: Tensor) -> Tensor:
        value = loss_of(params, data * self.weight)
        if self.keeps_near:  # the first parameters in another role, as in iMAML
            value = value + sum((0.3 * (p - self.params[k]).square().sum() for k, p in params.items()), 0.0)
        return value

    def outer(self, params: Grads) -> Tensor:
        return sum((torch.sin(p).sum() for p in params.values()), torch.zeros((), dtype=torch.float64))

    def found(self, adjoint: Any) -> list[Tensor]:
        """The outer losses and their gradients."""

        def task(data: Tensor) -> Tensor:
            adapted = todist.inner_loop(
                self.loss,
                todist.chain(*self.links, transform.scale(-RATE)),
                self.params,
                data,
                meta=(self.weight, self.h, self.params if self.keeps_near else None),
                adjoint=adjoint,
                stop=None if self.stop is None else lambda number, loss: number == self.stop,
                seed=0,
            )
            return self.outer(adapted.params)

        torch.manual_seed(self.seed)  # of the directions of evolution strategies
        values = torch.vmap(task)(self.data) if self.vmap else torch.stack(list(map(task, self.data)))
        if not values.requires_grad:  # the optimizer gave back what it started from
            return [values, *map(torch.zeros_like, self.leaves)]
        return [values, *torch.autograd.grad(values.sum(), self.leaves, materialize_grads=True)]

    def by_hand(self, name: str, *, noisy_h: bool = False) -> list[Tensor]:
        """The same by loops.

        Args:
            name: of the adjoint.
            noisy_h: whether the hyper-parameter gets noise even if the parameters do not depend on it: a link uses it.
        """
        torch.manual_seed(self.seed)
        seeds = torch.randint(2**62, (TASKS, PAIRS))
        totals = [torch.zeros_like(leaf) for leaf in self.leaves]
        values = []
        for data, own in zip(self.data, seeds, strict=True):
            data = data[: self.steps if self.stop is None else self.stop + 1]
            if name == "evolution strategies":
                value, grads = self._by_noise(data, own.tolist(), noisy_h)
            elif name == "reptile":  # whatever the loss
                last = self._adapted(data, name)
                value = self.outer(last)
                grads = [p.detach() - last[k] for k, p in self.params.items()]
                grads += [torch.zeros_like(leaf) for leaf in (self.weight, self.h)]
            else:
                value = self.outer(self._adapted(data, name))
                grads = list(torch.autograd.grad(value, self.leaves, materialize_grads=True))
            values.append(value.detach())
            totals = [total + grad for total, grad in zip(totals, grads, strict=True)]
        return [torch.stack(values), *totals]

    def _adapted(self, data: Tensor, name: str) -> Grads:
        loops: list[Loop] = list(self.loops)
        params, memories = dict(self.params), [{} for _ in loops]
        for number, batch in enumerate(data):
            last = number == len(data) - 1
            if name != "first order" and (name != "truncated" or 0 < number <= len(data) - 2):
                params, memories = _cut(params), [_cut(memory) for memory in memories]
            grads = self._grads(params, batch)
            if name == "truncated" or (name == "finite difference" and last):
                params = _moved(loops, params, grads, memories, number)
                continue
            if name == "SAMA" and last:  # the gradient at the end, as far as it depends on what is learned
                there = _cut(
                    _moved(loops, params, _cut(grads), [_cut(memory) for memory in memories], number)
                )
                at_end = self._grads(there, batch)
                grads = {k: g.detach() + at_end[k] - at_end[k].detach() for k, g in grads.items()}
                params = _moved(loops, params, grads, memories, number)
                continue
            params = _moved(loops, params, _cut(grads), memories, number)
        if name == "implicit":
            return self._stationary(_cut(params), data[-2:])
        return _cut(params) if name == "reptile" else params

    def _grads(self, params: Grads, batch: Tensor) -> Grads:
        given = {k: p if p.requires_grad else p.requires_grad_() for k, p in params.items()}
        aliases = {k: p.view_as(p) for k, p in given.items()}
        found = torch.autograd.grad(self.loss(aliases, batch), list(aliases.values()), create_graph=True)
        return dict(zip(params, found, strict=True))

    def _stationary(self, params: Grads, data: Tensor) -> Grads:
        """The point, moved by what a change of the gradient there moves a stationary one, damped."""
        point = torch.cat([p.reshape(-1) for p in params.values()])

        def gradient(flat: Tensor) -> Tensor:
            at, rest = {}, flat
            for k, p in params.items():
                at[k], rest = rest[: p.numel()].reshape(p.shape), rest[p.numel() :]
            mean = sum(self.loss(at, batch) for batch in data) / len(data)
            return torch.autograd.grad(mean, flat, create_graph=True)[0]

        point = point.detach().requires_grad_()
        slope = gradient(point)
        hessian = torch.stack([torch.autograd.grad(s, point, retain_graph=True)[0] for s in slope])
        damped = hessian + RIDGE * torch.eye(len(point), dtype=point.dtype)
        there = point.detach() - torch.linalg.solve(damped, slope - slope.detach())
        parts = iter(there.split([p.numel() for p in params.values()]))
        return {k: next(parts).reshape(p.shape) for k, p in params.items()}

    def _uses_h(self, data: Tensor) -> bool:
        """Whether a link depends on the hyper-parameter; the loss does not."""
        last = self._adapted(data, "first order").values()
        return torch.autograd.grad(sum(p.sum() for p in last), self.h, allow_unused=True)[0] is not None

    def _by_noise(self, data: Tensor, seeds: list[int], noisy_h: bool) -> tuple[Tensor, list[Tensor]]:
        named = [
            self.weight,
            *([self.h] if noisy_h or self._uses_h(data) else []),
            *(self.params.values() if self.keeps_near else []),
        ]
        last = {k: p.detach().requires_grad_() for k, p in self._adapted(data, "reptile").items()}
        value = self.outer(last)
        bars = torch.autograd.grad(value, list(last.values()))
        totals = {id(tensor): torch.zeros_like(tensor) for tensor in self.leaves}
        before = [tensor.detach().clone() for tensor in named]
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            noise = [torch.randn(tensor.shape, generator=generator).double() for tensor in named]
            sides = []
            for sign in (1, -1):
                for tensor, old, z in zip(named, before, noise, strict=True):
                    tensor.data = old + sign * SIGMA * z
                ends = self._adapted(data, "reptile").values()
                sides.append(sum((p * bar).sum() for p, bar in zip(ends, bars, strict=True)))
            for tensor, old, z in zip(named, before, noise, strict=True):
                tensor.data = old
                totals[id(tensor)] += (sides[0] - sides[1]) * z / (2 * SIGMA * PAIRS)
        return value, [totals[id(leaf)] for leaf in self.leaves]


def _cut(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _cut(one) for key, one in tree.items()}
    return tree.detach() if isinstance(tree, Tensor) else tree


def _moved(
    loops: list[Loop], params: Grads, grads: Grads, memories: list[dict[str, Any]], number: int
) -> Grads:
    for loop, memory in zip(loops, memories, strict=True):
        grads = loop(grads, params, memory, number + 1)
    return {k: p - RATE * grads[k] for k, p in params.items()}


@pytest.mark.timeout(max(300, LOOPS))
@pytest.mark.parametrize("name", ADJOINTS)
@pytest.mark.filterwarnings("ignore:.Implicit.* gives no gradient")  # to the rate
def test_random_loops_have_the_gradients_of_loops_by_hand(name: str) -> None:
    print(f"TODIST_FUZZ_SEED={SEED}: {LOOPS} loops")
    differs = name in ("finite difference", "SAMA")
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if differs else {"rtol": 1e-5, "atol": 1e-7}
    for seed in range(SEED, SEED + LOOPS):
        drawn = Drawn(seed)
        found = drawn.found(ADJOINTS[name])
        # An estimate has noise for what a link uses, whether or not it moves the parameters.
        expected = drawn.by_hand(name, noisy_h=bool(found[-1].any()))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(
                one, other, **tolerance, msg=lambda m, seed=seed: f"TODIST_FUZZ_SEED={seed}: {m}"
            )
