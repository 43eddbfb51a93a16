"""All that a training is → a run of it, in which each example has a weight; here, or on another worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_dist.diff.adjoints import Adjoint
from torchopt_dist.diff.data_parallel import DataParallel
from torchopt_dist.diff.inner_loop import InnerLoopResult, inner_loop
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["Queries", "Training", "losses_of"]

Queries = Callable[[Any], Tensor]
"""A trained model → the losses that are asked about."""


@dataclass(frozen=True)
class Training:
    """A training whose examples can have weights, so that it can be run again with others.

    Its parts are those of :func:`~torchopt_dist.inner_loop`. A batch is a tensor of the numbers of its examples, and
    the loss gives one number for each of them, or for each token of each. A step's loss is the sum of these, times the
    weights, divided by how many there are; so weight 0 leaves an example out, and changes nothing else.

    Args:
        loss: ``loss(model, index)`` with the numbers of some examples → a tensor of shape (examples,), or (examples,
            tokens).
        optimizer: a gradient transformation, such as ``todist.adamw(lr=1e-3)``. A smooth one is easier to attribute:
            give Adam an ``eps_root``, such as 1e-6.
        model: the first model, which is not changed.
        batches: for each step the numbers of its examples, a tensor of integers with one dimension.
        names: a name for each example, or for each group; their numbers, if not given.
        mask: of shape (examples, tokens), for losses of tokens: which count. Padded tokens do not.
        groups: the number of the group of each example, of shape (examples,): there is then a weight a group.
        accumulate: in how many micro-batches a batch is taken; see :func:`~torchopt_dist.inner_loop`.
        parallel: one training on all ranks of a process group, for a model that is large: each rank takes its part of
            each batch. All ranks then call ``attribute`` and ``validate`` with the same arguments, and get the same.
        seed: that of the random numbers of steps, the same in each run.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no batch, a batch is no vector of numbers, or sizes do not go together.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> x, y = torch.randn(8, 2), torch.randn(8)
        >>> training = todist.attribution.Training(
        ...     lambda model, index: (model(x[index]).squeeze(1) - y[index]) ** 2,
        ...     todist.sgd(lr=0.1),
        ...     torch.nn.Linear(2, 1),
        ...     torch.arange(8).split(4) * 3,
        ... )
        >>> training.examples
        8
    """

    loss: Callable[[Any, Tensor], Tensor]
    optimizer: GradientTransformation
    model: nn.Module
    batches: Sequence[Tensor]
    names: Sequence[str] | None = None
    mask: Tensor | None = None
    groups: Tensor | None = None
    accumulate: int = 1
    seed: int = 0
    parallel: DataParallel | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"`model` must be a torch.nn.Module, got {type(self.model).__name__}")
        if not callable(self.loss):
            raise TypeError(
                f"`loss` must be a function of a model and numbers of examples, got {type(self.loss).__name__}"
            )
        if self.parallel is not None and not isinstance(self.parallel, DataParallel):
            raise TypeError(f"`parallel` must be a todist.DataParallel, got {type(self.parallel).__name__}")
        if not len(self.batches):
            raise ValueError("`batches` must have a batch for each step, got none")
        for number, batch in enumerate(self.batches):
            if (
                not isinstance(batch, Tensor)
                or batch.ndim != 1
                or batch.dtype.is_floating_point
                or not len(batch)
            ):
                shape = (
                    f"{batch.dtype} of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else "none"
                )
                raise ValueError(
                    "`batches` must be tensors of integers with one dimension, the numbers of examples, got "
                    f"{type(batch).__name__} ({shape}) for step {number}"
                )
        for name, kind in (("mask", 2), ("groups", 1)):
            given = getattr(self, name)
            if given is not None and (not isinstance(given, Tensor) or given.ndim != kind):
                shape = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
                raise ValueError(f"`{name}` must be a tensor of {kind} dimension(s), got {shape}")
        highest = max(int(batch.max()) for batch in self.batches)
        if highest >= self.examples or min(int(batch.min()) for batch in self.batches) < 0:
            raise ValueError(
                f"`batches` must have numbers of examples from 0 to {self.examples - 1}, got up to {highest}: "
                "`mask`, `groups` or `names` say how many examples there are"
            )
        if self.mask is not None and self.groups is not None and len(self.mask) != len(self.groups):
            raise ValueError(
                f"`mask` and `groups` must be of the same examples, got {len(self.mask)} and {len(self.groups)}"
            )
        if self.names is not None and len(self.names) != self.units:
            raise ValueError(f"`names` must have {self.units} names, one a unit, got {len(self.names)}")

    @cached_property
    def examples(self) -> int:
        """How many examples there are."""
        for given in (self.mask, self.groups):
            if given is not None:
                return len(given)
        if self.names is not None:
            return len(self.names)
        return 1 + max(int(batch.max()) for batch in self.batches)

    @cached_property
    def units(self) -> int:
        """How many examples have a weight, or how many groups, if there are groups."""
        return self.examples if self.groups is None else 1 + int(self.groups.max())

    def weights(self, *, tokens: bool = False) -> Tensor:
        """A weight 1 for each example or group, or for each token of each example."""
        if tokens and (self.mask is None or self.groups is not None):
            raise ValueError(
                "`tokens` must be False without a `mask` of the training's tokens, and with `groups`"
            )
        shape = tuple(self.mask.shape) if tokens and self.mask is not None else (self.units,)
        like = next(self.model.parameters())
        dtype = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
        return torch.ones(shape, dtype=dtype, device=like.device)

    def run(self, weights: Tensor, adjoint: Adjoint, **options: Any) -> InnerLoopResult:
        """Train with these weights.

        Args:
            weights: as :meth:`weights`.
            adjoint: how gradients of the weights are taken.
            options: further ones of :func:`~torchopt_dist.inner_loop`.
        """

        def loss(model: Any, batch: tuple[Tensor, int]) -> Any:
            index, number = batch
            total, count = self._sum(model, index, weights)
            return (total, count) if keep is None else ((total, count), keep(model, number))

        keep = options.pop("keep", None)
        batches = [(index, number) for number, index in enumerate(self._own_batches())]
        return inner_loop(
            loss,
            self.optimizer,
            self.model,
            batches,
            meta=weights,
            adjoint=adjoint,
            seed=self.seed,
            accumulate=self.accumulate,
            parallel=self.parallel,
            has_aux=keep is not None,
            **options,
        )

    def count(self) -> int:
        """By how many numbers the loss of all examples is divided."""
        return self.examples if self.mask is None else int(self.mask.sum())

    def _own_batches(self) -> Sequence[Tensor]:
        """The batches, or this rank's part of each."""
        if self.parallel is None:
            return self.batches
        ranks, smallest = self.parallel.ranks, min(map(len, self.batches))
        if smallest < ranks.size:
            raise ValueError(
                f"`batches` must have an example for each of the {ranks.size} ranks, got one of {smallest}"
            )
        return [index[ranks.rank :: ranks.size] for index in self.batches]

    def _sum(self, model: Any, index: Tensor, weights: Tensor) -> tuple[Tensor, Any]:
        """The weighted losses of some examples, and how many there are."""
        each = self.loss(model, index)
        if not isinstance(each, Tensor) or each.ndim not in (1, 2) or len(each) != len(index):
            got = f"shape {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
            raise ValueError(
                "`loss` must return a number for each example, or for each token of each, of shape "
                f"({len(index)},) or ({len(index)}, tokens), got {got}"
            )
        at = index if self.groups is None else self.groups.to(index.device)[index]
        own = weights[at.to(weights.device)]
        if self.mask is None:
            if each.ndim == 2:
                each = each.mean(1)
            return (own * each).sum(), len(index)
        counts = self.mask.to(each.device)[index.to(each.device)]
        if each.shape != counts.shape:
            raise ValueError(
                f"`mask` must have the shape of the losses of tokens, {tuple(each.shape)} for this batch, got "
                f"{tuple(counts.shape)}"
            )
        if own.ndim == 1:
            own = own[:, None]
        return (own * torch.where(counts, each, 0)).sum(), counts.sum()


def losses_of(queries: Queries, model: Any) -> Tensor:
    """What the queries say of a model, a vector."""
    found = queries(model)
    if not isinstance(found, Tensor) or found.ndim > 1 or not found.numel():
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"`queries` must return a loss for each query, a vector, got {got}")
    return found.reshape(-1)
