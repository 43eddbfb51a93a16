"""``Launcher(...).run(func, *args)`` → ``func(*args)`` on every worker → what all of them returned.

The way of a launch: ``launcher.py`` → ``cluster.py`` (which machines) → ``job.py`` (this process's side) →
``forkserver.py`` (a process that has torch) → ``agent.py`` (one a host) → ``worker.py`` (one a rank) → back to
``job.py``.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torchopt_dist._serialized_exception import safe_repr
from torchopt_dist.errors import SerializationError
from torchopt_dist.launch.attempts import run_attempts
from torchopt_dist.launch.cluster import find_hosts
from torchopt_dist.launch.elastic import Membership, reach_some
from torchopt_dist.launch.environment import COPIED, chosen_by, import_path, read_env_file
from torchopt_dist.launch.groups import in_groups
from torchopt_dist.launch.logs import TerminalHandler, WorkerLogs, log_folder
from torchopt_dist.launch.machine import Machine, allow_many_files
from torchopt_dist.launch.messages import Header, pack
from torchopt_dist.launch.options import check_options
from torchopt_dist.launch.plan import Orders, Plan, Times
from torchopt_dist.launch.remote import PATIENCE, START_SECONDS, SshOptions, connect
from torchopt_dist.launch.result import LaunchResult
from torchopt_dist.launch.termination import ended_in_order

__all__ = ["Launcher", "launch"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Launcher:
    """Runs functions on worker processes, each launch on new ones.

    Workers have all the environment variables that torchrun sets, so that
    :func:`~torchopt_dist.auto_init_rpc` and :func:`torch.distributed.init_process_group` work in them. They are forked
    from a process that has imported torch, so that all launches but a program's first one start at once.

    Args:
        hosts: a list of hosts, each ``[user@]host[:port]`` or a name of SSH's configuration file. Rank 0 is on the
            first. Names of this machine need no SSH. ``"slurm"``: those of the SLURM job; ``"auto"``: these if the job
            has several, else this machine.
        nproc_per_host: the number of workers on each host, or a list with a number for each. ``"cpu"``: one a core;
            ``"gpu"``: one a GPU; ``"gpu:<number>"``: so many, if there are as many GPUs; ``"auto"``: one a GPU if there
            is one, else one a core.
        rpc: connect the workers for remote calls, as ``auto_init_rpc`` does.
        backend: make them torch's default process group, by ``"gloo"`` or ``"nccl"``. ``None``: make none.
        max_restarts: how often all workers are started again after one has failed.
        min_hosts: with how many hosts the work goes on when others are lost, or cannot be reached. Workers are started
            again whenever hosts are lost or come back. Given this or ``max_hosts``, a lost host is no error until there
            have been too few for ``start_timeout``. ``None``: all of them.
        max_hosts: how many hosts take part at a time; others wait until one is lost. ``None``: all of them.
        log_dir: a folder, made if need be, where every rank's output is added to a file ``rank<n>.log``. ``"auto"``: a
            folder of this launch's own, named after its time, in ``$TODIST_LOG_DIR`` or, if that is not set, in
            ``todist_logs``, as soon as there is a line. ``None`` or ``"none"``: no files.
        handlers: handlers of ``logging`` that get every line of every rank; see
            ``torchopt_dist.launch.on_ranks``. ``None``: the lines of local rank 0 go to the terminal.
        env: variables for the workers, besides those of this process on this machine, and of ``copy_env`` on others.
        env_file: a file of such variables, a line ``NAME=value`` each; ``env`` has the last word.
        copy_env: patterns of names, such as ``"CUDA*"``, of the variables of this process that workers on other
            machines get; the rest of their environment is what programs have there.
        python: the interpreter on other machines; ``None``: this one's path. It must have the same versions of Python,
            torch and torchopt_dist, and there must be the same working folder.
        ssh_config: SSH's configuration file; ``None``: ``~/.ssh/config``.
        master_port: the port at which workers meet; 0: a free one.
        timeout: seconds after which the launch is given up, restarts included. ``None``: never.
        start_timeout: seconds for all workers to reach the function.
        stop_timeout: seconds for workers to end after SIGTERM, when another has failed or the launch is interrupted or
            terminated, before they are killed.
        exit_timeout: seconds for processes to end when all functions have returned, before they are killed.
        agent_timeout: seconds without a sign of life of a host, before it counts as lost. If it is the launcher that is
            not heard of, its workers on other hosts are ended.
        halted_timeout: seconds for a worker that a signal such as SIGSTOP has stopped to go on. ``None``: as long as it
            takes.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument is of the wrong type.

    Example:
        >>> import os
        >>> from torchopt_dist.launch import Launcher
        >>> result = Launcher(nproc_per_host=2).run(lambda name: f"{name} {os.environ['RANK']}", "worker")
        >>> result.rank(1)
        'worker 1'
    """

    hosts: str | Sequence[str] = "auto"
    nproc_per_host: int | str | Sequence[int | str] = "auto"
    rpc: bool = False
    backend: str | None = None
    max_restarts: int = 0
    min_hosts: int | None = None
    max_hosts: int | None = None
    log_dir: str | Path | None = "auto"
    handlers: Sequence[logging.Handler] | None = None
    env: Mapping[str, str] | None = None
    env_file: str | Path | None = None
    copy_env: Sequence[str] = COPIED
    python: str | None = None
    ssh_config: str | Path | None = None
    master_port: int = 0
    timeout: float | None = None
    start_timeout: float = START_SECONDS
    stop_timeout: float = 3.0
    exit_timeout: float = 10.0
    agent_timeout: float = PATIENCE
    halted_timeout: float | None = 5.0

    def __post_init__(self) -> None:
        check_options(vars(self))

    @classmethod
    def from_args(cls, args: Any) -> Launcher:
        """The launcher that a command line asks for.

        Args:
            args: what a parser with ``torchopt_dist.launch.add_launcher_args`` has parsed, or any object that has
                attributes of these names; others are left alone.

        Raises:
            TypeError: ``args`` is no such object, or an option is of the wrong type.
            ValueError: an option is out of range.
        """
        try:
            given = vars(args)
        except TypeError:
            raise TypeError(
                f"`args` must be what a parser has parsed, got {type(args).__name__} {args!r:.200}"
            ) from None
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})

    def run(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> LaunchResult[T]:
        """Call ``func(*args, **kwargs)`` on every worker, and wait for all of them.

        Args:
            func: any function: of a module, of a script, of a notebook, a lambda, a closure. It and its arguments are
                pickled by cloudpickle, so workers get copies.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            What it returned on each worker. Tensors that require grad still do, as leaves.

        Raises:
            Exception: what ``func`` raised on a worker, as soon as it did. It is also a
                :class:`~torchopt_dist.RemoteError`, with ``worker`` and ``remote_traceback``.
            WorkerFailedError: a worker was killed, crashed or exited before its function returned.
            AgentFailedError: the process that looks after the workers died.
            CallTimeoutError: ``timeout`` has passed.
            InitializationError: ``start_timeout`` has passed, or ``master_port`` is taken.
            SerializationError: ``func``, an argument or a result cannot be sent.
            ValueError: ``hosts`` or ``nproc_per_host`` ask for what is not there.
            OSError: this system lacks what a launch needs, or the working folder has been deleted.
        """
        if not callable(func):
            raise TypeError(f"`func` must be callable, got {type(func).__name__} {func!r}")
        if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
            raise OSError(f"launching workers needs Linux 5.3 or later, got {sys.platform}")
        begun, folder = time.monotonic(), _working_folder()
        allow_many_files()
        elastic = self.min_hosts is not None or self.max_hosts is not None
        hosts = find_hosts(
            self.hosts, self.nproc_per_host, reach_some(self._reach) if elastic else self._reach
        )
        least, most = self._bounds(len(hosts))
        added = {} if self.env_file is None else read_env_file(self.env_file)
        added.update(self.env or {})
        with contextlib.ExitStack() as afterwards:
            afterwards.enter_context(ended_in_order())
            task = _pack_task(in_groups(func, self.backend, self.rpc), args, kwargs)
            afterwards.callback(os.close, task)
            logs = WorkerLogs(
                [TerminalHandler.of_ranks([host.first_rank for host in hosts])]
                if self.handlers is None
                else self.handlers,
                log_folder(self.log_dir),
                range(sum(host.workers for host in hosts)),
            )
            afterwards.callback(logs.close)
            plan = Plan(
                hosts=hosts,
                orders=lambda machine: self._orders(machine, folder, added),
                task=task,
                port=self.master_port,
                logs=logs,
                times=Times(
                    begun=begun,
                    whole=self.timeout,
                    start=self.start_timeout,
                    stop=self.stop_timeout,
                    exit=self.exit_timeout,
                    agent=self.agent_timeout,
                    halted=self.halted_timeout,
                ),
                run_id=uuid.uuid4().hex,
                max_restarts=self.max_restarts,
            )
            membership = Membership(plan, least, most, self._reach) if elastic else None
            if membership is not None:
                afterwards.callback(membership.close)
            values = run_attempts(plan, membership)
        return LaunchResult(values)

    def _bounds(self, number: int) -> tuple[int, int]:
        """The least and the most hosts that take part, of so many."""
        most = min(self.max_hosts or number, number)
        least = most if self.min_hosts is None else self.min_hosts
        if least > most:
            raise ValueError(
                f"`min_hosts` must be at most the number of hosts that take part, {most}, got {least}"
            )
        return least, most

    def _reach(self, names: Sequence[str]) -> dict[str, Machine]:
        config = None if self.ssh_config is None else os.path.abspath(self.ssh_config)
        options = SshOptions(self.python or sys.executable, config, self.agent_timeout)
        return dict(connect(names, options, self.start_timeout))

    def _orders(self, machine: Machine, folder: str, added: Mapping[str, str]) -> Orders:
        """What workers on a machine take over."""
        if machine.here:
            env, path = {**os.environ, **added}, import_path()
        else:
            env = {**machine.env, **chosen_by(self.copy_env, os.environ), **added}
            ours = [os.path.abspath(entry) for entry in import_path()]  # that of the script is the first
            path = list(dict.fromkeys([*ours[:1], *machine.path, *ours]))
        return Orders(env, pack(Header(env, path, list(sys.argv), folder, _sources())))


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
        options: those of :class:`Launcher`.

    Returns:
        What it returned on each worker.

    Raises:
        Exception: as :meth:`Launcher.run`.

    Example:
        >>> from torchopt_dist.launch import launch
        >>> launch(divmod, (7, 3), nproc_per_host=1).rank(0)
        (2, 1)
    """
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise TypeError(f"`args` must be a tuple of arguments, got {type(args).__name__} {args!r:.200}")
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise TypeError(f"`kwargs` must map names to values, got {type(kwargs).__name__} {kwargs!r:.200}")
    return Launcher(**options).run(func, *args, **kwargs)


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            "the working folder, in which workers would start, has been deleted: change to another one"
        ) from None


def _sources() -> dict[str, Any]:
    """Code that is in no file: an entry of ``linecache`` without a time of change."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def _pack_task(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    try:
        return pack((func, args, kwargs))
    except Exception as error:
        parts = {"func": func, **{f"args[{i}]": arg for i, arg in enumerate(args)}, **kwargs}
        for name, part in parts.items():
            try:
                os.close(pack(part))
            except Exception as cause:
                raise SerializationError(
                    f"`{name}` must be something that can be pickled, since workers are other processes, got "
                    f"{type(part).__name__} {safe_repr(part):.200}: {type(cause).__name__}: {safe_repr(cause, str)}"
                ) from error
        raise SerializationError(f"the arguments cannot be sent to the workers: {error}") from error
