"""Gradients through a remote call, of first and higher order, are those of a local one."""

from __future__ import annotations

import functools
import warnings
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchopt_dist as todist
from tests.distributed.programs import (
    Net,
    cube,
    data,
    functional_mse,
    gradients,
    kept_on,
    mlp,
    mse,
    product,
    remote,
    vectors,
)
from torchopt_dist.distributed.calls.graph import RemoteGraph
from torchopt_dist.torch_private import advance_sequence_numbers

pytestmark = pytest.mark.filterwarnings("ignore:.*has changed buffers of its arguments:UserWarning")


def test_first_and_second_order_pass_gradcheck(world):
    def body():
        a, b = vectors()
        call = remote(product)
        return torch.autograd.gradcheck(call, (a, b)), torch.autograd.gradgradcheck(call, (a, b))

    assert world(2).on_zero(body) == (True, True)


def test_third_order_equals_the_local_one(world):
    def body():
        a, b = vectors()

        def third(function):
            out = function(a, b)[1].sum()
            for _ in range(2):
                out = torch.autograd.grad(out, a, create_graph=True)[0].sum()
            return torch.autograd.grad(out, (a, b))

        return [
            (here - there).abs().max().item()
            for here, there in zip(third(product), third(remote(product)), strict=True)
        ]

    assert max(world(2).on_zero(body)) < 1e-12


def scaled_square(x, rank):
    return (x * (0.1 + rank)).exp().sum().square()


@pytest.mark.parametrize("fan_out", [None, 3])
def test_gradients_are_added_up_by_rank_whatever_is_in_front_of_the_arguments(world, fan_out):
    """The own share's first; so sums have the same bits also where a share gets a view."""

    def body():
        came, finish, size = [], RemoteGraph.finish_backward, 6

        def noting(graph, *backward):
            came.append(graph.worker)
            return finish(graph, *backward)

        def derivatives(viewed):
            def shares(x):
                return [(rank, (x.view_as(x) if rank in viewed else x, rank), {}) for rank in range(size)]

            call = todist.parallelize(shares, todist.sum_reducer, fan_out=fan_out)(scaled_square)
            x = torch.linspace(-1, 1, 7, requires_grad=True)
            came.clear()
            value = call(x).sqrt()
            (first,) = torch.autograd.grad(value, x, create_graph=True)
            first.square().sum().backward()
            each = sorted({*came})
            assert came == 3 * each
            assert each == [*range(size)] if fan_out is None else 0 < len(each) < size
            return first

        RemoteGraph.finish_backward = noting
        advance_sequence_numbers(
            100
        )  # as in a program that has computed before, whose views have higher numbers
        try:
            expected = derivatives(())
            for viewed in [(2,), (1, 4), (0, 3, 5)] if fan_out is None else ():
                assert torch.equal(derivatives(viewed), expected)
        finally:
            RemoteGraph.finish_backward = finish

    world(6, env={"TODIST_TRANSPORT": "zmq"}).on_zero(body)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_outer_gradient_goes_through_an_inner_loss_spread_over_workers(world, size):
    def body():
        model = mlp()
        x, y = data(rows=11)  # uneven on 2, 3 and 4 workers
        spread = todist.parallelize(reducer=todist.mean_reducer)(functional_mse)

        def meta_gradient(loss):
            params = dict(model.named_parameters())
            for _ in range(3):
                grads = torch.autograd.grad(
                    loss(todist.replicated(params) if loss is spread else params, x, y),
                    tuple(params.values()),
                    create_graph=True,
                )
                params = {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads, strict=True)}
            return torch.autograd.grad(
                loss(todist.replicated(params) if loss is spread else params, x, y),
                tuple(model.parameters()),
            )

        return [
            ((a - b).abs().max() / b.abs().max()).item()
            for a, b in zip(meta_gradient(spread), meta_gradient(functional_mse), strict=True)
        ]

    assert max(world(size).on_zero(body)) < 1e-12


def test_plain_backward_fills_grad(world):
    def body():
        model, (x, y) = mlp(), data(rows=7)
        todist.parallelize(todist.batch_partitioner, todist.mean_reducer)(mse)(model, x, y).backward()
        expected = gradients(mse(model, x, y), model)
        return [(p.grad - e).abs().max().item() for p, e in zip(model.parameters(), expected, strict=True)]

    assert max(world(3).on_zero(body)) < 1e-12


def test_frozen_tied_and_buffers(world):
    def body():
        torch.manual_seed(0)
        model, (x, y) = Net().eval(), data()
        far = gradients(remote(mse)(model, x, y), model)
        near = gradients(mse(model, x, y), model)
        assert len(far) == len(near) == 5 + 2  # the tied weight once, the norm's two unused
        for a, b in zip(far, near, strict=True):
            if b is None:
                assert a is None or not a.any()
            else:
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)

    world(2).on_zero(body)


def test_buffers_changed_by_a_worker_do_not_leak_back(world):
    def body():
        model, (x, y) = Net().train(), data()
        before = model.norm.running_mean.clone()
        remote(mse)(model, x, y).backward()
        torch.testing.assert_close(model.norm.running_mean, before)
        # asked for, they come
        state = remote(lambda m, x: (m(x), dict(m.named_buffers()))[1])(model, x)
        model.load_state_dict({k: v for k, v in state.items() if k != "shift"}, strict=False)
        assert not torch.equal(model.norm.running_mean, before)

    world(2).on_zero(body)


@pytest.mark.parametrize("wrapped", ["dict", "list", "namedtuple", "closure", "partial", "method"])
def test_tensors_anywhere_get_their_gradients(world, wrapped):
    def body():

        a, b = vectors()
        pair = namedtuple("pair", "left right")  # noqa: PYI024 - the plain kind is what is tested

        class Holder:
            def __init__(self, weight):
                self.weight = weight

            def times(self, other):
                return (self.weight * other).sum()

        calls = {
            "dict": lambda: remote(lambda d: (d["x"]["y"] * d["z"]).sum())({"x": {"y": a}, "z": b}),
            "list": lambda: remote(lambda xs: (xs[0] * xs[1][0]).sum())([a, (b,)]),
            "namedtuple": lambda: remote(lambda p: (p.left * p.right).sum())(pair(a, b)),
            "closure": lambda: remote(lambda: (a * b).sum())(),
            "partial": lambda: remote(functools.partial(lambda u, v: (u * v).sum(), a))(b),
            "method": lambda: remote(Holder(a).times)(b),
        }
        grads = torch.autograd.grad(calls[wrapped](), (a, b))
        torch.testing.assert_close(grads, (b, a))

    world(2).on_zero(body)


def test_non_scalar_integer_and_unconnected_outputs(world):
    def outputs(x):
        return {"vector": x * 2, "integer": x.argmax(), "detached": x.detach(), "number": 3, "same": x}

    def body():
        x, _ = vectors()
        out = remote(outputs)(x)
        assert out["number"] == 3
        assert not out["integer"].requires_grad
        assert out["integer"].dtype == torch.int64
        assert not out["detached"].requires_grad
        (grad,) = torch.autograd.grad((out["vector"] * x).sum() + out["same"].sum(), x)
        torch.testing.assert_close(grad, 4 * x + 1)

    world(2).on_zero(body)


def test_results_can_be_changed_in_place(world):
    def body():
        x, _ = vectors()
        out = remote(lambda x: x * 2)(x)
        out += 1
        out.mul_(3)
        (grad,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(grad, torch.full_like(x, 6))

    world(2).on_zero(body)


class ShowsState(torch.autograd.Function):
    """The identity, whose backward adds what of its thread's state decides how it computes."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        wide = torch.get_default_dtype() is torch.float64
        return grad + 10 * torch.is_autocast_enabled("cpu") + 100 * wide + 1000 * torch.is_grad_enabled()


def test_a_backward_runs_under_the_state_of_the_thread_that_calls_it(world):
    """As in one process, so the autocast of a call is not that of its backward. In bfloat16 514 becomes 512."""

    def loss(w, x):
        return (ShowsState.apply(x) @ ShowsState.apply(w)).square().sum()

    def derivatives(call):
        w, x = torch.tensor([[257.0]], requires_grad=True), torch.ones(1, 1, requires_grad=True)
        found = []
        for before, after in ((False, True), (True, False)):
            with torch.autocast("cpu", torch.bfloat16, enabled=before):
                value = call(w, x)
            with torch.autocast("cpu", torch.bfloat16, enabled=after):
                found += torch.autograd.grad(value, (w, x), retain_graph=True)
                first = torch.autograd.grad(value, (w, x), create_graph=True)
            found += [*first, *torch.autograd.grad(sum(first), (w, x), retain_graph=True)]
            torch.set_default_dtype(torch.float64)
            try:
                found += torch.autograd.grad(value, (w, x))
            finally:
                torch.set_default_dtype(torch.float32)
        return [each.item() for each in found]

    def body():
        expected = derivatives(loss)
        assert expected[0] == 512 + 10

        def nested(w, x):
            return todist.remote_call(loss, 2, w, x)

        for rank in range(3):
            assert derivatives(lambda w, x, rank=rank: todist.remote_call(loss, rank, w, x)) == expected
        assert derivatives(lambda w, x: todist.remote_call(nested, 1, w, x)) == expected

    world(3).on_zero(body)


def test_returned_parameters_are_parameters(world):
    def body():
        model = remote(lambda: nn.Linear(2, 2))()
        assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad for p in model.parameters())

    world(2).on_zero(body)


def test_retain_graph_and_several_backwards(world):
    def body():
        x, _ = vectors()
        out = remote(cube)(x)
        out.backward(retain_graph=True)
        out.backward(retain_graph=True)
        out.backward()
        torch.testing.assert_close(x.grad, 9 * x.detach() ** 2)
        with pytest.raises(RuntimeError, match="second time"):
            out.backward()

    world(2).on_zero(body)


def test_each_of_several_results_has_a_backward_of_its_own(world):
    """As in one process: what shares only leaves is used up apart, and what shares more is not."""

    def body():
        x, w = vectors()
        tasks = [(i % 2, (i, x, w), {}) for i in range(6)]
        losses = todist.remote_sync_call(lambda i, x, w: (x * w).pow(i + 1).sum(), partitioner=lambda: tasks)
        for loss in losses:
            loss.backward()
        mine = [x.grad, w.grad]
        x.grad = w.grad = None
        sum((x * w).pow(i + 1).sum() for i in range(6)).backward()
        torch.testing.assert_close(mine, [x.grad, w.grad])
        with pytest.raises(RuntimeError, match="second time"):
            losses[3].backward()
        assert kept_on(1) == 0

        def two(x):
            y = x.exp()
            return y.sum(), (y * y).sum(), x.sum()

        first, second, third = remote(two)(x)
        first.backward()
        with pytest.raises(RuntimeError, match="second time: give retain_graph=True"):
            first.backward()  # though the others can still be used
        third.backward()
        with pytest.raises(RuntimeError, match="second time"):
            second.backward()
        del first, second, third
        assert kept_on(1) == 0

    world(2).on_zero(body)


def test_a_recorded_gradient_of_each_of_several_results(world):
    def body():
        x, w = vectors()

        def two(x, w):
            return (x**3 * w).sum(), (x**2 * w**2).sum()

        found = []
        for function in (remote(two), two):
            second = 0.0
            for value in function(x, w):
                (slope,) = torch.autograd.grad(value, x, create_graph=True)
                second = second + (slope**2).sum()
            found.append(torch.autograd.grad(second, (x, w)))
        torch.testing.assert_close(*found)
        assert kept_on(1) == 0

    world(2).on_zero(body)


def test_an_input_that_is_changed_in_place_before_its_gradient_is_recorded(world):
    def body():
        x, w = vectors()
        y = x * 1.0
        out = remote(lambda y, w: (y**3 * w).sum())(y, w)
        with torch.no_grad():
            y.mul_(2.0)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* number 0, of shape"):
            torch.autograd.grad(out, w, create_graph=True)

    world(2).on_zero(body)


def test_allow_unused_and_partial_inputs(world):
    def body():
        a, b = vectors()
        out = remote(lambda a, b: (a * 2).sum())(a, b)
        with_unused = torch.autograd.grad(out, (a, b), allow_unused=True, retain_graph=True)
        assert with_unused[1] is None or not with_unused[1].any()
        torch.testing.assert_close(torch.autograd.grad(out, a)[0], torch.full_like(a, 2))

    world(2).on_zero(body)


def test_one_of_several_results_is_differentiated(world):
    def body():
        a, b = vectors()
        first, second = remote(product)(a, b)
        local = product(a, b)
        for mine, other in ((first, local[0]), (second, local[1])):
            torch.testing.assert_close(
                torch.autograd.grad(mine.sum(), (a, b), retain_graph=True),
                torch.autograd.grad(other.sum(), (a, b), retain_graph=True),
            )

    world(2).on_zero(body)


def test_hooks_and_anomaly_mode(world):
    def body():
        x, _ = vectors()
        seen = []
        out = remote(lambda x: x**2)(x)
        out.register_hook(lambda grad: seen.append("result") or grad * 2)
        x.register_hook(lambda grad: seen.append("input"))
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            out.sum().backward()
        assert seen == ["result", "input"]
        torch.testing.assert_close(x.grad, 4 * x.detach())

    def quiet():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that anomaly mode is slow
            body()

    world(2).on_zero(quiet)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around_a_call(world, reentrant):
    def body():
        x, _ = vectors()
        out = checkpoint(lambda x: remote(cube)(x * 2), x, use_reentrant=reentrant)
        out.backward()
        torch.testing.assert_close(x.grad, 24 * x.detach() ** 2)

    world(2).on_zero(body)


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("order", [1, 2])
def test_a_reentrant_checkpoint_inside_a_call_is_torchs_own_error_with_the_remedy(world, worker, order):
    def body():
        (x, _), square = vectors(), lambda x: checkpoint(torch.square, x, use_reentrant=True)
        value = todist.parallelize(worker, todist.sum_reducer)(square)(x).sum()
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            value.backward() if order == 1 else torch.autograd.grad(value, x, create_graph=True)

    world(2).on_zero(body)


class Costly(torch.autograd.Function):
    """Its backward says that it ran."""

    @staticmethod
    def forward(ctx, x):
        return x**2

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("nobody asked for this gradient")


def _with_a_costly_part(cheap, costly, module):
    return (module(cheap) * Costly.apply(costly)).sum()


def test_only_the_gradients_that_are_asked_for_are_computed(world):
    def body():
        a, b = vectors()
        middle, module = a + a, nn.Linear(5, 5).double()
        expected = torch.autograd.grad((module(middle) * b**2).sum(), [a, module.weight])
        for worker in (0, 1):
            call = functools.partial(remote(_with_a_costly_part, worker), middle, b, module)
            torch.testing.assert_close(torch.autograd.grad(call(), [a, module.weight]), expected)
            (by_middle,) = torch.autograd.grad(call(), middle, create_graph=True)
            torch.testing.assert_close(2 * by_middle.detach(), expected[0])
            call().backward(inputs=[module.weight])
            torch.testing.assert_close(module.weight.grad, expected[1])
            module.zero_grad()
            with pytest.raises(ValueError, match="nobody asked"):
                torch.autograd.grad(call(), b)
            with pytest.raises(ValueError, match="nobody asked"):
                call().backward()
            module.zero_grad()

    world(2).on_zero(body)


def of_words(table, words):
    return table(words).exp().sum(-1).mean()


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_come_back(world, make):
    """They are dense then, as all that is sent."""

    def body():
        table, words = make(7, 3, sparse=True).double(), torch.arange(12).remainder(5).reshape(4, 3)
        found = []
        for function in (of_words, todist.parallelize(reducer=todist.mean_reducer)(of_words)):
            table.zero_grad()
            function(table, words).backward()
            found.append(table.weight.grad.to_dense())
        return (found[0] - found[1]).abs().max().item()

    assert world(2).on_zero(body) < 1e-14
