"""The operations of a torch optimizer's step → the same values, recorded.

A function mode sees each operation and replaces those that would cut the graph: ``detach``, ``item``, a tensor as
``alpha=``. A hyper-parameter that is a tensor is passed to the formula as a number that refers to its tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchopt_dist.core.vmap import values_of

if TYPE_CHECKING:
    from typing import Self

__all__ = ["RecordingMode", "option"]


class _Number(float):
    """A tensor of one element for a formula that needs a number; operations on it are recorded.

    torch takes no tensor with a history as ``alpha=`` or ``value=``. The ``float`` itself is nan, so that
    a formula that uses it (``math.sqrt``) gives nan. Comparisons use the tensor's value.
    """

    tensor: Tensor

    def __new__(cls, tensor: Tensor) -> Self:
        number = super().__new__(cls, math.nan)
        number.tensor = tensor
        return number

    def __neg__(self) -> _Number:
        return _Number(-self.tensor)

    __hash__ = float.__hash__


class _Option(_Number):
    """An option. Compared with 0 it is above it, so that no term is left out while a learned one passes 0."""

    def __bool__(self) -> bool:
        return True

    __hash__ = float.__hash__


def _arithmetic(function: Callable[[Any, Any], Any], reflected: bool) -> Callable[[_Number, Any], Any]:
    def compute(self: _Number, other: Any) -> Any:
        number = _kept(other)
        result = function(number, self.tensor) if reflected else function(self.tensor, number)
        return result if isinstance(other, Tensor) else _Number(result)

    return compute


def _comparison(function: Callable[[Any, Any], bool]) -> Callable[[_Number, Any], bool]:
    def compare(self: _Number, other: Any) -> bool:
        if isinstance(self, _Option) and not isinstance(other, (Tensor, _Number)) and other == 0:
            return function(1, 0)
        return bool(function(self.tensor.detach(), _tensor(other)))

    return compare


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(_Number, f"__{_name}__", _arithmetic(getattr(operator, _name), reflected=False))
    setattr(_Number, f"__r{_name}__", _arithmetic(getattr(operator, _name), reflected=True))
for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    setattr(_Number, f"__{_name}__", _comparison(getattr(operator, _name)))


def _tensor(value: Any) -> Any:
    return value.tensor if isinstance(value, _Number) else value


def _kept(value: Any) -> Any:
    """What a learned number is combined with: the graph keeps it, and the formula may overwrite it later."""
    return value.clone() if isinstance(value, Tensor) else _tensor(value)


class RecordingMode(TorchFunctionMode):
    """The operations of an optimizer's step → the same values, with derivatives."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if any(isinstance(value, _Number) for value in (*args, *kwargs.values())):
            writes = name.endswith("_") and not name.startswith("__r")
            args = (*args[:writes], *(_kept(value) for value in args[writes:]))
            kwargs = {key: _tensor(value) for key, value in kwargs.items()}
        if name == "mul_" and isinstance(args[1], Tensor) and args[1].ndim == 0:
            return func(args[0], args[1].clone())  # ASGD overwrites its `mu` next
        if name == "detach" and _is_recorded(args[0]):
            return args[0]
        if name == "item" and _is_recorded(args[0]):
            return _Number(args[0].clone())
        if name == "sign":  # cut off: its derivative is 0, and Rprop overwrites what it is taken of
            return func(args[0].detach())
        if name in {"sqrt", "sqrt_"} and _is_recorded(args[0]):
            root = _root(args[0])
            return args[0].copy_(root) if name == "sqrt_" else root
        if name in {"tensor", "as_tensor"} and isinstance(args[0], Tensor):
            return torch.as_tensor(*args, **kwargs)
        if name == "full_like" and isinstance(args[1], Tensor):
            return args[1].to(args[0]).expand_as(args[0]).clone()
        if name in {"lerp", "lerp_"} and isinstance(args[2], Tensor):
            return func(args[0], args[1], args[2].to(args[0]))
        if name in {"clamp", "clamp_"}:
            return func(args[0], *(torch.as_tensor(bound).to(args[0]) for bound in args[1:]), **kwargs)
        if name in {"add", "add_", "sub", "sub_"} and isinstance(kwargs.get("alpha"), Tensor):
            return func(args[0], args[1] * kwargs["alpha"])
        if name in {"addcmul", "addcmul_", "addcdiv", "addcdiv_"} and isinstance(kwargs.get("value"), Tensor):
            return func(args[0], args[1] * kwargs["value"], args[2])
        if isinstance(out := kwargs.get("out"), Tensor):
            del kwargs["out"]
            return out.copy_(func(*(a.clone() if a is out else a for a in args), **kwargs))
        return func(*args, **kwargs)


def _is_recorded(tensor: Tensor) -> bool:
    return values_of(tensor).values.requires_grad


def _root(tensor: Tensor) -> Tensor:
    """The square root; at 0 all its derivatives are taken to be 0.

    The true one is infinite there, and torch's chain rule multiplies it by the derivative of ``g**2``, which is 0, and
    gets nan. Where a running mean of squares is 0, so is the mean that Adam and similar optimizers divide by its root,
    and in the limit the term vanishes.
    """
    zero = tensor == 0
    return torch.where(zero, tensor.detach(), torch.where(zero, 1, tensor).sqrt())


def option(tensor: Tensor) -> _Option:
    """A hyper-parameter that is a tensor of one element → an object that a formula takes as a number."""
    return _Option(tensor.reshape(()))
