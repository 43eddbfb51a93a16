"""Lists of tensors → lists of tensors, in one call where torch has one.

``torch._foreach_*`` runs a list in one call, in forward and in backward, to any order. It has no batching
rule and no derivative for a tensor factor, and ``torch.compile`` fuses a plain loop itself: those run the
loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, TypeGuard, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchopt_dist.typing import OptionalTensor

__all__ = [
    "Factor",
    "absolute",
    "add",
    "add_number",
    "add_product",
    "add_quotient_",
    "are_batched",
    "as_complex",
    "as_real",
    "bias_correction",
    "bias_corrections",
    "check_lengths",
    "check_tensors",
    "combine",
    "count_up",
    "count_up_",
    "counts",
    "divide",
    "divide_",
    "in_loops",
    "in_portions",
    "interpolate",
    "join",
    "maximum",
    "multiply",
    "pick",
    "portions",
    "present",
    "product",
    "put",
    "runs_in_a_loop",
    "slopes_of_roots",
    "split",
    "square_root",
    "values",
    "widened",
    "without_gaps",
]

T = TypeVar("T")
Factor: TypeAlias = float | Tensor
"""A number, or a tensor of one element."""
Factors: TypeAlias = Factor | Sequence[float] | Sequence[Tensor]
"""One for all tensors of a list, or one for each."""


SMALL = 8192
"""Elements a tensor up to which the time of an operation is that of the call."""


def present(leaves: Sequence[OptionalTensor]) -> list[int]:
    """The places of a list that hold a tensor, not ``None``."""
    return [place for place, leaf in enumerate(leaves) if leaf is not None]


def pick(leaves: Sequence[OptionalTensor], places: Sequence[int]) -> list[Tensor]:
    """The tensors at these places.

    Raises:
        ValueError: one of them is ``None``.
    """
    picked = [leaves[place] for place in places]
    for leaf in picked:
        if leaf is None:
            raise ValueError("a leaf has a gradient, but its parameter or its state is None")
    return picked  # type: ignore[return-value]


def put(
    leaves: Sequence[OptionalTensor], places: Sequence[int], new: Sequence[Tensor]
) -> list[OptionalTensor]:
    """The list with new tensors at these places; the given list stays as it is."""
    out = list(leaves)
    for place, tensor in zip(places, new, strict=True):
        out[place] = tensor
    return out


def join(columns: Iterable[Sequence[T]]) -> list[T]:
    """The columns one after another."""
    return list(chain.from_iterable(columns))


def split(tensors: Sequence[Any], count: int) -> list[list[Any]]:
    """So many columns of one length: the way back from :func:`join`."""
    length = len(tensors) // count
    return [list(tensors[place * length : (place + 1) * length]) for place in range(count)]


def without_gaps(grads: Sequence[OptionalTensor], like: Sequence[Tensor]) -> list[Tensor] | None:
    """Zeros in the places that are ``None``; ``None`` if all are."""
    if all(grad is None for grad in grads):
        return None
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, like, strict=True)]


def as_real(xs: Sequence[Tensor]) -> list[Tensor]:
    """Complex tensors seen as real ones with a last dimension of two, in the same memory; others as they are."""
    return [torch.view_as_real(x) if x.is_complex() else x for x in xs]


def as_complex(xs: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """The way back from :func:`as_real`, for the places at which ``like`` is complex."""
    return [
        torch.view_as_complex(x if x.stride(-1) == 1 else x.contiguous()) if y.is_complex() else x
        for x, y in zip(xs, like, strict=True)
    ]


def multiply(xs: list[Tensor], factor: Factors, *, inplace: bool = False) -> list[Tensor]:
    """Each tensor times a number, or times a tensor of one element.

    Args:
        xs: tensors of any shapes, dtypes and devices.
        factor: the factor, or one for each; the results keep the dtypes of ``xs``.
        inplace: overwrite ``xs``.
    """
    if _is_number(factor) and not runs_in_a_loop(xs):
        if inplace:
            torch._foreach_mul_(xs, factor)
            return xs
        return list(torch._foreach_mul(xs, factor))
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
        inplace: overwrite ``xs``.
    """
    if isinstance(alpha, Tensor):
        ys, alpha = multiply(ys, alpha), 1.0
    if runs_in_a_loop(xs):
        added = [
            x.add_(y, alpha=alpha) if inplace else x.add(y, alpha=alpha) for x, y in zip(xs, ys, strict=True)
        ]
    elif inplace:
        torch._foreach_add_(xs, ys, alpha=alpha)
        return xs
    else:
        added = list(torch._foreach_add(xs, ys, alpha=alpha))
    return [_kept(z, x) for x, z in zip(xs, added, strict=True)]


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


def counts(steps: Sequence[Tensor | float]) -> list[Tensor]:
    """Counts as 0-d tensors: numbers are made such ones, in float32 and on the CPU."""
    return [
        step if isinstance(step, Tensor) else torch.tensor(step, dtype=torch.float32, device="cpu")
        for step in steps
    ]


def count_up_(steps: Sequence[Tensor]) -> None:
    """Add 1 to each of these 0-d tensors, in place."""
    if runs_in_a_loop(steps) or not steps[0].is_floating_point():
        for step in steps:
            step.add_(1)
    elif steps[0].is_cpu:  # a number would be made a tensor anew for each of them
        torch._foreach_add_(list(steps), torch.ones((), device="cpu"), alpha=1.0)
    else:
        torch._foreach_add_(list(steps), 1)


def count_up(steps: list[Tensor], *, inplace: bool = False) -> list[Tensor]:
    """Add 1 to each of these 0-d tensors, which stay as they are unless ``inplace``."""
    if inplace:
        count_up_(steps)
        return steps
    if runs_in_a_loop(steps) or not steps[0].is_cpu or {step.dtype for step in steps} - {torch.float32}:
        return [step + 1 for step in steps]
    one = torch.ones((), dtype=torch.float32, device="cpu")
    return list(torch._foreach_add(steps, one, alpha=1.0))


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


def absolute(xs: list[Tensor]) -> list[Tensor]:
    """The absolute value of each element; its derivative at 0 is 0."""
    return [x.abs() for x in xs] if runs_in_a_loop(xs) else list(torch._foreach_abs(xs))


def maximum(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    """The greater of each two elements; where they are equal, half of the gradient goes to either."""
    if runs_in_a_loop(xs):
        return [torch.maximum(x, y) for x, y in zip(xs, ys, strict=True)]
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


def divide_(xs: list[Tensor], factor: Any) -> list[Tensor]:
    """Each tensor over a number, or over its own, in place."""
    if runs_in_a_loop(xs):
        return [x.div_(f) for x, f in zip(xs, _each(factor, len(xs)), strict=True)]
    torch._foreach_div_(xs, factor)
    return xs


def add_quotient_(xs: list[Tensor], ys: list[Tensor], zs: list[Tensor], factor: Any) -> None:
    """``x + factor * y / z`` for each triple, in place; ``factor`` is a number, or one for each."""
    if runs_in_a_loop(xs):
        for x, y, z, f in zip(xs, ys, zs, _each(factor, len(xs)), strict=True):
            x.addcdiv_(y, z, value=f)
    else:
        torch._foreach_addcdiv_(xs, ys, zs, factor)


def portions(xs: Sequence[Tensor], nbytes: int = 1 << 19) -> Iterator[slice]:
    """Cut a list into slices of about ``nbytes``, so that a formula's next pass finds them in the cache."""
    start = size = 0
    for end, x in enumerate(xs, 1):
        size += x.numel() * x.element_size()
        if size >= nbytes or end == len(xs):
            yield slice(start, end)
            start, size = end, 0


Columns: TypeAlias = Sequence[list[Tensor] | None]
"""Lists of one length, whose tensors at one place belong together; ``None`` where there is no such list."""


def in_portions(formula: Callable[[Columns], Sequence[list[Tensor]]], columns: Columns) -> list[list[Tensor]]:
    """Apply a formula that works element by element where that is fastest: many small tensors as one, few at a time.

    Args:
        formula: columns → columns; it records no graph.
        columns: the first of them is a list.
    """
    first = columns[0] or []
    out: list[list[Tensor]] = []
    for part in portions(first):
        share = [column if column is None else column[part] for column in columns]
        small = _flat_sizes([column for column in share if column is not None])
        if small is None:
            found = formula(share)
        else:
            flat = [None if c is None else [torch.cat([x.reshape(-1) for x in c])] for c in share]
            # `.data`: the pieces are no views to autograd, and changing one is no change of the others.
            found = [
                [piece.view_as(x).data for piece, x in zip(column[0].split(small), first[part], strict=True)]
                for column in formula(flat)
            ]
        out = [[*before, *new] for before, new in zip(out, found, strict=True)] if out else list(found)
    return out


def _flat_sizes(columns: Sequence[list[Tensor]]) -> list[int] | None:
    """The lengths of small tensors that may be laid end to end; ``None`` if these may not."""
    first = columns[0]
    sizes = [x.numel() for x in first]
    if len(first) < 2 or sum(sizes) > SMALL * len(sizes):
        return None
    kinds = {(x.dtype, x.device) for column in columns for x in column}
    return sizes if len(kinds) == 1 else None


def square_root(xs: list[Tensor]) -> list[Tensor]:
    """The root of each element, with a derivative of 0 at 0, where the true one is infinite.

    In an optimizer that divides by the root of a mean of squares, that is the limit: as a gradient goes to
    zero, its square goes faster than the root's derivative grows.
    """
    if runs_in_a_loop(xs):
        if not torch.is_grad_enabled():
            return [x.sqrt() for x in xs]
        zeros = [x == 0 for x in xs]
        return [
            torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())
            for x, zero in zip(xs, zeros, strict=True)
        ]
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        apply: Callable[..., Any] = _SquareRoot.apply
        return list(apply(*xs))
    return list(torch._foreach_sqrt(xs))


class _SquareRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        roots = torch._foreach_sqrt(xs)
        ctx.save_for_backward(*roots)
        return tuple(roots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        slopes = slopes_of_roots(ctx.saved_tensors)
        if are_batched(grads):
            return tuple(grad * slope for grad, slope in zip(grads, slopes, strict=True))
        return tuple(torch._foreach_mul(grads, slopes))


def slopes_of_roots(roots: Sequence[Tensor]) -> list[Tensor]:
    """The derivative of :func:`square_root`, from its results: ``0.5 / root``, and 0 at 0."""
    positive = torch._foreach_sign([root.detach() for root in roots])
    instead = torch._foreach_add(torch._foreach_neg(positive), 1.0)  # 1 where the root is 0, else 0
    return list(
        torch._foreach_div(torch._foreach_mul(positive, 0.5), torch._foreach_add(list(roots), instead))
    )


def values(counts: Sequence[Tensor]) -> Factors:
    """What 0-d tensors hold: a number, if it is the same in all, else numbers.

    Where they cannot be looked at, as in ``vmap``, they come back as float64 tensors.
    """
    if runs_in_a_loop(counts):
        return [t.to(torch.float64) for t in counts]
    numbers = [t.item() for t in counts]
    return numbers[0] if numbers.count(numbers[0]) == len(numbers) else numbers


def bias_correction(decay: Factor, steps: Sequence[Tensor]) -> Factors:
    """``1 - decay**t``: what a running average that began at 0 lacks after ``t`` steps, in float64.

    Args:
        decay: how much of the average stays at a step.
        steps: ``t`` of each tensor: 0-d, on the CPU.

    Returns:
        One for all, if all have made as many steps; else one for each.
    """
    return bias_corrections((decay,), steps)[0]


def bias_corrections(decays: Sequence[Factor], steps: Sequence[Tensor], ahead: int = 0) -> list[Factors]:
    """:func:`bias_correction` of several decays, the steps looked at once; of ``ahead`` steps later."""
    t = values(steps)
    if ahead:
        t = combine(lambda made: made + ahead, t)
    return [
        combine(partial(_left, decay.to(torch.float64) if isinstance(decay, Tensor) else decay), t)
        for decay in decays
    ]


def _left(decay: Factor, t: Factor) -> Factor:
    return 1 - decay**t


def combine(function: Callable[..., Any], *factors: Factors) -> Factors:
    """Apply a function to factors: once if all are numbers, otherwise tensor by tensor."""
    lists = [factor for factor in factors if isinstance(factor, (list, tuple))]
    if not lists:
        return cast("Factors", function(*factors))
    return [function(*each) for each in zip(*(_each(f, len(lists[0])) for f in factors), strict=True)]


def runs_in_a_loop(xs: Sequence[Tensor]) -> bool:
    """Whether to go tensor by tensor: nothing to do, compiling, a ``torch.func`` transform, forward mode."""
    if not xs or torch.compiler.is_compiling():
        return True
    level = torch._C._functorch.maybe_current_level()
    return level is not None or forward_ad._current_level >= 0 or _looping.get()


_looping: ContextVar[bool] = ContextVar("looping", default=False)


def are_batched(xs: Iterable[OptionalTensor]) -> bool:
    """Whether a backward runs for many gradients at a time: in ``torch.func.vmap``, or by ``is_grads_batched=True``."""
    wrapped = torch._C._functorch
    return wrapped.maybe_current_level() is not None or any(
        x is not None and wrapped.is_legacy_batchedtensor(x) for x in xs
    )


@contextlib.contextmanager
def in_loops() -> Iterator[None]:
    """Go tensor by tensor in here, for the tensors of ``is_grads_batched=True``, which show nowhere else."""
    token = _looping.set(True)
    try:
        yield
    finally:
        _looping.reset(token)


def check_lengths(columns: Mapping[str, Sequence[Any] | None]) -> None:
    """Demand that lists have one length.

    Args:
        columns: lists by the names that the caller knows them by; ``None`` for one that is not given.

    Raises:
        ValueError: a list is longer or shorter than the first one.
    """
    (first, model), *rest = ((name, column) for name, column in columns.items() if column is not None)
    for name, column in rest:
        if len(column) != len(model):
            raise ValueError(f"`{name}` must have the length of `{first}`, {len(model)}; got {len(column)}")


def check_tensors(columns: Mapping[str, Sequence[Any] | None]) -> None:
    """Demand what the formulas are written for, as the kernels do for themselves.

    Args:
        columns: lists of one length, by the names that the caller knows them by; ``None`` for one that is not given.

    Raises:
        TypeError: something is no tensor, a sparse one, or one of integers.
        ValueError: tensors at one place differ in shape or device.
    """
    given = {name: column for name, column in columns.items() if column}
    if not given or torch.compiler.is_compiling():
        return
    first = next(iter(given))
    for name, column in given.items():
        for place, (x, model) in enumerate(zip(column, given[first], strict=True)):
            if not isinstance(x, Tensor):
                raise TypeError(f"`{name}[{place}]` must be a tensor; got {type(x).__name__}")
            if x.layout is not torch.strided:
                raise TypeError(f"`{name}[{place}]` must be a dense tensor; got layout {x.layout}")
            if not (x.is_floating_point() or x.is_complex()):
                raise TypeError(f"`{name}[{place}]` must be of a floating-point dtype; got {x.dtype}")
            where = f"`{name}[{place}]` must %s of `{first}[{place}]`"
            if x.shape != model.shape:
                raise ValueError(f"{where % 'have the shape'}, {tuple(model.shape)}; got {tuple(x.shape)}")
            if x.device != model.device:
                raise ValueError(f"{where % 'be on the device'}, {model.device}; got {x.device}")


def widened(xs: Sequence[Tensor]) -> list[Tensor]:
    """float16 and bfloat16 as float32, as the kernels compute; others as they are."""
    return [x.float() if x.dtype in _HALF else x for x in xs]


_HALF = (torch.float16, torch.bfloat16)


def _each(factor: Any, count: int) -> Sequence[Any]:
    if isinstance(factor, Tensor):
        return [factor.reshape(())] * count
    return [factor] * count if _is_number(factor) else factor


def _is_number(factor: Any) -> TypeGuard[float]:
    return not isinstance(factor, (Tensor, list, tuple))


def _kept(z: Tensor, x: Tensor) -> Tensor:
    """A result in its operand's dtype: a 0-d tensor of a wider one would widen a 0-d parameter."""
    return z if z.dtype == x.dtype else z.to(x.dtype)
