"""A loop, how much to keep of it → the loop run without a graph, and the exact gradient by running its steps again.

A segment of steps is one node of the graph, a :mod:`~torchopt_dist.core.remat`: it keeps what the segment starts from.
When its gradient is asked for, the segment is run again as smaller ones, a node each; the last of these is gone through
at once, so it needs no node. A segment of a unit, which is one step or a few small ones, is recorded. The gradient of
a node is a node itself where it is recorded, so derivatives of every order need the graph of one unit at a time.

The plan is two numbers: ``slots``, how many starts are kept at a time, and the least ``r`` so that no step is run again
more than ``r`` times: ``C(slots + r, slots) - 1`` units are reached, which is the most that is possible [Griewank and
Walther, Algorithm 799: revolve, 2000; there the sweep ends before the last step, here the outer loss comes after it].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core import remat
from torchopt_dist.core.rows import goes_one_by_one
from torchopt_dist.core.second_order import refuse_left_out
from torchopt_dist.core.surroundings import modes
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.vjp import leaf_like, plus, pulled_back
from torchopt_dist.diff.adjoints._carry import Carry, Evaluation, Outcome, Seen, overwritable
from torchopt_dist.diff.adjoints._checks import refuse_undeclared
from torchopt_dist.diff.adjoints._declared import depend_on_each_other
from torchopt_dist.diff.adjoints._history import History, WayBack
from torchopt_dist.diff.adjoints._loop import Loop
from torchopt_dist.diff.adjoints._micro_batches import steps_again
from torchopt_dist.diff.adjoints._places import state_places
from torchopt_dist.diff.adjoints._store import Store, bytes_of, lengths, unit_of
from torchopt_dist.formulas.attention import attention_by_formula
from torchopt_dist.process.resources import give_back

__all__ = ["replayed"]


def replayed(
    loop: Loop, slots: int | None, store: Store, check: bool, history: History | None = None
) -> Outcome:
    """Run a loop without a graph, and connect its outcome.

    Args:
        loop: the loop.
        slots: how many starts are kept at a time; ``None``: of all units.
        store: where they are kept.
        check: whether to run the first step twice, and demand the same loss and gradients.
        history: where the starts of segments outlive the process; steps whose ends are there are not run.

    Raises:
        CheckpointError: the history cannot be read.
        ValueError: the history is another loop's; the loss depends on tensors that are not declared, makes buffers
            depend on parameters, or is not the same when it is called again.
    """
    return _Replay(loop, slots, store, check, history).run()


@dataclass
class _Replay:
    loop: Loop
    slots: int | None
    store: Store
    check: bool
    history: History | None = None
    unit: int = 1
    """How many steps are recorded together."""
    losses: list[Tensor] = field(default_factory=list)
    """Of the steps, when they ran first."""
    connected: set[tuple[int, int]] = field(default_factory=set)
    """Where the segments that have been connected as they ended begin and end."""
    way: WayBack | None = None
    """The way back that is kept, of the gradient that came last."""
    seen: list[tuple[int, Tensor]] = field(default_factory=list)
    """Losses of steps that were run again, with the number of the first, that are still to be compared."""

    def __post_init__(self) -> None:
        self.modes = modes()
        given = self.loop.declared
        self.declared: list[Tensor] = list(given)
        # Tensors that depend on each other are exchanged for leaves while a step runs: otherwise what one gets by way
        # of another would count twice. So are those that a loop around this one has exchanged, which it takes back.
        if self.loop.is_substituted or depend_on_each_other(self.loop.tensors):
            self.declared = [leaf_like(tensor) for tensor in self.loop.others or given]
            self.loop = replace(self.loop, others=tuple(self.declared))
        self.places = state_places(self.loop)
        self.count = len(self.loop.model.moved_places) + len(self.places)
        self.watched = replace(self.loop, watch=self._watch)
        self.once = self.loop.without_stop()
        """The loop whose steps run again."""
        self.has_looked = False
        """Whether it is known that steps use no other tensors than declared ones; losses are looked at as they run."""

    def run(self) -> Outcome:
        """Run all steps, and connect each segment as it ends."""
        given, tensors = list(self.loop.joined or self.loop.declared), self.tensors(self.loop.first)
        if self.loop.others is not None:  # views are of what a loop around this one has put in their places
            given, tensors = [x.view_as(x) for x in given], [x.view_as(x) for x in tensors]
        chain = _Chain(self, given, tensors, self.loop.first)
        ends: dict[int, int] = {}

        def step(carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
            if number in ends and number > begin:
                chain.connect(number, ends[number], self.loop.own(carry))
            if self.loop.is_compiled and number > 0:
                after, loss, aux = self.loop.training_step(carry, number)
            else:
                found = self.watched.gradient(carry, number, record=False)
                if self.check and number == 0:
                    self._check(found, carry)
                after, loss, aux = self.watched.trained(carry, found), found.loss, found.aux
            self.losses.append(loss)
            if number == 0:
                ends.update(self._ends())
                if self.history is not None:
                    self.history.begin(self.unit, ends, self.loop.first, self.tensors(self.loop.first))
            return after, loss, aux

        outcome, is_over = self._recalled(chain, ends)
        begin = len(self.losses)
        if not is_over:
            with attention_by_formula():
                outcome = self.loop.run(step, self.loop.own(outcome.carry), begin)
        self.loop.model.let_go()
        if (number := len(self.losses)) > begin:
            left = [slots for end, slots in ends.items() if end >= number]
            last = outcome.carry
            kept = [overwritable(x) for x in self.tensors(last)]
            chain.connect(number, left[0], self.carry(kept, last), is_over=True)
        rest = outcome.carry
        # What a segment starts from is kept with it, and nowhere else.
        self.loop = replace(self.loop, first=self.loop.first._replace(state=()))
        self.watched, self.once = self.loop, self.loop.without_stop()
        losses = [loss for made in chain.losses for loss in made.unbind()]
        return Outcome(self.carry(chain.tensors, rest), losses, [None] * begin + outcome.aux)

    def _recalled(self, chain: _Chain, ends: dict[int, int]) -> tuple[Outcome, bool]:
        """Connect the segments that a history has: where it ends, and whether the loop has ended there."""
        carry, is_over = self.loop.first, False
        plan = None if self.history is None else self.history.plan()
        if self.history is None or plan is None:
            return Outcome(carry, [], []), is_over
        self.unit = plan[0]
        ends.update(plan[1])
        for number in self.history.steps(ends)[1:]:
            carry, losses, is_over = self.history.carry(number, self.places, self.carry)
            self.losses += losses
            slots = next(slots for end, slots in ends.items() if end >= number)
            chain.connect(number, slots, carry, is_over=is_over)
        return Outcome(carry, [], []), is_over

    def _ends(self) -> dict[int, int]:
        """The number of the step before which each segment ends → the slots that it has."""
        units = -(-self.loop.steps // self.unit)
        slots = min(self.slots or units, units)
        ends, at = {}, 0
        for place, count in enumerate(lengths(units, slots, again=False)):
            if count:
                at += count * self.unit
                ends[at] = slots - place
        return ends

    def tensors(self, carry: Carry) -> list[Tensor]:
        """The tensors of a carry that may have a gradient: moved parameters, then leaves of the state."""
        state = pytree.flatten(carry.state)[0]
        moved = [carry.params[place] for place in self.loop.model.moved_places]
        return [*moved, *(state[place] for place in self.places)]

    def carry(self, tensors: Sequence[Tensor], rest: Carry) -> Carry:
        """The carry with these tensors, and all else from another one."""
        model = self.loop.model
        params, (state, spec) = list(rest.params), pytree.flatten(rest.state)
        for place, tensor in zip(model.moved_places, tensors, strict=False):
            params[place] = tensor
        for place, tensor in zip(self.places, tensors[len(model.moved_places) :], strict=True):
            state[place] = tensor
        params = [params[place] for place in model.first_places]
        return Carry(params, pytree.unflatten(spec, state), rest.buffers)

    def rest(self, carry: Carry) -> Carry:
        """A carry without its tensors that may have a gradient."""
        return self.carry([_NOTHING] * self.count, carry)

    def node(
        self,
        segment: _Segment,
        tensors: Sequence[Tensor],
        values: list[Tensor],
        give: Callable[[], list[Tensor]] | None = None,
    ) -> list[Tensor]:
        """Connect the values of a segment to the tensors that it was given, as one node that keeps these.

        Args:
            segment: the segment.
            tensors: what it was given.
            values: its values.
            give: what gives those of the tensors that it starts from, if they are kept already.
        """
        with self._away(tensors[: self.count], give):
            return list(remat.apply(segment, *tensors, values=values))

    def kept(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Keep the start of a segment where the caller wants it."""
        give = self.store.keep(Carry(tensors, None, []))
        return lambda: give().params

    def _away(
        self, tensors: Sequence[Tensor], given: Callable[[], list[Tensor]] | None = None
    ) -> AbstractContextManager[object]:
        """A context in which a node keeps its first arguments where the caller wants them."""
        if not self.store.copies:
            return nullcontext()
        give = given or self.kept(list(tensors))
        places, waiting = iter(range(len(tensors))), dict[int, Tensor]()

        def pack(tensor: Tensor) -> Any:
            place = next(places, None)
            return tensor if place is None else place

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            if kept not in waiting:
                waiting.update(enumerate(give()))
            return waiting.pop(kept)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def graph(
        self, loop: Loop, segment: _Segment, now: Sequence[Tensor], declared: Sequence[Tensor]
    ) -> list[Tensor]:
        """The values of a segment with a graph: nodes for all parts but the last, of which the steps are recorded.

        Args:
            loop: the loop.
            segment: the segment.
            now: the tensors that it starts from.
            declared: what stands for the declared tensors.
        """
        if segment.end - segment.first <= self.unit:
            return self.recorded_unit(loop, segment, now)
        losses: list[Tensor] = []
        rest = segment.rest
        for part in self.parts(segment):  # its derivative begins with the first step
            part = replace(part, rest=rest)
            values, rest = self.plain(part, now)
            *now, of_part = self.node(part, [*now, *declared], values)
            losses.append(of_part)
        return [*now, torch.cat(losses)]

    def recorded_unit(self, loop: Loop, unit: _Segment, now: Sequence[Tensor]) -> list[Tensor]:
        """The values of a unit with the graph of its steps."""
        outcome = loop.run(loop.recorded_step, self.carry(now, unit.rest), unit.first, unit.end)
        self.compare(unit.first, *outcome.losses, is_last=unit.first == 0)
        return [*self.tensors(outcome.carry), torch.stack(outcome.losses)]

    def plain(self, part: _Segment, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Carry]:
        """Run a segment without a graph: its values, and what else it ends with."""
        with torch.no_grad():
            loop = self.loop.without_stop()
            begin = loop.own(self.carry([x.detach() for x in tensors], part.rest))
            outcome = loop.run(loop.training_step, begin, part.first, part.end)
            self.compare(part.first, *outcome.losses)
            values = [*self.tensors(outcome.carry), torch.stack(outcome.losses)]
            return values, self.rest(outcome.carry)

    def pull(self, segment: _Segment, asked: remat.Asked) -> Sequence[OptionalTensor]:
        """Gradients of a segment's values → of its arguments, of which there is no graph."""
        weights: list[OptionalTensor] = [None] * (self.count + 1)
        for place, bar in zip(asked.given, asked.bars, strict=True):
            weights[place] = bar
        start = [x.detach() for x in asked.tensors[: self.count]]
        back = _Back(self, [place - self.count for place in asked.wanted if place >= self.count])
        way = None if asked.recorded else self._way_back(segment, back.wanted, weights)
        found = None if way is None else way.known(segment.first, start)
        if found is None:
            with steps_again(self.loop, self.modes):
                found = back.through(segment, start, weights)
            if way is not None:
                way.note(segment.first, found, back.sums)
            found += back.sums
        return [found[place] for place in asked.wanted]

    def _way_back(
        self, segment: _Segment, wanted: list[int], weights: list[OptionalTensor]
    ) -> WayBack | None:
        """The way back of the gradient that is at a segment; ``None`` if it is not kept."""
        if self.history is None or (segment.first, segment.end) not in self.connected:
            return None
        # A gradient of losses comes to all segments, so the first one does not tell which gradient it is.
        begins = segment.end == len(self.losses)
        if goes_one_by_one() or weights[-1] is not None:
            self.way = None
        elif begins or self.way is None or self.way.wanted != wanted:
            self.way = WayBack(self.history, weights, wanted) if begins else None
        return self.way

    def parts(self, segment: _Segment) -> list[_Segment]:
        """The segments as which one of several units is run again, each with the start of the whole."""
        units = -(-(segment.end - segment.first) // self.unit)
        slots = min(segment.slots, units - 1)
        found, at = [], segment.first
        for place, count in enumerate(lengths(units, slots, again=True)):
            if count:
                end = min(at + count * self.unit, segment.end)
                found.append(replace(segment, first=at, end=end, slots=max(1, slots - place)))
                at = end
        return found

    def _watch(self, seen: Seen) -> None:
        if seen.number == 0:
            self._choose_unit(seen.loss)
        refuse_undeclared(
            [seen.loss],
            [*seen.leaves, *self.declared],
            partial(self.loop.loss_again, seen.carry, seen.number),
        )
        if shapes := ", ".join(str(tuple(buffer.shape)) for buffer in seen.buffers if buffer.requires_grad):
            raise ValueError(
                "`loss` must not make buffers of a module depend on its parameters, since a replay takes them for "
                f"constants: detach those of shape {shapes}, or use todist.Recorded()"
            )

    def _choose_unit(self, loss: Tensor) -> None:
        if self.loop.is_compiled or self.loop.ranks is not None or self.loop.blocks:
            return
        self.unit = unit_of(loss, bytes_of(self.tensors(self.loop.first)), self.loop.steps)

    def _check(self, found: Evaluation, carry: Carry) -> None:
        again = self.watched.gradient(carry, 0, record=False)
        for one, other in [(found.loss, again.loss), *zip(found.grads, again.grads, strict=True)]:
            if one is not None and other is not None and not torch.equal(one, other):
                raise ValueError(
                    "`loss` must give the same for the same parameters, batch and seed, since a replay runs it again; "
                    f"a second call differs by {(one - other).abs().max().item():.3g}"
                )

    def compare(self, first: int, *losses: Tensor, is_last: bool = False) -> None:
        """Raise unless steps that are run again have the losses that they had, but for rounding.

        Args:
            first: the number of the first of these steps.
            losses: theirs, now.
            is_last: whether the way back ends with them; a GPU is waited for then only.
        """
        numbers = range(first, first + len(losses))
        self.seen += zip(numbers, (loss.detach() for loss in losses), strict=True)
        if losses[0].is_cpu or is_last:
            seen, self.seen = self.seen, []
            self._compare_now(*zip(*seen, strict=True))

    def _compare_now(self, numbers: Sequence[int], again: Sequence[Tensor]) -> None:
        now, had = torch.stack([*again]), torch.stack([self.losses[number] for number in numbers])
        eps = torch.finfo(now.dtype).eps
        same = torch.isclose(now, had, rtol=eps**0.5, atol=eps**0.75, equal_nan=True)
        if not bool(same.all()):
            place = int((~same.flatten(1) if same.ndim > 1 else ~same[:, None]).any(1).nonzero()[0])
            one, other = (
                ", ".join(f"{x:.6g}" for x in losses[place].reshape(-1).tolist()) for losses in (had, now)
            )
            raise RuntimeError(
                "`loss` must give the same whenever a step is run again: the loss of step "
                f"{numbers[place]} was {one}, and is now {other}; something that it uses was changed in between, or "
                "its random numbers are not torch's"
                + ("; or the history is that of another loss" if self.history is not None else "")
            )


_NOTHING: Any = None


class _Back:
    """The way back through a segment, of which there is no graph: from its last unit to the first one.

    Args:
        replay: whose segments these are.
        wanted: the places of declared tensors whose gradients are asked for.
    """

    def __init__(self, replay: _Replay, wanted: Sequence[int]) -> None:
        self._replay, self.wanted = replay, list(wanted)
        self.sums: list[OptionalTensor] = [None] * len(replay.declared)
        """The gradients of declared tensors, so far."""

    def through(
        self, segment: _Segment, now: list[Tensor], weights: list[OptionalTensor]
    ) -> list[OptionalTensor]:
        """Gradients of a segment's values → of the tensors that it starts from."""
        replay = self._replay
        if segment.end - segment.first <= replay.unit:
            return self._unit(segment, now, weights)
        *bars, of_losses = weights
        weights.clear()
        starts: list[tuple[_Segment, Callable[[], list[Tensor]]]] = []
        rest = segment.rest
        for part in replay.parts(segment):
            part = replace(part, rest=rest)
            starts.append((part, replay.kept(now) if starts else partial(list, now)))
            if part.end < segment.end:
                (*now, _losses), rest = replay.plain(part, now)
        del now  # only `starts` has it, until it is used
        while starts:
            part, give = starts.pop()
            if of_losses is not None:
                bars.append(of_losses[part.first - segment.first : part.end - segment.first])
            else:
                bars.append(None)
            bars = self.through(part, give(), bars)
        return bars

    def _unit(self, unit: _Segment, now: list[Tensor], weights: list[OptionalTensor]) -> list[OptionalTensor]:
        replay = self._replay
        declared = [replay.declared[place] for place in self.wanted]
        look = None if replay.has_looked else refuse_undeclared
        replay.has_looked = True
        loop = replay.once
        with torch.enable_grad():
            if unit.end - unit.first == 1:
                if (of_losses := weights[-1]) is not None:
                    weights[-1] = of_losses.reshape(loop.samples)
                carry = replay.carry(now, unit.rest)
                found = loop.pulled_step(
                    carry,
                    unit.first,
                    replay.places,
                    declared,
                    weights,
                    look,
                    partial(replay.compare, unit.first, is_last=unit.first == 0),
                )
            else:
                points = [leaf_like(x) for x in now]
                values = replay.recorded_unit(loop, unit, points)
                inputs = [*points, *declared]
                if look is not None:
                    look(
                        values, [*points, *replay.declared], lambda: replay.recorded_unit(loop, unit, points)
                    )
                refuse_left_out(values, inputs)
                found = pulled_back(values, weights, inputs)
        for place, more in zip(self.wanted, found[replay.count :], strict=True):
            self.sums[place] = plus(self.sums[place], more)
        if loop.blocks:  # where memory is worth more than time
            give_back()
        return found[: replay.count]


class _Chain:
    """The segments that have been run, connected."""

    def __init__(self, replay: _Replay, declared: list[Tensor], tensors: list[Tensor], first: Carry) -> None:
        self._replay, self._declared = replay, declared
        self.tensors, self._rest, self._at = tensors, replay.rest(first), 0
        self.losses: list[Tensor] = []

    def connect(self, end: int, slots: int, carry: Carry, *, is_over: bool = False) -> None:
        """Connect the last segment, which has ended before a step with a carry, or with the loop."""
        replay, give = self._replay, None
        segment = _Segment(replay, self._at, end, slots, self._rest)
        tensors, losses = replay.tensors(carry), replay.losses[self._at : end]
        if replay.history is not None:
            replay.history.keep(end, carry, tensors, losses, is_over)
            replay.connected.add((self._at, end))
            give = partial(replay.history.tensors, self._at, replay.places)
        values = [*tensors, torch.stack(losses)]
        made = replay.node(segment, [*self.tensors, *self._declared], values, give)
        self.tensors, self._rest, self._at = made[:-1], replay.rest(carry), end
        self.losses.append(made[-1])


@dataclass
class _Segment(remat.Segment):
    """Tensors that a step starts from, declared tensors → those that a later step starts from, losses in between."""

    replay: _Replay
    first: int
    end: int
    """The number of the step after the last one."""
    slots: int
    """How many starts may be kept, its own among them."""
    rest: Carry
    """What else it starts from."""

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        replay = self.replay
        now, declared = tensors[: replay.count], tensors[replay.count :]
        loop = replay.once
        if declared:
            loop = replace(loop, others=tuple(declared))
        with steps_again(replay.loop, replay.modes):
            return replay.graph(loop, self, now, declared)

    def pull(self, asked: remat.Asked) -> Sequence[OptionalTensor]:
        return self.replay.pull(self, asked)
