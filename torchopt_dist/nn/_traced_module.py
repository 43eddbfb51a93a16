"""A module → its copy and its parameters, in words that torch's compiler can trace; nothing here runs outside of it.

The compiler follows no ``copy.deepcopy``, and cannot compare tensors by ``id``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchopt_dist.torch_private import attributes_of, children_of, parameters_of

__all__ = ["named_parameters", "parts_of", "replace_parameters", "traced_copy"]


def traced_copy(module: nn.Module, by: str) -> nn.Module:
    """A copy of a module; attributes that are neither tensors nor modules are the original's.

    Args:
        module: the module.
        by: ``'reference'``, or ``'copy'`` for clones through which gradients flow back.

    Raises:
        NotImplementedError: its class, or another ``by``, needs more than that.
    """
    if by in ("reference", "ref"):
        return _copied(module, _itself, [])
    if by in ("copy", "clone"):
        return _copied(module, _clones(), [])
    raise NotImplementedError(f"a compiled task cannot clone a module by {by!r}")


def parts_of(module: nn.Module) -> list[nn.Module]:
    """A module and all below it, each once, in the order of ``modules()``."""
    return [part for _, part in _parts(module, "", [])]


def named_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Each parameter by the first of its names."""
    found: dict[str, Tensor] = {}
    for prefix, part in _parts(module, "", []):
        for name, tensor in parameters_of(part).items():
            if tensor is not None and not any(tensor is other for other in found.values()):
                found[prefix + name] = tensor
    return found


def replace_parameters(module: nn.Module, old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    """Put new tensors wherever the module holds the old ones of the same names."""
    for _, part in _parts(module, "", []):
        held: dict[str, Any] = parameters_of(part)
        for name in list(held):
            for other, tensor in new.items():
                if held[name] is old[other]:
                    held[name] = tensor
                    break


def _parts(module: nn.Module, prefix: str, seen: list[nn.Module]) -> list[tuple[str, nn.Module]]:
    """A module and all below it once, each with what its parameters' names begin with."""
    if any(module is other for other in seen):
        return []
    seen.append(module)
    found = [(prefix, module)]
    for name, child in children_of(module).items():
        if child is not None:
            found += _parts(child, f"{prefix}{name}.", seen)
    return found


def _copied(
    module: nn.Module, take: Callable[[Tensor], Tensor], known: list[tuple[nn.Module, nn.Module]]
) -> nn.Module:
    for old, new in known:
        if module is old:
            return new
    cls = type(module)
    if hasattr(cls, "__deepcopy__"):
        raise NotImplementedError(f"a compiled task cannot copy a {cls.__name__}, which copies itself")
    made = object.__new__(cls)
    known.append((module, made))
    for name, value in attributes_of(module).items():
        if name == "_modules":
            value = {key: None if part is None else _copied(part, take, known) for key, part in value.items()}
        elif name == "_parameters" or name == "_buffers":
            value = {key: None if tensor is None else take(tensor) for key, tensor in value.items()}
        object.__setattr__(made, name, value)
    return made


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _clones() -> Callable[[Tensor], Tensor]:
    known: list[tuple[Tensor, Tensor]] = []

    def take(tensor: Tensor) -> Tensor:
        for old, new in known:
            if tensor is old:
                return new
        known.append((tensor, tensor.clone()))
        return known[-1][1]

    return take
