"""A function and what it is given → programs of torch's compiler, or the function's own way where that refuses.

A program is the graph of one run (:mod:`~torchopt_dist.core.tracing`), compiled. :class:`Programs` keeps those of all
functions of one code by their meaning (:mod:`~torchopt_dist.core.meaning`): an inner loop's steps, gradients and
derivatives, and a worker's tasks, are called by its one method. Tensors are a program's inputs, by their shape, dtype
and strides. A whole number among the arguments is one, too. Another number is a constant of the first program and an
input of the second one, so another value makes no third, unless the number decides what the program is.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from importlib import import_module
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.code_names import is_installed, top_package
from torchopt_dist.core.evaluation import with_gradients
from torchopt_dist.core.meaning import ChangedError, Family, Meaning, Record, RefusedError
from torchopt_dist.core.program_inputs import Call, Named
from torchopt_dist.core.random_turns import kept_generators
from torchopt_dist.core.reached import parts_of
from torchopt_dist.core.surroundings import modes
from torchopt_dist.core.tracing import Body, Result, trace

__all__ = [
    "Body",
    "CompileMode",
    "Programs",
    "check_mode",
    "code_of",
    "programs_of",
    "timed",
]

CompileMode = bool | Literal["reduce-overhead"]
"""Whether to compile; ``"reduce-overhead"``: on a GPU as CUDA graphs."""

VARIABLE = "TODIST_COMPILE_LIMIT"
LIMIT = 16
"""Of the programs of one function, such as one for each shape, where the environment variable does not say it."""

STEPS = 10
"""After how many steps it is known whether they pay."""

_NUMBERED = 1024
"""So many meanings have a short key."""
_log = logging.getLogger("torchopt_dist")


class Programs:
    """Those of all functions of one code; see :func:`programs_of`."""

    def __init__(self, name: str, mode: CompileMode) -> None:
        self.family = Family()
        self._variants: dict[Hashable, _Variant] = {}
        self._meanings: dict[Hashable, Hashable] = {}
        """By their keys, which are long, the numbers of the first."""
        self._name, self._captured = name, mode == "reduce-overhead"
        self.told: set[str] = set()
        """Why something ran as it is, and a warning has said so."""
        self._seconds: list[float] | None = []
        """Of the first steps, until it is known whether they pay."""

    def run(
        self,
        call: Call,
        body: Body,
        otherwise: Callable[[], Any],
        *,
        kind: Hashable,
        aloud: bool = False,
        is_step: bool = False,
        before: Callable[[list[Tensor]], None] | None = None,
    ) -> Any:
        """What a body makes of a call, or what is made otherwise, with one warning for each reason.

        Args:
            call: things and arguments.
            body: gets the meaning of the things and the arguments; it runs once for each program, and raises
                :class:`RefusedError` where there can be none.
            otherwise: does the same without the compiler.
            kind: tells the body from others, and what it depends on beside the call.
            aloud: say that it is being compiled also where the output is no terminal and the log does not tell it.
            is_step: after ten of them, say so once if one takes no longer without the compiler.
            before: is shown the tensors that the program is about to change in place.
        """
        try:
            if not is_step or self._seconds is None:
                return self.made(call, body, kind, aloud, before)
            return self._measured(lambda: self.made(call, body, kind, aloud, before), otherwise)
        except RefusedError as error:
            reason = str(error)
        made = otherwise()  # without the lock: what runs as it is may wait for other workers
        self.tell(reason)
        return made

    def made(
        self,
        call: Call,
        body: Body,
        kind: Hashable,
        aloud: bool = False,
        before: Callable[[list[Tensor]], None] | None = None,
    ) -> Any:
        """As :meth:`run`, but where there can be no program.

        Raises:
            RefusedError: there can be none.
        """
        variant = self._variant(call, kind)
        program = variant.program(call, body, aloud)
        if before is not None:
            before(program.changes(call))
        return program(call)

    def constants(self, call: Call, body: Body, kind: Hashable) -> Any:
        """What a body makes that is no tensor; nothing runs but the body, once.

        Raises:
            RefusedError: there can be no program of it.
        """
        variant = self._variant(call, kind)
        return variant.program(call, body, None).constants()

    def has(self, call: Call, kind: Hashable) -> bool:
        """Whether there is a program of this kind."""
        variant = self._variants.get(self._key(call, kind))
        return variant is not None and bool(variant.programs)

    def meaning(self, things: Iterable[Named], base: Meaning | None = None) -> Meaning:
        """The meaning of things, which may be the base of those of several calls.

        Raises:
            RefusedError: something has none.
        """
        try:
            with self.family.lock:
                return Meaning(self.family, things, base)
        except RefusedError:
            raise
        except Exception as error:  # of a class that cannot be asked, such as an uninitialized parameter's
            raise RefusedError(str(error)) from error

    def tell(self, reason: str) -> None:
        """Warn that something runs as it is, once for each reason."""
        if reason not in self.told:
            self.told.add(reason)
            level, frame = 1, sys._getframe()
            while frame.f_back is not None and _is_installed(frame):  # to the caller's line
                level, frame = level + 1, frame.f_back
            warnings.warn(
                f"{self._name} with compile=True runs as without it, since {reason}", stacklevel=level
            )

    def _key(self, call: Call, kind: Hashable) -> Hashable:
        meaning = call.meaning
        number = meaning.number_of.get(self)
        if number is None:
            key = meaning.record.key
            if len(self._meanings) < _NUMBERED:  # of a key that changes at each call there is no end
                self._meanings.setdefault(key, len(self._meanings))
            number = meaning.number_of[self] = self._meanings.get(key, key)
        return number, kind, call.spec, call.signature

    def _variant(self, call: Call, kind: Hashable) -> _Variant:
        key = self._key(call, kind)
        if (
            known := self._variants.get(key)
        ) is not None:  # without the lock, which who compiles another one holds
            return known
        with self.family.lock:
            found = self._variants.get(key)
            if found is None:
                others = [one.first for one in self._variants.values() if one.kind == kind]
                if len(others) >= limit():
                    raise one_too_many(call.record, *others)
                found = self._variants[key] = _Variant(self._name, self._captured, self.family, call, kind)
            return found

    def _measured(self, run: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        def without() -> Any:
            with kept_generators():
                return otherwise()

        known = self._seconds
        made, took = timed(run)
        if known is None:
            return made
        known.append(took)
        if len(known) > STEPS and self._seconds is not None:  # the first one was compiled
            self._seconds, ours = None, min(known)
            plain = min(timed(without)[1] for _ in range(2))
            if plain <= ours:
                _log.warning(
                    "%s with compile=True takes %.2g ms a step, and %.2g ms without it: "
                    "unless its backward pass gains by it, it does not pay here",
                    self._name,
                    1e3 * ours,
                    1e3 * plain,
                )
        return made


class _Variant:
    """The programs of one meaning, which numbers tell apart."""

    def __init__(self, name: str, captured: bool, family: Family, call: Call, kind: Hashable) -> None:
        self.first, self.kind = call.record, kind
        self._numbers = call.numbers
        self._name, self._captured, self._family = name, captured, family
        self.programs: list[_Program] = []
        self._refusal = ""

    def program(self, call: Call, body: Body, aloud: bool | None) -> _Program:
        """The program for a call, which is made if there is none yet.

        Raises:
            RefusedError: there can be none.
        """
        for program in self.programs:
            if program.takes(call.numbers):
                return program
        with self._family.lock:
            for program in self.programs:
                if program.takes(call.numbers):
                    return program
            if self._refusal:
                raise RefusedError(self._refusal)
            if len(self.programs) >= limit():
                raise one_too_many(call.record, self.first)
            changed = {n for n, (a, b) in enumerate(zip(call.numbers, self._numbers, strict=True)) if a != b}
            begun = time.perf_counter()
            _tell(f"compiling {self._name}, which takes some 5 to 45 s at its first call", aloud)
            made = self._made(call, body, call.indices | changed)
            _tell(f"compiled {self._name} in {time.perf_counter() - begun:.1f} s", aloud)
            self.programs.append(made)
            return made

    def _made(self, call: Call, body: Body, unknown: set[int]) -> _Program:
        if unknown and not self._captured:  # whose inputs are tensors of one device
            with suppress(Exception):  # perhaps it is refused by a number that is an input
                return _Program(call, body, unknown, captured=False)
        try:
            return _Program(call, body, set(), captured=self._captured)
        except ChangedError:
            raise
        except Exception as error:
            self._refusal = f"the compiler refuses it: {_reason(error)}"
            raise RefusedError(self._refusal) from error


class _Program:
    """One graph, compiled.

    Args:
        call: the first call.
        body: what is called.
        unknown: the indices of the numbers that are inputs.
        captured: on a GPU, capture the program as a CUDA graph. A graph writes its results to the same memory at each
            run, so each call copies them.
    """

    def __init__(self, call: Call, body: Body, unknown: set[int], *, captured: bool) -> None:
        inputs = call.inputs()
        with with_gradients(torch.is_grad_enabled()):
            graph = trace(body, call, inputs, unknown)
        self._is_cast = any(is_on for _, is_on, _ in modes().autocast)  # whose casts are in the graph
        self._compiled = None
        if graph.changed or any(type(leaf) is Result and not leaf.is_given for leaf in graph.leaves):
            with with_gradients(False), self._around():
                self._compiled = kernels(captured, graph.module, graph.stand_ins)
        self._unknown, self._captured = sorted(unknown), captured
        self._known = tuple(None if n in unknown else x for n, x in enumerate(call.numbers))
        self._is_float = [type(call.numbers[place]) is float for place in self._unknown]
        self._condition = graph.trace.condition()
        self._inputs, self._leaves, self._spec = graph.inputs, graph.leaves, graph.spec
        self._changed = graph.changed

    @contextmanager
    def _around(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for device in ("cpu", "cuda") if self._is_cast else ():
                stack.enter_context(torch.autocast(device, enabled=False))
            yield

    def takes(self, numbers: tuple[float, ...]) -> bool:
        """Whether it is the program for such numbers."""
        if not self._unknown:
            return self._known == numbers
        if any(own is not None and own != one for own, one in zip(self._known, numbers, strict=True)):
            return False
        return self._condition is None or self._condition([numbers[place] for place in self._unknown])

    def constants(self) -> Any:
        """What it makes that is no tensor."""
        return pytree.unflatten(self._spec, self._leaves)

    def changes(self, call: Call) -> list[Tensor]:
        """The tensors that it changes in place."""
        return [[*call.tensors, *call.meaning.tensors][place] for place in self._changed]

    def __call__(self, call: Call) -> Any:
        """Run it.

        Raises:
            RefusedError: a tensor that it changes shares memory with another one.
        """
        given: list[Any] = call.inputs()
        for place, is_float in zip(self._unknown, self._is_float, strict=True):
            number = call.numbers[place]
            given.append(torch.tensor(number, dtype=torch.float64) if is_float else number)
        for place in self._changed:
            _refuse_shared(given, place)
        with self._around():
            if self._captured:
                torch.compiler.cudagraph_mark_step_begin()  # nobody holds results of earlier calls, but copies
            made = self._compiled(*[given[place] for place in self._inputs]) if self._compiled else []
            if self._captured:
                made = [one.clone() for one in made]
        leaves = list(self._leaves)
        for place, leaf in enumerate(leaves):
            if type(leaf) is Result:
                leaves[place] = given[leaf.number].detach() if leaf.is_given else made[leaf.number]
        return pytree.unflatten(self._spec, leaves)


def _refuse_shared(given: Sequence[Any], place: int) -> None:
    """Refuse a call in which another input is in the memory of one that is changed in place."""
    memory = given[place].untyped_storage().data_ptr()
    others = (one for number, one in enumerate(given) if number != place and isinstance(one, Tensor))
    if any(one.untyped_storage().data_ptr() == memory for one in others):
        raise RefusedError(
            f"it changes a tensor of shape {tuple(given[place].shape)} in place, which shares memory with another one"
        )


def one_too_many(record: Record, *others: Record) -> RefusedError:
    """The refusal of one program more than there may be."""
    where, most = record.differs_at(*others), limit()
    return RefusedError(
        f"{where} differs from that in each of its {most} programs: make what changes a tensor, or have more "
        f"of them by the environment variable {VARIABLE}={2 * most}"
    )


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


def kernels(captured: bool, graph: Any, inputs: Sequence[Any]) -> Any:
    """A graph → its kernels."""
    options = {
        # Random numbers as torch draws them, so that a program drops out what the function itself does.
        "fallback_random": True,
        # The processor's own vectors, without a look whether the compiler makes them: that starts a Python process for
        # each kind, 7 s in all, and a compiler of torch's C++20 does.
        "cpp.vec_isa_ok": True,
        "triton.cudagraphs": captured,
    }
    return import_module("torch._inductor").compile(graph, inputs, options)


def code_of(function: Any) -> Any:
    """What stays the same where a program makes a function anew: its code, or the type of what is called."""
    if isinstance(function, (partial, tuple)):  # or a transformation, or the links of a chain
        return tuple(map(code_of, parts_of(function)))
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


def _tell(text: str, aloud: bool | None) -> None:
    """Say it in the log, and once a host in a terminal, where somebody may wait, or ``aloud`` in the log's place."""
    if aloud is None:  # nothing is compiled
        return
    _log.info(text)
    shows = sys.stderr.isatty() or (aloud and not _log.isEnabledFor(logging.INFO))
    if shows and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"torchopt_dist: {text}", file=sys.stderr, flush=True)


_OF_VALUES = {
    "DataDependentOutputException": "a branch, or a number, depends on the values of a tensor",
    "GuardOnDataDependentSymNode": "a branch, or a number, depends on the values of a tensor",
    "DynamicOutputShapeException": "a shape depends on the values of a tensor",
}


def _reason(error: BaseException) -> str:
    """What is wrong, in which line of the caller's; what to do where no C++ compiler is installed."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = _OF_VALUES.get(type(error).__name__, lines[0])
    if "instantiate FakeTensorMode" in text:
        text = "it takes a tensor in a way that cannot be seen: pass it as an argument, or close over it"
    if "C++ compiler" in text:
        return f"{text} (install one, for example by `apt install g++`, or name it in the environment variable CXX)"
    own = [
        one.line
        for frame, one in zip(
            traceback.walk_tb(error.__traceback__), traceback.extract_tb(error.__traceback__), strict=True
        )
        if not _is_installed(frame[0])
    ]
    return f"{text}, in `{own[-1]}`" if own and own[-1] else text


def _is_installed(frame: FrameType) -> bool:
    return is_installed(top_package(frame.f_globals.get("__name__", "")))
