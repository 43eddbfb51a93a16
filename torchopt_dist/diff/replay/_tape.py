"""A loop, a plan of what is kept of its steps → the loop run without a graph, and its backward pass, step by step.

The backward pass goes from the last step to the first, and comes to the start of each as the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchopt_dist._formulas.attention import attention_by_formula
from torchopt_dist._torch_private import memory_is_shared, outside_of_transforms
from torchopt_dist._types import OptionalTensor
from torchopt_dist._vjp import plus, pulled_back
from torchopt_dist.diff.adjoints._autocast import current_autocast, forget_casts
from torchopt_dist.diff.adjoints._declared import depend_on_each_other, differentiable, leaf_like
from torchopt_dist.diff.adjoints._loop import Carry, Evaluation, Loop, Outcome
from torchopt_dist.diff.adjoints._randomness import kept_generators
from torchopt_dist.diff.adjoints._undeclared import refuse
from torchopt_dist.diff.replay._blockwise import BlockwiseLoop
from torchopt_dist.diff.replay._constants import expanded, filled
from torchopt_dist.diff.replay._places import state_places
from torchopt_dist.diff.replay._plan import Plan, WayBack
from torchopt_dist.diff.replay._snapshots import Store
from torchopt_dist.diff.replay._step import Bars, Start, StepGradient
from torchopt_dist.diff.replay._sweeps import SweepMode
from torchopt_dist.diff.replay._twice import Trail, back_through_pull

__all__ = ["Kept", "Tape"]

T = TypeVar("T")


class Gradient(NamedTuple):
    """What one goes by from the start of a step to that of the next, beside the start itself."""

    grads: list[OptionalTensor]
    """The inner gradient, one a leaf of the parameters."""
    buffers: list[Tensor]
    """The module's buffers after the step."""


@dataclass
class Kept:
    """What is kept of steps; each function gives it back."""

    starts: dict[int, Callable[[], Carry]] = field(default_factory=dict)
    gradients: dict[int, Callable[[], Gradient]] = field(default_factory=dict)

    def copy(self) -> Kept:
        """The same, of which some may be used up."""
        return Kept(dict(self.starts), dict(self.gradients))

    def start(self, number: int) -> Carry:
        """The start of a step, which is not to be overwritten."""
        carry = self.starts[number]()
        # The first state is the only one of which a tensor may be one element that is repeated.
        return carry if number else carry._replace(state=filled(carry.state))


@dataclass
class Tape:
    """A loop with a backward pass."""

    loop: Loop
    plan: Plan
    store: Store
    gathers_once: bool
    """Whether what other ranks keep a part of is held whole from its first use to its last one on the way back."""
    sweep: SweepMode | None
    """In which mode an inner gradient is differentiated; ``None`` chooses."""
    check: bool
    """Run the first step twice, and demand the same loss and gradients."""
    kept: Kept = field(default_factory=Kept)
    outcome: Outcome | None = None

    def __post_init__(self) -> None:
        self._autocast = current_autocast()
        # Tensors that depend on each other are exchanged for leaves while a step runs: otherwise what one gets by way
        # of another would count twice. So are those that a loop around this one has exchanged, which it takes back.
        self.declared = list(self.loop.declared)
        if self.loop.is_substituted or depend_on_each_other(self.loop.tensors):
            self.declared = [leaf_like(tensor) for tensor in self.loop.others or self.declared]
            self.loop = replace(self.loop, others=tuple(self.declared))
        self.places = state_places(self.loop)
        if isinstance(self.loop, BlockwiseLoop) or self.store.parts:  # where memory is worth most
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
        first = self.loop.cut(self.loop.first)

        def step(carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
            if number > self.plan.gradients:  # the gradient of the last step was that of the last one so far
                self.kept.gradients.pop(number - 1, None)
            is_whole = self.loop.is_compiled and not (number < self.plan.gradients or self.plan.last)
            if is_whole and number > 0:
                self._keep_start(number, first, carry)
                return self.loop.training_step(carry, number)
            loop = self.loop if self.loop.is_compiled and number > 0 else self._loop
            found = loop.gradient(carry, number, record=False)
            if self.check and number == 0:
                self._check(found, carry)
            self._keep_start(number, first, carry)
            gradient = Gradient(found.grads, found.buffers)
            if number < self.plan.gradients:
                self.kept.gradients[number] = self.store.keep(gradient)
            elif self.plan.last:
                self.kept.gradients[number] = lambda: gradient
            return self._loop.trained(carry, found), found.loss, found.aux

        with attention_by_formula():
            self.outcome = self._loop.run(step, self.loop.own(self.loop.first))
        losses = self.outcome.losses
        self.loop.model.let_go()
        last = [_own(tensor) for tensor in self._gradient.outputs(self.outcome.carry)]
        return [*last, torch.stack(losses) if losses else torch.zeros(0)]

    def _keep_start(self, number: int, first: Carry, carry: Carry) -> None:
        if number in self.plan.starts:
            again = first if number == 0 else carry if self.store.copies else self.loop.own(carry)
            self.kept.starts[number] = self.store.keep(again)

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
        kept: Kept,
        trail: Trail | None = None,
        starts: Sequence[Bars] | None = None,
    ) -> list[OptionalTensor]:
        """Gradients of the outputs → of the inputs.

        Args:
            bars: the gradients, which are used up.
            kept: what is kept, which is used up.
            trail: is filled.
            starts: gradients of what each step starts from, to be added.
        """
        assert self.outcome is not None
        count = len(self.loop.model.moved_places)
        now, loss_bars = Bars(bars[:count], bars[count:-1]), bars[-1]
        bars.clear()
        totals: list[OptionalTensor] = [None] * len(self.declared)
        steps = len(self.outcome.losses)
        way = WayBack(self.plan, steps)
        overwrite = trail is None and starts is None
        with self._contexts():
            for number in reversed(range(steps)):
                loss_bar = None if loss_bars is None else loss_bars[number]
                if trail is not None:
                    trail.insert(0, (Bars(list(now.params), list(now.state)), loss_bar))
                known = kept.gradients.pop(number, None)
                if any(bar is not None for bar in (*now.params, *now.state, loss_bar)):
                    carry = self._start_of(number, way, kept)
                    start = [Start(number, carry, None if known is None else known().grads)]
                    del carry, known  # nobody else has them, so that they can be let go of
                    now, more = self._gradient.pull(start, now, loss_bar, overwrite=overwrite)
                    totals = [plus(a, b) for a, b in zip(totals, more, strict=True)]
                if starts is not None:
                    also = starts[number]
                    now = Bars(
                        [plus(a, b) for a, b in zip(now.params, also.params, strict=True)],
                        [plus(a, b) for a, b in zip(now.state, also.state, strict=True)],
                    )
                forget_casts()
        return [*now.params, *now.state, *totals]

    def pull_twice(self, kept: Kept, trail: Trail, cots: Sequence[OptionalTensor]) -> list[OptionalTensor]:
        """Gradients of what :meth:`pull` has found → of the inputs and of the gradients of the outputs.

        Args:
            kept: what is kept, which stays.
            trail: what :meth:`pull` has filled.
            cots: the gradients.
        """
        with self._contexts():
            starts, more, of_bars, of_losses = back_through_pull(
                self.loop.uncompiled(), self._gradient, self.declared, kept.start(0), trail, cots
            )
        size = len(of_bars.params) + len(of_bars.state)
        found = self.pull([None] * (size + 1), kept.copy(), starts=starts)
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
            stack.enter_context(self.loop.failing())
            if self.loop.samples:
                stack.enter_context(outside_of_transforms())
            stack.enter_context(kept_generators())
            stack.enter_context(attention_by_formula())
            stack.enter_context(self._autocast.again())
            yield

    def _start_of(self, number: int, way: WayBack, kept: Kept) -> Carry:
        """Come to the start of a step."""
        carry, is_own = Carry([], None, []), False  # its own is what a step may overwrite
        store = self.store.whole if self.gathers_once else self.store
        actions = way.to(number)
        with kept_generators():
            for place, (do, at) in enumerate(actions, start=1):
                if do == "drop":
                    del kept.starts[at]
                elif do == "load":
                    carry, is_own = kept.start(at), False
                    if self.gathers_once:
                        kept.starts[at] = partial(_the_same, carry)
                elif do == "keep":
                    kept.starts[at] = store.keep(carry)
                    is_own = store.copies
                elif is_own:
                    carry = self.loop.trained(carry, self._evaluation(do, at, carry, kept))
                else:
                    after = self.loop.moved(carry, self._evaluation(do, at, carry, kept), record=False)
                    is_own = place < len(actions) and (store.copies or actions[place].do != "keep")
                    # What the step has left alone is still that of the start that is kept.
                    carry = self.loop.apart(after, carry) if is_own else after
                    del after
        return carry

    def _evaluation(self, do: str, number: int, carry: Carry, kept: Kept) -> Evaluation:
        """The gradient of a step, which is kept, or of the step run again."""
        if do == "run":
            return self.loop.gradient(carry, number, record=False)
        gradient = kept.gradients[number]()
        if self.gathers_once:
            kept.gradients[number] = partial(_the_same, gradient)
        grads, buffers = gradient
        return Evaluation(carry.params[0], None, grads, buffers)

    def record_twice(
        self, tensors: Sequence[Tensor], bars: Sequence[OptionalTensor], cots: Sequence[OptionalTensor]
    ) -> list[OptionalTensor]:
        """As :meth:`pull_twice`, by recording all steps, so that the gradients have derivatives of every order.

        Args:
            tensors: the inputs.
            bars: gradients of the outputs.
            cots: gradients of what :meth:`pull` finds.
        """
        assert self.outcome is not None
        inputs = self.inputs
        given = {id(old): new for old, new in zip(inputs, tensors, strict=True)}
        own = {id(tensor): given[id(tensor)].view_as(given[id(tensor)]) for tensor in differentiable(inputs)}
        with self._contexts():
            loop = replace(self.loop.uncompiled().without_stop(), others=None)
            loop = loop.with_tensors([own[id(tensor)] for tensor in loop.tensors])
            loop = replace(loop, first=loop.first._replace(state=filled(loop.first.state)))
            # Views: of the gradients alone, not of what they were made of, too.
            bars = [None if bar is None else bar.view_as(bar) for bar in bars]
            outcome = loop.run(loop.recorded_step, loop.first, end=len(self.outcome.losses))
            outputs = [*self._gradient.outputs(outcome.carry), torch.stack(outcome.losses)]
            by_id = dict(
                zip(own, pulled_back(outputs, bars, list(own.values()), create_graph=True), strict=True)
            )
            pulled = [by_id.pop(id(tensor), None) for tensor in inputs]
            there = {place: bar for place, bar in enumerate(bars) if bar is not None}
            found = pulled_back(pulled, cots, [*own.values(), *there.values()], create_graph=True)
        by_id = dict(zip(own, found[: len(own)], strict=True))
        of_bars = dict(zip(there, found[len(own) :], strict=True))
        return [
            *(by_id.pop(id(tensor), None) for tensor in inputs),
            *(of_bars.get(place) for place in range(len(bars))),
        ]


def _the_same(value: T) -> T:
    return value


def _own(tensor: Tensor) -> Tensor:
    """The same values, which may be overwritten: in the same memory, if nothing else holds it."""
    return tensor.detach().clone() if memory_is_shared(tensor) else tensor.detach()
