"""A call's ``device=`` → the device for its tensors, on a worker and in the caller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optree
import torch
from torch import nn

from torchopt_dist.distributed.messages.payload import Payload
from torchopt_dist.distributed.rendezvous.environment import read_world
from torchopt_dist.nn import module_clone

__all__ = ["placed", "receiving_device"]


def receiving_device(device: str | None) -> torch.device | None:
    """This worker's own GPU, if ``"auto"`` asks for it and there is one; ``None``: tensors stay where they are."""
    if device != "auto" or not torch.cuda.is_available():
        return None
    return torch.device("cuda", read_world().local_rank % torch.cuda.device_count())


def placed(payload: Payload) -> Payload:
    """A share that is not isolated, its tensors and modules on this worker's device and connected to the originals."""
    device = receiving_device(payload.options.device)
    if device is None:
        return payload

    def place(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device)
        return module_clone(leaf, by="reference", device=device) if isinstance(leaf, nn.Module) else leaf

    tasks: Any = payload.tasks
    tasks = optree.tree_map(place, tasks, none_is_leaf=True)
    return replace(payload, tasks=tasks)
