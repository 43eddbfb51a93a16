"""Scores → whether they tell what trainings without some examples give, which are made on all workers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.arguments.numbers import integer
from torchopt_dist.attribution import _safetensors
from torchopt_dist.attribution.result import Attribution
from torchopt_dist.attribution.scores import workers
from torchopt_dist.attribution.training import Queries, Training, losses_of
from torchopt_dist.diff.adjoints import FirstOrder
from torchopt_dist.distributed.map import map as map_on_workers

__all__ = ["Scores", "Validation", "counterfactual", "metasmoothness", "validate"]

Scores = Attribution | Tensor | Mapping[str, Attribution | Tensor]
"""Of one method, or of several by name; a tensor has the shape of :attr:`Attribution.scores`."""
_A_ROUND = 4
"""So many trainings a worker makes between two writes of the file that goes on."""


@dataclass(frozen=True)
class Validation:
    """How well scores predict trainings; what :func:`~torchopt_dist.attribution.validate` returns."""

    correlations: dict[str, Tensor]
    """For each method, of shape (queries,): the rank correlation of predicted and real losses, from -1 to 1."""
    losses: Tensor
    """The real ones, of shape (trainings, queries)."""
    subsets: Tensor
    """Of shape (trainings, examples): 1 where an example took part."""

    @property
    def means(self) -> dict[str, float]:
        """For each method, the mean over the queries: the linear datamodeling score."""
        return {name: found.mean().item() for name, found in self.correlations.items()}

    def table(self) -> str:
        """A text with a line for each method: the mean, the lowest and the highest of the queries' correlations."""
        width = max(map(len, [*self.correlations, "method"]))
        lines = [f"{'method':<{width}}  mean    lowest  highest"]
        lines += [
            f"{name:<{width}}  {found.mean():+.3f}  {found.min():+.3f}  {found.max():+.3f}"
            for name, found in self.correlations.items()
        ]
        return "\n".join(lines)


def validate(
    training: Training,
    queries: Queries,
    scores: Scores,
    *,
    left_out: float = 0.5,
    retrains: int = 32,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
) -> Validation:
    """Train again without some examples, chosen at random, and compare what the scores have predicted.

    The mean of the correlations is the linear datamodeling score (Park et al. 2023, https://arxiv.org/abs/2303.14186):
    1 says that scores put the trainings into the order that they really have, 0 that they know nothing of it. With an
    integer ``left_out`` it is leave-``k``-out. Trainings are spread over the workers, where they run.

    Args:
        training: as for :func:`~torchopt_dist.attribute`.
        queries: likewise.
        scores: an attribution, a tensor of scores, or several by the names of methods.
        left_out: which part of the examples, or of the groups, each training leaves out; or how many.
        retrains: how many trainings are made.
        seed: the examples are chosen by it.
        folder: where to keep the results of trainings on the way. A call with the same arguments, in another process
            as well, goes on from there.

    Returns:
        The correlation of each query, for each method.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: scores have another shape, a number is out of its range, or the folder is that of another
            validation.

    Example:
        >>> checked = todist.attribution.validate(training, queries, found)  # doctest: +SKIP
        >>> checked.means  # doctest: +SKIP
        {'exact': 0.98}
    """
    tables = _tables(training, scores)
    units = training.units
    if isinstance(left_out, bool) or not isinstance(left_out, (int, float)):
        raise TypeError(f"`left_out` must be a part or a number of examples, got {type(left_out).__name__}")
    number = left_out if isinstance(left_out, int) else round(left_out * units)
    if not 1 <= number < units or (isinstance(left_out, float) and not 0 < left_out < 1):
        raise ValueError(
            f"`left_out` must leave out at least 1 of the {units} examples and not all, got {left_out!r}, which is "
            f"{number}"
        )
    if integer("retrains", retrains) < 2:
        raise ValueError(f"`retrains` must be at least 2, got {retrains}: one training has no order")
    generator = torch.Generator().manual_seed(seed)
    subsets = torch.stack(
        [(torch.rand(units, generator=generator).argsort() >= number).float() for _ in range(retrains)]
    )
    losses = _trained_without(training, queries, subsets, folder)
    found = {name: _correlations(subsets.to(table) @ table.T, losses) for name, table in tables.items()}
    return Validation(found, losses, subsets)


def counterfactual(
    training: Training, queries: Queries, scores: Scores, k: int, *, seed: int = 0
) -> dict[str, Tensor]:
    """Train again without the ``k`` examples that help a query most, for each query.

    Args:
        training: as for :func:`~torchopt_dist.attribute`.
        queries: likewise.
        scores: as for :func:`validate`.
        k: how many examples are left out.
        seed: the examples for ``"random"`` are chosen by it.

    Returns:
        For each method, and for ``"random"``, of shape (queries,): by how much the query's loss has grown without its
        examples. The better scores are, the more it grows.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: scores have another shape, or ``k`` is not between 1 and the number of examples.
    """
    tables = _tables(training, scores)
    units, count = training.units, len(next(iter(tables.values())))
    if not 1 <= integer("k", k) < units:
        raise ValueError(f"`k` must be at least 1 and below the number of examples, {units}, got {k}")
    generator = torch.Generator().manual_seed(seed)
    named = {**tables, "random": torch.rand(count, units, generator=generator)}
    masks = [torch.ones(1, units)]
    for table in named.values():
        masks.append(torch.ones(count, units).scatter_(1, table.argsort(1)[:, :k].cpu(), 0.0))
    losses = _trained_without(training, queries, torch.cat(masks), None)
    whole, rest = losses[0], losses[1:].reshape(len(named), count, count)
    return {name: rest[place].diagonal() - whole for place, name in enumerate(named)}


def metasmoothness(training: Training, *, step: float = 0.1, seed: int = 0) -> float:
    """Whether the trained parameters follow the weights smoothly, from -1 to 1: scores of a rough training say little.

    Three trainings are made, with weights at three points of a line. It is the mean over the parameters of whether the
    first and the second move go the same way, weighted by how far they go (Engstrom et al. 2025,
    https://arxiv.org/abs/2503.13751). A smoother training has a lower learning rate, a larger batch, or ``eps_root``.

    Args:
        training: the training.
        step: how far the points are from each other.
        seed: the line is chosen by it.
    """
    ones = training.weights().cpu()
    way = torch.randn(ones.shape, generator=torch.Generator().manual_seed(seed)).to(ones)
    ends = _each(_parameters_after, [ones + place * step * way for place in range(3)], training)
    first, second, both = ends[1] - ends[0], ends[2] - ends[1], (ends[2] - ends[0]).abs()
    return float((both / both.sum() * first.sign() * second.sign()).sum())


def _tables(training: Training, scores: Scores) -> dict[str, Tensor]:
    """Name of a method → its scores, of shape (queries, units)."""
    if isinstance(scores, Mapping):
        named = dict(scores)
    else:
        named = {scores.method if isinstance(scores, Attribution) else "scores": scores}
    if not named:
        raise ValueError("`scores` must have those of at least one method, got none")
    found = {}
    for name, one in named.items():
        table = one.per_example if isinstance(one, Attribution) else one
        if not isinstance(table, Tensor):
            raise TypeError(
                f"`scores` must be attributions or tensors, got {type(one).__name__} for {name!r}"
            )
        if table.ndim == 3:
            table = table.sum(2)
        if table.ndim != 2 or table.shape[1] != training.units:
            raise ValueError(
                f"`scores` must have shape (queries, {training.units}), got {tuple(table.shape)} for {name!r}"
            )
        found[str(name)] = table.detach().cpu()
    if len({len(table) for table in found.values()}) > 1:
        raise ValueError("`scores` must be of the same queries for each method")
    return found


def _trained_without(
    training: Training, queries: Queries, masks: Tensor, folder: str | os.PathLike[str] | None
) -> Tensor:
    """The losses after a training for each mask; with a folder those that are there are not made again."""
    path = None if folder is None else Path(folder) / "retrains.safetensors"
    of = {} if path is None else {"training": _fingerprint(training, masks)}
    done: list[Tensor] = []
    if path is not None and path.exists():
        tensors, texts = _safetensors.read(path)
        if texts != of:
            raise ValueError(
                f"`folder` must be that of this validation: {os.fspath(path)!r} was made by another training, seed or "
                "number of retrains; give another folder, or remove the file"
            )
        done = list(tensors["losses"])
    a_round = _A_ROUND * workers(training) if path is not None else len(masks)
    while len(done) < len(masks):
        some = list(masks[len(done) : len(done) + a_round])
        done += [found.cpu() for found in _each(_losses_after, some, training, queries)]
        if path is not None and (training.parallel is None or training.parallel.ranks.rank == 0):
            _safetensors.write(path, {"losses": torch.stack(done)}, of)
    return torch.stack(done)


def _each(function: Any, items: list[Tensor], training: Training, *args: Any) -> list[Tensor]:
    if workers(training) == 1:
        return [function(item, training, *args) for item in items]
    found: list[Tensor] = map_on_workers(function, items, args=(training, *args))
    return found


def _losses_after(mask: Tensor, training: Training, queries: Queries) -> Tensor:
    """The losses of the queries after a training with these weights: a task of a worker."""
    with torch.no_grad():
        weights = training.weights()
        return losses_of(queries, training.run(mask.to(weights), FirstOrder()).params)


def _parameters_after(weights: Tensor, training: Training) -> Tensor:
    """The parameters after a training, in one vector: a task of a worker."""
    with torch.no_grad():
        trained = training.run(weights.to(training.weights()), FirstOrder()).params
        return torch.cat([p.reshape(-1) for p in trained.parameters()]).cpu()


def _correlations(predicted: Tensor, real: Tensor) -> Tensor:
    """The rank correlation of each column."""
    one, other = _ranks(predicted), _ranks(real)
    one, other = one - one.mean(0), other - other.mean(0)
    return (one * other).sum(0) / (one.norm(dim=0) * other.norm(dim=0))


def _ranks(values: Tensor) -> Tensor:
    """Of each number in its column; equal ones have the mean of their ranks."""
    below, same = values[:, None] > values[None], values[:, None] == values[None]
    return (below.double() + 0.5 * same.double()).sum(1)


def _fingerprint(training: Training, masks: Tensor) -> str:
    """A text that two validations share only if they make the same trainings, as far as tensors tell."""
    made = hashlib.sha256(f"{training.seed} {training.accumulate} {len(training.batches)}".encode())
    given = [*training.batches, masks, *training.model.state_dict().values()]
    given += [one for one in (training.mask, training.groups) if one is not None]
    for tensor in given:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        made.update(f"{flat.dtype} {tuple(tensor.shape)}".encode())
        made.update(flat.view(torch.uint8).numpy().tobytes())
    return made.hexdigest()
