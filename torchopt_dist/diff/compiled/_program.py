"""A function of a step's parts and tensors → the program that torch's compiler makes of it, kept for the process.

Dynamo keeps the programs of a function with its code, eight at most, and looks through them at each call. So each kind
of step (one loss, one structure of parameters, one kind of optimizer) gets the function with code of its own.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from torchopt_dist import pytree
from torchopt_dist._torch_private import tracing_gradients
from torchopt_dist.diff.compiled._functions import Parts

__all__ = ["Program", "program_for"]

_OF_LIBRARIES = (
    "_import_torch_dot_",
    "_import_torchopt_dist_dot_",
    "_import_optree",
    "_builtins_dict",
    "G['torch']",
    "__import__('torch')",
)
"""What is in the names of guards on the code of libraries, torchopt_dist's among them."""
_BY_KIND = tuple(f"parts.{name}" for name in Parts._fields if name not in ("call", "optimizer"))
"""What the names of guards begin with on what is the same for all steps of a kind."""


class Program:
    """One function for one kind of step; a call returns ``None``, and warns, where the compiler refuses it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        self._compiled = torch.compile(own, fullgraph=True, dynamic=False, **how_to_compile())
        self._refused = False

    def __call__(self, *arguments: Any) -> Any:
        """Run the program, which is compiled before if there is none for arguments like these."""
        if self._refused:
            return None
        try:
            with tracing_gradients():
                return self._compiled(*arguments)
        except Exception as error:  # the loop goes on as it is, and raises this itself if the loss is wrong
            self._refused = True
            warnings.warn(
                "an inner loop with compile=True runs as without it, since the compiler refuses its loss or its "
                f"optimizer: {_first_line(error)}",
                stacklevel=2,
            )
            return None


def how_to_compile() -> dict[str, Any]:
    """The backend or its options, as ``torch.compile`` takes them."""
    return {
        "options": {
            "guard_filter_fn": _guards_of_user,
            # Random numbers as torch draws them, so that a compiled loop drops out what another one does.
            "fallback_random": True,
            # A name of their own for these programs in Inductor's cache on disk, where torch 2.13 mixes those that
            # may overwrite what they have kept for the backward pass with those that must not (`tracing_gradients`).
            "benchmark_harness": False,
        }
    }


def program_for(function: Callable[..., Any], parts: Parts, loss: Callable[..., Any]) -> Program:
    """The program for steps of this kind, or a new one."""
    trees = tuple(str(pytree.flatten(tree)[1]) for tree in (parts.template, parts.argument))
    rest = parts._replace(call=_code(loss), optimizer=_code(parts.optimizer), template=trees, argument=None)
    return _program(function, rest)


@lru_cache(maxsize=64)
def _program(function: Callable[..., Any], kind: Parts) -> Program:
    return Program(function)


def _code(function: Any) -> Any:
    """What stays the same where a program makes a function anew: its code, or the type of what is called."""
    if isinstance(function, partial):
        return (_code(function.func), *map(_code, function.args), *map(_code, function.keywords.values()))
    if isinstance(function, tuple):  # a transformation, or the links of a chain
        return tuple(map(_code, function))
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


def _guards_of_user(guards: Sequence[Any]) -> list[bool]:
    """Which guards are looked at before each call: not those on code of libraries, which nobody changes meanwhile."""
    return [
        not (guard.name.startswith(_BY_KIND) or any(name in guard.name for name in _OF_LIBRARIES))
        for guard in guards
    ]


def _first_line(error: Exception) -> str:
    """What the compiler says first, without who says it, and what to do where no C++ compiler is installed."""
    lines = [line for line in str(error).strip().splitlines() if not line.endswith("raised:")]
    first = lines[0] if lines else type(error).__name__
    if "C++ compiler" not in first:
        return first
    return (
        f"{first} (install one, for example by `apt install g++`, or name it in the environment variable CXX)"
    )
