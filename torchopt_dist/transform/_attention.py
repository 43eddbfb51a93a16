"""A loss with attention → one that has a second derivative, or an error in backward that says how to get one.

``F.scaled_dot_product_attention`` takes a fast kernel where it can, and these kernels have no second derivative. Its
formula, ``SDPBackend.MATH``, has all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchopt_dist.typing import OptionalTensor

__all__ = ["attention_by_formula", "explain"]

_KERNELS = "ScaledDotProduct"
"""What the names of the kernels' nodes begin with; the formula has none of its own."""
_NODES = 20_000
"""So many nodes of a graph are looked at, at most."""


class _Choice:
    """The number of threads that compute attention by its formula; torch's setting holds for the whole process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.chosen = ExitStack()


_choice = _Choice()


@contextmanager
def attention_by_formula() -> Iterator[None]:
    """A context in which ``F.scaled_dot_product_attention`` computes by its formula.

    Meanwhile this holds for other threads, too. The first thread to enter changes torch's setting, and the last one to
    leave restores it.
    """
    with _choice.lock:
        if _choice.count == 0:
            _choice.chosen.enter_context(sdpa_kernel(SDPBackend.MATH))
        _choice.count += 1
    try:
        yield
    finally:
        with _choice.lock:
            _choice.count -= 1
            if _choice.count == 0:
                _choice.chosen.close()


def explain(loss: Tensor, grads: Sequence[OptionalTensor], leaves: Sequence[Tensor]) -> None:
    """Let a backward through recorded gradients, of which attention's kernels are incapable, raise a clear error.

    Args:
        loss: the loss that was differentiated.
        grads: its gradients, with a graph.
        leaves: the tensors with respect to which it was differentiated; the graph behind them is not searched.
    """
    if any(kind.__name__.startswith(_KERNELS) for kind in {*map(type, _nodes([loss], leaves))}):
        for node in _nodes([grad for grad in grads if grad is not None], leaves):
            if node.name().endswith("NotImplemented"):
                node.register_prehook(_refuse)


def _refuse(grad_outputs: tuple[OptionalTensor, ...]) -> None:
    raise RuntimeError(
        "the kernels of F.scaled_dot_product_attention have no second derivative: give the step a function, "
        "`optimizer.step(lambda: loss)`, which computes the attention by its formula; or compute the loss inside of "
        "`torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)`; or ask for no second order by "
        "`optimizer.step(loss, first_order=True)`"
    )


def _nodes(ends: Sequence[Tensor], begins: Sequence[Tensor]) -> list[Any]:
    """The nodes of the graph between tensors."""
    seen: set[Any] = {None, *[tensor.grad_fn for tensor in begins]}
    found: list[Any] = []
    waiting: list[Any] = [tensor.grad_fn for tensor in ends]
    while waiting and len(found) < _NODES:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            found.append(node)
            waiting += [following for following, _ in node.next_functions if following not in seen]
    return found
