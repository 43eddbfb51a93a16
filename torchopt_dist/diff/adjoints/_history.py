"""What a loop was at some of its steps → a folder, for a later process that goes back through the same loop.

``loop.json`` says of which loop the history is, and ``start-<n>.pt`` is what step ``n`` starts from; the last one is
what the loop ended with. A file is written under another name and renamed, so there is none that is half written,
unless the machine itself has failed. What is there is never written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.rows import of_rows, rows_of
from torchopt_dist.core.types import OptionalTensor, OptState
from torchopt_dist.core.vjp import plus
from torchopt_dist.diff.adjoints._carry import Carry
from torchopt_dist.diff.adjoints._loop import Loop
from torchopt_dist.diff.adjoints._store import bytes_of
from torchopt_dist.errors import CheckpointError

__all__ = ["History", "WayBack"]

EVERY = 60.0
"""Seconds from one time that a way back is kept to the next."""

_LOOP, _WRITING = "loop.json", ".writing-"
_PLAIN = (Tensor, bool, int, float, str, type(None))


class History:
    """The history of one loop.

    Args:
        folder: where it lies, or is to lie.
        loop: the loop.
    """

    def __init__(self, folder: Path, loop: Loop) -> None:
        self._folder, self._first = folder, loop.first
        self._like, self._spec = pytree.flatten(loop.first.state)
        self._params = [loop.first.params[place] for place in loop.model.moved_places]
        self._of = _description(loop)

    def plan(self) -> tuple[int, dict[int, int]] | None:
        """How many steps are recorded together, and where segments end with how many slots; ``None`` if it is empty.

        Raises:
            ValueError: the history is another loop's.
            CheckpointError: it cannot be read.
        """
        path = self._folder / _LOOP
        try:
            said = json.loads(path.read_text("utf-8"))
            of, unit, ends = said["of"], int(said["unit"]), {int(end): n for end, n in said["ends"].items()}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._torn(path, error) from error
        for name, own in self._of.items():
            if of.get(name) != own:
                raise ValueError(
                    f"`store` must be a folder of this loop, with `keep`: {self._folder} has the history of one with "
                    f"{name} {of.get(name)}, and this one has {own}; give another folder, or remove it"
                    + ("; `inner_loop(..., seed=0)` has the same seed each time" if name == "seed" else "")
                )
        return unit, ends

    def begin(self, unit: int, ends: dict[int, int], first: Carry, tensors: Sequence[Tensor]) -> None:
        """Keep what the loop starts from, and say of which loop the history is."""
        self.keep(0, first, tensors, [], False)
        text = json.dumps({"of": self._of, "unit": unit, "ends": ends}, indent=1)
        self._write(_LOOP, lambda file: file.write(text.encode()), 0)

    def steps(self, ends: Iterable[int]) -> list[int]:
        """The numbers of the steps whose starts are there, in their order.

        Raises:
            CheckpointError: one is missing that was there.
        """
        names = [path.stem.removeprefix("start-") for path in self._folder.glob("start-*.pt")]
        numbers = sorted(int(name) for name in names if name.isdecimal())
        for number in (0, *ends):
            if number not in numbers and (not number or number < numbers[-1]):
                raise self._torn(self._path(number), FileNotFoundError("it is not there"))
        return numbers

    def keep(
        self, number: int, carry: Carry, tensors: Sequence[Tensor], losses: Sequence[Tensor], over: bool
    ) -> None:
        """Keep what a step starts from, unless it is there and is not the first.

        Args:
            number: of the step.
            carry: what it starts from.
            tensors: those of it that may have a gradient.
            losses: of the steps since the last one that was kept.
            over: whether the loop has ended there.
        """
        if number and self._path(number).exists():
            return
        state, spec = pytree.flatten(carry.state)
        own = {id(x) for x in tensors}
        rest = [None if id(x) in own else x for x in state]
        if spec != self._spec or not all(isinstance(x, _PLAIN) for x in rest):
            raise ValueError(
                "`keep` must be False for this optimizer, whose state does not stay a tree of tensors, numbers and "
                f"strings of one structure, {self._spec}: got {spec}"
            )
        content = {
            "tensors": list(tensors),
            "rest": rest,
            "buffers": carry.buffers,
            "losses": torch.stack([*losses]) if losses else None,
            "over": over,
        }
        leaves, structure = pytree.flatten(cast("Any", content))
        # Copies, since of a view torch saves all that it is a view of.
        cpu = [x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x for x in leaves]
        made = pytree.unflatten(structure, cpu)
        self.write(self._path(number).name, made, bytes_of(cpu))

    def tensors(self, number: int, places: Sequence[int]) -> list[Tensor]:
        """The tensors that may have a gradient of what a step starts from: parameters, the state's at ``places``."""
        like = [*self._params, *(self._like[place] for place in places)]
        return _moved(self._read(number)["tensors"], like)

    def carry(
        self, number: int, places: Sequence[int], made: Callable[[Sequence[Tensor], Carry], Carry]
    ) -> tuple[Carry, list[Tensor], bool]:
        """What a step starts from, the losses before it, and whether the loop has ended there."""
        held = self._read(number)
        rest: OptState = pytree.unflatten(self._spec, _moved(held["rest"], self._like))
        buffers = _moved(held["buffers"], self._first.buffers)
        like = [*self._params, *(self._like[place] for place in places)]
        carry = made(_moved(held["tensors"], like), Carry(self._first.params, rest, buffers))
        losses = [] if held["losses"] is None else held["losses"].to(self._params[0].device).unbind()
        return carry, list(losses), held["over"]

    def write(self, name: str, content: Any, size: int) -> None:
        """Write a file of tensors, whole or not at all.

        Raises:
            OSError: there is no room for it.
        """
        self._write(name, lambda file: torch.save(content, file), size)

    def path(self, name: str) -> Path:
        """Where a file is."""
        return self._folder / name

    def _path(self, number: int) -> Path:
        return self._folder / f"start-{number}.pt"

    def _read(self, number: int) -> Any:
        path = self._path(number)
        try:
            return torch.load(path, weights_only=True, mmap=True)
        except Exception as error:
            raise self._torn(path, error) from error

    def _torn(self, path: Path, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"the history in {self._folder} must be whole, but {path.name} cannot be read "
            f"({type(error).__name__}: {str(error).splitlines()[0]}): remove the folder, and the loop runs again"
        )

    def _write(self, name: str, write: Callable[[IO[bytes]], object], size: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self._folder, prefix=_WRITING)
        try:
            with open(descriptor, "wb") as file:
                write(file)
                file.flush()
                os.fsync(descriptor)
            os.replace(temporary, self._folder / name)
        except (OSError, RuntimeError) as error:  # torch's own, where the disk is full
            raise OSError(
                f"`store` must be a folder with room for the history: {name}, of {size:,} bytes, could not be written "
                f"to {self._folder}, where {shutil.disk_usage(self._folder).free:,} bytes are free; what was written "
                "before is there, and the loop goes on from it"
            ) from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


class WayBack:
    """The way of one gradient back through the segments of a history, kept every so often.

    The segments that it has been through before give zeros, and the last of these what had been found there.

    Args:
        history: the history; the way's file lies beside it.
        bars: the gradients that it begins with, by which it is known again.
        wanted: the places of declared tensors whose gradients are asked for.
    """

    def __init__(self, history: History, bars: Sequence[OptionalTensor], wanted: Sequence[int]) -> None:
        rows = [None if bar is None else rows_of(bar)[0] for bar in bars]
        known = hashlib.sha256(repr([wanted, *map(_outline, rows)]).encode())
        for tensor in rows:
            known.update(b"" if tensor is None else _bytes_of(tensor))
        self._name = f"way-back-{known.hexdigest()[:16]}.pt"
        self._history, self.wanted = history, list(wanted)
        self._sums: list[OptionalTensor] = []
        self._saved: dict[str, Any] = {}
        self._written = time.monotonic()
        with contextlib.suppress(Exception):  # one that cannot be read is gone again
            self._saved = torch.load(history.path(self._name), weights_only=True, mmap=True)

    def known(self, first: int, tensors: Sequence[Tensor]) -> list[OptionalTensor] | None:
        """The gradients of a segment's tensors and of what is declared, if the way was past it; or ``None``.

        Args:
            first: the number of the segment's first step.
            tensors: those that the segment starts from.
        """
        if first < self._saved.get("first", math.inf):
            return None
        device = tensors[0].device
        if first > self._saved["first"]:  # as many at a time as there were
            zeros: list[OptionalTensor] = [
                torch.zeros_like(x)
                if like is None
                else of_rows(torch.zeros_like(like[0], device=device), like[1])
                for x, like in zip(tensors, self._saved["found"], strict=True)
            ]
            return [*zeros, *[None] * len(self._saved["sums"])]
        found, self._sums = (
            [None if x is None else of_rows(x[0].to(device), x[1]) for x in self._saved[name]]
            for name in ("found", "sums")
        )
        return found + self._sums

    def note(self, first: int, found: Sequence[OptionalTensor], sums: Sequence[OptionalTensor]) -> None:
        """Note what was found at a segment that begins with step ``first``; after the first segment it is over."""
        if first == 0:
            self._history.path(self._name).unlink(missing_ok=True)
            return
        self._sums = list(map(plus, self._sums, sums)) if self._sums else list(sums)
        if time.monotonic() - self._written < EVERY:
            return
        kept = {"found": list(map(_kept_rows, found)), "sums": list(map(_kept_rows, self._sums))}
        try:
            self._history.write(
                self._name, {"first": first, **kept}, bytes_of(pytree.flatten(cast("Any", kept))[0])
            )
        except OSError as error:
            warnings.warn(
                f"the way back could not be kept, and begins anew if it is cut off: {error}", stacklevel=2
            )
        self._written = time.monotonic()


def _kept_rows(tensor: OptionalTensor) -> tuple[Tensor, bool] | None:
    if tensor is None:
        return None
    rows, batched = rows_of(tensor)
    return rows.detach().to("cpu", copy=True), batched


def _moved(values: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Values to the devices of others."""
    return [
        x.to(y.device) if isinstance(x, Tensor) and isinstance(y, Tensor) else x
        for x, y in zip(values, like, strict=True)
    ]


def _description(loop: Loop) -> dict[str, Any]:
    """What two loops must have in common to have one history, as far as that can be known before they run."""
    state, spec = pytree.flatten(loop.first.state)
    of = {
        "parameters": loop.first.params,
        "state": state,
        "buffers": loop.first.buffers,
        "meta tensors": list(loop.declared),
    }
    numbers = hashlib.sha256()
    for values in of.values():
        for x in values:
            if isinstance(x, Tensor):
                numbers.update(_bytes_of(x))
            else:
                numbers.update(repr(x).encode())
    return {
        "steps": loop.steps,
        "seed": loop.seed,
        **{name: [_outline(x) for x in values] for name, values in of.items()},
        "structure of the state": str(spec),
        "first values": numbers.hexdigest()[:16],
    }


def _outline(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
