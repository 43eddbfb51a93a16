"""A module → its dicts of tensors, and new tensors → into the module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from torchopt_dist._torch_private import buffers_of, parameters_of
from torchopt_dist.typing import TensorContainer

__all__ = ["buffer_containers", "parameter_containers", "replace"]


def parameter_containers(module: nn.Module) -> list[TensorContainer]:
    """The live dicts of parameters, one a sub-module in the order of ``modules()``, shared ones once."""
    return [parameters_of(part) for part in module.modules()]


def buffer_containers(module: nn.Module) -> list[TensorContainer]:
    """The live dicts of buffers, non-persistent ones included, one a sub-module in the order of ``modules()``."""
    return [buffers_of(part) for part in module.modules()]


def replace(parts: Iterable[nn.Module], new: Mapping[int, Tensor]) -> None:
    """Replace tensors by others wherever modules hold them, so that tied weights stay tied.

    A new parameter may be a plain tensor with a history, which assignment to an attribute would refuse.

    Args:
        parts: a module and all its sub-modules, changed in place; no tensor's memory is written.
        new: ``id`` of an old tensor → new tensor.
    """
    for part in parts:
        for container in (parameters_of(part), buffers_of(part)):
            for name, old in container.items():
                if old is not None and id(old) in new:
                    container[name] = new[id(old)]
