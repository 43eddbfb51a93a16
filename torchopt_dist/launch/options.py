"""The options of a launch, each spelled once → their documentation, their checks, and the arguments of command lines.

:class:`Launcher` has these fields, and a running launch reads them. What needs the machines, such as whether there are
as many GPUs as asked for, is seen in ``_cluster.py``.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch.distributed as dist

from torchopt_dist._liveness import Liveness
from torchopt_dist.launch._environment import COPIED, check_variables

__all__ = ["LaunchOptions", "add_launcher_args", "args_section", "check_handler", "check_integer"]

NONE = type(None)
PATHS = (str, os.PathLike)


# What options can be.


def _at_least(least: int, name: str, value: int) -> None:
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}")


def _is_port(name: str, value: int) -> None:
    if not 0 <= value < 1 << 16:
        raise ValueError(f"`{name}` must be a port, in [0, 65536), got {value}")


def _is_positive(name: str, seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise ValueError(f"`{name}` must be a positive, finite number of seconds, got {seconds}")


def _is_positive_or_zero(name: str, seconds: float) -> None:
    if seconds != 0:
        _is_positive(name, seconds)


def _is_one_of(words: Collection[str], name: str, value: str) -> None:
    if value not in words:
        raise ValueError(f"`{name}` must be {' or '.join(map(repr, words))}, got {value!r}")


def _are_handlers(name: str, handlers: Collection[object]) -> None:
    for handler in handlers:
        check_handler(name, "hold logging.Handler objects", handler)


def _are_patterns(name: str, patterns: Collection[object]) -> None:
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"`{name}` must be a list of patterns, got {patterns!r}")


def _is_backend(name: str, backend: str) -> None:
    known = [each for each in dist.Backend.backend_list if each != "undefined"]
    for part in backend.split(","):  # as in "cpu:gloo,cuda:nccl"
        if part.rpartition(":")[2].lower() not in known:
            raise ValueError(f"`{name}` must be made of {', '.join(known)}, got {backend!r}")


def _nproc(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdecimal() else text


def _seconds_or_none(text: str) -> float | None:
    return None if text == "none" else float(text)


class _HostsAction(argparse.Action):
    """Names; the words ``auto`` and ``slurm``, alone, are what they are to a launcher."""

    def __call__(self, parser: object, namespace: object, values: object, option: object = None) -> None:
        assert isinstance(values, list)
        setattr(namespace, self.dest, values[0] if values in (["auto"], ["slurm"]) else values)


@dataclass(frozen=True, eq=False)  # so that parsers made of dataclasses can hash it
class Kind:
    """What an option can be.

    Attributes:
        types: the types that it can have.
        words: how these are called.
        argument: how ``ArgumentParser.add_argument`` reads it; ``None``: command lines do not have it.
        check: name, value that is not ``None`` → the error of one that is out of range.
    """

    types: tuple[type, ...]
    words: str
    argument: Mapping[str, Any] | None
    check: Callable[[str, Any], None] | None = None


HOSTS = Kind(
    (Collection,),
    '"auto", "slurm" or a list of names',
    {"nargs": "+", "action": _HostsAction, "metavar": "HOST"},
)
NPROC = Kind(
    (Integral, Collection),
    'an integer, "auto", "cpu", "gpu" or "gpu:<number>", or a list of these',
    {"type": _nproc, "metavar": "N"},
)
SWITCH = Kind((bool,), "True or False", {"action": "store_true"})
BACKEND = Kind((str, NONE), "a string or None", {"metavar": "NAME"}, _is_backend)
PYTHON = Kind((str, NONE), "a string or None", {"metavar": "FILE"})
ON_LOSS = Kind(
    (str,),
    '"end", "continue" or "replace"',
    {"choices": ["end", "continue", "replace"]},
    partial(_is_one_of, ("end", "continue", "replace")),
)
RESTARTS = Kind((Integral,), "an integer", {"type": int, "metavar": "N"}, partial(_at_least, 0))
NUMBER_OF_HOSTS = Kind(
    (Integral, NONE), "an integer or None", {"type": int, "metavar": "N"}, partial(_at_least, 1)
)
PORT = Kind((Integral,), "an integer", {"type": int, "metavar": "PORT"}, _is_port)
FOLDER = Kind((*PATHS, NONE), 'a folder, "auto" or None', {"metavar": "DIR"})
PATH = Kind((*PATHS, NONE), "a path or None", {"metavar": "FILE"})
HANDLERS = Kind((Collection, NONE), "a list of logging handlers, or None", None, _are_handlers)
VARIABLES = Kind((Mapping, NONE), "a dictionary or None", None, check_variables)
PATTERNS = Kind((Collection,), "a list of patterns", {"nargs": "+", "metavar": "PATTERN"}, _are_patterns)
SECONDS = Kind((Real,), "a number of seconds", {"type": float, "metavar": "SECONDS"}, _is_positive)
SECONDS_OR_ZERO = replace(SECONDS, check=_is_positive_or_zero)
SECONDS_OR_NEVER = Kind(
    (Real, NONE),
    "a number of seconds, or None",
    {"type": _seconds_or_none, "metavar": "SECONDS"},
    _is_positive,
)
LIVENESS = Kind(
    (Liveness, NONE),
    "a todist.Liveness or None",
    {"type": Liveness.parse, "metavar": "interval=1,patience=10"},
)


# The options.


@dataclass(frozen=True)
class LaunchOptions:
    """All options of a launch: of each its type, what it can be, what it means, and its default."""

    hosts: Annotated[
        str | Sequence[str],
        HOSTS,
        "a list of hosts, each ``[user@]host[:port]`` or a name of SSH's configuration file. Rank 0 is on the first. "
        'Names of this machine need no SSH. ``"slurm"``: those of the SLURM job; ``"auto"``: these if the job has '
        "several, else this machine.",
    ] = "auto"
    nproc_per_host: Annotated[
        int | str | Sequence[int | str],
        NPROC,
        'the number of workers on each host, or a list with a number for each. ``"cpu"``: one a core; ``"gpu"``: one '
        'a GPU; ``"gpu:<number>"``: so many, if there are as many GPUs; ``"auto"``: one a GPU if there is one, else '
        "one a core.",
    ] = "auto"
    rpc: Annotated[bool, SWITCH, "connect the workers for remote calls, as ``auto_init_rpc`` does."] = False
    backend: Annotated[
        str | None,
        BACKEND,
        'make them torch\'s default process group, by ``"gloo"`` or ``"nccl"``. ``None``: make none.',
    ] = None
    max_restarts: Annotated[
        int, RESTARTS, "how often all workers are started again after one has failed."
    ] = 0
    on_loss: Annotated[
        str,
        ON_LOSS,
        'what happens when a worker that is not rank 0 dies before its function has returned: ``"end"`` ends all, '
        '``"continue"`` lets the others go on, and the result tells who was lost. An exception ends all in any case. '
        "With ``rpc`` the workers' group goes on likewise, and calls may have ``retries``. With "
        '``"replace"`` they go on, too, and the launcher starts a new process for the lost rank, which runs the '
        "function from its beginning and joins the group, over ZeroMQ.",
    ] = "end"
    max_replacements: Annotated[
        int,
        RESTARTS,
        'how often each rank gets a new process, with ``on_loss="replace"``; its next death ends all.',
    ] = 3
    min_hosts: Annotated[
        int | None,
        NUMBER_OF_HOSTS,
        "with how many hosts the work goes on when others are lost, or cannot be reached. Workers are started again "
        "whenever hosts are lost or come back. Given this or ``max_hosts``, a lost host is no error until there have "
        "been too few for ``start_timeout``. ``None``: all of them.",
    ] = None
    max_hosts: Annotated[
        int | None,
        NUMBER_OF_HOSTS,
        "how many hosts take part at a time; others wait until one is lost. ``None``: all of them.",
    ] = None
    log_dir: Annotated[
        str | Path | None,
        FOLDER,
        'a folder, made if need be, where every rank\'s output is added to a file ``rank<n>.log``. ``"auto"``: a '
        "folder of this launch's own, named after its time, in ``$TODIST_LOG_DIR`` or, if that is not set, in "
        '``todist_logs``, as soon as there is a line. ``None`` or ``"none"``: no files.',
    ] = "auto"
    handlers: Annotated[
        Sequence[logging.Handler] | None,
        HANDLERS,
        "handlers of ``logging`` that get every line of every rank; see ``torchopt_dist.launch.on_ranks``. ``None``: "
        "the lines of local rank 0 go to the terminal.",
    ] = None
    env: Annotated[
        Mapping[str, str] | None,
        VARIABLES,
        "variables for the workers, besides those of this process on this machine, and of ``copy_env`` on others.",
    ] = None
    env_file: Annotated[
        str | Path | None,
        PATH,
        "a file of such variables, a line ``NAME=value`` each; ``env`` has the last word.",
    ] = None
    copy_env: Annotated[
        Sequence[str],
        PATTERNS,
        'patterns of names, such as ``"CUDA*"``, of the variables of this process that workers on other machines get; '
        "the rest of their environment is what programs have there.",
    ] = COPIED
    python: Annotated[
        str | None,
        PYTHON,
        "the interpreter on other machines; ``None``: this one's path. It must have the same versions of Python, "
        "torch and torchopt_dist, and there must be the same working folder.",
    ] = None
    ssh_config: Annotated[
        str | Path | None, PATH, "SSH's configuration file; ``None``: ``~/.ssh/config``."
    ] = None
    master_port: Annotated[int, PORT, "the port at which workers meet; 0: a free one."] = 0
    timeout: Annotated[
        float | None,
        SECONDS_OR_NEVER,
        "seconds after which the launch is given up, restarts included. ``None``: never.",
    ] = None
    start_timeout: Annotated[float, SECONDS, "seconds for all workers to reach the function."] = 120.0
    stop_timeout: Annotated[
        float,
        SECONDS_OR_ZERO,
        "seconds for workers to end after SIGTERM, when another has failed or the launch is interrupted or "
        "terminated, before they are killed.",
    ] = 3.0
    exit_timeout: Annotated[
        float,
        SECONDS,
        "seconds for processes to end when all functions have returned, before they are killed.",
    ] = 10.0
    liveness: Annotated[
        Liveness | None,
        LIVENESS,
        "how often launcher, hosts and workers give signs of life, and after how many seconds one counts as lost that "
        "gives none: a host that is silent, a launcher that a host does not hear of, a worker that a signal such as "
        "SIGSTOP has stopped. ``None``: what ``TODIST_LIVENESS`` says, by default 10 s.",
    ] = None

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            TypeError: one is of the wrong type.
            ValueError: one is out of range.
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
def _table() -> dict[str, tuple[Kind, str]]:
    """Option → what it can be, what it means."""
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
    """Add ``--hosts``, ``--nproc-per-host``, ``--rpc`` and so on, a group of options of their own.

    The parsed arguments make a launcher by :meth:`Launcher.from_args`. Their names are those of its arguments, whose
    defaults are theirs.

    Args:
        parser: the program's parser.

    Example:
        >>> import argparse
        >>> from torchopt_dist.launch import Launcher, add_launcher_args
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


# Arguments of other functions.


def check_integer(name: str, value: object, rule: str = "be an integer") -> None:
    """Refuse what is no integer; those of numpy are.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must {rule}, got {type(value).__name__} {value!r:.200}")


def check_handler(name: str, rule: str, handler: object) -> None:
    """Refuse what is no handler of ``logging``.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(handler, logging.Handler):
        raise TypeError(f"`{name}` must {rule}, got {type(handler).__name__} {handler!r:.200}")
