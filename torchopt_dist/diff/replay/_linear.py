"""Linear layers of a loss → nodes whose gradients of weights are added to what is there.

In a graph of a graph, torch makes a tensor of a weight's size for each time that the weight is used, and for each sum
of two; and the gradient itself, also where only its derivative is asked for. Here the sums are made by the products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchopt_dist._torch_private import saved_tensors_are_packed
from torchopt_dist.typing import OptionalTensor

__all__ = ["LinearLayers"]


class LinearLayers(TorchFunctionMode):
    """A context in which ``torch.nn.functional.linear`` with one of these weights is such a node.

    Args:
        weights: leaves of a graph.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self._weights = {id(weight): weight for weight in weights}
        self._totals: dict[int, Tensor] = {}
        self._products: list[tuple[Tensor, Tensor, Tensor]] = []
        self.without_values = False
        """The gradients of weights that are found now are only differentiated: no number of theirs is used."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and len(args) in (2, 3) and self._takes(*args):
            return _Linear.apply(self, *args, *[None] * (3 - len(args)))
        return func(*args, **(kwargs or {}))

    def _takes(self, x: Any, weight: Any, bias: Any = None) -> bool:
        return (
            id(weight) in self._weights
            and type(x) is Tensor
            and x.dtype == weight.dtype
            and x.layout == torch.strided
            and (bias is None or isinstance(bias, Tensor))
            and not torch.is_autocast_enabled(x.device.type)
            and not saved_tensors_are_packed()  # by a checkpoint, say, which calls the function again without this mode
        )

    @contextmanager
    def added(self, totals: Mapping[int, Tensor]) -> Iterator[None]:
        """A context that adds gradients of weights to these, by the weights' ``id``, at its end; not after an error."""
        self._totals, self._products = dict(totals), []
        try:
            yield
            for total, of_result, x in self._products:
                total.addmm_(of_result.t(), x)
        finally:
            self._totals, self._products = {}, []

    def gradient(self, weight: Tensor, of_result: Tensor, x: Tensor) -> OptionalTensor:
        """The product of two matrices as the gradient of a weight; ``None`` if it is added elsewhere."""
        total = None if torch.is_grad_enabled() else self._totals.get(id(weight))
        if total is None:
            return of_result.t() @ x
        self._products.append((total, of_result, x))
        return None


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias``."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(ctx: Any, layers: LinearLayers, x: Tensor, weight: Tensor, bias: OptionalTensor) -> Tensor:
        ctx.layers, ctx.has_bias = layers, bias is not None
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, of_result: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        given = of_result.reshape(-1, of_result.shape[-1])
        to_bias = given.sum(0) if ctx.has_bias and ctx.needs_input_grad[3] else None
        to_x = to_weight = None
        if not torch.is_grad_enabled():
            if ctx.needs_input_grad[1]:
                to_x = of_result @ weight
            if ctx.needs_input_grad[2]:
                to_weight = ctx.layers.gradient(weight, given, x.reshape(-1, x.shape[-1]))
        elif ctx.needs_input_grad[1]:
            to_x, to_weight = _Products.apply(ctx.layers, of_result, x, weight)
        else:
            (to_weight,) = _Products.apply(ctx.layers, of_result, x, weight)
        return None, to_x, to_weight, to_bias


class _Products(torch.autograd.Function):
    """The gradients of ``x``, if it has one, and of ``weight``."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(
        ctx: Any, layers: LinearLayers, of_result: Tensor, x: Tensor, weight: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.layers = layers
        ctx.save_for_backward(of_result, x, weight)
        ctx.set_materialize_grads(False)
        if layers.without_values:
            to_weight = weight.new_zeros(()).expand(weight.shape)
        else:
            to_weight = of_result.reshape(-1, of_result.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return (of_result @ weight, to_weight) if ctx.needs_input_grad[2] else (to_weight,)

    @staticmethod
    def backward(ctx: Any, *bars: OptionalTensor) -> tuple[Any, ...]:
        of_result, x, weight = ctx.saved_tensors
        of_x, of_weight = bars if len(bars) == 2 else (None, *bars)
        to_result: OptionalTensor = None
        to_x = to_weight = None
        if of_weight is not None:
            to_result = x @ of_weight.t()
            if ctx.needs_input_grad[2]:
                to_x = of_result @ of_weight
        if of_x is not None:
            through = of_x @ weight.t()
            to_result = through if to_result is None else to_result + through
            if ctx.needs_input_grad[3]:
                rows = of_result.reshape(-1, of_result.shape[-1])
                to_weight = ctx.layers.gradient(weight, rows, of_x.reshape(-1, of_x.shape[-1]))
        return None, to_result, to_x, to_weight
