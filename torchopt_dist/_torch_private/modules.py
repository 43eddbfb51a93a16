"""Modules of ``torch.nn``: the dictionaries in which they keep what is theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchopt_dist.typing import TensorContainer


def parameters_of(module: nn.Module) -> TensorContainer:
    """The dictionary in which a module keeps its own parameters, sub-modules' not among them.

    A tensor with a history can be put in; assigning one to the module's attribute is refused by torch.

    Raises:
        RuntimeError: the name is missing; then no module can be cloned, recovered or stepped differentiably.
    """
    parameters: TensorContainer = _dictionary(module, "_parameters")
    return parameters


def set_parameters(module: nn.Module, parameters: TensorContainer) -> None:
    """Put another dictionary in the place of :func:`parameters_of`, and fail as it does without the name."""
    parameters_of(module)
    vars(module)["_parameters"] = parameters


def buffers_of(module: nn.Module) -> TensorContainer:
    """The dictionary in which a module keeps its own buffers; otherwise as :func:`parameters_of`."""
    buffers: TensorContainer = _dictionary(module, "_buffers")
    return buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dictionary in which a module keeps its own sub-modules; otherwise as :func:`parameters_of`."""
    children: dict[str, nn.Module | None] = _dictionary(module, "_modules")
    return children


def _dictionary(module: nn.Module, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        raise RuntimeError(
            f"torchopt_dist needs the attribute `{name}` of torch.nn.Module, which a {type(module).__name__} does not "
            f"have in torch {torch.__version__}: use another version of torch"
        ) from None
