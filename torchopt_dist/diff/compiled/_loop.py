"""A loop → a loop whose steps and gradients are programs of torch's compiler, for every adjoint.

Where a step is looked at, runs in place of others (inside of a replay that is differentiated itself) or inside of a
transform of ``torch.func``, it runs as in a loop that is not compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import optree
import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.bound import Bound
from torchopt_dist.core.meaning import Meaning, RefusedError
from torchopt_dist.core.programs import CompileMode, Programs, Variant, code_of, plain_number, programs_of
from torchopt_dist.core.random_turns import Turn, kept_generators, seed_step
from torchopt_dist.core.types import OptionalTensor, OptState
from torchopt_dist.core.vjp import leaf_like, plus, pulled_back
from torchopt_dist.diff.adjoints._carry import Carry, Evaluation, UpdateLookFn, WatchFn
from torchopt_dist.diff.adjoints._loop import Loop
from torchopt_dist.diff.compiled._flat import FlatModel, flattened
from torchopt_dist.diff.compiled._functions import (
    Outside,
    Parts,
    constants_of_loop,
    gradient,
    parts_of_loop,
    pulled_step,
    step,
)
from torchopt_dist.formulas.traced import with_formulas
from torchopt_dist.torch_private import as_input, hooks_of_all_modules, transforms_are_active

__all__ = ["CompiledLoop", "compiled"]


@dataclass(frozen=True, kw_only=True)
class CompiledLoop(Loop):
    """A loop whose steps are compiled."""

    mode: CompileMode = True
    parts: Parts
    constants: list[OptionalTensor] = field(default_factory=list)
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

    def uncompiled(self) -> Loop:
        """See :meth:`Loop.uncompiled`."""
        warnings.warn(
            "the gradient of an inner loop with compile=True is differentiated again: for that the loop runs as "
            "without it",
            stacklevel=3,
        )
        return Loop(**{field.name: getattr(self, field.name) for field in fields(Loop)})

    def recorded_step(self, carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
        """See :meth:`Loop.recorded_step`; the graph is one node, which has no second derivative."""
        return self._step(carry, number, True, lambda: super(CompiledLoop, self).recorded_step(carry, number))

    def training_step(self, carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
        """See :meth:`Loop.training_step`."""
        return self.plain_step(carry, number)

    def plain_step(self, carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
        """See :meth:`Loop.plain_step`."""

        def otherwise() -> tuple[Carry, Tensor, Any]:
            return super(CompiledLoop, self).plain_step(carry, number)

        return otherwise() if self.watch is not None else self._step(carry, number, False, otherwise)

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
        made = self._run(
            gradient,
            number,
            lambda batch: (carry, self._outside(), self._cut_batch(batch), False),
            otherwise,
        )
        return made if isinstance(made, Evaluation) else Evaluation(*made)

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
        start, inputs = self.as_leaves(
            carry, places
        )  # the first step's parameters require grad, others do not
        *given, loss_bar = bars
        filled = [torch.zeros_like(x) if bar is None else bar for x, bar in zip(inputs, given, strict=True)]
        of_batch: list[Tensor] = []

        def arguments(batch: tuple[Any, ...]) -> tuple[Any, ...]:
            tree: Any = batch
            of_batch[:] = [x for x in pytree.flatten(tree)[0] if isinstance(x, Tensor) and x.requires_grad]
            own = {id(x): leaf_like(x) for x in of_batch}
            if own:
                batch = pytree.map_tensors(lambda x: own.get(id(x), x), batch)
            wanted = [*declared, *(own[id(x)] for x in of_batch)]
            return start, list(places), wanted, self._outside(), batch, filled, loss_bar

        def otherwise() -> list[OptionalTensor]:
            del of_batch[:]
            return super(CompiledLoop, self).pulled_step(carry, number, places, declared, bars, look, compare)

        made: list[OptionalTensor] = self._run(
            pulled_step, number, arguments, otherwise, batch_with_history=True
        )
        if not of_batch:
            return made
        count = len(made) - len(of_batch)
        more = pulled_back(of_batch, made[count:], declared)
        first = count - len(declared)
        return [*made[:first], *map(plus, made[first:count], more)]

    def state_for_caller(self, state: OptState) -> OptState:
        """See :meth:`Loop.state_for_caller`."""
        if not isinstance(self.model, FlatModel):
            return state
        return self.model.state_of_tree(state, self.before)

    def _step(
        self, carry: Carry, number: int, record: bool, otherwise: Callable[[], tuple[Carry, Tensor, Any]]
    ) -> tuple[Carry, Tensor, Any]:
        def arguments(batch: tuple[Any, ...]) -> tuple[Any, ...]:
            return carry, self._outside(), batch if record else self._cut_batch(batch), record

        made = self._run(step, number, arguments, otherwise, record=record)
        if isinstance(made[0], Carry):
            return made
        params, state, buffers, loss, aux = made
        return Carry(params, state, buffers), loss, aux

    def _outside(self) -> Outside:
        if self.others is None:
            return Outside(self.constants, [], [])
        return Outside(self.constants, list(self.declared), list(self.others))

    def _cut_batch(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same batch; what may be one of the others is another tensor, so that all steps have one program."""
        return batch if self.others is None else pytree.map_tensors(Tensor.detach, batch)

    def _run(
        self,
        function: Callable[..., Any],
        number: int,
        arguments: Callable[[tuple[Any, ...]], tuple[Any, ...]],
        otherwise: Callable[[], Any],
        *,
        record: bool = False,
        batch_with_history: bool = False,
    ) -> Any:
        """What a program makes, or what is made otherwise, where it must not or cannot be compiled.

        Args:
            function: what the program is of.
            number: of the step, which says with which batch and random numbers.
            arguments: the loss's arguments after the parameters → those of the program after the parts.
            otherwise: makes the same without it.
            record: connect what it makes.
            batch_with_history: connect the batch to the tensors that it is made of.
        """
        if self.is_inside_another or transforms_are_active():
            warnings.warn(
                "an inner loop with compile=True runs as without it inside of another one that is replayed",
                stacklevel=4,
            )
            return otherwise()
        if isinstance(self.loss, Bound) and not self.loss.is_the_same:
            return otherwise()  # a program would have what names mean now

        def without() -> Any:
            with kept_generators():
                return otherwise()

        with torch.set_grad_enabled(record), Turn(exclusive=True):
            seed_step(self.seed, number)  # which a batch's random numbers come from, too
            batch: Any = ()
            if self.batches is not None:
                with self.substituted(), torch.set_grad_enabled(record or batch_with_history):
                    batch = (optree.tree_map(plain_number, self.batch(number), none_is_leaf=True),)
                if self.others is not None:  # a tensor of the batches may be declared itself
                    new = {id(old): other for old, other in zip(self.declared, self.others, strict=True)}
                    if self.met is not None:
                        self.met.update({*map(id, pytree.flatten(batch)[0])} & new.keys())
                    batch = pytree.map_tensors(lambda x: new.get(id(x), x), batch)
            programs, base = self._known()

            def run(variant: Variant, own: Any, _first: Any, _declared: Any, *batch: Any) -> Any:
                call, optimizer = own
                parts = self.parts._replace(call=call, optimizer=optimizer)
                given: Any = batch
                given = optree.tree_map(_with_inputs, given, none_is_leaf=True)
                program = variant.program(function, with_formulas, aloud=self.progress)
                if function is not step:
                    return program(parts, *arguments(given))
                return variant.step(lambda: program(parts, *arguments(given)), without)

            return programs.run([("its batch", one) for one in batch], run, otherwise, base=base)

    def _known(self) -> tuple[Programs, Meaning]:
        known, parts = self.known, self.parts
        if known is None:
            programs = _programs(self, self.mode)
            first = self.cut(self.first)
            things = (
                ("the loss or the optimizer", (parts.call, parts.optimizer)),
                ("a parameter or the state", first),
                ("a meta tensor", self.declared),
            )
            try:
                known = programs, programs.meaning(things, parts.kind)
            except RefusedError as reason:
                programs.tell(str(reason))
                raise
            object.__setattr__(self, "known", known)
        return known


def compiled(loop: Loop, mode: CompileMode, *, progress: bool) -> Loop:
    """The same loop, whose steps are compiled; the loop itself, and a warning, where they cannot be.

    Its first gradient is taken as in a loop that is not, to see which parameters the loss uses.
    """
    if loop.steps == 0:
        return loop
    why_not = "it is inside of torch.func's transforms" if transforms_are_active() else ""
    if hooks_of_all_modules():  # which the compiler does not see here
        why_not = (
            "hooks are registered for all modules, as by `register_module_forward_hook`: register them for the "
            "modules themselves"
        )
    if why_not:
        _programs(loop, mode).tell(why_not)
        return loop
    with kept_generators():
        found = loop.gradient(loop.cut(loop.first), 0, record=False)
    flat = flattened(loop, found.grads)
    made, before = (loop, None) if flat is None else flat
    own = {field.name: getattr(made, field.name) for field in fields(Loop)}
    parts, constants = parts_of_loop(made), constants_of_loop(made)
    result = CompiledLoop(
        **own, mode=mode, parts=parts, constants=constants, before=before, progress=progress
    )
    try:
        result._known()
    except RefusedError:
        return loop
    return result


def _programs(loop: Loop, mode: CompileMode) -> Programs:
    return programs_of((code_of(loop.loss), code_of(loop.optimizer)), "an inner loop", mode)


def _with_inputs(leaf: Any) -> Any:
    return as_input(leaf) if type(leaf) is int else leaf
