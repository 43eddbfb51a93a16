"""A function → the program that torch's compiler makes of it, or the function's own way where the compiler refuses.

Dynamo keeps the programs of a function with its code, eight at most, and looks through them at each call. So each
:class:`Program` has a function with code of its own.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import types
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch

from torchopt_dist import pytree
from torchopt_dist.torch_private import one_program_too_many, tracing_gradients

__all__ = ["CompileMode", "Program", "check_mode", "code_of", "how_to_compile"]

CompileMode = bool | Literal["reduce-overhead"]
"""Whether to compile; ``"reduce-overhead"``: on a GPU as CUDA graphs."""

_OF_LIBRARIES = (
    "_import_torch_dot_",
    "_import_torchopt_dist_dot_",
    "_import_optree",
    "_builtins_dict",
    "G['torch']",
    "__import__('torch')",
)
"""What is in the names of guards on the code of libraries, torchopt_dist's among them."""
_log = logging.getLogger("torchopt_dist")


class Program:
    """One function, compiled whole; it is called as it is from the time on when the compiler has refused it.

    Args:
        function: a function of tensors, and of what is the same at each call or makes another program.
        name: what the warning calls it.
        constant: what names of guards begin with on what is the same at each call.
        check: raises for a graph that must not become a program.
        warns: whether a refusal is told; not where another program takes this one's place.
        captured: on a GPU, capture the program as a CUDA graph where grad mode is off. A graph writes its results to
            the same memory at each run, so each call copies them.
        again: a function and its arguments that find or make this program in another process.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        constant: Sequence[str] = (),
        *,
        check: Callable[[Any], None] | None = None,
        warns: bool = True,
        captured: bool = False,
        again: tuple[Callable[..., Program], tuple[Any, ...]] | None = None,
    ) -> None:
        own = types.FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__, closure=function.__closure__
        )
        how = how_to_compile(tuple(constant), captured=captured)
        if check is not None:
            how["backend"] = partial(_checked, check, how["backend"])
        self._compiled = torch.compile(own, fullgraph=True, dynamic=False, **how)
        self._name, self._warns, self._again = name, warns, again
        self._captured, self._is_refused, self._is_full, self.has_run = captured, False, False, False

    def __reduce__(self) -> tuple[Callable[..., Program], tuple[Any, ...]]:
        if self._again is None:
            raise TypeError(f"the program of {self._name} stays in its process")
        return self._again

    def __call__(
        self, *arguments: Any, otherwise: Callable[[], Any], left_out: set[int] | None = None, **named: Any
    ) -> Any:
        """Run the program, which is compiled before if there is none for arguments like these.

        Args:
            arguments: those of the function.
            otherwise: does the same without the compiler; it raises if the function itself is wrong.
            left_out: ids of programs which arguments like these are one kind too many for; such a call adds its own.
            named: more arguments of the function.
        """
        if self._is_refused or (left_out is not None and id(self) in left_out):
            return otherwise()
        begun = time.perf_counter()
        captured = self._captured and not torch.is_grad_enabled()
        if captured:
            torch.compiler.cudagraph_mark_step_begin()  # nobody holds results of earlier calls, but copies
        if not self.has_run:
            _tell(f"compiling {self._name}, which takes some 10 to 65 s at its first call")
        try:
            with tracing_gradients():
                made = self._compiled(*arguments, **named)
            if captured:
                made = pytree.map_tensors(torch.clone, made)
        except Exception as error:
            made = otherwise()
            last = one_program_too_many(error)
            self._is_refused = last is None
            if last is not None and left_out is not None:
                left_out.add(id(self))
            if self._warns and not (last is not None and self._is_full):
                why = f"since the compiler refuses it: {_first_line(error)}"
                if last is not None:
                    self._is_full = True
                    why = (
                        "for the kinds of arguments that are new to it: there are programs for as many as "
                        f"`torch._dynamo.config.recompile_limit` allows, the last one for `{last}`. These go on; to "
                        "have one for all, give it what changes as a tensor"
                    )
                warnings.warn(f"{self._name} with compile=True runs as without it, {why}", stacklevel=2)
            return made
        if not self.has_run:
            self.has_run = True
            _tell(f"compiled {self._name} in {time.perf_counter() - begun:.1f} s")
        return made


def check_mode(compile: object) -> None:
    """Check that it is a :data:`CompileMode`.

    Raises:
        TypeError, ValueError: it is not.
    """
    if isinstance(compile, str) and compile != "reduce-overhead":
        raise ValueError(f'`compile` must be True, False or "reduce-overhead", got {compile!r}')
    if not isinstance(compile, (bool, str)):
        raise TypeError(
            f'`compile` must be True, False or "reduce-overhead", got {type(compile).__name__} {compile!r}'
        )


def how_to_compile(constant: tuple[str, ...], *, captured: bool = False) -> dict[str, Any]:
    """The backend and the options, as ``torch.compile`` takes them."""
    return {
        "backend": partial(_inductor, captured),
        "options": {"guard_filter_fn": partial(_guards_of_user, constant)},
    }


def _inductor(captured: bool, graph: Any, inputs: Sequence[Any]) -> Any:
    """A graph → its kernels."""
    options = {
        # Random numbers as torch draws them, so that a program drops out what the function itself does.
        "fallback_random": True,
        # A name of their own for these programs in Inductor's cache on disk, where torch 2.13 mixes those that
        # may overwrite what they have kept for the backward pass with those that must not (`tracing_gradients`).
        "benchmark_harness": False,
        # The processor's own vectors, without a look whether the compiler makes them: that starts a Python process for
        # each kind, 7 s in all, and a compiler of torch's C++20 does.
        "cpp.vec_isa_ok": True,
        "triton.cudagraphs": captured and not torch.is_grad_enabled(),
    }
    return import_module("torch._inductor").compile(graph, inputs, options)


def _checked(
    check: Callable[[Any], None], backend: Callable[[Any, Any], Any], graph: Any, inputs: Sequence[Any]
) -> Any:
    """What a backend makes of a graph, after a look at it."""
    check(graph)
    return backend(graph, inputs)


def code_of(function: Any) -> Any:
    """What stays the same where a program makes a function anew: its code, or the type of what is called."""
    if isinstance(function, partial):
        return (
            code_of(function.func),
            *map(code_of, function.args),
            *map(code_of, function.keywords.values()),
        )
    if isinstance(function, tuple):  # a transformation, or the links of a chain
        return tuple(map(code_of, function))
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


def _guards_of_user(constant: tuple[str, ...], guards: Sequence[Any]) -> list[bool]:
    """Which guards are looked at before each call: not those on code of libraries, which nobody changes meanwhile."""
    return [
        not (guard.name.startswith(constant) or any(name in guard.name for name in _OF_LIBRARIES))
        for guard in guards
    ]


def _tell(text: str) -> None:
    """Say it in the log, and in a terminal once a host, where somebody may wait."""
    _log.info(text)
    if sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"torchopt_dist: {text}", file=sys.stderr, flush=True)


def _first_line(error: Exception) -> str:
    """What the compiler says first, without who says it, and what to do where no C++ compiler is installed."""
    lines = [line for line in str(error).strip().splitlines() if not line.endswith("raised:")]
    first = lines[0] if lines else type(error).__name__
    if "C++ compiler" not in first:
        return first
    return (
        f"{first} (install one, for example by `apt install g++`, or name it in the environment variable CXX)"
    )
