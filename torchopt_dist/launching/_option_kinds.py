"""A value that was given for an option of a launcher → the same, or an error; and how command lines give it.

An option's kind has its types, the words for them in errors, its argument of a command line, and a check.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch.distributed as dist

from torchopt_dist.launching._environment import check_variables
from torchopt_dist.launching._shell import check_shell
from torchopt_dist.process.liveness import Liveness

__all__ = [
    "BACKEND",
    "FOLDER",
    "HANDLERS",
    "HOSTS",
    "LIVENESS",
    "NPROC",
    "NUMBER_OF_HOSTS",
    "ON_LOSS",
    "PATH",
    "PATTERNS",
    "PORT",
    "PYTHON",
    "RESTARTS",
    "SECONDS",
    "SECONDS_OR_NEVER",
    "SECONDS_OR_ZERO",
    "SWITCH",
    "VARIABLES",
    "Kind",
    "check_handler",
    "check_integer",
]

NONE = type(None)
PATHS = (str, os.PathLike)


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
    """A list of names, or the word ``auto`` or ``slurm`` if that is all there is."""

    def __call__(self, parser: object, namespace: object, values: object, option: object = None) -> None:
        assert isinstance(values, list)
        setattr(namespace, self.dest, values[0] if values in (["auto"], ["slurm"]) else values)


@dataclass(frozen=True, eq=False)  # so that parsers made of dataclasses can hash it
class Kind:
    """What an option can be.

    Attributes:
        types: the types that its value can have.
        words: these types in words, for errors.
        argument: its keyword arguments of ``ArgumentParser.add_argument``; ``None``: command lines do not have it.
        check: called with the name and a value that is not ``None``; raises an error if the value is out of range.
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
SHELL = Kind((str, NONE), "a string or None", {"metavar": "COMMAND"}, check_shell)
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


def check_integer(name: str, value: object, rule: str = "be an integer") -> None:
    """Check that a value is an integer; numpy's integers are allowed.

    Raises:
        TypeError: ``value`` is not an integer.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must {rule}, got {type(value).__name__} {value!r:.200}")


def check_handler(name: str, rule: str, handler: object) -> None:
    """Check that a value is a handler of ``logging``.

    Raises:
        TypeError: ``handler`` is not a handler.
    """
    if not isinstance(handler, logging.Handler):
        raise TypeError(f"`{name}` must {rule}, got {type(handler).__name__} {handler!r:.200}")
