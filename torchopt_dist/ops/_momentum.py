"""Directions, their running sums → directions with momentum, and the next running sums.

The running sum is ``b = momentum * b + taken * g``, and the direction is ``b``, or with Nesterov's look-ahead
``g + momentum * b``. [Sutskever et al. 2013, On the importance of initialization and momentum in deep learning,
equations 1 to 4, without the learning rate in the sum, as in ``torch.optim.SGD``.]
"""

from __future__ import annotations

from torch import Tensor

from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops._foreach import Factor, Factors

__all__ = ["with_momentum"]


def with_momentum(
    directions: list[Tensor],
    sums: list[Tensor],
    momentum: Factor,
    *,
    taken: Factors = 1.0,
    nesterov: bool = False,
    inplace: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """The directions with momentum, and the next sums, which are the same tensors without ``nesterov``.

    Args:
        directions: tensors of any shapes (``g``).
        sums: their running sums (``b``).
        momentum: the decay of the sum; a number, or a tensor of one element.
        taken: the fraction of a direction that is added to its sum; one number for all, or one for each.
        nesterov: use Nesterov's look-ahead.
        inplace: if True, overwrites ``sums``.
    """
    sums = foreach.multiply(sums, momentum, inplace=inplace)
    if isinstance(taken, (int, float)):
        sums = foreach.add(sums, directions, taken, inplace=inplace)
    else:
        sums = foreach.add(sums, foreach.multiply(directions, taken), inplace=inplace)
    return foreach.add(directions, sums, momentum) if nesterov else sums, sums
