"""A worker, ``Payload`` → ``Future[values]``: one message to the worker, and its reply."""

from __future__ import annotations

from typing import Any

from torchopt_dist.distributed._chunks import send_chunk
from torchopt_dist.distributed._future import Future
from torchopt_dist.distributed._group import current_group
from torchopt_dist.distributed._late_tensors import LateTensors
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._payload import Payload
from torchopt_dist.distributed._remote_graph import RemoteGraph
from torchopt_dist.distributed._serialization import PackedModules
from torchopt_dist.distributed._siblings import Siblings
from torchopt_dist.distributed.transport.base import Sender

__all__ = ["call"]


def call(
    worker: int,
    payload: Payload,
    timeout: float,
    transport: Sender | None = None,
    *,
    snapshot: bool = False,
    modules: PackedModules | None = None,
    moves: bool = False,
    siblings: Siblings | None = None,
) -> Future[list[Any]]:
    """Run a payload on another worker.

    Args:
        worker: the worker's rank.
        payload: the work of that worker.
        timeout: seconds after which the future, or a backward through its values, fails with
            :class:`~torchopt_dist.errors.CallTimeoutError`; 0 means never.
        transport: carries the messages; ``None`` means the RPC group's transport.
        modules: the modules that the same call has packed for other workers.
        snapshot: send copies, so that tensors may be changed in place as soon as this returns.
        moves: whether another worker is to run the payload, since this one is known to be lost.
        siblings: the shares of the same call.

    Returns:
        A future of the tasks' values; it fails with what a task raised. Tensors among the values are connected to those
        of the payload, if its state has grad mode on and any of these requires grad.

    Raises:
        SerializationError: the payload cannot be sent.
    """
    group = current_group()
    group.check_process()
    graph = RemoteGraph(
        group,
        worker,
        transport or group.transport.to(worker),
        timeout,
        options=payload.options,
        siblings=siblings,
    )
    in_parts = payload.options.stream and not moves and not group.on_this_host(worker)
    late = LateTensors.of(payload, snapshot=snapshot) if in_parts else None
    numbers: list[int] | None = None
    if late is not None:
        message, anchor = graph.start(late.marked(payload), modules, late.request(timeout))
        numbers = late.numbers_in(message)
    if late is None or numbers is None:
        late = None
        message, anchor = graph.start(payload, modules)

    def arrived(done: Future[Message]) -> None:
        try:
            future.set_result(graph.collect(anchor, done.result()))
        except Exception as error:
            if late is not None:
                graph.release()  # of chunks, too: the worker has not read the request, perhaps
            future.set_exception(error)

    sent = message
    if message.tensors:
        sent = message.detached()
        for number in numbers or ():
            sent.tensors[number] = sent.tensors[number].new_empty(0)
        if snapshot:
            sent.tensors = [tensor.clone() for tensor in sent.tensors]
    reply = group.recorder.record("send", graph.key, worker, graph.ask, sent, movable=moves)
    future: Future[list[Any]] = Future()  # made while the message is on its way, as all that can wait
    if graph.siblings.log is not None:
        graph.siblings.log.watch(message, reply)
    for chunk in late.chunks if late else ():
        send_chunk(graph, chunk, reply)
    reply.add_done_callback(arrived)
    return future
