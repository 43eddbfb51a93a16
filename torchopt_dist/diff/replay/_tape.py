"""A loop, a number of snapshots → the loop run without a graph, and its backward pass, one step at a time.

The backward pass goes from the last step to the first. The start of a step is a snapshot, or is reached from the
nearest snapshot before it by running steps again; snapshots that are no longer needed make room for new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchopt_dist._formulas.attention import attention_by_formula
from torchopt_dist._torch_private import memory_is_shared, outside_of_transforms
from torchopt_dist._vjp import plus, pulled_back
from torchopt_dist.diff.adjoints._autocast import current_autocast, forget_casts
from torchopt_dist.diff.adjoints._declared import depend_on_each_other, differentiable
from torchopt_dist.diff.adjoints._loop import Carry, Evaluation, Loop, Outcome
from torchopt_dist.diff.adjoints._randomness import kept_generators
from torchopt_dist.diff.adjoints._undeclared import refuse
from torchopt_dist.diff.replay._binomial import places, split
from torchopt_dist.diff.replay._blockwise import BlockwiseLoop
from torchopt_dist.diff.replay._constants import expanded, filled
from torchopt_dist.diff.replay._places import state_places
from torchopt_dist.diff.replay._pool import Pool
from torchopt_dist.diff.replay._retrace import Retrace
from torchopt_dist.diff.replay._reverse_mode import leaf_like
from torchopt_dist.diff.replay._snapshots import Snapshot, Store
from torchopt_dist.diff.replay._step import Bars, StepGradient, SweepMode
from torchopt_dist.diff.replay._twice import Trail, back_through_pull
from torchopt_dist.typing import OptionalTensor

__all__ = ["Kept", "Tape"]

Kept = tuple[int, Callable[[], Snapshot]]


@dataclass
class Tape:
    """A loop with a backward pass."""

    loop: Loop
    snapshots: int
    """How many are kept at a time."""
    spacing: int | None
    """Keep the inner gradients of every step, and a snapshot of every so many; ``None``: keep snapshots alone."""
    store: Store
    sweep: SweepMode | None
    """In which mode an inner gradient is differentiated; ``None`` chooses."""
    check: bool
    """Run the first step twice, and demand the same loss and gradients."""
    gradients: int = 0
    """Beside snapshots alone: keep so many inner gradients, that of the last step and those of the first ones."""
    kept: list[Kept] = field(default_factory=list)
    outcome: Outcome | None = None
    last: tuple[int, list[OptionalTensor]] | None = None
    """The number and the inner gradient of the last step, where it is kept beside snapshots alone."""
    _retrace: Retrace | None = None
    """Of a backward pass in memory that is reused, where the gradients of all steps are kept."""
    run_again: int = 0
    """Steps that the last backward pass has run again only to come back to a place."""

    def __post_init__(self) -> None:
        self._autocast = current_autocast()
        # Tensors that depend on each other are exchanged for leaves while a step runs: otherwise what one gets by way
        # of another would count twice. So are those that a loop around this one has exchanged, which it takes back.
        self.declared = list(self.loop.declared)
        if self.loop.is_substituted or depend_on_each_other(self.loop.tensors):
            self.declared = [leaf_like(tensor) for tensor in self.loop.others or self.declared]
            self.loop = replace(self.loop, others=tuple(self.declared))
        self.places = state_places(self.loop)
        if isinstance(self.loop, BlockwiseLoop):  # where memory is worth most
            first = self.loop.first
            self.loop = replace(self.loop, first=first._replace(state=expanded(first.state)))
        self._gradient = StepGradient(self.loop, self.places, self.declared, self.sweep)
        self._loop = replace(self.loop, watch=self._watch)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that may have a gradient, with repetitions: parameters, leaves of the state, declared tensors."""
        return [*self._gradient.outputs(self.loop.first), *self.loop.declared]

    def _watch(
        self,
        carry: Carry,
        number: int,
        outputs: Sequence[Tensor],
        leaves: Sequence[Tensor],
        buffers: Sequence[Tensor],
    ) -> None:
        self._gradient.choose(outputs[0])
        undeclared = self._gradient.undeclared(outputs, leaves)
        if undeclared:  # unless the loss has made them, which makes others each time
            again, _aux, _buffers = self.loop.evaluate(carry.params, carry.buffers, number)
            found = {id(leaf) for leaf in self._gradient.undeclared([again], [])}
            refuse([leaf for leaf in undeclared if id(leaf) in found])
        if any(buffer.requires_grad for buffer in buffers):
            shapes = ", ".join(str(tuple(buffer.shape)) for buffer in buffers if buffer.requires_grad)
            raise ValueError(
                "`loss` must not make buffers of a module depend on its parameters, since a replay takes them for "
                f"constants: detach those of shape {shapes}, or use todist.Recorded()"
            )

    def run(self) -> list[Tensor]:
        """Run the loop; returns the outputs: parameters, leaves of the state, and all losses in one tensor."""
        known = max(0, self.gradients - 1)
        wanted = {known + place for place in places(self.loop.steps - known, self.snapshots)}
        first = self.loop.cut(self.loop.first)

        def step(carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
            self.last = None
            found = self._loop.gradient(carry, number, record=False)
            if self.check and number == 0:
                self._check(found, carry)
            start = carry if number else first
            self.last = (number, found.grads) if self.gradients else None
            if self.spacing is not None:
                start = start if number % self.spacing == 0 else Carry([], None, carry.buffers)
                self._keep(self.kept, number, start, found.grads)
            elif number <= known and known:  # the gradients before lead to these
                start = Carry([], None, carry.buffers) if number else start
                self._keep(self.kept, number, start, found.grads if number < known else None)
            elif number in wanted:
                self._keep(self.kept, number, start, None)
            return self._loop.trained(carry, found), found.loss, found.aux

        with attention_by_formula():
            self.outcome = self._loop.run(step, self.loop.own(self.loop.first))
        losses = self.outcome.losses
        self.loop.model.let_go()
        last = [_own(tensor) for tensor in self._gradient.outputs(self.outcome.carry)]
        return [*last, torch.stack(losses) if losses else torch.zeros(0)]

    def _keep(
        self,
        kept: list[Kept],
        number: int,
        carry: Carry,
        grads: list[OptionalTensor] | None,
        copy: bool = True,
    ) -> None:
        """Take a snapshot of what the next step overwrites; the initial parameters and state are not overwritten."""
        if copy and carry.params and number and not self.store.copies:
            carry = self.loop.own(carry)
        kept.append((number, self.store.keep(Snapshot(number, carry, grads))))

    def _check(self, found: Evaluation, carry: Carry) -> None:
        again = self._loop.gradient(carry, 0, record=False)
        pairs = [(found.loss, again.loss), *zip(found.grads, again.grads, strict=True)]
        for one, other in pairs:
            if one is not None and other is not None and not torch.equal(one, other):
                raise ValueError(
                    "`loss` must give the same for the same parameters, batch and seed, since a replay runs it again; "
                    f"a second call differs by {(one - other).abs().max().item():.3g}"
                )

    def pull(
        self,
        bars: list[OptionalTensor],
        kept: list[Kept],
        trail: Trail | None = None,
        starts: Sequence[Bars] | None = None,
    ) -> list[OptionalTensor]:
        """Gradients of the outputs → of the inputs.

        Args:
            bars: the gradients, which are used up.
            kept: the snapshots, which are used up.
            trail: is filled.
            starts: gradients of what each step starts from, to be added.
        """
        assert self.outcome is not None
        count = len(self.loop.model.moved_places)
        now, loss_bars = Bars(bars[:count], bars[count:-1]), bars[-1]
        bars.clear()
        totals: list[OptionalTensor] = [None] * len(self.declared)
        reuse = trail is None and starts is None and self._gradient.reuses_memory
        pool = Pool(self.loop) if reuse else None
        self._retrace = None
        if pool is not None and self.spacing is not None:
            self._retrace = Retrace(self.loop, self._gradient, pool)
        self.run_again = 0
        with self._contexts():
            for number in reversed(range(len(self.outcome.losses))):
                loss_bar = None if loss_bars is None else loss_bars[number]
                if trail is not None:
                    trail.insert(0, (Bars(list(now.params), list(now.state)), loss_bar))
                if any(bar is not None for bar in (*now.params, *now.state, loss_bar)):
                    start = [self._known_of(number, kept, pool)]  # which it takes out, and can let go of
                    now, more = self._gradient.pull(start, now, loss_bar, pool)
                    totals = [plus(a, b) for a, b in zip(totals, more, strict=True)]
                if starts is not None:
                    also = starts[number]
                    now = Bars(
                        [plus(a, b) for a, b in zip(now.params, also.params, strict=True)],
                        [plus(a, b) for a, b in zip(now.state, also.state, strict=True)],
                    )
                forget_casts()
        return [*now.params, *now.state, *totals]

    def pull_twice(
        self, kept: list[Kept], trail: Trail, cots: Sequence[OptionalTensor]
    ) -> list[OptionalTensor]:
        """Gradients of what :meth:`pull` has found → of the inputs and of the gradients of the outputs.

        Args:
            kept: the snapshots, which stay.
            trail: what :meth:`pull` has filled.
            cots: the gradients.
        """
        with self._contexts():
            starts, more, of_bars, of_losses = back_through_pull(
                self.loop, self._gradient, self.declared, kept[0][1]().filled().carry, trail, cots
            )
        size = len(of_bars.params) + len(of_bars.state)
        found = self.pull([None] * (size + 1), list(kept), starts=starts)
        totals = [plus(a, b) for a, b in zip(found[size:], more, strict=True)]
        like = next((loss for loss in of_losses if loss is not None), None)
        of_loss = None
        if like is not None:
            of_loss = torch.stack([torch.zeros_like(like) if loss is None else loss for loss in of_losses])
        return [*found[:size], *totals, *of_bars.params, *of_bars.state, of_loss]

    @contextmanager
    def _contexts(self) -> Iterator[None]:
        """The contexts in which a step runs: those in which the loop ran, with attention that has all derivatives."""
        with ExitStack() as stack:
            if self.loop.samples:
                stack.enter_context(outside_of_transforms())
            stack.enter_context(kept_generators())
            stack.enter_context(attention_by_formula())
            stack.enter_context(self._autocast.again())
            yield

    def _known_of(self, number: int, kept: list[Kept], pool: Pool | None) -> Snapshot:
        """As :meth:`_start_of`, with the gradient of the step, if it is the last one and its gradient is kept."""
        found, last = self._start_of(number, kept, pool), self.last
        if last is None or last[0] != number:
            return found
        if kept is self.kept:
            self.last = None
        return found._replace(grads=last[1])

    def _start_of(self, number: int, kept: list[Kept], pool: Pool | None) -> Snapshot:
        """The start of a step; the snapshots that are left are those of steps before it."""
        while kept[-1][0] > number:
            kept.pop()
        if pool is not None:
            pool.room = self.spacing or self.snapshots - len(kept) + 1
        at, give = kept[-1]
        if at == number:
            found = give()
            if found.earlier is not None and self._retrace is not None:
                kept.pop()
                return self._retrace.start_of(found)
            if not found.is_whole and self.spacing is not None:
                self._fill(kept, pool)
                return self._start_of(number, kept, pool)
            found = found.filled() if found.is_whole else found._replace(carry=self._remade(kept, pool))
            kept.pop()
            if self._retrace is not None and self.spacing is not None and number % self.spacing == 0:
                self._retrace.note(found)
            return found
        # With a pool, the step after a snapshot is made out of it, and not in a copy.
        again = pool if self.loop.trains_in_place else None
        whole = give()
        is_kept = again is not None and whole.is_whole
        carry = whole.filled().carry if is_kept else self._remade(kept, pool)
        rest = number + 1 - at
        room = self.snapshots - len(kept) + 1 + max(0, self.gradients - 1)
        while at < number:
            ahead = split(rest, room) if room > 1 else rest - 1
            with kept_generators():
                for _ in range(ahead):
                    if again is not None and is_kept:
                        carry = again.step(carry, self.loop.gradient(carry, at, record=False))
                    else:
                        carry, _loss, _aux = self.loop.training_step(carry, at)
                    is_kept = False
                    at += 1
                    self.run_again += 1
            rest, room = rest - ahead, room - 1
            if at < number:
                is_kept = again is not None and not self.store.copies
                self._keep(kept, at, carry, None, copy=not is_kept)
        return Snapshot(number, carry, None)

    def _remade(self, kept: list[Kept], pool: Pool | None) -> Carry:
        """The start of the last snapshot's step, in memory of its own: by known gradients, from a whole snapshot."""
        *before, (_, give) = kept
        last = give()
        if last.is_whole:
            return self.loop.own(last.carry, None if pool is None else pool.copied)
        carry, grads = self._remade(before, pool), before[-1][1]().grads
        assert grads is not None
        found = Evaluation(carry.params[0], None, grads, last.carry.buffers)
        return self.loop.trained(carry, found)

    def _fill(self, kept: list[Kept], pool: Pool | None) -> None:
        """Make the last snapshots whole, back to one that is, by steps whose gradients are known."""
        waiting: list[Snapshot] = []
        while not (last := kept.pop()[1]()).is_whole:
            waiting.append(last)
        kept.append((last.number, partial(Snapshot._make, last)))
        last = last.filled()
        again = self._retrace.snapshots([last, *reversed(waiting)]) if self._retrace is not None else None
        if again is not None:
            kept += [(step.number, partial(Snapshot._make, step)) for step in again]
            return
        while waiting:
            assert last.grads is not None
            given, after = last.carry, waiting.pop()
            found = Evaluation(given.params[0], None, last.grads, after.carry.buffers)
            if pool is None or not self.loop.trains_in_place:
                carry = self.loop.moved(given, found, record=False)
            else:
                carry = pool.step(given, found)
            last = Snapshot(after.number, carry, after.grads)
            kept.append((last.number, partial(Snapshot._make, last)))

    def record(
        self,
        tensors: Sequence[Tensor],
        bars: Sequence[OptionalTensor],
        cots: Sequence[OptionalTensor] | None = None,
    ) -> list[OptionalTensor]:
        """As :meth:`pull`, by recording all steps, so that the gradients have derivatives of every order.

        Args:
            tensors: the inputs.
            bars: gradients of the outputs.
            cots: if given, gradients of what :meth:`pull` finds: then what is found is what :meth:`pull_twice` does.
        """
        assert self.outcome is not None
        inputs = self.inputs
        own = {id(tensor): tensor for tensor in differentiable(inputs)}
        with self._contexts():
            loop = self.loop.without_stop()
            if loop.others is not None or cots is not None:
                given = {id(old): new for old, new in zip(inputs, tensors, strict=True)}
                own = {name: given[name].view_as(given[name]) for name in own}
                loop = replace(loop, others=None)
                loop = loop.with_tensors([own[id(tensor)] for tensor in loop.tensors])
            loop = replace(loop, first=loop.first._replace(state=filled(loop.first.state)))
            if cots is not None:  # of the gradients alone, not of what they were made of, too
                bars = [None if bar is None else bar.view_as(bar) for bar in bars]
            outcome = loop.run(loop.recorded_step, loop.first, end=len(self.outcome.losses))
            outputs = [*self._gradient.outputs(outcome.carry), torch.stack(outcome.losses)]
            found = pulled_back(outputs, bars, list(own.values()), create_graph=True)
            names = [*own]
            if cots is not None:
                by_id = dict(zip(own, found, strict=True))
                pulled = [by_id.pop(id(tensor), None) for tensor in inputs]
                there = {place: bar for place, bar in enumerate(bars) if bar is not None}
                found = pulled_back(pulled, cots, [*own.values(), *there.values()], create_graph=True)
                of_bars = dict(zip(there, found[len(own) :], strict=True))
        by_id = dict(zip(names, found, strict=False))
        more = [] if cots is None else [of_bars.get(place) for place in range(len(bars))]
        return [*(by_id.pop(id(tensor), None) for tensor in inputs), *more]


def _own(tensor: Tensor) -> Tensor:
    """The same values, which may be overwritten: in the same memory, if nothing else holds it."""
    return tensor.detach().clone() if memory_is_shared(tensor) else tensor.detach()
