"""``torch.distributed.rpc`` over TensorPipe: a request is one message, and so is its reply."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, TypeAlias

import torch
from torch.distributed import rpc

from torchopt_dist.distributed.payload import Message
from torchopt_dist.distributed.serve import serve
from torchopt_dist.distributed.world import roster
from torchopt_dist.errors import CallTimeoutError, WorkerLostError

__all__ = ["RPCTransport"]

_Wire: TypeAlias = tuple[bytes, list[torch.Tensor], list[bool], list[bool], tuple[int, ...]]


class RPCTransport:
    """Sends requests by ``rpc_async``."""

    def send(self, worker: int, request: Message, timeout: float) -> Future[Message]:
        """See :class:`~torchopt_dist.distributed.transport.base.Transport`."""
        name = roster.require()[worker]
        future: Future[Message] = Future()

        def arrived(done: torch.futures.Future[_Wire]) -> None:
            try:
                reply = Message(*done.value())
            except Exception as error:
                future.set_exception(_translated(error, name, timeout))
            else:
                future.set_result(reply)

        try:
            sent = rpc.rpc_async(name, _serve, _to_wire(request), timeout=timeout)
        except RuntimeError as error:
            future.set_exception(_translated(error, name, timeout))
        else:
            sent.add_done_callback(arrived)
        return future


def _to_wire(message: Message) -> _Wire:
    return message.skeleton, message.tensors, message.requires_grad, message.is_parameter, message.connected


@rpc.functions.async_execution
def _serve(*wire: Any) -> torch.futures.Future[_Wire]:
    """On the worker: answer in a thread of its own; a request may wait for others, and the agent's threads are few."""
    future: torch.futures.Future[_Wire] = torch.futures.Future()
    threading.Thread(
        target=lambda: future.set_result(_to_wire(serve(Message(*wire)))), name="todist-serve", daemon=True
    ).start()
    return future


def _translated(error: Exception, worker: str, timeout: float) -> Exception:
    """Torch tells everything by a ``RuntimeError``; what it was shows in the text only."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "RPC ran for more than set timeout" in str(error):
        return CallTimeoutError(f"{worker} took longer than timeout={timeout:g} s")
    return WorkerLostError(f"the connection to {worker} broke: {reason}")
