"""Tensors of steps → kept in memory, on the CPU or in a folder, until they are read last; and of which steps."""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.graphs import bytes_behind
from torchopt_dist.diff.adjoints._ranks import Ranks

__all__ = ["Store", "bytes_of", "lengths", "number_of_bytes", "unit_of"]


T = TypeVar("T")


class Store:
    """Keeps what a way back needs.

    Args:
        where: ``None`` for memory, the tensors themselves; ``'cpu'`` for copies there; otherwise a folder, in which
            each is a file until it is no longer needed.
        ranks: those that keep a part each of what is the same on all of them; ``None``: all is kept here.
    """

    def __init__(self, where: str | Path | None, ranks: Ranks | None = None) -> None:
        self._where, self._ranks = where, ranks

    @property
    def copies(self) -> bool:
        """Whether what is kept has its own memory."""
        return self._where is not None or self._ranks is not None

    def keep(self, value: T) -> Callable[[], T]:
        """Keep a tree of tensors; the function returned gives it back, as often as it is called."""
        give: Callable[[], T] = (
            self._kept(value) if self._ranks is None else self._kept_in_parts(value, self._ranks)
        )
        return give

    def _kept_in_parts(self, value: Any, ranks: Ranks) -> Callable[[], Any]:
        """As :meth:`keep`, on all ranks; the function gathers what the others have, so that all have to call it."""
        leaves, spec = pytree.flatten(value)
        whole = {id(buffer) for buffer in value.buffers}  # each rank's own
        parted: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in whole and _is_worth_parting(leaf):
                parted.setdefault((leaf.dtype, leaf.device), {})[id(leaf)] = leaf
        alike = [
            {name: (leaf.shape, leaf.requires_grad) for name, leaf in of.items()} for of in parted.values()
        ]
        sizes = [sum(leaf.numel() for leaf in of.values()) for of in parted.values()]
        parts = self._kept([ranks.part([leaf.detach() for leaf in of.values()]) for of in parted.values()])
        names = [id(leaf) for leaf in leaves]
        found = {name for of in alike for name in of}
        rest = [
            None if name in found else _as_it_is_now(leaf) if isinstance(leaf, Tensor) else leaf
            for name, leaf in zip(names, leaves, strict=True)
        ]

        def give() -> Any:
            back: dict[int, Tensor] = {}
            for of, size, part in zip(alike, sizes, parts(), strict=True):
                pieces = ranks.whole(part, size).split([shape.numel() for shape, _ in of.values()])
                for (name, (shape, wants)), piece in zip(of.items(), pieces, strict=True):
                    # In memory of its own: a dual of a part of a vector has a tangent of the vector's size.
                    back[name] = piece.clone().view(shape).requires_grad_(wants)
            return pytree.unflatten(
                spec, [back.get(name, leaf) for name, leaf in zip(names, rest, strict=True)]
            )

        return give

    def _kept(self, value: Any) -> Callable[[], Any]:
        if self._where is None:
            return lambda: value
        leaves, spec = pytree.flatten(value)
        devices = [leaf.device if isinstance(leaf, Tensor) else None for leaf in leaves]
        cpu = [leaf.to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        kept = cpu if self._where == "cpu" else _File(Path(self._where), cpu)
        del cpu

        def give() -> Any:
            held = kept.read() if isinstance(kept, _File) else kept
            back = [leaf if at is None else leaf.to(at) for leaf, at in zip(held, devices, strict=True)]
            return pytree.unflatten(spec, back)

        return give


def _is_worth_parting(tensor: Tensor) -> bool:
    """Whether a tensor has numbers of its own, and more than one; not one that is repeated."""
    return (
        (tensor.is_floating_point() or tensor.is_complex())
        and tensor.numel() > 1
        and not _is_repeated(tensor)
    )


def _is_repeated(tensor: Tensor) -> bool:
    return tensor.ndim > 0 and not any(tensor.stride())


def _as_it_is_now(tensor: Tensor) -> Tensor:
    """The same numbers: an optimizer may count its steps in place, but writes to nothing that is repeated."""
    return tensor.detach() if _is_repeated(tensor) else tensor.detach().clone()


class _File:
    """A list in a file, which is removed with the last reference to it."""

    def __init__(self, folder: Path, leaves: list[Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix="step-", suffix=".pt")
        self._path = Path(name)
        weakref.finalize(self, self._path.unlink, missing_ok=True)
        try:
            with open(descriptor, "wb") as file:
                torch.save(leaves, file)
        except (OSError, RuntimeError) as error:  # torch's own, where the disk is full
            raise OSError(
                f"`store` must be a folder with room for the snapshots: one of {bytes_of(leaves):,} bytes could not be "
                f"written to {folder}, where {shutil.disk_usage(folder).free:,} bytes are free"
            ) from error

    def read(self) -> list[Any]:
        try:
            leaves: list[Any] = torch.load(self._path, weights_only=True)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"`store` must be left alone until the gradient has been computed: {self._path} is gone"
            ) from error
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


SMALL = 1 << 24
"""Bytes of recorded steps that are no matter: so many steps as these are recorded together."""
OF_LOSS = 4
"""The graph of a recorded step takes about so many times that of its loss."""


def lengths(units: int, slots: int, *, again: bool) -> list[int]:
    """How many units each segment has, the first one first, so that the fewest steps are run again.

    Args:
        units: how many there are.
        slots: how many starts can be kept, that of the first segment among them. The segments have one less from each
            to the next.
        again: whether the last segment is gone through at once, as one unit that needs no slot.
    """
    slots = min(slots, units)
    r = 1
    while math.comb(slots + r, slots) - (not again) < units:
        r += 1
    least = [math.comb(left + r - 2, left) for left in range(slots, 0, -1)]
    most = [math.comb(left + r - 1, left) for left in range(slots, 0, -1)]
    rest = units - again - sum(least)
    for place in reversed(range(slots)):
        more = min(max(rest, 0), most[place] - least[place])
        least[place] += more
        rest -= more
    for place in range(slots):  # where there are fewer units than the least
        less = min(max(-rest, 0), least[place])
        least[place] -= less
        rest += less
    return [*least, *[1] * again]


def unit_of(loss: Tensor, own: int, steps: int) -> int:
    """How many steps are recorded together: one, or a few that are small.

    Args:
        loss: that of a step, with its graph.
        own: how many bytes the tensors take that a step starts from.
        steps: how many steps the loop has.
    """
    return max(1, min(SMALL // max(1, OF_LOSS * (bytes_behind(loss) + own)), math.isqrt(steps)))
