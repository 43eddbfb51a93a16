"""Another rank's failure, or SIGTERM, and the thread that runs ``main`` → ``main`` runs its ``finally`` blocks.

After another rank's failure this takes a bounded time. Schedulers send SIGTERM some time before they kill, and it is
``SystemExit`` in ``main``, so that it can still save: who sends it decides how long ``main`` has, and nothing here ends
it earlier once its ``finally`` blocks run.

The end of the process, and threads that answer calls → these threads end, before they would abort the process.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import inspect
import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from types import FrameType

import torch

from torchopt_dist.distributed.transport.shutdown import FINALLY_SECONDS, GRACE_SECONDS
from torchopt_dist.errors import TodistError
from torchopt_dist.process.signals import INTERRUPT, TERMINATED
from torchopt_dist.torch_private import exception_in, frames_of_threads

__all__ = ["LAST_SECONDS", "Interruption", "Termination", "end_threads", "is_cleaning_up", "is_in_backward"]


_EXITS = frozenset({"__exit__", "__aexit__", "__del__"})


def is_cleaning_up(frame: FrameType | None, until: FrameType | None) -> bool:
    """Whether a frame, or a caller of it before ``until``, is in a ``finally`` block or leaves a ``with`` block.

    Python does not report this where no exception is handled. The source does: the frame's line lies in such a block or
    not. It is ``False`` if there is no source.
    """
    while frame is not None and frame is not until:
        if frame.f_code.co_name in _EXITS or frame.f_lineno in _finally_lines(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=256)
def _finally_lines(filename: str) -> frozenset[int]:
    """The lines of a file's ``finally`` blocks."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    blocks = [node.finalbody for node in ast.walk(tree) if isinstance(node, (ast.Try, ast.TryStar))]
    return frozenset(
        line for block in blocks if block for line in range(block[0].lineno, (block[-1].end_lineno or 0) + 1)
    )


_POLL_SECONDS = 0.01


class Interruption:
    """Context manager around ``main``: meanwhile another thread can raise an error in the thread that runs it.

    Python raises it between two instructions, so not while ``main`` is in C code such as ``time.sleep``. While ``main``
    is in a ``finally`` block, or leaves a ``with`` block, the error waits for a limited time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._outer: BaseException | None = None
        self._frame: FrameType | None = None
        self._sent = False
        self._raised = threading.Event()

    def __enter__(self) -> None:
        self._outer = sys.exception()
        frame = inspect.currentframe()
        self._frame = None if frame is None else frame.f_back
        # A frame in a variable of its own stays until the next garbage collection, and all that called it too.
        del frame
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._thread = self._frame = None
        if self._sent and not self._raised.is_set():  # the error would be raised after ``main``
            _raise_in(threading.get_ident(), None)

    @property
    def runs_main(self) -> bool:
        """Whether ``main`` runs."""
        return self._thread is not None

    def can_raise(self) -> bool:
        """In the thread that runs ``main``: whether it may be interrupted here."""
        return not self.is_unwinding() and not self._is_cleaning_up()

    def raise_later(self, error: BaseException, unwound: threading.Event) -> None:
        """Raise ``error`` in ``main`` as soon as it may be interrupted, unless it ends before, or has been."""
        while not unwound.wait(_POLL_SECONDS):
            if not self.is_unwinding() and self._interrupt(error):
                return

    def unwind(self, error: TodistError, unwound: threading.Event) -> bool:
        """End ``main`` by ``error``, unless an exception is ending it already; returns whether it has ended in time.

        It has ``GRACE_SECONDS``, and, if it runs Python code, such as a ``finally`` block, ``FINALLY_SECONDS`` more.
        """
        if _wait_briefly(unwound):
            return True
        end = time.monotonic() + FINALLY_SECONDS
        while not self.is_unwinding() and not self._interrupt(error):
            if time.monotonic() > end or unwound.wait(_POLL_SECONDS):
                return unwound.is_set()
        if _wait_briefly(unwound):
            return True
        return self.is_unwinding() and unwound.wait(end - time.monotonic())

    def is_unwinding(self) -> bool:
        """Whether ``main`` handles an exception, as in a ``finally`` block, or has been interrupted by one."""
        thread = self._thread
        handled = None if thread is None else exception_in(thread)
        return self._raised.is_set() or (handled is not None and handled is not self._outer)

    def _is_cleaning_up(self) -> bool:
        """Whether ``main`` is in a clean-up block that must not be interrupted."""
        thread = self._thread
        return thread is not None and is_cleaning_up(frames_of_threads().get(thread), self._frame)

    def _interrupt(self, error: BaseException) -> bool:
        """Raise the error in ``main``, unless it is in such a block; returns whether there is no more to do."""
        if self._is_cleaning_up():
            return False
        with self._lock:
            if self._thread is None or self._sent:
                return True
            self._sent = True
            _raise_in(self._thread, _class_of(error, self._raised))
            if self._is_cleaning_up() and not self._raised.is_set():  # it has gone on meanwhile
                _raise_in(self._thread, None)
                self._sent = self._raised.is_set()
            return self._sent


def end_threads(threads: Iterable[threading.Thread], seconds: float) -> list[threading.Thread]:
    """End threads that run Python code, by a ``SystemExit``; returns those left after so many seconds, as in C code.

    Where the interpreter ends first, Python ends a daemon thread by C's ``pthread_exit`` as soon as it takes the
    interpreter lock. In C++ code of torch, such as a backward that calls Python, that aborts the process.
    """
    end = time.monotonic() + seconds
    alive = [each for each in threads if each.is_alive() and each is not threading.current_thread()]
    for thread in alive:
        assert thread.ident is not None
        _raise_in(thread.ident, SystemExit)
    for thread in alive:
        thread.join(max(0.0, end - time.monotonic()))
    return [thread for thread in alive if thread.is_alive()]


def is_in_backward(thread: threading.Thread) -> bool:
    """Whether a thread runs torch's autograd engine, or waits for it."""
    frame = None if thread.ident is None else frames_of_threads().get(thread.ident)
    while frame is not None and frame.f_globals.get("__name__") != torch.autograd.__name__:
        frame = frame.f_back
    return frame is not None


def _class_of(error: BaseException, raised: threading.Event) -> type[BaseException]:
    """A class whose instances are like ``error`` and set ``raised``: only a class can be raised in another thread."""
    kind: type[BaseException] = type(error)

    def initialize(self: BaseException) -> None:
        kind.__init__(self, *error.args)
        vars(self).update(vars(error))
        raised.set()

    def reduce(self: BaseException) -> tuple[object, ...]:
        return kind, self.args, vars(self)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}  # as users see it
    return type(kind.__name__, (kind,), {**names, "__init__": initialize, "__reduce__": reduce})


def _wait_briefly(event: threading.Event) -> bool:
    """Wait for half of ``GRACE_SECONDS``, counted in short waits: where threads wait for a core, each takes longer."""
    return any(event.wait(_POLL_SECONDS) for _ in range(round(GRACE_SECONDS / 2 / _POLL_SECONDS)))


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise a ``kind`` in a thread; with ``None``, cancel an exception that has not been raised there yet."""
    argument = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), argument)


LAST_SECONDS = 600.0
"""How long a rank that was told to end waits for rank 0, at most. Who has told them to end kills both before that."""


class Termination:
    """Context manager, in the thread that runs ``main``: meanwhile SIGTERM raises there, once, when it can.

    Programs that handle SIGTERM themselves are left alone, and so are the workers of a launch, which their agent
    interrupts, and a ``main`` in another thread than Python's first one, which alone handles signals.

    Attributes:
        told: whether SIGTERM has come.
        waits: whether the thread may be interrupted where it does not run ``main``, since it waits for the others.
    """

    def __init__(self, interruption: Interruption, unwound: threading.Event) -> None:
        self.told, self.waits = False, True
        self._interruption, self._unwound = interruption, unwound
        self._pid = 0

    def __enter__(self) -> None:
        in_first = threading.current_thread() is threading.main_thread()
        defaults = all(signal.getsignal(each) is signal.SIG_DFL for each in (signal.SIGTERM, INTERRUPT))
        if in_first and defaults:
            self._pid = os.getpid()
            signal.signal(signal.SIGTERM, self._handle)

    def __exit__(self, *_: object) -> None:
        if self._pid and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def check(self) -> None:
        """Raise now, if it could not be done in ``main``."""
        if self.told:
            raise SystemExit(TERMINATED)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a process that was forked from this one
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.told:
            return
        self.told = True
        if self._interruption.can_raise() if self._interruption.runs_main else self.waits:
            raise SystemExit(TERMINATED)
        if self._interruption.runs_main:
            threading.Thread(target=self._raise_later, name="todist-terminate", daemon=True).start()

    def _raise_later(self) -> None:
        self._interruption.raise_later(SystemExit(TERMINATED), self._unwound)
