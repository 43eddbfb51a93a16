"""Names for the shapes of arguments: trees of tensors, schedules, partition functions, samplers, solvers.

The types of transformations and their states are on a higher floor: ``torchopt_dist.transform``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed.rpc
from optree.typing import PyTree
from torch import Size, Tensor
from torch.distributions import Distribution
from torch.futures import Future

if TYPE_CHECKING or torch.distributed.rpc.is_available():
    from torch.distributed.rpc import RRef
else:

    class RRef:
        """Stands in where torch is built without RPC; nothing is one."""


__all__ = [
    "Args",
    "CopyMode",
    "Device",
    "Distribution",
    "Future",
    "KwArgs",
    "LinearSolver",
    "ListOfOptionalTensors",
    "ListOfTensors",
    "ModuleTensorContainers",
    "Numeric",
    "OptState",
    "OptionalTensor",
    "OptionalTensorOrOptionalTensors",
    "OptionalTensorTree",
    "Params",
    "PyTree",
    "RRef",
    "Samplable",
    "SampleFunc",
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
"""A tensor, or ``None`` where there is none, such as the gradient of a frozen parameter."""
ListOfTensors: TypeAlias = list[Tensor]
"""A list of tensors."""
TupleOfTensors: TypeAlias = tuple[Tensor, ...]
"""A tuple of tensors, of any length."""
SequenceOfTensors: TypeAlias = Sequence[Tensor]
"""A list, a tuple or another sequence of tensors."""
TensorOrTensors: TypeAlias = Tensor | Sequence[Tensor]
"""One tensor, or a sequence of them."""
ListOfOptionalTensors: TypeAlias = list[OptionalTensor]
"""A list of tensors, ``None`` in some places."""
TupleOfOptionalTensors: TypeAlias = tuple[OptionalTensor, ...]
"""A tuple of tensors, ``None`` in some places."""
SequenceOfOptionalTensors: TypeAlias = Sequence[OptionalTensor]
"""A sequence of tensors, ``None`` in some places."""
OptionalTensorOrOptionalTensors: TypeAlias = OptionalTensor | Sequence[OptionalTensor]
"""One tensor, ``None``, or a sequence of these."""

TensorTree: TypeAlias = Any
"""A pytree (see ``optree``) whose leaves are tensors."""
OptionalTensorTree: TypeAlias = Any
"""A pytree whose leaves are tensors, ``None`` in some places."""
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

LinearSolver: TypeAlias = Callable[[Callable[[TensorTree], TensorTree], TensorTree], TensorTree]
"""``solve(matvec, b)`` → ``x`` with ``matvec(x) = b``: ``matvec`` is linear, all three are trees of one structure."""

SampleFunc: TypeAlias = Callable[[Size], Tensor | Sequence[Numeric]]
"""The shape of a batch → that many samples."""


@runtime_checkable
class Samplable(Protocol):
    """What can be sampled from, such as a ``torch.distributions.Distribution``.

    Example:
        >>> import torch
        >>> isinstance(torch.distributions.Normal(0.0, 1.0), Samplable)
        True
    """

    def sample(self, sample_shape: Size = ...) -> Tensor | Sequence[Numeric]:
        """Draw samples.

        Args:
            sample_shape: the shape of the batch of samples; one sample, if not given.
        """


CopyMode: TypeAlias = Literal["reference", "copy", "deepcopy", "ref", "clone"]
"""How tensors are taken over: the same tensor, a differentiable clone, or a detached leaf copy."""

Args: TypeAlias = tuple[Any, ...]
"""The positional arguments of a call."""
KwArgs: TypeAlias = dict[str, Any]
"""The keyword arguments of a call."""
