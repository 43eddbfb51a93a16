"""A loss, parameters → new parameters, with the state kept between calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.evaluation import is_evaluating, need_gradients
from torchopt_dist.core.types import OptState, Params
from torchopt_dist.nn._tensor_copier import TensorCopier, deepcopy_memo
from torchopt_dist.optim._state import (
    Dtypes,
    dtypes_of,
    fitted,
    flatten_state,
    have_same_dtypes,
    restore_state,
)
from torchopt_dist.transform._gradients import gradients
from torchopt_dist.transform.apply_updates import apply_updates, differentiable_step
from torchopt_dist.transform.base import GradientTransformation, no_transformation

if TYPE_CHECKING:
    from typing import Self

__all__ = ["FuncOptimizer"]


class _Loaded(NamedTuple):
    """A loaded state from before the first step, which has yet to show the parameters."""

    tensors: dict[str, Any]


class FuncOptimizer:
    """A gradient transformation together with its state, for parameters that the caller holds.

    A step that is not in place is recorded, and the state keeps the graph. Cut it with
    ``stop_gradient(params)`` and ``stop_gradient(optimizer)``; memory then stays flat.

    Args:
        impl: the gradient transformation.
        inplace: overwrite the parameters and record nothing, unless a step says otherwise.

    Raises:
        TypeError: ``impl`` is not a gradient transformation.

    Example:
        >>> import torch
        >>> from torchopt_dist.optim.sgd import sgd
        >>> w = torch.ones(2, requires_grad=True)
        >>> moved = FuncOptimizer(sgd(lr=0.25)).step((w**2).sum(), (w,))
        >>> torch.autograd.grad(moved[0].sum(), w)
        (tensor([0.5000, 0.5000]),)
    """

    def __init__(self, impl: GradientTransformation, *, inplace: bool = False) -> None:
        if not isinstance(impl, GradientTransformation):
            raise no_transformation("impl", impl)
        self.impl = impl
        self.inplace = bool(inplace)
        self._state: OptState | None = None  # None until the first step shows the parameters
        self._saved: _Loaded | None = None  # what was loaded before that
        self._dtypes: Dtypes | None = None  # those of the parameters that the state fits, if known
        self._is_shared = False  # others may hold the state's tensors, so the next step makes new ones

    def step(self, loss: Tensor, params: Params, inplace: bool | None = None) -> Params:
        """Move parameters once.

        Args:
            loss: a tensor of one element, computed with ``params``.
            params: a tree of tensors, of the same structure at each step. A tensor that does not require grad, or on
                which the loss does not depend, stays as it is, and so does its state. A tensor that occurs twice (a
                tied weight) is moved once, with the state of its first place, and the result has it at both places.
            inplace: overwrite ``params`` and record nothing; the loss's graph is then freed. The optimizer's
                setting, if not given.

        Returns:
            The parameters moved: ``params`` itself if in place, otherwise new tensors connected to the graph.

        Raises:
            TypeError: ``loss`` or a leaf of ``params`` is not a tensor.
            ValueError: ``loss`` has more than one element or depends on none of ``params``, ``params`` is
                empty, or has another structure than before.
        """
        inplace = self.inplace if inplace is None else bool(inplace)
        leaves, spec = pytree.flatten(params)
        if not leaves:
            raise ValueError(f"`params` must have a tensor in it, got {params!r}")
        need_gradients()
        recorded = not inplace and not is_evaluating()
        found = gradients(loss, leaves, create_graph=recorded, retain_graph=not inplace)
        firsts = _first_places(leaves)
        once = [
            grad if first == place else None
            for place, (first, grad) in enumerate(zip(firsts, found, strict=True))
        ]
        grads = pytree.unflatten(spec, once)
        state = self._state_for(params)
        with torch.set_grad_enabled(not inplace):
            if not inplace:
                moved, self._state = differentiable_step(self.impl, params, grads, state)
                new = [_apart(*pair) for pair in zip(leaves, pytree.flatten(moved)[0], strict=True)]
                return pytree.unflatten(spec, [new[first] for first in firsts])
            updates, self._state = self.impl.update(grads, state, params=params, inplace=not self._is_shared)
            self._is_shared = False
            return apply_updates(params, updates)

    def state_dict(self) -> dict[str, Any]:
        """The state as ``{'state': {where: tensor}}``, for ``torch.save``; ``{}`` before the first step.

        The tensors are those of the state, history included. Later steps do not overwrite them.
        """
        self._is_shared = True
        if self._state is None:
            return {} if self._saved is None else {"state": self._saved.tensors}
        return {"state": flatten_state(self._state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`; its tensors are taken over, not copied, and not overwritten.

        Raises:
            ValueError: it is of another optimizer or of other parameters; before the first step, that step raises.
        """
        self._is_shared = True
        saved = state_dict.get("state")
        if self._state is None or saved is None:
            self._state, self._saved = None, None if saved is None else _Loaded(saved)
        else:
            self._state = restore_state(self._state, saved)

    def get_states(self) -> tuple[OptState, ...]:
        """The state alone in a tuple; an empty one before the first step. The tensors are the same.

        Before the first step these are what has been loaded, if anything. Later steps do not overwrite them.
        """
        self._is_shared = True
        held = self._saved if self._state is None else self._state
        return () if held is None else (held,)

    def set_states(self, states: Sequence[OptState]) -> None:
        """Continue from this state.

        Raises:
            ValueError: there is more than one, or its structure differs.
        """
        self._is_shared = True
        if len(states) > 1:
            raise ValueError(f"`states` must be one or none, got {len(states)}")
        new = states[0] if states else None
        if isinstance(new, _Loaded):
            if self._state is not None and new.tensors.keys() != flatten_state(self._state).keys():
                raise ValueError(
                    f"`states` must have the places of the optimizer's state, {[*flatten_state(self._state)]}, "
                    f"got {[*new.tensors]}"
                )
            self._state, self._saved = None, new
            return
        if self._state is not None and states:
            pytree.flatten_like(pytree.flatten(self._state)[1], states[0], "states", "the optimizer's state")
        if not have_same_dtypes(new, self._state):
            self._dtypes = None
        self._state, self._saved = new, None

    def clone_with(self, clone: Callable[[Any], Any]) -> Self:
        """Make a second optimizer, ``clone`` applied to the state; it shares ``impl``."""
        other = copy.copy(self)
        self._is_shared = other._is_shared = True
        other._state = None if self._state is None else clone(self._state)
        other._saved = None if self._saved is None else clone(self._saved)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy everything, tensors with a history as leaves."""
        take = TensorCopier("deepcopy")
        other = self.clone_with(lambda state: pytree.map_tensors(take, state))
        memo[id(self)] = other
        memo.update(deepcopy_memo(self.impl, take))
        other.impl = copy.deepcopy(self.impl, memo)
        return other

    def _state_for(self, params: Params) -> OptState:
        dtypes = dtypes_of(pytree.flatten(params)[0])
        if self._state is not None:
            self._state = fitted(self._state, lambda: self.impl.init(params), self._dtypes, dtypes)
            self._dtypes = dtypes
            return self._state
        self._dtypes = dtypes
        first = self.impl.init(params)
        if self._saved is not None:
            first, self._saved = restore_state(first, self._saved.tensors), None
        return first


def _first_places(leaves: list[Any]) -> list[int]:
    """Where each leaf is for the first time."""
    seen: dict[int, int] = {}
    return [place if leaf is None else seen.setdefault(id(leaf), place) for place, leaf in enumerate(leaves)]


def _apart(old: Any, moved: Any) -> Any:
    """A moved parameter that can be detached in place: a complex one may come as a view, which cannot."""
    return moved.clone() if moved is not old and moved.is_complex() and moved._is_view() else moved
