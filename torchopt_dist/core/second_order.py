"""Gradients with a graph → the same, through which a backward pass raises where it would be wrong, and says why.

An autograd function whose backward is marked ``@once_differentiable`` refuses to be differentiated twice, by a node
that raises when a backward pass comes to it. A gradient of given inputs, ``torch.autograd.grad(loss, inputs)``, does
not come to it, since no input is behind: it leaves that part out without a word, and so does every backward pass where
the gradient that the function was given is a constant. Here the refusal is where the inputs are. An operation of torch
that has no second derivative raises by itself, and says here what to write instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist.core.graphs import edge_of, edges_behind
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.torch_private import is_refusal, once_differentiable_name

__all__ = [
    "explain",
    "guarded",
    "lacks",
    "nodes_of",
    "refusal",
    "refuse_left_out",
    "why_not_twice",
    "with_refusal",
]

_MARKED = "trying to differentiate twice a function that was marked with @once_differentiable"
_BY_OPERATIONS = (
    ": a part of the gradient would be missing. Write its backward with operations of torch and without the mark, or "
    "the function itself"
)
_FIRST_ORDER = (
    "; or ask for no second order, by `first_order=True` of a MetaOptimizer's step, or by an adjoint that needs none, "
    "such as todist.FirstOrder() or todist.FiniteDifference()"
)
_LACKING = {
    "ScaledDotProduct": (
        "the kernels of F.scaled_dot_product_attention have no second derivative: give the step a function, "
        "`optimizer.step(lambda: loss)`, which computes the attention by its formula; or compute the loss inside of "
        "`torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)`"
    ),
    "CdistBackward": (
        "torch.cdist has no second derivative: write "
        "`torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, dim=-1)`"
    ),
    "PdistBackward": (
        "F.pdist has no second derivative: write `torch.linalg.vector_norm(x[i] - x[j], p, dim=-1)`, where "
        "`i, j = torch.triu_indices(len(x), len(x), 1)`"
    ),
    "HardsigmoidBackward": "F.hardsigmoid has no second derivative: write `(x / 6 + 0.5).clamp(0, 1)`",
    "EmbeddingBagBackward": (
        "F.embedding_bag has no second derivative for `per_sample_weights`: write "
        "`(F.embedding(input, weight) * per_sample_weights.unsqueeze(-1)).sum(-2)`"
    ),
    "CompiledFunctionBackward": (
        "what `torch.compile` has compiled has no second derivative: give the module or function as it is, and "
        "`compile=True` to todist.inner_loop or todist.parallelize, which compile steps with their derivatives"
    ),
    "CtcLossBackward": "F.ctc_loss has no second derivative, and no other function of torch computes it",
    "MultiMarginLossBackward": (
        "F.multi_margin_loss has no second derivative: write "
        "`(margin - x.gather(1, y[:, None]) + x).clamp(min=0).pow(p).scatter(1, y[:, None], 0).mean()`"
    ),
    "MultilabelMarginLossBackward": (
        "F.multilabel_margin_loss has no second derivative: write the mean of `(1 - x[j] + x[i]).clamp(min=0)` over "
        "each class `j` that is a target and each class `i` that is not"
    ),
    "SegmentReduceBackward": (
        "torch.segment_reduce has no second derivative: write `torch.zeros(...).index_add(0, segments, x)`"
    ),
}
"""What the names of an operation's nodes begin with → what to write instead.

Of torch's own list of operations, ``op_db`` of ``torch.testing``, these raise (2.13). Some can be differentiated twice
with other arguments, so what to write is said only where torch raises.
"""
_SILENT = {
    "GeneratedBackwardFor_torch_nn__linear_cross_entropy": (
        "F.linear_cross_entropy in chunks has no second derivative: write "
        "`F.cross_entropy(F.linear(x, weight), target)`"
    ),
}
"""The same, of the operation that does not raise, and whose second derivative is wrong."""
_RAISING = frozenset(
    ("NotImplemented", "CdistBackwardBackward0", "CompiledFunctionBackwardBackward", "PdistBackwardBackward0")
)
"""The nodes of gradients that raise whenever a backward pass comes to them."""


@lru_cache(maxsize=1024)
def refusal(kind: type) -> str | None:
    """Why what has gone through nodes of a class must not be differentiated twice, if it must not."""
    name = once_differentiable_name(kind)
    if name is not None:
        return f"{_MARKED}, `{name}`{_BY_OPERATIONS}"
    return next((text for start, text in _SILENT.items() if kind.__name__.startswith(start)), None)


def lacks(kind: str) -> str | None:
    """What to write instead of the operation whose nodes are called so, if torch has no second derivative of it."""
    return next((text for start, text in _LACKING.items() if kind.startswith(start)), None)


def explain(nodes: Iterable[Any], texts: Iterable[str]) -> None:
    """Let nodes that raise, whenever a backward pass comes to them, say what to write instead.

    Args:
        nodes: those of gradients.
        texts: what :func:`lacks` says of the nodes of the loss.
    """
    text = f"{'; '.join(texts)}{_FIRST_ORDER}"

    def raising(bars: tuple[OptionalTensor, ...]) -> None:
        raise RuntimeError(text)

    for node in nodes:
        if type(node).__name__ in _RAISING:
            node.register_prehook(raising)


def guarded(
    grads: Sequence[OptionalTensor], inputs: Sequence[Tensor], nodes: Sequence[Any]
) -> list[OptionalTensor]:
    """The gradients of a loss with regard to inputs → the same, whose own derivative is refused where it must be.

    Args:
        grads: the gradients, one an input; ``None`` for one that is not used.
        inputs: the inputs.
        nodes: those of the loss's graph.
    """
    refusing = _refusing(nodes)
    if not refusing:
        return list(grads)
    following = [edge for node in refusing for edge in node.next_functions if edge[0] is not None]
    behind = {edge for edge, _ in edges_behind(following)}
    leaves = [leaf for node in nodes if isinstance(leaf := getattr(node, "variable", None), Tensor)]
    known = {id(leaf) for leaf in leaves}
    leaves += [x for x in inputs if x.requires_grad and id(x) not in known]
    some = [grad if edge_of(x) in behind else None for grad, x in zip(grads, inputs, strict=True)]
    made = with_refusal(some, leaves, _text_of(refusing))
    return [grad if one is None else one for one, grad in zip(made, grads, strict=True)]


def why_not_twice(outputs: Iterable[Tensor]) -> str | None:
    """Why gradients of outputs must not be differentiated, if they must not; of each output the innermost graph."""
    refusing = _refusing(nodes_of(outputs))
    return _text_of(refusing) if refusing else None


def with_refusal(
    grads: Sequence[OptionalTensor], leaves: Sequence[Tensor], text: str
) -> list[OptionalTensor]:
    """Gradients → the same, through which a backward pass raises a text if it is to come to one of the leaves."""
    return [None if grad is None else _Guarded.apply(text, grad, *leaves) for grad in grads]


def _refusing(nodes: Iterable[Any]) -> dict[Any, str]:
    """Those of nodes that must not be differentiated twice, and why."""
    nodes = list(nodes)
    kinds: dict[Any, str] = {kind: text for kind in {*map(type, nodes)} if (text := refusal(kind))}
    return {node: kinds[type(node)] for node in nodes if type(node) in kinds}


def _text_of(refusing: dict[Any, str]) -> str:
    return "; ".join(sorted(set(refusing.values())))


def refuse_left_out(outputs: Iterable[Tensor], inputs: Iterable[Tensor] = ()) -> list[Any]:
    """Raise where a gradient of given inputs would leave out what a backward pass to all leaves refuses.

    Args:
        outputs: the tensors to differentiate. Gradients that :func:`guarded` has returned refuse by themselves, for
            those inputs of which something would be missing.
        inputs: tensors beyond which the graph is not searched.

    Returns:
        The nodes of their graph, up to such gradients.

    Raises:
        RuntimeError: they depend on a gradient that must not be differentiated.
    """
    nodes = nodes_of(outputs, inputs)
    if any(map(is_refusal, {*map(type, nodes)})):
        raise RuntimeError(f"{_MARKED}{_BY_OPERATIONS}{_FIRST_ORDER}")
    return nodes


def nodes_of(
    outputs: Iterable[Tensor], inputs: Iterable[Tensor] = (), *, most: float = math.inf, whole: bool = False
) -> list[Any]:
    """The nodes of the graph of outputs, up to inputs.

    Args:
        outputs: tensors.
        inputs: likewise.
        most: after about so many nodes the search ends.
        whole: whether it goes on behind gradients that refuse by themselves.
    """
    seen: set[Any] = {None, *[x.grad_fn for x in inputs]}
    ends = dict.fromkeys(
        [output.grad_fn for output in outputs]
    )  # each once: one may have made all parameters
    found: list[Any] = [node for node in ends if node not in seen]
    seen.update(found)
    for node in found:  # which grows
        if len(found) >= most:
            break
        if not whole and type(node).__name__ == _GUARD:
            continue
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                found.append(following)
    return found


class _Guarded(torch.autograd.Function):
    """A gradient → the same. The leaves connect it to all on which it may depend."""

    apply: ClassVar[Any]
    generate_vmap_rule = True

    @staticmethod
    def forward(text: str, grad: Tensor, *leaves: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.text, ctx.count = inputs[0], len(inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, bar: OptionalTensor) -> tuple[OptionalTensor, ...]:
        if bar is None:
            return (None,) * ctx.count
        raise RuntimeError(f"{ctx.text}{_FIRST_ORDER}")


_GUARD = "_GuardedBackward"
"""How torch calls the class of its nodes."""
