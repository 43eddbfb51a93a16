"""Requests → replies of this process itself, by a thread, without a network."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from torchopt_dist.distributed._kept_graphs import KeptGraphs
from torchopt_dist.distributed._request_handler import error_reply, handle_request
from torchopt_dist.distributed._serialization import Message
from torchopt_dist.distributed._thread_pool import ThreadPool
from torchopt_dist.distributed._wire_format import Structures, WireMessage, from_wire, to_wire
from torchopt_dist.distributed.transport.base import settle
from torchopt_dist.errors import CallTimeoutError

__all__ = ["LocalTransport"]


class LocalTransport:
    """Every worker is this process: for a share of the caller's own that must not see the caller's objects.

    Args:
        kept_graphs: where the graphs of answered calls are kept.
        threads: run the requests.
    """

    def __init__(self, kept_graphs: KeptGraphs, threads: ThreadPool) -> None:
        self._kept_graphs = kept_graphs
        self._threads = threads

    def send(self, worker: int, request: Message, timeout: float) -> Future[Message]:
        """See :class:`~torchopt_dist.distributed.transport.base.Transport`."""
        future: Future[Message] = Future()

        def work() -> None:
            try:
                reply = _copied(handle_request(_copied(request), self._kept_graphs))
            except BaseException as error:  # such as a lack of memory: whatever was raised, the caller waits
                reply = error_reply(error)
            settle(future, reply)

        self._threads.run(work)
        if timeout:
            late = CallTimeoutError(f"worker {worker} took longer than timeout={timeout:g} s")
            timer = threading.Timer(timeout, lambda: settle(future, late))
            timer.daemon = True
            timer.start()
            future.add_done_callback(lambda _: timer.cancel())
        return future

    def worker_lost(self, worker: int, error: Exception) -> None:
        """Do nothing: where this process is gone, no request of it waits."""

    def wait_for_replies(self, timeout: float) -> set[int]:
        """Wait for nobody: no other process owes a reply."""
        return set()


def _copied(message: Message) -> Message:
    """The message as if it had been sent: its tensors are nobody else's."""
    wire = to_wire(message, Structures.none())
    buffers = [buffer.clone() for buffer in wire.buffers]
    return from_wire(WireMessage(wire.skeleton, buffers, *wire[2:]), Structures())
