"""Losses of remote calls → gradients, by ``torch.distributed.autograd`` inside an explicit context.

Example::

    with todist.autograd.context() as context_id:
        loss = parallel_loss(model, batch)
        todist.autograd.backward(context_id, loss)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor

from torchopt_dist.core.types import OptionalTensor, TensorOrTensors
from torchopt_dist.distributed.calls.nodes import errors_of_nodes
from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.errors import NotInitializedError
from torchopt_dist.torch_private import init_distributed_autograd, tensor_version

if TYPE_CHECKING or dist_autograd.is_available():
    from torch.distributed.autograd import DistAutogradContext
else:

    class DistAutogradContext:
        """Stands in where torch is built without distributed autograd; nothing is one."""


__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "grad", "is_available"]


def is_available() -> bool:
    """Whether this build of torch has distributed autograd."""
    return bool(dist_autograd.is_available())


class context(dist_autograd.context):  # noqa: N801 - used as `with todist.autograd.context()`, as in torch
    """Context manager: remote calls inside it are recorded for ``backward`` and ``grad``; gives the context's id.

    A context must not be used by several threads.

    Raises:
        NotInitializedError: there is no RPC group, or no distributed autograd in this build of torch.
    """

    def __enter__(self) -> int:
        """Open the context."""
        _check_available()
        init_distributed_autograd(current_group().rank)
        return int(super().__enter__())


def get_gradients(autograd_ctx_id: int) -> dict[Tensor, Tensor]:
    """The gradients that the last ``backward`` or ``grad`` in the context left, by leaf tensor."""
    _check_available()
    return dist_autograd.get_gradients(autograd_ctx_id)


def backward(
    autograd_ctx_id: int,
    tensors: TensorOrTensors,
    retain_graph: bool = False,
    inputs: TensorOrTensors | None = None,
) -> None:
    """Differentiate the sum of ``tensors`` and add the gradients to the leaves' ``.grad``.

    Args:
        autograd_ctx_id: the context's id.
        tensors: one or more tensors of one element each.
        retain_graph: whether the graph can be differentiated again.
        inputs: the leaf tensors whose ``.grad`` is written; ``None`` means all that the graph reaches.

    Raises:
        RuntimeError: the context is gone, or a tensor has no graph; or an operation of this process's own raised an
            error, of which torch keeps the text alone. That of a call is raised as it is.
        ValueError: a tensor has more than one element, or an input is no leaf.
    """
    gradients = _differentiate(autograd_ctx_id, _tensors("tensors", tensors), retain_graph)
    leaves = list(gradients) if inputs is None else _leaves(inputs)
    for leaf in leaves:
        gradient = gradients.get(leaf)
        if gradient is not None:
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def grad(
    autograd_ctx_id: int,
    outputs: TensorOrTensors,
    inputs: TensorOrTensors,
    retain_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[OptionalTensor, ...]:
    """The gradients of the sum of ``outputs`` with respect to ``inputs``; ``.grad`` is left alone.

    Args:
        autograd_ctx_id: the context's id.
        outputs: one or more tensors of one element each.
        inputs: leaf tensors.
        retain_graph: whether the graph can be differentiated again.
        allow_unused: whether an input that ``outputs`` do not depend on gets ``None`` instead of an error.

    Returns:
        A gradient for each input, of its shape.

    Raises:
        RuntimeError: the context is gone, an output has no graph, or an input is unused; or an operation of this
            process's own raised an error, as for :func:`backward`.
        ValueError: an output has more than one element, or an input is no leaf.
    """
    leaves = _leaves(inputs)
    gradients = _differentiate(autograd_ctx_id, _tensors("outputs", outputs), retain_graph)
    unused = [index for index, leaf in enumerate(leaves) if leaf not in gradients]
    if unused and not allow_unused:
        raise RuntimeError(
            f"inputs {unused} are not used by the outputs; allow_unused=True gives None for them"
        )
    return tuple(gradients.get(leaf) for leaf in leaves)


def _differentiate(context_id: int, roots: list[Tensor], retain_graph: bool) -> dict[Tensor, Tensor]:
    """The gradients of this backward alone.

    A context adds up the gradients of all its backwards, in place. So the gradients of earlier ones are set to zero
    first: the sum is then that of this backward, and the version of a leaf's gradient shows whether the leaf took part.
    """
    _check_available()
    try:
        there = get_gradients(context_id)
    except RuntimeError:
        raise RuntimeError(
            f"there is no autograd context {context_id}: it has been left, or there never was one"
        ) from None
    for index, root in enumerate(roots):
        if root.numel() != 1:
            raise ValueError(
                f"only tensors of one element can be differentiated, got shape {tuple(root.shape)} for number {index}"
            )
        if not root.requires_grad:
            raise RuntimeError(f"tensor {index} does not require grad and has no graph")
    before = {}
    with torch.no_grad():
        for leaf, gradient in there.items():
            before[leaf] = (gradient.data_ptr(), tensor_version(gradient.zero_()))
    with errors_of_nodes(roots) as raised:
        try:
            dist_autograd.backward(context_id, roots, retain_graph=retain_graph)
        except RuntimeError:
            if raised:
                raise raised[0] from None
            raise
        finally:
            raised = []  # which refers to frames, and these to the graph
    return {
        leaf: gradient.clone()
        for leaf, gradient in get_gradients(context_id).items()
        if tensor_version(gradient) is None
        or before.get(leaf) != (gradient.data_ptr(), tensor_version(gradient))
    }


def _check_available() -> None:
    if not dist_autograd.is_available():
        raise NotInitializedError(
            "`todist.autograd` needs torch's distributed autograd, which this build of torch does not have: call "
            "`loss.backward()` or `torch.autograd.grad` without a context, as over every transport"
        )


def _tensors(argument: str, tensors: TensorOrTensors) -> list[Tensor]:
    found = [tensors] if isinstance(tensors, Tensor) else list(cast("Iterable[Tensor]", tensors))
    if not found:
        raise ValueError(f"{argument} must hold at least one tensor, got none")
    for tensor in found:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{argument} must be tensors, got {type(tensor).__name__}")
    return found


def _leaves(inputs: TensorOrTensors) -> list[Tensor]:
    leaves = _tensors("inputs", inputs)
    for index, leaf in enumerate(leaves):
        if not leaf.is_leaf or not leaf.requires_grad:
            raise ValueError(
                f"inputs must be leaf tensors that require grad; number {index}, of shape {tuple(leaf.shape)}, is not"
            )
    return leaves
