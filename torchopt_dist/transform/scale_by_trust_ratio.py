"""Updates, parameters → each update times the ratio of its parameter's norm to its own: layerwise learning rates."""

from __future__ import annotations

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, Updates
from torchopt_dist.ops._columns import pick, present, put
from torchopt_dist.transform._elementwise import check_dense
from torchopt_dist.transform.base import EmptyState, GradientTransformation, stateless

__all__ = ["scale_by_trust_ratio"]


def scale_by_trust_ratio() -> GradientTransformation:
    """Multiply each leaf ``u`` by ``|p| / |u|``, Euclidean norms, ``p`` its parameter; by 1 where a norm is 0.

    [You et al. 2020, Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, section 3, with the
    identity for the function that scales the norm.] The derivative of a norm at 0 is taken to be 0.

    Raises:
        ValueError: from ``update``: ``params`` are missing, or their structure differs.
        TypeError: from ``update``: an update is sparse.

    Example:
        >>> import torch
        >>> w = torch.tensor([3.0, 4.0])
        >>> impl = scale_by_trust_ratio()
        >>> impl.update(torch.tensor([1.0, 0.0]), impl.init(w), params=w)[0]
        tensor([5., 0.])
    """
    return GradientTransformation(stateless, _update)


def _update(
    updates: Updates, state: EmptyState, *, params: Params | None = None, inplace: bool = False
) -> tuple[Updates, OptState]:
    if params is None:
        raise ValueError("`params` must be given to `update`: a trust ratio needs the parameters, got None")
    leaves, spec = pytree.flatten(updates)
    weights = pytree.flatten_like(spec, params, "params", "updates")
    places = present(leaves)
    given = pick(leaves, places)
    check_dense(given)
    scaled = [_scaled(u, p) for u, p in zip(given, pick(weights, places), strict=True)]
    return pytree.unflatten(spec, put(leaves, places, scaled)), state


def _scaled(update: Tensor, param: Tensor) -> Tensor:
    above, below = _norm(param), _norm(update)
    usable = (above > 0) & (below > 0)
    ratio = torch.where(usable, above / torch.where(usable, below, 1.0), 1.0)
    return (update * ratio).to(update.dtype)


def _norm(x: Tensor) -> Tensor:
    """The Euclidean norm, in float32 for half precision; with a derivative of 0 at 0."""
    real = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    real = real.float() if real.dtype in (torch.float16, torch.bfloat16) else real
    total = real.square().sum()
    there = total > 0
    return torch.where(there, torch.where(there, total, 1.0).sqrt(), 0.0)
