"""A function and what it is given → programs of torch's compiler, or the function's own way where that refuses.

A program is a pure function, traced whole. :class:`Programs` keeps those of all functions of one code by their meaning
(:mod:`~torchopt_dist.core.meaning`): an inner loop's steps, gradients and derivatives, and a worker's tasks, are called
by its one method. Tensors are a program's inputs. A number is a constant of the first program and an input of the
second one, so another value makes no third; it is a constant again where it decides what the program is.
"""

from __future__ import annotations

import itertools
import logging
import operator
import os
import re
import sys
import time
import types
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import cache, lru_cache, partial
from importlib import import_module
from typing import Any, Literal

import numpy as np
import optree
import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.meaning import Family, Meaning, Record, RefusedError
from torchopt_dist.core.reached import parts_of
from torchopt_dist.core.vjp import leaf_like
from torchopt_dist.torch_private import is_one_program_too_many, tracing_gradients, users_of_arrays

__all__ = [
    "CompileMode",
    "Program",
    "Programs",
    "Variant",
    "check_mode",
    "code_of",
    "detached",
    "plain_number",
    "programs_of",
    "timed",
]

CompileMode = bool | Literal["reduce-overhead"]
"""Whether to compile; ``"reduce-overhead"``: on a GPU as CUDA graphs."""

VARIABLE = "TODIST_COMPILE_LIMIT"
LIMIT = 16
"""Of the variants of one function, such as one for each shape, and of the programs that a number decides in one, where
the environment variable does not say it."""

STEPS = 10
"""After how many steps it is known whether they pay."""

_OF_LIBRARIES = (
    "_import_torch_dot_",
    "_import_torchopt_dist_dot_",
    "_import_optree",
    "_builtins_dict",
    "G['torch']",
    "__import__('torch')",
)
"""What is in the names of guards on the code of libraries, torchopt_dist's among them."""
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_OF_ARRAYS = (torch.as_tensor, torch.asarray, torch.tensor)
"""What makes a tensor of an array; in a graph ``torch.from_numpy`` is the first."""
_log = logging.getLogger("torchopt_dist")
_count = itertools.count()


class Programs:
    """Those of all functions of one code; see :func:`programs_of`."""

    def __init__(self, name: str, mode: CompileMode) -> None:
        self.family = Family()
        self.variants: dict[tuple[Any, ...], Variant] = {}
        self._name, self._captured = name, mode == "reduce-overhead"
        self._told: set[str] = set()

    def run(
        self,
        things: Iterable[tuple[str, Any]],
        body: Callable[..., Any],
        otherwise: Callable[[], Any],
        kind: Hashable = None,
        base: Meaning | None = None,
    ) -> Any:
        """What a body makes, or what is made otherwise, with one warning for each reason.

        Args:
            things: what programs depend on, by what a message calls it.
            kind: what else they depend on.
            body: gets the variant of these things, and them; it raises :class:`RefusedError` where programs do.
            otherwise: does the same without the compiler.
            base: the meaning of more things, which come first.
        """
        try:
            meaning = self.meaning(things, kind, base)
            variant = self._variant(meaning.record)
            variant.changed.update(meaning.record.changed(variant.first))
            if not meaning.moves:
                return body(variant, *meaning.things)
            with self.family.lock:
                meaning.move_in()
                try:
                    return body(variant, *meaning.things)
                finally:
                    meaning.move_out()
        except _OneTooManyError:
            reason = self._one_too_many(meaning.record, variant.first)
        except RefusedError as error:
            reason = str(error)
        made = otherwise()  # without the lock: what runs as it is may wait for other workers
        self.tell(reason)
        return made

    def meaning(
        self, things: Iterable[tuple[str, Any]], kind: Hashable = None, base: Meaning | None = None
    ) -> Meaning:
        """The meaning of things, which may be the base of those of several calls.

        Raises:
            RefusedError: something has none.
        """
        try:
            with self.family.lock:
                return Meaning(self.family, things, kind, base)
        except RefusedError:
            raise
        except Exception as error:  # of a class that cannot be asked, such as an uninitialized parameter's
            raise RefusedError(str(error)) from error

    def tell(self, reason: str) -> None:
        """Warn that something runs as it is, once for each reason."""
        if reason not in self._told:
            self._told.add(reason)
            warnings.warn(f"{self._name} with compile=True runs as without it, since {reason}", stacklevel=5)

    def _variant(self, record: Record) -> Variant:
        with self.family.lock:
            found = self.variants.get(record.key)
            if found is None:
                if len(self.variants) >= limit():
                    raise RefusedError(
                        self._one_too_many(record, *(one.first for one in self.variants.values()))
                    )
                found = self.variants[record.key] = Variant(
                    self._name, self._captured, record, measured=not self.variants
                )
            return found

    def _one_too_many(self, record: Record, *others: Record) -> str:
        where, most = record.differs_at(*others), limit()
        return (
            f"{where} differs from that in each of its {most} programs: make what changes a tensor, or have more "
            f"of them by the environment variable {VARIABLE}={2 * most}"
        )


class Variant:
    """The programs of one meaning."""

    def __init__(self, name: str, captured: bool, first: Record, *, measured: bool = False) -> None:
        self.first = first
        self._seconds: list[float] | None = [] if measured else None
        """Of the first steps, until it is known whether they pay."""
        self.changed: set[str] = set()
        """Where numbers were others than in the first call."""
        self._name, self._captured = name, captured
        self._made: dict[Any, Program] = {}

    def program(
        self,
        function: Callable[..., Any],
        look: Callable[[Any], None] | None = None,
        *,
        aloud: bool = False,
    ) -> Program:
        """The program of a pure function; ``look`` and ``aloud`` are as those of :class:`Program`."""
        if function not in self._made:
            self._made[function] = Program(
                function,
                self._name,
                look,
                changed=self.changed,
                captured=self._captured,
                has_arrays=any(type(one) is tuple and one and one[0] is np.ndarray for one in self.first.key),
                aloud=aloud,
            )
        return self._made[function]

    def step(self, run: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """What a step makes; after ten of them, say so once if one takes no longer without the compiler.

        Args:
            run: makes the step.
            otherwise: makes one without the compiler, which is not used.
        """
        known = self._seconds
        if known is None:
            return run()
        made, took = timed(run)
        known.append(took)
        if len(known) > STEPS and self._seconds is not None:  # the first one was compiled
            self._seconds, ours = None, min(known)
            plain = min(timed(otherwise)[1] for _ in range(2))
            if plain <= ours:
                _log.warning(
                    "%s with compile=True takes %.2g ms a step, and %.2g ms without it: "
                    "unless its backward pass gains by it, it does not pay here",
                    self._name,
                    1e3 * ours,
                    1e3 * plain,
                )
        return made


class Program:
    """One function, compiled whole, and never again from the time on when the compiler has refused it.

    Args:
        function: a function of tensors, numbers, and of what is the same at each call.
        name: what the log calls it.
        look: is shown the graph, which it may change; raises for one that must not become a program.
        changed: where numbers have changed since the first call, in words of a meaning.
        captured: on a GPU, capture the program as a CUDA graph where grad mode is off. A graph writes its results to
            the same memory at each run, so each call copies them.
        has_arrays: arrays of numpy are among its inputs.
        aloud: say that it is being compiled also where the output is no terminal and the log does not tell it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        look: Callable[[Any], None] | None = None,
        *,
        changed: Collection[str] = (),
        captured: bool = False,
        has_arrays: bool = False,
        aloud: bool = False,
    ) -> None:
        self._changed, self._has_arrays, self._aloud = changed, has_arrays, aloud
        self._function, self._name, self._look, self._captured = function, name, look, captured
        self._takes_numbers = not captured  # of which torch's are tensors of the CPU
        self._compiled, self._refusal, self.has_run = self._compile(), "", False

    def _compile(self) -> Callable[..., Any]:
        # By the name the compiler knows what has changed, and with the code it keeps programs.
        code = self._function.__code__.replace(co_name=f"{self._function.__name__}_{next(_count)}")
        own = types.FunctionType(code, self._function.__globals__, closure=self._function.__closure__)
        own.__kwdefaults__ = self._function.__kwdefaults__
        how = how_to_compile(captured=self._captured)
        if self._has_arrays:  # which the compiler cannot guard where guards are chosen
            how.pop("options", None)
        how["backend"] = partial(_seen, self._look, how["backend"])
        take_leaves_as_they_are()
        return torch.compile(own, fullgraph=True, dynamic=None if self._takes_numbers else False, **how)

    def __call__(self, *arguments: Any) -> Any:
        """Run the program, which is compiled before if there is none for arguments like these.

        Raises:
            RefusedError: there can be none.
        """
        if self._refusal:
            raise RefusedError(self._refusal)
        begun = time.perf_counter()
        if not self.has_run:
            _tell(f"compiling {self._name}, which takes some 10 to 65 s at its first call", self._aloud)
        try:
            made = self._run(arguments)
        except Exception as error:
            if is_one_program_too_many(error):
                raise _OneTooManyError from error
            if self.has_run and self._takes_numbers:  # perhaps by one that has become an input
                self._takes_numbers = False
                self._compiled = self._compile()
                return self(*arguments)
            self._refusal = f"the compiler refuses it: {_first_line(error)}"
            raise RefusedError(self._refusal) from error
        if not self.has_run:
            self.has_run = True
            _tell(f"compiled {self._name} in {time.perf_counter() - begun:.1f} s", self._aloud)
        return made

    def _run(self, arguments: Sequence[Any]) -> Any:
        captured = self._captured and not torch.is_grad_enabled()
        if captured:
            torch.compiler.cudagraph_mark_step_begin()  # nobody holds results of earlier calls, but copies
        with tracing_gradients(limit(), filter(None, map(_source, self._changed))):
            made = self._compiled(*arguments)
        return pytree.map_tensors(torch.clone, made) if captured else made


@cache
def take_leaves_as_they_are() -> None:
    """Have the compiler call :func:`leaf_like` without a look into it, once for all, where it must not look."""
    if not torch.__version__ >= "2.13":  # by numbers: a `TorchVersion`
        torch.compiler.allow_in_graph(leaf_like)


def _source(place: str) -> str:
    """A number in words of a meaning → a pattern of its name in the compiler's, if that must be told."""
    found = re.search(r"(?:the global `(\w+)`|\.(__defaults__))([^`,:]*)$", place)
    return rf".*\b{found[1] or found[2]}\b('\])?{re.escape(found[3])}$" if found else ""


class _OneTooManyError(Exception):
    """A number decides, and there are as many programs already as there may be."""


@lru_cache(maxsize=64)
def programs_of(code: Any, name: str, mode: CompileMode) -> Programs:
    """The programs of functions of one code, see :func:`code_of`, kept for the process."""
    del code  # of which the cache has the same
    return Programs(name, mode)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What a function makes, and the seconds that it takes, those of a GPU included."""
    begun = time.perf_counter()
    made = function()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return made, time.perf_counter() - begun


def limit() -> int:
    """How many programs one function may have; see :data:`LIMIT`.

    Raises:
        ValueError: the environment variable has no number from 1 on.
    """
    said = os.environ.get(VARIABLE, "").strip()
    if said and not (said.isdecimal() and int(said)):
        raise ValueError(f"the environment variable {VARIABLE} must be a number from 1 on, got {said!r}")
    return int(said or LIMIT)


def check_mode(compile: object) -> None:
    """Check that it is a :data:`CompileMode`, and the limit of programs, too.

    Raises:
        TypeError, ValueError: it is not.
    """
    limit()
    if isinstance(compile, str) and compile != "reduce-overhead":
        raise ValueError(f'`compile` must be True, False or "reduce-overhead", got {compile!r}')
    if not isinstance(compile, (bool, str)):
        raise TypeError(
            f'`compile` must be True, False or "reduce-overhead", got {type(compile).__name__} {compile!r}'
        )


def how_to_compile(*, captured: bool = False) -> dict[str, Any]:
    """The backend and the options, as ``torch.compile`` takes them."""
    return {"backend": partial(_inductor, captured), "options": {"guard_filter_fn": _guards_of_user}}


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


def _seen(
    look: Callable[[Any], None] | None, backend: Callable[[Any, Any], Any], graph: Any, inputs: Sequence[Any]
) -> Any:
    """What a backend makes of a graph, after a look at it.

    Raises:
        NotImplementedError: it computes with an array as numpy does, of which an entry is a number in the function, and
            a tensor of the array's dtype in the graph.
    """
    for array, user in users_of_arrays(graph):
        if user.target not in _OF_ARRAYS and (user.target is not operator.getitem or user.args[0] is array):
            frames = re.findall(r'File "(.+)", line \d+.*\n *(.*)', user.stack_trace or "")
            lines = [line for file, line in frames if not file.startswith(_PACKAGE)]
            raise NotImplementedError(
                f"an array of numpy is used as it is in `{''.join(lines[-1:])}`: make a tensor of it first, by "
                "torch.as_tensor"
            )
    if look is not None:
        look(graph)
    return backend(graph, inputs)


def plain_number(leaf: Any) -> Any:
    """An argument; a whole number of numpy, which the compiler takes for a tensor, as Python's."""
    return int(leaf) if type(leaf) is np.int64 else leaf


def detached(tree: Any) -> Any:
    """The values of a tree, where the compiler traces, too."""
    return optree.tree_map(
        lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree, none_is_leaf=True
    )


def code_of(function: Any) -> Any:
    """What stays the same where a program makes a function anew: its code, or the type of what is called."""
    if isinstance(function, (partial, tuple)):  # or a transformation, or the links of a chain
        return tuple(map(code_of, parts_of(function)))
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


def _guards_of_user(guards: Sequence[Any]) -> list[bool]:
    """Which guards are looked at before each call: not those on code of libraries, which nobody changes meanwhile."""
    return [not any(name in guard.name for name in _OF_LIBRARIES) for guard in guards]


def _tell(text: str, aloud: bool) -> None:
    """Say it in the log, and once a host in a terminal, where somebody may wait, or ``aloud`` in the log's place."""
    _log.info(text)
    shows = sys.stderr.isatty() or (aloud and not _log.isEnabledFor(logging.INFO))
    if shows and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"torchopt_dist: {text}", file=sys.stderr, flush=True)


def _first_line(error: Exception) -> str:
    """What the compiler says first, without who says it, and what to do where no C++ compiler is installed.

    Where the code raises an error, that error's text.
    """
    raised = re.search(r"raised exception \w+\(\W*?(?:ConstantVariable\(str: )?(['\"])(.*?)\1", str(error))
    if raised:
        return raised[2]
    lines = [line for line in str(error).strip().splitlines() if not line.endswith("raised:")]
    first = lines[0] if lines else type(error).__name__
    if "C++ compiler" not in first:
        return first
    return (
        f"{first} (install one, for example by `apt install g++`, or name it in the environment variable CXX)"
    )
