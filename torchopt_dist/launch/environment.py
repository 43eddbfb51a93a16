"""A worker's place → the environment variables that torchrun would set; a file of variables → a dictionary."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchopt_dist.launch.cluster import Host

__all__ = ["COPIED", "check_variables", "chosen_by", "import_path", "read_env_file", "torchrun_variables"]

COPIED = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LIBRARY_PATH",
    "PYTHON*",
    "VIRTUAL_ENV",
    "CUDA*",
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


def torchrun_variables(
    *,
    hosts: list[Host],
    host: int,
    local_rank: int,
    master: tuple[str, int],
    run_id: str,
    restarts: int,
    max_restarts: int,
    env: Mapping[str, str],
) -> dict[str, str]:
    """What torchrun sets for one worker.

    Args:
        hosts: all hosts.
        host: the worker's own, by its place among them.
        local_rank: the worker's rank there.
        master: address and port of the store at which workers meet; the launcher holds it.
        run_id: a name of this launch that no other has.
        restarts: how often the workers have been started again.
        max_restarts: how often they may be.
        env: the environment, two variables of which are left as they are if they are set.
    """
    here = hosts[host]
    rank, world_size = here.first_rank + local_rank, sum(host.workers for host in hosts)
    variables = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": here.workers,
        "GROUP_RANK": host,
        "GROUP_WORLD_SIZE": len(hosts),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
    }
    if here.workers > 1 and "OMP_NUM_THREADS" not in env:
        variables["OMP_NUM_THREADS"] = 1
    return {name: str(value) for name, value in variables.items()}


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
        ValueError: a line is none of these, or the file is no text.
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
    """Hold variables to what an environment can have.

    Args:
        option: the launcher's, by which they were given.
        variables: the variables.

    Raises:
        TypeError: a name or a value is no string.
        ValueError: a system has no place for it.
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
    """``sys.path`` as Python goes through it: what is no string in it, such as a ``Path``, does nothing."""
    return [entry for entry in sys.path if isinstance(entry, str)]
