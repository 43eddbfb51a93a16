"""The options of a launch, each described once: its default, its meaning, its check, its argument of command lines.

:class:`Launcher` has these fields, its documentation and :func:`add_launcher_args` are made from them, and a running
launch reads them. ``_cluster.py`` checks what depends on the machines, such as whether there are as many GPUs as asked.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch.distributed as dist

from torchopt_dist.launching._connections import check_shell
from torchopt_dist.launching._settings import COPIED, check_variables
from torchopt_dist.process.liveness import Liveness

__all__ = ["LaunchOptions", "add_launcher_args", "args_section", "check_handler", "check_integer"]

Check = Callable[[str, Any], None]
"""A function of an option's name and value that raises an error."""

NONE = type(None)
PATHS = (str, os.PathLike)


@dataclass(frozen=True, eq=False)  # so that parsers made of dataclasses can hash it
class Rule:
    """What an option can be.

    Attributes:
        words: the types that its value can have, in words, for errors.
        types: these types.
        cli: its arguments of ``ArgumentParser.add_argument``; ``None``: command lines do not have it.
        also: a further check of a value that is not ``None``.
    """

    words: str
    types: tuple[type, ...]
    cli: Mapping[str, Any] | None
    also: Check | None = None

    def check(self, name: str, value: object) -> None:
        """Check the value of an option."""
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            raise TypeError(f"`{name}` must be {self.words}, got {type(value).__name__} {value!r:.200}")
        if isinstance(value, str) and not value:
            raise ValueError(f"`{name}` must be {self.words}, got an empty string")
        if self.also is not None and value is not None:
            self.also(name, value)


# Checks of one option.


def _within(words: str, holds: Callable[[Any], bool]) -> Check:
    """A check of a value's range."""

    def check(name: str, value: Any) -> None:
        if not holds(value):
            raise ValueError(f"`{name}` must be {words}, got {value!r}")

    return check


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


def _are_numbers(name: str, numbers: Any) -> None:
    """Check ``nproc_per_host``, for all hosts or for each; integers may be numpy's."""
    rule = f"`{name}` must be {NPROC}"
    for number in [numbers] if isinstance(numbers, (str, Integral)) else list(numbers):
        if isinstance(number, bool) or not isinstance(number, (Integral, str)):
            raise TypeError(f"{rule}, got {type(number).__name__} {number!r}")
        if isinstance(number, Integral):
            if int(number) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {number}")
            continue
        kind, _, gpus = number.partition(":")
        if kind not in ("auto", "cpu", "gpu") or (gpus and (kind != "gpu" or not gpus.isdecimal())):
            raise ValueError(f"{rule}, got {number!r}")
        if gpus and int(gpus) < 1:
            raise ValueError(f"`{name}` must ask for at least one GPU, got {number!r}")


def check_integer(name: str, value: object, rule: str = "be an integer") -> None:
    """Raise ``TypeError`` for a value that is not an integer; numpy's integers are allowed."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must {rule}, got {type(value).__name__} {value!r:.200}")


def check_handler(name: str, rule: str, handler: object) -> None:
    """Raise ``TypeError`` for a value that is not a handler of ``logging``."""
    if not isinstance(handler, logging.Handler):
        raise TypeError(f"`{name}` must {rule}, got {type(handler).__name__} {handler!r:.200}")


# Arguments of command lines.


def _nproc(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdecimal() else text


def _seconds_or_none(text: str) -> float | None:
    return None if text == "none" else float(text)


class _HostsAction(argparse.Action):
    """A list of names, or the word ``auto`` or ``slurm`` if that is all there is."""

    def __call__(self, parser: object, namespace: object, values: object, option: object = None) -> None:
        assert isinstance(values, list)
        setattr(namespace, self.dest, values[0] if values in (["auto"], ["slurm"]) else values)


# What options have in common. Annotations are evaluated in the class, where a function would not see this module.

NPROC = 'an integer, "auto", "cpu", "gpu" or "gpu:<number>", or a list of these'
LOSSES = ("end", "continue", "replace")
TEXT = ("a string or None", (str, NONE))
PATH = Rule("a path or None", (*PATHS, NONE), {"metavar": "FILE"})
COUNT: dict[str, Any] = {"type": int, "metavar": "N"}
HOW_OFTEN = Rule("an integer", (Integral,), COUNT, _within("at least 0", lambda number: number >= 0))
HOW_MANY_HOSTS = Rule(
    "an integer or None", (Integral, NONE), COUNT, _within("at least 1", lambda number: number >= 1)
)
DURATION = "a positive, finite number of seconds"
POSITIVE = _within(DURATION, lambda seconds: 0 < seconds < math.inf)
SECONDS = Rule("a number of seconds", (Real,), {"type": float, "metavar": "SECONDS"}, POSITIVE)
IN_PORTS = _within("a port, in [0, 65536)", lambda port: 0 <= port < 1 << 16)
SECONDS_OR_0 = replace(SECONDS, also=_within(DURATION, lambda seconds: 0 <= seconds < math.inf))


@dataclass(frozen=True)
class LaunchOptions:
    """All options of a launch."""

    hosts: Annotated[
        str | Sequence[str],
        Rule(
            '"auto", "slurm" or a list of names',
            (Collection,),
            {"nargs": "+", "action": _HostsAction, "metavar": "HOST"},
        ),
        "a list of hosts, each ``[user@]host[:port]`` or a name of SSH's configuration file. Rank 0 is on the first. "
        'Names of this machine need no SSH. ``"slurm"``: those of the SLURM job; ``"auto"``: these if the job has '
        "several, else this machine.",
    ] = "auto"
    nproc_per_host: Annotated[
        int | str | Sequence[int | str],
        Rule(NPROC, (Integral, Collection), {"type": _nproc, "metavar": "N"}, _are_numbers),
        'the number of workers on each host, or a list with a number for each. ``"cpu"``: one per core; ``"gpu"``: one '
        'per GPU; ``"gpu:<number>"``: that number, if there are as many GPUs; ``"auto"``: one per GPU if there is '
        "one, else one per core.",
    ] = "auto"
    rpc: Annotated[
        bool,
        Rule("True or False", (bool,), {"action": "store_true"}),
        "connect the workers for remote calls, as ``auto_init_rpc`` does.",
    ] = False
    backend: Annotated[
        str | None,
        Rule(*TEXT, {"metavar": "NAME"}, _is_backend),
        "make torch's default process group of the workers, with this backend, such as "
        '``"gloo"`` or ``"nccl"``. ``None``: make none.',
    ] = None
    max_restarts: Annotated[
        int,
        HOW_OFTEN,
        "how often all workers are started again after one has failed.",
    ] = 0
    on_loss: Annotated[
        str,
        Rule(
            '"end", "continue" or "replace"',
            (str,),
            {"choices": list(LOSSES)},
            _within(" or ".join(map(repr, LOSSES)), LOSSES.__contains__),
        ),
        'what happens when a worker that is not rank 0 dies before its function has returned: ``"end"`` ends all, '
        '``"continue"`` lets the others go on, and the result tells who was lost. An exception ends all in any case. '
        "With ``rpc`` the workers' group goes on, too, and calls may have ``retries``. With "
        '``"replace"`` they go on, too, and the launcher starts a new process for the lost rank, which runs the '
        "function from its beginning and joins the group, over ZeroMQ.",
    ] = "end"
    max_replacements: Annotated[
        int,
        HOW_OFTEN,
        'how often each rank gets a new process, with ``on_loss="replace"``; its next death ends all.',
    ] = 3
    min_hosts: Annotated[
        int | None,
        HOW_MANY_HOSTS,
        "the least number of hosts with which the work goes on when others are lost or cannot be reached. Workers are "
        "started again whenever hosts are lost or come back. With this or ``max_hosts``, a lost host is an error only "
        "after there have been too few hosts for ``start_timeout``. ``None``: all of them.",
    ] = None
    max_hosts: Annotated[
        int | None,
        HOW_MANY_HOSTS,
        "the largest number of hosts that take part at a time; others wait until one is lost. ``None``: all of them.",
    ] = None
    log_dir: Annotated[
        str | Path | None,
        Rule('a folder, "auto" or None', (*PATHS, NONE), {"metavar": "DIR"}),
        'a folder, made if need be, where every rank\'s output is added to a file ``rank<n>.log``. ``"auto"``: a '
        "folder of this launch's own, named after its time, in ``$TODIST_LOG_DIR`` or, if that is not set, in "
        '``todist_logs``, as soon as there is a line. ``None`` or ``"none"``: no files.',
    ] = "auto"
    handlers: Annotated[
        Sequence[logging.Handler] | None,
        Rule("a list of logging handlers, or None", (Collection, NONE), None, _are_handlers),
        "handlers of ``logging`` that get every line of every rank; see ``todist.launching.on_ranks``. ``None``: the "
        "lines of local rank 0 are written to the terminal.",
    ] = None
    env: Annotated[
        Mapping[str, str] | None,
        Rule("a dictionary or None", (Mapping, NONE), None, check_variables),
        "environment variables for the workers, in addition to those of this process on this machine, and to those of "
        "``copy_env`` on others.",
    ] = None
    env_file: Annotated[
        str | Path | None,
        PATH,
        "a file of such variables, one line ``NAME=value`` for each; a variable in ``env`` takes precedence.",
    ] = None
    copy_env: Annotated[
        Sequence[str],
        Rule("a list of patterns", (Collection,), {"nargs": "+", "metavar": "PATTERN"}, _are_patterns),
        'patterns of names, such as ``"CUDA*"``, of the variables of this process that workers on other machines get; '
        "the rest of their environment is that of the other machine.",
    ] = COPIED
    python: Annotated[
        str | None,
        Rule(*TEXT, {"metavar": "FILE"}),
        "the interpreter on other machines; ``None``: this one's path. It must have the same versions of Python, "
        "torch and torchopt_dist, and there must be the same working folder.",
    ] = None
    shell: Annotated[
        str | None,
        Rule(*TEXT, {"metavar": "COMMAND"}, check_shell),
        "a command that runs a command on a host, in place of SSH, with ``{host}`` where the host's name is to stand, "
        'such as ``"kubectl exec -i {host} --"`` or ``"docker exec -i {host}"``. ``"srun"``: a step of this SLURM job. '
        "``None``: SSH, or, if ``hosts`` are those of a SLURM job and none is reached by SSH, ``srun``.",
    ] = None
    ssh_config: Annotated[
        str | Path | None,
        PATH,
        "SSH's configuration file; ``None``: ``~/.ssh/config``.",
    ] = None
    master_port: Annotated[
        int,
        Rule(
            "an integer",
            (Integral,),
            {"type": int, "metavar": "PORT"},
            IN_PORTS,
        ),
        "the port of the rendezvous store; 0: a free one.",
    ] = 0
    timeout: Annotated[
        float | None,
        Rule(
            "a number of seconds, or None",
            (Real, NONE),
            {"type": _seconds_or_none, "metavar": "SECONDS"},
            POSITIVE,
        ),
        "seconds after which the launch fails, restarts included. ``None``: never.",
    ] = None
    start_timeout: Annotated[
        float,
        SECONDS,
        "seconds until all workers must have reached the function.",
    ] = 120.0
    stop_timeout: Annotated[
        float,
        SECONDS_OR_0,
        "seconds for workers to end, and to run their ``finally`` blocks, when another has failed or the launch is "
        "interrupted or terminated, before they are killed.",
    ] = 3.0
    exit_timeout: Annotated[
        float,
        SECONDS,
        "seconds for processes to end when all functions have returned, before they are killed.",
    ] = 10.0
    liveness: Annotated[
        Liveness | None,
        Rule(
            "a todist.Liveness or None",
            (Liveness, NONE),
            {"type": Liveness.parse, "metavar": "interval=1,patience=10"},
        ),
        "how often launcher, hosts and workers give signs of life, and after how many seconds without one they count "
        "as lost: a host that is silent, a launcher that a host does not hear of, a worker that a signal such as "
        "SIGSTOP has stopped. ``None``: the environment variable ``TODIST_LIVENESS``, or 10 s if it is not set.",
    ] = None

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            TypeError: an option has the wrong type.
            ValueError: an option is out of range, or two options contradict each other.
        """
        for name, (rule, _) in _table().items():
            rule.check(name, getattr(self, name))
        if self._is_elastic and self.on_loss != "end":
            raise ValueError(
                "`on_loss` must be 'end' with `min_hosts` or `max_hosts`, with which all workers start again when "
                f"a host is lost, got {self.on_loss!r}"
            )
        if self.backend is not None and self.on_loss == "replace":
            raise ValueError(
                "`backend` must be None with on_loss='replace', since torch's process group takes up no new process, "
                f"got {self.backend!r}"
            )

    @property
    def _is_elastic(self) -> bool:
        """Whether the work goes on with other hosts when some are lost."""
        return self.min_hosts is not None or self.max_hosts is not None


@cache
def _table() -> dict[str, tuple[Rule, str]]:
    """Option → what it can be, and its meaning."""
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
    for name, (rule, text) in _table().items():
        if rule.cli is not None:
            words = text.replace("``", "").replace("%", "%%").removesuffix(".")
            words += "" if name == "copy_env" else f" (default: {getattr(LaunchOptions, name)})"
            flag = f"--{name.replace('_', '-')}"
            group.add_argument(flag, default=argparse.SUPPRESS, help=words, **rule.cli)
