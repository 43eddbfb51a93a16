"""A tensor and a copy mode → its copy, the same one each time it is met; an object → the tensors that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_dist.core.types import CopyMode, Device
from torchopt_dist.core.vmap import detached, has_history

__all__ = ["TensorCopier", "deepcopy_memo", "held_tensors"]


_MODES = {
    "reference": "reference",
    "ref": "reference",
    "copy": "copy",
    "clone": "copy",
    "deepcopy": "deepcopy",
}


class TensorCopier:
    """Copies each tensor once, so that tied weights stay tied.

    Args:
        by: ``'reference'`` (``'ref'``), the tensor itself; ``'copy'`` (``'clone'``), a clone through which
            gradients flow back, recorded even under ``torch.no_grad``; ``'deepcopy'``, a leaf of its own
            memory that requires grad as the original does, an ``nn.Parameter`` for an ``nn.Parameter``.
        device: where to move the copies; if not given, they stay on the tensor's device. A moved reference is a
            copy with a history.

    Raises:
        ValueError: ``by`` is none of these.
    """

    def __init__(self, by: CopyMode, device: Device | None = None) -> None:
        if by not in _MODES:
            raise ValueError(f"`by` must be one of {', '.join(map(repr, _MODES))}, got {by!r}")
        self._mode = _MODES[by]
        self._device = None if device is None else torch.device(device)
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """Copy one tensor, or return the copy that was made of it before."""
        if self._mode == "reference" and self._device is None:
            return tensor
        if id(tensor) not in self._seen:
            self._seen[id(tensor)] = tensor, self._copy(tensor)  # the original is kept, and with it its id
        return self._seen[id(tensor)][1]

    def _copy(self, tensor: Tensor) -> Tensor:
        if self._mode == "deepcopy":
            if isinstance(tensor, nn.Parameter):
                copy = self._moved(tensor.detach().clone())
                return nn.Parameter(copy, requires_grad=tensor.requires_grad)
            with torch.enable_grad():
                moved = self._moved(tensor)
            return detached(moved, copy=True)
        with torch.enable_grad():
            return self._moved(tensor.clone() if self._mode == "copy" else tensor)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor if self._device is None else tensor.to(self._device)


_WHOLE = (str, bytes, int, float, complex, type, ModuleType, FunctionType, BuiltinFunctionType)
"""What ``deepcopy`` takes as it is."""
_COPYING = {"__deepcopy__", "__reduce__", "__reduce_ex__"}


def held_tensors(target: Any) -> Iterator[Tensor]:
    """The tensors in an object, each once."""
    seen: dict[int, Any] = {}
    waiting = [target]
    while waiting:
        one = waiting.pop()
        if one is None or isinstance(one, _WHOLE) or id(one) in seen:
            continue
        seen[id(one)] = one  # kept, and with it its id
        if isinstance(one, Tensor):
            yield one
        else:
            waiting.extend(_parts(one))


def deepcopy_memo(target: Any, take: Callable[[Tensor], Tensor]) -> dict[int, Any]:
    """A memo for ``copy.deepcopy(target, memo)`` by which tensors with a history, which it refuses, are copied.

    Args:
        target: the object that is to be copied.
        take: copies a tensor.
    """
    return {id(tensor): take(tensor) for tensor in held_tensors(target) if has_history(tensor)}


def _parts(one: Any) -> Iterator[Any]:
    if isinstance(one, Mapping):
        yield from one.keys()
        yield from one.values()
    elif isinstance(one, (list, tuple, set, frozenset)):
        yield from one
    elif isinstance(one, partial):
        yield from (one.func, one.args, one.keywords)
    elif isinstance(one, MethodType):
        yield one.__self__
    elif not _says_how_to_copy(type(one)):
        for kind in type(one).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                yield getattr(one, name, None)
    if not _says_how_to_copy(type(one)):
        yield from getattr(one, "__dict__", {}).values()


def _says_how_to_copy(kind: type) -> bool:
    """Whether the class has its own way to be copied, so that ``deepcopy`` does not look at its attributes."""
    return any(not _COPYING.isdisjoint(vars(one)) for one in kind.__mro__[:-1])
