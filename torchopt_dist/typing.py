"""Names for the shapes of arguments: trees of tensors, schedules, partition functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from optree.typing import PyTree
from torch import Size, Tensor
from torch.futures import Future

__all__ = [
    "Args",
    "CopyMode",
    "Device",
    "Future",
    "KwArgs",
    "ListOfOptionalTensors",
    "ListOfTensors",
    "ModuleTensorContainers",
    "Numeric",
    "OptState",
    "OptionalTensor",
    "OptionalTensorOrOptionalTensors",
    "Params",
    "PyTree",
    "Scalar",
    "ScalarOrSchedule",
    "Schedule",
    "SequenceOfOptionalTensors",
    "SequenceOfTensors",
    "Size",
    "Tensor",
    "TensorContainer",
    "TensorOrTensors",
    "TensorTree",
    "TupleOfOptionalTensors",
    "TupleOfTensors",
    "Updates",
]

Scalar: TypeAlias = float | int | bool
"""A Python number."""
Numeric: TypeAlias = Tensor | Scalar
"""A tensor or a Python number."""
Device: TypeAlias = torch.device | str | int
"""Anything that ``torch.device`` accepts."""
Schedule: TypeAlias = Callable[[Numeric], Numeric]
"""Step count (from 0) → value, such as a learning rate."""
ScalarOrSchedule: TypeAlias = Scalar | Tensor | Schedule
"""A constant (a tensor may require grad) or a schedule."""

OptionalTensor: TypeAlias = Tensor | None
ListOfTensors: TypeAlias = list[Tensor]
TupleOfTensors: TypeAlias = tuple[Tensor, ...]
SequenceOfTensors: TypeAlias = Sequence[Tensor]
TensorOrTensors: TypeAlias = Tensor | Sequence[Tensor]
ListOfOptionalTensors: TypeAlias = list[OptionalTensor]
TupleOfOptionalTensors: TypeAlias = tuple[OptionalTensor, ...]
SequenceOfOptionalTensors: TypeAlias = Sequence[OptionalTensor]
OptionalTensorOrOptionalTensors: TypeAlias = OptionalTensor | Sequence[OptionalTensor]

TensorTree: TypeAlias = Any
"""A pytree (see ``optree``) whose leaves are tensors."""
Params: TypeAlias = TensorTree
"""A pytree of parameters."""
Updates: TypeAlias = TensorTree
"""A pytree of the parameters' structure: gradients, or what is to be added to the parameters."""
OptState: TypeAlias = Any
"""The state of a gradient transformation: a pytree."""
TensorContainer: TypeAlias = dict[str, Tensor | None]
"""The parameters or the buffers of one module, by name, its sub-modules' not counted."""
ModuleTensorContainers: TypeAlias = tuple[TensorContainer, ...]
"""One container a module, in the order of ``module.modules()``."""

CopyMode: TypeAlias = Literal["reference", "copy", "deepcopy", "ref", "clone"]
"""How tensors are taken over: the same tensor, a differentiable clone, or a detached leaf copy."""

Args: TypeAlias = tuple[Any, ...]
KwArgs: TypeAlias = dict[str, Any]
