"""On the worker: request ``Message`` → reply ``Message``, and a graph that is kept for the request's backward.

A call's tensors arrive as leaves. If the caller wants gradients, the graph from these to the results is kept under the
caller's key, until a backward uses it up or the caller releases it. A backward that is itself to be differentiated is
kept like a call, with the output gradients among its inputs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from torchopt_dist._random_turns import Draws
from torchopt_dist._serialized_exception import SerializedException
from torchopt_dist._torch_private import (
    advance_sequence_numbers,
    forget_failed_runs,
    next_sequence_number,
)
from torchopt_dist.distributed import _execute
from torchopt_dist.distributed._chunks import Deferred
from torchopt_dist.distributed._device_placement import receiving_device
from torchopt_dist.distributed._gradient_sums import add_up
from torchopt_dist.distributed._group import answering_group
from torchopt_dist.distributed._kept_graphs import KeptGraph, KeptGraphs
from torchopt_dist.distributed._left_behind import LeftBehind, is_looked_at
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._payload import Payload
from torchopt_dist.distributed._protocol import Backward, Call, Errand, Release, Reply
from torchopt_dist.distributed._replicas import Home, keep_grads
from torchopt_dist.distributed._serialization import pack, unpack
from torchopt_dist.distributed._spans import Recorder
from torchopt_dist.distributed._unsendable import place_in_values
from torchopt_dist.distributed.reference import ConnectedRRef
from torchopt_dist.errors import SerializationError

__all__ = ["answer", "error_reply", "handle_request"]


def handle_request(request: Message, kept_graphs: KeptGraphs, recorder: Recorder) -> Message:
    """Handle a request; an exception becomes the reply's exception.

    Args:
        request: the message, as it has arrived.
        kept_graphs: the graphs of this worker; one may be added or used up.
        recorder: the recorder of this worker.

    Returns:
        The reply's message, ready to be sent.
    """
    try:
        device = None if request.device is None else receiving_device(request.device)
        return answer(request, device, kept_graphs, recorder)
    except BaseException as error:  # the error is sent to the caller, and this worker goes on
        forget_failed_runs()
        return error_reply(error)


def error_reply(error: BaseException) -> Message:
    """The reply that lets the caller raise ``error``, ready to be sent.

    Args:
        error: an exception of the function, or one on the way to it or back, such as a lack of memory.
    """
    exception = SerializedException.of(error)
    try:
        return pack(Reply(exception=exception), main_by_name=True).detached()
    except SerializationError:  # the exception holds an object that cannot be sent
        return pack(Reply(exception=exception.as_text()), main_by_name=True).detached()


def answer(
    request: Message,
    device: torch.device | None,
    kept_graphs: KeptGraphs,
    recorder: Recorder,
) -> Message:
    """Handle a request; exceptions are raised.

    Args:
        request: the message, as it has arrived.
        device: the device for its tensors; ``None`` leaves them where they are.
        kept_graphs: as for :func:`handle_request`.
        recorder: as for :func:`handle_request`.
    """
    began = time.perf_counter()
    homes: dict[int, Home] = {}
    if request.staying:
        replicas = answering_group().replicas
        request = replicas.fill(request).received(device)
        homes = replicas.homes(request)
    elif request.tensors:
        request = request.received(device)
    content = unpack(request)
    if isinstance(content, Release):
        for key in content.graphs:
            kept_graphs.release(key)
            answering_group().streams.forget(key)
        for key in content.residents:
            answering_group().residents.forget(key)
            answering_group().replicas.forget(key)
        return pack(Reply(), main_by_name=True)
    key = content.key
    if recorder.profile.on:
        recorder.add("receive", began, key, key[0])
    used_up: tuple[KeptGraph, list[torch.Tensor]] | None = None
    shared = False
    if isinstance(content, Call):
        run = _execute.timed
        if request.moved:
            run = functools.partial(run, moved=True)
        draws = None if content.payload.state.grad_enabled else Draws(False)
        if draws is not None:
            run = functools.partial(run, draws=draws)
        if request.arrived:
            run = functools.partial(_with_references, request.arrived, run)
        warning = None
        if content.keep and is_looked_at(content.payload, kept_graphs.known):
            left = LeftBehind(content.payload, request)
            with left.watched():
                values, seconds = recorder.record("run", key, key[0], run, content.payload)
            warning = left.warning(values, kept_graphs.known)
        else:
            values, seconds = recorder.record("run", key, key[0], run, content.payload)
        made = Reply(values, warning=warning, seconds=seconds, drew=draws is None or draws.known is True)
        inputs = request.inputs() if request.tensors else []
    elif isinstance(content, Errand):
        made, inputs = Reply(content.run(request), drew=False), request.inputs()
    else:
        graph = kept_graphs.find(content.graph)
        input_grads, outputs = recorder.record(
            "backward", key, key[0], _differentiate, content, graph, kept_graphs
        )
        own = request.inputs()
        made, inputs = Reply(input_grads), [*own, *graph.inputs]
        homes = {len(own) + place: home for place, home in graph.homes.items()}
        used_up, shared = (graph, outputs), content.keep
    reply = recorder.record(
        "reply", key, key[0], _reply, made, inputs, content, kept_graphs, homes, shared=shared
    )
    reply.used_up = used_up
    return reply


def _with_references(
    arrived: Sequence[ConnectedRRef], run: Callable[[Payload], tuple[list[Any], float]], payload: Payload
) -> tuple[list[Any], float]:
    """What ``run`` returns, with references that are connected while it runs."""
    for reference in arrived:
        reference.begin(answering_group().ask, outlives=payload.options.outlives_workers)
    try:
        return run(payload)
    finally:
        for reference in arrived:
            reference.end()


def _differentiate(
    content: Backward, graph: KeptGraph, kept_graphs: KeptGraphs
) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """The gradients of the graph's inputs, and the outputs that they are of."""
    graph.shared |= content.keep
    reached = {place: grad for place, grad in enumerate(content.output_grads) if grad is not None}
    outputs = [graph.outputs[place] for place in reached]  # the caller asks for no output that is used up
    if not content.retain_graph:
        kept_graphs.use_up(content.graph, graph, [*reached])
    # A gradient may be on the CPU where its output is on a GPU.
    output_grads = [grad.to(y.device) for y, grad in zip(outputs, reached.values(), strict=True)]
    wanted = [leaf for leaf, is_wanted in zip(graph.inputs, content.wanted, strict=True) if is_wanted]
    if content.keep:  # so that sums have one order, whichever thread this is
        advance_sequence_numbers(graph.end)
    retain_graph = content.retain_graph or graph.shared
    found: Sequence[torch.Tensor | None]
    with content.state.applied(), torch.enable_grad(), ExitStack() as stack:
        deferred: list[Deferred] = []
        if content.streamed:
            streams = answering_group().streams
            deferred = stack.enter_context(
                streams.deferring([graph.inputs[place] for place in content.streamed])
            )
        found = torch.autograd.grad(
            outputs,
            wanted,
            output_grads,
            retain_graph=retain_graph,
            create_graph=content.keep,
            allow_unused=True,
        )
    grads = iter(found)
    all_grads = [next(grads) if is_wanted else None for is_wanted in content.wanted]
    if content.streamed:
        all_grads = add_up(
            all_grads, graph.inputs, content.streamed, deferred, content.key, recorded=content.keep
        )
    return keep_grads(content.key, graph.homes, all_grads), outputs


def _reply(
    content: Reply,
    inputs: list[torch.Tensor],
    request: Call | Errand | Backward,
    kept_graphs: KeptGraphs,
    homes: dict[int, Home],
    *,
    shared: bool = False,
) -> Message:
    try:
        reply = pack(content, main_by_name=True)
    except SerializationError as error:
        place = place_in_values(content.values) if isinstance(request, Call) else ""
        raise SerializationError(f"the result cannot be sent: {place}{error}") from error
    if request.keep and inputs:
        leaves = {id(tensor) for tensor in inputs}
        outputs = {
            number: tensor
            for number, tensor in enumerate(reply.tensors)
            if tensor.requires_grad and (tensor.grad_fn is not None or id(tensor) in leaves)
        }
        if outputs:
            kept = KeptGraph(inputs, list(outputs.values()), shared, next_sequence_number(), homes)
            kept_graphs.keep(request.key, kept)
            reply.connected = tuple(outputs)
    if not reply.tensors:
        return reply
    # A value that depends on this worker's own parameters alone would be a leaf at the caller, without any gradient.
    reply.requires_grad = [
        wanted and (tensor.grad_fn is None or number in reply.connected)
        for number, (wanted, tensor) in enumerate(zip(reply.requires_grad, reply.tensors, strict=True))
    ]
    sent = reply.detached()
    if isinstance(request, Backward) and request.keep and request.streamed:
        came = {id(content.values[place]) for place in request.streamed}
        sent.tensors = [
            tensor.new_empty(0) if id(whole) in came else tensor
            for whole, tensor in zip(reply.tensors, sent.tensors, strict=True)
        ]
    return sent
