"""``Launcher(...).run(func, *args)`` → ``func(*args)`` on every worker → what all of them returned.

The way of a launch: ``launcher.py`` → ``cluster.py`` (which machines) → ``job.py`` (this process's side) →
``forkserver.py`` (a process that has torch) → ``agent.py`` (one a host) → ``worker.py`` (one a rank) → back to
``job.py``.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import math
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torchopt_dist.errors import SerializationError
from torchopt_dist.launch.attempts import run_attempts
from torchopt_dist.launch.cluster import find_hosts
from torchopt_dist.launch.elastic import reach_some, run_elastic
from torchopt_dist.launch.environment import COPIED, chosen_by, read_env_file
from torchopt_dist.launch.groups import check_backend, in_groups
from torchopt_dist.launch.logs import TerminalHandler, WorkerLogs, log_folder
from torchopt_dist.launch.machine import Machine, allow_many_files
from torchopt_dist.launch.messages import Header, pack
from torchopt_dist.launch.plan import Orders, Plan, Times
from torchopt_dist.launch.remote import PATIENCE, START_SECONDS, SshOptions, connect
from torchopt_dist.launch.result import LaunchResult

__all__ = ["Launcher", "launch"]

P = ParamSpec("P")
T = TypeVar("T")

LEAST_AGENT_TIMEOUT = 2.0


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
        timeout: seconds after which the launch is given up. ``None``: never.
        start_timeout: seconds for all workers to reach the function.
        stop_timeout: seconds for workers to end after SIGTERM, when another has failed, before they are killed.
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
        check_backend(self.backend)
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int):
            raise TypeError(f"`max_restarts` must be an integer, got {self.max_restarts!r}")
        if self.max_restarts < 0:
            raise ValueError(f"`max_restarts` must be at least 0, got {self.max_restarts}")
        for name in ("min_hosts", "max_hosts"):
            number = getattr(self, name)
            if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
                raise TypeError(f"`{name}` must be an integer or None, got {number!r}")
            if number is not None and number < 1:
                raise ValueError(f"`{name}` must be at least 1, got {number}")
        if not 0 <= self.master_port < 1 << 16:
            raise ValueError(f"`master_port` must be a port, in [0, 65536), got {self.master_port}")
        for name in (field.name for field in fields(self) if field.name.endswith("timeout")):
            seconds = getattr(self, name)
            if seconds is None and name in ("timeout", "halted_timeout"):
                continue
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
                raise TypeError(f"`{name}` must be a number of seconds, got {seconds!r}")
            if not 0 <= seconds < math.inf or (seconds == 0 and name != "stop_timeout"):
                raise ValueError(f"`{name}` must be a positive, finite number of seconds, got {seconds}")
        if self.agent_timeout < LEAST_AGENT_TIMEOUT:
            raise ValueError(
                f"`agent_timeout` must be at least {LEAST_AGENT_TIMEOUT:g} s, since signs of life come every second, "
                f"got {self.agent_timeout}"
            )
        for handler in self.handlers or ():
            if not isinstance(handler, logging.Handler):
                raise TypeError(f"`handlers` must hold logging.Handler objects, got {handler!r}")
        for variable, value in (self.env or {}).items():
            if not isinstance(variable, str) or not isinstance(value, str):
                raise TypeError(f"`env` must map strings to strings, got {variable!r}: {value!r}")
        if isinstance(self.copy_env, str) or not all(isinstance(pattern, str) for pattern in self.copy_env):
            raise TypeError(f"`copy_env` must be a list of patterns, got {self.copy_env!r}")

    @classmethod
    def from_args(cls, args: Any) -> Launcher:
        """The launcher that a command line asks for.

        Args:
            args: what a parser with ``torchopt_dist.launch.add_launcher_args`` has parsed, or any object that has
                attributes of these names; others are left alone.
        """
        given = vars(args)
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
            OSError: this system lacks what a launch needs.
        """
        if not callable(func):
            raise TypeError(f"`func` must be callable, got {type(func).__name__} {func!r}")
        if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
            raise OSError(f"launching workers needs Linux 5.3 or later, got {sys.platform}")
        allow_many_files()
        elastic = self.min_hosts is not None or self.max_hosts is not None
        hosts = find_hosts(
            self.hosts, self.nproc_per_host, reach_some(self._reach) if elastic else self._reach
        )
        least, most = self._bounds(len(hosts))
        added = {} if self.env_file is None else read_env_file(self.env_file)
        added.update(self.env or {})
        with contextlib.ExitStack() as afterwards:
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
                orders=lambda machine: self._orders(machine, added),
                task=task,
                port=self.master_port,
                logs=logs,
                times=Times(
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
            values = run_elastic(plan, least, most, self._reach) if elastic else run_attempts(plan)
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

    def _orders(self, machine: Machine, added: Mapping[str, str]) -> Orders:
        """What workers on a machine take over."""
        if machine.here:
            env, path = {**os.environ, **added}, list(sys.path)
        else:
            env = {**machine.env, **chosen_by(self.copy_env, os.environ), **added}
            ours = [os.path.abspath(entry) for entry in sys.path]  # that of the script is the first
            path = list(dict.fromkeys([*ours[:1], *machine.path, *ours]))
        return Orders(env, pack(Header(env, path, list(sys.argv), os.getcwd(), _sources())))


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
    return Launcher(**options).run(func, *args, **(kwargs or {}))


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
                    f"{type(part).__name__} {part!r:.200}: {type(cause).__name__}: {cause}"
                ) from error
        raise SerializationError(f"the arguments cannot be sent to the workers: {error}") from error
