"""A module → its copy and its parameters, in words that torch's compiler can trace.

The compiler follows no ``copy.deepcopy``, and knows tensors and modules as keys, but, before 2.13, not by ``id``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_dist.nn._tensor_dicts import parameter_containers

__all__ = ["note_attributes", "replace_parameters", "traced_copy"]

_COMPILER_LISTS = torch.__version__ >= "2.13"  # by numbers: a `TorchVersion`
_names: dict[type, tuple[str, ...]] = {}
"""For each class the names of its modules' attributes, where the compiler cannot list them itself."""


def note_attributes(module: nn.Module) -> None:
    """Note the names of what a module and those below it have, for where it is copied in a trace."""
    if _COMPILER_LISTS:
        return
    for part in module.modules():
        before = _names.get(type(part), ())
        _names[type(part)] = (*before, *(name for name in vars(part) if name not in before))


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """What a module has by name, as the compiler can trace it; before 2.13 torch's lists no names of a module.

    Raises:
        NotImplementedError: the compiler cannot list them, and nobody has noted them.
    """
    if _COMPILER_LISTS:
        return module.__dict__
    if type(module) not in _names:
        raise NotImplementedError(f"the compiler of torch {torch.__version__} cannot list what a module has")
    return {name: module.__dict__[name] for name in _names[type(module)] if name in module.__dict__}


def traced_copy(module: nn.Module, by: str) -> nn.Module:
    """A copy of a module; attributes that are neither tensors nor modules are the original's.

    Args:
        module: the module.
        by: ``'reference'``, or ``'copy'`` for clones through which gradients flow back.

    Raises:
        NotImplementedError: its class, or another ``by``, needs more than that.
    """
    if by in ("reference", "ref"):
        return _copied(module, lambda tensor: tensor, {})
    if by in ("copy", "clone"):
        clones = {tensor: tensor.clone() for tensor in (*module.parameters(), *module.buffers())}
        return _copied(module, clones.__getitem__, {})
    raise NotImplementedError(f"a compiled task cannot clone a module by {by!r}")


def replace_parameters(module: nn.Module, new: dict[Tensor, Tensor]) -> None:
    """Put new tensors wherever the module holds the old ones."""
    for held in parameter_containers(module.modules()):
        for name, tensor in list(held.items()):
            if tensor is not None and tensor in new:
                held[name] = new[tensor]


def _copied(
    module: nn.Module, take: Callable[[Tensor], Tensor], known: dict[nn.Module, nn.Module]
) -> nn.Module:
    if module in known:
        return known[module]
    cls = type(module)
    if hasattr(cls, "__deepcopy__"):
        raise NotImplementedError(f"a compiled task cannot copy a {cls.__name__}, which copies itself")
    made = known[module] = object.__new__(cls)
    for name, value in _attributes_of(module).items():
        if name == "_modules":
            value = {key: None if part is None else _copied(part, take, known) for key, part in value.items()}
        elif name == "_parameters" or name == "_buffers":
            value = {key: None if tensor is None else take(tensor) for key, tensor in value.items()}
        object.__setattr__(made, name, value)
    return made
