"""Exceptions of many kinds, in ``ERRORS``, and some awkward ones; importable on workers."""

from __future__ import annotations

import json
import pickle
import subprocess
import urllib.error
from pathlib import Path

import torch


class Plain(Exception):
    pass


class Odd(Exception):
    """Its arguments are not those of its ``__init__``."""

    def __init__(self, code, *, reason):
        super().__init__(f"code {code}: {reason}")
        self.code = code
        self.reason = reason

    def __str__(self):
        return f"odd {self.code}"


class Counting(ValueError):
    """Its ``__init__`` must not run a second time."""

    made = 0

    def __init__(self):
        Counting.made += 1
        super().__init__("counted")


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code):
        super().__init__(code)
        self.code = code


class New(Exception):
    def __new__(cls, code, extra):
        return super().__new__(cls, code)

    def __init__(self, code, extra):
        super().__init__(code)
        self.extra = extra


class Two(KeyError, AttributeError):
    pass


class Frozen(Exception):
    def __setattr__(self, name, value):
        raise AttributeError("frozen")


class Shadow(Exception):
    """It has attributes of its own by the names that a remote error has."""

    def __init__(self):
        super().__init__("shadow")
        self.worker = "mine"


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("cannot be told")


def caught(function):
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


ERRORS = [
    ValueError("a", 1),
    ValueError(),
    KeyError("key"),
    IndexError(3),
    ZeroDivisionError("zero"),
    StopIteration(5),
    AssertionError(),
    NotImplementedError("later"),
    RecursionError("deep"),
    MemoryError("much"),
    OSError(2, "no such file", "data.pt"),
    PermissionError(13, "no", "a", None, "b"),
    ConnectionResetError(104, "reset"),
    TimeoutError("late"),
    BlockingIOError(11, "again"),
    UnicodeDecodeError("utf-8", b"\xff\xfe", 0, 1, "invalid start byte"),
    UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range"),
    SyntaxError("bad", ("file.py", 3, 7, "x = = 1")),
    ImportError("no module", name="missing", path="/missing"),
    ModuleNotFoundError("no module", name="gone"),
    AttributeError("no attribute", name="x", obj=None),
    NameError("no name", name="y"),
    caught(lambda: json.loads("{")),
    caught(lambda: int("x")),
    caught(lambda: {}["gone"]),
    caught(lambda: b"\xff".decode()),
    caught(lambda: Path("/no/such/file").read_text()),
    caught(lambda: torch.ones(2) @ torch.ones(3)),
    caught(lambda: torch.ones(2)[5]),
    subprocess.CalledProcessError(3, ["make", "all"], b"out", b"err"),
    pickle.PicklingError("cannot"),
    torch.cuda.OutOfMemoryError("much"),
    urllib.error.URLError("unreachable"),
    Plain("text"),
    Plain(),
    Odd(7, reason="why"),
    Counting(),
    New(3, "more"),
    Two("both"),
]
