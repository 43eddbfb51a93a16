"""What torch's compiler traces → the same by formulas, where torch's own way is wrong or makes a program a value.

A tensor that is one index is one; inside of transforms normalization and embeddings are, too. The compiler cannot trace
the replacement of torch's functions, and follows a mode; it sees the functions of ``torch.nn.functional``, whose
arguments have another order. It shows ``weight_norm`` to no mode: that is replaced in the graph, and so is the factor
``alpha=`` of a sum, which Inductor (2.11 to 2.13) leaves out where a product of matrices is added.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.formulas.embedding import padded
from torchopt_dist.formulas.normalization import by_channel, normalized
from torchopt_dist.formulas.weight_norm import scaled_to
from torchopt_dist.torch_private import places_of_weight_norm

__all__ = ["TracedFormulas", "with_formulas"]

_SUMS = frozenset(
    (torch.add, torch.sub, torch.subtract, "add", "add_", "sub", "sub_", "subtract", "subtract_")
)
_WEIGHT_NORMS = frozenset(getattr(module, name) for module, name in places_of_weight_norm())


class TracedFormulas(TorchFunctionMode):
    """A context for the functions of programs.

    Args:
        in_transform: the code inside is mapped by ``vmap``.
    """

    def __init__(self, *, in_transform: bool = False) -> None:
        super().__init__()
        self._in_transform = in_transform

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the formula, if there is one."""
        if func is Tensor.__getitem__:
            return func(*_selected(*args))
        if not self._in_transform:
            return func(*args, **(kwargs or {}))
        if func is F.layer_norm or func is torch.layer_norm:
            return _layer_norm(*args, **(kwargs or {}))
        if func is F.batch_norm:
            return _batch_norm(*args, **(kwargs or {}))
        if func is F.instance_norm:
            return _instance_norm(*args, **(kwargs or {}))
        if (
            func is F.embedding
            and (kwargs or {}).get("padding_idx", args[2] if len(args) > 2 else None) is not None
        ):
            return _embedding(*args, **(kwargs or {}))
        if func is torch.batch_norm or func is torch.instance_norm:
            raise NotImplementedError("a compiled task cannot call torch.batch_norm: use torch.nn.functional")
        return func(*args, **(kwargs or {}))


def with_formulas(graph: Any) -> None:
    """Replace in a graph what no mode sees: what torch differentiates wrongly twice, or what its compiler loses."""
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if node.op == "call_function" and node.target in _WEIGHT_NORMS:
                node.target = scaled_to
            elif "alpha" in node.kwargs and node.target in _SUMS:
                given = {**dict(zip(("input", "other"), node.args, strict=False)), **node.kwargs}
                with part.graph.inserting_before(node):
                    scaled = part.graph.call_function(operator.mul, (given.pop("other"), given.pop("alpha")))
                node.args, node.kwargs = (given.pop("input"), scaled), given
            else:
                continue
            part.recompile()


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: OptionalTensor = None,
    bias: OptionalTensor = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return normalized(input, tuple(range(-len(normalized_shape), 0)), weight, bias, eps=eps)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    made = F.embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
    assert padding_idx is not None
    return padded(made, input, padding_idx % weight.shape[0])


def _batch_norm(
    input: Tensor,
    running_mean: OptionalTensor,
    running_var: OptionalTensor,
    weight: OptionalTensor = None,
    bias: OptionalTensor = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training or running_mean is not None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    weight, bias = by_channel(weight, input.ndim), by_channel(bias, input.ndim)
    return normalized(input, (0, *range(2, input.ndim)), weight, bias, eps=eps)


def _instance_norm(
    input: Tensor,
    running_mean: OptionalTensor = None,
    running_var: OptionalTensor = None,
    weight: OptionalTensor = None,
    bias: OptionalTensor = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats or running_mean is not None:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    weight, bias = by_channel(weight, input.ndim), by_channel(bias, input.ndim)
    return normalized(input, tuple(range(2, input.ndim)), weight, bias, eps=eps)


def _selected(tensor: Tensor, index: Any) -> tuple[Tensor, Any]:
    """A tensor and an index of it → those in which index 0 stands where a tensor of one index was.

    The compiler makes a number of such a tensor, and a program for each value.
    """
    given = index if type(index) is tuple else (index,)
    if not any(map(_is_index, given)) or not all(
        _is_index(one) or one is None or one is ... or isinstance(one, (int, slice, torch.SymInt))
        for one in given
    ):
        return tensor, index
    taken = sum(not (one is None or one is ...) for one in given)
    if any(isinstance(one, bool) for one in given) or taken > tensor.ndim:
        return tensor, index
    dim, made = 0, []
    for one in given:
        if _is_index(one):
            size = tensor.shape[dim]
            tensor = tensor.index_select(dim, torch.where(one < 0, one + size, one).reshape(1))
        made.append(0 if _is_index(one) else one)
        dim += tensor.ndim - taken if one is ... else one is not None
    return tensor, tuple(made)


def _is_index(index: Any) -> bool:
    return (
        isinstance(index, Tensor)
        and index.ndim == 0
        and index.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
    )
