"""``map`` and ``remote_call``: a list of items → the values of a loop; one worker → its value."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.distributed.programs import gradients, mlp
from tests.rows import each_row
from torchopt_dist.errors import NotInitializedError


def describe(item, *args, **kwargs):
    return todist.get_rank(), item, args, kwargs


def task_loss(task, model):
    """A task is a dictionary with as many rows as it likes."""
    return ((model(task["x"]) - task["y"]) ** 2).mean() * task["weight"]


def tasks_of_many_sizes():
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return [{"x": draw(n, 6), "y": draw(n, 3), "weight": 1 / n} for n in (3, 1, 7, 2, 5)]


@pytest.mark.parametrize("size", [1, 3])
def test_items_of_any_kind_are_tasks_in_order(world, size):
    def body():
        items = ["a", {"b": 1}, None, (1, 2), torch.arange(3), lambda: 5, [torch.ones(2), "x"]]
        return todist.map(describe, iter(items), args=(7,), kwargs={"key": "word"})

    found = world(size).on_zero(body)
    ranks, items, args, kwargs = zip(*found, strict=True)
    assert list(ranks) == ([0] * 7 if size == 1 else [0, 0, 0, 1, 1, 2, 2])
    assert items[:4] == ("a", {"b": 1}, None, (1, 2))
    assert items[4].tolist() == [0, 1, 2]
    assert items[5]() == 5
    assert items[6][0].tolist() == [1, 1]
    assert set(args) == {(7,)}
    assert list(kwargs) == [{"key": "word"}] * 7


def test_values_and_gradients_are_those_of_a_loop(world):
    def body():
        model, tasks = mlp(), tasks_of_many_sizes()
        loop = torch.stack([task_loss(task, model) for task in tasks]).mean()
        losses = todist.map(task_loss, tasks, args=(model,))
        reduced = todist.map(task_loss, tasks, kwargs={"model": model}, reducer=todist.mean_reducer)
        by_name = todist.map(task_loss, tasks, args=(model,), workers=["worker1", 0])
        expected = gradients(loop, model)
        for loss in (torch.stack(losses).mean(), reduced, torch.stack(by_name).mean()):
            torch.testing.assert_close(loss, loop, rtol=1e-12, atol=1e-12)
            for a, b in zip(gradients(loss, model), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        rows = torch.arange(6.0).reshape(3, 2)
        squares = todist.map(lambda row: (row**2).sum(), rows, vectorize=True)
        assert [square.item() for square in squares] == [1, 13, 41]
        return [todist.map(describe, range(3), workers=[1, "worker0"])[item][0] for item in range(3)]

    assert world(2).on_zero(body) == [1, 1, 0]


def test_no_items_are_no_results(world):
    def body():
        assert todist.map(describe, []) == []
        assert todist.map(describe, [], reducer=len) == 0
        with pytest.raises(ValueError, match="mean_reducer needs at least one result"):
            todist.map(describe, [], reducer=todist.mean_reducer)

    world(1).on_zero(body)


def test_a_batch_of_tasks_is_split_into_tasks(world):
    def body():
        x = torch.arange(12.0).reshape(4, 3)
        shapes = todist.parallelize(todist.tasks)(lambda model, x: (todist.get_rank(), tuple(x.shape)))
        assert shapes(nn.Linear(3, 3), x) == [(0, (3,)), (0, (3,)), (1, (3,)), (1, (3,))]

    world(2).on_zero(body)


def test_a_call_of_one_worker_gives_the_value_itself(world):
    def body():
        model, x = mlp(), torch.ones(4, 6, dtype=torch.float64)
        assert todist.remote_call(todist.get_rank, 1) == 1
        assert todist.remote_call(describe, "worker0", 3, partitioner="its own") == (
            *(0, 3, ()),
            {"partitioner": "its own"},
        )
        assert todist.remote_sync_call(todist.get_rank, partitioner=1) == [
            1
        ]  # a list, whatever the partitioner
        loss = todist.remote_call(lambda model, x: model(x).pow(2).sum(), 1, model, x=x)
        for a, b in zip(gradients(loss, model), gradients(model(x).pow(2).sum(), model), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        with pytest.raises(KeyError) as caught:
            todist.remote_call({}.__getitem__, 1, "gone")
        assert isinstance(caught.value, todist.RemoteError)

    world(2).on_zero(body)


@pytest.mark.usefixtures("workers")
@each_row(
    ("call", "error", "text"),
    [
        (lambda: todist.map(describe, 3), TypeError, "items must be a list of tasks .* 'int' object"),
        (
            lambda: todist.map(describe, [3], args=4),
            TypeError,
            r"args must be a tuple, got int: .*args=\(x,\)",
        ),
        (lambda: todist.map(describe, [3], kwargs=[]), TypeError, "kwargs must be a dictionary, got list"),
        (lambda: todist.map(describe, [3], workers=[]), ValueError, "workers must name at least one"),
        (lambda: todist.map(describe, [3], workers="worker1"), TypeError, "workers must be a sequence"),
        (lambda: todist.map(describe, [3], workers=[9]), ValueError, r"in \[0, 3\), got 9"),
        (lambda: todist.remote_call(1, describe), TypeError, "worker must be a rank or a name, got function"),
        (lambda: todist.remote_call(describe, None), TypeError, "a rank or a name, got NoneType"),
        (lambda: todist.remote_call(describe, 9), ValueError, r"in \[0, 3\), got 9"),
    ],
)
def test_bad_input_is_a_clear_error(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_an_iterator_s_own_error_is_not_taken_for_another(workers):
    def broken():
        yield 1
        raise TypeError("of its own")

    with pytest.raises(TypeError, match=r"^of its own$"):
        todist.map(describe, broken())


def test_without_a_group_there_is_no_call():
    for call in (lambda: todist.map(describe, []), lambda: todist.remote_call(describe, 0)):
        with pytest.raises(NotInitializedError, match=r"decorate .* `main` with `@todist.auto_init_rpc\(\)`"):
            call()
