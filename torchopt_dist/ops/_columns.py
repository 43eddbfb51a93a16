"""Lists of one length, whose tensors at the same index belong together → validated, joined, split, in portions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.uncompiled import is_traced

__all__ = [
    "PLAIN",
    "Columns",
    "are_alike",
    "as_complex",
    "as_real",
    "check_lengths",
    "check_tensors",
    "flatten",
    "join",
    "lie_alike",
    "narrowed",
    "overwrite_by",
    "pick",
    "portions",
    "present",
    "put",
    "split",
    "unflatten",
    "widened",
]

T = TypeVar("T")

Columns: TypeAlias = Sequence[list[Tensor] | None]
"""Lists of one length, whose tensors at one place belong together; ``None`` where there is no such list."""


_HALF = (torch.float16, torch.bfloat16)
PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""The types of tensors whose operations do nothing else."""


def present(leaves: Sequence[OptionalTensor]) -> list[int]:
    """The indices of a list at which there is a tensor and not ``None``."""
    return [place for place, leaf in enumerate(leaves) if leaf is not None]


def pick(leaves: Sequence[OptionalTensor], places: Sequence[int]) -> list[Tensor]:
    """The tensors at these indices.

    Raises:
        ValueError: a tensor is ``None``.
    """
    picked = [leaves[place] for place in places]
    for leaf in picked:
        if leaf is None:
            raise ValueError("a leaf has a gradient, but its parameter or its state is None")
    return picked  # type: ignore[return-value]


def put(
    leaves: Sequence[OptionalTensor], places: Sequence[int], new: Sequence[OptionalTensor]
) -> list[OptionalTensor]:
    """A copy of the list with new tensors at these indices."""
    out = list(leaves)
    for place, tensor in zip(places, new, strict=True):
        out[place] = tensor
    return out


def join(columns: Iterable[Sequence[T]]) -> list[T]:
    """The members of all columns, one column after another, in one list."""
    return list(chain.from_iterable(columns))


def split(tensors: Sequence[Any], count: int) -> list[list[Any]]:
    """``count`` columns of one length: the inverse of :func:`join`."""
    length = len(tensors) // count
    return [list(tensors[place * length : (place + 1) * length]) for place in range(count)]


def flatten(columns: Columns) -> tuple[tuple[bool, ...], list[Tensor]]:
    """Which columns are given, and the tensors of those, one column after another."""
    there = tuple(column is not None for column in columns)
    return there, join(column for column in columns if column is not None)


def unflatten(tensors: Sequence[Tensor], there: Sequence[bool]) -> list[list[Tensor] | None]:
    """The columns again: the inverse of :func:`flatten`."""
    columns = iter(split(tensors, sum(there)) if tensors else [[]] * sum(there))
    return [next(columns) if here else None for here in there]


def check_lengths(columns: Mapping[str, Sequence[Any] | None]) -> None:
    """Validate that lists have one length.

    Args:
        columns: the lists by their names for errors; ``None`` for a list that is not given.

    Raises:
        ValueError: a list is longer or shorter than the first one.
    """
    (first, model), *rest = ((name, column) for name, column in columns.items() if column is not None)
    for name, column in rest:
        if len(column) != len(model):
            raise ValueError(f"`{name}` must have the length of `{first}`, {len(model)}; got {len(column)}")


def are_alike(columns: Sequence[Sequence[Any]]) -> bool:
    """Whether :func:`check_tensors` has nothing to say, as far as that is seen at once: the tensors are of one device.

    A compiler does not look at them.
    """
    if is_traced():
        return True
    model, tensors = columns[0], join(columns)
    if not {*map(type, tensors)} <= PLAIN or {x.layout for x in tensors} != {torch.strided}:
        return False
    shapes = [x.shape for x in model]
    return (
        len({x.device for x in tensors}) == 1
        and all([x.shape for x in column] == shapes for column in columns[1:])
        and all(dtype.is_floating_point or dtype.is_complex for dtype in {x.dtype for x in tensors})
    )


def check_tensors(columns: Mapping[str, Sequence[Any] | None]) -> None:
    """Validate the tensors for a formula; the kernels validate theirs themselves.

    Args:
        columns: lists of one length by their names for errors; ``None`` for a list that is not given.

    Raises:
        TypeError: an entry is not a tensor, is sparse, or has integers.
        ValueError: tensors at the same index differ in shape or device.
    """
    given = {name: column for name, column in columns.items() if column}
    if not given or are_alike(list(given.values())):
        return
    first = next(iter(given))
    for name, column in given.items():
        for place, (x, model) in enumerate(zip(column, given[first], strict=True)):
            if not isinstance(x, Tensor):
                raise TypeError(f"`{name}[{place}]` must be a tensor; got {type(x).__name__}")
            if x.layout is not torch.strided:
                raise TypeError(
                    f"`{name}[{place}]` must be a dense tensor; got layout {x.layout}: make it one by "
                    "`tensor.to_dense()`, or the module that it comes from with `sparse=False`"
                )
            if not (x.is_floating_point() or x.is_complex()):
                raise TypeError(f"`{name}[{place}]` must be of a floating-point dtype; got {x.dtype}")
            where = f"`{name}[{place}]` must %s of `{first}[{place}]`"
            if x.shape != model.shape:
                raise ValueError(f"{where % 'have the shape'}, {tuple(model.shape)}; got {tuple(x.shape)}")
            if x.device != model.device:
                raise ValueError(f"{where % 'be on the device'}, {model.device}; got {x.device}")


def as_real(xs: Sequence[Tensor]) -> list[Tensor]:
    """Complex tensors seen as real ones with a last dimension of two, in the same memory; others as they are.

    A lazily conjugated one, such as a gradient through ``W.mH``, is copied.
    """
    return [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in xs]


def as_complex(xs: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of :func:`as_real`, for the places at which ``like`` is complex."""
    return [
        torch.view_as_complex(x if x.stride(-1) == 1 else x.contiguous()) if y.is_complex() else x
        for x, y in zip(xs, like, strict=True)
    ]


def widened(xs: Sequence[Tensor]) -> list[Tensor]:
    """float16 and bfloat16 as float32, as the kernels compute; others as they are."""
    return [x.float() if x.dtype in _HALF else x for x in xs]


def narrowed(xs: Sequence[Tensor], like: Sequence[Tensor], *, inplace: bool = False) -> list[Tensor]:
    """The inverse of :func:`widened`, to the dtypes of ``like``; if ``inplace``, into the tensors of ``like``."""
    return [
        x if x.dtype == y.dtype else y.copy_(x) if inplace else x.to(y.dtype)
        for x, y in zip(xs, like, strict=True)
    ]


def overwrite_by(
    op: Callable[..., Sequence[list[Tensor]]],
    grads: list[Tensor],
    state: Columns,
    params: list[Tensor],
    *,
    fused: bool | None,
    **numbers: Any,
) -> None:
    """Make a step of an op, and write its results over the parameters and the state; a formula's in portions."""
    for part in portions(params) if fused is False else [slice(None)]:
        p, g, *fields = (column if column is None else column[part] for column in (params, grads, *state))
        made = op(g, *fields, p, fused=fused, inplace=True, **numbers)
        old = [column for column in (p, *fields) if column is not None]
        for x, y in zip(join(old), join(made), strict=True):
            if x is not y:
                x.copy_(y)


def lie_alike(columns: Sequence[Sequence[Tensor]]) -> bool:
    """Whether the tensors at each place are of one shape and dtype and lie in memory in one order, without gaps.

    ``torch.optim``'s fused steps rely on that without checking it.
    """
    shapes, dtypes = [x.shape for x in columns[0]], [x.dtype for x in columns[0]]
    for column in columns[1:]:
        if [x.shape for x in column] != shapes or [x.dtype for x in column] != dtypes:
            return False
    if all(all(map(Tensor.is_contiguous, column)) for column in columns):
        return True
    return all(
        len({x.stride() for x in row}) == 1
        and torch.empty_like(row[0], device="meta").stride() == row[0].stride()
        for row in zip(*columns, strict=True)
    )


def portions(xs: Sequence[Tensor], nbytes: int = 1 << 19) -> Iterator[slice]:
    """Cut a list into slices of about ``nbytes``, so that a formula's next pass finds them in the cache."""
    start = size = 0
    for end, x in enumerate(xs, 1):
        size += x.numel() * x.element_size()
        if size >= nbytes or end == len(xs):
            yield slice(start, end)
            start, size = end, 0
