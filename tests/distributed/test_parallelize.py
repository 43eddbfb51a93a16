"""``parallelize``: a batch spread over workers → the values and gradients of one process."""

from __future__ import annotations

import copy
import math
import pickle
from collections import UserDict

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.distributed.programs import data, gradients, mlp, mse, where


@todist.parallelize(todist.batch_partitioner, todist.mean_reducer)
def module_level(model, x, y):
    """Its docstring."""
    return mse(model, x, y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))

    def forward(self, x):
        return (x @ self.weight).sum()

    @todist.parallelize(todist.batch_partitioner, todist.sum_reducer)
    def spread(self, x):
        return self(x)


@pytest.mark.every_row
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_data_parallel_gradients_equal_one_process(world, size, dtype):
    def body():
        model, (x, y) = mlp(dtype), data(rows=11, dtype=dtype)
        loss = module_level(model, x, y)
        expected = mse(model, x, y)
        tolerance = 1e-6 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
        for a, b in zip(gradients(loss, model), gradients(expected, model), strict=True):
            assert (a - b).abs().max() <= tolerance * b.abs().max()

    world(size).on_zero(body)


def test_the_decorated_function_is_not_touched():
    def loss(x):
        """Says what."""
        return x

    attributes = dict(vars(loss)), loss.__name__, loss.__qualname__, loss.__module__
    wrapped = todist.parallelize()(loss)
    assert (dict(vars(loss)), loss.__name__, loss.__qualname__, loss.__module__) == attributes
    assert wrapped.__wrapped__ is loss
    assert (wrapped.__name__, wrapped.__doc__) == ("loss", "Says what.")
    todist.parallelize()(math.sqrt)
    assert math.sqrt.__name__ == "sqrt"
    assert pickle.loads(pickle.dumps(module_level)) is module_level
    assert copy.deepcopy(module_level) is module_level


def test_a_module_and_a_method_as_functions_get_gradients(world):
    def body():
        model, x = Model(), torch.ones(6, 3)
        for loss in (
            todist.parallelize(reducer=todist.sum_reducer)(model)(x),
            todist.parallelize(reducer=todist.sum_reducer)(model.forward)(x),
            model.spread(x),
        ):
            (grad,) = torch.autograd.grad(loss, model.weight)
            torch.testing.assert_close(grad, torch.full((3,), 6.0))

    world(3).on_zero(body)


def test_by_default_the_results_are_a_list_in_order(world):
    def body():
        got = todist.parallelize(todist.dim_partitioner(0, exclusive=True, keepdim=True))(where)(
            torch.arange(7)
        )
        assert [x.item() for _, x in got] == list(range(7))
        assert [rank for rank, _ in got] == sorted(rank for rank, _ in got)
        assert {rank for rank, _ in got} == {0, 1, 2}
        single = todist.remote_sync_call(where, args=(5,), partitioner="worker2")
        assert single == [(2, 5)]

    world(3).on_zero(body)


def test_custom_partitioners_and_reducers(world):
    def by_hand(*args, **kwargs):
        return [(2, args, {}), ("worker0", (args[0] + 1,), None), (1, None, {"x": 9})]

    def body():
        got = todist.remote_sync_call(where, args=(5,), partitioner=by_hand, reducer=dict)
        assert got == {2: 5, 0: 6, 1: 9}
        sizes = []
        todist.parallelize(
            todist.batch_partitioner, lambda results, sizes=None, keep=sizes: keep.append(sizes) or 1
        )(where)(torch.arange(7))
        assert sizes == [[3, 2, 2]]

    world(3).on_zero(body)


def test_a_stochastic_loss_does_not_depend_on_the_number_of_workers(world):
    def body():
        torch.manual_seed(7)
        noisy = todist.parallelize(todist.dim_partitioner(0, exclusive=True, keepdim=True))(_noise)
        first, second = noisy(torch.zeros(10)), noisy(torch.zeros(10))
        after = torch.rand(())
        torch.manual_seed(7)
        again = noisy(torch.zeros(10))
        return torch.stack(first), torch.stack(second), torch.stack(again), after

    runs = [world(size).on_zero(body) for size in (1, 2, 5)]
    for run in runs[1:]:
        for a, b in zip(run, runs[0], strict=True):
            assert torch.equal(a, b)
    first, second, again, _ = runs[0]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert len(set(first.flatten().tolist())) == 10


def _noise(x):
    return x + torch.randn(1)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_vectorized_tasks_give_the_same_values_and_gradients(world, chunk_size):
    def task(params, x, y):
        grads = torch.func.grad(lambda p: ((x @ p["w"] - y) ** 2).mean())(params)
        adapted = {k: p - 0.1 * grads[k] for k, p in params.items()}
        return {"loss": ((x @ adapted["w"] - y) ** 2).mean(), "prediction": x @ adapted["w"]}

    def body():
        params = {"w": torch.randn(4, 2, dtype=torch.float64, requires_grad=True)}
        x, y = torch.randn(7, 5, 4, dtype=torch.float64), torch.randn(7, 5, 2, dtype=torch.float64)
        results = []
        for settings in ({}, {"vectorize": True, "chunk_size": chunk_size}):
            spread = todist.parallelize(
                todist.dim_partitioner(0, exclusive=True, keepdim=False), todist.mean_reducer, **settings
            )(task)
            out = spread(todist.replicated(params), x, y)
            results.append((*torch.autograd.grad(out["loss"], params["w"]), out["prediction"]))
        torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)

    world(3).on_zero(body)


def test_vectorized_calls_run_the_function_once_a_worker(world):
    def body():
        counted = todist.parallelize(todist.dim_partitioner(0, exclusive=True), vectorize=True)(_count)
        counted(torch.zeros(8, 2))
        return todist.remote_sync_call(_counted, partitioner=1)[0]

    assert world(2).on_zero(body) == [1]


def test_vectorized_calls_in_chunks_run_it_once_a_chunk(world):
    def body():
        options = {"vectorize": True, "chunk_size": 3}
        todist.parallelize(todist.dim_partitioner(0, exclusive=True), **options)(_count)(torch.zeros(8, 2))
        return todist.remote_sync_call(_counted, partitioner=1)[0]

    assert world(2).on_zero(body) == [1, 1]  # four tasks: three and one


_calls = []


def _counted():
    return list(_calls)


def _count(x):
    _calls.append(1)
    return x


def test_vectorize_says_what_it_cannot_map(world):
    def body():
        def tasks(*parts):
            return lambda: [(1, (part,), {}) for part in parts]

        for parts, error, text in (
            (("a", "b"), TypeError, r"args, kwargs\)\[0\]\[0\] differs between tasks and is str"),
            ((torch.zeros(2), torch.zeros(3)), ValueError, r"has shapes \[\(2,\), \(3,\)\]"),
        ):
            with pytest.raises(error, match=text):
                todist.remote_sync_call(lambda x: x, partitioner=tasks(*parts), vectorize=True)

    world(2).on_zero(body)


def test_containers_are_mapped_over_when_tasks_are_vectorized():
    def body():
        batch = UserDict(x=torch.arange(6.0).reshape(3, 2))
        doubled = todist.parallelize(todist.tasks, todist.stack_reducer, vectorize=True)(lambda b: b["x"] * 2)
        return doubled(batch)

    assert todist.auto_init_rpc()(body)().tolist() == [[0, 2], [4, 6], [8, 10]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_tensors_keep_their_kind_of_device_and_their_graph(world):
    def body():
        model, (x, y) = mlp().cuda(), [tensor.cuda() for tensor in data()]
        loss = module_level(model, x, y)
        assert loss.is_cuda
        for a, b in zip(gradients(loss, model), gradients(mse(model, x, y), model), strict=True):
            torch.testing.assert_close(a, b)
        host, (x, y) = mlp(), data()
        loss = todist.parallelize(todist.batch_partitioner, todist.mean_reducer, device="auto")(mse)(
            host, x, y
        )
        assert loss.is_cuda
        for a, b in zip(gradients(loss, host), gradients(mse(host, x, y), host), strict=True):
            torch.testing.assert_close(a, b)

    world(2).on_zero(body)


def test_an_own_share_that_may_move_a_clone_to_a_gpu_runs_on_a_copy(world):
    """The path is for machines with a GPU; here it is taken by pretending to have one."""

    def moves(model, x, y):
        model.to(torch.float64)  # swaps the data of tensors, as `.to("cuda")` does
        return mse(model, x.double(), y.double())

    def body():
        from unittest.mock import patch

        model, (x, y) = mlp(torch.float32), data(rows=5, dtype=torch.float32)
        clone = todist.module_clone(model, by="clone")
        with (
            patch("torch.cuda.is_available", return_value=True),
            patch("torch.Tensor.cuda", torch.Tensor.cpu),
        ):
            loss = todist.parallelize(reducer=todist.mean_reducer)(moves)(clone, x, y)
            grads = gradients(loss, model)
        for a, b in zip(grads, gradients(mse(model, x, y), model), strict=True):
            torch.testing.assert_close(a.float(), b)
        assert all(p.dtype == torch.float32 for p in clone.parameters())

    world(2).on_zero(body)
