"""A loop → its outcome, with the gradient of scalable meta-learning by algorithmic adaptation (SAMA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchopt_dist.diff.adjoints._differences import run_with_differences
from torchopt_dist.diff.adjoints._estimates import check_above_zero
from torchopt_dist.diff.adjoints._loop import Loop, Outcome
from torchopt_dist.diff.adjoints._loop_of_samples import samples_for
from torchopt_dist.diff.adjoints.adjoint import Adjoint

__all__ = ["SAMA"]


@dataclass(frozen=True)
class SAMA(Adjoint):
    """The implicit gradient with the identity for the inner Jacobian (Choe et al., 2023), for every optimizer.

    With ``c`` the outer gradient of the last parameters, ``D = diag(∂update/∂g)`` the optimizer's own Jacobian at the
    last step and ``v = D c``, the tensors that the loss uses get

        (∂loss(θ + r·v)/∂meta - ∂loss(θ - r·v)/∂meta) / 2r,    r = alpha / ‖v‖,

    at the last parameters ``θ`` and the last batch (https://arxiv.org/abs/2310.05674, section 3). ``D`` is the
    derivative of the optimizer's step by autograd, so it is that of any transformation; where a chain mixes the
    elements, as clipping by a norm does, it is the whole transposed Jacobian. Tensor hyper-parameters get the exact
    gradient of the last step. The initial parameters and the initial state get no gradient, and losses are not
    connected. Beside plain training a copy of the parameters and of the state is kept. There are no second derivatives.

    It is meant for meta-learning beside training: a few steps at a time, each loop starting from the parameters and the
    state of the one before.

    Args:
        alpha: the Euclidean norm of ``r·v`` over all parameters together.

    Raises:
        TypeError: ``alpha`` is not a number.
        ValueError: it is not finite and above 0; or, from ``inner_loop``, the loss depends on a leaf that ``meta`` does
            not list.
        NotImplementedError: from ``inner_loop``, inside another transform of ``torch.func`` than ``vmap``.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> w, x = torch.tensor(1.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
        >>> adapted = todist.inner_loop(
        ...     lambda w: (w - x) ** 2, todist.sgd(lr=0.25), w, 5, meta=x, adjoint=SAMA()
        ... )
        >>> torch.autograd.grad(adapted.params, x)
        (tensor(0.5000),)
    """

    first_has_gradient: ClassVar[bool] = False

    alpha: float = 0.01

    def __post_init__(self) -> None:
        check_above_zero("alpha", self.alpha)

    @property
    def batches_again(self) -> int:
        """The difference is taken on the last batch."""
        return 1

    def run(self, loop: Loop) -> Outcome:
        """Run the loop; see :meth:`Adjoint.run`."""
        return run_with_differences(loop, self.alpha, type(self).__name__, samples_for(self), at_the_end=True)
