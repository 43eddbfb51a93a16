"""``{worker: Payload}`` → ``{worker: Future[values]}``: to each its own, or down a tree what all of them share.

In a tree the caller sends to a few workers, and each of these forwards to a few others, so the data that the caller
sends does not grow with the number of workers. ``tree.py`` makes the tree, ``shares.py`` sends, and ``relay.py``
forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torchopt_dist.distributed.calls.graph import RemoteGraph
from torchopt_dist.distributed.calls.shares import Shares
from torchopt_dist.distributed.calls.siblings import Siblings
from torchopt_dist.distributed.calls.tree import fan_out_for
from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.messages.caller_state import CallerState
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.payload import ExecutionOptions, Payload
from torchopt_dist.distributed.serialization.pickling import PackedModules
from torchopt_dist.distributed.transport.retries import AsSent
from torchopt_dist.process.future import Future

__all__ = ["ask", "call", "calls"]


def calls(
    siblings: Siblings,
    payloads: Mapping[int, Payload],
    modules: PackedModules,
    *,
    movable: Callable[[int], bool],
    snapshot: bool,
) -> dict[int, Future[list[Any]]]:
    """Run payloads of one call on other workers, those of lost ones last; returns a future of each worker's values.

    The values, and a backward through them, fail with :class:`~torchopt_dist.errors.CallTimeoutError` if they take too
    long; the values are connected to the payload's tensors if graphs are kept. ``movable`` tells of a worker whether
    another one is to run its payload if it is known to be lost; with ``snapshot`` tensors may be changed in place as
    soon as this returns.
    """
    if not payloads:
        return {}
    group = siblings.group
    group.check_process()
    futures: dict[int, Future[list[Any]]] = {}
    fan_out = fan_out_for(group, payloads) if len(payloads) > 1 else 0
    if fan_out:
        there = {worker: each for worker, each in payloads.items() if worker not in group.membership.failures}
        futures = _down_a_tree(siblings, there, fan_out, modules, snapshot=snapshot)
    lost = group.membership.failures
    for worker in sorted(payloads, key=lost.__contains__) if lost else payloads:
        if worker not in futures:
            moves = worker in lost and movable(worker)
            futures[worker] = call(
                siblings, worker, payloads[worker], modules, snapshot=snapshot, moves=moves
            )
    return futures


def call(
    siblings: Siblings,
    worker: int,
    payload: Payload,
    modules: PackedModules | None = None,
    *,
    snapshot: bool = False,
    moves: bool = False,
) -> Future[list[Any]]:
    """Run a payload on another worker, or elsewhere if it ``moves``; see :func:`calls`."""
    graph = RemoteGraph(siblings, worker)
    message = graph.packed(payload, modules)
    spent = 0 if moves or payload.options.outlives_workers else None
    as_sent = None
    if snapshot or spent is not None:
        as_sent = AsSent([message], snapshot=snapshot, again=spent is not None)
    anchor, reply = graph.begin(message, as_sent=as_sent, spent=spent)
    future: Future[list[Any]] = Future()  # made while the message is on its way, as all that can wait
    reply.add_done_callback(partial(_settle, future, partial(graph.collect, anchor)))
    return future


def ask(
    worker: int, function: Callable[..., Any], *args: Any, seconds: float = 0.0, recorded: bool = False
) -> Future[list[Any]]:
    """Call a function, which both processes have by its name, on another worker, without effects on the program.

    Such a question belongs to the package, not to the program: no random number is drawn for it, so it does not wait
    for tasks that draw, no graph is recorded unless it asks, and it is not retried if the worker is lost. The future
    gives a list with the function's value, or fails after so many ``seconds``; 0 means never.
    """
    state = replace(CallerState.capture(), grad_enabled=recorded, autocast=())
    group = current_group()
    group.check_process()
    payload = Payload(function, ((args, {}),), (None,), state, ExecutionOptions())
    return call(Siblings(group, seconds, recorded), worker, payload)


def _settle(
    future: Future[list[Any]], values_of: Callable[[Message], list[Any]], reply: Future[Message]
) -> None:
    """Pass a worker's values, or its error, to its future."""
    try:
        future.set_result(values_of(reply.result()))
    except Exception as error:
        future.set_exception(error)


def _down_a_tree(
    siblings: Siblings,
    payloads: Mapping[int, Payload],
    fan_out: int,
    modules: PackedModules,
    *,
    snapshot: bool,
) -> dict[int, Future[list[Any]]]:
    """Send the payloads down a tree; none if each must be a call by itself."""
    graphs: dict[int, RemoteGraph] = {}
    messages: dict[int, Message] = {}
    for worker, payload in payloads.items():
        graph = RemoteGraph(siblings, worker)
        with graph.span("pack"):
            graphs[worker], messages[worker] = graph, graph.message_of(payload, modules)
    if any(message.references for message in messages.values()):
        return {}  # torch's count of an RRef's users does not come back to zero if a relay passes the RRef on
    shares = Shares(siblings, messages, fan_out, snapshot=snapshot)
    futures: dict[int, Future[list[Any]]] = {}
    for worker, reply in shares.send(payloads, siblings).items():
        futures[worker] = Future()
        reply.add_done_callback(partial(_settle, futures[worker], graphs[worker].values_of))
    return futures
