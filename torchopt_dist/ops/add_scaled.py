"""params, updates, alpha → params[i] += alpha * updates[i], in place, all tensors in one call."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.ops import dispatch

__all__ = ["add_scaled_"]


def add_scaled_(
    params: Sequence[Tensor], updates: Sequence[Tensor], alpha: float = 1.0, *, fused: bool | None = None
) -> None:
    """Add to each parameter a multiple of its update, in place.

    The kernel records no graph. Where one is to be recorded, or ``torch.func`` or forward mode is at work,
    the reference formula runs, which torch differentiates, and which keeps torch's rule that a leaf that
    requires grad cannot be changed in place.

    Args:
        params: tensors of any shape and strides, of a floating-point or complex dtype, not expanded. Two of
            them may share memory; they are then updated in their order.
        updates: as many tensors, each of the shape, dtype and device of its parameter; they may be expanded.
        alpha: the multiple, a Python number.
        fused: None uses the kernel where there is one and it helps (not under ``torch.compile``, which fuses
            the reference formula itself), False uses the reference formula, True demands the kernel.

    Raises:
        TypeError: an argument is not of the type it should be, integer and sparse tensors included.
        ValueError: lengths, shapes, dtypes or devices differ, or a parameter is an expanded tensor.
        RuntimeError: ``fused=True`` where the kernel cannot be used; the message says why.
    """
    if not isinstance(alpha, float | int | Real):
        raise TypeError(f"`alpha` must be a Python number; got {type(alpha).__name__}")
    params, updates, alpha = list(params), list(updates), float(alpha)
    obstacle = None if fused is False else _obstacle(params, updates)
    if fused is None:
        fused = obstacle is None and not torch.compiler.is_compiling() and _helps(params)
    if torch.compiler.is_compiling() or not fused or obstacle is not None:
        _validate(params, updates)
    if fused and obstacle is not None:
        raise RuntimeError(f"`fused=True` cannot be kept: {obstacle}")
    if not params:
        return
    if fused:
        _kernel(params, updates, alpha)
    else:
        _reference(params, updates, alpha)


def _reference(params: list[Tensor], updates: list[Tensor], alpha: float) -> None:
    """The formula; what the kernel computes is measured against it."""
    if torch._C._are_functorch_transforms_active():  # `vmap` has no rule for `_foreach_add_`
        for param, update in zip(params, updates, strict=True):
            param.add_(update, alpha=alpha)
    else:
        torch._foreach_add_(params, updates, alpha=alpha)


def _kernel(params: list[Tensor], updates: list[Tensor], alpha: float) -> None:
    """The formula in one call. The kernel checks its arguments itself; Python's checks word its refusal."""
    if torch.compiler.is_compiling():
        torch.ops.todist.add_scaled_(params, updates, alpha)
        return
    try:
        torch.ops.todist.add_scaled_(params, updates, alpha)
    except RuntimeError:
        _validate(params, updates)
        raise
    torch.autograd.graph.increment_version(params)


def _helps(params: list[Tensor]) -> bool:
    """Whether the kernel is the faster one: many tensors in one call, in a dtype with vector instructions."""
    return len(params) > 1 and all(param.dtype is not torch.float16 for param in params)


def _obstacle(params: list[Tensor], updates: list[Tensor]) -> str | None:
    """Say what keeps the kernel from being used for these arguments, if anything does."""
    reason = dispatch.obstacle("add_scaled_", params + updates)
    if reason is None and torch.is_grad_enabled() and any(t.requires_grad for t in params + updates):
        return "a graph is to be recorded, and the kernel records none; use `torch.no_grad()`"
    return reason


def _validate(params: list[Any], updates: list[Any]) -> None:
    """Refuse whatever the formula is not meant for, before anything is written."""
    if len(params) != len(updates):
        raise ValueError(f"`updates` must have the length of `params`, {len(params)}; got {len(updates)}")
    for i, (param, update) in enumerate(zip(params, updates, strict=True)):
        for name, tensor in (("params", param), ("updates", update)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"`{name}[{i}]` must be a tensor; got {type(tensor).__name__}")
            if tensor.layout != torch.strided:
                raise TypeError(f"`{name}[{i}]` must be a dense tensor; got layout {tensor.layout}")
        if not (param.is_floating_point() or param.is_complex()):
            raise TypeError(f"`params[{i}]` must be of a floating-point or complex dtype; got {param.dtype}")
        for what in ("shape", "dtype", "device"):
            rule, got = getattr(param, what), getattr(update, what)
            if rule != got:
                raise ValueError(
                    f"`updates[{i}]` must have the {what} of `params[{i}]`, {_text(rule)}; got {_text(got)}"
                )
        if param.numel() and any(
            step == 0 and size > 1 for size, step in zip(param.shape, param.stride(), strict=True)
        ):
            raise ValueError(f"`params[{i}]` must not overlap itself in memory; got an expanded tensor")


def _text(value: object) -> str:
    """A shape as a tuple, anything else as it prints."""
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)
