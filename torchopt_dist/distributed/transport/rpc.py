"""``torch.distributed.rpc`` over TensorPipe: a request is one message, and so is its reply."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeAlias

import torch
from torch.distributed import rpc

from torchopt_dist.distributed._request_handler import handle_request
from torchopt_dist.distributed._serialization import Message
from torchopt_dist.distributed._thread_pool import InlineExecutor
from torchopt_dist.distributed._wire_format import (
    MissingStructureError,
    Structures,
    WireMessage,
    from_wire,
    to_wire,
)
from torchopt_dist.distributed.init_rpc import current_group, loss_listeners
from torchopt_dist.distributed.world import roster
from torchopt_dist.errors import CallTimeoutError, WorkerLostError

__all__ = ["RPCTransport"]

_Answer: TypeAlias = tuple[Any, ...] | str | None
"""A :class:`WireMessage`'s fields; or why there is no reply; or ``None``: send again, with all structures."""


class RPCTransport:
    """Sends requests by ``rpc_async``."""

    def __init__(self) -> None:
        self._known: defaultdict[int, Structures] = defaultdict(Structures)
        self._waiting: defaultdict[int, set[Future[Message]]] = defaultdict(set)
        loss_listeners.append(self._lose)

    def send(self, worker: int, request: Message, timeout: float) -> Future[Message]:
        """See :class:`~torchopt_dist.distributed.transport.base.Transport`."""
        future: Future[Message] = Future()
        waiting = self._waiting[worker]
        waiting.add(future)
        future.add_done_callback(waiting.discard)
        failure = current_group().membership.failures.get(worker)
        if failure is not None:
            self._lose(worker, failure.error())
        else:
            wire = to_wire(request, self._known[worker], direct=current_group().sends_directly_to(worker))
            self._start(worker, request, wire, timeout, future)
        return future

    def _lose(self, worker: int, error: Exception) -> None:
        name = roster.names[worker] if roster.names else f"rank {worker}"
        for future in tuple(self._waiting[worker]):
            _settle(future, WorkerLostError(f"the connection to {name} broke: {error}"))

    def _start(
        self, worker: int, request: Message, wire: WireMessage, timeout: float, future: Future[Message]
    ) -> None:
        name = roster.require()[worker]

        def arrived(done: torch.futures.Future[_Answer]) -> None:
            try:
                reply = done.value()
                if reply is None:  # it has forgotten a structure, or that is on its way in another message
                    complete = wire._replace(structures=[*request.structures.items()])
                    self._start(worker, request, complete, timeout, future)
                elif isinstance(reply, str):
                    raise RuntimeError(reply)
                else:
                    _settle(future, from_wire(WireMessage(*reply), _seen))
            except Exception as error:
                _settle(future, _translated(error, name, timeout))

        try:
            sent = rpc.rpc_async(name, _answer_request, tuple(wire), timeout=timeout)
        except RuntimeError as error:
            _settle(future, _translated(error, name, timeout))
        else:
            sent.add_done_callback(arrived)


def _settle(future: Future[Message], result: Message | Exception) -> None:
    """Give the future its result, unless it has one: a worker's loss may be known before its connection breaks."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


_seen = Structures()
_lender = InlineExecutor(limit=8)
"""Of the RPC agent's 16 threads half are left to it: requests may wait for others that are still to come in."""


@rpc.functions.async_execution
def _answer_request(*fields: Any) -> torch.futures.Future[_Answer]:
    """On the worker: answer, in the agent's thread as long as it has enough of them, else in another one."""
    future: torch.futures.Future[_Answer] = torch.futures.Future()

    def work() -> None:
        try:
            request = from_wire(WireMessage(*fields), _seen)
            reply = handle_request(request)
            answer = tuple(to_wire(reply, Structures.none()))
        except MissingStructureError:
            future.set_result(None)
        except BaseException as error:  # whatever it is, somebody waits for an answer
            future.set_result(f"it cannot answer: {error!r}")
        else:
            future.set_result(answer)  # only then is what the reply has used up taken apart

    _lender.run(work)
    return future


def _translated(error: Exception, worker: str, timeout: float) -> Exception:
    """Torch tells everything by a ``RuntimeError``; what it was shows in the text only."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "RPC ran for more than set timeout" in str(error):
        return CallTimeoutError(f"{worker} took longer than timeout={timeout:g} s")
    return WorkerLostError(f"the connection to {worker} broke: {reason}")
