"""The caller's own share: ``Payload`` → a function that computes its values here, as a worker would.

The share is a call like any other, with its two nodes in the caller's graph. But the message stays in this process: the
function works on rebuilt objects whose tensors are leaves, and whose large tensors lie in the caller's own memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import optree
from torch import Tensor, nn

from torchopt_dist.core.inputs import Seen, hold_grad_accumulators
from torchopt_dist.core.reached import name_of
from torchopt_dist.distributed.calls.graph import RemoteGraph
from torchopt_dist.distributed.calls.local import Here
from torchopt_dist.distributed.calls.siblings import Siblings
from torchopt_dist.distributed.messages.payload import Payload
from torchopt_dist.distributed.serialization.pickling import PackedModules
from torchopt_dist.distributed.serialization.wire import SMALL
from torchopt_dist.distributed.worker import execute
from torchopt_dist.distributed.worker.device import placed, receiving_device
from torchopt_dist.errors import SerializationError

__all__ = ["prepare"]


def prepare(
    siblings: Siblings, payload: Payload, modules: PackedModules, *, snapshot: bool
) -> Callable[[], list[Any]]:
    """Make the caller's own share ready, in the caller's thread; returns a function that runs it in any thread.

    With ``snapshot`` all tensors are copied, so that they may be changed in place as soon as this returns; a share that
    is not isolated copies none. Raises :class:`SerializationError` if it is isolated and its objects cannot be rebuilt.
    """
    if not payload.options.isolate_own_share:
        return _plain(siblings, payload, in_a_thread=snapshot)
    group = siblings.group
    here = Here(receiving_device(payload.options.device), group)
    graph = RemoteGraph(siblings, group.rank, here, own=True)
    try:
        message = graph.packed(payload, modules)
    except SerializationError as error:
        error.add_note(
            "the caller's own share works on rebuilt objects, as the other workers' do; "
            "isolate_own_share=False lets it work on the caller's own"
        )
        raise
    anchor = graph.connect(message, keep=siblings.keep) if message.tensors else None
    sent = message.detached()
    shared: list[Tensor] = []
    for number, tensor in enumerate(message.tensors):
        if snapshot or number in message.buffers or tensor.nbytes <= SMALL:
            sent.tensors[number] = sent.tensors[number].clone()
        else:
            shared.append(tensor)
    seen = Seen(shared)

    def work() -> list[Any]:
        reply = here.send(graph.worker, sent, 0).result()
        # What a call returns is the caller's own, and not the memory of its arguments, of a `put` value or of a global.
        values = graph.collect(anchor, reply.with_tensors([tensor.clone() for tensor in reply.tensors]))
        changed = seen.changed()
        if changed:
            _warn_of_changes(payload, [seen.tensors[index] for index in changed])
        return values

    return work


def _plain(siblings: Siblings, payload: Payload, *, in_a_thread: bool) -> Callable[[], list[Any]]:
    """The same for a share that works on the caller's own objects."""
    held = hold_grad_accumulators(payload.tensors()) if in_a_thread else []

    def work() -> list[Any]:
        try:
            with siblings.group.recorder.span("run"):
                values, seconds, drew = execute.run(placed(payload))
            siblings.drew |= drew
            if siblings.took is not None:
                siblings.took(siblings.group.rank, seconds)
            return values
        finally:
            held.clear()

    return work


def _warn_of_changes(payload: Payload, changed: list[Tensor]) -> None:
    listed = ", ".join(_described(payload, tensor) for tensor in changed)
    warnings.warn(
        f"`{name_of(payload.function)}` has changed in place what it was given: {listed}. Tensors of more than "
        f"{SMALL >> 10} KiB are not copied for the caller's own share, so the caller's is changed, and other "
        "workers may have been sent it half changed: let the function work on a clone",
        stacklevel=2,
    )


def _described(payload: Payload, tensor: Tensor) -> str:
    """The place of a tensor among the arguments, and its shape."""
    given: Any = payload.tasks
    shape = f"of shape {tuple(tensor.shape)}"
    for accessor, leaf in zip(*optree.tree_flatten_with_accessor(given)[:2], strict=True):
        if leaf is tensor:
            return f"{accessor.codify('tasks')} {shape}"
        if isinstance(leaf, nn.Module):
            for name, parameter in leaf.named_parameters():
                if parameter is tensor:
                    return f"{name} of {accessor.codify('tasks')} {shape}"
    return f"a tensor {shape}"
