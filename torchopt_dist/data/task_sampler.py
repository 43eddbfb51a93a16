"""A labelled dataset, the index of a task → the task: some classes, and some examples of each."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from torchopt_dist.arguments.missing_names import missing_methods
from torchopt_dist.arguments.numbers import integer

__all__ = ["Task", "TaskSampler"]


class Task(NamedTuple):
    """A few-shot task; or, from :meth:`TaskSampler.batch`, several of them, in a new first dimension."""

    support: Tensor
    """The examples to adapt to, of shape ``(ways · shots, *)``: those of the first class, then of the second, …"""
    support_labels: Tensor
    """Their labels in the task, from 0 to ways - 1, of shape (ways · shots,)."""
    query: Tensor
    """Other examples of the same classes, of shape ``(ways · queries, *)``."""
    query_labels: Tensor
    """Their labels, of shape (ways · queries,)."""


@missing_methods(sample="sampler[i]", sample_batch="batch(range(4))")
class TaskSampler:
    """Few-shot tasks from a labelled dataset: task ``i`` is ``sampler[i]``.

    A task is drawn from its index and the sampler's seed alone, by a generator of its own. So it is the same in every
    process and at every time, workers can draw their tasks themselves, and torch's generator is left as it is. There is
    a task for every index from 0 on. (What is random in the dataset itself, such as an augmentation, draws from torch's
    generator, which a task of a call has seeded.)

    Args:
        dataset: a dataset of torch that has a length and gives a pair of a tensor and its label for an index; or a pair
            of tensors, the examples and their labels. A label is an integer or a text.
        ways: the number of classes in a task.
        shots: the number of examples of each class to adapt to.
        queries: the number of other examples of each class.
        classes: the labels of the classes to draw from, for example those for training; all, if not given.
        labels: the labels of all items. If not given, they are the tensor of labels, or the dataset's ``targets`` or
            ``labels``; if it has none of these, each item is read once.
        seed: an integer; samplers with other seeds have other tasks.

    Raises:
        TypeError: an argument is of the wrong kind; or, where a task is drawn, an item is no tensor.
        ValueError: a number is too small; there are fewer classes than ``ways``, or fewer than ``shots + queries``
            items of a class; a class is not there; there is not a label for each item.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> images, labels = torch.randn(60, 8, 8), torch.arange(60) % 6
        >>> sampler = TaskSampler((images, labels), ways=5, shots=1, queries=3)
        >>> task = sampler[0]
        >>> task.support.shape, task.query_labels
        (torch.Size([5, 8, 8]), tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]))
        >>> sampler.batch(range(4)).query.shape
        torch.Size([4, 15, 8, 8])
    """

    def __init__(
        self,
        dataset: Dataset[Any] | tuple[Tensor, Tensor],
        ways: int,
        shots: int,
        queries: int,
        *,
        classes: Iterable[Hashable] | None = None,
        labels: Sequence[Any] | Tensor | None = None,
        seed: int = 0,
    ) -> None:
        self.ways = integer("ways", ways, 1)
        self.shots = integer("shots", shots, 1)
        self.queries = integer("queries", queries, 0)
        self.seed = integer("seed", seed, None)
        self._dataset = _as_dataset(dataset)
        count = len(self._dataset)
        found = _plain(_labels_of(self._dataset) if labels is None else labels)
        if len(found) != count:
            raise ValueError(f"`labels` must have one for each of the {count} items, got {len(found)}")
        self._places = _chosen(_by_label(found), classes)
        self._check()

    @property
    def classes(self) -> list[Any]:
        """The labels of the classes that tasks are drawn from."""
        return list(self._places)

    def __getitem__(self, index: int) -> Task:
        """The task of an index.

        Raises:
            TypeError: ``index`` is not an integer; an item of the dataset is no tensor.
            ValueError: it is negative.
        """
        index = integer("index", index, 0)
        generator = torch.Generator()
        generator.manual_seed((self.seed * 0x9E3779B97F4A7C15 + index * 0xD1342543DE82EF95 + 1) % 2**63)
        places = list(self._places.values())
        support: list[int] = []
        query: list[int] = []
        for number in torch.randperm(len(places), generator=generator, device="cpu")[: self.ways].tolist():
            of_class = places[number]
            drawn = torch.randperm(len(of_class), generator=generator, device="cpu")[
                : self.shots + self.queries
            ]
            chosen = of_class[drawn].tolist()
            support += chosen[: self.shots]
            query += chosen[self.shots :]
        ways = torch.arange(self.ways)
        return Task(
            self._items(support),
            ways.repeat_interleave(self.shots),
            self._items(query),
            ways.repeat_interleave(self.queries),
        )

    def batch(self, indices: Iterable[int]) -> Task:
        """Several tasks, stacked: the first dimension of each tensor is that of the tasks.

        Args:
            indices: the indices of the tasks, at least one.

        Raises:
            TypeError: ``indices`` is one index, or has something else than integers.
            ValueError: there is none.
        """
        if isinstance(indices, Integral) or not isinstance(indices, Iterable):
            raise TypeError(
                f"`indices` must be the indices of the tasks, got {type(indices).__name__} {indices!r:.80}: the first "
                "four are `batch(range(4))`, and task i alone is `sampler[i]`"
            )
        indices = indices.tolist() if isinstance(indices, Tensor) else indices
        tasks = [self[index] for index in indices]
        if not tasks:
            raise ValueError("`indices` must have at least one index, got none")
        return Task(*(torch.stack(parts) for parts in zip(*tasks, strict=True)))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self._places)} classes, ways={self.ways}, shots={self.shots}, "
            f"queries={self.queries}, seed={self.seed})"
        )

    def _items(self, places: list[int]) -> Tensor:
        if isinstance(self._dataset, TensorDataset):
            return self._dataset.tensors[0][places]
        if places and hasattr(self._dataset, "__getitems__"):  # torch's protocol of a whole batch
            pairs = self._dataset.__getitems__(places)
            items = [_of_pair(pair, place) for pair, place in zip(pairs, places, strict=True)]
        else:
            items = [_example(self._dataset, place) for place in places]
        return torch.stack(items) if items else _example(self._dataset, 0)[None][:0]

    def _check(self) -> None:
        classes = self._places
        if self.ways > len(classes):
            raise ValueError(
                f"`ways` must be at most the number of classes, {len(classes)} ({_listed(map(repr, classes))}), got "
                f"{self.ways}"
            )
        needed = self.shots + self.queries
        short = [f"{label!r} has {len(at)}" for label, at in classes.items() if len(at) < needed]
        if short:
            raise ValueError(
                f"`dataset` must have shots + queries = {needed} items of each class, but {_listed(short)}: lower "
                "`shots` or `queries`, or leave these out by `classes`"
            )


def _as_dataset(dataset: Any) -> Any:
    """What has a length, and a pair for an index; a pair of tensors as a ``TensorDataset``."""
    if isinstance(dataset, (tuple, list)) and len(dataset) == 2 and isinstance(dataset[0], Tensor):
        examples, labels = dataset
        if not isinstance(labels, Tensor) or labels.ndim != 1 or len(labels) != len(examples):
            got = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
            raise ValueError(
                f"`dataset` as a pair must have a label for each of the {len(examples)} examples, a tensor of shape "
                f"({len(examples)},), got {got}"
            )
        return TensorDataset(examples, labels)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or isinstance(dataset, Tensor):
        raise TypeError(
            "`dataset` must have a length and give a pair of a tensor and its label for an index, or be a pair of "
            f"tensors, got {type(dataset).__name__}"
        )
    return dataset


def _labels_of(dataset: Any) -> Any:
    """The labels of all items, without reading the items where that can be avoided."""
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[1]
    if isinstance(dataset, Subset):
        of_all = _plain(_labels_of(dataset.dataset))
        return [of_all[place] for place in dataset.indices]
    for name in ("targets", "labels"):
        labels = getattr(dataset, name, None)
        if isinstance(labels, (Sequence, Tensor)) and len(labels) == len(dataset):
            return labels
    return [_pair(dataset[place], place)[1] for place in range(len(dataset))]


def _pair(item: Any, place: int) -> Any:
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        raise TypeError(
            f"`dataset` must give a pair of a tensor and its label, got {type(item).__name__} at index {place}"
        )
    return item


def _example(dataset: Any, place: int) -> Tensor:
    return _of_pair(dataset[place], place)


def _of_pair(item: Any, place: int) -> Tensor:
    example = _pair(item, place)[0]
    if not isinstance(example, Tensor):
        raise TypeError(
            f"`dataset` must give tensors, got {type(example).__name__} at index {place}: give the dataset a transform "
            "that makes tensors"
        )
    return example


def _plain(labels: Any) -> list[Any]:
    """Labels as integers and texts."""
    if isinstance(labels, Tensor):
        if labels.ndim != 1:
            raise ValueError(f"`labels` must have one dimension, got shape {tuple(labels.shape)}")
        labels = labels.tolist()
    plain = [label.item() if hasattr(label, "item") else label for label in labels]
    for place, label in enumerate(plain):
        if not isinstance(label, (int, str)):
            raise TypeError(
                f"`labels` must be integers or texts, got {type(label).__name__} at index {place}"
            )
    return plain


def _by_label(labels: list[Any]) -> dict[Any, Tensor]:
    """Label → the places of its items; integers in their order, texts after them in theirs."""
    places: dict[Any, list[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault(label, []).append(place)
    ordered = sorted(places, key=lambda label: (isinstance(label, str), label))
    return {label: torch.tensor(places[label]) for label in ordered}


def _chosen(places: Mapping[Any, Tensor], classes: Iterable[Hashable] | None) -> dict[Any, Tensor]:
    if classes is None:
        return dict(places)
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise TypeError(f"`classes` must be a list of labels, got {type(classes).__name__} {classes!r:.80}")
    asked = _plain(classes.tolist() if isinstance(classes, Tensor) else classes)
    if unknown := [repr(label) for label in asked if label not in places]:
        raise ValueError(
            f"`classes` must be labels of the dataset, which are {_listed(map(repr, places))}, got {_listed(unknown)}"
        )
    return {label: at for label, at in places.items() if label in asked}


def _listed(parts: Iterable[str], most: int = 8) -> str:
    parts = list(parts)
    more = f" and {len(parts) - most} more" if len(parts) > most else ""
    return ", ".join(parts[:most]) + more
