"""Threads that seed torch's generators → turns, so that each thread draws from its own seed.

Torch has one default generator a device for all threads of a process. A *turn* is a time in which a thread computes
with states of its own. An *exclusive* turn is a step of an inner loop, or a task that may run again elsewhere and is to
draw the same numbers there. Two of these never compute at the same time. The turns of other tasks are *shared*: they
compute at the same time, but do not begin while an exclusive one computes; an exclusive task waits for them, too.

A thread that waits for a call lends its turn: others compute meanwhile, and then it goes on with its own states. So
threads go on whatever calls they wait for. They may wait for each other in ways that nobody knows of here, too. If the
process has been quiet for a while, who waits for a turn goes on without it, with a warning.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, Self

import torch

from torchopt_dist.core.generators import (
    WITH_GPUS,
    States,
    draw,
    draw_from,
    have_changed,
    restore,
    seed_all,
    states,
)
from torchopt_dist.core.uncompiled import in_trace
from torchopt_dist.torch_private import asking_thread, outside_of_transforms, transforms_are_active

__all__ = [
    "Turn",
    "change_generators",
    "draw_seed",
    "draw_seed_returnable",
    "kept_generators",
    "lent",
    "seed_of_task",
    "seed_step",
    "visiting",
]

P = ParamSpec("P")

PATIENCE = 600.0
"""Seconds that a thread waits for its turn while this process computes."""
SHORT_PATIENCE = 5.0
"""Seconds that it waits while this process seems to wait itself, in a way that is not known here."""
QUIET = 0.1
"""The part of one core's time under which it seems so."""

_ALONE = nullcontext()
_SHARED, _STEP, _TASK = range(3)
"""Kinds of turns; the last two are exclusive."""
_lock = threading.Lock()
_changed = threading.Condition(_lock)
_inside: list[Turn] = []
"""The turns that compute; of turns within each other the innermost."""
_crowd = 0
"""How many threads wait for a turn."""
_away = 0
"""How many threads wait for calls."""
_last: States = []
"""How the last change that was made here left the generators; empty unless a turn asks whether it draws."""
_visitor = threading.local()


class Turn:
    """A context in which a thread may seed the generators and draw.

    While an ``exclusive`` turn computes, no other exclusive one does, and if it is a task's, no task. A task has a
    ``seed``: the generators are seeded, and restored at the end; for a step of an inner loop the loop itself sees to
    them. ``drew``, if somebody ``asks``, is whether numbers were drawn while it computed, by whomever.
    """

    def __init__(self, *, exclusive: bool, seed: int | None = None, asks: bool = False) -> None:
        self.kind = _SHARED if not exclusive else _STEP if seed is None else _TASK
        self.asks = asks
        self.drew = False
        self.overstayed = False  # others no longer wait for its end
        self.found: States = []  # the states that its end restores
        self._seed = seed

    def __enter__(self) -> Self:
        self.thread = asking_thread()
        self.visits = getattr(_visitor, "visits", False)
        with _lock:
            outer = self._outer = _turn_of(self.thread) if _inside else None
            self.outermost: Turn = self if outer is None else outer.outermost
            if _last:
                _look()
            has_come = True
            if outer is None:
                if _inside or self.visits:
                    has_come = _wait_for(self)
            else:
                _inside.remove(outer)
                if self.kind > outer.kind:
                    has_come = self._wait_within(outer)
                self.kind = max(self.kind, outer.kind)
            _inside.append(self)
            if self._seed is not None:
                self.found = states() if outer is not None else _outside() or states()
                seed_all(self._seed)
            if _last or self.asks:
                _see()
        if not has_come:
            try:
                _warn()
            except BaseException:
                self.__exit__()
                raise
        return self

    def _wait_within(self, outer: Turn) -> bool:
        """Wait as part of a turn of another kind, which lets others compute meanwhile."""
        if _is_free(self):
            return True
        own = states()
        try:
            has_come = _wait_for(self)
        except BaseException:
            _inside.append(outer)
            raise
        restore(own)
        return has_come

    def __exit__(self, *_: object) -> None:
        with _lock:
            if _last:
                _look()
            if self in _inside:  # unless it was interrupted when it was to go on
                _inside.remove(self)
                if self._seed is not None and (self._outer is not None or not _outside()):
                    restore(self.found)
            if self._outer is not None:
                _inside.append(self._outer)
            if _last or (self._outer is not None and self._outer.asks):
                _see()
            if _crowd:
                _changed.notify_all()


class _Lent:
    """A context in which a thread waits for a call, and others compute, perhaps for its sake."""

    def __enter__(self) -> None:
        global _away
        with _lock:
            _away += 1
            self._mine = mine = _turn_of(asking_thread()) if _inside else None
            if mine is not None:
                _look()
                self._own = states()
                _inside.remove(mine)
                if not _inside:
                    restore(mine.outermost.found)
                _see()
            if _crowd:
                _changed.notify_all()

    def __exit__(self, *_: object) -> None:
        global _away
        with _lock:
            _away -= 1
            mine = self._mine
            if mine is None:
                has_come = _away > 0 or _wait_until(_nobody_visits)
            else:
                has_come = _wait_for(mine)
                _look()
                if mine.outermost.found:
                    mine.outermost.found = _outside() if _inside else states()
                restore(self._own)
                _inside.append(mine)
                _see()
        if not has_come:
            _warn()


lent = _Lent


@contextmanager
def visiting() -> Iterator[None]:
    """A context of a thread that computes in the place of another process, so only while this one waits for calls."""
    _visitor.visits = True
    try:
        yield
    finally:
        _visitor.visits = False


def change_generators(change: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Seed the generators or set their states by a function, not while another thread computes in an exclusive turn.

    Within a turn, what it does is not taken for a draw.
    """
    with _lock:
        if _inside and _turn_of(asking_thread()) is None:
            _wait_until(_nobody_is_exclusive)
        _look()
        change(*args, **kwargs)
        _see()


def seed_step(seed: int, number: int) -> None:
    """Seed the generators for one step."""
    own = (seed + number * 0x9E3779B97F4A7C15) % 2**63
    change_generators(seed_all if WITH_GPUS else torch.default_generator.manual_seed, own)


def kept_generators() -> AbstractContextManager[None]:
    """Restore the states of the generators when the context is left."""
    return _Kept()


class _Kept:
    """As a class, which is entered and left sooner than a generator with ``contextmanager``."""

    def __enter__(self) -> None:
        self._before = states()

    def __exit__(self, *exception: object) -> None:
        change_generators(restore, self._before)


def draw_seed() -> int:
    """A number below ``2**62`` from the default generator, to derive seeds from.

    While another thread computes a task, the number is of the states that the task's end restores.
    """
    if in_trace.get():
        raise NotImplementedError(
            "it draws a seed, as calls and inner loops do, which would be the same each time"
        )
    with (
        outside_of_transforms() if transforms_are_active() else _ALONE,
        _lock,
    ):  # `vmap` refuses random numbers
        return _draw(counts=True)


def seed_of_task() -> int:
    """The seed of the task that this thread runs; 0 if it runs none."""
    with _lock:
        mine = _turn_of(asking_thread())
        return 0 if mine is None or mine._seed is None else mine._seed


def draw_seed_returnable() -> tuple[int, Callable[[bool], None]]:
    """What :func:`draw_seed` returns, and a function of whether the seed was needed, to be called once that is known.

    If the seed was not needed, the draw is given back, unless more was drawn since.
    """
    with outside_of_transforms() if transforms_are_active() else _ALONE, _lock:
        before = _state()
        number = _draw(counts=False)
        after = _state()

    def settle(needed: bool) -> None:
        with _lock:
            mine = _turn_of(asking_thread())
            if needed and mine is not None:
                mine.drew = True
            elif not needed and torch.equal(_state(), after):
                _look()
                _set_state(before)
                _see()

    return number, settle


def _draw(*, counts: bool) -> int:
    kept = _kept()
    if kept:
        return draw_from(kept)
    mine = _turn_of(asking_thread()) if _inside else None
    if mine is None and _inside:
        _wait_until(_nobody_is_exclusive)
    _look()
    number = draw()
    if mine is not None and counts:
        mine.drew = True
    _see()
    return number


def _kept() -> States:
    """Where this thread's states are kept while a task of another one computes; empty if they are the generators'."""
    return _outside() if _inside and _turn_of(asking_thread()) is None else []


def _outside() -> States:
    """The states outside of the tasks that compute, which all have found the same; empty if none computes."""
    return next((turn.outermost.found for turn in _inside if turn.outermost.found), [])


def _state() -> torch.Tensor:
    kept = _kept()
    return kept[0][1] if kept else torch.default_generator.get_state()


def _set_state(state: torch.Tensor) -> None:
    kept = _kept()
    if kept:
        kept[0] = kept[0][0], state
    else:
        torch.default_generator.set_state(state)


def _turn_of(thread: object) -> Turn | None:
    for turn in _inside:
        if turn.thread is thread:
            return turn
    return None


def _is_free(mine: Turn) -> bool:
    """Whether a turn may compute now."""
    if mine.visits and not _away:
        return False
    return all(other.overstayed or (other.kind == _SHARED and mine.kind != _TASK) for other in _inside)


def _nobody_visits() -> bool:
    return _away > 0 or not any(turn.visits and not turn.overstayed for turn in _inside)


def _nobody_is_exclusive() -> bool:
    return not any(turn.kind != _SHARED and not turn.overstayed for turn in _inside)


def _wait_for(mine: Turn) -> bool:
    """Wait until a turn may compute; returns whether it may, and is not to go on all the same."""
    return _is_free(mine) or _wait_until(lambda: _is_free(mine))


def _wait_until(holds: Callable[[], bool]) -> bool:
    """Wait until something holds, or nothing seems to happen; nobody then waits for the present turns again."""
    global _crowd
    if holds():
        return True
    until = time.monotonic() + PATIENCE
    computed = time.process_time()
    _crowd += 1
    _changed.notify_all()
    try:
        while not _changed.wait_for(holds, min(SHORT_PATIENCE, until - time.monotonic())):
            before, computed = computed, time.process_time()
            if computed - before < QUIET * SHORT_PATIENCE or time.monotonic() >= until:
                for turn in _inside:
                    turn.overstayed = True
                return False
    finally:
        _crowd -= 1
    return True


def _warn() -> None:
    warnings.warn(
        "a thread of this process has waited for its turn to draw random numbers, and goes on beside another one that "
        "seems to wait for something else, or never to end: both may draw numbers of each other's seeds. Wait for "
        "calls by `wait()`, start no threads in the loss of an inner loop, or let such functions draw from a "
        "torch.Generator of their own",
        stacklevel=3,
    )


def _look() -> None:
    """Find out whether anything was drawn since the last change that was made here."""
    if _last and have_changed(_last):
        for turn in _inside:
            turn.drew = True


def _see() -> None:
    """Note how a change has left the generators, if anybody asks."""
    global _last
    _last = []
    for turn in _inside:
        if turn.asks:
            _last = states()
            return
