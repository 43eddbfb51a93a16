"""A step's batch in parts → the loss and the gradient of the whole, with the graph of one part at a time.

The gradient of a part is a :mod:`~torchopt_dist.core.remat`: it keeps the parameters and the part, and in a backward
pass of any order it is computed again, by itself. The sum of the parts' gradients is the step's, of which the
optimizer makes one update. So a history has one entry a step, as without parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchopt_dist import pytree
from torchopt_dist.core import remat
from torchopt_dist.core.graphs import leaf_of, looks_for_others, nodes_between
from torchopt_dist.core.random_turns import Turn, kept_generators, seed_step
from torchopt_dist.core.surroundings import Modes, forget_casts, modes
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.vjp import leaf_like
from torchopt_dist.diff.adjoints._carry import Carry, Evaluation, Seen, WatchFn
from torchopt_dist.diff.adjoints._checks import refuse_undeclared
from torchopt_dist.diff.adjoints._loop import Loop
from torchopt_dist.diff.adjoints._ranks import local, mean
from torchopt_dist.formulas.attention import attention_by_formula
from torchopt_dist.pytree._containers import flatten
from torchopt_dist.torch_private import forward_mode_is_active, outside_of_transforms, transforms_are_active

__all__ = ["MicroBatches", "split", "steps_again"]

_NOTHING: Any = None


@contextmanager
def steps_again(loop: Loop, ran_in: Modes) -> Iterator[None]:
    """A context in which steps run again: that in which the loop ran, with attention that has all derivatives."""
    with ExitStack() as stack:
        stack.enter_context(loop.failing())
        if loop.samples:
            stack.enter_context(outside_of_transforms())
        stack.enter_context(kept_generators())
        stack.enter_context(attention_by_formula())
        stack.enter_context(ran_in.again())
        yield
        forget_casts()


def _is_whole(leaf: Any) -> bool:
    return isinstance(leaf, (nn.Module, np.ndarray))


def split(batch: Any, count: int) -> list[tuple[float, Any]]:
    """A batch → at most ``count`` parts of it, each with its share of the examples; sizes differ by at most one.

    Tensors and arrays of numpy are split along dimension 0, wherever they are; all else is in each part whole.

    Raises:
        ValueError: the batch has nothing to split, no examples, or tensors with different numbers of examples.
    """
    leaves, paths, rebuild = flatten(batch, is_leaf=_is_whole)
    places = [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim > 0 and not isinstance(leaf, nn.Parameter)
    ]
    if not places:
        raise ValueError(
            f"`accumulate` must be with batches that can be split, got a {type(batch).__name__} without a tensor that "
            "has a dimension of examples"
        )
    sizes = {len(leaves[place]) for place in places}
    if len(sizes) > 1:
        names = paths("batch")
        listed = ", ".join(f"{names[place]} has {len(leaves[place])}" for place in places)
        raise ValueError(
            f"`accumulate` must be with batches whose tensors have one size along dimension 0, but {listed}: what is "
            "the same for all examples can be a tensor without dimensions, or one that the loss closes over"
        )
    (size,) = sizes
    if size == 0:
        raise ValueError("`accumulate` must be with batches that have examples, got one of size 0")
    count = min(count, size)
    found, begin = [], 0
    for place in range(count):
        end = begin + size // count + (place < size % count)
        part = list(leaves)
        for index in places:
            part[index] = leaves[index][begin:end]
        found.append(((end - begin) / size, rebuild(iter(part))))
        begin = end
    return found


@dataclass(frozen=True)
class MicroBatches:
    """Takes the steps of a loop in parts of their batches."""

    count: int
    """How many there are in a step, at most."""

    def gradient(
        self, loop: Loop, carry: Carry, number: int, *, record: bool, watch: WatchFn | None
    ) -> Evaluation:
        """See :meth:`Loop.gradient`."""
        with Turn(exclusive=True), torch.set_grad_enabled(record):
            parts = self._parts(loop, number)
            ranks = loop.ranks
            as_nodes = (
                record and len(parts) > 1 and not transforms_are_active() and not forward_mode_is_active()
            )
            now = carry
            if record and ranks is not None and not ranks.shards:
                places = loop.model.moved_places
                params = list(carry.params)
                spread = local(ranks, [params[place] for place in places], are_params=True)
                for place, leaf in zip(places, spread, strict=True):
                    params[place] = leaf
                now = carry._replace(params=[params[place] for place in loop.model.first_places])
            total = _Total(in_place=not (record or transforms_are_active()))
            for part in parts:
                if as_nodes:
                    found = _Node(loop, part, now, number).connected()
                else:
                    found = part.gradient(now, number, record=record, watch=watch)
                now = now._replace(buffers=found.buffers)
                total.add(found)
            return total.over(loop, now.buffers, record=record)

    def evaluate(
        self, loop: Loop, leaves: Sequence[Tensor], buffers: Sequence[Tensor], number: int
    ) -> tuple[Tensor, Any, list[Tensor]]:
        """See :meth:`Loop.evaluate`."""
        total, now = _Total(in_place=False), list(buffers)
        for part in self._parts(loop, number):
            loss, aux, now = part.evaluate(leaves, now, number)
            total.add(Evaluation(loss, aux, [], now))
        return total.loss_of_this_rank(loop), total.aux if loop.has_aux else None, now

    def _parts(self, loop: Loop, number: int) -> list[Loop]:
        """A loop for each part, whose loss takes the part, and returns a sum, and a count for the whole's mean."""

        def read() -> list[tuple[float, Any]]:
            if loop.batches is None:
                raise ValueError("`accumulate` must be with `batches` that have data, got a number of steps")
            seed_step(loop.seed, number)
            return split(loop.batch(number), self.count)

        if loop.samples:  # the batch may be there inside of `vmap` alone
            found = loop.among_samples(read)
        else:
            with loop.substituted():
                found = read()
        if loop.ranks is not None and loop.ranks.shards and len(found) < self.count:
            raise ValueError(
                f"`accumulate` must be at most the number of a rank's examples with `shard` of DataParallel, as ranks "
                f"gather parameters for each micro-batch together: it is {self.count}, and a batch has {len(found)}"
            )
        batches: Any = [part for _, part in found]
        is_plain = not (loop.samples or transforms_are_active()) and not any(
            leaf.requires_grad
            for leaf in flatten(batches, is_leaf=_is_whole).leaves
            if isinstance(leaf, Tensor)
        )
        made = []
        for place, part in enumerate(found):
            seed = (loop.seed + (place + 1) * 0xD1B54A32D192ED03) % 2**63
            made.append(
                loop.with_settings(
                    loss=_SumAndCount(loop.loss, loop.has_aux),
                    batches=(lambda _, part=part: part)
                    if is_plain
                    else partial(_read_again, read, place, seed),
                    seed=seed,
                    has_aux=True,
                    ranks=None,
                    accumulation=None,
                )
            )
        return made


class _Total:
    """The sum over the parts of a step."""

    def __init__(self, *, in_place: bool) -> None:
        self._in_place = in_place
        self._grads: list[OptionalTensor] = []
        self._own: set[int] = set()
        """Places of gradients in memory of their own."""
        self._losses: list[Tensor] = []
        self._counts: list[Any] = []
        self.aux: list[Any] = []

    def add(self, found: Evaluation) -> None:
        """Add those of a part."""
        count, aux = found.aux
        self._counts.append(count)
        self.aux.append(aux)
        self._losses.append(found.loss)
        if not self._grads:
            self._grads = list(found.grads)
            return
        for place, grad in enumerate(found.grads):
            before = self._grads[place]
            if grad is None or before is None:
                self._grads[place] = before if grad is None else grad
            elif self._in_place and place in self._own:
                before.add_(grad)
            else:
                self._grads[place] = before + grad
                self._own.add(place)

    def loss_of_this_rank(self, loop: Loop) -> Tensor:
        """The loss, such that the mean over the ranks is that of all."""
        count = self._count(loop)
        if count is not None and loop.ranks is not None:
            (count,) = mean(loop.ranks, [count])
        return self._loss if count is None else self._loss / count

    def over(self, loop: Loop, buffers: list[Tensor], *, record: bool) -> Evaluation:
        """The sum over the parts, and the mean over the ranks, divided by the count."""
        loss, grads, ranks, count = self._loss, self._grads, loop.ranks, self._count(loop)
        if ranks is not None:
            places = loop.model.moved_places
            of_moved = [grads[place] for place in places]
            if record:
                if not ranks.shards:
                    filled = ranks.filled(of_moved)
                    means = iter(mean(ranks, [grad for grad in filled if grad is not None]))
                    of_moved = [None if grad is None else next(means) for grad in filled]
                (loss,) = mean(ranks, [loss])
                count = None if count is None else mean(ranks, [count])[0]
            else:
                of_moved, loss = ranks.mean_of_step(of_moved, loss)
                count = None if count is None else ranks.reduced([count])[0]
            for place, grad in zip(places, of_moved, strict=True):
                grads[place] = grad
        if count is not None:
            loss = loss / count
            grads = [None if grad is None else grad / _beside(count, grad) for grad in grads]
        return Evaluation(loss, self.aux if loop.has_aux else None, grads, buffers)

    @property
    def _loss(self) -> Tensor:
        return self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).sum(0)

    def _count(self, loop: Loop) -> Any:
        """What the sum of the losses is divided by; ``None`` where it is a mean already."""
        if len({count is None for count in self._counts}) > 1:
            raise ValueError(
                "`loss` must return a pair (sum, count) for each part of a batch with `accumulate`, or for none"
            )
        if self._counts[0] is None:
            return None
        count = sum(self._counts)
        if loop.ranks is None:
            return count
        loss = self._losses[0]
        return torch.as_tensor(count, dtype=loss.dtype, device=loss.device)


def _beside(count: Any, grad: Tensor) -> Any:
    """A count, which may be one for each sample, in a shape that goes with a gradient."""
    if not isinstance(count, Tensor):
        return count
    return count.reshape(count.shape + (1,) * (grad.ndim - count.ndim))


class _SumAndCount:
    """A loss → one that takes a share and a part of a batch, and returns ``sum, (count, aux)``."""

    def __init__(self, loss: Callable[..., Any], has_aux: bool) -> None:
        self.__wrapped__ = loss  # whose signature it has, for errors
        self._has_aux = has_aux

    def __call__(self, params: Any, part: tuple[float, Any]) -> Any:
        share, batch = part
        value, aux = self.__wrapped__(params, batch), None
        if self._has_aux:
            if not isinstance(value, tuple) or len(value) != 2:
                raise TypeError(
                    f"`loss` must return a pair (loss, aux) with `has_aux=True`, got {type(value).__name__}"
                )
            value, aux = value
        if isinstance(value, tuple):
            if len(value) != 2:
                raise TypeError(
                    f"`loss` must return a pair (sum, count) with `accumulate`, got a tuple of {len(value)}"
                )
            total, count = _checked_pair(*value, params)
            return total, (count, aux)
        if not isinstance(value, Tensor):
            raise TypeError(
                f"`loss` must return a tensor, or with `accumulate` a pair (sum, count), got {type(value).__name__}"
            )
        return (value if share == 1 else value * share), (None, aux)


def _checked_pair(total: Any, count: Any, params: Any) -> tuple[Tensor, Any]:
    """A sum, and the count that it is divided by."""
    is_number = isinstance(count, Real) and not isinstance(count, bool)
    if not isinstance(total, Tensor) or not (is_number or (isinstance(count, Tensor) and count.numel() == 1)):
        kinds = ", ".join(type(one).__name__ for one in (total, count))
        raise TypeError(
            "`loss` must return a pair (sum, count) with `accumulate`, two tensors of one element or a tensor and a "
            f"number, got ({kinds}); what else it returns is for `has_aux=True`"
        )
    if not isinstance(count, Tensor):
        return total, count
    if count.requires_grad and not transforms_are_active():
        tree: Any = [params]
        leaves = params.parameters() if isinstance(params, nn.Module) else pytree.flatten(tree)[0]
        moved = {id(leaf) for leaf in leaves}
        if any(id(leaf_of(node)) in moved for node in nodes_between([count], [])):
            raise ValueError(
                "`loss` must return a count that does not depend on the parameters with `accumulate`: the gradient is "
                "that of the sum, divided by the count"
            )
    return total, count.reshape(())


def _read_again(
    read: Callable[[], list[tuple[float, Any]]], place: int, seed: int, number: int
) -> tuple[float, Any]:
    """A part of a batch that is read anew, since it may have a gradient."""
    part = read()[place]
    seed_step(seed, number)
    return part


class _Node:
    """Moved parameters, buffers with a gradient, declared tensors → a part's sum, its gradient, and what goes on.

    Args:
        loop: the whole.
        part: the loop of the part.
        carry: what the step starts from, but for buffers, which the parts before have changed.
        number: of the step.
    """

    def __init__(self, loop: Loop, part: Loop, carry: Carry, number: int) -> None:
        self._loop, self._part, self._number = loop, part, number
        self._moved = part.model.moved_places
        self._given = list(carry.params)
        """The first arguments are taken out, when the node has them."""
        self._module_buffers = list(carry.buffers)
        self._with_history = [
            place for place, buffer in enumerate(self._module_buffers) if buffer.requires_grad
        ]
        self._used: list[int] = []
        """Of the moved parameters, the places of those that have a gradient."""
        self._changed: list[int] = []
        """Which buffers have a gradient afterwards."""
        self._aux: list[int] = []
        """Which leaves of what the loss returns otherwise have one."""
        self._had: OptionalTensor = None
        """The sum when it was computed first."""
        self._modes = modes()

    def connected(self) -> Evaluation:
        """Evaluate the part without a graph, and connect what it makes as one node."""
        part = self._part
        declared = list(part.declared if part.others is None else part.others)
        if part.others is None and part.is_inside_another:
            # The node takes what a loop around this one has put in the places of these; here they are exchanged.
            part = replace(part, others=tuple(map(leaf_like, declared)))
        moved = [self._given[place] for place in self._moved]
        buffers = [self._module_buffers[place] for place in self._with_history]
        for place in self._with_history:
            self._module_buffers[place] = leaf_like(self._module_buffers[place])
        found = self._evaluated(part)
        for place in self._moved:
            self._given[place] = _NOTHING
        for place in self._with_history:
            self._module_buffers[place] = _NOTHING
        made = list(remat.apply(self, *moved, *buffers, *declared, values=self._values(found)))
        return self._with_values(found, made)

    def _evaluated(self, part: Loop) -> Evaluation:
        depends_on_others = looks_for_others()

        def watch(seen: Seen) -> None:
            self._changed = [place for place, one in enumerate(seen.buffers) if one.requires_grad]
            leaves = pytree.flatten(seen.aux)[0]
            self._aux = [n for n, one in enumerate(leaves) if isinstance(one, Tensor) and one.requires_grad]
            known = [*seen.leaves, *(part.declared if part.others is None else part.others)]
            known += [self._module_buffers[place] for place in self._with_history]
            ends = [seen.loss, *(leaves[place] for place in self._aux)]
            if any(map(depends_on_others, ends, repeat(known))):
                refuse_undeclared(ends, known, partial(part.loss_again, seen.carry, seen.number))

        found = part.gradient(
            Carry(self._given, (), self._module_buffers), self._number, record=False, watch=watch
        )
        self._used = [place for place in self._moved if found.grads[place] is not None]
        self._had = found.loss
        return found

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        params, buffers = list(self._given), list(self._module_buffers)
        for place in self._moved:
            params[place] = next(given)
        for place in self._with_history:
            buffers[place] = next(given)
        part = self._part
        if declared := tuple(given):
            part = replace(part, others=declared)
        carry = Carry([params[place] for place in part.model.first_places], (), buffers)
        with steps_again(self._loop, self._modes):
            found = part.gradient(carry, self._number, record=True)
            self._compare(found.loss)
            return self._values(found, carry)

    def _values(self, found: Evaluation, carry: Carry | None = None) -> list[Tensor]:
        grads = [found.grads[place] for place in self._used]
        if carry is not None:  # where torch does not say which are used
            grads = [
                torch.zeros_like(carry.params[place]) if grad is None else grad
                for place, grad in zip(self._used, grads, strict=True)
            ]
        buffers = [found.buffers[place] for place in self._changed]
        leaves = pytree.flatten(found.aux)[0]
        return [found.loss, *(x for x in grads if x is not None), *buffers, *(leaves[n] for n in self._aux)]

    def _with_values(self, found: Evaluation, made: list[Tensor]) -> Evaluation:
        """What was found, with connected tensors in the places of those that may have a gradient."""
        loss, *rest = made
        given = iter(rest)
        grads, buffers = list(found.grads), list(found.buffers)
        leaves, spec = pytree.flatten(found.aux)
        for places, into in ((self._used, grads), (self._changed, buffers), (self._aux, leaves)):
            for place in places:
                into[place] = next(given)
        return Evaluation(loss, pytree.unflatten(spec, leaves), grads, buffers)

    def _compare(self, now: Tensor) -> None:
        """Raise unless the part has the loss that it had, but for rounding; a GPU is not waited for."""
        had = self._had
        if had is None or transforms_are_active() or not now.is_cpu:
            return
        eps = torch.finfo(now.dtype).eps
        if not torch.allclose(now.detach(), had, rtol=eps**0.5, atol=eps**0.75, equal_nan=True):
            one, other = (", ".join(f"{x:.6g}" for x in some.reshape(-1).tolist()) for some in (had, now))
            raise RuntimeError(
                f"`loss` must give the same whenever a part of a batch is computed again with `accumulate`: that of a "
                f"part of step {self._number} was {one}, and is now {other}; something that it uses was changed in "
                "between, or its random numbers are not torch's"
            )
