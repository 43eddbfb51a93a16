"""A module with parametrizations, such as ``weight_norm`` ⇄ its pickle.

``torch.nn.utils.parametrize`` gives such a module a class of its own, which a receiver cannot find by name, and which
cannot be pickled. The receiver makes the same class by the same function, and fills in the module's attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.utils import parametrize

__all__ = ["is_parametrized", "reduced"]

_Reduced: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], Any, None, None, Callable[[Any, Any], None]]


def is_parametrized(obj: Any) -> bool:
    """Whether an object is a module whose class ``parametrize`` has made."""
    if not isinstance(obj, nn.Module):
        return False
    kind = type(obj)
    return kind.__name__ == f"Parametrized{kind.__bases__[0].__name__}" and parametrize.is_parametrized(obj)


def reduced(module: nn.Module) -> _Reduced:
    """The value that ``__reduce__`` would return."""
    parametrizations: Any = module.parametrizations
    return (
        _empty,
        (type(module).__bases__[0], tuple(parametrizations)),
        vars(module).copy(),
        None,
        None,
        _fill,
    )


def _empty(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """A module of the class that ``parametrize`` makes for these tensors, without any attribute."""
    module = base.__new__(base)
    nn.Module.__init__(module)
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.zeros(1, device="cpu")))
        parametrize.register_parametrization(module, name, nn.Identity())
    vars(module).clear()
    return module


def _fill(module: nn.Module, attributes: dict[str, Any]) -> None:
    vars(module).update(attributes)
