"""The backward of a call on its worker → large gradients in chunks, each sent as soon as the engine has it; the others.

So the gradients of a task's arguments travel while the engine goes through other tasks, and those of a model's last
layers while it goes through the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from torchopt_dist._torch_private import engine_run, set_sequence_number
from torchopt_dist.distributed._future import Future
from torchopt_dist.distributed._gradient_sums import GradientChunk, check_taken, send_gradients
from torchopt_dist.distributed._group import answering_group
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._nodes import FIRST
from torchopt_dist.distributed._protocol import Key
from torchopt_dist.distributed._streams import CHUNK, Piece, chunks_of
from torchopt_dist.distributed._wire_format import SMALL

__all__ = ["gradients_sent_early"]


def gradients_sent_early(
    outputs: Sequence[Tensor],
    output_grads: Sequence[Tensor],
    leaves: Mapping[int, Tensor],
    *,
    staying: Mapping[int, object],
    retain_graph: bool,
    key: Key,
) -> list[Tensor | None]:
    """The result of ``torch.autograd.grad(outputs, leaves, output_grads, allow_unused=True)``, less what was sent.

    Args:
        outputs: tensors of the graph.
        output_grads: a gradient for each.
        leaves: by their places among the inputs of the call.
        staying: the places of leaves whose gradients are not sent.
        retain_graph: whether the graph is kept for another backward.
        key: the key of the backward that has asked for the gradients.

    Raises:
        Exception: the exception of the backward, or the worker that asked cannot take a chunk.
    """
    sender = _Sender(key)
    start = torch.zeros((), requires_grad=True, device="cpu")
    with torch.enable_grad():
        mark = start.view(())
    mark.register_hook(sender.begin)
    set_sequence_number(mark, FIRST + 1)
    with ExitStack() as hooks:
        for place, leaf in leaves.items():
            if place not in staying and _can_go(leaf):
                hooks.callback(leaf.register_hook(partial(sender.take, place)).remove)
        *found, _ = torch.autograd.grad(
            [*outputs, mark],
            [*leaves.values(), start],
            [*output_grads, torch.zeros((), device="cpu")],
            retain_graph=retain_graph,
            allow_unused=True,
        )
    sent = sender.finish()
    return [None if place in sent else grad for place, grad in zip(leaves, found, strict=True)]


def _can_go(tensor: Tensor) -> bool:
    """Whether a gradient of this shape and kind is sent before the reply; of one on a GPU the engine's thread knows."""
    dense = tensor.layout is torch.strided and tensor.is_cpu and not (tensor.is_conj() or tensor.is_neg())
    return dense and tensor.nbytes > SMALL


class _Sender:
    """Sends gradients that the engine has found, as soon as there are enough for a chunk.

    A hook of a leaf is called by every backward that reaches the leaf: by those of other threads, and by one inside a
    node of this one, which finds a part of the gradient only. So :meth:`take` asks which run of the engine calls it.
    """

    def __init__(self, key: Key) -> None:
        self._group = answering_group()
        self._key = key
        self._run = -1
        self._waiting: dict[int, Tensor] = {}
        self._sent: set[int] = set()
        self._replies: list[Future[Message]] = []

    def begin(self, _: Tensor) -> None:
        """The hook of the first node: the engine has begun."""
        self._run = engine_run()

    def take(self, place: int, grad: Tensor) -> None:
        """The hook of a leaf: its gradient is complete."""
        if engine_run() != self._run or self._run < 0 or type(grad) is not Tensor or not _can_go(grad):
            return
        self._waiting[place] = grad.detach().reshape(-1)
        if sum(flat.nbytes for flat in self._waiting.values()) >= CHUNK:
            self._send()

    def _send(self) -> None:
        places = [*self._waiting]
        for chunk in chunks_of([*self._waiting.values()], large=True):
            pieces = tuple(Piece(places[number], start, values) for number, start, values in chunk)
            request = GradientChunk(self._key, False, len(self._replies), pieces)
            self._replies.append(send_gradients(self._group, request))
        self._sent.update(places)
        self._waiting.clear()

    def finish(self) -> set[int]:
        """Wait until all that was sent has come; returns the places of these gradients."""
        check_taken(self._group, self._key, self._replies)
        return self._sent
