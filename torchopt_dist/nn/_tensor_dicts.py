"""A module → its dicts of tensors, and new tensors → into the module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchopt_dist.core.types import TensorContainer
from torchopt_dist.torch_private import buffers_of, children_of, parameters_of

__all__ = [
    "all_containers",
    "buffer_containers",
    "has_buffers",
    "parameter_containers",
    "parts_and_parameters",
    "parts_of",
    "replace",
    "tensor_containers",
]


def parts_of(module: nn.Module) -> list[nn.Module]:
    """``list(module.modules())``, sooner."""
    parts: dict[int, nn.Module] = {}
    _add_parts(module, parts)
    return list(parts.values())


def _add_parts(part: nn.Module, parts: dict[int, nn.Module]) -> None:
    if id(part) not in parts:
        parts[id(part)] = part
        for child in children_of(part).values():
            if child is not None:
                _add_parts(child, parts)


def parameter_containers(parts: Iterable[nn.Module]) -> list[TensorContainer]:
    """The live dicts of parameters, one for each part, as ``modules()`` gives these."""
    return list(map(parameters_of, parts))


def buffer_containers(parts: Iterable[nn.Module]) -> list[TensorContainer]:
    """The live dicts of buffers, also non-persistent ones, one for each part."""
    return list(map(buffers_of, parts))


def tensor_containers(parts: Sequence[nn.Module]) -> list[TensorContainer]:
    """The live dicts of parameters, then those of buffers, one of each for each part."""
    return [*map(parameters_of, parts), *map(buffers_of, parts)]


def has_buffers(parts: Iterable[nn.Module]) -> bool:
    """Whether a part has a buffer."""
    return any(map(buffers_of, parts))


def all_containers(parts: Sequence[nn.Module]) -> list[Any]:
    """The live dicts of parameters, of buffers and of sub-modules, one of each for each part."""
    return [*map(parameters_of, parts), *map(buffers_of, parts), *map(children_of, parts)]


def parts_and_parameters(module: nn.Module) -> tuple[list[nn.Module], dict[str, Tensor]]:
    """``list(module.modules())`` and ``dict(module.named_parameters())``, by one walk in a fifth of the time."""
    if getattr(module.named_parameters, "__func__", None) is not nn.Module.named_parameters:
        return list(module.modules()), dict(module.named_parameters())
    parts: list[nn.Module] = []
    named: dict[str, Tensor] = {}
    if not _walked(module, "", parts, named, set(), nn.Module.named_modules):
        return list(module.modules()), dict(module.named_parameters())
    return parts, named


def _walked(
    part: nn.Module,
    prefix: str,
    parts: list[nn.Module],
    named: dict[str, Tensor],
    seen: set[int],
    torchs: Any,
) -> bool:
    """Add a module and all below it; false if one of them says by itself what is below it."""
    if id(part) in seen:
        return True
    if type(part).named_modules is not torchs:
        return False
    seen.add(id(part))
    parts.append(part)
    for name, tensor in parameters_of(part).items():
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            named[prefix + name] = tensor
    for name, child in children_of(part).items():
        if child is not None and not _walked(child, f"{prefix}{name}.", parts, named, seen, torchs):
            return False
    return True


def replace(parts: Iterable[nn.Module], new: Mapping[int, Tensor]) -> None:
    """Replace tensors by others wherever modules hold them, so that tied weights stay tied.

    A new parameter may be a plain tensor with a history, which assignment to an attribute would refuse.

    Args:
        parts: a module and all its sub-modules, changed in place; no tensor's memory is written.
        new: ``id`` of an old tensor → new tensor.
    """
    for part in parts:
        for container in (parameters_of(part), buffers_of(part)):
            if container:
                for name, old in container.items():
                    if (other := new.get(id(old))) is not None:
                        container[name] = other
