"""A worker's tasks → those of their tensors that may come later, in chunks; on the worker: a wait for those of a task.

So a worker runs its first task while the others still travel. A tensor may come late if nothing reads it before its
task runs. That can be told where the tasks hold nothing but tensors, plain values, tuples, lists and dictionaries of
these, and objects that an earlier task has brought, such as the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchopt_dist.distributed._group import answering_group
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._payload import Payload
from torchopt_dist.distributed._protocol import Key, Late
from torchopt_dist.distributed._streams import Chunk, chunks_of
from torchopt_dist.distributed._wire_format import SMALL

__all__ = ["LateTensors", "can_be_cut", "filled", "unmarked"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def can_be_cut(tensor: Tensor) -> bool:
    """Whether a tensor is large, and lies in memory as chunks of it would."""
    plain = type(tensor) in (Tensor, nn.Parameter) and not (tensor.is_conj() or tensor.is_neg())
    return plain and tensor.nbytes > SMALL and tensor.is_contiguous()


class _OpaqueError(Exception):
    """An object of a later task may read tensors when it is rebuilt."""


class LateTensors(NamedTuple):
    """The tensors of a call that come late.

    Attributes:
        tensors: by the first task that needs them.
        tasks: the index of that task, for each.
        chunks: of the tensors.
        new: all tensors of the tasks but the first, which are not seen in the first.
        mark: an empty tensor that is pickled after the first task, so that its number tells what that holds unseen.
    """

    tensors: list[Tensor]
    tasks: list[int]
    chunks: list[Chunk]
    new: list[Tensor]
    mark: Tensor

    @classmethod
    def of(cls, payload: Payload, *, snapshot: bool) -> LateTensors | None:
        """Those of a payload; ``None`` if there are none, or if that cannot be told.

        Args:
            payload: the work of one worker.
            snapshot: whether the chunks are of copies.
        """
        seen: set[int] = {id(payload.function)}
        found: list[tuple[int, Tensor]] = []
        try:
            for index, task in enumerate(payload.tasks):
                unseen = _tensors(task, seen, opaque=index == 0)
                found += [(index, tensor) for tensor in unseen if index]
        except _OpaqueError:
            return None
        late = [(index, tensor) for index, tensor in found if can_be_cut(tensor)]
        if not late:
            return None
        tensors = [tensor for _, tensor in late]
        cut = [tensor.detach().clone() if snapshot else tensor for tensor in tensors]
        tasks, new = [index for index, _ in late], [tensor for _, tensor in found]
        return cls(tensors, tasks, chunks_of(cut, large=True), new, torch.empty(0, device="cpu"))

    def request(self, seconds: float) -> Late:
        """What the request says of them; ``seconds`` is how long its worker may wait for them, 0: for ever."""
        shapes = tuple(tuple(tensor.shape) for tensor in self.tensors)
        return Late(tuple(self.tensors), tuple(self.tasks), shapes, len(self.chunks), seconds)

    def marked(self, payload: Payload) -> Payload:
        """The payload with the mark; see :func:`unmarked`."""
        first, *others = payload.tasks
        tasks: Any = ((*first, self.mark), *others)
        return replace(payload, tasks=tasks)

    def numbers_in(self, message: Message) -> list[int] | None:
        """Their numbers; ``None`` if an object of the first task holds one unseen, which then comes earlier."""
        numbers = {id(tensor): number for number, tensor in enumerate(message.tensors)}
        if any(numbers[id(tensor)] < numbers[id(self.mark)] for tensor in self.new):
            return None
        return [numbers[id(tensor)] for tensor in self.tensors]


def unmarked(payload: Payload) -> Payload:
    """On the worker: the payload without the mark."""
    first, *others = payload.tasks
    return replace(payload, tasks=(first[:2], *others))


def _tensors(task: Any, seen: set[int], *, opaque: bool) -> Iterator[Tensor]:
    """The tensors in tuples, lists and dictionaries, but for those that were seen."""
    if isinstance(task, _PLAIN) or id(task) in seen:
        return
    kind = type(task)
    if kind in (tuple, list):
        for part in task:
            yield from _tensors(part, seen, opaque=opaque)
    elif kind is dict:
        for key, part in task.items():
            yield from _tensors(key, seen, opaque=opaque)
            yield from _tensors(part, seen, opaque=opaque)
    else:
        seen.add(id(task))
        if kind in (Tensor, nn.Parameter):
            yield task
        elif not opaque:
            raise _OpaqueError


@contextmanager
def filled(key: Key, late: Late) -> Iterator[Callable[[int], None]]:
    """On the worker: yield a function that waits for the tensors of a task, by its index.

    Args:
        key: of the call.
        late: what comes.

    Raises:
        CallTimeoutError: they have not come in time.
        WorkerLostError: the caller is gone.
    """
    group = answering_group()
    flat: list[Tensor] = []
    missing: Counter[int] = Counter()
    for leaf, shape, task in zip(late.tensors, late.shapes, late.tasks, strict=True):
        leaf.data = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
        flat.append(leaf.data.view(-1))
        missing[task] += flat[-1].numel()
    group.transport.about_to_wait()
    with group.streams.opened(key, late.chunks, late.seconds) as arriving:
        if group.has_gone(key):
            raise group.membership.loss_of(key[0])

        def wait_for(task: int) -> None:
            while missing[task]:
                for number, start, values in next(arriving):
                    flat[number][start : start + len(values)].copy_(values)
                    missing[late.tasks[number]] -= len(values)

        yield wait_for
