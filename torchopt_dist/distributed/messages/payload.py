"""The partitions of one worker → ``Payload``: all its work for one call, sent as one message."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import optree
from torch import Tensor, nn

from torchopt_dist.core.programs import CompileMode, check_mode
from torchopt_dist.core.random_turns import draw_seed
from torchopt_dist.core.types import Args, KwArgs
from torchopt_dist.distributed.messages.caller_state import CallerState
from torchopt_dist.distributed.messages.stacked import Stacked

__all__ = ["ExecutionKwargs", "ExecutionOptions", "Payload", "Surrounded", "group_by_worker"]


@dataclass  # not a frozen one, which takes more than twice as long to make; likewise `Call` and `Reply`
class Payload:
    """The work of one worker for one call.

    Attributes:
        tasks: ``(args, kwargs)`` for each call of the function.
        seeds: for each task the seed of torch's generators, which does not depend on the number of workers; ``None``
            for one of the package's own, which draws nothing and waits for no other.
        ticket: of the caller's progress bar, if there is one.
        samples: how many the tasks hold, if the worker is to measure how long one takes; else 0.
        stacked: the places of the leaves of the only one of ``tasks`` that hold all tasks, if these are stacked; the
            only value is then what all return, which ``split_values`` splits.
    """

    function: Callable[..., Any]
    tasks: tuple[tuple[Args, KwArgs], ...]
    seeds: tuple[int | None, ...]
    state: CallerState
    options: ExecutionOptions
    ticket: tuple[int, int] | None = None
    samples: int = 0
    stacked: tuple[int, ...] = ()

    def plain(self) -> tuple[Any, ...]:
        """Its fields, with the fields of this package's objects instead of the objects."""
        options = tuple(vars(self.options).values())
        function, tasks, seeds, state, _, *more = vars(self).values()
        return function, tasks, seeds, state.plain(), options, *more

    @classmethod
    def of_plain(
        cls,
        function: Callable[..., Any],
        tasks: tuple[tuple[Args, KwArgs], ...],
        seeds: tuple[int | None, ...],
        state: tuple[Any, ...],
        options: tuple[Any, ...],
        *more: Any,
    ) -> Payload:
        """The inverse of :meth:`plain`."""
        return cls(function, tasks, seeds, CallerState.of_plain(*state), ExecutionOptions(*options), *more)

    def tensors(self) -> list[Tensor]:
        """The function's and the arguments' tensors, and the parameters of the modules among these."""
        held: Any = (self.function, self.tasks)
        tensors: list[Tensor] = []
        for leaf in optree.tree_leaves(held):
            if isinstance(leaf, nn.Module):
                tensors.extend(leaf.parameters())
            elif isinstance(leaf, Tensor):
                tensors.append(leaf)
        return tensors


class Surrounded(ABC):
    """A function of this package's own that a worker runs within a context, as it does backwards through its graph."""

    @abstractmethod
    def within(self) -> AbstractContextManager[object]:
        """The context, made anew for each time."""


@dataclass(frozen=True)
class ExecutionOptions:
    """How a worker runs its tasks.

    Attributes:
        vectorize: whether tasks run in one ``torch.func.vmap`` instead of one after another.
        chunk_size: how many tasks run at once, if vectorized; ``None``: all.
        compile: whether torch's compiler makes a program of a task, or of all if vectorized, and whether CUDA graphs.
        device: where the tensors among the arguments are put first; ``None``: on the kind of device that they are on;
            ``"auto"``: on the worker's own GPU, if it has one.
        isolate_own_share: whether the caller's own share works on leaves and rebuilt objects, as a worker does.
        strict: whether it is an error, instead of a warning, that results depend on a worker's own parameters.
        retries: how often a share whose worker is lost runs again, elsewhere.
        hedge_after: seconds after which a share without an answer is started on another worker, too; ``None``: never.
        progress: whether the caller shows how many tasks are done.
        fan_out: to how many workers each worker forwards the data that all of them share; ``None``: the caller sends it
            to each; ``"auto"``: depends on its size and on the number of workers.
    """

    vectorize: bool = False
    chunk_size: int | None = None
    compile: CompileMode = False
    device: str | None = None
    isolate_own_share: bool = True
    strict: bool = False
    retries: int = 0
    hedge_after: float | None = None
    progress: bool = False
    fan_out: int | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        """Check the settings."""
        for name in ("vectorize", "isolate_own_share", "strict", "progress"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        check_mode(self.compile)
        if self.chunk_size is not None and (not isinstance(self.chunk_size, int) or self.chunk_size < 1):
            raise ValueError(f"chunk_size must be a positive integer or None, got {self.chunk_size!r}")
        if self.chunk_size is not None and not self.vectorize:
            raise ValueError(f"chunk_size={self.chunk_size} needs vectorize=True")
        if self.device not in (None, "auto"):
            raise ValueError(f'device must be "auto" or None, got {self.device!r}')
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise ValueError(f"retries must be a whole number, 0 or more, got {self.retries!r}")
        late = self.hedge_after
        if late is not None and (
            isinstance(late, bool)
            or not isinstance(late, (int, float))
            or not 0 <= late <= threading.TIMEOUT_MAX
        ):
            raise ValueError(f"hedge_after must be a number of seconds, 0 or more, or None, got {late!r}")
        fan_out = self.fan_out
        whole = isinstance(fan_out, int) and not isinstance(fan_out, bool) and fan_out >= 1
        if not whole and fan_out not in ("auto", None):
            raise ValueError(
                f'fan_out must be a whole number of workers, 1 or more, "auto" or None, got {fan_out!r}'
            )
        if self.hedge_after is not None and whole:
            raise ValueError(
                f"hedge_after={self.hedge_after!r} starts single shares again, and fan_out={fan_out} sends those of "
                "a whole branch together: choose one"
            )

    @classmethod
    def of(cls, given: ExecutionKwargs) -> ExecutionOptions:
        """The options that a caller has given."""
        return cls(**given) if given else _no_options()

    @property
    def outlives_workers(self) -> bool:
        """Whether more than one worker may be asked to run a share."""
        return self.retries > 0 or self.hedge_after is not None


class ExecutionKwargs(TypedDict, total=False):
    """The fields of :class:`ExecutionOptions` as keyword arguments, for overloads."""

    vectorize: bool
    chunk_size: int | None
    compile: CompileMode
    device: str | None
    isolate_own_share: bool
    strict: bool
    retries: int
    hedge_after: float | None
    progress: bool
    fan_out: int | Literal["auto"] | None


@functools.cache
def _no_options() -> ExecutionOptions:
    return ExecutionOptions()


def group_by_worker(
    function: Callable[..., Any],
    partitions: Sequence[tuple[int | str, Args, KwArgs]],
    options: ExecutionOptions,
    *,
    timed: bool = False,
    seed: int | None = None,
    ticket: tuple[int, int] | None = None,
) -> dict[int, tuple[Payload, list[int]]]:
    """For each worker's rank its payload, and the indices of its tasks among ``partitions``.

    The partitions of a ``timed`` call have a size; ``seed`` is what the tasks' seeds are made from, ``None`` draws it.
    One that is a row of a batch may have no arguments.
    """
    state = CallerState.capture()
    if seed is None:
        seed = draw_seed()
    shares: dict[int, list[int]] = {}
    for index, (worker, _, _) in enumerate(partitions):
        shares.setdefault(int(worker), []).append(index)
    payloads: dict[int, tuple[Payload, list[int]]] = {}
    for rank, indices in shares.items():
        parts = [partitions[index] for index in indices]
        samples = sum(getattr(part, "size", 1) for part in parts) if timed else 0
        together = _rows(parts) if options.vectorize else None
        tasks, places = ((together.task,), together.places) if together else (tuple(map(_task, parts)), ())
        seeds = tuple([seed + index for index in indices])
        payload = Payload(function, tasks, seeds, state, options, ticket, samples, places)
        payloads[rank] = payload, indices
    return payloads


def _task(part: Any) -> tuple[Args, KwArgs]:
    """The arguments of a part, which one that is a row alone gets from its batch."""
    _, args, kwargs = part
    row = None if args or kwargs else getattr(part, "row", None)
    return (args, kwargs) if row is None else row[0].task(row[1])


def _rows(parts: Sequence[Any]) -> Stacked | None:
    """The parts as one task, if they are rows of one batch, one after the other."""
    found = [part.row for part in parts]
    if len(parts) < 2 or None in found:
        return None
    rows, start = found[0]
    if any(each is not rows or index != start + place for place, (each, index) in enumerate(found)):
        return None
    return rows.between(start, start + len(parts)) if rows.are_plain() else None
