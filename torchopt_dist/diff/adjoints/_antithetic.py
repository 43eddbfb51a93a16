"""A loop → its outcome, whose gradient is estimated by running the loop again with noise, in pairs.

A pair is a seed, which determines its noise wherever the pair is run. Two numbers come back for each pair and each part
of the loop: the inner products of both outcomes with the outer gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from torchopt_dist.core.random_turns import kept_generators
from torchopt_dist.core.rows import in_rows
from torchopt_dist.core.surroundings import Modes, modes
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.vmap import Samples, Values
from torchopt_dist.diff.adjoints._checks import watched
from torchopt_dist.diff.adjoints._estimates import without_second_order
from torchopt_dist.diff.adjoints._loop import Carry, Loop, Outcome
from torchopt_dist.diff.zero_order import noise_of, weighted_noise
from torchopt_dist.ops._columns import as_real

__all__ = ["Parallel", "run_with_pairs"]

Parallel: TypeAlias = Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]
"""Function of seeds → the same function, evaluated in parts, the results concatenated."""


def run_with_pairs(
    loop: Loop, samples: int, sigma: float, part: int | None, parallel: Parallel | None, around: Samples
) -> Outcome:
    """Train without a graph, and connect the parameters and the losses.

    Args:
        loop: the loop to run.
        samples: the number of pairs.
        sigma: the noise's standard deviation.
        part: the number of steps after which a pair gets new noise; never, if not given.
        parallel: how pairs are spread over workers.
        around: the samples of the ``vmap`` around the loop. Each has pairs of its own, whose seeds are drawn in the
            order of the samples.

    Raises:
        NotImplementedError: pairs are to be spread inside ``vmap``.
    """
    what = "EvolutionStrategies" if part is None else "PersistentEvolutionStrategies"
    if around.levels and parallel is not None:
        raise NotImplementedError(
            f"`{what}(parallel=...)` does not run inside `torch.vmap`: leave `parallel` out there, where all tasks run "
            "a pair at once, or map over the tasks with `parallelize` without `vectorize=True`"
        )
    if around.levels and not loop.is_substituted:  # inside, each tensor of a task may require grad
        held = zip(loop.declared, around.values(loop.declared), strict=True)
        loop = _of(loop, [place for place, (_, found) in enumerate(held) if found.values.requires_grad])
    with around.outside():
        seeds = torch.randint(2**62, (*around.sizes, samples), device="cpu")
        if loop.ranks is not None:  # all ranks run the same pairs
            seeds = loop.ranks.group.exchanged(seeds)[0]
    met: set[int] = set()
    noting = replace(loop, others=loop.others or loop.declared, met=met)
    seen = watched(noting, around)

    def step(carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
        return (seen if number == 0 else noting).training_step(carry, number)

    outcome = loop.run(step, loop.own(loop.first))
    # A tensor that no step has used would get the noise of the others for a gradient.
    if loop.declared and not met:
        warnings.warn(
            f"nothing gets a gradient from this loop: with `{what}()` it is for what the loss and the optimizer use of "
            "`meta`, the optimizer's tensors and `batches`, and they use none; list in `meta` what the loss uses",
            UserWarning,
            stacklevel=6,
        )
    loop = _of(loop, [place for place, tensor in enumerate(loop.declared) if id(tensor) in met])
    count = len(outcome.losses)
    places = loop.model.moved_places
    params = list(outcome.carry.params)
    made = around.values_of_each([*(params[place] for place in places), *outcome.losses])
    declared = list(loop.declared)
    if loop.is_substituted:  # a view is of what a loop around this one has put in the places of these
        declared = [tensor.view_as(tensor) for tensor in declared]
    given = around.values(declared)
    pairs = _Pairs(
        what,
        loop.without_stop(),
        _parts(count, part or max(1, count)),
        sigma,
        around,
        modes(),
    )
    with torch.enable_grad(), around.outside():
        connected = _Estimate.apply(
            pairs, seeds, parallel, made, given, *(one.values for one in (*made, *given))
        )
    tensors = [one.tensor(values) for one, values in zip(made, connected, strict=True)]
    for place, leaf in zip(places, tensors[: len(places)], strict=True):
        params[place] = leaf
    carry = outcome.carry._replace(params=[params[place] for place in loop.model.first_places])
    return outcome._replace(carry=carry, losses=tensors[len(places) :])


def _of(loop: Loop, places: Sequence[int]) -> Loop:
    """The same loop, of whose declared tensors only those at some places get a gradient."""
    loop = replace(loop, declared=tuple(loop.declared[place] for place in places))
    if loop.ranks is None:
        return loop
    own = frozenset(new for new, old in enumerate(places) if old in loop.ranks.own)
    return replace(loop, ranks=replace(loop.ranks, own=own))


def _parts(steps: int, length: int) -> list[tuple[int, int]]:
    """The start and the end of each part of the loop; at least one part."""
    return [(start, min(steps, start + length)) for start in range(0, max(1, steps), length)]


@dataclass(frozen=True)
class _Pairs:
    """Seeds → numbers, of shape (seeds, parts, 2): parts of the loop, run with the noise and with its negative."""

    what: str
    """The adjoint, for errors."""
    loop: Loop
    parts: list[tuple[int, int]]
    sigma: float
    around: Samples
    """Inside ``vmap`` seeds and numbers have the tasks' dimensions after the first one, too."""
    modes: Modes
    weights: tuple[Values | None, ...] = ()
    """The outer gradient of each parameter that is moved, and of each loss."""

    def __call__(self, seeds: Tensor) -> Tensor:
        with self.modes.again():
            return torch.stack([self._pair(seed) for seed in seeds])

    def _pair(self, seeds: Tensor) -> Tensor:
        sides = [self.around.again(partial(self._run, seeds, sign))[0] for sign in (1.0, -1.0)]
        return torch.stack(sides, dim=-1).cpu()

    def _run(self, seeds: Tensor, sign: float) -> list[Tensor]:
        carry, numbers = None, []
        zero = torch.zeros((), dtype=torch.float64, device=self.loop.first.params[0].device)
        weights = [None if one is None else one.tensor() for one in self.weights]
        places = self.loop.model.moved_places
        for part, (start, end) in enumerate(self.parts):
            new = {
                id(tensor): tensor.detach() + sign * self.sigma * z
                for tensor, z in zip(self.loop.declared, self._noise(seeds, part), strict=True)
            }
            loop = self.loop.with_tensors([new.get(id(tensor), tensor) for tensor in self.loop.tensors])
            outcome = loop.run(
                loop.training_step, loop.own(loop.first) if carry is None else carry, start, end
            )
            carry = outcome.carry
            numbers.append(zero + _amount(outcome.losses, weights[len(places) :][start:end]))
        assert carry is not None
        last = [carry.params[place] for place in places]
        numbers[-1] = numbers[-1] + _amount(last, weights[: len(places)])
        return [torch.stack(numbers)]

    def _noise(self, seeds: Tensor, part: int) -> list[Tensor]:
        """The noise for each declared tensor; inside ``vmap`` each task's noise comes from its own seed."""
        sizes, own = self.around.sizes, [seed_of(seed, part) for seed in seeds.reshape(-1).tolist()]
        with self.around.outside():
            drawn = self.drawn(lambda seeds: noise_of(seeds, _alike(self.loop.declared)), own)
            held = [self.around.stacked(z.reshape((*sizes, *z.shape[1:]))) for z in drawn]
        return [one.tensor() for one in held]

    def drawn(self, draw: Callable[[list[int]], list[Tensor]], seeds: list[int]) -> list[Tensor]:
        """One tensor for each declared one, drawn with these seeds; a rank's own ones with seeds of its own."""
        ranks = self.loop.ranks
        found = draw(seeds)
        if ranks is not None and ranks.own:
            of_rank = draw([(seed + (ranks.rank + 1) * 0xD1342543DE82EF95) % 2**62 for seed in seeds])
            found = [of_rank[place] if place in ranks.own else one for place, one in enumerate(found)]
        return found


def _alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors outside ``vmap`` with the shapes, dtypes and devices of those given, without values."""
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors]


def _amount(tensors: Sequence[Tensor], weights: Sequence[OptionalTensor]) -> Tensor | int:
    """The sum of all products, 0-d; a complex number is a pair of real ones."""
    return sum(
        (one.double() * other.double()).sum()
        for tensor, weight in zip(tensors, weights, strict=True)
        if weight is not None
        for one, other in zip(as_real([tensor]), as_real([weight]), strict=True)
    )


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
        made: list[Values],
        given: list[Values],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.pairs, ctx.seeds, ctx.parallel, ctx.made, ctx.given = pairs, seeds, parallel, made, given
        first = (
            [] if pairs.around.levels else [pairs.loop.first.params[n] for n in pairs.loop.model.moved_places]
        )
        ctx.save_for_backward(*tensors[len(made) :], *first)
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach().clone() for tensor in tensors[: len(made)])

    @staticmethod
    @in_rows
    def backward(ctx: Any, *grads: OptionalTensor) -> tuple[OptionalTensor, ...]:
        saved = ctx.saved_tensors  # an error of torch's where one was overwritten
        weights = tuple(
            None if grad is None else Values(grad.detach(), one.dims)
            for one, grad in zip(ctx.made, grads, strict=True)
        )
        pairs, count = replace(ctx.pairs, weights=weights), len(ctx.seeds[..., 0].reshape(-1))
        evaluate: Callable[[Tensor], Tensor] = pairs if ctx.parallel is None else ctx.parallel(pairs)
        with pairs.loop.failing(), kept_generators(), torch.no_grad():  # a call of workers draws a seed
            values = evaluate(ctx.seeds.movedim(-1, 0))
        values = values.reshape(len(values), count, len(pairs.parts), 2)
        # The noise of a part has moved its own steps and all that come after them.
        slopes = (values[..., 0] - values[..., 1]) / (2 * pairs.sigma * len(values))
        following = slopes.flip(-1).cumsum(-1).flip(-1)
        with torch.no_grad():
            of_each = [
                pairs.drawn(
                    partial(
                        weighted_noise,
                        weights=following[:, task].reshape(-1),
                        tensors=_alike(pairs.loop.declared),
                    ),
                    [seed_of(seed, part) for seed in own.tolist() for part in range(len(pairs.parts))],
                )
                for task, own in enumerate(ctx.seeds.reshape(count, -1))
            ]
            found = [
                _of_values(torch.stack(one), held, pairs.around)
                for held, one in zip(ctx.given, zip(*of_each, strict=True), strict=True)
            ]
            ranks = pairs.loop.ranks
            if ranks is not None:  # the gradient of a rank's own tensor is taken for that of its own loss
                found = [one * ranks.size if place in ranks.own else one for place, one in enumerate(found)]
        nothing = (None,) * (5 + len(ctx.made))
        return (*nothing, *without_second_order(pairs.what, found, saved))


def _of_values(found: Tensor, held: Values, around: Samples) -> Tensor:
    """Gradients of all tasks, one after another → the gradient of the values that the tasks have, or share."""
    found = found.reshape((*around.sizes, *found.shape[1:]))
    shared = [place for place, dim in enumerate(held.dims) if dim is None]
    if shared:
        found = found.sum(shared)
    # Dimensions were taken out from the innermost `vmap` to the outermost, and are put back the other way round.
    count = len(held.dims) - len(shared)
    own = [dim for dim in held.dims if dim is not None]
    for place in reversed(range(count)):
        found = found.movedim(place, place + own[place])
    return found
