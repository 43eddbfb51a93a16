"""A pickle as it is written ⇄ the pickle without its long ``bytes`` objects, and these apart.

The pickler hands a long ``bytes`` object to its file as it is, without a copy [PEP 574 has no rule for ``bytes``]. What
it writes otherwise comes in frames, which are shorter.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

__all__ = ["LONG", "Holes", "Writer", "reader"]

LONG = 1 << 18
"""How many bytes are long; a frame of a pickle has at most half as many."""

Holes: TypeAlias = tuple[tuple[int, int], ...]
"""Where in a pickle bytes are left out, in order, and the numbers of the tensors that lie on them."""


class Writer:
    """A file for a pickler; ``length`` is how many bytes have been written, without the long ones.

    ``number`` gives a tensor that travels beside the pickle its number; ``None`` leaves all in the pickle.
    """

    def __init__(self, number: Callable[[torch.Tensor], int] | None) -> None:
        self._number = number
        self._parts: list[bytes] = []
        self.length = 0
        self._holes: list[tuple[int, int]] = []

    def write(self, data: bytes | bytearray) -> int:
        """Take what the pickler writes."""
        part = bytes(data)  # no copy, unless these can change
        if self._number is not None and len(part) >= LONG:
            self._holes.append((self.length, self._number(_tensor_on(part))))
        else:
            self._parts.append(part)
            self.length += len(part)
        return len(part)

    def pickle(self) -> tuple[bytes, Holes]:
        """What has been written, without the long ones, and where these were."""
        self._parts = [b"".join(self._parts)]
        return self._parts[0], tuple(self._holes)


class _Memory:
    """Makes numpy treat bytes as writable, since torch warns of a tensor on read-only memory; nothing writes here."""

    def __init__(self, data: bytes) -> None:
        view = np.frombuffer(data, np.uint8)
        self.view = view
        address, _ = view.__array_interface__["data"]
        self.__array_interface__ = {**view.__array_interface__, "data": (address, False)}


def _tensor_on(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.asarray(_Memory(data)))


class _Spliced(io.RawIOBase):
    """Reads memory part after part, directly into the given buffer."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = [part for part in parts if len(part)][::-1]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if not self._parts:
            return 0
        part = self._parts.pop()
        count = min(len(part), len(buffer))
        memoryview(buffer).cast("B")[:count] = part[:count]
        if count < len(part):
            self._parts.append(part[count:])
        return count


def reader(pickled: bytes, holes: Holes, tensors: Sequence[torch.Tensor]) -> io.BufferedIOBase:
    """A file to read the whole pickle from, in which a long ``bytes`` object is copied once."""
    if not holes:
        return io.BytesIO(pickled)
    parts: list[memoryview] = []
    end = 0
    for position, number in holes:
        parts += [memoryview(pickled)[end:position], tensors[number].detach().cpu().numpy().data]
        end = position
    return io.BufferedReader(_Spliced([*parts, memoryview(pickled)[end:]]))
