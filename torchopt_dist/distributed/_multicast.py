"""``{worker: Payload}`` → ``{worker: Future[values]}``: to each its own, or down a tree what all of them share.

In a tree the caller sends to a few workers, and each of these forwards to a few others, so the data that the caller
sends does not grow with the number of workers. ``_tree.py`` makes the tree, ``_shares.py`` sends, and ``_relay.py``
forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torchopt_dist.distributed._future import Future
from torchopt_dist.distributed._group import Group, current_group
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._payload import Payload
from torchopt_dist.distributed._remote_graph import RemoteGraph
from torchopt_dist.distributed._serialization import PackedModules
from torchopt_dist.distributed._shares import Shares, common
from torchopt_dist.distributed._siblings import Siblings
from torchopt_dist.distributed._unicast import call

__all__ = ["calls"]

AUTO_FAN_OUT = 3
"""Of little: a tree of three children is at most a tenth slower than one without a limit, up to a thousand workers."""
AUTO_FAN_OUT_OF_MUCH = 2
"""Of much: the line of a worker with children is the bound, which carries all of it to each child."""
MUCH_BYTES = 1 << 22
"""From here on the deeper tree is sooner done, with 8 workers and with a thousand."""
AUTO_WORKERS = 4
"""On other machines: in one machine memory is copied, and a tree copies as much, a third of it one after another."""
AUTO_BYTES = 1 << 20
"""Two chunks: with less there is nothing to hand on while the rest comes."""


def calls(
    payloads: Mapping[int, Payload],
    seconds: float,
    *,
    movable: Callable[[int], bool],
    modules: PackedModules,
    siblings: Siblings,
    snapshot: bool,
) -> dict[int, Future[list[Any]]]:
    """Run payloads on other workers; see :func:`~torchopt_dist.distributed._unicast.call`.

    Args:
        payloads: of one call, by rank, in the order in which they are sent.
        seconds: how long they may take; 0: for ever.
        movable: of a worker: whether another one is to run its payload if it is known to be lost.
        modules: those that the same call has packed.
        siblings: the shares of the same call.
        snapshot: send copies.

    Returns:
        A future of each worker's values.
    """
    group = current_group()
    fan_out = _fan_out_for(group, payloads) if len(payloads) > 1 else 0
    futures: dict[int, Future[list[Any]]] = {}
    if fan_out:
        group.check_process()
        there = {worker: each for worker, each in payloads.items() if not group.retries.is_lost(worker)}
        futures = _down_a_tree(group, there, fan_out, seconds, modules, siblings, snapshot=snapshot)
    for worker, payload in payloads.items():
        if worker not in futures:
            futures[worker] = call(
                worker,
                payload,
                seconds,
                snapshot=snapshot,
                modules=modules,
                siblings=siblings,
                moves=worker in group.membership.failures and movable(worker),
            )
    return futures


def _fan_out_for(group: Group, payloads: Mapping[int, Payload]) -> int:
    """How many children a worker has in the tree for a call; 0 if there is to be none."""
    workers = [worker for worker in payloads if not group.retries.is_lost(worker)]
    if len(workers) < 2:
        return 0
    options = payloads[workers[0]].options
    if options.fan_out is None:
        return 0
    fan_out = options.fan_out
    if fan_out == "auto":
        if options.outlives_workers:  # after a loss, only a star's sums have the same bits
            return 0
        fan_out = AUTO_FAN_OUT
        here = group.members[group.rank].host
        if sum(group.members[worker].host != here for worker in workers) < AUTO_WORKERS:
            return 0
        shared = sum(x.nbytes for x in common([payloads[worker].tensors() for worker in workers[:2]]))
        if shared < AUTO_BYTES:
            return 0
        if shared >= MUCH_BYTES:
            fan_out = AUTO_FAN_OUT_OF_MUCH
    return fan_out if len(workers) > fan_out else 0


def _down_a_tree(
    group: Group,
    payloads: Mapping[int, Payload],
    fan_out: int,
    seconds: float,
    modules: PackedModules,
    siblings: Siblings,
    *,
    snapshot: bool,
) -> dict[int, Future[list[Any]]]:
    """Send the payloads down a tree; none if each must be a call by itself."""
    graphs: dict[int, RemoteGraph] = {}
    messages: dict[int, Message] = {}
    for worker, payload in payloads.items():
        graph = RemoteGraph(group, worker, group.transport.to(worker), seconds, siblings=siblings)
        with graph.span("pack"):
            graphs[worker], messages[worker] = graph, graph.packed(payload, modules)
    one = next(iter(payloads.values()))
    if any(message.references for message in messages.values()):
        return {}  # torch's count of an RRef's users does not come back to zero if a relay passes the RRef on
    shares = Shares(
        group,
        messages,
        {worker: graph.key for worker, graph in graphs.items()},
        one.options,
        fan_out=fan_out,
        seconds=seconds,
        keep=one.state.grad_enabled,
        snapshot=snapshot,
    )
    futures: dict[int, Future[list[Any]]] = {}
    for worker, reply in shares.send(payloads, siblings).items():
        futures[worker] = Future()
        reply.add_done_callback(partial(_arrived, graphs[worker], futures[worker]))
    return futures


def _arrived(graph: RemoteGraph, future: Future[list[Any]], reply: Future[Message]) -> None:
    """Pass a worker's values, or its error, to its future."""
    try:
        future.set_result(graph.values_of(reply.result()))
    except Exception as error:
        future.set_exception(error)
