"""A tensor along a dimension → parts for the workers: even, in order, nothing lost."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchopt_dist as todist
from tests.distributed.programs import split
from tests.rows import each_row
from torchopt_dist.distributed.balance import even_share
from torchopt_dist.distributed.group import group

pytestmark = pytest.mark.usefixtures("workers")


@each_row(
    ("size", "workers_", "sizes"),
    [
        (15, 8, [2, 2, 2, 2, 2, 2, 2, 1]),
        (15, 4, [4, 4, 4, 3]),
        (7, 4, [2, 2, 2, 1]),
        (8, 4, [2, 2, 2, 2]),
        (3, 4, [1, 1, 1]),
        (1, 4, [1]),
        (5, 1, [5]),
        (100, 3, [34, 33, 33]),
    ],
)
def test_shares_are_even(workers, size, workers_, sizes):
    workers(workers_)
    parts = todist.batch_partitioner(torch.arange(size))
    assert [part.size for part in parts] == sizes
    assert [len(part.args[0]) for part in parts] == sizes
    assert [part.worker for part in parts] == list(range(len(sizes)))
    assert torch.equal(torch.cat([part.args[0] for part in parts]), torch.arange(size))


@given(size=st.integers(1, 500), parts=st.integers(1, 64))
def test_shares_cover_all_in_order_and_differ_by_one_at_most(size, parts):
    ranges = [even_share(size, parts, index) for index in range(parts)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 40),
    workers_=st.integers(1, 9),
    ndim=st.integers(1, 3),
    dim=st.integers(-3, 2),
    exclusive=st.booleans(),
    keepdim=st.booleans(),
)
def test_nothing_is_lost_doubled_or_moved(size, workers_, ndim, dim, exclusive, keepdim):
    dim = max(-ndim, min(dim, ndim - 1))
    shape = [2] * ndim
    shape[dim] = size
    tensor = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    names = tuple(map(str, range(workers_)))
    with mock.patch.object(group, "_group", SimpleNamespace(names=names, ending=False)):
        parts = todist.dim_partitioner(dim, exclusive=exclusive, keepdim=keepdim)(tensor)
    tensors = [part.args[0] for part in parts]
    together = torch.stack(tensors, dim) if exclusive and not keepdim else torch.cat(tensors, dim)
    assert torch.equal(together, tensor)
    assert sum(part.size for part in parts) == size
    sizes = [part.size for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == (size if exclusive else min(size, workers_))
    tasks = [sum(part.worker == rank for part in parts) for rank in range(workers_)]
    assert max(tasks) - min(tasks) <= 1  # tasks are spread as evenly as samples
    assert [part.worker for part in parts] == sorted(part.worker for part in parts)


@each_row(
    ("partitioner", "shapes"),
    [
        (todist.batch_partitioner, [(2, 3, 5), (2, 3, 5), (1, 3, 5)]),
        (todist.dim_partitioner(0, exclusive=True, keepdim=True), [(1, 3, 5)] * 5),
        (todist.dim_partitioner(), [(2, 3, 5), (2, 3, 5), (1, 3, 5)]),
        (todist.dim_partitioner(1), [(5, 1, 5)] * 3),
        (todist.dim_partitioner(-1), [(5, 3, 2), (5, 3, 2), (5, 3, 1)]),
        (todist.dim_partitioner(-3), [(2, 3, 5), (2, 3, 5), (1, 3, 5)]),
        (todist.dim_partitioner(0, keepdim=False), [(2, 3, 5), (2, 3, 5), (1, 3, 5)]),
        (todist.dim_partitioner(0, exclusive=True, keepdim=False), [(3, 5)] * 5),
        (todist.dim_partitioner(-2, exclusive=True, keepdim=False), [(5, 5)] * 3),
        (todist.dim_partitioner(-2, exclusive=True), [(5, 1, 5)] * 3),
        (todist.distributed.TensorDimensionPartitioner(0, exclusive=True), [(3, 5)] * 5),
        (todist.distributed.TensorDimensionPartitioner(0), [(2, 3, 5), (2, 3, 5), (1, 3, 5)]),
    ],
)
def test_shapes_of_the_parts(partitioner, shapes):
    parts = partitioner(torch.zeros(5, 3, 5))
    assert [tuple(part.args[0].shape) for part in parts] == shapes


def test_exclusive_tasks_are_spread_in_blocks():
    parts = todist.dim_partitioner(0, exclusive=True, keepdim=True)(torch.arange(7))
    assert [part.worker for part in parts] == [0, 0, 0, 1, 1, 2, 2]
    assert [part.size for part in parts] == [1] * 7


@each_row("chosen", [[2, 0], ("worker2", "worker0"), ["worker2", 0], [np.int64(2), np.int32(0)]])
def test_the_workers_can_be_chosen_and_ordered(chosen):
    parts = split(todist.dim_partitioner(0, workers=chosen), torch.arange(3))
    assert parts == [(2, ([0, 1],), {}), (0, ([2],), {})]


def test_the_workers_are_looked_up_at_the_call(workers):
    partitioner = todist.dim_partitioner(0, workers=["worker4"])
    with pytest.raises(ValueError, match="no worker is named 'worker4'"):
        partitioner(torch.arange(3))
    workers(5)
    assert [part.worker for part in partitioner(torch.arange(3))] == [4]
    assert len(todist.batch_partitioner(torch.arange(9))) == 5


@each_row(
    ("kind", "options", "told"),
    [
        (TypeError, {"dim": 1.0}, "dim must be an integer, got float 1.0"),
        (TypeError, {"dim": "0"}, "dim must be an integer, got str '0'"),
        (TypeError, {"dim": True}, "dim must be an integer, got bool True"),
        (TypeError, {"dim": 0, "workers": "worker0"}, "sequence of ranks and names, got 'worker0'"),
        (TypeError, {"dim": 0, "workers": 2}, "sequence of ranks and names, got 2"),
        (TypeError, {"dim": 0, "workers": {0, 1}}, "sequence of ranks and names"),
        (ValueError, {"dim": 0, "workers": []}, "at least one worker"),
    ],
)
def test_bad_settings_are_told_when_the_partitioner_is_made(kind, options, told):
    dim = options.pop("dim")
    for make in (todist.dim_partitioner, todist.distributed.TensorDimensionPartitioner):
        with pytest.raises(kind, match=told):
            make(dim, **options)


@each_row(
    "copied",
    [
        lambda p: pickle.loads(pickle.dumps(p)),
        lambda p: cloudpickle.loads(cloudpickle.dumps(p)),
        copy.deepcopy,
        copy.copy,
    ],
    ids=["pickle", "cloudpickle", "deepcopy", "copy"],
)
@each_row(
    "partitioner",
    [
        todist.batch_partitioner,
        todist.dim_partitioner(0, exclusive=True, keepdim=True),
        todist.dim_partitioner(-1, workers=["worker1", 0]),
        todist.distributed.TensorDimensionPartitioner(1, exclusive=True),
    ],
)
def test_partitioners_can_be_copied(copied, partitioner):
    other = copied(partitioner)
    assert split(other, torch.arange(8).reshape(4, 2)) == split(partitioner, torch.arange(8).reshape(4, 2))
    assert repr(other) == repr(partitioner)


def test_a_partitioner_shows_its_settings():
    assert (
        repr(todist.dim_partitioner(1, exclusive=True, keepdim=False, workers=["a"]))
        == "TensorDimensionPartitioner(1, exclusive=True, keepdim=False, workers=['a'])"
    )
