"""A loop → its outcome, whose gradient is estimated by running the loop again with noise, in pairs.

A pair is a seed: from it comes its noise, wherever the pair is run. Of each pair, and each part of the loop, two
numbers come back: what the outcomes of both runs amount to along the outer gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from torchopt_dist.diff.adjoints._loop import Carry, Loop, Outcome
from torchopt_dist.diff.adjoints._randomness import kept_generators
from torchopt_dist.diff.adjoints._second_order import without_second_order
from torchopt_dist.diff.adjoints._undeclared import watched
from torchopt_dist.diff.zero_order import noise_of, weighted_noise
from torchopt_dist.typing import OptionalTensor

__all__ = ["Parallel", "run_with_pairs"]

Parallel: TypeAlias = Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]
"""Function of seeds → the same function, evaluated in parts, the results concatenated."""


def run_with_pairs(
    loop: Loop, samples: int, sigma: float, part: int | None, parallel: Parallel | None
) -> Outcome:
    """Train without a graph, and connect the parameters and the losses.

    Args:
        loop: what to run.
        samples: how many pairs.
        sigma: the noise's standard deviation.
        part: after how many steps a pair gets new noise; never, if not given.
        parallel: how pairs are spread.
    """
    seeds = torch.randint(2**62, (samples,))
    seen = watched(loop)

    def step(carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
        return (seen if number == 0 else loop).training_step(carry, number)

    outcome = loop.run(step, loop.own(loop.first))
    count = len(outcome.losses)
    places = loop.model.moved_places
    what = "EvolutionStrategies" if part is None else "PersistentEvolutionStrategies"
    pairs = _Pairs(what, loop.without_stop(), _parts(count, part or max(1, count)), sigma)
    params = list(outcome.carry.params)
    with torch.enable_grad():
        moved = [params[place] for place in places]
        connected = _Estimate.apply(
            pairs, seeds, parallel, len(moved), count, *moved, *outcome.losses, *loop.declared
        )
    for place, leaf in zip(places, connected[: len(places)], strict=True):
        params[place] = leaf
    carry = outcome.carry._replace(params=[params[place] for place in loop.model.first_places])
    return outcome._replace(carry=carry, losses=list(connected[len(places) :]))


def _parts(steps: int, length: int) -> list[tuple[int, int]]:
    """Where each part begins, and where it ends; at least one."""
    return [(start, min(steps, start + length)) for start in range(0, max(1, steps), length)]


@dataclass(frozen=True)
class _Pairs:
    """Seeds → numbers, of shape (seeds, parts, 2): a part of the loop, run with the noise and with its opposite."""

    what: str
    """The adjoint, for errors."""
    loop: Loop
    parts: list[tuple[int, int]]
    sigma: float
    of_params: tuple[OptionalTensor, ...] = ()
    """The outer gradient of each parameter that is moved."""
    of_losses: OptionalTensor = None
    """Of shape (steps,)."""

    def __call__(self, seeds: Tensor) -> Tensor:
        return torch.stack([self._pair(seed) for seed in seeds.tolist()])

    def _pair(self, seed: int) -> Tensor:
        both = torch.stack([self._run(seed, sign) for sign in (1.0, -1.0)], dim=-1)
        return both.cpu()

    def _run(self, seed: int, sign: float) -> Tensor:
        carry, numbers = None, []
        for part, (start, end) in enumerate(self.parts):
            noise = noise_of([seed_of(seed, part)], self.loop.declared, torch.randn)
            new = {
                id(tensor): tensor.detach() + sign * self.sigma * z[0]
                for tensor, z in zip(self.loop.declared, noise, strict=True)
            }
            loop = self.loop.with_tensors([new.get(id(tensor), tensor) for tensor in self.loop.tensors])
            outcome = loop.run(
                loop.training_step, loop.own(loop.first) if carry is None else carry, start, end
            )
            carry = outcome.carry
            numbers.append(self._amount(outcome, start, end))
        assert carry is not None
        last = [carry.params[place] for place in self.loop.model.moved_places]
        for leaf, weight in zip(last, self.of_params, strict=True):
            if weight is not None:
                numbers[-1] = numbers[-1] + (leaf.double() * weight.double()).sum()
        return torch.stack(numbers)

    def _amount(self, outcome: Outcome, start: int, end: int) -> Tensor:
        zero = torch.zeros((), dtype=torch.float64, device=self.loop.first.params[0].device)
        if self.of_losses is None or start == end:
            return zero
        losses = torch.stack(outcome.losses).double()
        return losses @ self.of_losses[start:end].double()


def seed_of(seed: int, part: int) -> int:
    """The seed of a pair's noise in a part of the loop."""
    return (seed + part * 0x9E3779B97F4A7C15) % 2**62


class _Estimate(torch.autograd.Function):
    """The last parameters and the losses as functions of what is declared."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(
        ctx: Any,
        pairs: _Pairs,
        seeds: Tensor,
        parallel: Parallel | None,
        params: int,
        losses: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.pairs, ctx.seeds, ctx.parallel, ctx.params, ctx.losses = pairs, seeds, parallel, params, losses
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach().clone() for tensor in tensors[: params + losses])

    @staticmethod
    def backward(ctx: Any, *grads: OptionalTensor) -> tuple[OptionalTensor, ...]:
        declared = ctx.pairs.loop.declared
        nothing = (None,) * (5 + ctx.params + ctx.losses)
        detached = [None if grad is None else grad.detach() for grad in grads]
        of_params, of_losses = detached[: ctx.params], detached[ctx.params :]
        pairs = replace(ctx.pairs, of_params=tuple(of_params), of_losses=_weights(of_losses))
        evaluate: Callable[[Tensor], Tensor] = pairs if ctx.parallel is None else ctx.parallel(pairs)
        with kept_generators(), torch.no_grad():  # a call of workers draws a seed
            values = evaluate(ctx.seeds)
        # The noise of a part has moved its own steps and all that come after them.
        slopes = (values[..., 0] - values[..., 1]) / (2 * pairs.sigma * len(ctx.seeds))
        following = slopes.flip(1).cumsum(1).flip(1)
        seeds = [seed_of(seed, part) for seed in ctx.seeds.tolist() for part in range(len(pairs.parts))]
        with torch.no_grad():
            found = weighted_noise(seeds, following.reshape(-1), declared, torch.randn)
        return (*nothing, *without_second_order(pairs.what, found))


def _weights(grads: Sequence[OptionalTensor]) -> OptionalTensor:
    some = next((grad for grad in grads if grad is not None), None)
    if some is None:
        return None
    return torch.stack([torch.zeros_like(some) if grad is None else grad for grad in grads])
