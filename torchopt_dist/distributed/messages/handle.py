"""A module whose tensors the workers have, or a handle of any value → what a message contains instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_dist.torch_private import engine_captures_leaf, transforms_are_active

__all__ = ["Handle", "StayingModule", "hook_of"]


class Handle:
    """Stands in a message for a value that workers fetch, as long as the handle lives."""

    __slots__ = ()


class StayingModule(nn.Module):
    """Takes the place of its only child in calls; the function gets the child."""

    module: nn.Module

    def staying(self) -> tuple[Tensor, tuple[int, int], int, Sequence[Tensor]]:
        """The hook, the key, the version and the tensors; raises if the workers' are not the same."""
        raise NotImplementedError


def hook_of(parameters: Sequence[Tensor]) -> Tensor:
    """A tensor without elements, in the places of a mirror's parameters in the caller's graph of a call."""
    if transforms_are_active() or not torch.is_grad_enabled():  # a call has no graph there
        return torch.zeros(0, requires_grad=bool(parameters), device="cpu")
    apply: Callable[..., Tensor] = _Hook.apply
    return apply(*parameters)


class _Hook(torch.autograd.Function):
    """Parameters → their hook; they get no gradients from there, since these stay on the workers."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        del parameters
        ctx.set_materialize_grads(False)
        return torch.zeros(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, ...]:
        del grad
        if any(engine_captures_leaf(node) for node, _ in ctx.next_functions):
            raise RuntimeError(
                "torch.autograd.grad was asked for gradients of a mirror's parameters, which stay on the workers: "
                "call backward() of the loss, or pass the module itself instead of its mirror"
            )
        return (None,) * len(ctx.next_functions)
