"""A skeleton, and what travels beside it → the object; the functions that stand in a skeleton for what is beside it."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from torchopt_dist.core.types import TensorContainer
from torchopt_dist.distributed.messages.references import ConnectedRRef

__all__ = [
    "CopiedModule",
    "Held",
    "Unpickler",
    "array",
    "copied",
    "held",
    "itself",
    "module",
    "reference",
    "tensor",
]

Held: TypeAlias = Callable[..., torch.Tensor]
"""What finds a leaf on a worker's own tensor; see ``HeldLeaves``."""


class Unpickler(pickle.Unpickler):
    """Rebuilds an object; ``arrived`` has the RRefs in it that are connected to its call."""

    def __init__(
        self,
        pickled: bytes,
        tensors: list[torch.Tensor],
        structures: Sequence[bytes] = (),
        references: Sequence[Any] = (),
        find_held: Held | None = None,
    ) -> None:
        self._file, self._size = io.BytesIO(pickled), len(pickled)
        super().__init__(self._file)
        self.arrived: list[ConnectedRRef] = []
        # What is found is kept in the memo. Nothing there may refer to the unpickler: all that it has rebuilt would be
        # part of a cycle, and its tensors would stay until the garbage collector comes.
        self._found = {
            "tensor": tensors.__getitem__,
            "module": functools.partial(_rebuilt, structures, tensors, find_held),
            "copied": functools.partial(_filled, references, tensors),
            "held": find_held or held,
            "reference": functools.partial(_referred, references, self.arrived),
        }

    def load(self) -> Any:
        """Rebuild the object, and then the global variables of its functions that were left for the end."""
        value = super().load()
        while self._file.tell() < self._size:
            for function, variables in super().load():
                function.__globals__.update(variables)
        return value

    def find_class(self, module: str, name: str, /) -> Any:
        if module == __name__ and name in self._found:
            return self._found[name]
        return super().find_class(module, name)


def tensor(number: int) -> torch.Tensor:
    """In a pickle: the tensor with this number, which an :class:`Unpickler` finds."""
    raise NotImplementedError(number)


def held(*staying: Any) -> torch.Tensor:
    """In a pickle: a leaf on a worker's own tensor, which an :class:`Unpickler` finds."""
    raise NotImplementedError(staying)


def module(structure: int, numbers: tuple[int, ...]) -> nn.Module:
    """In a pickle: a module, by the numbers of its structure and its tensors, which an :class:`Unpickler` finds."""
    raise NotImplementedError(structure, numbers)


def _rebuilt(
    structures: Sequence[bytes],
    tensors: list[torch.Tensor],
    find_held: Held | None,
    structure: int,
    numbers: tuple[int, ...],
) -> nn.Module:
    own = [tensors[number] for number in numbers]
    found: nn.Module = Unpickler(structures[structure], own, find_held=find_held).load()
    return found


class CopiedModule(NamedTuple):
    """The copy of a module that stays in its process, beside a pickle; it is handed out once."""

    module: nn.Module
    places: list[tuple[TensorContainer, str, int]]
    """A dictionary of the module, a name in it, and which of the module's tensors is there."""


def copied(number: int, numbers: tuple[int, ...]) -> nn.Module:
    """In a pickle: a :class:`CopiedModule`, by its number and those of its tensors, which an Unpickler finds."""
    raise NotImplementedError(number, numbers)


def _filled(
    references: Sequence[Any], tensors: list[torch.Tensor], number: int, numbers: tuple[int, ...]
) -> nn.Module:
    found: CopiedModule = references[number]
    for container, name, place in found.places:
        container[name] = tensors[numbers[place]]
    return found.module


def reference(number: int, *carried: Any) -> Any:
    """In a pickle: the reference with this number, and what travels with it, which an :class:`Unpickler` finds."""
    raise NotImplementedError(number, carried)


def _referred(references: Sequence[Any], arrived: list[ConnectedRRef], number: int, *carried: Any) -> Any:
    if not carried:
        return references[number]
    arrived.append(ConnectedRRef(references[number], *carried))
    return arrived[-1]


def array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """In a pickle: the array of numpy on a tensor's memory."""
    return tensor.cpu().numpy()


def itself(module: nn.Module) -> nn.Module:
    """In a pickle: the module that another one represents."""
    return module
