"""The shares of one call → what they have in common: backwards succeed together, and one who balances hears of all."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from torchopt_dist._future import Future
from torchopt_dist._serialized_exception import SerializedException
from torchopt_dist._torch_private import engine_run
from torchopt_dist.distributed.group.call_log import CallLog
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.serialization.pickling import raised, reply_of

__all__ = ["Siblings"]


class Siblings:
    """The shares of one call, with the replies to backwards through them.

    The autograd engine adds to a leaf's ``.grad`` as soon as it has the leaf's gradient. So a share whose backward is
    done waits for the others before it gives its inputs their gradients.

    Attributes:
        log: the log of the call, while the call is logged.
        took: gets the rank of each worker, and the seconds that it took for a sample.
        error_of: the error to raise for an exception of one of the shares and the name of its worker.
        drew: whether tasks of the call drew random numbers, as far as is known.
    """

    def __init__(
        self,
        log: CallLog | None = None,
        error_of: Callable[[SerializedException, str], Exception] = SerializedException.to_error,
        took: Callable[[int, float], object] | None = None,
    ) -> None:
        self.log = log
        self.took = took
        self.error_of = error_of
        self.drew = False
        # Weak ones: who waits for a reply holds it, and one that is an error refers to frames, and these to the graph.
        self._replies: list[tuple[int, weakref.ref[Future[Message]], str]] = []
        self._lock = threading.Lock()

    def add(self, reply: Future[Message], worker: str) -> None:
        """Record a backward that the engine has begun, by the future reply and the name of its worker."""
        with self._lock:
            self._replies = [entry for entry in self._replies if not _is_done(entry[1]())]
            self._replies.append((engine_run(), weakref.ref(reply), worker))

    def check(self) -> None:
        """Wait for the backwards that this run of the engine has begun, and raise an error of one of them."""
        run = engine_run()
        with self._lock:
            replies = [(entry[1](), entry[2]) for entry in self._replies if entry[0] == run >= 0]
        for reply, worker in replies:
            if reply is None:
                continue  # it was taken up, and was no error
            message = reply.result()
            if raised(message):
                reply_of(message, worker, self.error_of)


def _is_done(reply: Future[Message] | None) -> bool:
    return reply is None or reply.done()
