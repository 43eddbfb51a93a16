"""The caller's own share means what another worker's share means, also where there is one process only."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.distributed.programs import mlp, mse

LARGE = 20_000
"""Elements of a tensor that is not copied for the own share."""


def alone(body):
    """``body`` in a group of this process only."""
    return todist.auto_init_rpc()(body)()


def slope(z, reg, x):
    """An inner gradient, in which ``reg`` is a number."""
    (inner,) = torch.autograd.grad(x * (z**3).sum() + reg * z.sum(), z, create_graph=True)
    return (inner**2).sum()


def slopes(*, isolate):
    """Value, and first and second derivative by ``z``, for arguments that depend on each other."""
    z = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    reg = (z**2).sum()
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    spread = todist.parallelize(
        todist.dim_partitioner(exclusive=True, keepdim=False), todist.sum_reducer, isolate_own_share=isolate
    )(slope)
    value = spread(todist.replicated(z), reg, x)
    (first,) = torch.autograd.grad(value, z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z)
    return [value.detach(), first.detach(), second]


def closed_form():
    """Σ_x ‖3xz² + r‖² and its derivatives by z, where r = ‖z‖² depends on z."""
    z = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    value = sum(((3 * x * z**2 + (z**2).sum()) ** 2).sum() for x in range(1, 5))
    (first,) = torch.autograd.grad(value, z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z)
    return [value.detach(), first.detach(), second]


def test_arguments_that_depend_on_each_other_give_one_gradient_on_any_number_of_workers(world):
    for got in (
        alone(lambda: slopes(isolate=True)),
        world(3).on_zero(lambda: slopes(isolate=True)),
    ):
        torch.testing.assert_close(got, closed_form())


def test_a_plain_own_share_sees_how_its_arguments_depend_on_each_other():
    z = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    inner = [3 * x * z**2 + (z**2).sum() + 2 * z * z.sum() for x in range(1, 5)]
    value = sum((part**2).sum() for part in inner)
    got = alone(lambda: slopes(isolate=False))
    torch.testing.assert_close(got[:2], [value.detach(), *torch.autograd.grad(value, z)])


class Remembers(nn.Module):
    """Changes its buffers, and a queue that is an attribute."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.queue = torch.zeros(LARGE)
        self.calls = []

    def forward(self, x):
        self.queue.add_(1)
        self.calls.append(len(x))
        return self.norm(x), self.queue.sum(), len(self.calls)


@pytest.mark.filterwarnings("ignore:.*has changed buffers of its arguments:UserWarning")
def test_what_the_function_does_to_its_objects_stays_there(world):
    def body():
        model, x, seen = Remembers(), torch.arange(12.0, dtype=torch.float64).reshape(3, 4), []

        extra, array = torch.ones(3), np.ones(LARGE)

        def function(model, x, extra, array, seen):
            first, queued, calls = model(x)
            loss = (first**3).sum() + model.norm.weight.sum()
            loss.backward(retain_graph=True)
            extra.zero_()
            array.fill(0)
            seen.append(1)
            return loss, queued, calls, model.norm.weight.grad is None

        for worker in range(todist.get_world_size()):
            ((loss, *others),) = todist.remote_sync_call(
                function, args=(model, x, extra, array, seen), partitioner=worker
            )
            loss.backward()
            assert others == [LARGE, 1, False]
        assert not seen
        assert not model.calls
        assert not model.queue.any()
        assert not model.norm.running_mean.any()
        assert extra.all()
        assert array.all()
        return model.norm.weight.grad, model.norm.num_batches_tracked

    gradient, batches = alone(body)
    model = Remembers().norm
    x = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
    ((model(x) ** 3).sum() + model.weight.sum()).backward()
    torch.testing.assert_close(gradient, model.weight.grad)
    assert batches == 0
    torch.testing.assert_close(world(2).on_zero(body), (2 * gradient, batches))


def test_large_tensors_are_not_copied():
    def body():
        x, p = torch.zeros(LARGE, requires_grad=True), nn.Parameter(torch.zeros(LARGE))
        (places,) = todist.remote_sync_call(
            lambda *xs: [x.data_ptr() for x in xs], args=(x, p), partitioner=0
        )
        assert places == [x.data_ptr(), p.data_ptr()]

    alone(body)


HELD = {elements: torch.ones(elements) for elements in (8, LARGE)}
"""What a module of this process holds."""


def held(elements):
    return HELD[elements]


@pytest.mark.parametrize("elements", [8, LARGE])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_result_is_no_memory_of_the_callers_or_of_another_result(elements, is_async):
    def body():
        leaf, array = torch.ones(elements, requires_grad=True), np.ones(elements)
        kept, module = torch.ones(elements), nn.Linear(elements, 1)
        mirrored = nn.Linear(elements, 1)
        optimizer = torch.optim.SGD(mirrored.parameters(), 0.1)

        def result(function, *args):
            if is_async:
                return todist.remote_async_call(function, args=args, partitioner=0).wait()[0]
            return todist.remote_call(function, 0, *args)

        results = [
            result(lambda x: x, leaf),
            result(lambda x: x[:3], leaf),
            result(lambda x: x.detach().numpy(), leaf),
            result(lambda x: {"tensor": torch.from_numpy(x)}, array)["tensor"],
            result(lambda x: x, array),
            result(lambda x: x, module).weight,
            result(lambda x: x.weight.view(-1), module),
            result(lambda x: x, todist.put(kept)),
            result(lambda x: x[1:], todist.put(kept)),
            result(lambda x: x.weight, todist.mirror(mirrored, optimizer)),
            result(held, elements),
            *result(lambda x: (x * 2, (x * 2).view(-1)), leaf),
            *result(lambda x: (lambda y: (y, y.view(-1), y[:1]))(x * 2), leaf),
        ]
        expected = [each.copy() if isinstance(each, np.ndarray) else each.clone() for each in results]
        for number, each in enumerate(results):
            with torch.no_grad():
                each *= 7
            for other, value in zip(results[number + 1 :], expected[number + 1 :], strict=True):
                np.testing.assert_array_equal(np.asarray(other.tolist()), np.asarray(value.tolist()))
        for own in (leaf, array, kept, HELD[elements]):
            assert (own == 1).all()
        for layer in (module, mirrored):
            assert layer.weight.abs().max() <= 1 / elements**0.5

    alone(body)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_result_can_be_changed_in_place_before_backward(world, rank):
    def body():
        x = torch.full((LARGE,), 2.0, requires_grad=True)
        for function, slope in ((lambda x: x, 3.0), (torch.exp, 3 * np.exp(2.0)), (lambda x: x * 2, 6.0)):
            result = todist.remote_call(function, rank, x)
            result.mul_(3)
            (gradient,) = torch.autograd.grad(result.sum(), x)
            torch.testing.assert_close(gradient, torch.full_like(x, slope))
        assert (x == 2).all()

    (world(2).on_zero if rank else alone)(body)


def test_a_large_argument_that_is_changed_in_place_is_named():
    def changes(x, model):
        with torch.no_grad():
            model.weight.add_(1)
        return x.sum()

    def body():
        model = nn.Linear(LARGE, 2)
        with pytest.warns(
            UserWarning, match=r"changes` has changed.*: weight of tasks\[0\]\[0\]\[1\] of shape \(2, 20000\)"
        ):
            todist.remote_sync_call(changes, args=(torch.zeros(2), model), partitioner=0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            todist.remote_sync_call(
                mse,
                args=(mlp(), torch.zeros(LARGE, 6).double(), torch.zeros(LARGE, 3).double()),
                partitioner=0,
            )

    alone(body)


def test_an_asynchronous_own_share_has_the_tensors_of_the_moment_of_the_call():
    def body():
        started, x = threading.Event(), torch.ones(LARGE, requires_grad=True)
        blocker = todist.remote_async_call(started.wait, partitioner=0, isolate_own_share=False)
        future = todist.remote_async_call(lambda x: (x**2).sum(), args=(x,), partitioner=0)
        with torch.no_grad():
            x.mul_(3)
        started.set()
        blocker.wait()
        (value,) = future.wait()
        value.backward()
        return value.item(), x.grad.unique().tolist()

    assert alone(body) == (LARGE, [2.0])


def test_what_cannot_be_rebuilt_is_an_error_that_says_what_helps():
    def body():
        lock, seen = threading.Lock(), []
        with pytest.raises(todist.errors.SerializationError, match="lock") as caught:
            todist.remote_sync_call(lambda: lock, partitioner=0)
        assert "isolate_own_share=False" in caught.value.__notes__[0]
        todist.remote_sync_call(lambda: seen.append(lock), partitioner=0, isolate_own_share=False)
        assert seen == [lock]
        with pytest.raises(ZeroDivisionError) as caught:
            todist.remote_sync_call(lambda: 1 / 0, partitioner=0)
        assert not isinstance(caught.value, todist.RemoteError)

    alone(body)


@pytest.mark.torch_rpc
def test_a_share_can_be_differentiated_in_a_context_and_after_the_group():
    def body():
        model = mlp()
        x, y = torch.ones(4, 6, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
        spread = todist.parallelize(reducer=todist.mean_reducer)(mse)
        with todist.autograd.context() as context_id:
            todist.autograd.backward(context_id, spread(model, x, y))
        inside = [p.grad.clone() for p in model.parameters()]
        return model, inside, mse(model, x, y), spread(model, x, y)

    model, inside, here, after = alone(body)
    expected = torch.autograd.grad(here, list(model.parameters()))
    torch.testing.assert_close(inside, [*expected])
    torch.testing.assert_close(torch.autograd.grad(after, list(model.parameters())), expected)


class Counted(nn.Linear):
    """Counts how often it is packed."""

    packed = 0

    def __getstate__(self):
        type(self).packed += 1
        return vars(self).copy()


def test_a_module_is_packed_once_a_call(world):
    def body():
        model, x = Counted(3, 1), torch.arange(18.0).reshape(6, 3)
        for function in (mse, lambda *arguments: mse(*arguments)):
            Counted.packed = 0
            loss = todist.parallelize(reducer=todist.mean_reducer)(function)(model, x, torch.zeros(6, 1))
            torch.testing.assert_close(loss, mse(model, x, torch.zeros(6, 1)))
            assert Counted.packed == 1

    world(3).on_zero(body)


class Logs(nn.Linear):
    """Logs its calls in a list, and computes by a function that it is given."""

    def __init__(self, log, function=torch.tanh):
        super().__init__(1, 1, bias=False)
        self.log, self.function = log, function

    def forward(self, x):
        self.log.append(1)
        return self.function(super().forward(x))


def test_modules_of_a_share_share_what_the_caller_s_share():
    def body():
        log, counted = [], []

        def counts(x):
            counted.append(1)
            return x

        def function(first, second, x):
            first(second(x))
            return len(first.log), len(second.log), len(log)

        one = nn.Sequential(Logs(log), Logs(log))
        assert todist.remote_sync_call(
            lambda net, x: (net(x).sum().item() > -2, len(net[0].log), len(net[1].log)),
            args=(one, torch.ones(1)),
            partitioner=0,
        ) == [(True, 2, 2)]
        apart = Logs(log), Logs(log)
        assert todist.remote_sync_call(function, args=(*apart, torch.ones(1)), partitioner=0) == [(2, 2, 2)]
        with_a_function = Logs([], counts)
        todist.remote_sync_call(
            lambda net, x: net(x).sum(), args=(with_a_function, torch.ones(1)), partitioner=0
        )
        assert not log
        assert not counted
        assert not with_a_function.log

    alone(body)


class Marked(torch.autograd.Function):
    """Keeps an object in the graph."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = Kept()
        KEPT.append(weakref.ref(ctx.kept))
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Kept:
    pass


KEPT = []


def test_gradients_of_two_leaves_are_added_to_each_on_its_own():
    """Also where the same gradient leads to both: a second backward adds to ``.grad`` in place."""

    def body():
        x, y = (torch.linspace(0, 1, size, requires_grad=True) for size in (5, 5))
        for call in (
            lambda: sum(todist.remote_call(torch.flatten, 0, each) for each in (x, y)),
            lambda: sum(todist.map(torch.flatten, [x, y])),
            lambda: todist.map(torch.flatten, [x, y], reducer=todist.sum_reducer),
        ):
            x.grad = y.grad = None
            loss = call().sin().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            expected = 2 * (x + y).detach().cos()
            torch.testing.assert_close([x.grad, y.grad], [expected, expected])

    alone(body)


@pytest.mark.parametrize("end", ["dropped", "differentiated", "failed"])
def test_the_graph_of_a_share_ends_with_the_caller_s(end):
    def function(x):
        y = Marked.apply(x)
        if end == "failed":
            raise ValueError(end)
        return y

    def body():
        KEPT.clear()
        x = torch.ones(3, requires_grad=True)
        try:
            (y,) = todist.remote_sync_call(
                Marked.apply if end != "failed" else function, args=(x,), partitioner=0
            )
            if end == "differentiated":
                y.sum().backward()
                assert KEPT[0]() is None
            assert (KEPT[0]() is None) == (end == "differentiated")
            del y
        except ValueError as error:
            error.__traceback__ = None
        gc.collect()
        assert [kept() for kept in KEPT] == [None]

    alone(body)
