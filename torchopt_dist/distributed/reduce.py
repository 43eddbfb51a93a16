"""``[result], sizes`` → one result: the results of the workers, combined.

Results are trees of tensors or numbers, reduced leaf by leaf; dataclasses, and mappings and sequences that can be
changed, are trees, too, and the result is one of their class. A reducer may take the partitions' sizes as its second
argument, named ``sizes``; a mean weighted by them is the mean over the samples, however unevenly they were split.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, Protocol, TypeVar

import optree
import torch

from torchopt_dist.pytree._containers import flatten

__all__ = [
    "ReducerOfSizes",
    "check_reducer",
    "concatenate_reducer",
    "mean_reducer",
    "stack_reducer",
    "sum_reducer",
]

T = TypeVar("T")
Result = TypeVar("Result")
Reduced_co = TypeVar("Reduced_co", covariant=True)


class ReducerOfSizes(Protocol[Result, Reduced_co]):
    """A reducer that takes the partitions' sizes, too."""

    def __call__(self, results: list[Result], /, sizes: list[int]) -> Reduced_co:
        """Reduce the results, one a partition."""


def mean_reducer(results: Iterable[T], sizes: Sequence[int] | None = None) -> T:
    r"""The mean over the samples, :math:`\sum_i n_i r_i / \sum_i n_i`, leaf by leaf.

    Args:
        results: trees of one structure whose leaves are floating-point or complex tensors of one shape, or numbers.
        sizes: :math:`n_i`, the number of samples in each partition; ``None`` means equal ones.

    Raises:
        TypeError: a leaf is neither a tensor nor a number.
        ValueError: there is no result, or structures or shapes differ.
    """
    trees = list(results)
    weights = [1.0] * len(trees) if sizes is None else [float(size) for size in sizes]
    total = sum(weights)

    def mean(*leaves: torch.Tensor) -> torch.Tensor:
        stacked = _floating(torch.stack(leaves))
        if len(set(weights)) == 1:
            return stacked.mean(0)
        # Weights are whole numbers, exact where their quotients are not; a sum in half precision would lose digits.
        half = stacked.dtype in (torch.float16, torch.bfloat16)
        long = stacked.float() if half else stacked
        weight = torch.tensor(weights, dtype=long.dtype, device=long.device)
        mean = (long * weight.reshape((-1,) + (1,) * (long.ndim - 1))).sum(0) / total
        return mean.to(stacked.dtype)

    return _leafwise("mean_reducer", mean, trees)


def sum_reducer(results: Iterable[T]) -> T:
    """The sum of the results, leaf by leaf; arguments and errors as :func:`mean_reducer`."""
    return _leafwise("sum_reducer", lambda *leaves: torch.stack(leaves).sum(0), list(results))


def stack_reducer(results: Iterable[T]) -> T:
    """The results stacked along a new first dimension, leaf by leaf; errors as :func:`mean_reducer`."""
    return _leafwise("stack_reducer", lambda *leaves: torch.stack(leaves), list(results))


def concatenate_reducer(results: Iterable[T]) -> T:
    """The results concatenated along dimension 0, leaf by leaf; sizes along it may differ.

    Raises:
        TypeError: a leaf is neither a tensor nor a number.
        ValueError: there is no result, a leaf has no dimension, or structures or other dimensions differ.
    """

    def concatenate(*leaves: torch.Tensor) -> torch.Tensor:
        if any(leaf.ndim == 0 for leaf in leaves):
            raise ValueError("a result has no dimension to concatenate along: use stack_reducer")
        return torch.cat(leaves)

    return _leafwise("concatenate_reducer", concatenate, list(results))


REDUCERS = (mean_reducer, sum_reducer, stack_reducer, concatenate_reducer)
"""Those of this module; elsewhere they are mistakes."""


def _leafwise(name: str, function: Callable[..., torch.Tensor], trees: list[Any]) -> Any:
    if not trees:
        raise ValueError(f"{name} needs at least one result, got none")

    def reduce_part(path: tuple[Any, ...], *parts: Any) -> Any:
        where = "result" + "".join(f"[{key!r}]" for key in path)
        first = flatten(parts[0], is_leaf=_is_number)
        names = first.paths(where)
        if names == [where]:
            return _reduced(name, function, where, parts)
        columns = []
        for index, part in enumerate(parts):
            leaves, paths_in, _ = flatten(part, is_leaf=_is_number)
            paths = paths_in(where)
            if type(part) is not type(parts[0]) or set(paths) != set(names):
                raise ValueError(
                    f"{name} needs results of one structure: {where} is {type(parts[0]).__name__} with "
                    f"{names} in partition 0, and {type(part).__name__} with {paths} in partition {index}"
                )
            columns.append(dict(zip(paths, leaves, strict=True)))
        return first.rebuild(
            iter([_reduced(name, function, path, [c[path] for c in columns]) for path in names])
        )

    try:
        return optree.tree_map_with_path(reduce_part, *trees, none_is_leaf=True)
    except ValueError as error:
        if str(error).startswith(name):
            raise
        raise ValueError(f"{name} needs results of one structure: {error}") from error


def _reduced(
    name: str, function: Callable[..., torch.Tensor], where: str, leaves: Sequence[Any]
) -> torch.Tensor:
    for index, leaf in enumerate(leaves):
        if not _is_number(leaf):
            raise TypeError(
                f"{name} needs tensors or numbers, got {type(leaf).__name__} {leaf!r:.80} "
                f"in {where} of partition {index}"
            )
    device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
    tensors = [
        leaf if isinstance(leaf, torch.Tensor) else torch.tensor(leaf, device=device) for leaf in leaves
    ]
    try:
        return function(*tensors)
    except (RuntimeError, ValueError) as error:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(f"{name} cannot reduce {where}, of shapes {shapes}: {error}") from error


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, int, float, complex))


def _floating(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor
    return tensor.to(torch.get_default_dtype())


def _takes_sizes(reducer: Callable[..., Any]) -> bool:
    if type(reducer) is FunctionType and not vars(reducer):  # as its signature says, sooner
        code = reducer.__code__
        return "sizes" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    try:
        return "sizes" in inspect.signature(reducer).parameters
    except ValueError:  # a built-in without a signature
        return False


def check_reducer(reducer: Callable[..., Any] | None) -> Callable[[list[Any], list[int]], Any]:
    """Check a reducer and make it ``(results, sizes) → result``; without one the results stay a list.

    Raises :class:`TypeError` if it cannot be called, or, when it is called, returns ``None``.
    """
    if reducer is None:
        return lambda results, sizes: results
    if not callable(reducer):
        raise TypeError(f"reducer must be callable, got {type(reducer).__name__} {reducer!r}")
    takes_sizes = _takes_sizes(reducer)

    def reduce_checked(results: list[Any], sizes: list[int]) -> Any:
        reduced = reducer(results, sizes=sizes) if takes_sizes else reducer(results)
        if reduced is None:
            name = getattr(reducer, "__qualname__", repr(reducer))
            raise TypeError(f"reducer `{name}` must return the reduced result, got None")
        return reduced

    return reduce_checked
