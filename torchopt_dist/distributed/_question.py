"""A worker, a function, its arguments → a future of its value there, without effects on the program.

Such a question is a call that belongs to the package, not to the program: no random number is drawn for it, so it does
not wait for tasks that draw, no graph is recorded unless it asks, and it is not retried if the worker is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchopt_dist.distributed._caller_state import CallerState
from torchopt_dist.distributed._future import Future
from torchopt_dist.distributed._group import current_group
from torchopt_dist.distributed._multicast import call
from torchopt_dist.distributed._payload import ExecutionOptions, Payload
from torchopt_dist.distributed._relay import Sending
from torchopt_dist.distributed._siblings import Siblings

__all__ = ["ask"]


def ask(
    worker: int, function: Callable[..., Any], *args: Any, seconds: float = 0.0, recorded: bool = False
) -> Future[list[Any]]:
    """Call ``function(*args)`` on another worker.

    Args:
        worker: the worker's rank.
        function: a function that both processes have by its name.
        args: plain values.
        seconds: the time after which the future fails with :class:`~torchopt_dist.errors.CallTimeoutError`; 0 means
            never.
        recorded: whether the value is connected to the tensors among ``args``.

    Returns:
        A future of a list with the function's value.
    """
    state = replace(CallerState.capture(), grad_enabled=recorded, autocast=())
    group = current_group()
    group.check_process()
    payload = Payload(function, ((args, {}),), (None,), state, ExecutionOptions())
    return call(Sending(group, seconds, recorded, Siblings(), payload.options), worker, payload)
