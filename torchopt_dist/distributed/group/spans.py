"""The work of this worker for calls → spans with start and end, while a profile is on; ranges of ``torch.profiler``.

A span is recorded where the work is done, under the name of a phase:

===============  ========  =========================================================================
phase            where     from → to
===============  ========  =========================================================================
``pack``         caller    a payload, or results' gradients → the message to one worker
``send``         caller    the message → the network has it
``wait``         caller    all is sent and done here → the last reply has come
``unpack``       caller    a reply's message → its values
``wait back``    caller    a backward has nothing else to do → a worker's gradients have come
``receive``      worker    a request's message → tensors and objects
``run``          worker    the tasks → their values; on the caller its own share
``backward``     worker    the results' gradients → the arguments'
``reply``        worker    values → the reply's message
===============  ========  =========================================================================
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Literal, NamedTuple, ParamSpec, Self, TypeAlias, TypeVar, get_args

from torch.profiler import record_function

from torchopt_dist import torch_private
from torchopt_dist.distributed.messages.message import Message

__all__ = ["PHASES", "Phase", "Recorder", "Span", "Spanned"]

Phase: TypeAlias = Literal[
    "pack", "send", "wait", "unpack", "wait back", "receive", "run", "backward", "reply"
]
PHASES: tuple[Phase, ...] = get_args(Phase)


P = ParamSpec("P")
T = TypeVar("T")


class Span(NamedTuple):
    """One piece of work: who did what, from when to when in seconds, in a thread whose number is unique on the worker.

    ``call`` is the key of the call or the backward, ``None`` while several are waited for; ``peer`` is the worker at
    the other end, if there is one; ``size`` are the bytes of the message that was made, if one was.
    """

    worker: int
    phase: Phase
    start: float
    end: float
    thread: int
    call: tuple[int, int] | None = None
    peer: int | None = None
    size: int = 0


class Spanned:
    """Context manager around a piece of work; this one does nothing."""

    def made(self, message: Message) -> Message:
        """Record the message that the work has made, and return it."""
        return message

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Recorder:
    """The spans of one worker; its ``profile`` has whether spans are recorded, and those that were."""

    _off = Spanned()
    _phases: Collection[Phase] = frozenset(PHASES)

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.profile = _Profile()

    def only(self, *phases: Phase) -> Recorder:
        """A recorder of the same worker that records work of these phases alone."""
        recorder = Recorder(self.worker)
        recorder.profile = self.profile
        recorder._phases = phases
        return recorder

    def start(self) -> None:
        """Record from now on; spans of an earlier profile are dropped."""
        self.profile.spans = []
        self.profile.on = True

    def stop(self) -> list[Span]:
        """Stop recording; returns the spans in the order of their ends."""
        self.profile.on = False
        spans, self.profile.spans = self.profile.spans, []
        return spans

    def span(self, phase: Phase, call: tuple[int, int] | None = None, peer: int | None = None) -> Spanned:
        """Context manager: its body is recorded, if a profile is on here or ``torch.profiler`` is."""
        if phase not in self._phases or not (self.profile.on or torch_private.profiler_is_on()):
            return self._off
        return _Recorded(self, phase, call, peer)

    def record(
        self,
        phase: Phase,
        call: tuple[int, int] | None,
        peer: int | None,
        work: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """``work(*args, **kwargs)``, recorded as by :meth:`span`; if it is a message, its bytes are counted."""
        if not (self.profile.on or torch_private.profiler_is_on()):
            return work(*args, **kwargs)
        with self.span(phase, call, peer) as span:
            made = work(*args, **kwargs)
            if isinstance(made, Message):
                span.made(made)
            return made

    def add(
        self, phase: Phase, start: float, call: tuple[int, int] | None, peer: int | None, size: int = 0
    ) -> None:
        """Keep a span that ends now; it is dropped when the profile has ended."""
        if self.profile.on and phase in self._phases:
            end, thread = time.perf_counter(), threading.get_native_id()
            self.profile.spans.append(Span(self.worker, phase, start, end, thread, call, peer, size))


class _Profile:
    """The spans of a profile, if one is on."""

    def __init__(self) -> None:
        self.on = False
        self.spans: list[Span] = []


class _Recorded(Spanned):
    """Keeps the span of the work."""

    def __init__(
        self, recorder: Recorder, phase: Phase, call: tuple[int, int] | None, peer: int | None
    ) -> None:
        self._recorder = recorder
        self._phase = phase
        self._call = call
        self._peer = peer
        self._size = 0
        self._range = record_function(f"todist::{phase}")

    def made(self, message: Message) -> Message:
        """Count the bytes of the message that the work has made."""
        self._size = message.nbytes()
        return message

    def __enter__(self) -> Self:
        self._range.__enter__()
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.add(self._phase, self._start, self._call, self._peer, self._size)
        self._range.__exit__(kind, error, trace)
