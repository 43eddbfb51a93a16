"""This process as a worker: requests are answered by a thread, without a network."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from torchopt_dist.distributed._request_handler import handle_request
from torchopt_dist.distributed._serialization import Message
from torchopt_dist.distributed._thread_pool import run_in_thread
from torchopt_dist.distributed._wire_format import Structures, WireMessage, from_wire, to_wire
from torchopt_dist.errors import CallTimeoutError

__all__ = ["LocalTransport"]


class LocalTransport:
    """Every worker is this process; for tests, and to try out a program's remote calls under a debugger."""

    def send(self, worker: int, request: Message, timeout: float) -> Future[Message]:
        """See :class:`~torchopt_dist.distributed.transport.base.Transport`."""
        future: Future[Message] = Future()
        run_in_thread(lambda: _settle(future, _copied(handle_request(_copied(request)))))
        if timeout:
            late = CallTimeoutError(f"worker {worker} took longer than timeout={timeout:g} s")
            timer = threading.Timer(timeout, lambda: _settle(future, late))
            timer.daemon = True
            timer.start()
            future.add_done_callback(lambda _: timer.cancel())
        return future


def _copied(message: Message) -> Message:
    """The message as if it had been sent: its tensors are nobody else's."""
    wire = to_wire(message, Structures.none())
    buffers = [buffer.clone() for buffer in wire.buffers]
    return from_wire(WireMessage(wire.skeleton, buffers, *wire[2:]), Structures())


_settling = threading.Lock()


def _settle(future: Future[Message], result: Message | Exception) -> None:
    """Give the future its result, unless it has one."""
    with _settling:
        if future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
