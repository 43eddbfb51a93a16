"""A module, then a loss of it → the module with moved parameters, in words that torch's compiler can trace.

It does what ``MetaOptimizer.step`` does, without its checks: where something is wrong, the compiler refuses the task,
and the step itself says what.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_dist.core.types import OptionalTensor, OptState
from torchopt_dist.nn._traced_module import replace_parameters
from torchopt_dist.torch_private import traced_samples
from torchopt_dist.transform.apply_updates import apply_updates

__all__ = ["traced_begin", "traced_step"]


def traced_begin(module: nn.Module) -> dict[str, Tensor]:
    """The values of the parameters to move, which the module gets; inside ``vmap`` it has some for each sample."""
    params, samples = dict(module.named_parameters()), traced_samples()
    moving = {
        name: p
        for name, p in params.items()
        if (
            p if samples is None else samples.values(p)
        ).requires_grad  # what `vmap` maps never says so itself
    }
    # Tensors that are made here: a gradient with respect to others could go through what is not traced.
    return _given(module, moving, {name: p.view_as(p) for name, p in moving.items()})


def traced_step(
    impl: Any, module: nn.Module, values: dict[str, Tensor], state: OptState, loss: Tensor, first_order: bool
) -> tuple[dict[str, Tensor], OptState]:
    """Replace the parameters by moved ones, and return their values and the next state."""
    params, samples = dict(module.named_parameters()), traced_samples()
    of_loss = loss.reshape(()) if samples is None else samples.values(loss.reshape(())).sum()
    found = torch.autograd.grad(
        of_loss, list(values.values()), create_graph=not first_order, retain_graph=True, allow_unused=True
    )
    if all(grad is None for grad in found):
        raise ValueError("the loss depends on none of the parameters")
    grads: dict[str, OptionalTensor] = dict.fromkeys(params)
    for name, grad in zip(values, found, strict=True):
        grads[name] = grad if grad is None or samples is None else samples.tensor(grad)
    updates, state = impl.update(grads, state, params=params, inplace=False)
    moved = apply_updates(params, updates, inplace=False)
    return _given(module, {name: params[name] for name in values}, moved), state


def _given(module: nn.Module, old: Mapping[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put new tensors into a module in the places of old ones, and return their values."""
    samples = traced_samples()
    values = {name: new[name] if samples is None else samples.values(new[name]) for name in old}
    held = values if samples is None else {name: samples.tensor(each) for name, each in values.items()}
    replace_parameters(module, {old[name]: tensor for name, tensor in held.items()})
    return values
