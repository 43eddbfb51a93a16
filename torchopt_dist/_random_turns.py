"""Threads that seed torch's generators → one after another where they draw, so that each draws from its own seed.

Torch has one default generator a device for all threads of a process. A *turn* is a time in which a thread seeds them
and computes. Turns of threads that draw random numbers are taken one after another. Turns that are known to draw
nothing run at the same time, and if a number is drawn in one of them all the same, or a turn has begun because another
one seemed never to end, all turns of that time end with an error.

A *task* is the same for a share of a call. Tasks of several threads do not wait for each other, but a *guest*, one that
was to run in another process, computes only while the others here wait, and they while it waits.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, TypeVar

from torchopt_dist._generators import (
    States,
    draw,
    draw_returnable,
    generators,
    have_changed,
    never_drawn,
    restore,
    states,
)
from torchopt_dist._room import Room
from torchopt_dist._torch_private import asking_thread, outside_of_transforms, transforms_are_active

__all__ = [
    "Draws",
    "Task",
    "Turn",
    "change_generators",
    "draw_seed",
    "draw_seed_returnable",
    "lent",
    "wait_for_guests",
]

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = 60.0
"""Seconds that a thread waits for a turn that draws."""
SHORT_PATIENCE = 5.0
"""Seconds that it waits if neither turn is known to draw: threads of the loss itself may be waiting for each other."""


class Draws:
    """What is known of a function: whether it draws random numbers; ``None`` if it has not been called yet."""

    __slots__ = ("known",)

    def __init__(self, known: bool | None = None) -> None:
        self.known = known

    def find_out(self) -> None:
        """Find out, after a call of the function with seeded generators, where there are other threads."""
        if self.known is None and threading.active_count() > 1:
            self.known = not never_drawn()

    def agree(self, other: Draws) -> bool:
        """Whether neither of two functions draws, as far as is known."""
        return self.known is False and other.known is False


_NOTHING = Draws(False)
_ALONE = nullcontext()
_lock = threading.Lock()
_ended = threading.Condition(_lock)
_room = Room()
_running: list[Turn] = []
_tasks: list[Task] = []
_waiting = 0
"""How many threads wait for the end of a turn."""
_left: States | None = None
"""The states in which the generators were left at the last look, if a turn runs that was not alone."""
_left_by_tasks: States | None = None
"""The same, if several tasks are computed."""


class Turn:
    """A context in which a thread may seed the generators and draw; within another one of its own it does nothing.

    Args:
        draws: what is known of what is computed in it; to be written to when more is known.

    Raises:
        RuntimeError: random numbers were drawn in several threads at the same time.
    """

    outer: Turn | None = None
    seeded = False
    """Generators have been seeded in it."""
    beside = False
    """It was not alone for some time."""
    mixed = False
    """Numbers were drawn in that time."""
    overstayed = False
    """Others no longer wait for its end."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws

    def __enter__(self) -> None:
        self.ident = threading.get_ident()
        self.thread = asking_thread()
        with _lock:
            if not _running and _left_by_tasks is None:  # nobody else draws
                _running.append(self)
                return
            if _running:
                self.outer = _turn_of(self.thread)
            if self.outer is None:
                _begin(self)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self.outer is not None:
            if self.draws.known:
                self.outer.draws.known = True
            return
        with _lock:
            if _is_alone(self) and not _waiting:
                _running.clear()
                return
            _end(self)
        if self.mixed:
            self.draws.known = True
            if error is None:
                raise RuntimeError(
                    "the losses of inner loops must not draw random numbers in two threads at the same time, since "
                    "torch has one generator for all threads of a process: this thread's turn began after "
                    f"{PATIENCE:g} s of waiting for the other's end, or a loss draws that did not in its first step. "
                    "Use processes, or let the loss draw from a torch.Generator of its own that it seeds"
                )


class Task:
    """A context that seeds the generators for one task and restores them.

    Args:
        seed: of the task.
        guest: whether it computes only while no other task does.
        draws: is told if the task draws random numbers; ``None``: nobody asks.
    """

    mixed = False
    """Numbers were drawn while another thread computed a task."""

    def __init__(self, seed: int, *, guest: bool = False, draws: Draws | None = None) -> None:
        self._seed = seed
        self.guest = guest
        self.draws = draws
        self._changed: States = []

    def __enter__(self) -> None:
        self.thread = asking_thread()
        self._outer = _task_of(self.thread) if _tasks else None
        if self._outer is not None:
            self.guest |= self._outer.guest
        _room.enter(self, guest=self.guest, instead_of=self._outer)
        try:
            change_generators(self._begin)
        except BaseException:
            _room.leave(self, back=self._outer)
            raise

    def __exit__(self, *_: object) -> None:
        try:
            change_generators(self._end)
        finally:
            _room.leave(self, back=self._outer)
        if self.mixed:
            warnings.warn(
                "tasks drew random numbers in several threads of this worker at the same time, so these may not be "
                "the numbers of their seeds: let such tasks draw from a torch.Generator of their own, or call the "
                "worker from one place at a time",
                stacklevel=3,
            )

    def _begin(self) -> None:
        self._before = states()
        for generator, _ in self._before:
            generator.manual_seed(self._seed)
        if self._outer is not None:
            _tasks.remove(self._outer)
        _tasks.append(self)

    def _end(self) -> None:
        restore(self._before)
        if self in _tasks:  # unless it was interrupted when it was to go on
            _tasks.remove(self)
        if self._outer is not None:
            _tasks.append(self._outer)

    def look(self, draws: Draws) -> None:
        """Find out whether anything was drawn since the generators were changed, by this task or by others."""
        if have_changed(self._changed) or len(generators()) > len(self._changed):  # a GPU came into use
            draws.known = True

    def see(self, draws: Draws, drawn: bool) -> None:
        """Note how the generators have been changed, and whether by a draw of this task's thread."""
        self._changed = states()
        if drawn and self.thread is asking_thread():
            draws.known = True

    def pause(self) -> None:
        """Wait for other workers, so that other tasks may compute here."""
        change_generators(self._pause)
        _room.leave(self)

    def _pause(self) -> None:
        _tasks.remove(self)
        if self.guest:  # whoever computes next finds the generators as this one has found them
            self._own = states()
            restore(self._before)

    def go_on(self) -> None:
        """Compute again."""
        _room.enter(self, guest=self.guest)
        change_generators(self._go_on)

    def _go_on(self) -> None:
        if self.guest:
            self._before = states()
            restore(self._own)
        _tasks.append(self)


def wait_for_guests() -> None:
    """Wait until no guest computes in this process."""
    if _room.guest is not None and _task_of(asking_thread()) is None:
        _room.wait_for_guest()


def change_generators(change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Seed the generators or set their states by a function, not while another thread draws.

    Within a turn, what it does is not taken for a draw.
    """
    with _lock:
        for task in _tasks:
            if task.draws is not None:
                task.look(task.draws)
        mine = _running[0] if _running else None
        if (
            _left_by_tasks is None
            if mine is None
            else mine.ident == threading.get_ident() and _is_alone(mine)
        ):
            if mine is not None:
                mine.seeded = True
            made = change(*args, **kwargs)
            if len(_tasks) > 1:
                _see()
        else:
            own = _turn_of(asking_thread()) if _running else None
            if own is not None:
                own.seeded = True
            elif _running:
                _wait(_NOTHING)
                for other in _running:
                    other.beside = True
            _look()
            made = change(*args, **kwargs)
            _see()
        for task in _tasks:
            if task.draws is not None:
                task.see(task.draws, change is draw)
        return made


def _drawn_by(take: Callable[[], T]) -> T:
    with outside_of_transforms() if transforms_are_active() else _ALONE:  # `vmap` refuses random numbers
        if not _running or _turn_of(asking_thread()) is None:
            return change_generators(take)
        return take()


draw_seed = functools.partial(_drawn_by, draw)  # a function would be one more call of Python code
"""A number below ``2**62`` from the default generator, to derive seeds from; not while another thread draws."""


def draw_seed_returnable() -> tuple[int, Callable[[bool], None]]:
    """What :func:`draw_seed` returns, and a function of whether the seed was needed, to be called once that is known.

    If the seed was not needed, the draw is given back, unless more was drawn since.
    """
    number, give_back = _drawn_by(draw_returnable)

    def settle(needed: bool) -> None:
        if not needed:
            _drawn_by(give_back)
        elif (task := _task_of(asking_thread())) is not None and task.draws is not None:
            task.draws.known = True

    return number, settle


def lent() -> AbstractContextManager[None]:
    """A context in which a thread only waits, and others may draw, perhaps for its sake."""
    return _lent(asking_thread()) if _running or _tasks else _ALONE


@contextmanager
def _lent(thread: object) -> Iterator[None]:
    mine, task = _turn_of(thread), _task_of(thread)
    if task is not None:
        task.pause()
    if mine is not None:
        with _lock:
            before = states()
            _end(mine)
    try:
        yield
    finally:
        if mine is not None:
            with _lock:
                _begin(mine)
                restore(before)
                _see()
        if task is not None:
            task.go_on()


def _is_alone(mine: Turn) -> bool:
    """Whether nothing was ever computed beside a turn that runs, so that what is drawn needs no look."""
    return len(_running) == 1 and not mine.beside and _left_by_tasks is None


def _turn_of(thread: object) -> Turn | None:
    for turn in _running:
        if turn.thread is thread:
            return turn
    return None


def _task_of(thread: object) -> Task | None:
    return next((task for task in tuple(_tasks) if task.thread is thread), None)


def _begin(mine: Turn) -> None:
    if _running:
        _wait(mine.draws)
    if _running:
        for one in (mine, *_running):
            one.beside = True
    _look()
    _running.append(mine)
    _see()


def _end(mine: Turn) -> None:
    _look()
    _running.remove(mine)
    _see()
    if _waiting:
        _ended.notify_all()


def _wait(draws: Draws) -> None:
    """Wait until nothing runs, but for what is known to draw nothing where that is known of ``draws``, too."""
    global _waiting
    begun = time.monotonic()
    while others := [one for one in _running if not one.overstayed and not one.draws.agree(draws)]:
        drawing = draws.known or any(one.draws.known for one in others)
        left = begun + (PATIENCE if drawing else SHORT_PATIENCE) - time.monotonic()
        if left > 0:
            _waiting += 1
            try:
                _ended.wait(left)
            finally:
                _waiting -= 1
        else:
            for one in others:
                one.overstayed = True


def _look() -> None:
    """Find out whether anything was drawn since the last look by threads that were not alone."""
    if not _running:
        if _left_by_tasks is not None and have_changed(_left_by_tasks):
            for task in _tasks:
                task.mixed = True
        return
    first = _running[0]
    if not first.beside and len(_running) == 1:
        return
    if (first.seeded and not never_drawn()) if _left is None else have_changed(_left):
        for one in _running:
            one.mixed = True


def _see() -> None:
    global _left, _left_by_tasks
    _left = states() if _running and (_running[0].beside or len(_running) > 1) else None
    _left_by_tasks = states() if len(_tasks) > 1 else None
