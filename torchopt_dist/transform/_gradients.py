"""A loss, tensors → its gradients with respect to them, ``None`` where there is none, with a graph or without.

Through a graph of theirs a backward pass is right, or says why it cannot be.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

from torch import Tensor

from torchopt_dist import torch_private
from torchopt_dist.core.second_order import explain, guarded, lacks, nodes_of, refusal, refuse_left_out
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.vmap import values_of
from torchopt_dist.formulas.normalization_nodes import is_mended, is_normalization, mend
from torchopt_dist.ops._columns import PLAIN
from torchopt_dist.torch_private import ends_gradients_graph, grad_of_loss, is_refusal, vmaps

__all__ = ["gradients", "gradients_missing", "mend_recorded", "recorded_gradients", "update_by_own"]


_NODES = 20_000
"""So many nodes of a graph are looked at, at most."""


def recorded_gradients(
    loss: Tensor, leaves: Sequence[Tensor], *, retain_graph: bool | None = None
) -> tuple[OptionalTensor, ...]:
    """As ``torch.autograd.grad`` with ``create_graph=True`` and ``allow_unused=True``.

    Args:
        loss: a tensor of one element.
        leaves: the tensors to differentiate with respect to; the graph behind them is not searched for kernels.
        retain_graph: as torch's.

    Returns:
        The gradients, through which a backward pass raises ``RuntimeError`` where the loss has no second derivative.

    Raises:
        RuntimeError: the loss has a gradient in it of which a part would be left out.
        ValueError: the graph of the gradients would end in ``DTensor.from_local``.
    """
    first = nodes = _nodes([loss], leaves)
    kinds = {*map(type, nodes)}
    mends, lacking, redistributes = _are_special(frozenset([kind.__name__ for kind in kinds]))
    refuses = any(map(refusal, kinds))
    if any(map(is_refusal, kinds)):  # the loss has a gradient in it, a part of whose own would be missing
        refuse_left_out([loss], leaves)
    if not (mends or lacking or redistributes or refuses):
        del first, nodes  # sooner while they are in the cache
        return grad_of_loss(loss, leaves, create_graph=True, retain_graph=retain_graph)
    if mends:  # the loss may have a gradient in it
        mend(nodes)
    with _refusing(nodes) if redistributes else nullcontext():
        found = grad_of_loss(loss, leaves, create_graph=True, retain_graph=retain_graph)
    if mends or lacking:
        nodes = _nodes([grad for grad in found if grad is not None], leaves)
        mend(nodes)
        if lacking:
            explain(nodes, lacking)
    return tuple(guarded(found, leaves, first)) if refuses else found


@lru_cache(maxsize=1024)
def _are_special(kinds: frozenset[str]) -> tuple[bool, list[str], bool]:
    """Whether a graph of these nodes is to be mended; what to write instead of some; whether some end a graph."""
    return (
        any(map(is_mended, kinds)),
        sorted({text for kind in kinds if (text := lacks(kind))}),
        "_FromTorchTensorBackward" in kinds,
    )


def mend_recorded(grads: Sequence[Any], begins: Sequence[Any]) -> None:
    """As :func:`recorded_gradients` does it, for gradients that ``torch.func.grad``, for example, has taken.

    Inside ``vmap`` these gradients may depend on means and variances that torch takes for constants, and no hook can
    connect them again; a warning says so.

    Args:
        grads: the gradients; those without a graph cost nothing.
        begins: the tensors that they were taken with respect to.
    """
    if getattr(_own, "step", False):
        return
    levels = vmaps()
    ends, begun = (
        [values_of(x, levels).values for x in tensors if isinstance(x, Tensor)] for tensors in (grads, begins)
    )
    if all(x.grad_fn is None for x in ends):
        return
    nodes = _nodes(ends, begun)
    mend(nodes)
    if levels and any(is_normalization(kind.__name__) for kind in {*map(type, nodes)}):
        warnings.warn(
            "inside `vmap`, torch takes mean and variance of `layer_norm` and `batch_norm`, and the norms of "
            "`weight_norm`, for constants in gradients by `torch.func.grad`, so what is behind this step of an "
            "optimizer may have a wrong derivative: take the steps by `todist.inner_loop` or a MetaOptimizer inside "
            "`vmap`, or normalize by `group_norm` or `rms_norm`",
            stacklevel=2,
        )


@contextmanager
def _refusing(nodes: Sequence[Any]) -> Iterator[None]:
    """A context in which a gradient must not go through a node that drops its graph without an error."""

    def look(node: Any, gradients: tuple[Any, ...]) -> None:
        if ends_gradients_graph(node, gradients):
            raise ValueError(
                "a gradient must not be redistributed by `DTensor.from_local` where it is differentiated again: torch "
                "drops its second derivative there without an error, as where a plain layer precedes one that "
                "`parallelize_module` has split. Make all parameters and inputs DTensors, with "
                "`use_local_output=False`, or split the layers by hand, as on the page on one loop on many workers"
            )

    hooks = [
        node.register_prehook(partial(look, node))
        for node in nodes
        if type(node).__name__ == "_FromTorchTensorBackward"
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


_own = threading.local()
"""Whether this thread makes a step by gradients that :func:`recorded_gradients` has taken."""


def update_by_own(impl: Any, grads: Any, state: Any, *, params: Any, inplace: bool) -> tuple[Any, Any]:
    """``impl.update`` of gradients that :func:`recorded_gradients` has taken, which are right as they are."""
    outer = getattr(_own, "step", False)
    _own.step = True
    try:
        made: tuple[Any, Any] = impl.update(grads, state, params=params, inplace=inplace)
        return made
    finally:
        _own.step = outer


def _nodes(ends: Sequence[Tensor], begins: Sequence[Tensor]) -> list[Any]:
    """The nodes of the graph between tensors."""
    return nodes_of(ends, begins, most=_NODES, whole=True)


def gradients(
    loss: Tensor, leaves: Sequence[Any], *, create_graph: bool, retain_graph: bool | None = None
) -> list[OptionalTensor]:
    """Differentiate a loss; inside ``vmap``, each sample's loss with respect to the sample's own tensors.

    Args:
        loss: a tensor of one element.
        leaves: tensors; those that are ``None`` or do not require grad (frozen) get ``None``.
        create_graph: record the gradients, so that they can be differentiated.
        retain_graph: keep the loss's graph; as ``create_graph``, if not given.

    Returns:
        A gradient a leaf; ``None`` for a frozen leaf or one that the loss does not depend on.

    Raises:
        TypeError: ``loss`` or a leaf is not a tensor.
        ValueError: ``loss`` has more than one element, or depends on none of the leaves; inside ``vmap``, it
            differs between samples and depends on a leaf that does not.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"`loss` must be a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"`loss` must have one element, got shape {tuple(loss.shape)}")
    if not PLAIN.issuperset(map(type, leaves)):
        for leaf in leaves:
            if leaf is not None and not isinstance(leaf, Tensor):
                raise TypeError(f"parameters must be tensors, got {type(leaf).__name__}")
    if not torch_private.transforms_are_active():
        return _outside_of_transforms(loss, leaves, create_graph, retain_graph)
    levels = torch_private.vmaps()
    held = [None if leaf is None else values_of(leaf, levels) for leaf in leaves]
    wanted = {place: one for place, one in enumerate(held) if one is not None and one.values.requires_grad}
    of_loss = values_of(loss, levels)
    found: Sequence[OptionalTensor] = ()
    if of_loss.values.requires_grad and wanted:
        found = _differentiated(
            of_loss.values.sum() if of_loss.dims else loss,
            [one.values for one in wanted.values()],
            create_graph,
            retain_graph,
        )
    if all(grad is None for grad in found):
        raise gradients_missing(len(leaves), len(wanted))
    out: list[OptionalTensor] = [None] * len(leaves)
    for (place, one), grad in zip(wanted.items(), found, strict=True):
        if grad is None:
            continue
        if not one.differ_where(of_loss):
            raise ValueError(
                "`loss` must depend on parameters that each sample of `vmap` has for itself, and one of these is the "
                "same for all: make the MetaOptimizer inside the function that `vmap` maps, and the loss after it, or "
                "map over the parameters, too"
            )
        out[place] = one.tensor(grad)
    return out


def _outside_of_transforms(
    loss: Tensor, leaves: Sequence[OptionalTensor], create_graph: bool, retain_graph: bool | None
) -> list[OptionalTensor]:
    own = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found: Sequence[OptionalTensor] = ()
    if loss.requires_grad and own:
        found = _differentiated(loss, own, create_graph, retain_graph)
    if all(grad is None for grad in found):
        raise gradients_missing(len(leaves), len(own))
    if len(own) == len(leaves):
        return list(found)
    rest = iter(found)
    return [next(rest) if leaf is not None and leaf.requires_grad else None for leaf in leaves]


def _differentiated(
    loss: Tensor, leaves: Sequence[Tensor], create_graph: bool, retain_graph: bool | None
) -> tuple[OptionalTensor, ...]:
    if create_graph:
        return recorded_gradients(loss, leaves, retain_graph=retain_graph)
    return torch_private.grad_of_loss(loss, leaves, retain_graph=retain_graph)


def gradients_missing(count: int, wanted: int) -> ValueError:
    """The error for a loss that depends on none of ``count`` parameters, of which ``wanted`` require grad."""
    text = (
        "`loss` must depend on the parameters as they are now (was it computed before the last step? by another "
        "module? under torch.no_grad? a MetaOptimizer's step takes a function, `optimizer.step(lambda: loss)`, and "
        f"calls it with gradients enabled); of {count} parameters, {wanted} require grad, and it depends on none of "
        "these"
    )
    if torch_private.transforms_are_active():
        text += (
            "; inside `vmap`, make the MetaOptimizer inside the function that is mapped, and the loss after it; "
            "inside `torch.func.grad`, give gradients to the `update` of a transformation"
        )
    return ValueError(text)
