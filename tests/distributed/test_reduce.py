"""Reducers: the mean is that of the samples, sums and trees are exact, and what cannot be reduced is told."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist.distributed.balance import even_share
from torchopt_dist.distributed.reduce import check_reducer


class Pair(NamedTuple):
    x: Any
    y: Any


REDUCERS = [todist.mean_reducer, todist.sum_reducer, todist.stack_reducer, todist.concatenate_reducer]


def ids(reducer):
    return reducer.__name__


# Means.


def test_the_mean_of_uneven_parts_is_that_of_the_samples():
    parts = torch.arange(7.0).split([2, 2, 2, 1])
    assert todist.mean_reducer([part.mean() for part in parts], [2, 2, 2, 1]).item() == 3.0


def test_on_four_workers_the_mean_of_seven_is_three(world):
    def main():
        mean = todist.parallelize(todist.batch_partitioner, todist.mean_reducer)(lambda x: x.mean())
        return mean(torch.arange(7.0)).item()

    assert world(4).on_zero(main) == 3.0


@settings(deadline=None)
@given(size=st.integers(1, 60), workers=st.integers(1, 12), seed=st.integers(0, 2**31))
def test_the_mean_does_not_depend_on_the_split(size, workers, seed):
    x = torch.randn(size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    workers = min(size, workers)
    ranges = [even_share(size, workers, index) for index in range(workers)]
    reduced = todist.mean_reducer([x[a:b].mean(0) for a, b in ranges], [b - a for a, b in ranges])
    assert torch.allclose(reduced, x.mean(0), rtol=0, atol=1e-14)


def test_without_sizes_all_weigh_the_same():
    assert todist.mean_reducer([torch.tensor(1.0), torch.tensor(4.0)]).item() == 2.5
    assert todist.mean_reducer(iter([1.0, 4.0])).item() == 2.5


@each_row("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_the_mean_keeps_the_dtype(dtype):
    reduced = todist.mean_reducer([torch.ones(2, dtype=dtype), 3 * torch.ones(2, dtype=dtype)], [1, 3])
    assert reduced.dtype == dtype
    assert reduced.tolist() == [2.5, 2.5]


def test_large_sizes_lose_no_digits_in_half_precision():
    one = torch.ones(1, dtype=torch.bfloat16)
    assert todist.mean_reducer([one, one], [257, 1]).item() == 1.0


def test_weights_are_exact_in_double_precision():
    third = torch.tensor([1.0, 0.0], dtype=torch.float64)
    reduced = todist.mean_reducer([third, third.flip(0)], [1, 2])
    assert reduced.tolist() == [1 / 3, 2 / 3]


@each_row(
    ("results", "mean"),
    [
        ([1, 2], 1.5),
        ([True, False], 0.5),
        ([torch.tensor(1), torch.tensor(2)], 1.5),
        ([torch.tensor([True]), torch.tensor([False])], [0.5]),
        ([1.0, torch.tensor(2.0)], 1.5),
        ([2j, 4j], 3j),
    ],
)
def test_whole_numbers_and_python_numbers_have_a_mean(results, mean):
    reduced = todist.mean_reducer(results)
    assert reduced.tolist() == mean
    assert reduced.dtype in (torch.get_default_dtype(), torch.complex64)


def test_sums_of_whole_numbers_stay_whole():
    assert todist.sum_reducer([1, 2]).dtype == torch.int64
    assert todist.sum_reducer([torch.tensor(2**40), torch.tensor(1)]).item() == 2**40 + 1


def test_the_mean_has_gradients_by_size():
    x = [torch.tensor(float(n), requires_grad=True) for n in range(3)]
    todist.mean_reducer([t * t for t in x], [1, 2, 5]).backward()
    assert [t.grad.item() for t in x] == pytest.approx([0.0, 2 * 1 * 2 / 8, 2 * 2 * 5 / 8])


@each_row("sizes", [None, [2, 1, 3], [2, 2, 2]])
def test_gradients_to_second_order(sizes):
    def mean(*leaves):
        return todist.mean_reducer([{"a": t.sin(), "b": t**3} for t in leaves], sizes)["a"]

    leaves = [torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(mean, leaves)
    assert torch.autograd.gradgradcheck(mean, leaves)


def test_one_result_is_itself():
    tensor = torch.randn(3)
    for reducer in (todist.mean_reducer, todist.sum_reducer, todist.concatenate_reducer):
        assert torch.equal(reducer([tensor]), tensor)
    assert torch.equal(todist.stack_reducer([tensor]), tensor[None])


# Trees.


@each_row(
    ("reducer", "expected"),
    [
        (todist.mean_reducer, ([1.5, 1.5], [3.0])),
        (todist.sum_reducer, ([3.0, 3.0], [6.0])),
        (todist.stack_reducer, ([[1.0, 1.0], [2.0, 2.0]], [[2.0], [4.0]])),
        (todist.concatenate_reducer, ([1.0, 1.0, 2.0, 2.0], [2.0, 4.0])),
    ],
)
def test_trees_are_reduced_leaf_by_leaf(reducer, expected):
    def results(make):
        return [make(torch.full((2,), n), torch.full((1,), 2 * n)) for n in (1.0, 2.0)]

    a, b = expected
    pair = reducer(results(Pair))
    assert isinstance(pair, Pair)
    assert (pair.x.tolist(), pair.y.tolist()) == (a, b)
    first, second = reducer(results(lambda x, y: (x, y)))
    assert (first.tolist(), second.tolist()) == (a, b)
    tree = reducer(results(lambda x, y: {"x": [x], "y": (y, {"z": y})}))
    assert (tree["x"][0].tolist(), tree["y"][0].tolist(), tree["y"][1]["z"].tolist()) == (a, b, b)


@dataclasses.dataclass(frozen=True)
class Output:
    loss: Any
    extra: Any


class Batch(dict[str, Any]):
    """No tree to optree, as the outputs of libraries' models."""


@each_row("reducer", REDUCERS)
def test_containers_that_are_no_trees_are_reduced_leaf_by_leaf(reducer):
    """One in another, in a tuple, the keys in any order; the workers' own objects stay as they are."""

    def result(n, keys="ab"):
        values = {"a": torch.full((2,), n), "b": torch.full((1,), 2 * n)}
        batch = Batch({key: values[key] for key in keys})
        return Output(
            torch.full((1,), 3 * n), collections.UserDict(batch=batch, rest=[torch.full((1,), n)])
        ), 1

    results = [result(1.0), result(2.0, "ba")]
    if reducer is todist.concatenate_reducer:
        results = [(output, torch.full((1,), number)) for output, number in results]
    output, count = reducer(results)
    assert type(output) is Output
    assert type(output.extra) is collections.UserDict
    assert type(output.extra["batch"]) is Batch
    got = [output.loss, *output.extra["batch"].values(), *output.extra["rest"], count]
    columns = [
        [o.loss, o.extra["batch"]["a"], o.extra["batch"]["b"], o.extra["rest"][0], number]
        for o, number in results
    ]
    for tensor, *parts in zip(got, *columns, strict=True):
        assert torch.equal(tensor, reducer(parts))
    assert results[0][0].loss.tolist() == [3.0]


def test_a_mean_of_numbers_in_a_dataclass():
    mean = todist.mean_reducer([Output(1.0, 2), Output(3.0, 4)], [3, 1])
    assert (mean.loss.item(), mean.extra.item()) == (1.5, 2.5)


def test_a_number_goes_where_the_tensors_are():
    """Where the default device is another one; there is a meta device everywhere."""
    with torch.device("meta"):
        assert todist.sum_reducer([1.0, torch.ones((), device="cpu")]).item() == 2.0


def test_sizes_may_differ_where_results_are_concatenated():
    parts = [torch.arange(2), torch.arange(3), torch.arange(0)]
    assert todist.concatenate_reducer(parts).tolist() == [0, 1, 0, 1, 2]


def test_the_order_is_kept():
    results = [torch.tensor([n]) for n in (3, 1, 2)]
    assert todist.stack_reducer(results).tolist() == [[3], [1], [2]]
    assert todist.concatenate_reducer(results).tolist() == [3, 1, 2]


# What cannot be reduced.


@each_row("reducer", REDUCERS)
@each_row(
    ("results", "kind", "told"),
    [
        ([], ValueError, ["at least one result"]),
        ([torch.ones(2), "text"], TypeError, ["tensors or numbers", "str 'text'", "partition 1"]),
        ([None, None], TypeError, ["tensors or numbers", "NoneType None", "partition 0"]),
        ([(torch.ones(1),), torch.ones(1)], ValueError, ["one structure"]),
        ([torch.ones(2), None], TypeError, ["tensors or numbers", "NoneType None", "partition 1"]),
        (
            [{"loss": torch.ones(1), "log": ["a"]}] * 2,
            TypeError,
            ["str 'a'", "result['log'][0]", "partition 0"],
        ),
        ([torch.ones(1), (torch.ones(1),)], TypeError, ["tensors or numbers", "tuple", "partition 1"]),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], ValueError, ["one structure"]),
        ([(torch.ones(1),), (torch.ones(1), torch.ones(1))], ValueError, ["one structure"]),
        (
            [Output(torch.ones(1), {}), Batch(loss=torch.ones(1))],
            ValueError,
            ["one structure", "result is Output with ['result.loss'", "Batch with", "in partition 1"],
        ),
        ([Batch(a=torch.ones(1)), Batch(b=torch.ones(1))], ValueError, ["one structure", "result['b']"]),
        (
            [Output(torch.ones(1), "text")] * 2,
            TypeError,
            ["tensors or numbers, got str 'text' in result.extra of partition 0"],
        ),
        ([torch.ones(2, 2), torch.ones(2, 3)], ValueError, ["shapes [(2, 2), (2, 3)]"]),
        (
            [{"a": torch.ones(2, 2)}, {"a": torch.ones(2, 2, 1)}],
            ValueError,
            ["result['a']", "shapes [(2, 2), (2, 2, 1)]"],
        ),
    ],
)
def test_what_cannot_be_reduced_is_told(reducer, results, kind, told):
    with pytest.raises(kind) as caught:
        reducer(results)
    for words in [reducer.__name__, *told]:
        assert words in str(caught.value)


@each_row("results", [[torch.tensor(1.0)] * 2, [1.0, 2.0]])
def test_what_has_no_dimension_cannot_be_concatenated(results):
    with pytest.raises(ValueError, match="no dimension to concatenate along: use stack_reducer"):
        todist.concatenate_reducer(results)


# Reducers of one's own.


def test_without_a_reducer_the_results_stay_a_list():
    results = [object(), None]
    assert check_reducer(None)(results, [1, 2]) is results


@each_row(
    ("reducer", "reduced"),
    [
        (lambda results: ("plain", results), ("plain", [5, 6])),
        (lambda results, sizes: (results, sizes), ([5, 6], [1, 2])),
        (lambda results, *, sizes: (results, sizes), ([5, 6], [1, 2])),
        (lambda results, sizes=None: (results, sizes), ([5, 6], [1, 2])),
        (lambda results, weights=None: (results, weights), ([5, 6], None)),
        (functools.partial(lambda sizes, results: (results, sizes), [9]), ([5, 6], [9])),
        (sum, 11),
        (max, 6),
        (lambda results: 0, 0),
        (lambda results: False, False),
        (lambda results: [], []),
    ],
)
def test_a_reducer_takes_the_sizes_if_it_asks_for_them(reducer, reduced):
    assert check_reducer(reducer)([5, 6], [1, 2]) == reduced


def test_a_method_or_an_object_can_reduce():
    class Reducer:
        def __call__(self, results, sizes):
            return results, sizes

        def method(self, results):
            return results

    assert check_reducer(Reducer())([1], [2]) == ([1], [2])
    assert check_reducer(Reducer().method)([1], [2]) == [1]


@each_row("bad", [3, "mean", [todist.mean_reducer], object()])
def test_what_cannot_be_called_is_told(bad):
    with pytest.raises(TypeError, match=f"reducer must be callable, got {type(bad).__name__}"):
        check_reducer(bad)
    with pytest.raises(TypeError, match="reducer must be callable"):
        todist.parallelize(reducer=bad)


def test_a_reducer_that_returns_nothing_is_told():
    def forgets(results):
        results.sort()

    with pytest.raises(TypeError, match=r"reducer `.*forgets` must return the reduced result, got None"):
        check_reducer(forgets)([2, 1], [1, 1])
    with pytest.raises(TypeError, match="got None"):
        check_reducer(functools.partial(forgets))([2, 1], [1, 1])


def test_a_reducer_s_own_error_is_its_own():
    def fails(results):
        raise TypeError("mine, about sizes")

    with pytest.raises(TypeError, match=r"^mine, about sizes$"):
        check_reducer(fails)([1], [1])


def test_sizes_reach_the_reducer_through_a_call(world):
    def main():
        def own(x):
            return [todist.typing.Partition(1, (x,), None, size=5), (0, (x,), None)]

        def reducer(results, sizes):
            return results, sizes

        x = torch.arange(7.0)
        return (
            todist.remote_sync_call(len, args=(x,), reducer=reducer),
            todist.remote_sync_call(len, args=(x,), partitioner=own, reducer=reducer),
        )

    assert world(2).on_zero(main) == (([4, 3], [4, 3]), ([7, 7], [5, 1]))


def test_a_wrong_reducer_is_an_error_of_the_caller(world):
    def main():
        x = torch.arange(4.0)
        with pytest.raises(TypeError, match="must return the reduced result, got None"):
            todist.remote_sync_call(torch.sum, args=(x,), reducer=lambda results: None)
        with pytest.raises(TypeError, match="mean_reducer needs tensors or numbers, got str"):
            todist.remote_sync_call(str, args=(x,), reducer=todist.mean_reducer)
        with pytest.raises(TypeError, match="reducer must be callable, got str"):
            todist.remote_sync_call(torch.sum, args=(x,), reducer="mean")
        return todist.remote_sync_call(torch.sum, args=(x,), reducer=todist.sum_reducer).item()

    assert world(2).on_zero(main) == 6.0
