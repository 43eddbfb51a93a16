"""A loop inside ``vmap`` → one on the values of all samples, outside, which calls loss and optimizer inside of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.vjp import has_derivative
from torchopt_dist.core.vmap import Samples, Values, for_each_sample, samples_around, values_of
from torchopt_dist.diff.adjoints._loop import Carry, Evaluation, Loop, Outcome
from torchopt_dist.diff.adjoints._places import of_frozen_parameters
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["VmappedLoop", "run_outside_of_vmap", "samples_for"]

T = TypeVar("T")


def _is_same_for_all(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) or all(dim is None for dim in values_of(leaf).dims)


@dataclass(frozen=True, kw_only=True)
class VmappedLoop(Loop):
    """A loop for many samples at a time. Most of its tensors have a leading dimension for each ``vmap``."""

    around: Samples
    """What the loop was inside of."""
    within: Loop
    """The loop as it is inside."""
    stand_ins: tuple[tuple[int, tuple[int | None, ...]], ...]
    """For each tensor that ``within`` declares: which of ``declared`` has its values, and which of their dimensions
    counts samples, for each ``vmap``."""
    same_params: frozenset[int]
    """Places of the parameters that are the same for all samples: frozen ones."""
    same_state: frozenset[int]
    """Places of the leaves of the state that are: counts of steps."""

    @property
    def samples(self) -> tuple[int, ...]:
        return self.around.sizes

    @property
    def constant_state(self) -> frozenset[int]:
        return self.same_state

    @property
    def trains_in_place(self) -> bool:
        return False

    def with_settings(self, **settings: Any) -> Loop:
        return replace(self, within=self.within.with_settings(**settings), **settings)

    def among_samples(self, function: Callable[[], T]) -> T:
        return self.around.call(function)

    def evaluate(
        self, leaves: Sequence[Tensor], buffers: Sequence[Tensor], number: int
    ) -> tuple[Tensor, Any, list[Tensor]]:
        """As :meth:`Loop.evaluate`, with a loss for each sample."""
        entry, stack = self.around.entry, self.around.stack

        def inside() -> tuple[Tensor, Any, list[Tensor]]:
            given = _each(entry, leaves, self.same_params)
            loss, aux, after = self._inside().evaluate(given, list(map(entry, buffers)), number)
            if self.has_aux:
                aux = pytree.map_tensors(stack, aux)
            return stack(loss.reshape(())), aux, list(map(stack, after))

        return self.around.call(inside)

    def moved(self, carry: Carry, found: Evaluation, *, record: bool) -> Carry:
        """As :meth:`Loop.moved`, for each sample by itself."""
        entry, stack = self.around.entry, self.around.stack

        def inside() -> Carry:
            given = self.inside(carry._replace(buffers=[]))
            grads = [None if grad is None else entry(grad) for grad in found.grads]
            after = self._inside().moved(given, Evaluation(found.loss, None, grads, []), record=record)
            with torch.set_grad_enabled(record):
                params = _each(stack, after.params, self.same_params)
                return Carry(self._tied(params), self._state(stack, after.state), found.buffers)

        return self.around.call(inside)

    def trained(self, carry: Carry, found: Evaluation) -> Carry:
        """As :meth:`moved`, with nothing recorded: what a ``vmap`` makes is new memory."""
        return self.moved(carry, found, record=False)

    def inside(self, carry: Carry) -> Carry:
        """Inside: what there is of a carry for a sample."""
        entry = self.around.entry
        params = self._tied(_each(entry, carry.params, self.same_params))
        return Carry(params, self._state(entry, carry.state), list(map(entry, carry.buffers)))

    def _state(self, function: Callable[[Tensor], Tensor], state: Any) -> Any:
        leaves, spec = pytree.flatten(state)
        return pytree.unflatten(spec, _each(function, leaves, self.same_state))

    def _inside(self) -> Loop:
        if self.others is None:
            return self.within
        others = (Values(self.others[place], dims).tensor() for place, dims in self.stand_ins)
        return replace(self.within, others=tuple(others))


def _each(function: Callable[[Tensor], Tensor], leaves: Sequence[Any], but: frozenset[int]) -> list[Any]:
    return [
        function(leaf) if isinstance(leaf, Tensor) and place not in but else leaf
        for place, leaf in enumerate(leaves)
    ]


def _over_samples(loop: Loop, around: Samples) -> VmappedLoop:
    """Inside ``vmap``: make a loop on the values of all samples, to be run outside.

    Args:
        loop: the loop as it is inside.
        around: the samples around it.
    """
    settings: dict[str, Any] = {field.name: getattr(loop, field.name) for field in fields(Loop)}
    first, model, stop, tell = loop.first, loop.model, loop.stop, loop.tell

    def dense(tensor: Tensor) -> Tensor:
        return around.stack(tensor).contiguous()

    moved = {place for place, origin in enumerate(model.first_places) if origin in model.moved_places}
    same_params = frozenset(
        place for place, leaf in enumerate(first.params) if place not in moved and _is_same_for_all(leaf)
    )
    same_state = _same_state(loop)
    leaves, spec = pytree.flatten(first.state)
    params = _each(dense, first.params, same_params)
    held = [(tensor, values_of(tensor)) for tensor in loop.declared]
    held = [(tensor, found) for tensor, found in held if found.values.requires_grad]
    declared = list({id(found.values): found.values for _, found in held}.values())
    places = {id(values): place for place, values in enumerate(declared)}

    def stop_inside(number: int, loss: Tensor) -> Any:
        assert stop is not None
        return around.call(lambda: stop(number, around.entry(loss)))

    def tell_inside(number: int, loss: Tensor) -> None:
        assert tell is not None
        around.call(lambda: tell(number, around.entry(loss)))

    settings |= {
        "first": Carry(
            [params[place] for place in model.first_places],
            pytree.unflatten(spec, _each(dense, leaves, same_state)),
            list(map(dense, first.buffers)),
        ),
        "declared": tuple(declared),
        # Steps are made inside; as a transformation and no chain, none of its formulas is taken for one of values.
        "optimizer": GradientTransformation(loop.optimizer.init, loop.optimizer.update),
        "stop": None if stop is None else stop_inside,
        "tell": None if tell is None else tell_inside,
    }
    return VmappedLoop(
        **settings,
        around=around,
        within=replace(loop, declared=tuple(tensor for tensor, _ in held)),
        stand_ins=tuple((places[id(found.values)], found.dims) for _, found in held),
        same_params=same_params,
        same_state=same_state,
    )


def _same_state(loop: Loop) -> frozenset[int]:
    """The leaves of the optimizer's state that stay the same for all samples, when gradients differ.

    A leaf that a step leaves alone may be changed by a later one, unless it is that of a frozen parameter.
    """
    leaves, spec = pytree.flatten(loop.first.state)
    params = _each(for_each_sample, loop.first.params, frozenset())
    grads: list[OptionalTensor] = [None] * len(params)
    for place in loop.model.moved_places:
        grads[place] = params[place]
    found = Evaluation(params[0], None, grads, [])
    same = frozenset(place for place, leaf in enumerate(leaves) if _is_same_for_all(leaf))
    while True:
        state = pytree.unflatten(spec, _each(for_each_sample, leaves, same))
        after = pytree.flatten(loop.moved(Carry(params, state, []), found, record=False).state)[0]
        still = frozenset(place for place in same if _is_same_for_all(after[place]))
        if still == same:
            break
        same = still
    alone = frozenset(n for n in same if after[n] is leaves[n] and has_derivative(leaves[n]))
    return same - (alone - of_frozen_parameters(loop))


def run_outside_of_vmap(run: Callable[[Loop], Outcome], loop: Loop, around: Samples | None) -> Outcome:
    """Run a loop on the values of all samples, where gradients are taken and connected as without ``vmap``.

    Args:
        run: runs the loop, and connects the outcome.
        loop: the loop as it is inside.
        around: the samples around it; ``None`` inside another transformation of ``torch.func``, where the loop runs as
            it is, as without any.

    Returns:
        The outcome, inside again.
    """
    if around is None or not around.levels:
        return run(loop)
    of_all = _over_samples(loop, around)
    with around.outside():
        outcome = run(of_all)
    aux = [None if found is None else pytree.map_tensors(around.entry, found) for found in outcome.aux]
    return Outcome(of_all.inside(outcome.carry), list(map(around.entry, outcome.losses)), aux)


def samples_for(adjoint: object) -> Samples:
    """As :func:`samples_around`, for an adjoint that runs in no other transformation.

    Raises:
        NotImplementedError: another transformation is active.
    """
    around = samples_around()
    if around is None:
        raise NotImplementedError(
            f"`{type(adjoint).__name__}` does not run inside `torch.func.grad` or another transformation than "
            "`torch.vmap`: call `backward()` or `torch.autograd.grad` outside of `vmap`, or take `Recorded()` or "
            "`Truncated(1)` there"
        )
    return around
