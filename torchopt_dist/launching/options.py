"""The options of a launch, each defined once → their documentation, their checks, and the arguments of command lines.

:class:`Launcher` has these fields, and a running launch reads them. ``_cluster.py`` checks what depends on the
machines, such as whether there are as many GPUs as asked for.
"""

from __future__ import annotations

import argparse
import logging
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, get_type_hints

from torchopt_dist.launching import _option_kinds as kinds
from torchopt_dist.launching._environment import COPIED
from torchopt_dist.process.liveness import Liveness

__all__ = ["LaunchOptions", "add_launcher_args", "args_section"]


@dataclass(frozen=True)
class LaunchOptions:
    """All options of a launch: for each its type, its kind, its meaning, and its default."""

    hosts: Annotated[
        str | Sequence[str],
        kinds.HOSTS,
        "a list of hosts, each ``[user@]host[:port]`` or a name of SSH's configuration file. Rank 0 is on the first. "
        'Names of this machine need no SSH. ``"slurm"``: those of the SLURM job; ``"auto"``: these if the job has '
        "several, else this machine.",
    ] = "auto"
    nproc_per_host: Annotated[
        int | str | Sequence[int | str],
        kinds.NPROC,
        'the number of workers on each host, or a list with a number for each. ``"cpu"``: one per core; ``"gpu"``: one '
        'per GPU; ``"gpu:<number>"``: that number, if there are as many GPUs; ``"auto"``: one per GPU if there is '
        "one, else one per core.",
    ] = "auto"
    rpc: Annotated[bool, kinds.SWITCH, "connect the workers for remote calls, as ``auto_init_rpc`` does."] = (
        False
    )
    backend: Annotated[
        str | None,
        kinds.BACKEND,
        "make torch's default process group of the workers, with this backend, such as "
        '``"gloo"`` or ``"nccl"``. ``None``: make none.',
    ] = None
    max_restarts: Annotated[
        int, kinds.RESTARTS, "how often all workers are started again after one has failed."
    ] = 0
    on_loss: Annotated[
        str,
        kinds.ON_LOSS,
        'what happens when a worker that is not rank 0 dies before its function has returned: ``"end"`` ends all, '
        '``"continue"`` lets the others go on, and the result tells who was lost. An exception ends all in any case. '
        "With ``rpc`` the workers' group goes on, too, and calls may have ``retries``. With "
        '``"replace"`` they go on, too, and the launcher starts a new process for the lost rank, which runs the '
        "function from its beginning and joins the group, over ZeroMQ.",
    ] = "end"
    max_replacements: Annotated[
        int,
        kinds.RESTARTS,
        'how often each rank gets a new process, with ``on_loss="replace"``; its next death ends all.',
    ] = 3
    min_hosts: Annotated[
        int | None,
        kinds.NUMBER_OF_HOSTS,
        "the least number of hosts with which the work goes on when others are lost or cannot be reached. Workers are "
        "started again whenever hosts are lost or come back. With this or ``max_hosts``, a lost host is an error only "
        "after there have been too few hosts for ``start_timeout``. ``None``: all of them.",
    ] = None
    max_hosts: Annotated[
        int | None,
        kinds.NUMBER_OF_HOSTS,
        "the largest number of hosts that take part at a time; others wait until one is lost. ``None``: all of them.",
    ] = None
    log_dir: Annotated[
        str | Path | None,
        kinds.FOLDER,
        'a folder, made if need be, where every rank\'s output is added to a file ``rank<n>.log``. ``"auto"``: a '
        "folder of this launch's own, named after its time, in ``$TODIST_LOG_DIR`` or, if that is not set, in "
        '``todist_logs``, as soon as there is a line. ``None`` or ``"none"``: no files.',
    ] = "auto"
    handlers: Annotated[
        Sequence[logging.Handler] | None,
        kinds.HANDLERS,
        "handlers of ``logging`` that get every line of every rank; see ``todist.launching.on_ranks``. ``None``: the "
        "lines of local rank 0 are written to the terminal.",
    ] = None
    env: Annotated[
        Mapping[str, str] | None,
        kinds.VARIABLES,
        "environment variables for the workers, in addition to those of this process on this machine, and to those of "
        "``copy_env`` on others.",
    ] = None
    env_file: Annotated[
        str | Path | None,
        kinds.PATH,
        "a file of such variables, one line ``NAME=value`` for each; a variable in ``env`` takes precedence.",
    ] = None
    copy_env: Annotated[
        Sequence[str],
        kinds.PATTERNS,
        'patterns of names, such as ``"CUDA*"``, of the variables of this process that workers on other machines get; '
        "the rest of their environment is that of the other machine.",
    ] = COPIED
    python: Annotated[
        str | None,
        kinds.PYTHON,
        "the interpreter on other machines; ``None``: this one's path. It must have the same versions of Python, "
        "torch and torchopt_dist, and there must be the same working folder.",
    ] = None
    shell: Annotated[
        str | None,
        kinds.SHELL,
        "a command that runs a command on a host, in place of SSH, with ``{host}`` where the host's name is to stand, "
        'such as ``"kubectl exec -i {host} --"`` or ``"docker exec -i {host}"``. ``"srun"``: a step of this SLURM job. '
        "``None``: SSH, or, if ``hosts`` are those of a SLURM job and none is reached by SSH, ``srun``.",
    ] = None
    ssh_config: Annotated[
        str | Path | None, kinds.PATH, "SSH's configuration file; ``None``: ``~/.ssh/config``."
    ] = None
    master_port: Annotated[int, kinds.PORT, "the port of the rendezvous store; 0: a free one."] = 0
    timeout: Annotated[
        float | None,
        kinds.SECONDS_OR_NEVER,
        "seconds after which the launch fails, restarts included. ``None``: never.",
    ] = None
    start_timeout: Annotated[
        float, kinds.SECONDS, "seconds until all workers must have reached the function."
    ] = 120.0
    stop_timeout: Annotated[
        float,
        kinds.SECONDS_OR_ZERO,
        "seconds for workers to end, and to run their ``finally`` blocks, when another has failed or the launch is "
        "interrupted or terminated, before they are killed.",
    ] = 3.0
    exit_timeout: Annotated[
        float,
        kinds.SECONDS,
        "seconds for processes to end when all functions have returned, before they are killed.",
    ] = 10.0
    liveness: Annotated[
        Liveness | None,
        kinds.LIVENESS,
        "how often launcher, hosts and workers give signs of life, and after how many seconds without one they count "
        "as lost: a host that is silent, a launcher that a host does not hear of, a worker that a signal such as "
        "SIGSTOP has stopped. ``None``: the environment variable ``TODIST_LIVENESS``, or 10 s if it is not set.",
    ] = None

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            TypeError: an option has the wrong type.
            ValueError: an option is out of range.
        """
        for name, (kind, _) in _table().items():
            value = getattr(self, name)
            if not isinstance(value, kind.types) or (isinstance(value, bool) and bool not in kind.types):
                raise TypeError(f"`{name}` must be {kind.words}, got {type(value).__name__} {value!r:.200}")
            if isinstance(value, str) and not value:
                raise ValueError(f"`{name}` must be {kind.words}, got an empty string")
            if kind.check is not None and value is not None:
                kind.check(name, value)


@cache
def _table() -> dict[str, tuple[kinds.Kind, str]]:
    """Option → its kind, its meaning."""
    hints = get_type_hints(LaunchOptions, include_extras=True)
    return {name: hint.__metadata__ for name, hint in hints.items()}


def args_section(_: object = None) -> str:
    """The options as the section ``Args`` of a class's docstring."""
    parts = (
        textwrap.fill(f"{name}: {text}", 116, initial_indent=" " * 8, subsequent_indent=" " * 12)
        for name, (_, text) in _table().items()
    )
    return "\n".join(parts).lstrip()


def add_launcher_args(parser: argparse.ArgumentParser) -> None:
    """Add ``--hosts``, ``--nproc-per-host``, ``--rpc`` and the other options of a launcher, as a group of their own.

    :meth:`Launcher.from_args` makes a launcher from the parsed arguments. Names and defaults are those of
    :class:`Launcher`.

    Args:
        parser: the program's parser.

    Raises:
        TypeError: ``parser`` is not an ``argparse.ArgumentParser``.

    Example:
        >>> import argparse
        >>> from torchopt_dist.launching import Launcher, add_launcher_args
        >>> parser = argparse.ArgumentParser()
        >>> add_launcher_args(parser)
        >>> args = parser.parse_args(["--nproc-per-host", "2", "--rpc"])
        >>> launcher = Launcher.from_args(args)
        >>> launcher.nproc_per_host, launcher.rpc
        (2, True)
    """
    if not isinstance(parser, argparse.ArgumentParser):
        raise TypeError(
            f"`parser` must be an argparse.ArgumentParser, got {type(parser).__name__} {parser!r:.200}"
        )
    group = parser.add_argument_group("launch", "where the workers run, and how many")
    defaults = {option.name: option.default for option in fields(LaunchOptions)}
    for name, (kind, text) in _table().items():
        if kind.argument is not None:
            words = text.replace("``", "").replace("%", "%%").removesuffix(".")
            words += "" if name == "copy_env" else f" (default: {defaults[name]})"
            flag = f"--{name.replace('_', '-')}"
            group.add_argument(flag, default=argparse.SUPPRESS, help=words, **kind.argument)
