"""A loop → a loop whose steps and gradients are programs of torch's compiler, for every adjoint.

Where a step is looked at, runs in place of others (inside of a replay that is differentiated itself) or inside of a
transform of ``torch.func``, it runs as in a loop that is not compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.binding import Bindings
from torchopt_dist.core.bound import Bound
from torchopt_dist.core.code_names import is_numpys
from torchopt_dist.core.programs import CompileMode, Program
from torchopt_dist.core.random_turns import Turn
from torchopt_dist.core.types import OptionalTensor, OptState
from torchopt_dist.core.vjp import plus, pulled_back
from torchopt_dist.diff.adjoints._carry import Carry, Evaluation, UpdateLookFn, WatchFn
from torchopt_dist.diff.adjoints._declared import leaf_like
from torchopt_dist.diff.adjoints._loop import Loop
from torchopt_dist.diff.adjoints._randomness import kept_generators, seed_step
from torchopt_dist.diff.compiled._flat import FlatModel, flattened
from torchopt_dist.diff.compiled._functions import (
    Outside,
    Parts,
    Place,
    constants_of_loop,
    gradient,
    parts_of_loop,
    pulled_step,
    step,
)
from torchopt_dist.diff.compiled._program import program_for
from torchopt_dist.torch_private import hooks_of_all_modules, transforms_are_active

__all__ = ["CompiledLoop", "compiled"]

_FLOATS = 2
"""So many values of the numbers of batches that are not whole get programs in a loop."""
_OF_NUMPY = (
    "since it reads {}, of numpy, which the compiler takes for a tensor of another dtype: give it a Python number or a "
    "tensor"
)


@dataclass(frozen=True)
class CompiledLoop(Loop):
    """A loop whose steps are compiled."""

    parts: Parts | None = None
    step: Program | None = None
    of_gradient: Program | None = None
    of_pulled: Program | None = None
    constants: list[OptionalTensor] = field(default_factory=list)
    before: Any = None
    """The first state, where the loop moves a vector in the place of a tree."""

    floats: set[tuple[float, ...]] = field(default_factory=set)
    """Those of batches that programs are made for."""
    left_out: set[int] = field(default_factory=set)
    """The ids of programs that have none for this loop, and no room for it."""

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
            self.of_gradient,
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
            self.of_pulled, number, arguments, otherwise, batch_with_history=True
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

        made = self._run(self.step, number, arguments, otherwise, record=record)
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
        program: Program | None,
        number: int,
        arguments: Callable[[tuple[Any, ...]], tuple[Any, ...]],
        otherwise: Callable[[], Any],
        *,
        record: bool = False,
        batch_with_history: bool = False,
    ) -> Any:
        """What a program makes, or what is made otherwise, where it must not or cannot be compiled.

        Args:
            program: a program.
            number: of the step, which says with which batch and random numbers.
            arguments: the loss's arguments after the parameters → those of the program after the parts.
            otherwise: makes the same without it.
            record: connect what it makes.
            batch_with_history: connect the batch to the tensors that it is made of.
        """
        assert program is not None
        if self.is_inside_another or transforms_are_active():
            warnings.warn(
                "an inner loop with compile=True runs as without it inside of another one that is replayed",
                stacklevel=4,
            )
            return otherwise()
        if isinstance(self.loss, Bound) and not self.loss.is_the_same:
            return otherwise()  # a program would have what names mean now
        with torch.set_grad_enabled(record), Turn(exclusive=True):
            seed_step(self.seed, number)  # which a batch's random numbers come from, too
            batch: Any = ()
            if self.batches is not None:
                with self.substituted(), torch.set_grad_enabled(record or batch_with_history):
                    batch = (self.batch(number),)
                if self.others is not None:  # a tensor of the batches may be declared itself
                    new = {id(old): other for old, other in zip(self.declared, self.others, strict=True)}
                    if self.met is not None:
                        self.met.update({*map(id, pytree.flatten(batch)[0])} & new.keys())
                    batch = pytree.map_tensors(lambda x: new.get(id(x), x), batch)
            leaves, spec = pytree.flatten(batch)
            if (why_not := self._why_not(leaves)) is not None:
                warnings.warn(f"an inner loop with compile=True runs as without it {why_not}", stacklevel=4)
                return otherwise()
            numbers = [leaf for leaf in leaves if type(leaf) is int]
            if numbers:
                places = map(Place, range(len(numbers)))
                filled = [next(places) if type(leaf) is int else leaf for leaf in leaves]
                batch = pytree.unflatten(spec, filled)
            return program(
                self.parts, *arguments(batch), numbers=numbers, otherwise=otherwise, left_out=self.left_out
            )

    def _why_not(self, leaves: Sequence[Any]) -> str | None:
        """Why a step with this batch runs without a program, if it does."""
        if any(map(is_numpys, leaves)):
            return _OF_NUMPY.format("its batch")
        floats = tuple(leaf for leaf in leaves if type(leaf) is float)
        if floats and floats not in self.floats:
            if len(self.floats) == _FLOATS:
                return (
                    f"where a number of its batch is none of the first {_FLOATS}, since each needs a program: give it "
                    "as a tensor"
                )
            self.floats.add(floats)
        return None


def compiled(loop: Loop, mode: CompileMode) -> Loop:
    """The same loop, whose steps are compiled; the loop itself, and a warning, where they cannot be.

    Its first gradient is taken as in a loop that is not, to see which parameters the loss uses.
    """
    if loop.steps == 0:
        return loop
    names = Bindings(loop.loss, loop.optimizer, getattr(loop.model, "module", None))
    if (why_not := _why_not(names)) is not None:
        warnings.warn(f"an inner loop with compile=True runs as without it {why_not}", stacklevel=5)
        return loop
    with kept_generators():
        found = loop.gradient(loop.cut(loop.first), 0, record=False)
    flat = flattened(loop, found.grads)
    loop, before = (loop, None) if flat is None else flat
    parts = parts_of_loop(loop)
    own = {field.name: getattr(loop, field.name) for field in fields(Loop)}
    return CompiledLoop(
        **own,
        parts=parts,
        step=program_for(step, parts, loop.loss, names.code, mode),
        of_gradient=program_for(gradient, parts, loop.loss, names.code, mode),
        of_pulled=program_for(pulled_step, parts, loop.loss, names.code, mode),
        constants=constants_of_loop(loop),
        before=before,
    )


def _why_not(names: Bindings) -> str | None:
    """Why a loop whose functions have these names is not compiled, if it is not."""
    if transforms_are_active():
        return "inside of torch.func's transforms"
    if hooks_of_all_modules():
        return "while hooks are registered for all modules, as by `register_module_forward_hook`"
    if (name := names.name_of_numpy()) is not None:
        return _OF_NUMPY.format(f"`{name}`")
    return None
