"""The caller's side of a call: payload → message, anchor; reply → values, connected for backward to any order.

A call is two nodes of the caller's autograd graph::

    inputs ──> dispatch ──anchor──> collect ──> results

Between them lies the worker's own graph, kept there under a key. In backward, *collect* sends the results' gradients
to the worker and returns at once; *dispatch* waits for the gradients of the inputs. The engine is told to run *collect*
as soon as it can and *dispatch* as late as it can, so that all the workers and the caller itself differentiate at the
same time. What one leaves for the other is on a ticket, a tensor that travels down the anchor as its "gradient".

A backward that is recorded (``create_graph=True``) is a call too: its inputs are the results' gradients and, again,
the call's inputs; its results are the inputs' gradients. Such a call gets two nodes of its own, and so on to any order.

These nodes are used inside the contexts of ``torch.distributed.autograd`` too: to its engine they are local ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.core.inputs import Seen, apart_from, check_inputs
from torchopt_dist.core.random_turns import lent
from torchopt_dist.core.reached import name_of
from torchopt_dist.distributed.calls.again import Again, call_again, gradients_again
from torchopt_dist.distributed.calls.local import Beside, Here
from torchopt_dist.distributed.calls.nodes import collect, dispatch
from torchopt_dist.distributed.calls.siblings import Siblings
from torchopt_dist.distributed.group.chunks import Arriving, Deferred
from torchopt_dist.distributed.group.group import Group, find_group
from torchopt_dist.distributed.group.spans import Phase, Spanned
from torchopt_dist.distributed.messages.caller_state import CallerState
from torchopt_dist.distributed.messages.message import MUCH_CODE, GlobalsOfCode, Message, description_of_much
from torchopt_dist.distributed.messages.payload import Payload
from torchopt_dist.distributed.messages.references import StayingModule
from torchopt_dist.distributed.messages.requests import BACKWARD_TWICE, Backward, Call, Key
from torchopt_dist.distributed.serialization.names import code_of
from torchopt_dist.distributed.serialization.pickling import PackedModules, pack, place_of, reply_of
from torchopt_dist.distributed.transport.base import Sender
from torchopt_dist.distributed.transport.retries import Ask, AsSent, Attempt, Deadline, Sent
from torchopt_dist.distributed.worker.device import receiving_device
from torchopt_dist.distributed.worker.gradient_sums import with_gradients
from torchopt_dist.errors import NotInitializedError, SerializationError
from torchopt_dist.process.future import Future
from torchopt_dist.torch_private import engine_keeps_graph, engine_run, transforms_are_active

__all__ = ["RemoteGraph"]


class RemoteGraph:
    """The caller's handle of a graph that a worker keeps; the graph is released when the handle is freed."""

    def __init__(
        self,
        siblings: Siblings,
        worker: int,
        transport: Sender | None = None,
        *,
        own: bool = False,
    ) -> None:
        self.kept = False  # set first, since `__del__` reads it
        self.gone = False  # whether no worker keeps it, and a backward makes it again
        self.siblings = siblings
        self.group = group = siblings.group
        self.own = own  # the graph of this worker's own share
        self.number = len(group.names) + 1 if own else len(group.names) - worker  # of its *dispatch*
        self.again: Again | None = None  # makes it again, if it is to outlive its workers
        self.transport = transport or group.transport.to(worker)
        self.worker = worker
        self.worker_name = group.names[worker]
        self.key: Key = (group.rank, next(group.numbers))
        self.inputs = Seen()  # none once every result is used up
        self.streamed: Sequence[int] = ()  # of inputs whose gradients come in chunks
        self.unused: set[int] = set()  # the results that no backward has used up
        self._main_by_name = group.same_program(worker)

    def __del__(self) -> None:
        if self.kept:
            self.release()

    def release(self) -> None:
        """Let the worker forget its graph."""
        if isinstance(self.transport, Here):
            self.transport.kept_graphs.release(self.key)
        else:
            self.group.releaser.release(self.transport, self.worker, self.key)

    def is_at(self, attempt: Attempt) -> None:
        """Note which attempt was answered: its worker keeps the graph, under its key."""
        self.worker, self.transport, self.key = attempt
        self.worker_name = self.group.names[self.worker]

    def begin(
        self,
        message: Message,
        late: Sequence[Tensor] = (),
        *,
        as_sent: AsSent | None = None,
        instead: Mapping[int, Tensor] | None = None,
        spent: int | None = None,
    ) -> tuple[Tensor | None, Future[Message]]:
        """Send a call, but for its tensors that come late; returns the anchor, and the future reply.

        ``as_sent`` makes of a tensor of the message the one to send; ``instead`` has, by the id of a tensor of the
        message, the one to which the reply is connected in its place; ``spent`` is how many of the retries have been
        used, if another worker may be asked (``None``: none may), which needs ``as_sent``.
        """
        anchor, sent, siblings, record = None, message, self.siblings, self.group.recorder.record
        if message.tensors:
            connected = message
            if instead:
                connected = message.with_tensors([instead.get(id(each), each) for each in message.tensors])
            anchor = self.connect(connected, keep=siblings.keep)
            sent = message.with_tensors([*map(as_sent or Tensor.detach, message.tensors)])
        if late:
            numbers = {id(tensor): number for number, tensor in enumerate(message.tensors)}
            for tensor in late:
                sent.tensors[numbers[id(tensor)]] = tensor.new_empty(0)
        if spent is None or as_sent is None:
            reply = record("send", self.key, self.worker, self.send, sent)
        else:
            kept = Sent(sent, None if message.key else self.key, as_sent.own(message.tensors))
            reply = record("send", self.key, self.worker, self.ask, kept, spent=spent)
        if siblings.log is not None:
            siblings.log.watch(message, reply)
        return anchor, reply

    def send(self, message: Message) -> Future[Message]:
        """Send a request to the worker."""
        return self.transport.send(self.worker, message, self.siblings.seconds)

    def ask(self, sent: Sent, *, spent: int = 0, avoided: Collection[int] = ()) -> Future[Message]:
        """Send a call to the worker, or to another one if the worker is lost or late.

        So many of its retries are ``spent``; the ``avoided`` workers are asked only if nobody else is left.
        """
        options, device, group = self.siblings.options, sent.message.device, self.group
        if self.kept and self.again is None and options.outlives_workers:
            new = partial(RemoteGraph, worker=self.worker, transport=self.transport)
            self.again = call_again(group, sent, self.inputs.tensors, new)
        ask = Ask(
            sent,
            Attempt(self.worker, self.transport, self.key),
            self.kept,
            self.is_at,
            max(0, options.retries - spent),
            options.hedge_after,
            Deadline(self.siblings.seconds),
            beside=lambda: Beside(receiving_device(device), group),
            may_go=lambda rank: not self._main_by_name or group.same_program(rank),
            avoided=avoided,
        )
        return group.retries.ask(ask)

    def span(self, phase: Phase) -> Spanned:
        """See :meth:`Recorder.span`."""
        return self.group.recorder.span(phase, self.key, self.worker)

    def pack(self, request: Call | Backward, modules: PackedModules | None = None) -> Message:
        here = isinstance(self.transport, Here)
        message = pack(request, main_by_name=self._main_by_name, modules=modules, here=here)
        message.function = self.siblings.function
        return message

    def packed(self, payload: Payload, modules: PackedModules | None) -> Message:
        """The message that asks for a call, recorded; errors as of :meth:`message_of`."""
        return self.group.recorder.record("pack", self.key, self.worker, self.message_of, payload, modules)

    def message_of(self, payload: Payload, modules: PackedModules | None) -> Message:
        """The message that asks for a call.

        Raises :class:`SerializationError` if the payload cannot be sent, or not from inside a transform, and
        :class:`ValueError` if the call gets a mirror and may run twice.
        """
        request = Call(payload, self.key, payload.state.grad_enabled)
        try:
            message = self.pack(request, modules)
        except SerializationError as error:
            tasks = [part for task in payload.tasks for part in zip(("args", "kwargs"), task, strict=True)]
            place = place_of([("func", payload.function), *tasks], main_by_name=self._main_by_name)
            raise SerializationError(
                f"`{name_of(payload.function)}` and its arguments cannot be sent to {self.worker_name}: {place}{error}"
            ) from error
        moves = self.siblings.options.outlives_workers and not self.own
        if moves and any(isinstance(each, StayingModule) for each in message.handles):
            raise ValueError(
                f"`{name_of(payload.function)}` is called with a mirror, whose gradients stay on the worker that "
                "computes them: leave out retries and hedge_after"
            )
        message.device = payload.options.device
        if message.code is not None and not isinstance(self.transport, Here):
            self._warn_of_much(payload, message.code, message.code.nbytes(message.tensors))
        if message.tensors and request.keep and transforms_are_active() and message.inputs():
            raise SerializationError(
                f"`{name_of(payload.function)}` takes tensors that require grad, such as a module's parameters, "
                "and is called inside a torch.func transform, which the graph of a call to "
                f"{self.worker_name} cannot be a part of: detach them, or call it outside of `grad` and `vmap`"
            )
        return message

    def _warn_of_much(self, payload: Payload, code: GlobalsOfCode, nbytes: int) -> None:
        """Warn once of a function that takes large global variables with it."""
        known, key = self.group.known_functions, ("much", code_of(payload.function))
        if nbytes > MUCH_CODE and key not in known:
            known.add(key)
            text = description_of_much(
                name_of(payload.function),
                code,
                nbytes,
                lambda value: pack(value, main_by_name=self._main_by_name).nbytes(),
            )
            warnings.warn(text, stacklevel=2)

    def connect(self, message: Message, *, keep: bool) -> Tensor | None:
        """The anchor, if gradients are wanted."""
        inputs = message.inputs() if keep else []
        anchor = dispatch(self, inputs) if inputs else None
        # The worker is assumed to keep its graph until the reply says so: a reply may come too late to be heard.
        self.kept = anchor is not None
        return anchor

    def collect(self, anchor: Tensor | None, message: Message) -> list[Any]:
        """The node next to the results; returns the reply's values, connected to the anchor."""
        return self.group.recorder.record("unpack", self.key, self.worker, self._values, anchor, message)

    def _values(self, anchor: Tensor | None, message: Message) -> list[Any]:
        if message.tensors or self.kept:
            message = self.connected(anchor, message.received())
        values = self.values_of(message)
        if self.again is not None:
            self.found(message, values)
        return values

    def found(self, reply: Message, values: list[Any]) -> None:
        """Note what would make the graph again, if it is kept."""
        if self.again is not None:
            if self.kept:
                self.again.found(reply, values)
            else:
                self.again = None

    def connected(self, anchor: Tensor | None, message: Message) -> Message:
        """The node next to the results; returns the reply, whose tensors are connected to the anchor."""
        self.kept = anchor is not None and bool(message.connected)
        if anchor is not None and message.connected:
            outputs = [message.tensors[number].detach() for number in message.connected]
            self.unused = set(range(len(outputs)))
            connected = collect(self, anchor, outputs)
            for number, output in zip(message.connected, connected, strict=True):
                message.tensors[number] = output
        return message

    def values_of(self, message: Message) -> list[Any]:
        """The values of a reply."""
        reply = reply_of(message, self.worker_name, self.siblings.error_of)
        if reply.warning is not None:
            warnings.warn(f"{reply.warning}; strict=True makes this an error", stacklevel=1)
        self.siblings.drew |= reply.drew
        if self.siblings.took is not None:
            self.siblings.took(self.worker, reply.seconds)
        return reply.values

    def wait_for(
        self, reply: Future[Message], arriving: Arriving | None, cut: Sequence[Tensor]
    ) -> tuple[Message, dict[int, Tensor]]:
        """The reply to a backward, and by number the gradients of ``cut`` that have come before it in chunks.

        They are there as soon as the replies of the call's other shares have come, too.
        """
        whole: dict[int, Tensor] = {}
        if self.own:
            arrived = reply.result()  # computes it, which is no waiting
            with lent():
                self.siblings.check(engine_run())
        else:
            with self.span("wait back"), lent():
                if arriving is not None:
                    whole = arriving.put_together(cut)
                arrived = reply.result()
                self.siblings.check(engine_run())
        return arrived, whole

    def start_backward(
        self, output_grads: tuple[Tensor | None, ...], wanted: tuple[bool, ...]
    ) -> Callable[[], list[Tensor | None]]:
        """Send the results' gradients; returns what waits for the inputs', as of :meth:`finish_backward`.

        Raises :class:`RuntimeError` if a backward has used up one of the results (the others can still be used, as in
        torch), and :class:`NotInitializedError` if the RPC group of the call has ended, or in a fork of the caller.
        """
        self.group.check_process()
        retain_graph, state = engine_keeps_graph(), CallerState.capture()
        recorded = state.grad_enabled
        reached = {number for number, grad in enumerate(output_grads) if grad is not None}
        if not reached <= self.unused:
            raise RuntimeError(BACKWARD_TWICE)
        # The graph of the caller's own share ends with the autograd graph that leads to it.
        if not isinstance(self.transport, Here) and find_group() is not self.group:
            raise NotInitializedError(
                f"the graph of this remote call was kept by {self.worker_name}, and the RPC group has ended"
            )
        graph = RemoteGraph(self.siblings, self.worker, self.transport, own=self.own)
        graph.number = self.number
        nobody = self.again is not None and (self.gone or self._has_lost_worker())
        streamed = () if nobody else tuple(place for place in self.streamed if wanted[place])
        arriving = self.group.streams.expect(graph.key, keeps=recorded) if streamed else None
        with graph.span("pack") as span:
            key = graph.key
            message = graph.pack(
                Backward(self.key, output_grads, wanted, retain_graph, key, recorded, state, streamed)
            )
            span.made(message)
        sent = message.detached()
        inputs = self.inputs
        if not retain_graph:
            self.unused -= reached
            self.kept = bool(self.unused) and not self.gone
            self.inputs = inputs if self.unused else Seen()
        reply = None if nobody else self._send_backward(graph, sent, recorded=recorded)
        if arriving is not None and reply is not None:  # all chunks have come when it is there, or has failed
            reply.add_done_callback(partial(_no_more_chunks, self.group, graph.key))
        again = None
        if self.again is not None:
            again = gradients_again(self.again, output_grads, wanted, inputs.tensors, state)
            options, deadline = self.siblings.options, Deadline(self.siblings.seconds)
            reply = again.instead_of(reply, self.group, self.worker, options, deadline)
            graph.again = again if recorded else None
            self.again = self.again if self.unused else None
        assert reply is not None
        if not self.own:
            self.siblings.add(engine_run(), reply, self.worker_name)
        return partial(self.finish_backward, graph, message, reply, inputs, arriving, streamed, again)

    def _has_lost_worker(self) -> bool:
        return self.transport.has_lost(self.worker) and self.group.membership.goes_on_without(self.worker)

    def _send_backward(self, graph: RemoteGraph, message: Message, *, recorded: bool) -> Future[Message]:
        graph.kept = recorded
        if self.own:
            return self.send(message)
        answered = self.group.outstanding.wait_for_slot(self.siblings.seconds)
        with graph.span("send"):
            reply = self.send(message)
        reply.add_done_callback(answered)
        return reply

    def made_elsewhere(self, anchor: Tensor | None, grads: list[Tensor | None]) -> list[Tensor | None]:
        """The node next to gradients that were made again, by graphs that are gone.

        The caller's graph has the same nodes as without a loss, so that the engine adds up in the same order.
        """
        if self.kept:  # by a worker that was only late
            self.kept = False
            self.release()
        self.gone = True
        places = [place for place, grad in enumerate(grads) if grad is not None and grad.requires_grad]
        found = [grad if grad is None else grad.detach() for grad in grads]
        if anchor is not None and places and self.again is not None:
            self.again.outputs = places
            self.unused = set(range(len(places)))
            outputs = [grad for grad in (found[place] for place in places) if grad is not None]
            for place, output in zip(places, collect(self, anchor, outputs), strict=True):
                found[place] = output
        return found

    def finish_backward(
        self,
        graph: RemoteGraph,
        message: Message,
        reply: Future[Message],
        inputs: Seen,
        arriving: Arriving | None,
        streamed: Sequence[int],
        again: Again | None,
    ) -> list[Tensor | None]:
        """Wait for the inputs' gradients; if recorded, these are connected to the results' gradients and to the inputs.

        ``graph`` is that of the backward itself, and ``message`` has the results' gradients; ``inputs`` are the call's,
        as they were at the call, and ``arriving`` has the gradients of those at ``streamed``, which come in chunks;
        ``again`` has the gradients if they were made again. Raises :class:`RuntimeError` if the backward is recorded,
        and an input has been changed in place.
        """
        tensors, anchor, recorded = inputs.tensors, None, torch.is_grad_enabled()
        if recorded:
            check_inputs(inputs)
            anchor = dispatch(graph, [*message.inputs(), *tensors])
        cut = [tensors[place] for place in streamed]

        def finish() -> list[Tensor | None]:
            arrived, found = graph.wait_for(reply, arriving, cut)
            made = None if again is None else again.take()
            if made is not None:
                return graph.made_elsewhere(anchor, made)
            whole = {streamed[number]: grad for number, grad in found.items()}
            if recorded:
                return graph.collect(anchor, with_gradients(arrived, whole))
            grads = graph.collect(anchor, arrived)
            return [whole.get(place, grad) for place, grad in enumerate(grads)] if whole else grads

        if arriving is not None and self.group.streams.put_off(cut, Deferred(tensors, arriving, finish)):
            return [None] * len(tensors)
        grads = finish()
        if isinstance(self.transport, Here) and not recorded:
            grads = apart_from(message.tensors, grads)
        # A worker may have computed on its GPU what came from a CPU.
        return [g if g is None else g.to(x.device) for g, x in zip(grads, tensors, strict=True)]


def _no_more_chunks(group: Group, key: Key, _: Future[Message]) -> None:
    group.streams.forget(key)
