"""Lists of tensors → lists of tensors, in one call where torch has one.

``torch._foreach_*`` runs a list in one call, in forward and in backward, to any order. These functions have no
batching rule and no derivative for a tensor factor, and ``torch.compile`` fuses a plain loop itself: in such cases a
loop over the tensors runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor

from torchopt_dist import torch_private
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.uncompiled import is_traced

__all__ = [
    "Factor",
    "absolute",
    "add",
    "add_number",
    "add_product",
    "add_quotient",
    "are_batched",
    "combine",
    "descent_gradients",
    "divide",
    "in_loops",
    "interpolate",
    "inverse",
    "is_zero",
    "maximum",
    "multiply",
    "product",
    "runs_in_a_loop",
    "square_root",
]

Factor: TypeAlias = float | Tensor
"""A number, or a tensor of one element."""
Factors: TypeAlias = Factor | Sequence[float] | Sequence[Tensor]
"""One for all tensors of a list, or one for each."""


def multiply(xs: list[Tensor], factor: Factors, *, inplace: bool = False) -> list[Tensor]:
    """Each tensor times a number, or times a tensor of one element.

    Args:
        xs: tensors of any shapes, dtypes and devices.
        factor: the factor, or one for each; the results keep the dtypes of ``xs``.
        inplace: if True, overwrites ``xs``.
    """
    if _is_number(factor) and not runs_in_a_loop(xs):
        if inplace:
            torch._foreach_mul_(xs, factor)
            return xs
        return list(torch._foreach_mul(xs, factor))
    if isinstance(factor, Tensor) and not inplace and not torch.is_grad_enabled() and not runs_in_a_loop(xs):
        first = xs[0]
        wide = first.dtype in (torch.float32, torch.float64) and not factor.is_complex()
        if wide and {(x.dtype, x.device) for x in xs} == {(first.dtype, first.device)}:
            return list(torch._foreach_mul(xs, factor.reshape(()).to(first)))
    factors = _each(factor, len(xs))
    if inplace:
        return [x.mul_(f) for x, f in zip(xs, factors, strict=True)]
    return [_kept(x * f, x) for x, f in zip(xs, factors, strict=True)]


def add(xs: list[Tensor], ys: list[Tensor], alpha: Factor = 1.0, *, inplace: bool = False) -> list[Tensor]:
    """``x + alpha * y`` for each pair.

    Args:
        xs: tensors of any shapes, dtypes and devices.
        ys: as many, each of the shape of its partner.
        alpha: a number, or a tensor of one element; the results keep the dtypes of ``xs``.
        inplace: if True, overwrites ``xs``.
    """
    if isinstance(alpha, Tensor):
        ys, alpha = multiply(ys, alpha), 1.0
    if is_traced():
        # Inductor (2.11 to 2.13) loses the factor of a sum where `y` is a product of matrices.
        added = [x.add_(y * alpha) if inplace else x + y * alpha for x, y in zip(xs, ys, strict=True)]
    elif runs_in_a_loop(xs):
        added = [
            x.add_(y, alpha=alpha) if inplace else x.add(y, alpha=alpha) for x, y in zip(xs, ys, strict=True)
        ]
    elif inplace:
        torch._foreach_add_(xs, ys, alpha=alpha)
        return xs
    else:
        added = list(torch._foreach_add(xs, ys, alpha=alpha))
    return [z if z.dtype == x.dtype else _kept(z, x) for x, z in zip(xs, added, strict=True)]


def add_number(xs: list[Tensor], number: Factors, *, inplace: bool = False) -> list[Tensor]:
    """Each tensor plus a number, or plus a tensor of one element; as :func:`multiply`."""
    if _is_number(number) and not runs_in_a_loop(xs):
        if inplace:
            torch._foreach_add_(xs, number)
            return xs
        return list(torch._foreach_add(xs, number))
    numbers = _each(number, len(xs))
    if inplace:
        return [x.add_(n) for x, n in zip(xs, numbers, strict=True)]
    return [_kept(x + n, x) for x, n in zip(xs, numbers, strict=True)]


def add_product(
    xs: list[Tensor], ys: list[Tensor], zs: list[Tensor], alpha: Factor = 1.0, *, inplace: bool = False
) -> list[Tensor]:
    """``x + alpha * y * z`` for each triple; as :func:`add`."""
    if isinstance(alpha, Tensor):
        ys, alpha = multiply(ys, alpha), 1.0
    if runs_in_a_loop(xs):
        function: Callable[..., Tensor] = Tensor.addcmul_ if inplace else Tensor.addcmul
        return [function(x, y, z, value=alpha) for x, y, z in zip(xs, ys, zs, strict=True)]
    if inplace:
        torch._foreach_addcmul_(xs, ys, zs, alpha)
        return xs
    return list(torch._foreach_addcmul(xs, ys, zs, alpha))


def interpolate(xs: list[Tensor], ys: list[Tensor], weight: Factor, *, inplace: bool = False) -> list[Tensor]:
    """``x + weight * (y - x)`` for each pair; as :func:`add`."""
    if isinstance(weight, Tensor) or any(x.dtype != y.dtype for x, y in zip(xs, ys, strict=True)):
        return add(multiply(xs, 1 - weight, inplace=inplace), ys, weight, inplace=inplace)
    if runs_in_a_loop(xs):
        function: Callable[..., Tensor] = Tensor.lerp_ if inplace else Tensor.lerp
        return [function(x, y, weight) for x, y in zip(xs, ys, strict=True)]
    if inplace:
        torch._foreach_lerp_(xs, ys, weight)
        return xs
    return list(torch._foreach_lerp(xs, ys, weight))


def descent_gradients(
    grads: list[Tensor], params: list[Tensor] | None, weight_decay: Factor, maximize: bool
) -> list[Tensor]:
    """The gradients to descend along: negated to maximize, plus ``weight_decay`` times the parameters (L2 penalty)."""
    if maximize:
        grads = multiply(grads, -1)
    if params is None or is_zero(weight_decay):
        return grads
    return add(grads, params, weight_decay)


def is_zero(number: Factor) -> bool:
    """Whether a factor is the number 0, so that its term can be left out; a tensor never is."""
    return not isinstance(number, Tensor) and number == 0


def absolute(xs: list[Tensor]) -> list[Tensor]:
    """The absolute value of each element; its derivative at 0 is 0."""
    return [x.abs() for x in xs] if runs_in_a_loop(xs) else list(torch._foreach_abs(xs))


def maximum(xs: list[Tensor], ys: list[Tensor], *, inplace: bool = False) -> list[Tensor]:
    """The larger of each two elements; where they are equal, each gets half of the gradient.

    Args:
        xs: tensors of any shapes, dtypes and devices.
        ys: as many, each of the shape of its partner.
        inplace: if True, overwrites ``xs``.
    """
    if runs_in_a_loop(xs):
        found = [torch.maximum(x, y) for x, y in zip(xs, ys, strict=True)]
        return [x.copy_(z) for x, z in zip(xs, found, strict=True)] if inplace else found
    if inplace:
        torch._foreach_maximum_(xs, ys)
        return xs
    return list(torch._foreach_maximum(xs, ys))


def product(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    """``x * y`` for each pair."""
    if runs_in_a_loop(xs):
        return [x * y for x, y in zip(xs, ys, strict=True)]
    return list(torch._foreach_mul(xs, ys))


def divide(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    """``x / y`` for each pair, in the dtypes of ``xs``."""
    if runs_in_a_loop(xs):
        return [_kept(x / y, x) for x, y in zip(xs, ys, strict=True)]
    return [_kept(z, x) for x, z in zip(xs, torch._foreach_div(xs, ys), strict=True)]


def add_quotient(
    xs: list[Tensor], ys: list[Tensor], zs: list[Tensor], alpha: float, *, inplace: bool = False
) -> list[Tensor]:
    """``x + alpha * y / z`` for each triple; as :func:`add`."""
    if inplace and not runs_in_a_loop(xs):
        torch._foreach_addcdiv_(xs, ys, zs, alpha)
        return xs
    # Not `_foreach_addcdiv`: torch 2.13 fails to differentiate it where one of the tensors is 0-d.
    return add(xs, divide(ys, zs), alpha, inplace=inplace)


def square_root(xs: list[Tensor], *, at_least_zero: bool = False) -> list[Tensor]:
    """The root of each element, with a derivative of 0 at 0, where the true one is infinite.

    In an optimizer that divides by the root of a mean of squares, this is the limit: as a gradient goes to zero, its
    square falls faster than the root's derivative grows.

    Args:
        xs: tensors of any shapes.
        at_least_zero: whether an element below 0 counts as 0, in the derivative, too; else its root is NaN.
    """
    if runs_in_a_loop(xs):
        if not torch.is_grad_enabled():
            return [(x.clamp_min(0) if at_least_zero else x).sqrt() for x in xs]
        zeros = [x <= 0 if at_least_zero else x == 0 for x in xs]
        return [
            torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())
            for x, zero in zip(xs, zeros, strict=True)
        ]
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        apply: Callable[..., Any] = _SquareRoot.apply
        return list(apply(at_least_zero, *xs))
    return list(torch._foreach_sqrt(torch._foreach_clamp_min(xs, 0) if at_least_zero else xs))


class _SquareRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, at_least_zero: bool, *xs: Tensor) -> tuple[Tensor, ...]:
        roots = torch._foreach_sqrt(torch._foreach_clamp_min(xs, 0) if at_least_zero else xs)
        ctx.save_for_backward(*roots)
        return tuple(roots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slopes = _slopes_of_roots(ctx.saved_tensors)
        if are_batched(grads):
            return None, *(grad * slope for grad, slope in zip(grads, slopes, strict=True))
        return None, *torch._foreach_mul(grads, slopes)


def _slopes_of_roots(roots: Sequence[Tensor]) -> list[Tensor]:
    """The derivative of :func:`square_root`, from its results: ``0.5 / root``, and 0 at 0."""
    if runs_in_a_loop(roots):
        zeros = [root == 0 for root in roots]
        return [
            torch.where(zero, 0.0, 0.5 / torch.where(zero, 1.0, root))
            for root, zero in zip(roots, zeros, strict=True)
        ]
    positive = torch._foreach_sign([root.detach() for root in roots])
    instead = torch._foreach_add(torch._foreach_neg(positive), 1.0)  # 1 where the root is 0, else 0
    return list(
        torch._foreach_div(torch._foreach_mul(positive, 0.5), torch._foreach_add(list(roots), instead))
    )


def combine(function: Callable[..., Any], *factors: Factors) -> Factors:
    """Apply a function to factors: once if all are numbers, otherwise tensor by tensor."""
    lists = [factor for factor in factors if isinstance(factor, (list, tuple))]
    if not lists:
        return cast("Factors", function(*factors))
    return [function(*each) for each in zip(*(_each(f, len(lists[0])) for f in factors), strict=True)]


def inverse(factors: Factors) -> Factors:
    """The reciprocal of each factor."""
    return combine(_one_over, factors)


def _one_over(x: Any) -> Any:
    return 1 / x


def runs_in_a_loop(xs: Sequence[Tensor]) -> bool:
    """Whether operations run tensor by tensor: in a compiler, a transformation of ``torch.func`` or forward mode."""
    if not xs or is_traced():
        return True
    return torch_private.transforms_are_active() or torch_private.forward_mode_is_active() or _looping.get()


_looping: ContextVar[bool] = ContextVar("looping", default=False)


def are_batched(xs: Iterable[OptionalTensor]) -> bool:
    """Whether a backward runs for many gradients at a time: in ``torch.func.vmap``, or by ``is_grads_batched=True``."""
    return torch_private.transforms_are_active() or any(
        x is not None and torch_private.is_batched_gradient(x) for x in xs
    )


@contextlib.contextmanager
def in_loops() -> Iterator[None]:
    """A context in which operations run tensor by tensor, for gradients of ``is_grads_batched=True``."""
    token = _looping.set(True)
    try:
        yield
    finally:
        _looping.reset(token)


def _each(factor: Any, count: int) -> Sequence[Any]:
    if isinstance(factor, Tensor):
        return [factor.reshape(())] * count
    if _is_number(factor):
        return [factor] * count
    return [f.reshape(()) if isinstance(f, Tensor) else f for f in factor]


def _is_number(factor: Any) -> TypeGuard[float]:
    return not isinstance(factor, (Tensor, list, tuple))


def _kept(z: Tensor, x: Tensor) -> Tensor:
    """A result in the dtype of its operand, which a 0-d tensor of a wider dtype would have changed."""
    return z if z.dtype == x.dtype else z.to(x.dtype)
