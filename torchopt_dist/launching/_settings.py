"""The launcher's variables, path and arguments, and what a script sets, such as the default dtype → a worker's.

Under torchrun each worker runs the script, and so its statements. Here workers run one function of it.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.backends import cudnn

from torchopt_dist.launching._packing import pack, unpack

__all__ = ["COPIED", "Settings", "check_variables", "import_path", "matching", "read_env_file", "terminal"]

COPIED = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LIBRARY_PATH",
    "PYTHON*",
    "VIRTUAL_ENV",
    "CUDA[!_]*",
    "CUDA_[!V]*",  # CUDA_VISIBLE_DEVICES are those of one machine
    "TORCH*",
    "PYTORCH*",
    "NCCL_*",
    "GLOO_*",
    "TP_*",
    "OMP_*",
    "MKL_*",
    "TODIST_*",
)
"""Variables that go to other hosts, unless others are asked for."""

LINE = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\s*=(.*)")


def _default_device() -> str:
    """The default device; a GPU without a number is the current one."""
    device = torch.get_default_device()
    current = device.type == "cuda" and device.index == torch.cuda.current_device()
    return device.type if current else str(device)


OF_TORCH: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_default_device, torch.set_default_device),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
    ),
    (partial(getattr, cudnn, "benchmark"), partial(setattr, cudnn, "benchmark")),
    (partial(getattr, cudnn, "deterministic"), partial(setattr, cudnn, "deterministic")),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda both: torch.autograd.set_detect_anomaly(*both),
    ),
)
"""Each setting of torch: how it is read, and how it is set."""


@dataclass(frozen=True)
class Settings:
    """What the launcher's process has, and workers get beside their task.

    Attributes:
        env: the environment variables.
        path: ``sys.path``.
        argv: ``sys.argv``.
        folder: the working folder.
        terminal: the name of the terminal; ``None`` if there is none.
        importing: the modules that were being imported when their top level launched, and those of the launches before.
        sources: code that is in no file, such as a notebook's cells: name → its entry in ``linecache``.
        of_torch: those of :data:`OF_TORCH`.
        filters: of warnings: action, patterns of message and module, module and name of the category, line.
        levels: of loggers, by name; the root's is empty.
        handlers: of the root logger, those that write to standard error or output: which, the level, the packed
            formatter.
    """

    env: dict[str, str]
    path: list[str]
    argv: list[str]
    folder: str
    terminal: str | None
    importing: frozenset[str]
    sources: dict[str, Any]
    of_torch: tuple[Any, ...]
    filters: tuple[tuple[Any, str, str, str, str, int], ...]
    levels: dict[str, int]
    handlers: tuple[tuple[str, int, bytes], ...]

    @classmethod
    def capture(cls, importing: frozenset[str] = frozenset()) -> Settings:
        """Read those of this process; the default device is the thread's.

        Args:
            importing: the modules that are being imported.

        Raises:
            FileNotFoundError: the working folder has been deleted.
        """
        root = logging.getLogger()
        loggers = {"": root, **root.manager.loggerDict}
        levels = {name: each.level for name, each in loggers.items() if isinstance(each, logging.Logger)}
        described = (_describe(handler) for handler in root.handlers)
        return cls(
            env=dict(os.environ),
            path=import_path(),
            argv=list(sys.argv),
            folder=_working_folder(),
            terminal=terminal(),
            importing=importing,
            sources={name: entry for name, entry in linecache.cache.items() if _is_in_no_file(entry)},
            of_torch=tuple(read() for read, _ in OF_TORCH),
            filters=tuple(map(_plain, warnings.filters)),
            levels={name: level for name, level in levels.items() if level},
            handlers=tuple(handler for handler in described if handler is not None),
        )

    def apply(self) -> None:
        """Let this process have what the script has set; ``_worker.py`` has taken over the rest."""
        for (read, change), value in zip(OF_TORCH, self.of_torch, strict=True):
            if read() != value:  # some import much
                change(value)
        warnings.resetwarnings()
        for action, message, module, category_module, category_name, line in reversed(self.filters):
            with contextlib.suppress(KeyError, AttributeError):  # who is not imported here warns of nothing
                category = operator.attrgetter(category_name)(sys.modules[category_module])
                warnings.filterwarnings(action, message, category, module, line)
        for name, level in self.levels.items():
            logging.getLogger(name or None).setLevel(level)
        for stream, level, formatter in self.handlers:
            handler = logging.StreamHandler(getattr(sys, stream))
            handler.setLevel(level)
            with contextlib.suppress(Exception):  # its class is not here: the usual form
                handler.setFormatter(unpack(formatter))
            logging.getLogger().addHandler(handler)


def _plain(entry: tuple[Any, ...]) -> tuple[Any, str, str, str, str, int]:
    """A filter of warnings, so that it can be read where the category is unknown."""
    action, message, category, module, line = entry
    patterns = [part.pattern if isinstance(part, re.Pattern) else part or "" for part in (message, module)]
    return action, *patterns, category.__module__, category.__qualname__, line


def _describe(handler: logging.Handler) -> tuple[str, int, bytes] | None:
    """A handler that writes to standard error or output; ``None`` for others, which are this process's alone."""
    if isinstance(handler, logging.StreamHandler):
        for stream in ("stderr", "stdout"):
            if handler.stream in (getattr(sys, stream), getattr(sys, f"__{stream}__")):
                with contextlib.suppress(Exception):
                    return stream, handler.level, pack(handler.formatter)
                return stream, handler.level, b""
    return None


def _is_in_no_file(entry: Any) -> bool:
    """Whether an entry of ``linecache`` is of code without a file: it has no time of change."""
    return len(entry) == 4 and entry[1] is None


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            "the working folder, in which workers would start, has been deleted: change to another one"
        ) from None


def terminal() -> str | None:
    """The name of the terminal that this process reads from; ``None`` if it reads from something else."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.ttyname(sys.stdin.fileno())
    return None


# Environment variables.


def matching(patterns: Iterable[str], env: Mapping[str, str]) -> dict[str, str]:
    """The variables whose names match one of the patterns, such as ``"CUDA*"``.

    Example:
        >>> matching(["HOME", "N*"], {"HOME": "/root", "NO": "1", "ON": "2"})
        {'HOME': '/root', 'NO': '1'}
    """
    patterns = tuple(patterns)
    return {name: env[name] for name in env if any(fnmatchcase(name, pattern) for pattern in patterns)}


def read_env_file(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read lines ``NAME=value``; ``export``, quotes around the value, empty lines and ``#`` comments are allowed.

    Raises:
        ValueError: a line has another form, or the file is not text.
        OSError: the file cannot be read.
    """
    variables = {}
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"`env_file` must be text in UTF-8, got {path}: {error}") from None
    for number, text in enumerate(lines, 1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        if match is None:
            raise ValueError(
                f"`env_file` must hold lines NAME=value, got {text!r} in line {number} of {path}"
            )
        name, value = match.groups()
        quoted = re.match(r"""\s*(["'])(.*?)\1\s*(?:#.*)?$""", value)
        variables[name] = quoted[2] if quoted else re.sub(r"\s+#.*", "", value).lstrip()
    check_variables("env_file", variables)
    return variables


def check_variables(option: str, variables: Mapping[str, str]) -> None:
    """Check that variables, given by an option of the launcher, can be in an environment.

    Raises:
        TypeError: a name or a value is not a string.
        ValueError: a name or a value has characters that an environment cannot hold.
    """
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"`{option}` must map strings to strings, got {name!r}: {value!r}")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(
                f"`{option}` must have names that are not empty and without `=`, and no null characters, "
                f"got {name!r}: {value!r}"
            )


def import_path() -> list[str]:
    """The entries of ``sys.path`` that Python uses: strings only, and no ``Path``, for instance."""
    return [entry for entry in sys.path if isinstance(entry, str)]
