"""A function of a gradient → that function run in backward, on the gradient that flows back through each update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, Updates
from torchopt_dist.core.vmap import values_of
from torchopt_dist.transform.base import EmptyState, GradientTransformation, stateless
from torchopt_dist.transform.nan_to_num import check_replacements, replace_nonfinite

__all__ = ["Hook", "nan_to_num_hook", "register_hook", "zero_nan_hook"]

Hook: TypeAlias = Callable[[Tensor], Tensor | None]
"""The gradient of a tensor → what goes on in its place, or ``None``: the gradient itself."""


def register_hook(hook: Hook) -> GradientTransformation:
    """Run a hook in the backward pass, on what flows back through each update, as ``Tensor.register_hook``.

    The updates are not changed. In the backward pass of a meta-gradient, the gradient of each update goes through
    ``hook``. Updates that do not require grad have no backward pass and are left out.

    Args:
        hook: the gradient → another one, or ``None`` to leave it as it is; a module-level function, if the
            transformation is to be pickled.

    Raises:
        TypeError: it is not callable.

    Example:
        >>> import torch
        >>> init, update = register_hook(zero_nan_hook)
        >>> gradient = torch.ones(2, requires_grad=True)
        >>> updates, _ = update(gradient, init(gradient))
        >>> torch.autograd.grad(updates, gradient, torch.tensor([float("nan"), 3.0]))
        (tensor([0., 3.]),)
    """
    if not callable(hook):
        raise TypeError(f"`hook` must be callable, got {type(hook).__name__}")
    return GradientTransformation(stateless, partial(_update, hook))


def zero_nan_hook(g: Tensor) -> Tensor:
    """Make the NaN entries of a gradient 0; a hook for :func:`register_hook`.

    Args:
        g: the gradient. A complex entry is NaN if one of its parts is.

    Example:
        >>> import torch
        >>> zero_nan_hook(torch.tensor([float("nan"), 1.0]))
        tensor([0., 1.])
    """
    return torch.where(torch.isnan(g), 0.0, g)


def nan_to_num_hook(
    nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Callable[[Tensor], Tensor]:
    """Make a hook that replaces the entries of a gradient that are not finite, as ``torch.nan_to_num``.

    Args:
        nan: the replacement for NaN.
        posinf: the replacement for infinity; the largest number of the gradient's dtype, if not given.
        neginf: the replacement for minus infinity; the least number of the dtype, if not given.

    Returns:
        A hook for :func:`register_hook`.

    Raises:
        TypeError: an argument is not a number.

    Example:
        >>> import torch
        >>> nan_to_num_hook(posinf=9.0)(torch.tensor([float("nan"), float("inf")]))
        tensor([0., 9.])
    """
    check_replacements(nan, posinf, neginf)
    return partial(replace_nonfinite, nan, posinf, neginf)


def _update(
    hook: Hook,
    updates: Updates,
    state: EmptyState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    return pytree.map_tensors(partial(_hooked, hook), updates), state


def _hooked(hook: Hook, update: Tensor) -> Tensor:
    """The same tensor under a second name that has the hook, so that the given one is left alone."""
    held = values_of(update)
    if not (held.values.requires_grad and torch.is_grad_enabled()):
        return update
    alias = held._replace(values=held.values.view_as(held.values))
    alias.register_hook(hook)
    return alias.tensor()
