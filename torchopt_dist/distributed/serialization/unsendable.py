"""What could not be packed → the place of the part that is why, as the beginning of an error's text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from torchopt_dist.distributed.messages.payload import Payload
from torchopt_dist.distributed.serialization.pickling import pack
from torchopt_dist.errors import SerializationError
from torchopt_dist.pytree._containers import flatten

__all__ = ["place_in_payload", "place_in_values"]


def place_in_payload(payload: Payload, *, main_by_name: bool) -> str:
    """The place of what cannot be sent among the function and the arguments, such as ``"args[0].weight: "``."""
    named: list[tuple[str, Any]] = [("func", payload.function)]
    for args, kwargs in payload.tasks:
        named += [("args", args), ("kwargs", kwargs)]
    return _place(named, main_by_name)


def place_in_values(values: Iterable[Any]) -> str:
    """The same among the values of a reply, such as ``"result['loss']: "``."""
    return _place([("result", value) for value in values], main_by_name=True)


def _place(named: Iterable[tuple[str, Any]], main_by_name: bool) -> str:
    found, parts, seen = "", iter(named), set[int]()
    while True:  # one part deeper each time
        for path, part in parts:
            if id(part) not in seen and not _can_be_sent(part, main_by_name):
                found, parts = path, _parts(part, path)
                seen.add(id(part))
                break
        else:
            return f"{found}: " if found else ""


def _can_be_sent(part: Any, main_by_name: bool) -> bool:
    try:
        pack(part, main_by_name=main_by_name)
    except SerializationError:
        return False
    return True


def _parts(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    flat = flatten(obj, is_leaf=lambda part: isinstance(part, nn.Module), path=path)
    if flat.leaves and flat.leaves[0] is not obj:
        yield from zip(flat.paths, flat.leaves, strict=True)
    elif isinstance(obj, nn.Module):
        tensors = [*obj.named_parameters(), *obj.named_buffers()]
        for name, part in [*tensors, *obj.named_children(), *vars(obj).items()]:
            if name not in ("_parameters", "_buffers", "_modules"):
                yield f"{path}.{name}", part
    elif isinstance(obj, FunctionType):
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            yield f"`{name}` of {path}", cell.cell_contents
    elif not isinstance(obj, Tensor):
        for name, part in getattr(obj, "__dict__", {}).items():
            yield f"{path}.{name}", part
