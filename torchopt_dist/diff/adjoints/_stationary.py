"""What a backward pass of ``Implicit`` has found → a warning, where its gradient is not the one that is meant."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist.diff.implicit import Found
from torchopt_dist.linear_solve.solver import NotConverged, report

__all__ = ["far_from_a_minimum", "warn_of_unused"]

_OF_THE_WAY = 0.1
"""The part of the way gone by the steps that may be left."""
_OF_THE_PARAMETERS = 1e-3
"""The part of the parameters' norm that may be left in any case: a loop may begin at the minimum."""


def far_from_a_minimum(
    found: Found, first: Sequence[Tensor], not_converged: NotConverged, samples: int = 0
) -> None:
    """Warn or raise if the solution is far from where the gradient of the loss is zero.

    The solve ``H u = c`` tells how large ``H⁻¹`` is along ``c``. So ``‖∇loss‖ ‖u‖ / ‖c‖`` is about the distance to the
    minimum, without another product. It is compared with the way that the steps have gone.

    Args:
        found: what the backward pass has found.
        first: the parameters that the steps began at, as the solution's leaves.
        not_converged: ``'warn'``, ``'raise'`` or ``'ignore'``.
        samples: how many leading dimensions of the leaves count samples, each with a minimum of its own.

    Raises:
        torch.linalg.LinAlgError: it is far, and ``not_converged`` is ``'raise'``.
    """
    if not_converged == "ignore":
        return
    moved = [
        x.detach() - torch.view_as_real(p) if p.is_complex() else x.detach() - p.detach()
        for x, p in zip(found.solution, first, strict=True)
    ]
    norms = [
        _norm(part, samples) for part in (found.residual, found.adjoint, found.outer, moved, found.solution)
    ]
    _Judge.apply(not_converged, *norms)


def _norm(tensors: Sequence[Tensor], samples: int) -> Tensor:
    squares = [tensor.detach().double().square().unsqueeze(-1) for tensor in tensors]
    return torch.stack([one.flatten(samples).sum(-1) for one in squares]).sum(0).sqrt()


class _Judge(torch.autograd.Function):
    """Norms → nothing; inside ``vmap`` those of all samples."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(not_converged: NotConverged, *norms: Tensor) -> Tensor:
        residual, adjoint, outer, moved, params = torch.broadcast_tensors(*norms)
        left = residual * adjoint / outer.where(outer > 0, math.inf)
        far = left > torch.maximum(_OF_THE_WAY * moved, _OF_THE_PARAMETERS * params)
        if bool(far.any()):
            of_all = "" if far.ndim == 0 else f" of {int(far.sum())} of {far.numel()} samples"
            worst = int(torch.where(far, left, 0).argmax())
            slope, ahead, way = (float(one.reshape(-1)[worst]) for one in (residual, left, moved))
            ratio = ahead / way if way > 0 else math.inf
            report(  # with one digit, so that a training does not say it in a hundred ways
                f"`Implicit()` gives the gradient at a minimum, and the last parameters{of_all} are far from one: the "
                f"loss's gradient has norm {slope:.1g} there, so the way that is left is about {ratio:.1g} times that "
                "which the steps have gone. Take more steps or a larger rate, `batches=` if each step has another "
                "batch, write a weight decay of the optimizer into the loss, or take another adjoint, such as "
                "Recorded(). `Implicit(not_converged='ignore')` says nothing",
                not_converged,
            )
        return residual.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], not_converged: NotConverged, *norms: Tensor) -> Any:
        each = [
            norm if dim is None else norm.movedim(dim, -1)
            for norm, dim in zip(norms, in_dims[1:], strict=True)
        ]
        return _Judge.apply(not_converged, *each), None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise AssertionError("nothing is differentiated here")


def warn_of_unused(unused: Sequence[Tensor]) -> None:
    """Say that tensors have no influence on a minimum of the loss."""
    if unused:
        shapes = " and one of shape ".join(str(tuple(tensor.shape)) for tensor in unused)
        warnings.warn(
            f"`Implicit()` gives no gradient to a tensor of shape {shapes}: it is in `meta` or in the optimizer, and "
            "the loss, whose minimum is differentiated, does not use it. For iMAML add the distance to the first "
            "parameters to the loss; write weight decay into the loss; learn rates by another adjoint, such as "
            "Recorded()",
            UserWarning,
            stacklevel=2,
        )
