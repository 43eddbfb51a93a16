"""The launcher's variables, a file of variables, patterns of names → those that workers get."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

__all__ = ["COPIED", "check_variables", "chosen_by", "import_path", "read_env_file"]

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


def chosen_by(patterns: Iterable[str], env: Mapping[str, str]) -> dict[str, str]:
    """The variables whose names match one of the patterns, such as ``"CUDA*"``.

    Example:
        >>> chosen_by(["HOME", "N*"], {"HOME": "/root", "NO": "1", "ON": "2"})
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
