"""One call across workers: partition → payload → remote graph → gather → reduce. Read this file first."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import torch
from torch.futures import Future

from torchopt_dist.arguments.numbers import UNSET_TIMEOUT, seconds_of
from torchopt_dist.arguments.options import (
    check_options,
    decorated_alone,
    not_callable,
    only_the_function,
    unless,
)
from torchopt_dist.core.random_turns import draw_seed_returnable
from torchopt_dist.core.reached import name_of
from torchopt_dist.core.types import Args, KwArgs
from torchopt_dist.distributed._split import check_split, split_only
from torchopt_dist.distributed._teams import TeamSize, check_team, on_teams
from torchopt_dist.distributed.balance import taking_readings
from torchopt_dist.distributed.calls import spread
from torchopt_dist.distributed.calls.futures import Awaited, gather
from torchopt_dist.distributed.calls.own_share import prepare
from torchopt_dist.distributed.calls.siblings import Siblings
from torchopt_dist.distributed.group.call_log import call_log
from torchopt_dist.distributed.group.group import Group, current_group
from torchopt_dist.distributed.group.progress import Bar
from torchopt_dist.distributed.messages.caller_state import CallerState
from torchopt_dist.distributed.messages.payload import (
    ExecutionKwargs,
    ExecutionOptions,
    group_by_worker,
)
from torchopt_dist.distributed.messages.stacked import split_values
from torchopt_dist.distributed.partition import Partitioner, check_partitioner, partition
from torchopt_dist.distributed.reduce import ReducerOfSizes, check_reducer
from torchopt_dist.distributed.serialization.pickling import PackedModules
from torchopt_dist.distributed.worker.buffers import Buffers, Returning, check_buffers, take
from torchopt_dist.process import future
from torchopt_dist.process.threads import settle_by, settle_in_thread

__all__ = ["parallelize", "parallelize_async", "remote_async_call", "remote_sync_call"]

P = ParamSpec("P")
Result = TypeVar("Result")
Reduced = TypeVar("Reduced")


class CallKwargs(ExecutionKwargs, total=False):
    """The options of a call: those of its tasks' execution, what the caller does with their buffers, and teams."""

    buffers: Buffers
    split: Sequence[str] | None
    team: TeamSize


_EXECUTION = tuple(ExecutionKwargs.__annotations__)
_OPTIONS = ("partitioner", "reducer", "timeout", *_EXECUTION, "buffers", "split", "team")


@unless(only_the_function("remote_sync_call"))
def remote_sync_call(
    func: Callable[..., Any],
    *,
    args: Args | None = None,
    kwargs: KwArgs | None = None,
    partitioner: Partitioner | None = None,
    reducer: Callable[..., Any] | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    **options: Unpack[CallKwargs],
) -> Any:
    """Call ``func`` on one or several workers, and wait for what they return.

    Args:
        func: the function to call; the function and its arguments must be picklable.
        args: positional arguments.
        kwargs: keyword arguments.
        partitioner: the rank or name of the worker to call; or a function from ``*args, **kwargs`` to a list of
            triplets ``(worker, args, kwargs)``; or ``None`` for ``batch_partitioner``.
        reducer: a function from the list of results, in the order of the triplets, to one result; ``None`` returns the
            list.
        timeout: seconds after which the call fails, and after which a backward pass through its results stops waiting
            for a worker; ``None`` or 0 means never. By default it is the RPC group's time-out, which is none unless its
            options set one. With a time-out this worker's own share, if isolated, runs in a thread. A function that
            takes longer is not stopped on its worker.
        options: the keyword arguments that follow.
        vectorize: whether a worker runs its tasks in one :func:`torch.func.vmap` instead of one after another. The
            tasks' tensors must then have the same shapes, and all else must be the same.
        chunk_size: how many tasks run at once, if vectorized; ``None`` means all.
        compile: whether each worker compiles the task that it runs by ``torch.compile``, or all its tasks as one
            program if vectorized; with ``chunk_size`` these run as without. The first call of a kind takes some
            5 to 45 s. Where the compiler refuses, a warning says why, and the call runs as without.
            ``"reduce-overhead"`` also captures a task and its gradient as a CUDA graph on a GPU.
        device: where each worker, the caller included, moves the tensors among its arguments first: ``"auto"`` is the
            worker's own GPU if it has one, ``None`` keeps the kind of device that they are on.
        isolate_own_share: whether this worker computes its own share as another worker would: on tensors that are
            leaves and on copies of objects. With ``False`` the share is a plain call on the caller's own objects, which
            need not be picklable; if arguments depend on each other, gradients then depend on the number of workers.
        strict: whether to raise if results depend on a worker's own parameters, such as those of a global model, since
            the caller does not get their gradients. By default a worker warns when it first runs the function.
        retries: how often the share of a lost worker runs again, on another worker, or on this one if there is no
            other; the number holds for the forward pass and for each backward pass. Gradients are the same, bit for
            bit; with a number as ``fan_out``, but for the last bits. An exception of the function and a time-out are
            not retried. Needs ``auto_init_rpc(on_loss="continue")`` or ``"replace"``.
        hedge_after: seconds after which a share, or its backward pass, that is not answered yet is started on another
            worker as well. The first answer counts.
        progress: whether to show a progress bar of the tasks, in a terminal or a notebook; needs tqdm.
        fan_out: to how many workers each worker, the caller included, forwards the data that all of them share, so that
            it travels down a tree. ``None``: the caller sends the data to each worker. ``"auto"``: for at least 4
            workers on other machines it is 3 from 1 MiB on and 2 from 4 MiB on, else ``None``; with ``retries`` or
            ``hedge_after`` it is always ``None``. A number together with ``hedge_after`` is an error. Calls with RRefs
            use no tree.
        buffers: what becomes of the buffers that tasks change in modules among the arguments, such as the running
            statistics of a ``BatchNorm``. Each task starts from the caller's. ``"mean"`` sets these to the mean over
            the tasks, weighted by their sizes (integers: to the largest), ``"first"`` to those of the first task, both
            before the reducer is called. By default nothing comes back, and a worker warns when it first runs the
            function; with ``strict`` it raises.
        split: the names of the arguments of ``func`` that the partitioner splits, such as ``["x", "y"]``; every worker
            gets all others whole, as if each were marked by ``replicated``. By default it splits what it can.
        team: how many workers run each task together: with 4, ranks 0 to 3 are the first team, ranks 4 to 7 the second.
            Every member calls the function with the same arguments and the same random numbers, takes its part of the
            data by :func:`team`, and returns the same value, such as that of ``mean_over(value, todist.team())``; the
            caller gets one value a task. Each member's value gets its n-th part of the gradient, and the gradients of
            all members are added up: that is the gradient of one process, where the value is the mean over the members,
            and where ``inner_loop(..., parallel=todist.DataParallel(todist.team()))`` has averaged gradients. A team
            runs one request at a time, forward or backward. Partitioners give tasks to teams in the place of workers; a
            rank stands for its team. Or a ``DeviceMesh``, whose last dimension is a team. Needs a process group of all
            workers; a world of one process has teams of one.

    Returns:
        What the reducer returns, or the list of results.

    Raises:
        RemoteError: the function raised on a worker; the exception is also of the class raised there.
        WorkerLostError: a worker was lost, and no retries were left.
        CallTimeoutError: a worker took longer than ``timeout``.
        RuntimeError: the call is ``strict``, and gradients of a worker's own parameters would be lost; or ``team`` has
            no process group.
        SerializationError: the function, an argument or a result cannot be sent.
        NotInitializedError: there is no RPC group.
        TypeError: an argument is of the wrong kind.
        ValueError: the arguments cannot be split, a worker is unknown, an option does not go with ``team``, or the
            members of a team have returned different values.
        CollectiveError: a collective of a team failed, since a member did not take part in it.
    """
    return _begun(func, args, kwargs, partitioner, reducer, timeout, options)()


@unless(only_the_function("remote_async_call"))
def remote_async_call(
    func: Callable[..., Any],
    *,
    args: Args | None = None,
    kwargs: KwArgs | None = None,
    partitioner: Partitioner | None = None,
    reducer: Callable[..., Any] | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    **options: Unpack[CallKwargs],
) -> Future[Any]:
    """Like :func:`remote_sync_call`, but returns at once with a future of the result.

    This worker's own share, if it has one, and the reducer run in a thread. Torch has one random generator for each
    process, so random numbers that the caller draws while its own share runs come from the stream of that share's task.
    Tensors are copied first, so the arguments may be changed in place at once, unless this worker has a share that is
    not isolated.

    At most 256 calls of ``main``, or of a task, are under way at a time, or 8 for each worker where that is more. One
    more waits for the end of one of these before it is sent.

    Returns:
        A future whose ``wait()`` returns the result or raises what the call raised.
    """
    group = current_group()
    answered = group.outstanding.wait_for_slot(seconds_of(timeout, default=group.call_timeout))
    try:
        finish = _begun(func, args, kwargs, partitioner, reducer, timeout, options, snapshot=True)
    except BaseException:
        answered()
        raise
    state = CallerState.capture()
    future: Future[Any] = Awaited()

    def work() -> Any:
        group.outstanding.slots = None  # those that this thread has used up before are not this call's
        try:
            with state.applied():
                return finish()
        finally:
            answered()  # before anybody can wait for this thread's frames to be gone

    settle_in_thread(group.threads, work, future, group.names[group.rank])
    return future


_SHOWN_NOWHERE: AbstractContextManager[None] = nullcontext()


def _begun(
    func: Callable[..., Any],
    args: Args | None,
    kwargs: KwArgs | None,
    partitioner: Partitioner | None,
    reducer: Callable[..., Any] | None,
    timeout: float | None,
    given: CallKwargs,
    *,
    snapshot: bool = False,
) -> Callable[[], Any]:
    """Split a call and send the others their shares; returns what runs the own share, and waits for all results."""
    execution: Any = given
    buffers: Buffers = execution.pop("buffers", None)
    split = execution.pop("split", None)
    team: TeamSize = execution.pop("team", None)
    if execution:
        check_options("a call", execution, ("func", "args", "kwargs", *_OPTIONS))
    options = ExecutionOptions.of(execution)
    group = current_group()
    _check(func, args, kwargs, options, group)
    if buffers is not None:
        check_buffers(buffers)
    if split is not None:
        check_split(split)
        partitioner = split_only(func, split, partitioner)
    if team is not None:
        check_team(team, options, buffers, partitioner)
        func, partitioner, reducer, options = on_teams(func, partitioner, reducer, team, options, group)
    seconds, started = seconds_of(timeout, default=group.call_timeout), time.monotonic()
    reduce = None if reducer is None else check_reducer(reducer)
    as_rows = options.vectorize and buffers is None
    partitions = partition(partitioner, tuple(args or ()), dict(kwargs or {}), as_rows=as_rows)
    took = taking_readings(partitioner)
    # As in one process, an evaluation that draws nothing does not move the caller's random numbers.
    draws = snapshot or torch.is_grad_enabled()
    seed, settle_seed = (None, None) if draws else draw_seed_returnable()
    bar = None
    if options.progress:
        title = getattr(func, "__name__", type(func).__name__)
        bar = Bar(title, Counter(int(part.worker) for part in partitions))
    payloads = group_by_worker(
        func if buffers is None else Returning(func),
        partitions,
        options,
        timed=took is not None,
        seed=seed,
        ticket=None if bar is None else bar.ticket,
    )
    log = call_log(func, payloads, group)
    siblings = Siblings(
        group,
        seconds,
        torch.is_grad_enabled(),
        options,
        mends=options.retries > 0,
        log=log,
        took=took,
        function=getattr(func, "__qualname__", None) or name_of(func),  # mostly without a call of Python code
    )
    modules: PackedModules = {}
    own_share: Callable[[], list[Any]] | None = None
    shown = _SHOWN_NOWHERE if log is None and bar is None else ExitStack()
    with shown as stack:
        if stack is not None:
            for each in (log, bar):
                stack.enter_context(each or nullcontext())
        values = spread.calls(
            siblings,
            {worker: payload for worker, (payload, _) in payloads.items() if worker != group.rank},
            modules,
            movable=lambda worker: all(partitions[index].movable for index in payloads[worker][1]),
            snapshot=snapshot,
        )
        if group.rank in payloads:
            own_share = prepare(siblings, payloads[group.rank][0], modules, snapshot=snapshot)
        if bar is not None:
            bar.watch(values)
        if stack is not None:
            shown = stack.pop_all()

    def run_own_share() -> None:
        """Run it while the others run theirs; in a thread, if a time-out bounds the wait."""
        nonlocal own_share
        work, own_share = own_share, None
        if work is None:
            return
        own = values[group.rank] = future.Future()
        if bar is not None:
            bar.watch({group.rank: own})
        if seconds and options.isolate_own_share:
            settle_in_thread(group.threads, work, own, group.names[group.rank])
        else:
            settle_by(work, own)

    def finish() -> Any:
        with shown:
            run_own_share()
            gathered = group.recorder.record(
                "wait", None, None, gather, values, group.names, seconds, started, siblings.function
            )
            if settle_seed is not None:
                settle_seed(siblings.drew)
            results: list[Any] = [None] * len(partitions)
            for worker, found in gathered.items():
                payload, indices = payloads[worker]
                values_of_tasks = split_values(found[0], len(indices)) if payload.stacked else found
                for index, value in zip(indices, values_of_tasks, strict=True):
                    results[index] = value
            if buffers is not None:
                results = take(func, partitions, results, buffers)
            return results if reduce is None else reduce(results, [part.size for part in partitions])

    return finish


def _check(func: Any, args: Any, kwargs: Any, options: ExecutionOptions, group: Group) -> None:
    """Raise an error for arguments of the wrong kind, and for retries where no worker may be lost."""
    if not callable(func):
        raise not_callable("func", func)
    if not isinstance(args, (tuple, list, type(None))):
        raise TypeError(f"args must be a tuple, got {type(args).__name__}: write args=(x,) for one argument")
    if not isinstance(kwargs, (dict, type(None))):
        raise TypeError(f"kwargs must be a dictionary, got {type(kwargs).__name__}")
    if options.retries and group.on_loss == "end":
        raise ValueError(
            f'retries={options.retries} needs `auto_init_rpc(on_loss="continue")` or "replace": the loss of a worker '
            "ends all others here"
        )


@overload
def parallelize(
    partitioner: Partitioner | None = None,
    reducer: None = None,
    timeout: float | None = ...,
    **options: Unpack[CallKwargs],
) -> Callable[[Callable[P, Result]], Callable[P, list[Result]]]: ...
@overload
def parallelize(
    partitioner: Partitioner | None = None,
    reducer: Callable[[list[Result]], Reduced] = ...,
    timeout: float | None = ...,
    **options: Unpack[CallKwargs],
) -> Callable[[Callable[P, Result]], Callable[P, Reduced]]: ...
@overload
def parallelize(
    partitioner: Partitioner | None = None,
    reducer: ReducerOfSizes[Result, Reduced] = ...,
    timeout: float | None = ...,
    **options: Unpack[CallKwargs],
) -> Callable[[Callable[P, Result]], Callable[P, Reduced]]: ...
def parallelize(
    partitioner: Partitioner | None = None,
    reducer: Callable[..., Any] | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    **options: Unpack[CallKwargs],
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Decorate a function so that its calls run on the workers.

    To a type checker the decorated function takes what the function takes and returns what the reducer returns.

    The function itself is not changed: the workers run it, and it is the attribute ``__wrapped__`` of the decorated
    function.

    Example::

        @todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.mean_reducer)
        def loss_fn(model, batch, targets): ...


        loss = loss_fn(model, batch, targets)  # on all workers, a part of the batch each
        loss.backward()

    With ``team=4`` each task runs on four workers::

        @todist.parallelize(todist.tasks, todist.mean_reducer, team=4)
        def task_loss(model, x, y):
            team = todist.team()
            x, y = x[team.rank :: team.size], y[team.rank :: team.size]
            adapted = todist.inner_loop(..., parallel=todist.DataParallel(team)).params
            return todist.mean_over(loss(adapted, x, y), team)
    """
    if (alone := decorated_alone(parallelize, partitioner)) is not None:
        return alone
    settings = _checked(partitioner, reducer, timeout, options)
    return functools.partial(_decorate, "parallelize", remote_sync_call, settings)


def _with_options(doc: str | None) -> str:
    """A docstring whose ``Args`` are those of :func:`remote_sync_call` but for the function and its arguments."""
    options = (
        (remote_sync_call.__doc__ or "").partition("        partitioner:")[2].partition("\n\n    Returns:")[0]
    )
    return (doc or "").rstrip() + f"\n\n    Args:\n        partitioner:{options}\n    "


parallelize.__doc__ = _with_options(parallelize.__doc__)


@overload
def parallelize_async(
    partitioner: Partitioner | None = None,
    reducer: None = None,
    timeout: float | None = ...,
    **options: Unpack[CallKwargs],
) -> Callable[[Callable[P, Result]], Callable[P, Future[list[Result]]]]: ...
@overload
def parallelize_async(
    partitioner: Partitioner | None = None,
    reducer: Callable[[list[Result]], Reduced] = ...,
    timeout: float | None = ...,
    **options: Unpack[CallKwargs],
) -> Callable[[Callable[P, Result]], Callable[P, Future[Reduced]]]: ...
@overload
def parallelize_async(
    partitioner: Partitioner | None = None,
    reducer: ReducerOfSizes[Result, Reduced] = ...,
    timeout: float | None = ...,
    **options: Unpack[CallKwargs],
) -> Callable[[Callable[P, Result]], Callable[P, Future[Reduced]]]: ...
def parallelize_async(
    partitioner: Partitioner | None = None,
    reducer: Callable[..., Any] | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    **options: Unpack[CallKwargs],
) -> Callable[[Callable[P, Any]], Callable[P, Future[Any]]]:
    """Like :func:`parallelize`, but a call returns a future at once; see :func:`remote_async_call`."""
    if (alone := decorated_alone(parallelize_async, partitioner)) is not None:
        return alone
    settings = _checked(partitioner, reducer, timeout, options)
    return functools.partial(_decorate, "parallelize_async", remote_async_call, settings)


parallelize_async.__doc__ = _with_options(parallelize_async.__doc__)


def _decorate(
    name: str, call: Callable[..., Any], settings: dict[str, Any], func: Callable[P, Any]
) -> Callable[P, Any]:
    given: Any = func
    if not callable(given):
        taken = getattr(settings["partitioner"], "__name__", None)
        remedy = f"; `{taken}` became its partitioner: write `{name}()({taken})`" if taken else ""
        raise TypeError(f"{name} decorates a function, got {type(func).__name__} {func!r:.80}{remedy}")
    if settings["split"] is not None:
        split_only(given, settings["split"], settings["partitioner"])  # says now what is wrong
    # A function's own attributes are copied to the wrapper; a module's or another callable object's are not.
    updated = functools.WRAPPER_UPDATES if hasattr(func, "__code__") else ()

    @functools.wraps(func, updated=updated)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
        return call(func, args=args, kwargs=kwargs, **settings)

    return wrapped


def _checked(
    partitioner: Partitioner | None,
    reducer: Callable[..., Any] | None,
    timeout: float | None,
    options: CallKwargs,
) -> dict[str, Any]:
    """The settings of a decorator, checked as far as they can be before there is an RPC group."""
    check_partitioner(partitioner)
    check_reducer(reducer)
    seconds_of(timeout)
    execution: Any = dict(options)
    buffers, team = execution.pop("buffers", None), execution.pop("team", None)
    check_buffers(buffers)
    split = execution.pop("split", None)
    check_split(split)
    check_team(team, ExecutionOptions(**execution), buffers, partitioner)
    settings = {**asdict(ExecutionOptions(**execution)), "buffers": buffers, "split": split, "team": team}
    return {"partitioner": partitioner, "reducer": reducer, "timeout": timeout, **settings}
