"""``embedding`` → inside of transforms, the same without a gradient of the padding's row.

Where each sample of a ``vmap`` has indices and a table of its own, torch (2.13) looks all of them up in one long table,
and passes it the same ``padding_idx``: autograd from outside then leaves out the row of the first sample only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_dist.torch_private import has_forward_hook, transforms_are_active

__all__ = ["embedding", "let_padding_rest", "padded"]


def embedding(
    torchs: Callable[..., Tensor],
    weight: Tensor,
    input: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """What is looked up for the padding is a constant."""
    if padding_idx < 0:
        return torchs(weight, input, padding_idx, scale_grad_by_freq, sparse)
    return padded(torchs(weight, input, -1, scale_grad_by_freq, sparse), input, padding_idx)


def padded(looked_up: Tensor, input: Tensor, padding_idx: int) -> Tensor:
    """What was looked up, constant where the padding was."""
    return torch.where((input == padding_idx).unsqueeze(-1), looked_up.detach(), looked_up)


def let_padding_rest(module: nn.Module) -> None:
    """Let the layers of a module whose tensors have a value for each sample of a ``vmap`` do so, wherever called."""
    for part in module.modules():
        padding = isinstance(part, nn.Embedding) and part.padding_idx is not None
        if padding and not has_forward_hook(part, _keep_padding):
            part.register_forward_hook(_keep_padding)


def _keep_padding(layer: Any, args: tuple[Any, ...], made: Tensor) -> Tensor:
    if not transforms_are_active():
        return made
    return padded(made, args[0], layer.padding_idx)
