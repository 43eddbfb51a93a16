"""A function, a worker, the arguments → what the function returns there: the shortest call."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import ParamSpec, TypeVar

from torchopt_dist.distributed.parallelize import remote_sync_call
from torchopt_dist.distributed.world import get_worker_id

__all__ = ["remote_call"]

P = ParamSpec("P")
T = TypeVar("T")


def remote_call(func: Callable[P, T], worker: int | str, /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``func(*args, **kwargs)`` on one worker, wait, and return what it returns.

    No argument is split, and all keyword arguments are passed to the function. To set a time-out or another option, use
    :func:`remote_sync_call`, which returns a list.

    Args:
        func: the function to call.
        worker: rank or name of the worker.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The function's value, a part of the autograd graph like the result of every call.

    Raises:
        TypeError: ``worker`` is neither a rank nor a name, or ``func`` cannot be called.
        ValueError: there is no such worker.
        RemoteError: the function raised there; the other errors of a call are those of :func:`remote_sync_call`.

    Example::

        loss = todist.remote_call(loss_fn, 1, model, batch)
        loss.backward()
    """
    if isinstance(worker, bool) or not isinstance(worker, (int, Integral, str)):
        name = getattr(func if callable(func) else worker, "__name__", "func")
        raise TypeError(
            "remote_call(func, worker, *args): worker must be a rank or a name, got "
            f"{type(worker).__name__} {' '.join(repr(worker).split()):.80}: write `remote_call({name}, 1, x)`"
        )
    (value,) = remote_sync_call(func, args=args, kwargs=kwargs, partitioner=get_worker_id(worker))
    return value
