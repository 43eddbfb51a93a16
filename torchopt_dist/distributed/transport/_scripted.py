"""A short request without tensors ⇄ its answer, by a TorchScript function, for which torch's RPC runs no Python code.

For a Python function torch pickles, unpickles and calls in Python code of its own, at both ends, and hands each future
from Python to C++ and back. The function here calls an operator, which is a Python function of this package, and takes
and returns texts, each character of which is a byte. It is answered in the thread of torch's that has received it, so
only workers that answer in a short time are asked in this way. This takes 100 to 150 µs off a small call of 850.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.distributed.rpc import internal  # with what torch's RPC pickles itself, RRefs as well

__all__ = [
    "ASK_AGAIN",
    "Fields",
    "ShortRequests",
    "Texts",
    "answered_by",
    "fields_of",
    "scripted",
    "texts_of",
]

SHORT_SECONDS = 2e-3
"""Less than this a short request takes; another process that gets the core meanwhile takes more."""
SHORT_IN_A_ROW = 8
"""After so many short requests the next one is taken for short, too."""

Fields: TypeAlias = tuple[Any, ...]
"""An answer: a skeleton alone; or, in more fields, what a skeleton cannot hold."""
Texts: TypeAlias = tuple[str, str, list[torch.Tensor]]
"""An answer's skeleton; or, if there is more to it, the pickle that torch makes of its fields, and its tensors."""

ASK_AGAIN: Texts = "", "", []
"""The request has not been answered, and is to be sent to a Python function."""


class ShortRequests:
    """Whether requests are short; if so, they take up at most half of torch's threads.

    The others go on receiving. So functions that never return, or calls that are nested deep, do not keep a worker from
    answering.

    Args:
        threads: how many threads torch has.
    """

    def __init__(self, threads: int) -> None:
        self._places = deque([None] * (threads // 2))
        self._in_a_row = 0

    def are_expected(self) -> bool:
        """Whether the next request is taken for short, and there is a place for it."""
        return self._in_a_row >= SHORT_IN_A_ROW and bool(self._places)

    def begin(self) -> bool:
        """Whether this thread may answer a request; if so, :meth:`end` must follow."""
        if self._in_a_row < SHORT_IN_A_ROW:
            return False
        try:
            self._places.pop()
        except IndexError:  # all are taken
            return False
        return True

    def end(self) -> None:
        """The request has been answered."""
        self._places.append(None)

    def took(self, seconds: float) -> None:
        """Count a request, wherever it was answered."""
        self._in_a_row = self._in_a_row + 1 if seconds < SHORT_SECONDS else 0


def texts_of(fields: Fields) -> Texts:
    """An answer as texts."""
    if len(fields) == 1:
        return fields[0].decode("latin-1"), "", []
    pickled, tensors = internal.serialize(fields)
    return "", pickled.decode("latin-1"), tensors


def fields_of(whole: str, tensors: list[torch.Tensor]) -> Fields:
    """The fields of the pickle that :func:`texts_of` has let torch make."""
    fields: Fields = internal.deserialize(whole.encode("latin-1"), tensors)
    return fields


def scripted() -> Any:
    """The TorchScript function; ``None`` where torch has no TorchScript, or is told not to use it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            made = torch.jit.script(_ask)
        except Exception:  # of whatever kind: then all requests go to Python functions
            return None
    return made if isinstance(made, torch.jit.ScriptFunction) else None


_library = torch.library.Library("torchopt_dist_rpc", "DEF")
_library.define("answer(str request) -> (str, str, Tensor[])")


def answered_by(answer: Callable[[str], Texts]) -> None:
    """Let this function answer the requests of the TorchScript function; once in a process."""
    _library.impl("answer", answer, "CompositeExplicitAutograd")


def _ask(request: str) -> tuple[str, str, list[torch.Tensor]]:
    """In TorchScript."""
    skeleton, whole, tensors = torch.ops.torchopt_dist_rpc.answer(request)
    return skeleton, whole, tensors
