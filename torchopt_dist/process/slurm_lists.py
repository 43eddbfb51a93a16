"""SLURM's short forms of lists → the lists: ``n[1-3,5]`` is four nodes, ``2(x3),1`` four numbers.

SLURM's own program for that, ``scontrol``, is missing in containers.
"""

from __future__ import annotations

import itertools
import re

__all__ = ["expand_nodes", "expand_numbers"]

NODES = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]+\])+")
RANGE = re.compile(r"(\d+)(?:-(\d+))?")
NUMBER = re.compile(r"0*(\d+)(?:\(x(\d+)\))?")


def expand_nodes(text: str) -> list[str]:
    """The names of the nodes in a list such as ``SLURM_JOB_NODELIST``.

    Raises:
        ValueError: the list has another form.

    Example:
        >>> expand_nodes("n[08-10,2],login,r[1-2]c[1-2]")
        ['n08', 'n09', 'n10', 'n2', 'login', 'r1c1', 'r1c2', 'r2c1', 'r2c2']
    """
    parts = NODES.findall(text)
    if ",".join(parts) != text or not parts:
        raise ValueError(f"a list of SLURM's nodes must be of the form n[1-3,5],m2, got {text!r}")
    return [name for part in parts for name in _names(part)]


def _names(part: str) -> list[str]:
    words = re.split(r"\[([^\]]*)\]", part)  # every second one was in brackets
    choices = [_range(word) if index % 2 else [word] for index, word in enumerate(words)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _range(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"a range of SLURM's nodes must be of the form 1-3,5, got {text!r}")
        first, last = match[1], match[2] or match[1]
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def expand_numbers(text: str) -> list[int] | None:
    """The numbers in a list such as ``SLURM_JOB_CPUS_PER_NODE``, one for each node; ``None`` if it has another form.

    Example:
        >>> expand_numbers("8(x2),4")
        [8, 8, 4]
    """
    found: list[int] = []
    for part in text.split(","):
        match = NUMBER.fullmatch(part)
        if match is None:
            return None
        found += [int(match[1])] * int(match[2] or 1)
    return found
