"""Nodes of a graph, torch's for normalization among them → the same, with higher derivatives that are right.

Torch (2.13) differentiates the backward of ``layer_norm``, ``batch_norm`` and ``instance_norm`` by a formula that takes
mean and variance for constants when it is differentiated itself, and that of ``weight_norm`` by one that takes the
norms for constants; other operations have no second derivative at special points (``special_points.py``). Where the
result of such a node gets a graph, or tangents, a hook replaces it by that of another formula, which is made of
differentiable operations. Otherwise the hook does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.vjp import pulled_back
from torchopt_dist.formulas.normalization import by_channel, projected, standardized
from torchopt_dist.formulas.special_points import FORMULAS, Formula
from torchopt_dist.formulas.weight_norm import weight_norm_backward
from torchopt_dist.torch_private import evaluating_node, forward_mode_is_active, transforms_are_active

__all__ = ["is_mended", "is_normalization", "mend"]


class _Kind(NamedTuple):
    """A node that is the derivative of a normalization's backward."""

    grad: str
    """What the gradient of the normalization's output is called."""
    places: tuple[int, int, int]
    """Which of the node's gradients are those of that gradient, of the input and of the weight."""
    eps: str | None
    """What the number that is added to the variance is called, if the node has it."""


_KINDS = {
    "NativeLayerNormBackwardBackward0": _Kind("_saved_grad_out", (0, 1, 4), None),
    "NativeBatchNormBackwardBackward0": _Kind("_saved_grad_out", (0, 1, 2), "_saved_eps"),
    "CudnnBatchNormBackwardBackward0": _Kind("_saved_grad_output", (1, 0, 2), "_saved_epsilon"),
    "MiopenBatchNormBackwardBackward0": _Kind("_saved_grad_output", (1, 0, 2), "_saved_epsilon"),
}
_HOOK = "torchopt_dist.normalization"
"""The key in a node's own dictionary that says that it has the hook."""
_NORMALIZATIONS = (*[name.removesuffix("BackwardBackward0") for name in _KINDS], "WeightNormInterface")


def is_normalization(kind: str) -> bool:
    """Whether a node's class of this name is that of such a normalization, or of a derivative."""
    return kind.startswith(_NORMALIZATIONS)


def is_mended(kind: str) -> bool:
    """Whether a graph with nodes of a class of this name has such that :func:`mend` changes, or will have."""
    return kind in _BY_FORMULA or is_normalization(kind)


def mend(nodes: Iterable[Any]) -> None:
    """Let those nodes whose results cannot be differentiated by torch have right ones.

    Args:
        nodes: of a graph through which a backward pass may go that is itself differentiated.
    """
    for node in nodes:
        name = node.name()
        if (name in _KINDS or name in _BY_FORMULA) and not node.metadata.get(_HOOK):
            node.metadata[_HOOK] = True
            node.register_hook(_mended if name in _KINDS else _by_formula)


def _mended(
    grad_inputs: tuple[OptionalTensor, ...], grad_outputs: tuple[OptionalTensor, ...]
) -> tuple[OptionalTensor, ...] | None:
    node = evaluating_node()
    used = torch.is_grad_enabled() or forward_mode_is_active()
    if node is None or not used or not getattr(node, "_saved_train", True):
        return None
    kind = _KINDS[node.name()]
    saved = [getattr(node, name, None) for name in (kind.grad, "_saved_input", "_saved_weight")]
    if saved[0] is None or saved[1] is None:  # another version of torch has other names
        return None
    # Aliases, so that none of them depends on another one.
    with torch.enable_grad():
        grad, x, weight = map(_alias, saved)
        assert grad is not None
        assert x is not None
        made, given = _backward(node, kind, grad, x, weight), [grad, x, weight]
    wanted = [x for x in given if x is not None and x.requires_grad]
    found = pulled_back(made, grad_outputs, wanted, create_graph=torch.is_grad_enabled())
    rest = dict(zip(map(id, wanted), found, strict=True))
    changed = list(grad_inputs)
    for place, x in zip(kind.places, given, strict=True):
        if grad_inputs[place] is not None:
            changed[place] = rest.get(id(x))
    return tuple(changed)


def _by_formula(
    grad_inputs: tuple[OptionalTensor, ...], grad_outputs: tuple[OptionalTensor, ...]
) -> tuple[OptionalTensor, ...] | None:
    node = evaluating_node()
    if node is None or not (torch.is_grad_enabled() or forward_mode_is_active()):
        return None
    try:
        made = _BY_FORMULA[node.name()](node, grad_outputs, [old is not None for old in grad_inputs])
    except AttributeError:  # another version of torch has other names for what is saved
        return None
    if made is None:
        return None
    return tuple(
        old if old is None or new is None else new.sum_to_size(old.shape).to(old.dtype)
        for old, new in zip(grad_inputs, made, strict=True)
    )


def _weight_norm(
    node: Any, bars: Sequence[OptionalTensor], wanted: Sequence[bool]
) -> Sequence[OptionalTensor] | None:
    last = node._saved_v.ndim - 1  # torch saves a dimension counted from the end as a large number
    dim = min(node._saved_dim, last)
    return None if bars[0] is None else weight_norm_backward(bars[0], node._saved_v, node._saved_g, dim)


_BY_FORMULA: dict[str, Formula] = {**FORMULAS, "WeightNormInterfaceBackward0": _weight_norm}
"""By the names of nodes."""


def _alias(x: OptionalTensor) -> OptionalTensor:
    if x is None or x.requires_grad:
        return None if x is None else x.view_as(x)
    return x.detach() if transforms_are_active() else x.detach().requires_grad_()


def _backward(
    node: Any, kind: _Kind, grad: Tensor, x: Tensor, weight: OptionalTensor
) -> tuple[Tensor, OptionalTensor, Tensor]:
    """The gradients of a normalization: of its input, weight and bias."""
    if kind.eps is None:
        dims = tuple(range(-len(node._saved_normalized_shape), 0))
        others = tuple(range(x.ndim - len(dims)))
        shape: Any = node._saved_normalized_shape
        beside = weight
        variance = x.detach().var(dims, correction=0, keepdim=True)
        eps = node._saved_rstd.detach().pow(-2).reshape(variance.shape) - variance
    else:
        others = dims = (0, *range(2, x.ndim))
        shape = (x.shape[1],)
        beside = by_channel(weight, x.ndim)
        eps = getattr(node, kind.eps)
    normalized, scale = standardized(x, dims, eps)
    of_x = projected(grad if beside is None else grad * beside, normalized, dims) * scale
    of_weight = None if weight is None else _summed(grad * normalized, others).reshape(shape)
    return of_x, of_weight, _summed(grad, others).reshape(shape)


def _summed(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Over these dimensions; torch takes none of them for all."""
    return x.sum(dims) if dims else x
