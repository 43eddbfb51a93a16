"""Keys of graphs that this worker's calls no longer need → ``Release`` requests to the workers that keep the graphs."""

from __future__ import annotations

import logging
import queue
import threading

from torchopt_dist.distributed.messages.requests import Key, Release
from torchopt_dist.distributed.serialization.pickling import pack
from torchopt_dist.distributed.transport.base import Sender

__all__ = ["GraphReleaser"]

log = logging.getLogger(__name__)


class GraphReleaser:
    """Sends the requests from a thread of its own, since the finalizers that cause them may run in any thread."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[Sender, int, Release] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def release(self, transport: Sender, worker: int, key: Key) -> None:
        """Let ``worker`` forget what it keeps under ``key``, unless the group has ended, and all of that with it."""
        if self._closed:
            return
        self._requests.put((transport, worker, Release((key,))))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="todist-graph-releaser", daemon=True)
            self._thread.start()

    def close(self, seconds: float = 0.0) -> None:
        """End the thread, and wait for that at most so long; what is not released yet ends with the group."""
        self._closed = True
        self._requests.put(None)
        if self._thread is not None:
            self._thread.join(seconds)

    def _work(self) -> None:
        while (entry := self._requests.get()) is not None and not self._closed:
            transport, worker, request = entry
            try:
                transport.send(worker, pack(request, main_by_name=True), 0)
            except Exception:  # such as a lack of memory, or of descriptors: the next ones may be sent
                log.exception("worker %d keeps a graph or a value that is not needed any more", worker)
