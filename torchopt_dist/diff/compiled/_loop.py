"""A loop → a loop whose steps and gradients are programs of torch's compiler, for every adjoint.

A program is made of the loop's own step: of a plain one, or of a recorded one with its gradient. A step with a graph is
a node, as a part that is computed again is (:mod:`~torchopt_dist.core.remat`), whose values and first derivative are
programs. Where a step is looked at, runs in place of others (inside of a replay that is differentiated itself) or
inside of a transform of ``torch.func``, it runs as in a loop that is not compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.bound import Bound
from torchopt_dist.core.generators import States, restore, states
from torchopt_dist.core.meaning import Meaning, RefusedError
from torchopt_dist.core.program_inputs import Call
from torchopt_dist.core.programs import Body, CompileMode, Programs, code_of, programs_of
from torchopt_dist.core.random_turns import Turn, change_generators, kept_generators, seed_step
from torchopt_dist.core.recorded_program import Recorded, pulled
from torchopt_dist.core.types import OptionalTensor, OptState
from torchopt_dist.core.uncompiled import is_traced
from torchopt_dist.core.vjp import has_derivative, plus, pulled_back
from torchopt_dist.diff.adjoints._carry import Carry, Evaluation, UpdateLookFn, WatchFn
from torchopt_dist.diff.adjoints._loop import Loop
from torchopt_dist.diff.adjoints._model import Model
from torchopt_dist.diff.compiled._flat import FlatModel, flattened
from torchopt_dist.torch_private import forward_mode_is_active, transforms_are_active

__all__ = ["CompiledLoop", "compiled"]


Step = Callable[[Loop, Carry, int], Any]
"""A loop, a carry, the number of the step → what is made of them."""
_HERE: Any = object()
"""Stands where a tensor may have a gradient."""


@dataclass(frozen=True, kw_only=True)
class CompiledLoop(Loop):
    """A loop whose steps are compiled."""

    mode: CompileMode = True
    functions: tuple[Any, ...]
    """The loss and the optimizer, as they are without names that are kept."""
    spare: Model
    """Like the loop's own, which the caller may get in the end."""
    before: Any = None
    """The first state, where the loop moves a vector in the place of a tree."""
    known: tuple[Programs, Meaning] | None = None
    """The programs of loops with this code, and what all steps have in common; another process finds its own."""
    progress: bool = False
    """Whether somebody wants to be told of its progress, and so that a program is being compiled."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "known": None}

    @property
    def is_compiled(self) -> bool:
        """It is."""
        return True

    @property
    def trains_in_place(self) -> bool:
        """It does not: a program's results are new."""
        return False

    def recorded_step(self, carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
        """See :meth:`Loop.recorded_step`; it is one node of the graph, which keeps what the step starts from."""
        if self._why_not() or not torch.is_grad_enabled():
            return super().recorded_step(carry, number)
        with Turn(exclusive=True):
            batch = self.batch_of(number)
            given = [carry, self.values, *batch]
            body = _body_of(self, self.spare, Loop.recorded_step, number, states())
            state = [n for n, x in enumerate(pytree.flatten(carry.state)[0]) if has_derivative(x)]
            programs, base = self._known()
            node = Recorded(programs, self._call(given), body, self._kind, self._wanted(carry, state, batch))
            made: tuple[Carry, Tensor, Any] = node.connected(
                lambda: body(base, *given), aloud=self.progress, is_step=True
            )
        return made

    def training_step(self, carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
        """See :meth:`Loop.training_step`."""
        return self.plain_step(carry, number)

    def plain_step(self, carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
        """See :meth:`Loop.plain_step`."""

        def otherwise() -> tuple[Carry, Tensor, Any]:
            return super(CompiledLoop, self).plain_step(carry, number)

        if self.watch is not None:
            return otherwise()
        made: tuple[Carry, Tensor, Any] = self._run("step", Loop.plain_step, carry, number, otherwise)
        return made

    def trained(self, carry: Carry, found: Evaluation) -> Carry:
        """See :meth:`Loop.trained`; nothing is overwritten."""
        return self.moved(carry, found, record=False)

    def gradient(
        self, carry: Carry, number: int, *, record: bool, watch: WatchFn | None = None
    ) -> Evaluation:
        """See :meth:`Loop.gradient`."""

        def otherwise() -> Evaluation:
            return super(CompiledLoop, self).gradient(carry, number, record=record, watch=watch)

        if record or watch is not None or self.watch is not None:
            return otherwise()
        made: Evaluation = self._run(
            "gradient", partial(Loop.gradient, record=False), carry, number, otherwise
        )
        return made

    def pulled_step(
        self,
        carry: Carry,
        number: int,
        places: Sequence[int],
        declared: Sequence[Tensor],
        bars: Sequence[OptionalTensor],
        look: UpdateLookFn | None = None,
        compare: Callable[[Tensor], None] | None = None,
    ) -> list[OptionalTensor]:
        """See :meth:`Loop.pulled_step`; one program does it, and makes of the step only what that needs."""

        def otherwise() -> list[OptionalTensor]:
            return super(CompiledLoop, self).pulled_step(carry, number, places, declared, bars, look, compare)

        if self._why_not():
            return otherwise()
        *of_carry, of_loss = bars
        inputs = self.with_gradient(carry, places)
        pairs = zip(inputs, of_carry, strict=True)
        filled = [(torch.zeros_like(x) if bar is None else bar).contiguous() for x, bar in pairs]
        of_ends: Any = [self._with_moved(carry, places, filled), of_loss]
        with Turn(exclusive=True):
            with torch.enable_grad():
                batch: Any = self.batch_of(number)
            wanted = self._wanted(carry, places, batch)
            call = self._call([carry, self.values, *batch, pytree.flatten(of_ends)[0]])
            body = pulled(_body_of(self, self.spare, Loop.recorded_step), wanted)
            with torch.no_grad():
                made = self._known()[0].run(
                    call, body, lambda: None, kind=("pulled", tuple(wanted), self._kind), aloud=self.progress
                )
        if made is None:
            return otherwise()
        at = {id(x): place for place, x in enumerate(self.values, len(inputs))}
        found = [*made[: len(inputs)], *(made[at[id(x)]] for x in declared)]
        if of_batch := made[len(inputs) + len(at) :]:
            leaves = pytree.flatten(batch)[0]
            own = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
            found[len(inputs) :] = map(plus, found[len(inputs) :], pulled_back(own, of_batch, declared))
        return found

    def _with_moved(self, carry: Carry, places: Sequence[int], tensors: Sequence[Tensor]) -> Carry:
        """Tensors in the places of the parameters and of leaves of the state, and nothing in all others."""
        given, state = iter(tensors), pytree.flatten(carry.state)
        params: list[Any] = [None] * len(carry.params)
        for place in self.model.moved_places:
            params[place] = next(given)
        leaves: list[Any] = [None] * len(state[0])
        for place in places:
            leaves[place] = next(given)
        buffers: list[Any] = [None] * len(carry.buffers)
        return Carry(params, pytree.unflatten(state[1], leaves), buffers)

    def _wanted(self, carry: Carry, places: Sequence[int], batch: Any) -> list[int]:
        """Of the leaves of ``[carry, declared, *batch]``, those that may have a gradient."""
        marks: Any = [
            self._with_moved(carry, places, [_HERE] * (len(self.model.moved_places) + len(places))),
            [_HERE] * len(self.values),
            *pytree.tree_map(lambda x: _HERE if isinstance(x, Tensor) and x.requires_grad else None, batch),
        ]
        return [n for n, one in enumerate(pytree.flatten(marks)[0]) if one is _HERE]

    def state_for_caller(self, state: OptState) -> OptState:
        """See :meth:`Loop.state_for_caller`."""
        if not isinstance(self.model, FlatModel):
            return state
        return self.model.state_of_tree(state, self.before)

    @property
    def values(self) -> list[Tensor]:
        """What is in the places of the declared tensors now."""
        return list(self.declared if self.others is None else self.others)

    def batch_of(self, number: int) -> list[Any]:
        """The batch of a step, if there is one; the generators are as they are to be for the step."""
        seed_step(self.seed, number)  # which a batch's random numbers come from, too
        if self.batches is None:
            return []
        with self.substituted():
            batch: Any = [self.batch(number)]
        if self.others is not None:  # a tensor of the batches may be declared itself
            new = {id(old): other for old, other in zip(self.declared, self.others, strict=True)}
            if self.met is not None:
                self.met.update({*map(id, pytree.flatten(batch)[0])} & new.keys())
            batch = pytree.map_tensors(lambda x: new.get(id(x), x), batch)
        return list(batch)

    def used(self) -> list[bool]:
        """Which leaves of the parameters the loss uses.

        Raises:
            RefusedError: its steps cannot be compiled.
        """

        def uses(loop: Loop, carry: Carry, number: int) -> list[bool]:
            return [grad is not None for grad in loop.gradient(carry, number, record=False).grads]

        with Turn(exclusive=True), kept_generators():
            call = self._call([self.first, self.values, *self.batch_of(0)])
            body = _body_of(self, self.spare, uses)
            found: list[bool] = self._known()[0].constants(call, body, ("used", self._kind))
        return found

    def _call(self, given: list[Any]) -> Call:
        """What a program gets: a carry, what is declared, a batch if there is one, gradients of the step's ends."""
        programs, base = self._known()
        names = ["a parameter or the state", "a meta tensor", *["its batch"] * (self.batches is not None)]
        return Call(programs.meaning, (), given, [*names, "a gradient"], base)

    def _run(self, kind: str, step: Step, carry: Carry, number: int, otherwise: Callable[[], Any]) -> Any:
        """What a program makes of a step, or what is made otherwise, where it must not or cannot be compiled."""
        if self._why_not():
            return otherwise()
        with torch.no_grad(), Turn(exclusive=True):
            return self._known()[0].run(
                self._call([carry, self.values, *self.batch_of(number)]),
                _body_of(self, self.spare, step),
                otherwise,
                kind=(kind, self._kind),
                aloud=self.progress,
                is_step=kind == "step",
            )

    def _why_not(self) -> bool:
        """Whether no program can be run here."""
        if self.is_inside_another or transforms_are_active():
            warnings.warn(
                "an inner loop with compile=True runs as without it inside of another one that is replayed",
                stacklevel=5,
            )
            return True
        # A program would have what names mean now.
        return isinstance(self.loss, Bound) and not self.loss.is_the_same

    @property
    def _kind(self) -> tuple[Any, ...]:
        """Of the loop, what a step is made of beside things and tensors."""
        model = self.model
        pieces = model.pieces if isinstance(model, FlatModel) else None
        places: Any = list(range(len(model.leaves)))
        spec = pytree.flatten(model.tree(places))[1]
        return spec, tuple(model.moved_places), tuple(model.first_places), pieces, self.has_aux

    def _known(self) -> tuple[Programs, Meaning]:
        known = self.known
        if known is None:
            programs = _programs(self, self.mode)
            things = (("the loss or the optimizer", self.functions), ("the module", self.spare.key()))
            try:
                known = programs, programs.meaning(things)
            except RefusedError as reason:
                programs.tell(str(reason))
                raise
            object.__setattr__(self, "known", known)
        return known


def compiled(loop: Loop, mode: CompileMode, *, progress: bool) -> Loop:
    """The same loop, whose steps are compiled; the loop itself, and a warning, where they cannot be."""
    if loop.steps == 0 or is_traced():  # in another program
        return loop
    if transforms_are_active() or forward_mode_is_active():
        where = (
            "torch.func's transforms"
            if transforms_are_active()
            else "a level of forward-mode differentiation"
        )
        _programs(loop, mode).tell(f"it is inside of {where}")
        return loop

    def made_of(loop: Loop, before: OptState, known: tuple[Programs, Meaning] | None) -> CompiledLoop:
        own = {field.name: getattr(loop, field.name) for field in fields(Loop)}
        return CompiledLoop(
            **own,
            mode=mode,
            functions=(loop.loss, loop.optimizer),
            spare=loop.model.fresh(),
            before=before,
            known=known,
            progress=progress,
        )

    made = made_of(loop, None, None)
    try:
        known = made._known()
    except RefusedError:
        return loop
    try:
        flat = flattened(loop, made.used())
    except RefusedError as reason:  # which is told when a step has run without an error of its own
        return loop if str(reason) in known[0].told else made
    return made if flat is None else made_of(*flat, known)


def _programs(loop: Loop, mode: CompileMode) -> Programs:
    return programs_of((code_of(loop.loss), code_of(loop.optimizer)), "an inner loop", mode)


def _body_of(loop: Loop, model: Model, step: Step, number: int = 0, drawn: States | None = None) -> Body:
    """A step as a function of the loss and the optimizer, a carry, what is declared, and a batch if there is one.

    Args:
        loop: the loop, of which all else is taken.
        model: like that of the loop.
        step: is called with a loop that has all these.
        number: of the step, where it runs as it is.
        drawn: the generators after the batch, where it does.
    """
    # Without the loop's model, in which at last are the results, which have nodes that keep this.
    left_out = ("model", "stop", "watch", "tell", "met", "joined")
    own = {field.name: getattr(loop, field.name) for field in fields(Loop) if field.name not in left_out}

    def body(meaning: Meaning, carry: Carry, declared: list[Tensor], *batch: Any) -> Any:
        def batches(_: int) -> Any:
            if drawn is not None:
                change_generators(restore, drawn)
            return batch[0]

        given = {**own, **dict(zip(("loss", "optimizer"), meaning.things[0], strict=True))}
        given |= {"others": tuple(declared) or None, "batches": batches if batch else None}
        params = [carry.params[place] for place in model.first_places]
        made = Loop(**given, model=model.fresh(), stop=None)
        return step(made, carry._replace(params=params), number)

    return body
