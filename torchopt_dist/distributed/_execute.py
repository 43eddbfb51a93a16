"""``Payload`` → its values, and their seconds: tasks run one by one, or all in one ``vmap``, in the caller's state."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import torch

from torchopt_dist._evaluation import evaluate
from torchopt_dist._formulas import normalization_by_formula
from torchopt_dist._formulas.attention import without_fast_path
from torchopt_dist._random_turns import Draws, Task
from torchopt_dist.distributed._containers import flatten
from torchopt_dist.distributed._device_placement import receiving_device
from torchopt_dist.distributed._payload import Payload
from torchopt_dist.distributed._progress import teller
from torchopt_dist.distributed.resident import resolved

__all__ = ["run", "timed"]


def timed(
    payload: Payload,
    *,
    moved: bool = False,
    draws: Draws | None = None,
) -> tuple[list[Any], float]:
    """What :func:`run` returns, and how many seconds a sample took; 0 if the payload does not ask."""
    if not payload.samples:
        return run(payload, moved=moved, draws=draws), 0.0
    started = time.perf_counter()
    values = run(payload, moved=moved, draws=draws)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return values, (time.perf_counter() - started) / payload.samples


def run(
    payload: Payload,
    *,
    moved: bool = False,
    draws: Draws | None = None,
) -> list[Any]:
    """The values of the payload's tasks. If a task raises, its exception is raised and later tasks do not run.

    Args:
        payload: the work of this worker.
        moved: whether another worker was to run them first, so that this one has work of its own.
        draws: is told if a task draws random numbers; ``None``: nobody asks.
    """
    payload = resolved(payload, receiving_device(payload.options.device))
    tasks = partial(
        _vectorized if payload.options.vectorize else _one_by_one,
        task=partial(Task, guest=moved, draws=draws),
    )
    with payload.state.applied():
        if payload.state.grad_enabled:
            return tasks(payload)
        return evaluate(lambda: tasks(payload))


def _one_by_one(payload: Payload, task: Callable[[int], Task]) -> list[Any]:
    values: list[Any] = []
    tell = teller(payload)
    for (args, kwargs), seed in zip(payload.tasks, payload.seeds, strict=True):
        with task(seed):
            values.append(payload.function(*args, **kwargs))
        if tell is not None:
            tell(len(values))
    return values


def _vectorized(payload: Payload, task: Callable[[int], Task]) -> list[Any]:
    """One ``vmap`` over the tensors that differ between the tasks; an argument that all tasks share is not mapped."""
    tasks: Any = payload.tasks
    flat = [flatten(each, is_leaf=_is_module, path="(args, kwargs)") for each in tasks]
    _, paths, rebuild = flat[0]
    columns = list(zip(*(each.leaves for each in flat), strict=True))
    mapped = [
        index for index, column in enumerate(columns) if not all(_same(leaf, column[0]) for leaf in column)
    ]
    if not mapped:
        return _one_by_one(payload, task)
    _check_mappable(columns, mapped, paths)

    def one_task(*tensors: torch.Tensor) -> Any:
        leaves = [column[0] for column in columns]
        for index, tensor in zip(mapped, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = rebuild(iter(leaves))
        return payload.function(*args, **kwargs)

    stacked = [torch.stack(columns[index]) for index in mapped]
    with task(payload.seeds[0]), normalization_by_formula(), without_fast_path():
        batched = torch.func.vmap(one_task, randomness="different", chunk_size=payload.options.chunk_size)(
            *stacked
        )
    leaves, out = optree.tree_flatten(batched, none_is_leaf=True)
    return [optree.tree_unflatten(out, [leaf[index] for leaf in leaves]) for index in range(len(tasks))]


def _is_module(leaf: Any) -> bool:
    return isinstance(leaf, torch.nn.Module)


def _same(leaf: Any, other: Any) -> bool:
    if leaf is other or isinstance(leaf, torch.Tensor) or isinstance(other, torch.Tensor):
        return leaf is other
    try:
        # `True == 1`, and the two are different arguments.
        return type(leaf) is type(other) and bool(leaf == other)
    except (ValueError, RuntimeError):  # arrays, which have no one truth value
        return False


def _check_mappable(columns: list[Any], mapped: list[int], paths: list[str]) -> None:
    for index in mapped:
        column = columns[index]
        if not all(isinstance(leaf, torch.Tensor) for leaf in column):
            raise TypeError(
                f"vectorize=True maps over tensors, but {paths[index]} differs between tasks and is "
                f"{type(column[0]).__name__}"
            )
        if len({leaf.shape for leaf in column}) > 1:
            raise ValueError(
                "vectorize=True needs tasks of one shape, but "
                f"{paths[index]} has shapes "
                f"{sorted({tuple(leaf.shape) for leaf in column})}: split with exclusive=True, "
                "or leave vectorize=True out"
            )
