"""``args, kwargs`` → ``[Partition(worker, args, kwargs, size)]``: which worker gets which part of the arguments.

A partitioner is a worker's rank or name, or a function ``(*args, **kwargs) -> [(worker, args, kwargs)]``. Tensors and
arrays of numpy are split; modules, parameters, 0-dimensional tensors, what ``replicated`` marks, and everything else go
to every worker whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import nn

from torchopt_dist.core.types import Args, KwArgs
from torchopt_dist.distributed.balance import Balance, check_balance, check_workers, ranges, ranks_of
from torchopt_dist.distributed.group.resident import Shards, part_of
from torchopt_dist.distributed.messages.stacked import Rows
from torchopt_dist.distributed.reduce import REDUCERS
from torchopt_dist.distributed.world import get_worker_id
from torchopt_dist.nn.module_state import StateHolder
from torchopt_dist.pytree._containers import flatten, lists_beside, tensors_hidden_in

__all__ = [
    "Partition",
    "PartitionFunction",
    "Partitioner",
    "TensorDimensionPartitioner",
    "batch_partitioner",
    "dim_partitioner",
    "partition",
    "replicated",
    "tasks",
]

T = TypeVar("T")


class _Triplet(NamedTuple):
    worker: int | str
    args: Args
    kwargs: KwArgs


class Partition(_Triplet):
    """One task: the triplet ``(worker, args, kwargs)``, and its size.

    Args:
        worker: rank or name of the worker that runs it.
        args: positional arguments of the function there.
        kwargs: keyword arguments.
        size: how many samples it holds; reducers weight its result by this number.
        movable: whether another worker may run it if this one is lost; true if the caller has not chosen the worker.
    """

    size: int
    movable: bool
    row: tuple[Rows, int] | None
    """The batch of which it is one index, and the index, if a partitioner of this module has split it so."""

    def __new__(
        cls,
        worker: int | str,
        args: Args | None,
        kwargs: KwArgs | None,
        size: int = 1,
        movable: bool = False,
    ) -> Self:
        """Make the triplet; ``None`` stands for no arguments."""
        self = tuple.__new__(cls, (worker, args or (), kwargs or {}))
        self.size = size
        self.movable = movable
        self.row = None
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (*self, self.size, self.movable)


PartitionFunction: TypeAlias = Callable[..., Sequence[tuple[Any, Any, Any]]]
Partitioner: TypeAlias = int | str | PartitionFunction


@dataclass(frozen=True)
class _Replicated:
    value: Any


def replicated(value: T) -> T:
    """Mark an argument that every worker gets whole, though it looks like a batch.

    Args:
        value: any object, such as a tensor or a tree of tensors.

    Returns:
        The marked value, to be passed to a parallelized function, which receives ``value`` itself.

    Example::

        loss = parallel_loss(todist.replicated(class_weights), batch)
    """
    return cast("T", _Replicated(value))


def partition(
    partitioner: Partitioner | None, args: Args, kwargs: KwArgs, *, as_rows: bool = False
) -> list[Partition]:
    """Split the arguments of a call into at least one partition; each one's worker is a rank.

    With ``as_rows``, one that is a row of a batch may be that alone, without arguments of its own.

    Raises :class:`TypeError` if the partitioner is of no known kind, or its function returns something else than
    triplets, and :class:`ValueError` if it returns no triplet, or one for an unknown worker.
    """
    if type(partitioner) is not int:
        check_partitioner(partitioner)
    if partitioner is None:
        partitioner = batch_partitioner
    if not callable(partitioner):
        return [Partition(_rank_of(partitioner), args and unwrap(args), kwargs and unwrap(kwargs))]
    if type(partitioner) is TensorDimensionPartitioner:
        return partitioner.parts(args, kwargs, as_rows=as_rows)
    triplets = partitioner(*args, **kwargs)
    if not isinstance(triplets, Sequence) or isinstance(triplets, (str, tuple)):
        raise TypeError(
            f"partitioner {_name(partitioner)} must return a list of triplets (worker, args, kwargs), "
            f"got {type(triplets).__name__}"
        )
    if not triplets:
        raise ValueError(f"partitioner {_name(partitioner)} returned no triplet: there is nothing to call")
    return [_checked(partitioner, index, triplet) for index, triplet in enumerate(triplets)]


def _rank_of(worker: int | str) -> int:
    try:
        return get_worker_id(worker)
    except ValueError as error:
        if worker in _PARTITIONERS:
            raise ValueError(f"{error}: did you mean `todist.{worker}`, without quotation marks?") from None
        raise


def check_partitioner(partitioner: Partitioner | None) -> None:
    """Raise :class:`TypeError` unless it is a rank, a name, a function or ``None``."""
    if isinstance(partitioner, bool) or not (
        partitioner is None or isinstance(partitioner, (Integral, str)) or callable(partitioner)
    ):
        raise TypeError(
            "partitioner must be a worker's rank or name, or a function returning triplets "
            f"(worker, args, kwargs), got {type(partitioner).__name__} {partitioner!r}"
        )
    given: object = partitioner
    for reducer in REDUCERS:
        if given is reducer:
            name = reducer.__name__
            raise TypeError(f"partitioner must not be a reducer, got {name}: write `reducer=todist.{name}`")
    if given is dim_partitioner:
        raise TypeError("partitioner must be what dim_partitioner returns: write `todist.dim_partitioner(0)`")


def _checked(partitioner: PartitionFunction, index: int, triplet: Any) -> Partition:
    def wrong(rule: str, got: object) -> TypeError:
        return TypeError(
            f"partitioner {_name(partitioner)} must return triplets (worker, args, kwargs); item {index}: {rule}, "
            f"got {type(got).__name__} {got!r:.80}"
        )

    if not isinstance(triplet, tuple) or len(triplet) != 3:
        raise wrong("must be a tuple of three", triplet)
    worker, args, kwargs = triplet
    if worker is None:
        raise wrong("worker must be a rank or a name", worker)
    if not isinstance(args, (tuple, list, type(None))):
        raise wrong("args must be a tuple or None", args)
    if not isinstance(kwargs, (dict, type(None))):
        raise wrong("kwargs must be a dictionary or None", kwargs)
    try:
        rank = get_worker_id(worker)
    except (TypeError, ValueError) as error:
        raise type(error)(f"partitioner {_name(partitioner)}, item {index}: {error}") from None
    size, movable = getattr(triplet, "size", 1), getattr(triplet, "movable", False)
    return Partition(rank, unwrap(tuple(args or ())), unwrap(kwargs or {}), size, movable)


def _name(function: Any) -> str:
    return f"`{getattr(function, '__qualname__', function)}`"


_PLAIN = (torch.Tensor, nn.Module, str, bytes, int, float, type(None))
_Array: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"


def unwrap(tree: Any) -> Any:
    """Replace each mark that ``replicated`` has made in a tree of arguments by its value."""
    for part in tree.values() if type(tree) is dict else tree:
        if not isinstance(part, _PLAIN):
            break
    else:
        return tree  # nothing to look into; to take a tree apart takes as long as to send it
    flat = flatten(tree, is_leaf=_is_leaf)
    if not any(isinstance(leaf, _Replicated) for leaf in flat.leaves):
        return tree
    return flat.rebuild(leaf.value if isinstance(leaf, _Replicated) else leaf for leaf in flat.leaves)


class TensorDimensionPartitioner:
    """Split every tensor among the arguments along one dimension, evenly over the workers or by their speed.

    Even sizes differ by at most one, and the parts keep their order. Arrays of numpy are split as tensors are, and an
    exclusive task without the dimension gets ``array[index]``. Tensors and arrays may sit anywhere in a tree of tuples,
    dictionaries, named tuples and other nodes that ``optree`` knows, in dataclasses, and in mappings and sequences of
    other classes, such as ``UserDict``; parts are of the same classes.

    Args:
        dim: the dimension to split; negative ones count from the last.
        exclusive: every index is a task of its own, instead of one part for each worker.
        keepdim: whether the tensors of an exclusive task keep the dimension, with size 1. Parts that are not exclusive
            always keep it.
        workers: ranks or names of the workers to use, in this order; ``None`` means all.
        balance: gives faster workers more indices; ``None`` splits evenly.

    Raises:
        TypeError: ``dim`` is no integer, ``balance`` no :class:`Balance`, or ``workers`` no sequence of ranks and
            names; at the call: an object that cannot be split holds a tensor or an array that looks like a part of the
            batch, or a list of numbers or texts is as long as the batch.
        ValueError: at the call: no tensor to split, too few dimensions, sizes that differ, a size of 0.
    """

    def __init__(
        self,
        dim: int,
        *,
        exclusive: bool = False,
        keepdim: bool = False,
        workers: Sequence[int | str] | None = None,
        balance: Balance | None = None,
    ) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"dim must be an integer, got {type(dim).__name__} {dim!r}")
        check_workers(workers)
        check_balance(balance)
        self.dim = dim
        for name, value in (("exclusive", exclusive), ("keepdim", keepdim)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {type(value).__name__} {value!r}")
        self.exclusive = exclusive
        self.keepdim = keepdim
        self.workers = None if workers is None else tuple(workers)
        self.balance = balance

    def __call__(self, *args: Any, **kwargs: Any) -> list[Partition]:
        """Split ``args`` and ``kwargs``; the result is what ``partition`` makes a call of."""
        return self.parts(args, kwargs, marked=True)

    def parts(
        self, args: Args, kwargs: KwArgs, *, marked: bool = False, as_rows: bool = False
    ) -> list[Partition]:
        """The same for a call; ``marked``: what ``replicated`` has marked stays so for who splits further."""
        if not (args or kwargs):
            raise ValueError(
                "no tensor to split, as there are no arguments: give the function some, or `partitioner=` a "
                "worker's rank or name; a partitioner such as `todist.tasks` is passed on without parentheses, "
                "`todist.parallelize(todist.tasks)`"
            )
        ranks = ranks_of(self.workers)
        leaves, paths, rebuild = flatten((args, kwargs), is_leaf=_is_leaf)
        splittable = [index for index, leaf in enumerate(leaves) if _is_splittable(leaf)]
        size = self._common_size(leaves, splittable, paths)
        if size > 1 and not all(map(_is_known, leaves)):
            others = [
                (path, leaf) for path, leaf in zip(paths(""), leaves, strict=True) if not _is_known(leaf)
            ]
            self._check_whole((args, kwargs), others, size)
        if not marked:
            leaves = [leaf.value if isinstance(leaf, _Replicated) else leaf for leaf in leaves]
        are_rows = self.exclusive and not self.keepdim and not marked
        rows, parts = Rows(leaves, splittable, self.dim, rebuild), []
        as_rows = as_rows and are_rows and rows.are_plain()
        for worker, start, stop in ranges(size, ranks, self.balance, exclusive=self.exclusive):
            if as_rows:
                parts.append(Partition(worker, None, None, 1, self.workers is None))
                parts[-1].row = rows, start
                continue
            part = list(leaves)
            for index in splittable:
                part[index] = self._take(leaves[index], start, stop)
            part_args, part_kwargs = rebuild(iter(part))
            parts.append(Partition(worker, part_args, part_kwargs, stop - start, self.workers is None))
            parts[-1].row = (rows, start) if are_rows else None
        return parts

    def _take(self, tensor: _Array | Shards, start: int, stop: int) -> Any:
        if isinstance(tensor, Shards):
            if type(self) is not TensorDimensionPartitioner:
                raise TypeError(
                    f"{type(self).__name__}, a subclass of TensorDimensionPartitioner, must not split what `put` has "
                    f"split, as it may take other indices, got {tensor!r}: give the call the partitioner of `put`"
                )
            return part_of(tensor, start, stop, self.dim, self.exclusive and not self.keepdim)
        if isinstance(tensor, np.ndarray):
            front = (slice(None),) * (self.dim % tensor.ndim)
            return tensor[(*front, start if self.exclusive and not self.keepdim else slice(start, stop))]
        if self.exclusive and not self.keepdim:
            return tensor.select(self.dim, start)
        return tensor.narrow(self.dim, start, stop - start)

    def _check_whole(self, arguments: tuple[Args, KwArgs], others: list[tuple[str, Any]], size: int) -> None:
        """Raise :class:`TypeError` if one of the ``others``, which go to every worker whole, looks like a batch."""
        for path, leaf in others:
            if callable(leaf):
                continue
            for name, tensor in tensors_hidden_in(leaf):
                if -tensor.ndim <= self.dim < tensor.ndim and tensor.shape[self.dim] == size:
                    it = f"its `{name[1:]}`" if name else "it"
                    raise TypeError(
                        f"{_argument(path)} is a {type(leaf).__qualname__}, which cannot be split, but {it} has size "
                        f"{size} along dim={self.dim}, as the batch has: `todist.replicated(x)` marks an object that "
                        "every worker gets whole; an array of numpy, a dataclass, a mapping, a list and a class that "
                        "is registered with optree are split"
                    )
        for path in lists_beside(arguments, _is_splittable, size) if self.dim == 0 else ():
            raise TypeError(
                f"{_argument(path)} is a list of {size} items, which is not split, and the batch has size {size} along "
                "dim=0: pass a tensor or an array of numpy, which are split; `todist.replicated(x)` marks a list that "
                "every worker gets whole"
            )

    def _common_size(
        self, leaves: list[Any], splittable: list[int], paths: Callable[[str], list[str]]
    ) -> int:
        def where(index: int) -> str:
            return _argument(paths("")[index])

        sizes: dict[int, int] = {}
        for index in splittable:
            tensor = leaves[index]
            if isinstance(tensor, Shards):
                sizes[index] = tensor.size
                continue
            if not -tensor.ndim <= self.dim < tensor.ndim:
                raise ValueError(
                    f"cannot split {where(index)} along dim={self.dim}: its shape is {tuple(tensor.shape)}; "
                    "`todist.replicated(x)` marks a tensor that every worker gets whole"
                )
            sizes[index] = tensor.shape[self.dim]
        if not sizes:
            raise ValueError(
                "no tensor to split among the arguments, nor an array of numpy (modules, parameters, 0-dimensional "
                "tensors and lists of numbers go to every worker whole): give `partitioner=` a worker's rank or name, "
                "or a function returning triplets"
            )
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{where(index)} has {size}" for index, size in sizes.items())
            raise ValueError(
                f"tensors must have one size along dim={self.dim}, but {listed}; "
                "`todist.replicated(x)` marks a tensor that every worker gets whole"
            )
        first, size = next(iter(sizes.items()))
        if size == 0:
            raise ValueError(f"empty batch: {where(first)} has size 0 along dim={self.dim}")
        return size

    def __repr__(self) -> str:
        workers = "" if self.workers is None else f", workers={list(self.workers)}"
        balance = "" if self.balance is None else f", balance={self.balance}"
        options = f"exclusive={self.exclusive}, keepdim={self.keepdim}{workers}{balance}"
        return f"{type(self).__name__}({self.dim}, {options})"


_STATEFUL = (torch.Tensor, StateHolder, torch.optim.Optimizer)


def _is_leaf(leaf: Any) -> bool:
    return isinstance(leaf, (_Replicated, nn.Module, np.ndarray))


def _is_splittable(leaf: Any) -> bool:
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        return leaf.ndim > 0 and not isinstance(leaf, nn.Parameter)
    return isinstance(leaf, Shards)


def _is_known(leaf: Any) -> bool:
    """Whether it is split, or nobody takes it for a batch."""
    return isinstance(leaf, (_Replicated, np.ndarray, nn.Module, Shards, *_STATEFUL))


def _argument(path: str) -> str:
    """``[0][1]['x']``, a path in ``(args, kwargs)``, as ``args[1]['x']``."""
    return ("args" if path.startswith("[0]") else "kwargs") + path[3:]


def dim_partitioner(
    dim: int = 0,
    *,
    exclusive: bool = False,
    keepdim: bool = True,
    workers: Sequence[int | str] | None = None,
    balance: Balance | None = None,
) -> PartitionFunction:
    """A partitioner that splits tensors along ``dim``; see :class:`TensorDimensionPartitioner`.

    ``dim_partitioner(0, exclusive=True, keepdim=False)``, which is :data:`tasks`, splits a batch of shape ``(T, B, *)``
    into ``T`` tasks of shape ``(B, *)``.
    """
    return TensorDimensionPartitioner(
        dim, exclusive=exclusive, keepdim=keepdim, workers=workers, balance=balance
    )


batch_partitioner: PartitionFunction = dim_partitioner(dim=0, keepdim=True)
"""One part of the batch, along dimension 0, for each worker."""
tasks: PartitionFunction = dim_partitioner(dim=0, exclusive=True, keepdim=False)
"""One task for each index of dimension 0, without that dimension: ``(T, B, *)`` is T tasks of ``(B, *)``."""
_PARTITIONERS: dict[str, PartitionFunction] = {"tasks": tasks, "batch_partitioner": batch_partitioner}
