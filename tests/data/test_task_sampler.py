"""Few-shot tasks: which items they have, the same ones everywhere, and errors that name classes and numbers."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist.data import Task, TaskSampler

# Item i is [i, its label], so that tasks show where they are from.
LABELS = torch.arange(60) % 6
ITEMS = torch.stack([torch.arange(60), LABELS], 1).float()


class Pairs(Dataset[Any]):
    """A dataset without a list of labels."""

    def __init__(self, label: Any = lambda number: number) -> None:
        self.label = label
        self.read = 0

    def __len__(self) -> int:
        return 60

    def __getitem__(self, place: int) -> Any:
        self.read += 1
        return ITEMS[place], self.label(int(LABELS[place]))


class Listed(Pairs):
    targets = LABELS.tolist()


def items(task: Task) -> list[int]:
    return torch.cat([task.support, task.query])[:, 0].int().tolist()


@each_row(
    "dataset", [(ITEMS, LABELS), TensorDataset(ITEMS, LABELS), Pairs(), Listed(), Subset(Listed(), range(60))]
)
def test_a_task_has_so_many_items_of_so_many_classes_and_none_twice(dataset: Any) -> None:
    sampler = TaskSampler(dataset, ways=4, shots=2, queries=3, seed=5)
    assert sampler.classes == [0, 1, 2, 3, 4, 5]
    for index in range(20):
        task = sampler[index]
        assert task.support_labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert task.query_labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
        assert len(set(items(task))) == 20
        of = [task.support[task.support_labels == way, 1].unique().tolist() for way in range(4)]
        assert of == [task.query[task.query_labels == way, 1].unique().tolist() for way in range(4)]
        assert len({label for (label,) in of}) == 4
        assert items(task) == items(TaskSampler((ITEMS, LABELS), 4, 2, 3, seed=5)[index])


def test_tasks_are_drawn_evenly_from_classes_and_items() -> None:
    sampler = TaskSampler((ITEMS, LABELS), ways=3, shots=1, queries=1)
    drawn = Counter(item for index in range(1000) for item in items(sampler[index]))
    assert set(drawn) == set(range(60))
    assert max(drawn.values()) < 2 * 1000 * 6 / 60  # 100 on average; this is 10 standard deviations off
    first = Counter(int(sampler[index].support[0, 1]) for index in range(600))
    assert all(50 < number < 160 for number in first.values())


def test_a_task_depends_on_its_index_and_the_seed_alone() -> None:
    sampler = TaskSampler((ITEMS, LABELS), 5, 1, 2)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = [items(sampler[index]) for index in (7, 3, 7)]
    assert torch.equal(torch.get_rng_state(), before)
    assert one[0] == one[2] != one[1]
    assert items(pickle.loads(pickle.dumps(sampler))[3]) == one[1]
    assert items(TaskSampler((ITEMS, LABELS), 5, 1, 2, seed=1)[7]) != one[0]
    assert len({tuple(items(sampler[index])) for index in range(100)}) == 100
    loader = DataLoader(sampler, batch_size=None, sampler=range(3, 5))  # type: ignore[arg-type]
    assert items(next(iter(loader))) == one[1]


def test_workers_draw_the_tasks_of_one_process(world: Any) -> None:
    def body() -> None:
        sampler = TaskSampler((ITEMS, LABELS), 5, 1, 2)
        found = todist.map(lambda index, sampler: sampler[index], range(5), args=(sampler,))
        for task, wanted in zip(found, map(sampler.__getitem__, range(5)), strict=True):
            assert items(task) == items(wanted)
        batch = sampler.batch(range(4))
        sums = todist.parallelize(todist.tasks)(lambda task: task.query[:, 0].sum())(batch)
        assert torch.equal(torch.stack(sums), batch.query[..., 0].sum(1))

    world(2).on_zero(body)


def test_chosen_classes_texts_and_labels() -> None:
    names = ["ant", "bee", "cat", "dog", "eel", "fox"]
    sampler = TaskSampler(Pairs(names.__getitem__), 2, 1, 0, classes=["fox", "bee"])
    assert sampler.classes == ["bee", "fox"]
    assert {tuple(sorted(sampler[index].support[:, 1].tolist())) for index in range(9)} == {(1.0, 5.0)}
    assert sampler[0].query.shape == (0, 2)
    assert repr(sampler) == "TaskSampler(2 classes, ways=2, shots=1, queries=0, seed=0)"
    of_numpy = Pairs(np.int64)
    assert TaskSampler(of_numpy, 6, 1, 1).classes == list(range(6))
    assert of_numpy.read == 60
    listed = Listed()
    assert TaskSampler(listed, 2, 1, 1, classes=torch.tensor([1, 4])).classes == [1, 4]
    assert listed.read == 0
    assert TaskSampler(Pairs(), 2, 1, 1, labels=[0] * 30 + [1] * 30).classes == [0, 1]
    assert TaskSampler(Subset(Listed(), [0, 1, 6, 7]), 2, 1, 1)[0].support.shape == (2, 2)


@each_row(
    ("given", "kind", "told"),
    [
        (
            {"ways": 7},
            ValueError,
            r"`ways` must be at most the number of classes, 6 \(0, 1, 2, 3, 4, 5\), got 7",
        ),
        (
            {"queries": 10},
            ValueError,
            "shots \\+ queries = 11 items of each class, but 0 has 10, 1 has 10, .*: lower `shots` or `queries`, or",
        ),
        (
            {"labels": ["a"] * 58 + ["b"] * 2},
            ValueError,
            "shots \\+ queries = 3 items of each class, but 'b' has 2: lower",
        ),
        (
            {"classes": [1, 9]},
            ValueError,
            "`classes` must be labels of the dataset, which are 0, 1, .*, got 9",
        ),
        ({"classes": "ab"}, TypeError, "`classes` must be a list of labels, got str 'ab'"),
        ({"shots": 0}, ValueError, "`shots` must be at least 1, got 0"),
        ({"queries": 1.5}, TypeError, "`queries` must be an integer, got float 1.5"),
        ({"ways": True}, TypeError, "`ways` must be an integer, got bool True"),
        ({"labels": [1, 2]}, ValueError, "`labels` must have one for each of the 60 items, got 2"),
        ({"labels": torch.ones(60, 2)}, ValueError, r"`labels` must have one dimension, got shape \(60, 2\)"),
        ({"labels": [0.5] * 60}, TypeError, "`labels` must be integers or texts, got float at index 0"),
        ({"dataset": ITEMS}, TypeError, "`dataset` must have a length and give a pair .*, got Tensor"),
        ({"dataset": (ITEMS, LABELS[:3])}, ValueError, r"a tensor of shape \(60,\), got \(3,\)"),
        (
            {"dataset": [1, 2, 3]},
            TypeError,
            "`dataset` must give a pair of a tensor and its label, got int at index 0",
        ),
    ],
)
def test_what_is_missing_is_named(given: Any, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        TaskSampler(**{"dataset": Pairs(), "ways": 2, "shots": 1, "queries": 2, **given})


def test_items_that_are_no_tensors_and_wrong_indices() -> None:
    sampler = TaskSampler(Pairs(), 2, 1, 1)
    with pytest.raises(ValueError, match="`index` must be at least 0, got -1"):
        sampler[-1]
    with pytest.raises(TypeError, match="`index` must be an integer, got slice"):
        sampler[:3]  # type: ignore[index]
    with pytest.raises(ValueError, match="`indices` must have at least one index, got none"):
        sampler.batch([])
    images = TaskSampler([("image", number % 2) for number in range(8)], 2, 1, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`dataset` must give tensors, got str at index"):
        images[0]


class Batched(Listed):
    """A dataset with torch's protocol for a batch."""

    def __getitems__(self, places: list[int]) -> list[Any]:
        self.read -= len(places) - 1  # one for the batch
        return [self[place] for place in places]


def test_a_dataset_that_gives_whole_batches_is_asked_for_them() -> None:
    plain, batched = Listed(), Batched()
    tasks = [TaskSampler(data, ways=3, shots=2, queries=1)[4] for data in (plain, batched)]
    assert (plain.read, batched.read) == (9, 2)
    for one, two in zip(*tasks, strict=True):
        assert torch.equal(one, two)
    assert TaskSampler(Batched(), ways=3, shots=2, queries=0)[4].query.shape == (0, 2)
    nothing = Batched(lambda number: number)
    nothing.__class__ = type("Nothing", (Batched,), {"__getitem__": lambda *_: (None, 0)})
    with pytest.raises(TypeError, match="must give tensors, got NoneType at index"):
        TaskSampler(nothing, ways=3, shots=2, queries=1)[4]
