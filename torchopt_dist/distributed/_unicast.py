"""A worker, ``Payload`` → ``Future[values]``: one message to the worker, and its reply."""

from __future__ import annotations

from typing import Any

from torchopt_dist.distributed._ask import Sent
from torchopt_dist.distributed._future import Future
from torchopt_dist.distributed._group import current_group
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
    message, anchor = graph.start(payload, modules)

    def arrived(done: Future[Message]) -> None:
        try:
            future.set_result(graph.collect(anchor, done.result()))
        except Exception as error:
            future.set_exception(error)

    sent = message
    if message.tensors:
        sent = message.detached()
        if snapshot:
            sent.tensors = [tensor.clone() for tensor in sent.tensors]
    if moves or payload.options.outlives_workers:
        kept = Sent.of(sent, graph.key)
        reply = group.recorder.record("send", graph.key, worker, graph.ask, kept)
    else:
        reply = group.recorder.record("send", graph.key, worker, graph.send, sent)
    future: Future[list[Any]] = Future()  # made while the message is on its way, as all that can wait
    if graph.siblings.log is not None:
        graph.siblings.log.watch(message, reply)
    reply.add_done_callback(arrived)
    return future
