"""Task → its function's value or exception, in a process with torchrun's variables and its own output."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import IO, Any, NoReturn, ParamSpec, TypeVar, TypeVarTuple

import numpy as np
import setproctitle
import torch
import torch.distributed as dist

from torchopt_dist.launching._messages import ToLauncher, frame
from torchopt_dist.launching._packing import pack_failure, pack_value, unpack, unpack_task
from torchopt_dist.launching._settings import Settings
from torchopt_dist.process.liveness import note_ended
from torchopt_dist.process.network import LOOPBACK, choose_interface
from torchopt_dist.process.signals import INTERRUPT
from torchopt_dist.torch_private import finish_interpreter, leave_finalizers

__all__ = ["asked_to_exit", "importing", "in_groups", "work"]

P = ParamSpec("P")
T = TypeVar("T")
Told = TypeVarTuple("Told")

NO_TERMINAL = (
    "`breakpoint()` in a worker needs the terminal in which the program was started, and {why}: "
    "call the function in your own process (`Debug a worker` in the documentation), or set PYTHONBREAKPOINT "
    "to a debugger that opens a port"
)

_importing: frozenset[str] = frozenset()

connect_rpc: Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]] | None = None
"""``auto_init_rpc``. The package says so, for this room knows the other only as any user of it does."""


def in_groups(func: Callable[P, T], backend: str | None, rpc: bool, on_loss: str) -> Callable[P, T]:
    """Wrap ``func`` so that it runs in a process group, an RPC group, both or neither.

    Args:
        func: any function; if it can be pickled, so can the result.
        backend: of the default process group; ``None`` means that none is made.
        rpc: whether to connect the workers for remote calls.
        on_loss: what the connected workers do when one of them dies.
    """
    if rpc:
        func = functools.partial(_in_rpc_group, func, on_loss)
    if backend is not None:  # outside: a worker whose main has returned answers calls that use it
        func = functools.partial(_in_process_group, func, backend)
    return func


def _in_process_group(func: Callable[..., T], backend: str, /, *args: Any, **kwargs: Any) -> T:
    if "nccl" in backend:
        torch.cuda.set_device(
            int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        )  # it may see one only
    dist.init_process_group(backend)
    value = func(*args, **kwargs)
    if dist.is_initialized():  # if it raises, its process ends, and the group with it
        note_ended()
        dist.destroy_process_group()
    return value


def _in_rpc_group(func: Callable[..., T], on_loss: str, /, *args: Any, **kwargs: Any) -> T:
    assert connect_rpc is not None
    value: T = connect_rpc(on_loss=on_loss)(func)(*args, **kwargs)
    return value


def work(
    rank: int, packed: bytes, own: dict[str, str], task: bytes, *, stdout: int, stderr: int, report: int
) -> NoReturn:
    """Run the function, report its value or exception, and end as a Python program ends.

    Args:
        rank: the worker's rank.
        packed: the packed settings.
        own: the variables of this worker alone.
        task: the packed function and its arguments.
        stdout: descriptor of the pipe for what the worker prints.
        stderr: the same for standard error.
        report: descriptor of the pipe for frames of what it says to the launcher.
    """
    pid = os.getpid()
    _take_over_output(stdout, stderr)
    signal.signal(INTERRUPT, _interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        try:
            settings: Settings = unpack(packed)
            _take_over(settings, own)
            _become_fresh(rank)
            function, args, kwargs = unpack_task(task)
            settings.apply()  # now, since filters of warnings are of classes that have been imported
            _report(report, ToLauncher.running)
            value = function(*args, **kwargs)
        finally:  # what comes now ends by itself, and is not to be interrupted
            if signal.getsignal(INTERRUPT) is _interrupt:
                signal.signal(INTERRUPT, _notice)
        if os.getpid() == pid:  # and not a process that the function has forked
            _report(report, ToLauncher.returned, pack_value(value, rank))
        code = 0
        del function, args, kwargs, value
    except BaseException as error:
        asked = asked_to_exit(error)
        code = 1 if asked is None else asked
        if os.getpid() == pid and asked == 0:
            _report(report, ToLauncher.returned, pack_value(None, rank))
        elif os.getpid() == pid:
            text, failure = pack_failure(error)
            _report(report, ToLauncher.raised, text, asked, failure)
    _leave(code)


def _notice(number: int, frame: FrameType | None) -> None:
    """Let the agent see that the interrupt has been noticed."""
    signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise :class:`KeyboardInterrupt`, unless the function handles an exception, as in a ``finally`` block."""
    _notice(number, frame)
    if sys.exception() is None:
        signal.default_int_handler(number, frame)


def _take_over_output(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for here, there in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(here, there)
        os.close(here)
    # A line is one write, so that lines of several processes do not mix.
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def importing() -> frozenset[str]:
    """The modules whose import has led to this worker: they must not launch while they are imported here."""
    return _importing


def _take_over(settings: Settings, own: dict[str, str]) -> None:
    """Take over the launcher's environment, path, arguments and folder.

    Args:
        settings: the values to take over.
        own: the variables of this worker alone.
    """
    global _importing
    _importing = settings.importing
    os.environ.clear()
    os.environ.update({**settings.env, **own})
    sys.path[:] = settings.path
    sys.argv[:] = settings.argv
    linecache.cache.update(settings.sources)
    _install_breakpoint(settings.terminal, int(own["RANK"]))
    os.chdir(settings.folder)
    # Where torch's `record` writes an exception. What is raised here is sent, so the file needs no name.
    error_file = os.memfd_create("todist", os.MFD_CLOEXEC)
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"/proc/{os.getpid()}/fd/{error_file}"
    if os.environ["MASTER_ADDR"] != LOOPBACK:  # torch's libraries would guess the interface
        choose_interface(os.environ["MASTER_ADDR"])


def _become_fresh(rank: int) -> None:
    """Do what a new process does when it starts and imports its libraries, and a forked one must do itself."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    leave_finalizers()
    program = " ".join(str(part) for part in sys.argv).encode("utf-8", "backslashreplace").decode()
    setproctitle.setproctitle(f"todist: rank {rank} of {os.environ['WORLD_SIZE']}: {program}")
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    torch.set_num_threads(int(asked) if asked.isdecimal() and int(asked) else len(os.sched_getaffinity(0)))
    np.random.seed()
    torch.seed()


def _report(pipe: int, message: Callable[[Any, Any, *Told], None], *args: *Told) -> None:
    with contextlib.suppress(OSError):  # the agent has ended, and soon so will this process
        for part in frame(message, *args):
            while part:
                part = part[os.write(pipe, part) :]


def asked_to_exit(error: BaseException) -> int | None:
    """The exit status of a ``sys.exit``, as the system makes it; a text is printed first, as Python does it.

    Args:
        error: the exception of the function.

    Returns:
        A number from 0 to 255, or ``None`` if the exception is not a ``SystemExit``.
    """
    if not isinstance(error, SystemExit):
        return None
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    with contextlib.suppress(Exception):
        print(error.code, file=sys.stderr, flush=True)
    return 1


def _leave(code: int) -> NoReturn:
    """End the interpreter, without returning through the frames of the process that was forked."""
    try:
        finish_interpreter()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


# The debugger.


def _install_breakpoint(name: str | None, rank: int) -> None:
    """Let ``breakpoint()`` start the debugger at a terminal, one rank at a time.

    A worker has no terminal of its own. The launcher's is open to it if the worker is on the same machine: since it is
    not the worker's controlling terminal, the worker may read from it although it is in no foreground group.

    Args:
        name: the terminal's name; ``None`` if there is none on this machine.
        rank: the worker's rank, for the prompt.
    """

    def stop(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("PYTHONBREAKPOINT"):
            return sys.__breakpointhook__(*args, **kwargs)
        _debugger(name, rank).set_trace(sys._getframe(1))
        return None

    sys.breakpointhook = stop


def _debugger(name: str | None, rank: int) -> Any:
    import fcntl  # which only Unix has
    from pdb import Pdb  # with its imports it takes longer than the start of a worker should

    class Debugger(Pdb):
        """The debugger; while it waits for commands, no other rank does."""

        def interaction(self, frame: FrameType | None, *args: Any) -> None:
            fcntl.flock(self.stdin, fcntl.LOCK_EX)
            try:
                super().interaction(frame, *args)
            finally:
                fcntl.flock(self.stdin, fcntl.LOCK_UN)

    if name is None:
        raise RuntimeError(NO_TERMINAL.format(why="there is none on this machine"))
    try:
        reader, writer = _open_terminal(name, "r"), _open_terminal(name, "w")
    except OSError as error:
        raise RuntimeError(NO_TERMINAL.format(why=f"{name} cannot be opened ({error.strerror})")) from error
    debugger = Debugger(stdin=reader, stdout=writer, nosigint=True)
    debugger.prompt = f"(Pdb, rank {rank}) "
    return debugger


def _open_terminal(name: str, mode: str) -> IO[str]:
    """A terminal as a file; it does not become that of this session."""
    flags = os.O_NOCTTY | (os.O_RDONLY if mode == "r" else os.O_WRONLY)
    return os.fdopen(os.open(name, flags), mode, encoding="utf-8", errors="replace", buffering=1)
