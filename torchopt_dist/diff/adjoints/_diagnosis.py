"""An optimizer → the same, whose backward passes tell the norm of the outer gradient at each step of an inner loop.

A step adds its update to the parameters, so the gradient of the update is that of the parameters after the step. A hook
on each update sees it, in whatever way an adjoint takes it back.
"""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.graphs import graph_is_recorded
from torchopt_dist.core.types import OptState, Params, Updates
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["GradientNorms"]

EXPLODES = 1e4
"""How many times as large as at the last step a gradient is when the warning comes."""
REMEDY = (
    "lower the inner learning rate, raise the inner optimizer's `eps` or `eps_root` (Adam's derivative is large where "
    "gradients are small), use fewer steps, todist.Truncated(k), or an evolution strategy; or clip the meta-gradient"
)


class _WatchedState(NamedTuple):
    step: Tensor
    inner_state: OptState


class GradientNorms:
    """Norms of the outer gradient by the number of the step, from the last backward pass."""

    def __init__(self) -> None:
        self._squares: dict[int, dict[int, Tensor]] = {}
        self._last = -1
        self._has_warned = False

    def watch(
        self, optimizer: GradientTransformation, state: OptState | None
    ) -> tuple[GradientTransformation, OptState | None]:
        """The optimizer and its state, if there is one, with hooks on all updates."""
        watched = GradientTransformation(partial(_init, optimizer), partial(_update, optimizer, self.note))
        return watched, None if state is None else _WatchedState(_zero(), state)

    def values(self) -> Tensor:
        """The norms, of shape (steps,); not a number for a step that no gradient has passed."""
        found = torch.full((self._last + 1,), math.nan, dtype=torch.float64)
        for step, squares in self._squares.items():
            found[step] = math.sqrt(sum(float(square) for square in squares.values()))
        return found

    def note(self, step: int, place: int, gradient: Tensor) -> None:
        """Note the gradient of the parameter at a place after a step, and warn if it has exploded."""
        self._last = max(self._last, step)
        wide = gradient.detach()
        wide = wide if wide.dtype.is_complex else wide.double()
        square = self._squares.setdefault(step, {})[place] = wide.abs().square().sum()
        if self._has_warned or step == self._last:
            return
        first, now = sum(map(float, self._squares[self._last].values())), float(square)
        if not math.isfinite(now) or now > EXPLODES**2 * first > 0:
            self._has_warned = True
            warnings.warn(
                f"the meta-gradient explodes: its norm is {math.sqrt(first):.3g} after step {self._last} of the inner "
                f"loop, the last one, and {math.sqrt(now) if now >= 0 else now:.3g} after step {step}: {REMEDY}",
                RuntimeWarning,
                stacklevel=2,
            )


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.int64, device="cpu")


def _init(optimizer: GradientTransformation, params: Params, /) -> _WatchedState:
    return _WatchedState(_zero(), optimizer.init(params))


def _update(
    optimizer: GradientTransformation,
    note: Any,
    updates: Updates,
    state: _WatchedState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    moved, inner_state = optimizer.update(updates, state.inner_state, params=params, inplace=inplace)
    leaves, spec = pytree.flatten(moved)
    step = int(state.step)
    for place, leaf in enumerate(leaves if graph_is_recorded() else ()):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            # The leaf may be a tensor of the optimizer's state, too.
            seen = leaves[place] = leaf.view_as(leaf)
            seen.register_hook(partial(note, step, place))
    return pytree.unflatten(spec, leaves), _WatchedState(state.step + 1, inner_state)
