"""Names for the kinds of arguments: trees of tensors, schedules, states, samplers, linear solvers.

They stand on the ground, where every file may import them; users find them in ``torchopt_dist.typing``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed.rpc
from optree.typing import PyTree
from torch import Size, Tensor, nn

if TYPE_CHECKING or torch.distributed.rpc.is_available():
    from torch.distributed.rpc import RRef
else:

    class RRef:
        """Stands in where torch is built without RPC; nothing is one."""


__all__ = [
    "Args",
    "CopyMode",
    "Device",
    "KwArgs",
    "LinearSolver",
    "ModuleTensorContainers",
    "Numeric",
    "OptState",
    "OptionalTensor",
    "Params",
    "PerLeaf",
    "PyTree",
    "RRef",
    "Samplable",
    "SampleFunc",
    "Scalar",
    "ScalarOrSchedule",
    "Schedule",
    "TensorContainer",
    "TensorOrTensors",
    "TensorTree",
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
PerLeaf: TypeAlias = Mapping[str, Numeric] | nn.ParameterDict | Sequence[Numeric]
"""A tree of the parameters' structure: for each a number, or a tensor, which may have the parameter's shape."""
ScalarOrSchedule: TypeAlias = Scalar | Tensor | Schedule | PerLeaf
"""A constant (a tensor may require grad), a schedule, or a constant for each parameter."""

OptionalTensor: TypeAlias = Tensor | None
"""A tensor, or ``None`` where there is none, such as the gradient of a frozen parameter."""
TensorOrTensors: TypeAlias = Tensor | Sequence[Tensor]
"""One tensor, or a sequence of them."""

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

LinearSolver: TypeAlias = Callable[[Callable[[TensorTree], TensorTree], TensorTree], TensorTree]
"""``solve(matvec, b)`` → ``x`` with ``matvec(x) = b``: ``matvec`` is linear, all three are trees of one structure."""

SampleFunc: TypeAlias = Callable[[Size], Tensor | Sequence[Numeric]]
"""The shape of a batch → that many samples."""


@runtime_checkable
class Samplable(Protocol):
    """An object to draw samples from, such as a ``torch.distributions.Distribution``.

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
