"""On the worker: request ``Message`` → reply ``Message``, and a graph that is kept for the request's backward.

A call's tensors arrive as leaves. If the caller wants gradients, the graph from these to the results is kept under the
caller's key, until a backward uses it up or the caller releases it. A backward that is itself to be differentiated is
kept like a call, with the output gradients among its inputs.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FrameType

import torch

from torchopt_dist.core.code_names import is_installed, top_package
from torchopt_dist.core.reached import name_of
from torchopt_dist.core.second_order import guarded, refuse_left_out
from torchopt_dist.distributed.group.chunks import Deferred
from torchopt_dist.distributed.group.group import answering_group
from torchopt_dist.distributed.group.kept import HeldLeaf, Kept, KeptGraph
from torchopt_dist.distributed.group.mirrors import HeldLeaves, keep_grads
from torchopt_dist.distributed.group.spans import Recorder
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.payload import Payload, Surrounded
from torchopt_dist.distributed.messages.references import ConnectedRRef
from torchopt_dist.distributed.messages.requests import Backward, Call, Key, Made, Release, Reply, Request
from torchopt_dist.distributed.serialization.names import code_of
from torchopt_dist.distributed.serialization.pickling import error_reply, pack, place_of, unpack
from torchopt_dist.distributed.worker import execute as execute_module
from torchopt_dist.distributed.worker.chunk_requests import arriving
from torchopt_dist.distributed.worker.device import receiving_device
from torchopt_dist.distributed.worker.gradient_sums import add_up
from torchopt_dist.distributed.worker.left_behind import LeftBehind
from torchopt_dist.errors import SerializationError
from torchopt_dist.torch_private import (
    advance_sequence_numbers,
    forget_failed_runs,
    frames_of_threads,
    next_sequence_number,
)

__all__ = ["answer", "handle_request", "tasks_under_way"]


def handle_request(request: Message, kept_graphs: Kept[KeptGraph], recorder: Recorder) -> Message:
    """The reply to a request, ready to be sent; an exception becomes the reply's exception."""
    try:
        device = None if request.device is None else receiving_device(request.device)
        return answer(request, device, kept_graphs, recorder)
    except BaseException as error:  # the error is sent to the caller, and this worker goes on
        forget_failed_runs()
        return error_reply(error)


def answer(
    request: Message, device: torch.device | None, kept_graphs: Kept[KeptGraph], recorder: Recorder
) -> Message:
    """The reply to a request, whose tensors are moved to a device, if one is given; exceptions are raised."""
    began = time.perf_counter()
    worker = _Worker(request, device, kept_graphs, recorder)
    content = worker.unpack()
    key = request.key or content.key
    if key is None or content.key is None:
        return pack(content.run(worker).reply, main_by_name=True)
    if recorder.profile.on:
        recorder.add("receive", began, key, key[0])
    if request.key is not None:
        if answering_group().has_gone(key):  # the share runs elsewhere now
            raise answering_group().membership.loss_of(key[0])
        worker.is_moved = key != content.key and key[0] == content.key[0]
    made = content.run(worker)
    reply = recorder.record("reply", key, key[0], _reply, made, key if content.keep else None, kept_graphs)
    reply.used_up = made.used_up
    return reply


class _Worker:
    """See :class:`~torchopt_dist.distributed.messages.requests.Worker`; the arguments are those of :func:`answer`."""

    def __init__(
        self, request: Message, device: torch.device | None, kept_graphs: Kept[KeptGraph], recorder: Recorder
    ) -> None:
        self.message = request.received(device) if request.tensors else request
        if request.late is not None and request.key is not None:
            with arriving(self.message, request.key) as chunks:
                for _ in chunks:
                    pass
        self.inputs: Sequence[torch.Tensor] = self.message.inputs() if request.tensors else []
        self.held: Sequence[HeldLeaf] = ()
        self._leaves: Sequence[torch.Tensor] = ()
        self._device = device
        self.is_moved = False  # whether another worker was asked first, so that this one has work of its own
        self._kept_graphs = kept_graphs
        self._recorder = recorder

    def unpack(self) -> Request:
        """The request; tensors of mirrors that it mentions are this worker's."""
        leaves = HeldLeaves(self._device, lambda key: answering_group().mirrors.find(key))
        content: Request = unpack(self.message, leaves.leaf)
        self._leaves = leaves.tensors()
        if self._leaves:
            self.inputs, self.held = leaves.inputs(self.inputs)
        return content

    def execute(self, call: Call) -> Made:
        """Run a payload."""
        message, payload, known = self.message, call.payload, answering_group().known_functions
        run = functools.partial(execute_module.run, payload, moved=self.is_moved)
        if message.arrived:
            run = functools.partial(_with_references, message.arrived, run, payload)
        within = payload.function.within if isinstance(payload.function, Surrounded) else nullcontext
        if within is not nullcontext:
            run = functools.partial(_within, within, run)
        warning = None
        if call.keep and (payload.options.strict or code_of(payload.function) not in known):
            left = LeftBehind(payload, [*message.tensors, *self._leaves], message.apart)
            with left.watched():
                ran = self._recorder.record("run", call.key, call.key[0], run)
            warning = left.warning(ran.values, known)
        else:
            ran = self._recorder.record("run", call.key, call.key[0], run)
        reply = Reply(ran.values, warning=warning, seconds=ran.seconds, drew=ran.drew)
        return Made(reply, self.inputs, self.held, within=within)

    def differentiate(self, backward: Backward) -> Made:
        """Differentiate a graph that is kept here."""
        graph = self._kept_graphs.find(backward.graph)
        reached = {place: grad for place, grad in enumerate(backward.output_grads) if grad is not None}
        outputs = [graph.outputs[place] for place in reached]  # the caller asks for no output that is used up
        graph.shared |= backward.keep
        if not backward.retain_graph and graph.use_up([*reached]):
            self._kept_graphs.release(backward.graph)
        # A gradient may be on the CPU where its output is on a GPU.
        output_grads = [grad.to(y.device) for y, grad in zip(outputs, reached.values(), strict=True)]
        with graph.within():
            grads = self._recorder.record(
                "backward",
                backward.key,
                backward.key[0],
                _differentiate,
                backward,
                graph,
                outputs,
                output_grads,
            )
        own = self.inputs
        return Made(
            Reply(grads),
            [*own, *graph.inputs],
            [each._replace(hook=len(own) + each.hook) for each in graph.held],
            shared=backward.keep,
            left_out=backward.streamed if backward.keep else (),
            used_up=(graph, outputs),
            within=graph.within,
        )

    def release(self, request: Release) -> Made:
        """Forget what is kept under keys."""
        group = answering_group()
        for key in request.keys:
            if group.residents.release(key) is None and group.mirrors.release(key) is None:
                self._kept_graphs.release(key, coming=True)
                group.streams.forget(key)
        return Made(Reply())


def _within(
    context: Callable[[], AbstractContextManager[object]], run: Callable[[], execute_module.Ran]
) -> execute_module.Ran:
    with context():
        return run()


def _with_references(
    arrived: Sequence[ConnectedRRef], run: Callable[[], execute_module.Ran], payload: Payload
) -> execute_module.Ran:
    """What ``run`` returns, with references that are connected while it runs."""
    for reference in arrived:
        reference.begin(answering_group().ask, outlives=payload.options.outlives_workers)
    try:
        return run()
    finally:
        for reference in arrived:
            reference.end()


def _differentiate(
    backward: Backward,
    graph: KeptGraph,
    outputs: Sequence[torch.Tensor],
    output_grads: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """The gradients of the graph's inputs; those of tensors of mirrors stay here."""
    are_wanted = [*backward.wanted, *(backward.wanted[each.hook] for each in graph.held)]
    wanted = [leaf for leaf, is_wanted in zip(graph.inputs, are_wanted, strict=True) if is_wanted]
    nodes = refuse_left_out(outputs)
    if backward.keep:  # so that sums have one order, whichever thread this is
        advance_sequence_numbers(graph.end)
    with backward.state.applied(), torch.enable_grad(), ExitStack() as stack:
        deferred: list[Deferred] = []
        if backward.streamed:
            streams = answering_group().streams
            deferred = stack.enter_context(
                streams.deferring([graph.inputs[place] for place in backward.streamed])
            )
        made: Sequence[torch.Tensor | None] = torch.autograd.grad(
            outputs,
            wanted,
            output_grads,
            retain_graph=backward.retain_graph or graph.shared,
            create_graph=backward.keep,
            allow_unused=True,
        )
        if backward.keep:
            made = guarded(made, wanted, nodes)
    del nodes
    found = iter(made)
    grads = [next(found) if is_wanted else None for is_wanted in are_wanted]
    grads, staying = grads[: len(backward.wanted)], grads[len(backward.wanted) :]
    keep_grads(backward.key, graph.held, staying)
    grads = [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]
    if not backward.streamed:
        return grads
    return add_up(grads, graph.inputs, backward.streamed, deferred, backward.key, recorded=backward.keep)


def _reply(made: Made, key: Key | None, kept_graphs: Kept[KeptGraph]) -> Message:
    """The reply's message, ready to be sent; its graph is kept under a key, if there is one."""
    values = made.reply.values
    try:
        reply = pack(made.reply, main_by_name=True)
    except SerializationError as error:
        place = place_of([("result", value) for value in values], main_by_name=True)
        raise SerializationError(f"the result cannot be sent: {place}{error}") from error
    if key is not None and made.inputs:
        leaves = {id(tensor) for tensor in made.inputs}
        outputs = {
            number: tensor
            for number, tensor in enumerate(reply.tensors)
            if tensor.requires_grad and (tensor.grad_fn is not None or id(tensor) in leaves)
        }
        if outputs:
            end = next_sequence_number()
            kept = KeptGraph([*made.inputs], [*outputs.values()], made.shared, end, made.held, made.within)
            kept_graphs.keep(key, kept)
            reply.connected = tuple(outputs)
    if not reply.tensors:
        return reply
    # A value that depends on this worker's own parameters alone would be a leaf at the caller, without any gradient.
    reply.requires_grad = [
        wanted and (tensor.grad_fn is None or number in reply.connected)
        for number, (wanted, tensor) in enumerate(zip(reply.requires_grad, reply.tensors, strict=True))
    ]
    sent = reply.detached()
    left_out = {id(values[place]) for place in made.left_out}
    for number, tensor in enumerate(reply.tensors) if left_out else ():
        if id(tensor) in left_out:
            sent.tensors[number] = tensor.new_empty(0)
    return sent


def tasks_under_way() -> tuple[str, ...]:
    """For each task, and each backward, that runs in this process now: its function, and the user's line where it is.

    Nothing is recorded for this: the stacks of the threads tell.
    """
    found: list[str] = []
    for innermost in frames_of_threads().values():
        frame: FrameType | None = innermost
        place = ""
        while frame is not None:
            code = frame.f_code
            if code is execute_module.run.__code__:
                payload: Payload = frame.f_locals["payload"]
                if None not in payload.seeds:  # otherwise a question of the package's own
                    found.append(name_of(payload.function) + place)
                place = ""  # further out is the task that has called this one here
            elif code is _differentiate.__code__:
                found.append("backward" + place)
                place = ""
            elif not (place or is_installed(top_package(frame.f_globals.get("__name__", "")))):
                place = f" ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
            frame = frame.f_back
    return tuple(sorted(found))
