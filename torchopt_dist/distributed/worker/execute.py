"""``Payload`` → its values and seconds, and whether it drew: tasks run one by one or in a ``vmap``, each in a turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch

from torchopt_dist.core.evaluation import evaluate
from torchopt_dist.core.random_turns import Turn
from torchopt_dist.distributed.group.progress import teller
from torchopt_dist.distributed.group.resident import resolved
from torchopt_dist.distributed.messages.payload import Payload
from torchopt_dist.distributed.messages.stacked import Stacked, split_values, stacked, taken_apart
from torchopt_dist.distributed.worker.compiled import CompiledTask
from torchopt_dist.distributed.worker.device import receiving_device
from torchopt_dist.formulas import formulas_in_transforms
from torchopt_dist.formulas.attention import without_fast_path

__all__ = ["Ran", "run"]

_TurnOf: TypeAlias = Callable[[int | None], AbstractContextManager[object]]


class Ran(NamedTuple):
    """What the tasks of a payload have made, and the seconds that a sample took, 0 if the payload does not ask.

    ``drew`` is whether random numbers were drawn; true also with gradients, where nobody asks.
    """

    values: list[Any]
    seconds: float
    drew: bool


def run(payload: Payload, *, moved: bool = False) -> Ran:
    """Run the payload's tasks, no more after one that raises; ``moved``: another worker was to run them first."""
    started, recorded = time.perf_counter(), payload.state.grad_enabled
    payload = resolved(payload, receiving_device(payload.options.device))
    turns: list[Turn] = []

    def turn(seed: int | None) -> AbstractContextManager[object]:
        if seed is None:
            return nullcontext()
        # What may run again elsewhere is to draw the same numbers there.
        exclusive = moved or payload.options.outlives_workers
        turns.append(Turn(exclusive=exclusive, seed=seed, asks=not recorded))
        return turns[-1]

    tasks = _vectorized if payload.options.vectorize else _one_by_one
    with payload.state.applied():
        values = tasks(payload, turn) if recorded else evaluate(lambda: tasks(payload, turn))
    seconds = 0.0
    if payload.samples:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - started) / payload.samples
    return Ran(values, seconds, recorded or any(each.drew for each in turns))


def _one_by_one(payload: Payload, turn: _TurnOf) -> list[Any]:
    values: list[Any] = []
    tell = None if payload.ticket is None else teller(payload.ticket, len(payload.tasks))
    function = payload.function
    if payload.options.compile:
        function = CompiledTask(function, payload.options.compile)
    for (args, kwargs), seed in zip(payload.tasks, payload.seeds, strict=True):
        with turn(seed):
            values.append(function(*args, **kwargs))
        if tell is not None:
            tell(len(values))
    return values


def _vectorized(payload: Payload, turn: _TurnOf) -> list[Any]:
    """One ``vmap`` over the tensors that differ between the tasks; what it returns is split by the caller, or here."""
    already = Stacked(payload.tasks[0], payload.stacked) if payload.stacked else None
    together = already or stacked(payload.tasks)
    if together is None:
        return _one_by_one(payload, turn)
    shared, _, rebuild = taken_apart(together.task)
    tensors, options = [shared[place] for place in together.places], payload.options

    def one_task(*own: torch.Tensor) -> Any:
        leaves = list(shared)
        for place, tensor in zip(together.places, own, strict=True):
            leaves[place] = tensor
        args, kwargs = rebuild(iter(leaves))
        return payload.function(*args, **kwargs)

    def as_they_are() -> Any:
        with formulas_in_transforms(), without_fast_path():
            return torch.func.vmap(one_task, randomness="different", chunk_size=options.chunk_size)(*tensors)

    with turn(payload.seeds[0]), _told_of_running_statistics():
        if options.compile and options.chunk_size is None:
            task = CompiledTask(payload.function, options.compile)
            batched = task.run(shared, together.places, rebuild, as_they_are)
        else:
            batched = as_they_are()
    return [batched] if already else split_values(batched, len(payload.tasks))


@contextmanager
def _told_of_running_statistics() -> Iterator[None]:
    """A context in which torch's refusal of BatchNorm in a ``vmap`` says what to write."""
    try:
        yield
    except RuntimeError as error:
        if "running_mean" not in str(error):
            raise
        raise RuntimeError(
            "`vectorize=True` runs the tasks at once, and a layer such as BatchNorm is to update running statistics of "
            'a module that they share: write `buffers="mean"` beside it, which gives each task its own and brings '
            "their mean back; or call `.eval()` of the module, or give the layer `track_running_stats=False`"
        ) from error
