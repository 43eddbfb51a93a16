"""Adam's averages, a gradient → the next averages and the direction, for one tensor: TorchOpt's ``AdamOp``."""

from __future__ import annotations

import torch
from torch import Tensor

from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops._adam import adam

__all__ = ["AdamOp"]


class AdamOp:
    """Adam's formula for one tensor at a time, by TorchOpt's interface; :func:`~torchopt_dist.adam` takes all at once.

    Args:
        b1: decay of the average of the gradients, a number.
        b2: decay of the average of their squares.
        eps: added to the root.
        eps_root: added below the root.
        inplace: if True, may overwrite ``mu`` and ``nu`` where no graph is recorded and no kernel runs.

    Example:
        >>> import torch
        >>> zero = torch.zeros(2)
        >>> mu, nu, direction = AdamOp()(zero, zero.clone(), torch.tensor([1.0, -2.0]), 1)
        >>> direction
        tensor([ 1., -1.])
    """

    def __init__(
        self,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        eps_root: float = 0.0,
        inplace: bool = True,
    ) -> None:
        self.b1, self.b2, self.eps, self.eps_root, self.inplace = b1, b2, eps, eps_root, inplace

    def __call__(
        self, mu: Tensor, nu: Tensor, updates: OptionalTensor, count: Tensor | int
    ) -> tuple[Tensor, Tensor, OptionalTensor]:
        """Make one step.

        Args:
            mu: average of the gradients, of the shape of ``updates``.
            nu: average of their squares, of the same shape.
            updates: the gradient; ``None`` for none, and then ``mu`` and ``nu`` stay as they are.
            count: the number of this step, from 1 on; a number, or a tensor of one element.

        Returns:
            The next ``mu``, the next ``nu``, and the direction; connected to the graph, to any order.

        Raises:
            TypeError: an argument is not a dense tensor of a floating-point dtype.
            ValueError: the shapes differ, or ``count`` is below 1.
        """
        if updates is None:
            return mu, nu, None
        for name, x in (("mu", mu), ("nu", nu), ("updates", updates)):
            if not isinstance(x, Tensor) or x.layout is not torch.strided or not x.is_floating_point():
                got = f"{x.layout}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"`{name}` must be a dense tensor of a floating-point dtype, got {got}")
        if not mu.shape == nu.shape == updates.shape:
            shapes = ", ".join(str(tuple(x.shape)) for x in (mu, nu, updates))
            raise ValueError(f"`mu`, `nu` and `updates` must have one shape, got {shapes}")
        if isinstance(count, Tensor):
            before = count.detach().to("cpu", torch.float32).reshape(()) - 1
        else:
            before = torch.tensor(count - 1, dtype=torch.float32, device="cpu")
        if (
            not foreach.runs_in_a_loop([before]) and before < 0
        ):  # in a transformation the value cannot be read
            raise ValueError(f"`count` must be at least 1, got {int(count)}")
        directions, mus, nus, _ = adam(
            [updates],
            [mu],
            [nu],
            [before],
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            eps_root=self.eps_root,
            inplace=self.inplace and not torch.is_grad_enabled(),
        )
        return mus[0], nus[0], directions[0]
