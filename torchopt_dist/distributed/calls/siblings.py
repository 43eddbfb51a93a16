"""The shares of one call → what they have in common: its options, and that backwards through them succeed together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from torchopt_dist.distributed.group.call_log import CallLog
from torchopt_dist.distributed.group.group import Group
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.payload import ExecutionOptions
from torchopt_dist.distributed.serialization.pickling import reply_of
from torchopt_dist.pickling.serialized_exception import SerializedException
from torchopt_dist.process.future import Future

__all__ = ["Siblings"]


@dataclass(eq=False)
class Siblings:
    """The shares of one call, with the replies to backwards through them.

    The autograd engine adds to a leaf's ``.grad`` as soon as it has the leaf's gradient. So a share whose backward is
    done waits for the others before it gives its inputs their gradients.

    Attributes:
        seconds: how long the call, and a backward through it, may wait for a worker; 0: for ever.
        keep: whether workers keep graphs.
        options: of the call; on a worker that hands shares on the default ones, as it sends nothing again.
        mends: whether the caller sends again what lost workers of a tree were to forward, so that their loss is no
            error.
        log: the log of the call, while the call is logged.
        took: gets the rank of each worker, and the seconds that it took for a sample.
        error_of: the error to raise for an exception of one of the shares and the name of its worker.
        function: the name of the function that is called; empty for a question of the package's own.
        drew: whether tasks of the call drew random numbers, as far as is known.
    """

    group: Group
    seconds: float
    keep: bool
    options: ExecutionOptions = field(default_factory=ExecutionOptions)
    mends: bool = False
    log: CallLog | None = None
    took: Callable[[int, float], object] | None = None
    error_of: Callable[[SerializedException, str], Exception] = SerializedException.to_error
    function: str = ""
    drew: bool = field(default=False, init=False)
    # Weak ones: who waits for a reply holds it, and one that is an error refers to frames, and these to the graph.
    _replies: list[tuple[int, weakref.ref[Future[Message]], str]] = field(default_factory=list, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def add(self, run: int, reply: Future[Message], worker: str) -> None:
        """Record a backward that this run of the engine has begun, by the future reply and the name of its worker."""
        with self._lock:
            self._replies = [entry for entry in self._replies if not _is_done(entry[1]())]
            self._replies.append((run, weakref.ref(reply), worker))

    def check(self, run: int) -> None:
        """Wait for the backwards that this run of the engine has begun, and raise an error of one of them."""
        with self._lock:
            replies = [(entry[1](), entry[2]) for entry in self._replies if entry[0] == run >= 0]
        for reply, worker in replies:
            if reply is None:
                continue  # it was taken up, and was no error
            message = reply.result()
            if message.told is not None:
                reply_of(message, worker, self.error_of)


def _is_done(reply: Future[Message] | None) -> bool:
    return reply is None or reply.done()
