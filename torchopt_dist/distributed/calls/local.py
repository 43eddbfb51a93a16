"""The transport to this process itself: a request → its reply, made by the asking thread, or by another one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchopt_dist.core.random_turns import visiting
from torchopt_dist.distributed.group.group import Group
from torchopt_dist.distributed.group.kept import Kept, KeptGraph, graph_missing
from torchopt_dist.distributed.group.spans import Recorder
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.serialization.wire import from_wire, to_wire
from torchopt_dist.distributed.worker.handler import answer
from torchopt_dist.process.future import Future
from torchopt_dist.process.threads import settle_in_thread

__all__ = ["Beside", "Here"]


class Here:
    """The transport to this process: a request is answered by the thread that first asks for the reply.

    ``kept_graphs`` are those of one share alone, which end with the share, even if that is after the group.
    """

    def __init__(self, device: torch.device | None, group: Group, recorder: Recorder | None = None) -> None:
        self._device = device
        self._group = group
        self.kept_graphs = Kept[KeptGraph](graph_missing)
        self._recorder = recorder or group.recorder

    def send(self, worker: int, request: Message, timeout: float) -> Future[Message]:
        """See :class:`~torchopt_dist.distributed.transport.base.Sender`; errors are raised as they are."""
        del worker, timeout
        return _Answer(lambda: self._answer(request))

    def has_lost(self, worker: int) -> bool:
        """See :class:`~torchopt_dist.distributed.transport.base.Sender`."""
        del worker
        return False

    def _answer(self, request: Message) -> Message:
        with torch.enable_grad():  # as in the thread of a worker; a call then applies its caller's state
            return answer(request, self._device, self.kept_graphs, self._recorder)


class Beside(Here):
    """The transport to this process as to another one: a thread replies, with tensors in memory as if they were sent.

    The last bit of a result can depend on either.
    """

    def send(self, worker: int, request: Message, timeout: float) -> Future[Message]:
        """See :class:`~torchopt_dist.distributed.transport.base.Sender`."""
        del worker, timeout
        future: Future[Message] = Future()
        name = self._group.names[self._group.rank]

        def work() -> Message:
            with visiting():
                return _sent(self._answer(_sent(request)))

        settle_in_thread(self._group.threads, work, future, name)
        return future


class _Answer(Future[Message]):
    """A reply that is made when it is asked for."""

    def __init__(self, work: Callable[[], Message]) -> None:
        super().__init__()
        self._work = work

    def result(self, seconds: float | None = None) -> Message:
        """Answer the request."""
        del seconds
        return self._work()


def _sent(message: Message) -> Message:
    """The message with tensors in memory of their own, as it would arrive at another process."""
    wire = to_wire(message)
    return from_wire(wire._replace(buffers=[buffer.clone() for buffer in wire.buffers]))
