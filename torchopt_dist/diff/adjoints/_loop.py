"""A loss, an optimizer, parameters, batches → the steps of an inner loop, one at a time, recorded or not.

A step is a pure function of its number and of the :class:`Carry` of the step before, so that any step can be run again:
random numbers come from a seed for each step, and the buffers of a module are part of the carry.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.random_turns import Turn, kept_generators, seed_step
from torchopt_dist.core.second_order import refuse_left_out, why_not_twice, with_refusal
from torchopt_dist.core.substitution import Substitute
from torchopt_dist.core.surroundings import forget_casts
from torchopt_dist.core.types import OptionalTensor, OptState
from torchopt_dist.core.vjp import edges, leaf_like, plus, pulled_back
from torchopt_dist.core.vmap import differentiable
from torchopt_dist.diff.adjoints._block_calls import Declared, nodes_of_blocks
from torchopt_dist.diff.adjoints._carry import (
    Accumulation,
    Batches,
    Carry,
    Evaluation,
    Outcome,
    Seen,
    StepFn,
    StopFn,
    UpdateLookFn,
    WatchFn,
    moved_in_place,
    owned,
)
from torchopt_dist.diff.adjoints._declared import leaves_at
from torchopt_dist.diff.adjoints._model import Model
from torchopt_dist.diff.adjoints._ranks import Ranks, local, mean
from torchopt_dist.formulas import formulas_in_transforms
from torchopt_dist.formulas.attention import without_fast_path
from torchopt_dist.torch_private import grad_of_loss, grads_inside_transforms, transforms_are_active
from torchopt_dist.transform._gradients import gradients, gradients_missing, recorded_gradients
from torchopt_dist.transform.apply_updates import apply_updates, differentiable_step, with_gradients_added
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["Batches", "Carry", "Evaluation", "Loop", "Outcome", "StepFn", "StopFn"]

T = TypeVar("T")
_substituting: ContextVar[bool] = ContextVar("substituting", default=False)
_AS_IT_IS = nullcontext()
_HERE = object()
"""Stands where a tensor is to be put back."""


@dataclass(frozen=True)
class Loop:
    """An inner loop as an adjoint sees it."""

    loss: Callable[..., Any]
    """``loss(params)`` or ``loss(params, batch)``."""
    optimizer: GradientTransformation
    model: Model
    batches: Batches
    steps: int
    """How many there are at most."""
    stop: StopFn | None
    has_aux: bool
    seed: int
    first: Carry
    """What the first step starts from: the caller's tensors, with their history."""
    declared: tuple[Tensor, ...]
    """What else there may be a gradient for: meta tensors, hyper-parameters, tensors of batches."""

    state_is_given: bool = False
    """Whether the first state is the caller's, and not what the optimizer makes of the first parameters."""

    others: tuple[Tensor, ...] | None = None
    """What stands in the places of ``declared`` when a step runs, if not these themselves."""

    joined: tuple[Tensor, ...] | None = None
    """What a replay's node takes in the places of ``declared``: the same numbers, whose gradients all ranks get."""

    met: set[int] | None = None
    """Gets the ids of those of ``declared`` that a step uses, where ``others`` stand in their places."""

    watch: WatchFn | None = None
    """Is shown each plain step."""

    blocks: tuple[str, ...] = ()
    """The names of the sub-modules that are computed again, each as a node."""

    tell: Callable[[int, Tensor], None] | None = None
    """Is told the number and the loss of each step, when it runs first."""

    ranks: Ranks | None = None
    """Those that run this loop together, if it is not this process alone: gradients are means over them."""

    accumulation: Accumulation | None = None
    """Takes each step in parts of its batch, if it is not taken whole."""

    @property
    def is_substituted(self) -> bool:
        """Whether the tensors that the loop was given are replaced by others: here, or in a loop around it."""
        return self.others is not None or _substituting.get()

    @property
    def is_inside_another(self) -> bool:
        """Whether a loop around this one has replaced tensors."""
        return _substituting.get()

    @property
    def is_compiled(self) -> bool:
        """Whether a whole step is a program of torch's compiler."""
        return False

    def state_for_caller(self, state: OptState) -> OptState:
        """A state of the steps → one of the caller's parameters."""
        return state

    @property
    def samples(self) -> tuple[int, ...]:
        """The shape of a loss: that of one element, unless the loop runs for many samples at a time."""
        return ()

    @property
    def constant_state(self) -> frozenset[int]:
        """Places of the leaves of the state that are known to have no gradient."""
        return frozenset()

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that may have a gradient: initial parameters, initial state, then ``declared``; each once."""
        first = [self.first.params[place] for place in self.model.moved_places]
        state = pytree.flatten(self.first.state)[0]
        return differentiable([*first, *state, *(self.others or self.declared)])

    def with_tensors(self, others: Sequence[Tensor]) -> Loop:
        """The same loop with ``tensors`` replaced by others, wherever the loss or the optimizer uses them."""
        new = {id(old): other for old, other in zip(self.tensors, others, strict=True)}

        def changed(tensor: Tensor) -> Tensor:
            return new.get(id(tensor), tensor)

        params = list(map(changed, self.first.params))
        first = Carry(params, pytree.map_tensors(changed, self.first.state), self.first.buffers)
        made = replace(self, first=first, others=tuple(map(changed, self.others or self.declared)))
        if self.state_is_given or all(map(is_, params, self.first.params)):
            return made
        with made.substituted():  # a state may begin with the parameters
            return replace(made, first=first._replace(state=self.optimizer.init(self.model.tree(params))))

    def with_settings(self, **settings: Any) -> Loop:
        """The same loop with other values of fields."""
        return replace(self, **settings)

    def among_samples(self, function: Callable[[], T]) -> T:
        """Call a function where batches are as the loss sees them."""
        return function()

    def without_stop(self) -> Loop:
        """The same loop, whose steps run again: without the caller's predicate ``stop``, and telling nobody."""
        return replace(self, stop=None, tell=None)

    def substituted(self) -> AbstractContextManager[None]:
        """A context in which ``others`` replace ``declared``."""
        return _AS_IT_IS if self.others is None else self.instead_of_declared(self.others)

    @contextmanager
    def instead_of_declared(self, others: Sequence[Tensor]) -> Iterator[None]:
        """A context in which others replace ``declared``."""
        before = _substituting.set(True)
        try:
            with Substitute(self.declared, others, self.met):
                yield
        finally:
            _substituting.reset(before)

    def run(self, step: StepFn, carry: Carry, start: int = 0, end: int | None = None) -> Outcome:
        """Run the steps from ``start`` to before ``end``, or until the caller's predicate ends the loop."""
        losses: list[Tensor] = []
        aux: list[Any] = []
        with kept_generators():
            for number in range(start, self.steps if end is None else end):
                carry, loss, more = step(carry, number)
                losses.append(loss)
                aux.append(more)
                forget_casts()
                if self.tell is not None:
                    self.tell(number, loss.detach())
                if self.stop is not None:
                    ends, ranks = bool(self.stop(number, loss.detach())), self.ranks
                    if ends if ranks is None else ranks.group.any(ends, ranks.moved[0]):
                        break
        return Outcome(carry, losses, aux)

    def failing(self) -> AbstractContextManager[None]:
        """A context in which an error on this rank is made known to the others that run this loop."""
        return _AS_IT_IS if self.ranks is None else self.ranks.group.failing()

    def recorded_step(self, carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
        """A step with its whole graph, including that of the gradient."""
        found = self.gradient(carry, number, record=True)
        return self.moved(carry, found, record=True), found.loss, found.aux

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
        """Gradients of a step's results → of what it starts from, and of what is declared; where grad mode is on.

        The update's graph is gone through before that of the gradient, and let go of.

        Args:
            carry: what the step starts from.
            number: of the step.
            places: of the leaves of the state that may have a gradient.
            declared: what else there is a gradient for.
            bars: of the moved parameters, of the state's leaves at ``places``, and of the loss; ``None`` for zero.
            look: is shown the graph of the update.
            compare: is shown the loss, unless a program of the compiler does it all.

        Returns:
            One a moved parameter, one a place, one a declared tensor; ``None`` for one that is not used.
        """
        start, inputs = self.as_leaves(carry, places)
        inputs += declared
        *bars_of_update, bar_of_loss = bars
        found = self.gradient(start, number, record=True)
        if compare is not None:
            compare(found.loss)
        grads = [x for x in found.grads if x is not None]
        leaves = list(map(leaf_like, grads))

        def update() -> list[Tensor]:
            given = iter(leaves)
            cut = found._replace(grads=[None if x is None else next(given) for x in found.grads])
            return self.with_gradient(self.moved(start, cut, record=True), places)

        after = update()
        if look is not None:
            look(after, [*inputs, *leaves, *self.declared, *(self.others or ())], update)
        refuse_left_out(after, [*inputs, *leaves])
        ends_of_update = edges(after)
        del after
        of_update = pulled_back(ends_of_update, bars_of_update, [*inputs, *leaves])
        refuse_left_out([found.loss], inputs)  # gradients of what refuses are guarded
        of_loss = pulled_back([*grads, found.loss], [*of_update[len(inputs) :], bar_of_loss], inputs)
        return list(map(plus, of_update[: len(inputs)], of_loss))

    def as_leaves(self, carry: Carry, places: Sequence[int]) -> tuple[Carry, list[Tensor]]:
        """The same values as leaves of a graph, and these: of the parameters, then of the state at ``places``."""
        params = leaves_at(carry.params, self.model.moved_places)
        state, spec = pytree.flatten(carry.state)
        made = Carry(self._tied(params), pytree.unflatten(spec, leaves_at(state, places)), carry.buffers)
        return made, self.with_gradient(made, places)

    def with_gradient(self, carry: Carry, places: Sequence[int]) -> list[Tensor]:
        """The tensors of a carry that may have a gradient: moved parameters, then the state's leaves at ``places``."""
        state = pytree.flatten(carry.state)[0]
        moved = [carry.params[place] for place in self.model.moved_places]
        return [*moved, *(state[place] for place in places)]

    def plain_step(self, carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
        """A step as in training: no graph is left."""
        found = self.gradient(carry, number, record=False)
        return self.moved(carry, found, record=False), found.loss, found.aux

    @property
    def trains_in_place(self) -> bool:
        """Whether :meth:`training_step` overwrites its arguments."""
        return not transforms_are_active()

    def training_step(self, carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
        """As :meth:`plain_step`, on what :meth:`own` or an earlier such step has returned, which it overwrites."""
        if not self.trains_in_place:
            return self.plain_step(carry, number)
        found = self.gradient(carry, number, record=False)
        return self.trained(carry, found), found.loss, found.aux

    def trained(self, carry: Carry, found: Evaluation) -> Carry:
        """As :meth:`moved`, on what :meth:`own` or an earlier such step has returned, which it overwrites."""
        with self.substituted():
            params, state = moved_in_place(self.optimizer, self.model, carry.params, found.grads, carry.state)
        return Carry(params, state, found.buffers)

    def own(self, carry: Carry) -> Carry:
        """The same numbers, without history, in memory that :meth:`training_step` may overwrite."""
        if not self.trains_in_place:
            return self.cut(carry)
        params, state = owned(carry.params, carry.state, self.model.moved_places)
        return Carry(self._tied(params), state, [buffer.detach() for buffer in carry.buffers])

    def first_order_step(self, carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
        """A step whose gradient is a constant; the optimizer's update is recorded."""
        found = self.gradient(carry, number, record=False)
        with torch.enable_grad(), self.substituted():
            # Not as a fused node, which would keep the gradients of every step.
            params = self.model.tree(carry.params)
            updates, state = self.optimizer.update(
                self.model.tree(found.grads), carry.state, params=params, inplace=False
            )
            moved = self.model.tied(apply_updates(params, updates, inplace=False))
        return Carry(moved, state, found.buffers), found.loss, found.aux

    def gradient(
        self, carry: Carry, number: int, *, record: bool, watch: WatchFn | None = None
    ) -> Evaluation:
        """Evaluate the loss of a step and its gradient with respect to the parameters.

        Args:
            carry: the parameters and buffers to evaluate it at.
            number: the number of the step, which determines the batch and the random numbers.
            record: keep the graph, so that all that is returned can be differentiated with respect to ``carry`` and to
                all that the loss is made of; otherwise nothing that is returned has a history.
            watch: in the place of the loop's own.

        Raises:
            TypeError: the loss is no tensor, or, with ``has_aux``, not a pair.
            ValueError: it has more than one element, or does not depend on the parameters.
        """
        if self.accumulation is not None:
            return self.accumulation.gradient(self, carry, number, record=record, watch=watch or self.watch)
        if transforms_are_active():
            with torch.set_grad_enabled(record), Turn(exclusive=True):
                return self._gradient_in_transform(carry, number)
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return Loop.gradient(self, carry, number, record=record, watch=watch)
        with Turn(exclusive=True):
            leaves = list(carry.params)
            wanted = []
            for place in self.model.moved_places:
                leaf = leaves[place]
                # An alias of its own: the loss may use the first parameters in another role, too. Unlike a view, it
                # takes sparse gradients.
                leaves[place] = leaf = (
                    torch.ops.aten.alias(leaf) if record else leaf.detach().requires_grad_()
                )
                if not leaf.requires_grad:  # a sample's own numbers, of which `vmap` does not tell
                    leaf.requires_grad_()
                wanted.append(leaf)
            if record:
                if self.ranks is not None and not self.ranks.shards:
                    spread = local(self.ranks, wanted, are_params=True)
                    for place, leaf in zip(self.model.moved_places, spread, strict=True):
                        leaves[place] = leaf
                loss, aux, buffers = self.evaluate(self._tied(leaves), carry.buffers, number)
                self.model.leave()
                total = loss.sum() if self.samples else loss
                found = recorded_gradients(total, wanted) if loss.requires_grad else []
                if all(grad is None for grad in found):
                    raise gradients_missing(len(wanted), len(wanted))
                if self.ranks is not None:
                    (loss,) = mean(self.ranks, [loss])
            else:
                watch = watch or self.watch
                loss, aux, buffers = self.evaluate(self._tied(leaves), carry.buffers, number)
                if watch is not None:
                    watch(Seen(carry, number, loss, wanted, buffers, aux))
                found = [None] * len(wanted)
                if loss.requires_grad:
                    ones = None if loss.numel() == 1 and loss.is_floating_point() else torch.ones_like(loss)
                    with self.substituted():  # a checkpoint calls a part of the loss again
                        found = grad_of_loss(loss, wanted, ones, in_modes=self.others is not None)
                if all(grad is None for grad in found):
                    gradients(loss.sum(), wanted, create_graph=False)  # says what is wrong
                if self.ranks is not None:
                    found, loss = self.ranks.mean_of_step(found, loss.detach())
        if loss.shape != self.samples:
            loss = loss.reshape(self.samples)
        if not record:
            loss, buffers = loss.detach(), [buffer.detach() for buffer in buffers]
            aux = None if aux is None else pytree.map_tensors(Tensor.detach, aux)
        grads = list(found) if len(found) == len(leaves) else self._at_places(found)
        return Evaluation(loss, aux, grads, buffers)

    def _gradient_in_transform(self, carry: Carry, number: int) -> Evaluation:
        rest: list[Any] = []

        def objective(moved: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            if self.ranks is not None:
                moved = local(self.ranks, moved, are_params=True)
            leaves = list(carry.params)
            for place, leaf in zip(self.model.moved_places, moved, strict=True):
                leaves[place] = leaf
            loss, aux, buffers = self.evaluate(self._tied(leaves), carry.buffers, number)
            flat, spec = pytree.flatten(aux)
            tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
            filled = [_HERE if isinstance(leaf, Tensor) else leaf for leaf in flat]
            rest[:] = [filled, spec, len(buffers), why_not_twice([loss])]
            return loss.reshape(()), [*buffers, *tensors]

        given = [carry.params[place] for place in self.model.moved_places]
        with formulas_in_transforms(), without_fast_path():
            found, loss, others = grads_inside_transforms(objective, given)
        if self.ranks is not None:
            (loss,) = mean(self.ranks, [loss])
        if all(grad is None for grad in found):
            raise gradients_missing(len(given), len(given))
        flat, spec, count, why_not = rest
        if why_not is not None:
            found = with_refusal(found, [*given, *(self.others or self.declared)], why_not)
        tensors = iter(others[count:])
        aux = pytree.unflatten(spec, [next(tensors) if leaf is _HERE else leaf for leaf in flat])
        return Evaluation(loss, aux, self._at_places(found), others[:count])

    def evaluate(
        self, leaves: Sequence[Tensor], buffers: Sequence[Tensor], number: int
    ) -> tuple[Tensor, Any, list[Tensor]]:
        """Call the loss of a step once.

        Returns:
            The loss, the other values that it returned, and the buffers after it.

        Raises:
            TypeError: the loss is no tensor, or, with ``has_aux``, not a pair.
            ValueError: the loss has more than one element; the batches end before the steps.
        """
        if self.accumulation is not None:
            return self.accumulation.evaluate(self, leaves, buffers, number)
        seed_step(self.seed, number)
        if self.others is None:
            value = self._called(leaves, buffers, number)
        else:
            with self.instead_of_declared(self.others):
                value = self._called(leaves, buffers, number)
        aux = None
        if self.has_aux:
            if not isinstance(value, tuple) or len(value) != 2:
                raise TypeError(
                    f"`loss` must return a pair (loss, aux) with `has_aux=True`, got {type(value).__name__}"
                )
            value, aux = value
        if not isinstance(value, Tensor):
            raise TypeError(f"`loss` must return a tensor, got {type(value).__name__}")
        if value.numel() != 1:
            raise ValueError(f"`loss` must return a tensor of one element, got shape {tuple(value.shape)}")
        return value, aux, self.model.buffers_now() if buffers else []

    def _called(self, leaves: Sequence[Tensor], buffers: Sequence[Tensor], number: int) -> Any:
        given = self.model.filled(leaves, [buffer.clone() for buffer in buffers] if buffers else buffers)
        batch = () if self.batches is None else (self.batch(number),)
        try:
            if self.blocks:
                declared = Declared(self.declared, self.others or self.declared, self.instead_of_declared)
                with nodes_of_blocks(self.blocks, self.model, declared) as check:
                    value = self.loss(given, *batch)
                check(value[0] if isinstance(value, tuple) else value)
                return value
            return self.loss(given, *batch)
        except TypeError:
            _check_signature(self.loss, *batch)
            raise
        except (ValueError, RuntimeError) as error:
            if _are_inputs_and_targets(self.batches):
                error.add_note(
                    "`batches` must have one batch for each step, and has two tensors with the same number of rows, "
                    "which are the batches of two steps: if they are the inputs and targets of one batch, write "
                    "`[(x, y)] * steps`"
                )
            raise

    def batch(self, number: int) -> Any:
        """The batch of a step.

        Raises:
            ValueError: there is no batch for the step.
        """
        if callable(self.batches):
            return self.batches(number)
        assert self.batches is not None
        try:
            return self.batches[number]
        except IndexError:
            raise ValueError(
                f"`batches` must have one batch for each step: they ended at step {number} of {self.steps}"
            ) from None

    def moved(self, carry: Carry, found: Evaluation, *, record: bool) -> Carry:
        """The carry after a step, given the step's gradient."""
        if self.others is not None or torch.is_grad_enabled() != record:
            with torch.set_grad_enabled(record), self.substituted():
                return self._moved(carry, found)
        return self._moved(carry, found)

    def _moved(self, carry: Carry, found: Evaluation) -> Carry:
        if (added := with_gradients_added(self.optimizer, carry.params, found.grads)) is not None:
            return Carry(self._tied(added), carry.state, found.buffers)
        params, state = differentiable_step(
            self.optimizer, self.model.tree(carry.params), self.model.tree(found.grads), carry.state
        )
        return Carry(self.model.tied(params), state, found.buffers)

    def cut(self, carry: Carry) -> Carry:
        """The same values without history; parameters that are moved require grad."""
        params = list(carry.params)
        for place in self.model.moved_places:
            leaf = params[place].detach()
            params[place] = leaf if transforms_are_active() else leaf.requires_grad_()
        state = pytree.map_tensors(Tensor.detach, carry.state)
        return Carry(self._tied(params), state, [buffer.detach() for buffer in carry.buffers])

    def loss_again(self, carry: Carry, number: int) -> list[Tensor]:
        """The loss of a step once more, whose parameters require grad: it may have a gradient in it."""
        cut = self.cut(carry)
        return [self.evaluate(cut.params, cut.buffers, number)[0]]

    def without_history(self, carry: Carry) -> Carry:
        """The same parameters and buffers, and a state without history: for a step that overwrites nothing."""
        if not _has_history(carry.state):
            return carry
        return carry._replace(state=pytree.map_tensors(Tensor.detach, carry.state))

    def _tied(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        return [leaves[place] for place in self.model.first_places]

    def _at_places(self, found: Sequence[OptionalTensor]) -> list[OptionalTensor]:
        grads: list[OptionalTensor] = [None] * len(self.first.params)
        for place, grad in zip(self.model.moved_places, found, strict=True):
            grads[place] = grad
        return grads


def _has_history(state: OptState) -> bool:
    if isinstance(state, (tuple, list)):
        return any(map(_has_history, state))
    if isinstance(state, Tensor):
        return state.requires_grad
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.flatten(state)[0])


def _check_signature(loss: Any, *batch: Any) -> None:
    """Raise ``TypeError`` for a loss that cannot be called with parameters and what else there is."""
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # a builtin, whose error is to speak for itself
        return
    try:
        signature.bind(None, *batch)
    except TypeError as error:
        rule = (
            "`loss` must take the parameters and a batch, `loss(params, batch)`, since `batches` has batches; for a "
            "loss without data `batches` is the number of steps"
            if batch
            else "`loss` must take the parameters alone, `loss(params)`, since `batches` is a number of steps; a loss "
            "of a batch needs a batch for each step, `inner_loop(loss, optimizer, params, [batch] * steps)`"
        )
        raise TypeError(f"{rule}: {error}") from None


def _are_inputs_and_targets(batches: Any) -> bool:
    """Whether two batches may be meant as the two tensors of one."""
    if not isinstance(batches, (tuple, list)) or len(batches) != 2:
        return False
    return all(isinstance(one, Tensor) and one.ndim for one in batches) and len(batches[0]) == len(batches[1])
