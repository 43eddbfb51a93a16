"""A graph with a reentrant checkpoint, gradients of its outputs → gradients of its leaves, by ``backward``.

``torch.utils.checkpoint(use_reentrant=True)`` computes again in a backward of its own, which adds to the ``.grad`` of
what the function uses besides its arguments. So torch refuses it in ``torch.autograd.grad`` and where a backward has
inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from torchopt_dist.distributed._caller_state import ThreadSettings

__all__ = ["gradients_by_backward", "has_reentrant_checkpoint"]


def has_reentrant_checkpoint(outputs: Sequence[Tensor]) -> bool:
    """Whether a checkpoint of that kind is in the graph of these tensors."""
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name() == "CheckpointFunctionBackward":
            return True
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    return False


def gradients_by_backward(
    outputs: Sequence[Tensor], output_grads: Sequence[Tensor], leaves: Sequence[Tensor], *, retain_graph: bool
) -> list[Tensor | None]:
    """The result of ``torch.autograd.grad(outputs, leaves, output_grads, allow_unused=True)``.

    The backward runs in a thread: within the backward that asks for the own share's gradients torch refuses the
    checkpoint, too, if that one has inputs. Leaves that the caller does not know of, such as a global model's
    parameters, get their gradients added to ``.grad``, as in any ``backward``.

    Args:
        outputs: tensors of the graph.
        output_grads: a gradient for each.
        leaves: no other thread may use their ``.grad`` meanwhile, which is afterwards what it was.
        retain_graph: whether the graph is kept for another backward.

    Raises:
        Exception: the exception of the backward.
    """
    settings = ThreadSettings.capture()
    before = [leaf.grad for leaf in leaves]
    errors: list[BaseException] = []

    def work() -> None:
        try:
            settings.apply()
            torch.autograd.backward(outputs, output_grads, retain_graph=retain_graph)
        except BaseException as error:
            errors.append(error)

    try:
        for leaf in leaves:
            leaf.grad = None
        thread = threading.Thread(target=work, name="todist-backward", daemon=True)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return [leaf.grad for leaf in leaves]
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad
