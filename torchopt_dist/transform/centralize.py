"""Gradients of matrices and kernels → the same, with a mean of 0 for each output."""

from __future__ import annotations

from torch import Tensor

from torchopt_dist.transform._elementwise import on_leaves
from torchopt_dist.transform.base import GradientTransformation, stateless

__all__ = ["centralize"]


def centralize() -> GradientTransformation:
    """Subtract from each update of two or more dimensions its mean over all dimensions but the first.

    In torch's layers the first dimension is that of the outputs. Other updates stay as they are. [Yong et al. 2020,
    Gradient Centralization: A New Optimization Technique for Deep Neural Networks, equation 1.]

    Raises:
        TypeError: from ``update``: an update is sparse.

    Example:
        >>> import torch
        >>> init, update = centralize()
        >>> gradient = torch.tensor([[1.0, 3.0], [0.0, 0.0]])
        >>> update(gradient, init(gradient))[0]
        tensor([[-1.,  1.],
                [ 0.,  0.]])
    """
    return GradientTransformation(stateless, _update)


@on_leaves()
def _update(grads: list[Tensor]) -> list[Tensor]:
    return [_centralized(x) for x in grads]


def _centralized(x: Tensor) -> Tensor:
    if x.ndim < 2 or not x.numel():
        return x
    return x - x.mean(dim=tuple(range(1, x.ndim)), keepdim=True)
