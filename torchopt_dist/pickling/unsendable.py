"""What could not be packed → the innermost part that is why, and its place, such as ``args[0].lock``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from torchopt_dist.pickling.serialized_exception import safe_repr
from torchopt_dist.pytree._containers import flatten

__all__ = ["find_unsendable"]


def find_unsendable(
    named: Iterable[tuple[str, Any]], pack: Callable[[Any], object]
) -> tuple[str, Any, str] | None:
    """The place and the value of the first part that cannot be sent, as deep as there is one, and why.

    Args:
        named: places and values to search.
        pack: raises an exception for what cannot be sent.

    Returns:
        A place, such as ``"args[0].lock"`` or "`lock` of func", the value there, and the exception as text, which
        holds no frames; ``None`` if all can be sent.
    """
    found, parts, seen = None, iter(named), set[int]()
    while True:  # one part deeper each time
        for path, part in parts:
            if id(part) not in seen and (why := _why_not(pack, part)):
                found, parts = (path, part, why), _parts(part, path)
                seen.add(id(part))
                break
        else:
            return found


def _why_not(pack: Callable[[Any], object], part: Any) -> str:
    try:
        pack(part)
    except Exception as error:
        return f"{type(error).__name__}: {safe_repr(error, str)}"
    return ""


def _parts(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    flat = flatten(obj, is_leaf=lambda part: isinstance(part, nn.Module))
    if flat.leaves and flat.leaves[0] is not obj:
        yield from zip(flat.paths(path), flat.leaves, strict=True)
    elif isinstance(obj, nn.Module):
        tensors = [*obj.named_parameters(), *obj.named_buffers()]
        for name, part in [*tensors, *obj.named_children(), *vars(obj).items()]:
            if name not in ("_parameters", "_buffers", "_modules"):
                yield f"{path}.{name}", part
    elif isinstance(obj, FunctionType):
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            yield f"`{name}` of {path}", cell.cell_contents
        for name in obj.__code__.co_names:  # what is sent by value takes the globals along that it uses
            if name in obj.__globals__:
                yield f"the global `{name}` of {path}", obj.__globals__[name]
    elif not isinstance(obj, Tensor):
        for name, part in getattr(obj, "__dict__", {}).items():
            yield f"{path}.{name}", part
