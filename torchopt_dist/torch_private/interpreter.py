"""Threads, processes and the interpreter: what a thread does, and how a process starts and ends."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing import util
from types import FrameType

import torch

profiler_is_on: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", bool)
"""Whether ``torch.profiler`` records what this thread does: torch's own function, since each phase of a call asks.

Without the name the answer is always no, as of ``bool()``: the phases of a call are no ranges in its traces.
"""


def exception_in(thread: int) -> BaseException | None:
    """The exception that a thread handles, in an ``except`` or ``finally`` block; ``thread`` is its identifier.

    Without the name there is none: a ``finally`` block that runs when another rank fails may be interrupted.
    """
    exceptions = getattr(sys, "_current_exceptions", None)
    found = None if exceptions is None else exceptions().get(thread)
    handled: BaseException | None = (
        found[1] if isinstance(found, tuple) else found
    )  # a tuple before Python 3.12
    return handled


def frames_of_threads() -> dict[int, FrameType]:
    """The frame that each thread runs, by its identifier.

    Without the name there is none: a ``finally`` block that was entered in order may be interrupted, and ``status``
    tells nothing of tasks.
    """
    found: dict[int, FrameType] = getattr(sys, "_current_frames", dict)()
    return found


def interpreter_flags() -> list[str]:
    """The options of this Python, such as ``-W error``, as the arguments of another one.

    Without the name there are none: such a process runs with Python's defaults.
    """
    flags = getattr(util, "_args_from_interpreter_flags", None)
    return [] if flags is None else list(flags())


def leave_finalizers() -> None:
    """Keep all existing ``weakref.finalize`` objects from being called when this process, a forked one, ends.

    They clean up what belongs to the parent process. Torch has one for each of its libraries of operators, and calling
    these writes to, and so copies, 35 MB of the parent's memory. Without the name they are called.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def finish_interpreter() -> None:
    """Do what Python does before it ends: wait for threads that are not daemons, then run the functions of ``atexit``.

    Without the names each such thread is joined in turn, and functions of ``atexit`` do not run.
    """
    wait_for_threads = getattr(threading, "_shutdown", None)
    if wait_for_threads is not None:
        wait_for_threads()
    else:
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
    run_functions = getattr(atexit, "_run_exitfuncs", None)
    if run_functions is not None:
        run_functions()
