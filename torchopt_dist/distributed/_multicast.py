"""``{worker: Payload}`` → ``{worker: Future[values]}``: to each its own, or down a tree what all of them share.

In a tree the caller sends to a few workers, and each of these forwards to a few others, so the data that the caller
sends does not grow with the number of workers. ``_tree.py`` makes the tree, and ``_relay.py`` forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch import Tensor

from torchopt_dist.distributed._group import Group, current_group
from torchopt_dist.distributed._late_tensors import can_be_cut
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._payload import Payload
from torchopt_dist.distributed._relay import Branch, Children, Parcel
from torchopt_dist.distributed._remote_graph import RemoteGraph
from torchopt_dist.distributed._serialization import PackedModules
from torchopt_dist.distributed._siblings import Siblings
from torchopt_dist.distributed._streams import chunks_of
from torchopt_dist.distributed._tree import Twig, tree
from torchopt_dist.distributed._unicast import call
from torchopt_dist.errors import CallTimeoutError

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
    movable: Mapping[int, bool],
    modules: PackedModules,
    siblings: Siblings,
    snapshot: bool,
) -> dict[int, Future[list[Any]]]:
    """Run payloads on other workers; see :func:`~torchopt_dist.distributed._unicast.call`.

    Args:
        payloads: of one call, by rank, in the order in which they are sent.
        seconds: how long they may take; 0: for ever.
        movable: whether another worker is to run a payload if its own is known to be lost.
        modules: those that the same call has packed.
        siblings: the shares of the same call.
        snapshot: send copies.

    Returns:
        A future of each worker's values.
    """
    group = current_group()
    group.check_process()
    twigs = _tree_for(group, payloads)
    futures: dict[int, Future[list[Any]]] = {}
    if twigs:
        futures = _Multicast(group, payloads, seconds, modules, siblings, snapshot).send(twigs)
    for worker, payload in payloads.items():
        if worker not in futures:
            futures[worker] = call(
                worker,
                payload,
                seconds,
                snapshot=snapshot,
                modules=modules,
                siblings=siblings,
                movable=movable[worker],
            )
    return futures


def _tree_for(group: Group, payloads: Mapping[int, Payload]) -> tuple[Twig, ...]:
    """The tree for a call; empty if there is to be none."""
    if len(payloads) < 2:
        return ()
    workers = [worker for worker in payloads if not group.retries.is_lost(worker)]
    if len(workers) < 2:
        return ()
    options = payloads[workers[0]].options
    if options.fan_out is None or options.outlives_workers:  # a share that may go elsewhere travels by itself
        return ()
    fan_out = options.fan_out
    if fan_out == "auto":
        if options.stream:
            return ()
        fan_out = AUTO_FAN_OUT
        here = group.members[group.rank].host
        if sum(group.members[worker].host != here for worker in workers) < AUTO_WORKERS:
            return ()
        shared = sum(x.nbytes for x in _common([payloads[worker].tensors() for worker in workers[:2]]))
        if shared < AUTO_BYTES:
            return ()
        if shared >= MUCH_BYTES:
            fan_out = AUTO_FAN_OUT_OF_MUCH
    if len(workers) <= fan_out:
        return ()
    return tree(group.rank, workers, [member.host for member in group.members], fan_out)


def _common(held: Sequence[Iterable[Tensor]]) -> list[Tensor]:
    """The tensors that all have in common, in the order of the first."""
    ids = set.intersection(*({id(tensor) for tensor in tensors} for tensors in held))
    return list({id(tensor): tensor for tensor in held[0] if id(tensor) in ids}.values())


class _Multicast:
    """One call down a tree."""

    def __init__(
        self,
        group: Group,
        payloads: Mapping[int, Payload],
        seconds: float,
        modules: PackedModules,
        siblings: Siblings,
        snapshot: bool,
    ) -> None:
        self._group = group
        self._payloads = payloads
        self._seconds = seconds
        self._modules = modules
        self._siblings = siblings
        self._snapshot = snapshot
        self._graphs: dict[int, RemoteGraph] = {}
        self._futures: dict[int, Future[list[Any]]] = {}

    def send(self, twigs: Sequence[Twig]) -> dict[int, Future[list[Any]]]:
        """Send the payloads of the workers in the tree; none if they hold what only a call by itself can carry."""
        group = self._group
        workers = [worker for twig in twigs for worker in twig.workers()]
        messages = {worker: self._packed(worker) for worker in workers}
        if any(message.references or message.staying for message in messages.values()):
            return {}
        structures: dict[bytes, bytes] = {}
        for message in messages.values():
            structures.update(message.structures)
        hoisted = [tensor for tensor in _common([m.tensors for m in messages.values()]) if can_be_cut(tensor)]
        copied = [tensor.detach().clone() for tensor in hoisted] if self._snapshot else hoisted
        chunks = chunks_of(copied)
        self._futures = {worker: Future() for worker in workers}
        children = Children(
            group,
            [self._branch(twig, messages) for twig in twigs],
            structures,
            hoisted,
            len(chunks),
            self._seconds,
            keep=self._payloads[workers[0]].state.grad_enabled,
            siblings=self._siblings,
            prepare=Tensor.clone if self._snapshot else Tensor.detach,
        )
        for chunk in chunks:
            children.hand_on(chunk)
        for twig, (reply, collect) in zip(twigs, children.replies().items(), strict=True):
            reply.add_done_callback(partial(self._arrived, twig.workers(), collect))
        return self._futures

    def _packed(self, worker: int) -> Message:
        graph = RemoteGraph(
            self._group, worker, self._group.transport.to(worker), self._seconds, siblings=self._siblings
        )
        self._graphs[worker] = graph
        with graph.span("pack"):
            return graph.packed(self._payloads[worker], self._modules)

    def _branch(self, twig: Twig, messages: Mapping[int, Message]) -> Branch:
        message = messages[twig.worker]
        digests = dict.fromkeys(message.structures, b"")
        parcel = Parcel.of(twig.worker, self._graphs[twig.worker].key, message, digests)
        return Branch(parcel, tuple(self._branch(each, messages) for each in twig.twigs))

    def _late(self, workers: Sequence[int]) -> CallTimeoutError:
        """Nobody here knows which worker of a branch is late."""
        names = [self._group.names[worker] for worker in workers]
        which = f"one of {', '.join(names)}" if len(names) > 1 else names[0]
        return CallTimeoutError(f"{which} took longer than timeout={self._seconds:g} s")

    def _arrived(
        self, workers: Sequence[int], collect: Callable[[Message], list[Parcel]], reply: Future[Message]
    ) -> None:
        """Pass the replies of a branch, or its error, to the futures of its workers."""
        try:
            parcels = collect(reply.result())
        except Exception as error:
            failure = self._late(workers) if type(error) is CallTimeoutError else error
            for worker in workers:
                self._futures[worker].set_exception(failure)
            return
        for parcel in parcels:
            future = self._futures[parcel.worker]
            try:
                future.set_result(self._graphs[parcel.worker].values_of(parcel.message(parcel.structures)))
            except Exception as error:
                future.set_exception(error)
