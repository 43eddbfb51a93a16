"""A loop → its outcome, with the gradient through its last step by a difference of two first-order gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchopt_dist.diff.adjoints._differences import run_with_differences
from torchopt_dist.diff.adjoints._estimates import check_above_zero
from torchopt_dist.diff.adjoints._loop import Loop, Outcome
from torchopt_dist.diff.adjoints._loop_of_samples import samples_for
from torchopt_dist.diff.adjoints.adjoint import Adjoint

__all__ = ["FiniteDifference"]


@dataclass(frozen=True)
class FiniteDifference(Adjoint):
    """The gradient through the last step, as ``Truncated(1)``, without a second-order graph (DARTS, Liu et al., 2019).

    With ``c`` the outer gradient of the last parameters, ``J`` the optimizer's Jacobian ``∂update/∂g`` at the last step
    and ``v = Jᵀ c``, the tensors that the loss uses get

        (∂loss(θ + r·v)/∂meta - ∂loss(θ - r·v)/∂meta) / 2r,    r = eps / ‖v‖,

    at the parameters ``θ`` before the last step: equation 8 of https://arxiv.org/abs/1806.09055, where the optimizer is
    SGD and ``J`` its negative learning rate. The error falls with ``eps²``, until rounding takes over. Tensor
    hyper-parameters get the exact gradient of the last step. The initial parameters and the initial state get no
    gradient, and losses are not connected. Beside plain training two copies of the parameters and of the state are
    kept. There are no second derivatives.

    Args:
        eps: the Euclidean norm of ``r·v`` over all parameters together.

    Raises:
        TypeError: ``eps`` is not a number.
        ValueError: it is not finite and above 0; or, from ``inner_loop``, the loss depends on a leaf that ``meta`` does
            not list.
        NotImplementedError: from ``inner_loop``, inside another transform of ``torch.func`` than ``vmap``.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> w, x = torch.tensor(1.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
        >>> adapted = todist.inner_loop(
        ...     lambda w: (w - x) ** 2, todist.sgd(lr=0.25), w, 5, meta=x, adjoint=FiniteDifference()
        ... )
        >>> torch.autograd.grad(adapted.params, x)  # 2 · 0.25, of the last step
        (tensor(0.5000),)
    """

    first_has_gradient: ClassVar[bool] = False

    eps: float = 0.01

    def __post_init__(self) -> None:
        check_above_zero("eps", self.eps)

    @property
    def batches_again(self) -> int:
        """The difference is taken on the last batch."""
        return 1

    def run(self, loop: Loop) -> Outcome:
        """Run the loop; see :meth:`Adjoint.run`."""
        return run_with_differences(loop, self.eps, type(self).__name__, samples_for(self), at_the_end=False)
