"""Tensors of a step → kept in memory, on the CPU or in a folder, until they are read for the last time."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from torchopt_dist import pytree

__all__ = ["Store", "bytes_of", "number_of_bytes"]


T = TypeVar("T")


class Store:
    """Keeps what a way back needs.

    Args:
        where: ``None`` for memory, the tensors themselves; ``'cpu'`` for copies there; otherwise a folder, in which
            each is a file until it is no longer needed.
    """

    def __init__(self, where: str | Path | None) -> None:
        self._where = where

    @property
    def copies(self) -> bool:
        """Whether what is kept has its own memory."""
        return self._where is not None

    def keep(self, value: T) -> Callable[[], T]:
        """Keep a tree of tensors; the function returned gives it back, as often as it is called."""
        if self._where is None:
            return lambda: value
        parts: Any = value
        leaves, spec = pytree.flatten(parts)
        devices = [leaf.device if isinstance(leaf, Tensor) else None for leaf in leaves]
        cpu = [leaf.to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        kept = cpu if self._where == "cpu" else _File(Path(self._where), cpu)
        del cpu

        def give() -> T:
            held = kept.read() if isinstance(kept, _File) else kept
            back = [leaf if at is None else leaf.to(at) for leaf, at in zip(held, devices, strict=True)]
            return cast("T", pytree.unflatten(spec, back))

        return give


class _File:
    """A list in a file, which is removed with the last reference to it."""

    def __init__(self, folder: Path, leaves: list[Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix="step-", suffix=".pt")
        self._path = Path(name)
        weakref.finalize(self, self._path.unlink, missing_ok=True)
        with open(descriptor, "wb") as file:
            torch.save(leaves, file)

    def read(self) -> list[Any]:
        leaves: list[Any] = torch.load(self._path, weights_only=True)
        return leaves


def bytes_of(tensors: Iterable[Any]) -> int:
    """How many bytes tensors take together; one that occurs twice counts once."""
    held = {id(tensor): tensor for tensor in tensors if isinstance(tensor, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())


_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def number_of_bytes(memory: int | str) -> int:
    """``"2GiB"``, ``"500 MB"`` or a number → a number of bytes.

    Raises:
        TypeError: it is neither a number nor a string.
        ValueError: it has no such unit, or is not above 0.
    """
    if isinstance(memory, bool) or not isinstance(memory, (int, str)):
        raise TypeError(
            f"`memory` must be a number of bytes or a string like '2GiB', got {type(memory).__name__}"
        )
    if isinstance(memory, int):
        count = memory
    else:
        text = memory.strip()
        unit = text.lstrip("0123456789. ")
        try:
            count = int(float(text.removesuffix(unit)) * _UNITS[unit])
        except (KeyError, ValueError):
            raise ValueError(
                f"`memory` must be like '2GiB', in {', '.join(_UNITS)}, got {memory!r}"
            ) from None
    if count <= 0:
        raise ValueError(f"`memory` must be above 0, got {memory!r}")
    return count
