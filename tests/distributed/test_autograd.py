"""``autograd.context``: its ``backward`` and ``grad`` are exactly those of one process, also when repeated."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc

import torchopt_dist as todist
from tests.distributed.programs import Net, data, gradients, kept_on, mlp, mse
from torchopt_dist.distributed.group.group import current_group

pytestmark = pytest.mark.torch_rpc

spread = todist.parallelize(todist.batch_partitioner, todist.mean_reducer)(mse)


def scaled(w, k):
    return (w * k).sum()


def far(w, k):
    return todist.remote_sync_call(scaled, args=(w, k), partitioner=1)[0]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("clone", [True, False], ids=["clone", "as it is"])
def test_backward_and_grad_equal_one_process(world, size, clone):
    def body():
        model, (x, y) = mlp(), data(rows=7)
        expected = gradients(mse(model, x, y), model)
        with todist.autograd.context() as context_id:
            sent = todist.module_clone(model, by="clone") if clone else model
            grads = todist.autograd.grad(context_id, spread(sent, x, y), tuple(model.parameters()))
        torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-15)
        assert all(p.grad is None for p in model.parameters())
        with todist.autograd.context() as context_id:
            sent = todist.module_clone(model, by="clone") if clone else model
            todist.autograd.backward(context_id, spread(sent, x, y))
        torch.testing.assert_close(
            [p.grad for p in model.parameters()], list(expected), rtol=1e-12, atol=1e-15
        )

    world(size).on_zero(body)


def test_repeated_calls_in_one_context_are_exact(world):
    def body():
        w = torch.ones(3, requires_grad=True)
        with todist.autograd.context() as context_id:
            two, five = far(w, 2.0), far(w, 5.0)
            (first,) = todist.autograd.grad(context_id, two, w)
            (second,) = todist.autograd.grad(context_id, five, w)
            assert torch.equal(first, torch.full((3,), 2.0))  # untouched by the second
            assert torch.equal(second, torch.full((3,), 5.0))
            todist.autograd.backward(context_id, far(w, 2.0))
            todist.autograd.backward(context_id, far(w, 5.0))
            assert torch.equal(w.grad, torch.full((3,), 7.0))

    world(2).on_zero(body)


def test_a_call_that_takes_no_part_holds_nothing_up(world):
    def body():
        w = torch.ones(3, requires_grad=True)
        with todist.autograd.context() as context_id:
            unused = far(w, 9.0)
            (grad,) = todist.autograd.grad(context_id, far(w, 2.0), w)
        del unused
        assert torch.equal(grad, torch.full((3,), 2.0))
        assert kept_on(1) == 0

    world(2).on_zero(body)


def test_torchs_own_context_and_calls_work_beside_ours(world):
    def body():
        w = torch.ones(3, requires_grad=True)
        with dist_autograd.context() as context_id:
            loss = far(w, 2.0) + rpc.rpc_sync("worker1", scaled, args=(w, 5.0))
            dist_autograd.backward(context_id, [loss])
            grads = dist_autograd.get_gradients(context_id)
            assert torch.equal(grads[w], torch.full((3,), 7.0))

    world(2).on_zero(body)


def test_several_roots_inputs_and_unused_leaves(world):
    def body():
        w, v, u = (torch.ones(3, requires_grad=True) for _ in range(3))
        with todist.autograd.context() as context_id:
            roots = [far(w, 2.0), far(v, 3.0)]
            todist.autograd.backward(context_id, roots, inputs=w)
            assert v.grad is None
            assert torch.equal(w.grad, torch.full((3,), 2.0))
            grads = todist.autograd.grad(context_id, far(w, 4.0), (w, u), allow_unused=True)
            assert torch.equal(grads[0], torch.full((3,), 4.0))
            assert grads[1] is None
            with pytest.raises(RuntimeError, match=r"inputs \[1\] are not used"):
                todist.autograd.grad(context_id, far(w, 4.0), (w, v))
            loss = far(w, 1.0)
            for _ in range(3):
                todist.autograd.grad(context_id, loss, w, retain_graph=True)
            assert w in todist.autograd.get_gradients(context_id)

    world(2).on_zero(body)


def test_frozen_and_tied_parameters(world):
    def body():
        torch.manual_seed(0)
        model, (x, y) = Net().eval(), data()
        with todist.autograd.context() as context_id:
            todist.autograd.backward(context_id, spread(model, x, y))
        expected = gradients(mse(model, x, y), model)
        trained = [p for p in model.parameters() if p.requires_grad]
        for p, grad in zip(trained, expected, strict=True):
            assert (p.grad is None) == (grad is None)
            if grad is not None:
                torch.testing.assert_close(p.grad, grad, rtol=1e-12, atol=1e-15)
        assert model.frozen.weight.grad is None

    world(2).on_zero(body)


def sine_and_its_square(x):
    sine = torch.sin(x)
    return sine, sine * sine


def test_a_result_cannot_be_differentiated_with_respect_to_another(world):
    def body(worker):
        x = torch.tensor(0.5, requires_grad=True)
        sine, square = todist.remote_call(sine_and_its_square, worker, x)
        (slope,) = torch.autograd.grad(square, x, retain_graph=True)
        torch.testing.assert_close(slope, torch.sin(2 * x).detach())
        with pytest.raises(RuntimeError, match="index 0 appears to not have been used"):
            torch.autograd.grad(square, sine, retain_graph=True)
        (factor,) = torch.autograd.grad(sine * square, sine)
        torch.testing.assert_close(factor, torch.sin(x).detach() ** 2)  # of the product alone

    for worker in (0, 1):  # the own share is no other than the rest
        world(2).on_zero(body, worker)


class NoSuchSlopeError(Exception):
    """An error of the caller's, with more arguments than its text."""

    def __init__(self, text, at):
        super().__init__(text, at)
        self.at = at


class SlopeFails(torch.autograd.Function):
    """The identity, without derivative."""

    @staticmethod
    def forward(ctx, x):
        """The identity."""
        return x.clone()

    @staticmethod
    def backward(ctx, bar):
        """Raise an error."""
        raise NoSuchSlopeError("no slope here", at=int(bar[0]))


def flat(x):
    return SlopeFails.apply(x).sum()


def test_an_error_of_a_workers_backward_keeps_its_class(world):
    def body(worker):
        w = torch.ones(3, requires_grad=True)
        with todist.autograd.context() as context_id:
            for call in (todist.autograd.backward, partial(todist.autograd.grad, inputs=w)):
                with pytest.raises(NoSuchSlopeError, match="no slope here") as caught:
                    call(context_id, todist.remote_call(flat, worker, w))
                assert caught.value.at == 1
            loss = far(w, 2.0)
            todist.autograd.grad(context_id, loss, w)
            with pytest.raises(RuntimeError, match="graph of a remote call a second time"):
                todist.autograd.grad(context_id, loss, w)
            assert torch.equal(todist.autograd.grad(context_id, far(w, 3.0), w)[0], torch.full((3,), 3.0))
        assert not current_group().errors

    for worker in (0, 1):
        world(2).on_zero(body, worker)


def test_bad_input(world):
    def body():
        w = torch.ones(3, requires_grad=True)
        with todist.autograd.context() as context_id:
            loss = far(w, 2.0)
            for call, error, text in (
                (
                    lambda: todist.autograd.backward(context_id, w * 2),
                    ValueError,
                    r"got shape \(3,\) for number 0",
                ),
                (lambda: todist.autograd.backward(context_id, torch.ones(())), RuntimeError, "no graph"),
                (lambda: todist.autograd.backward(context_id, []), ValueError, "at least one tensor"),
                (lambda: todist.autograd.grad(context_id, loss, w * 2), ValueError, "leaf tensors"),
                (lambda: todist.autograd.grad(context_id, [3], w), TypeError, "must be tensors, got int"),
                (
                    lambda: todist.autograd.backward(10**9, loss),
                    RuntimeError,
                    "no autograd context 1000000000",
                ),
            ):
                with pytest.raises(error, match=text):
                    call()
        with pytest.raises(RuntimeError, match="it has been left"):
            todist.autograd.backward(context_id, loss)

    world(2).on_zero(body)
    assert todist.autograd.is_available()
