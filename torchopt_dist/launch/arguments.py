"""A program's argument parser → one that knows the options of a launch, too."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_launcher_args"]


def _nproc(text: str) -> int | str:
    """A number of workers as it is written on a command line."""
    return int(text) if text.lstrip("-").isdecimal() else text


def _seconds(text: str) -> float | None:
    """A number of seconds, or ``none``."""
    return None if text == "none" else float(text)


class _Hosts(argparse.Action):
    """Names; the words ``auto`` and ``slurm``, alone, are what they are to a launcher."""

    def __call__(self, parser: object, namespace: object, values: object, option: object = None) -> None:
        assert isinstance(values, list)
        setattr(namespace, self.dest, values[0] if values in (["auto"], ["slurm"]) else values)


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
    group = parser.add_argument_group("launch", "where the workers run, and how many", argument_default=None)

    def add(name: str, **options: Any) -> None:
        group.add_argument(name, default=argparse.SUPPRESS, **options)

    add("--hosts", nargs="+", action=_Hosts, metavar="HOST", help="hosts, or slurm; the default is auto")
    add(
        "--nproc-per-host",
        type=_nproc,
        metavar="N",
        help="workers on each host: a number, auto, cpu, gpu or gpu:<number>; the default is auto",
    )
    add("--rpc", action="store_true", help="connect the workers for remote calls")
    add(
        "--backend",
        metavar="NAME",
        help="make them torch's process group, by gloo or nccl; the default is not to",
    )
    add("--max-restarts", type=int, metavar="N", help="start all workers again so often; the default is 0")
    add(
        "--min-hosts",
        type=int,
        metavar="N",
        help="go on with so many hosts when others are lost; the default: do not",
    )
    add(
        "--max-hosts",
        type=int,
        metavar="N",
        help="so many hosts take part at a time; the default is all of them",
    )
    add(
        "--log-dir",
        metavar="DIR",
        help="a folder for every rank's output; none: no files; the default is auto",
    )
    add("--env-file", metavar="FILE", help="variables for the workers, a line NAME=value each")
    add(
        "--copy-env",
        nargs="+",
        metavar="PATTERN",
        help="variables that workers on other machines get, such as CUDA*",
    )
    add("--python", metavar="FILE", help="the interpreter on other machines; the default is this one's path")
    add("--ssh-config", metavar="FILE", help="SSH's configuration; the default is ~/.ssh/config")
    add("--master-port", type=int, metavar="PORT", help="where workers meet; the default is a free port")
    add("--timeout", type=float, metavar="SECONDS", help="give up after so long; the default is never")
    add("--start-timeout", type=float, metavar="SECONDS", help="for the workers to start; the default is 120")
    add("--stop-timeout", type=float, metavar="SECONDS", help="between SIGTERM and SIGKILL; the default is 3")
    add(
        "--agent-timeout",
        type=float,
        metavar="SECONDS",
        help="for a sign of life of a host; the default is 5",
    )
    add(
        "--exit-timeout",
        type=float,
        metavar="SECONDS",
        help="for processes to end after the function; the default is 10",
    )
    add(
        "--halted-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="for a stopped worker to go on; none: as long as it takes; the default is 5",
    )
