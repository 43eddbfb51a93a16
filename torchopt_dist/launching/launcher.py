"""``Launcher(...).run(func, *args)`` → ``func(*args)`` on every worker → the values that all of them return.

The way of a launch: ``launcher.py`` → ``_cluster.py`` (which machines) → ``_attempt.py`` (this process's side) →
``_forkserver.py`` (a process that has imported torch) → ``_agent.py`` (one per host) → ``_worker.py`` (one per rank) →
back to ``_attempt.py``.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import re
import secrets
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from torchopt_dist.arguments.options import close_to, not_callable
from torchopt_dist.errors import InitializationError, RemoteError, TodistError
from torchopt_dist.launching._cluster import connect, find_hosts
from torchopt_dist.launching._elastic import Membership, UnreachedMachine, run_attempts
from torchopt_dist.launching._hosts import Plan
from torchopt_dist.launching._machines import RemoteOptions
from torchopt_dist.launching._packing import pack_task
from torchopt_dist.launching._processes import allow_many_files
from torchopt_dist.launching._settings import Settings, matching, read_env_file
from torchopt_dist.launching._worker import importing, in_groups
from torchopt_dist.launching.logs import TerminalHandler, WorkerLogs, log_folder
from torchopt_dist.launching.options import LaunchOptions, args_section
from torchopt_dist.launching.result import LaunchResult
from torchopt_dist.pickling.tracebacks import show_user_frames
from torchopt_dist.process import slurm
from torchopt_dist.process.liveness import VARIABLE, Liveness
from torchopt_dist.process.signals import TERMINATED

__all__ = ["Launcher", "ended_in_order", "launch"]

TOO_MANY_FILES = "too many open files: raise `ulimit -n`, or lower `nproc_per_host`"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Launcher(LaunchOptions):
    """Runs functions on worker processes, each launch on new ones.

    Workers have all the environment variables that torchrun sets, so that
    :func:`~torchopt_dist.auto_init_rpc` and :func:`torch.distributed.init_process_group` work in them. They are forked
    from a process that has imported torch, so that all launches but a program's first one start at once.

    Args:
        OPTIONS: made from the fields of :class:`~torchopt_dist.launching.options.LaunchOptions`, below.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument has the wrong type.

    Example:
        >>> import os
        >>> from torchopt_dist.launching import Launcher
        >>> result = Launcher(nproc_per_host=2).run(lambda name: f"{name} {os.environ['RANK']}", "worker")
        >>> result.rank(1)
        'worker 1'
    """

    @classmethod
    def from_args(cls, args: Any) -> Launcher:
        """Make a launcher from the arguments of a command line.

        Args:
            args: what a parser with ``torchopt_dist.launching.add_launcher_args`` has parsed, or any object with
                attributes of these names; other attributes are ignored.

        Raises:
            TypeError: ``args`` is not such an object, or an option has the wrong type.
            ValueError: an option is out of range.
        """
        try:
            values = vars(args)
        except TypeError:
            raise TypeError(
                f"`args` must be what a parser has parsed, got {type(args).__name__} {args!r:.200}"
            ) from None
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})

    def run(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> LaunchResult[T]:
        """Call ``func(*args, **kwargs)`` on every worker, and wait for all of them.

        Args:
            func: any function: of a module, a script or a notebook, a lambda or a closure. The function and its
                arguments are pickled by cloudpickle, so workers get copies.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            The values that ``func`` returned on the workers. Tensors that require grad still do, as leaves.

        Raises:
            Exception: the exception that ``func`` raised on a worker, as soon as it is raised. It is also a
                :class:`~torchopt_dist.RemoteError`, with ``worker`` and ``remote_traceback``.
            WorkerFailedError: a worker was killed, crashed or exited before its function returned.
            AgentFailedError: the process that looks after the workers died.
            CallTimeoutError: ``timeout`` has passed.
            InitializationError: ``start_timeout`` has passed, ``master_port`` is taken, ``TODIST_LIVENESS`` is
                malformed, or a module launches while a worker of its own launch imports it.
            SerializationError: ``func``, an argument or a result cannot be sent.
            ValueError: ``hosts`` or ``nproc_per_host`` ask for hosts, cores or GPUs that do not exist.
            OSError: this system lacks what a launch needs, or the working folder has been deleted.
        """
        try:
            return self._run(func, args, kwargs)
        except (TodistError, KeyboardInterrupt) as error:
            # What it says has happened elsewhere, or is the user's: frames of this room say nothing.
            show_user_frames()
            raise error.with_traceback(None) from error.__cause__

    def _run(self, func: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LaunchResult[T]:
        if not callable(func):
            raise not_callable("`func`", func)
        _check_own_arguments(func, kwargs)
        if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
            raise OSError(f"launching workers needs Linux 5.3 or later, got {sys.platform}")
        begun, settings = time.monotonic(), Settings.capture(_modules_being_imported())
        allow_many_files()
        added = {} if self.env_file is None else read_env_file(self.env_file)
        added.update(self.env or {})
        liveness = self.liveness or Liveness.from_environment({**os.environ, **added})
        of_job = self.shell is None and isinstance(self.hosts, str) and slurm.is_in_job()
        remote = RemoteOptions(
            python=self.python or sys.executable,
            config=None if self.ssh_config is None else os.path.abspath(self.ssh_config),
            shell=self.shell,
            otherwise="srun" if of_job else None,
            liveness=liveness,
            env={**matching(self.copy_env, os.environ), **added},
        )
        reach = functools.partial(connect, options=remote, seconds=self.start_timeout)
        reach_at_start = functools.partial(reach, otherwise=UnreachedMachine) if self._is_elastic else reach
        hosts = find_hosts(self.hosts, self.nproc_per_host, reach_at_start)
        with contextlib.ExitStack() as stack:
            stack.enter_context(ended_in_order())
            stack.enter_context(_too_many_files_told())
            task = pack_task(in_groups(func, self.backend, self.rpc, self.on_loss), args, kwargs)
            logs = WorkerLogs(
                [TerminalHandler.of_first_workers()] if self.handlers is None else self.handlers,
                log_folder(self.log_dir),
                range(sum(host.workers for host in hosts)),
            )
            stack.callback(logs.close)
            own = {VARIABLE: str(liveness), "TODIST_SECRET": added.get("TODIST_SECRET", secrets.token_hex())}
            plan = Plan(
                self, begun, liveness, hosts, settings, {**added, **own}, task, logs, uuid.uuid4().hex
            )
            membership = (
                stack.enter_context(contextlib.closing(Membership(plan, reach))) if self._is_elastic else None
            )
            return run_attempts(plan, membership)


Launcher.__doc__ = re.sub(r"OPTIONS: .*", args_section, Launcher.__doc__ or "")


def launch(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> LaunchResult[T]:
    """Call ``func(*args, **kwargs)`` on every worker: ``Launcher(**options).run(func, *args, **kwargs)``.

    Args:
        func: any function.
        args: its arguments.
        kwargs: its keyword arguments.
        options: the arguments of :class:`Launcher`.

    Returns:
        What it returned on each worker.

    Raises:
        Exception: as :meth:`Launcher.run`.

    Example:
        >>> from torchopt_dist.launching import launch
        >>> launch(divmod, (7, 3), nproc_per_host=1).rank(0)
        (2, 1)
    """
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        value: object = args
        remedy = "write `(x,)` for one argument"
        if isinstance(value, int):
            remedy = "the number of workers is `nproc_per_host=2`"
        raise TypeError(
            f"`args` must be a tuple of arguments, got {type(value).__name__} {value!r:.80}: {remedy}"
        )
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise TypeError(f"`kwargs` must map names to values, got {type(kwargs).__name__} {kwargs!r:.200}")
    _check_names(options)
    return Launcher(**options).run(func, *args, **kwargs)


def _check_own_arguments(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` where ``run`` was given what ``launch`` takes, and the function has no such argument."""
    try:
        parameters = inspect.signature(func).parameters
    except (TypeError, ValueError):  # some functions written in C have none
        return
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    for name in kwargs:
        if name in parameters:
            continue
        name_of = getattr(func, "__name__", "func")
        if name in ("args", "kwargs"):
            remedy = f"write `run({name_of}, x, name=y)`, or `launch({name_of}, (x,), {{'name': y}}, ...)`"
        elif name in [field.name for field in fields(Launcher)]:
            remedy = f"an option is given to the launcher, `Launcher({name}=...).run({name_of}, ...)`"
        else:
            continue
        raise TypeError(
            f"`run(func, *args, **kwargs)` hands its arguments on to `func`, and {name_of} takes no {name!r}: {remedy}"
        )


def _check_names(options: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` for an option that a launcher does not have: it is misspelt, or meant for the function."""
    known = [field.name for field in fields(Launcher)]
    renamed = {"nproc_per_node": "nproc_per_host", "nnodes": "hosts", "nodes": "hosts"}
    for name in options:
        if name not in known:
            meant = f": did you mean `{renamed[name]}`?" if name in renamed else close_to(name, known)
            remedy = meant or (
                f"; an argument of the function goes into `kwargs={{{name!r}: ...}}`, and the options of a launch are "
                f"{', '.join(known)}"
            )
            raise TypeError(f"launch got an unexpected keyword argument {name!r}{remedy}")


@contextlib.contextmanager
def _too_many_files_told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE) or isinstance(error, RemoteError):
            raise
        raise OSError(error.errno, TOO_MANY_FILES) from error


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Let SIGTERM raise ``SystemExit`` inside the context, so that workers are ended in order, and then this program.

    Otherwise the signal would end the launcher at once, and its sender, such as SLURM or a container's runtime, would
    kill what the program leaves behind. Ctrl-C needs no such handling: Python raises :class:`KeyboardInterrupt`. Python
    handles signals in the main thread. Launches in other threads are left alone, and so are programs that handle
    SIGTERM themselves.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    pid = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == pid:
            raise SystemExit(TERMINATED)
        signal.signal(number, signal.SIG_DFL)  # a process that another thread has forked meanwhile
        os.kill(os.getpid(), number)

    try:
        signal.signal(signal.SIGTERM, handle)
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _modules_being_imported() -> frozenset[str]:
    """The modules whose top level this launch comes from, in this process and in those that have led to it.

    Raises:
        InitializationError: one of them is imported on a worker of its own launch, which would launch without end.
    """
    before, names = importing(), set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if frame.f_code.co_name == "<module>" and name != "__main__":
            names.add(name)
        frame = frame.f_back
    for name in sorted(before & names):
        raise InitializationError(
            f"module {name!r} launches workers at its top level, and these import it again, which would launch without "
            "end: launch in a function, or under `if __name__ == '__main__':`"
        )
    return before | names
