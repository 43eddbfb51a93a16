"""A function and a list of items → a list of results: each item is a task, which runs on one of the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, TypeVar, Unpack, overload

from torchopt_dist.arguments.numbers import UNSET_TIMEOUT
from torchopt_dist.arguments.options import check_options, unless
from torchopt_dist.core.types import Args, KwArgs
from torchopt_dist.distributed.balance import Balance, check_balance, check_workers, ranges, ranks_of
from torchopt_dist.distributed.messages.payload import ExecutionKwargs
from torchopt_dist.distributed.parallelize import CallKwargs, remote_sync_call
from torchopt_dist.distributed.partition import Partition
from torchopt_dist.distributed.reduce import ReducerOfSizes, check_reducer

__all__ = ["map"]

Item = TypeVar("Item")
Result = TypeVar("Result")
Reduced = TypeVar("Reduced")


def _more_than_items(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if len(args) <= 2:
        return None
    return (
        f"map(func, items) has two arguments without a name, got {len(args)}: what follows the item in each call is "
        "given by `args=`, such as `map(func, items, args=(model,))`"
    )


_OPTIONS = ("args", "kwargs", "reducer", "workers", "balance", "timeout")


@overload
def map(
    func: Callable[Concatenate[Item, ...], Result],
    items: Iterable[Item],
    *,
    args: Args = (),
    kwargs: KwArgs | None = None,
    reducer: None = None,
    workers: Sequence[int | str] | None = None,
    balance: Balance | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    **options: Unpack[CallKwargs],
) -> list[Result]: ...
@overload
def map(
    func: Callable[Concatenate[Item, ...], Result],
    items: Iterable[Item],
    *,
    args: Args = (),
    kwargs: KwArgs | None = None,
    reducer: Callable[[list[Result]], Reduced],
    workers: Sequence[int | str] | None = None,
    balance: Balance | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    **options: Unpack[CallKwargs],
) -> Reduced: ...
@overload
def map(
    func: Callable[Concatenate[Item, ...], Result],
    items: Iterable[Item],
    *,
    args: Args = (),
    kwargs: KwArgs | None = None,
    reducer: ReducerOfSizes[Result, Reduced],
    workers: Sequence[int | str] | None = None,
    balance: Balance | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    **options: Unpack[CallKwargs],
) -> Reduced: ...
@unless(_more_than_items)
def map(
    func: Callable[..., Any],
    items: Iterable[Any],
    *,
    args: Args = (),
    kwargs: KwArgs | None = None,
    reducer: Callable[..., Any] | None = None,
    workers: Sequence[int | str] | None = None,
    balance: Balance | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    **options: Unpack[CallKwargs],
) -> Any:
    """Call ``func(item, *args, **kwargs)`` for each item, each call a task, on all workers; wait for the results.

    Items may be of any kind and differ from each other: tensors of other shapes, tuples, dictionaries, paths. No item
    is split. Each worker gets consecutive items in one message; the numbers of items differ by at most one.

    Args:
        func: the function to call.
        items: the tasks. An iterator is used up before the first call. The items of a tensor are its rows.
        args: positional arguments after the item. They are the same for every task, and a worker gets them once.
        kwargs: keyword arguments, the same for every task.
        reducer: a function from the list of results, in the order of the items, to one result; ``None`` returns the
            list.
        workers: ranks or names of the workers to use, in this order; ``None`` means all.
        balance: gives faster workers more items, where call after call has the same object; ``None`` splits evenly.
        timeout: seconds after which the call fails; see :func:`remote_sync_call`.
        options: the keyword arguments that follow.
        vectorize: whether a worker runs its tasks in one :func:`torch.func.vmap`; the tasks' tensors must then have the
            same shapes.
        chunk_size: how many tasks run at once, if vectorized; ``None`` means all.
        compile: whether each worker compiles what it runs by ``torch.compile``; see :func:`remote_sync_call`.
        device: where a worker moves the tensors among its arguments first; see :func:`remote_sync_call`.
        isolate_own_share: whether this worker's own tasks get leaves and copies, as the other workers' do.
        strict: whether to raise if results depend on a worker's own parameters; see :func:`remote_sync_call`.
        retries: how often the tasks of a lost worker run again on another one; see :func:`remote_sync_call`.
        hedge_after: seconds after which tasks that are not answered yet are started on another worker as well.
        progress: whether to show a progress bar of the tasks; needs tqdm.
        fan_out: to how many workers each worker forwards the data that all share; see :func:`remote_sync_call`.
        buffers: what becomes of buffers of modules that tasks have changed; see :func:`remote_sync_call`.
        team: how many workers run each task together; see :func:`remote_sync_call`.

    Returns:
        The list of results in the items' order, ``[]`` if there is no item; or what the reducer makes of the list.

    Raises:
        TypeError: ``items`` cannot be iterated over, or an argument is of the wrong kind.
        ValueError: a worker is unknown.
        RemoteError: the function raised on a worker; the other errors of a call are those of :func:`remote_sync_call`.

    Example::

        losses = todist.map(task_loss, tasks, args=(model,))  # task_loss(task, model) for each task
        torch.stack(losses).mean().backward()
    """
    check_options("map", options, (*_OPTIONS, *ExecutionKwargs.__annotations__, "buffers", "team"))
    check_workers(workers)
    check_balance(balance)
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple, got {type(args).__name__}: write args=(x,) for one argument")
    if not isinstance(kwargs, (dict, type(None))):
        raise TypeError(f"kwargs must be a dictionary, got {type(kwargs).__name__}")
    given: list[Any] = [func, items]
    if callable(given[1]) and not callable(given[0]):
        name = getattr(given[1], "__name__", "func")
        got = type(func).__name__
        raise TypeError(f"map(func, items) takes the function first, got {got}: write map({name}, items)")
    try:
        iterator = iter(items)
    except TypeError as error:
        raise TypeError(f"items must be a list of tasks or another iterable: {error}") from None
    listed = list(iterator)
    ranks = ranks_of(workers)
    if not listed:
        return check_reducer(reducer)([], [])
    tasks = [
        Partition(rank, (listed[index], *args), kwargs, movable=workers is None)
        for rank, index, _ in ranges(len(listed), ranks, balance)
    ]
    return remote_sync_call(
        func,
        partitioner=_Tasks(tasks, balance),
        reducer=reducer,
        timeout=timeout,
        **options,
    )


@dataclass(frozen=True)
class _Tasks:
    """A partitioner of a call without arguments."""

    tasks: list[Partition]
    balance: Balance | None

    def __call__(self) -> list[Partition]:
        return self.tasks
