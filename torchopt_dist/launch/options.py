"""A launcher's options → the same, if each is of a type that it can have and within its bounds.

What needs the machines, such as whether there are as many GPUs as asked for, is seen in ``cluster.py``.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any

from torchopt_dist.launch.environment import check_variables
from torchopt_dist.launch.groups import check_backend

__all__ = ["check_integer", "check_line_filter", "check_options"]

LEAST_AGENT_TIMEOUT = 2.0
PATH = (str, os.PathLike)
SECONDS = "a number of seconds"

TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "hosts": ((Collection,), '"auto", "slurm" or a list of names'),
    "nproc_per_host": (
        (Integral, Collection),
        'an integer, "auto", "cpu", "gpu" or "gpu:<number>", or a list of these',
    ),
    "rpc": ((bool,), "True or False"),
    "backend": ((str, type(None)), "a string or None"),
    "max_restarts": ((Integral,), "an integer"),
    "min_hosts": ((Integral, type(None)), "an integer or None"),
    "max_hosts": ((Integral, type(None)), "an integer or None"),
    "log_dir": ((*PATH, type(None)), 'a folder, "auto" or None'),
    "handlers": ((Collection, type(None)), "a list of logging handlers, or None"),
    "env": ((Mapping, type(None)), "a dictionary or None"),
    "env_file": ((*PATH, type(None)), "a path or None"),
    "copy_env": ((Collection,), "a list of patterns"),
    "python": ((str, type(None)), "a string or None"),
    "ssh_config": ((*PATH, type(None)), "a path or None"),
    "master_port": ((Integral,), "an integer"),
    "timeout": ((Real, type(None)), f"{SECONDS}, or None"),
    "start_timeout": ((Real,), SECONDS),
    "stop_timeout": ((Real,), SECONDS),
    "exit_timeout": ((Real,), SECONDS),
    "agent_timeout": ((Real,), SECONDS),
    "halted_timeout": ((Real, type(None)), f"{SECONDS}, or None"),
}
"""Option → the types that it can have, and how these are called."""


def check_options(given: Mapping[str, Any]) -> None:
    """Hold a launcher's options to their types and bounds.

    Args:
        given: all of them, by name.

    Raises:
        TypeError: one is of the wrong type.
        ValueError: one is out of range.
    """
    for name, (types, words) in TYPES.items():
        value = given[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise TypeError(f"`{name}` must be {words}, got {type(value).__name__} {value!r:.200}")
        if isinstance(value, str) and not value:
            raise ValueError(f"`{name}` must be {words}, got an empty string")
        if name.endswith("timeout") and given[name] is not None:
            _check_seconds(name, given[name])
    check_backend(given["backend"])
    for name, least in (("max_restarts", 0), ("min_hosts", 1), ("max_hosts", 1)):
        if given[name] is not None and given[name] < least:
            raise ValueError(f"`{name}` must be at least {least}, got {given[name]}")
    if not 0 <= given["master_port"] < 1 << 16:
        raise ValueError(f"`master_port` must be a port, in [0, 65536), got {given['master_port']}")
    if given["agent_timeout"] < LEAST_AGENT_TIMEOUT:
        raise ValueError(
            f"`agent_timeout` must be at least {LEAST_AGENT_TIMEOUT:g} s, since signs of life come every second, "
            f"got {given['agent_timeout']}"
        )
    for handler in given["handlers"] or ():
        _check_handler("handlers", "hold logging.Handler objects", handler)
    check_variables("env", given["env"] or {})
    patterns = given["copy_env"]
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"`copy_env` must be a list of patterns, got {patterns!r}")


def check_line_filter(handler: object, ranks: object) -> None:
    """Hold the arguments of ``on_ranks`` to their types.

    Raises:
        TypeError: one is of the wrong type.
    """
    _check_handler("handler", "be a logging.Handler", handler)
    if ranks is None:
        return
    if not isinstance(ranks, Collection) or isinstance(ranks, (str, bytes)):
        raise TypeError(f"`ranks` must be a list of integers, got {type(ranks).__name__} {ranks!r:.200}")
    for rank in ranks:
        check_integer("ranks", rank, "hold integers")


def check_integer(name: str, value: object, rule: str = "be an integer") -> None:
    """Hold an argument to integers, those of numpy included.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must {rule}, got {type(value).__name__} {value!r:.200}")


def _check_seconds(name: str, seconds: float) -> None:
    if not 0 <= seconds < math.inf or (seconds == 0 and name != "stop_timeout"):
        raise ValueError(f"`{name}` must be a positive, finite number of seconds, got {seconds}")


def _check_handler(name: str, rule: str, handler: object) -> None:
    if not isinstance(handler, logging.Handler):
        raise TypeError(f"`{name}` must {rule}, got {type(handler).__name__} {handler!r:.200}")
