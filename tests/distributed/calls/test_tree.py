"""What all workers share goes down a tree, and its gradient comes up as sums: ``parallelize(fan_out=...)``."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import torchopt_dist as todist
from tests.distributed.programs import edges, kept, lie_right
from torchopt_dist.distributed.calls import relay as relay_module
from torchopt_dist.distributed.calls.tree import tree
from torchopt_dist.distributed.group import chunks as chunks_module
from torchopt_dist.distributed.group.chunks import CHUNK
from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.serialization.wire import SMALL
from torchopt_dist.errors import CallTimeoutError, WorkerLostError

pytestmark = pytest.mark.filterwarnings("ignore:.*has changed buffers of its arguments:UserWarning")

RPC, ZMQ = {"TODIST_TRANSPORT": "rpc"}, {"TODIST_TRANSPORT": "zmq"}


# ------------------------------------------------------------------------------------------------------ derivatives


def to_each(size):
    """All arguments to the first ranks, and to each one number."""

    def partitioner(*shared):
        return [(rank, (*shared, rank), {}) for rank in range(size)]

    return partitioner


def wave(x, scales, rank):
    return ((1 + rank) * x).sin() * scales.prod() + (x * scales[rank % 2]) ** 2


def gradients_are_those_of_finite_differences():
    torch.manual_seed(0)
    x = torch.randn(1, dtype=torch.float64, requires_grad=True)
    scales = torch.randn(2, dtype=torch.float64, requires_grad=True)
    for size, fan_out in ((3, 1), (8, 2)):
        if size == 8:  # the three numbers go in three chunks, and so do their gradients
            for worker in range(size):
                todist.remote_call(cut_from, worker, 0, 8)
        call = todist.parallelize(to_each(size), todist.sum_reducer, fan_out=fan_out)(wave)
        assert gradcheck(call, (x, scales))
        assert gradgradcheck(call, (x, scales))
    with todist.profile() as profile:
        torch.autograd.grad(call(x, scales), (x, scales), create_graph=True)
    assert (
        len(bytes_to_the_caller(profile)) >= fan_out * 5
    )  # replies to the call, chunks, replies to the backward
    for worker in range(size):
        todist.remote_call(cut_from, worker, SMALL, CHUNK)


def cut_from(small, chunk):
    """On a worker: cut tensors of more bytes into chunks of so many."""
    chunks_module.SMALL, chunks_module.CHUNK = small, chunk


class Model(nn.Module):
    """With buffers and dropout; one parameter travels in chunks, the others in messages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 1))
        self.wide = nn.Parameter(torch.linspace(0, 1, CHUNK // 4).reshape(2, -1))
        self.double()

    def forward(self, x, y):
        assert lie_right(x, y, *self.state_dict().values())
        return F.mse_loss(F.dropout(self.net(x), 0.2), y) + (self.wide * x.mean()).square().sum()

    def nbytes(self):
        return sum(tensor.nbytes for tensor in self.state_dict().values())


def loss_of(model, x, y):
    return model(x, y)


def derivatives(fan_out, model):
    torch.manual_seed(3)
    x, y = torch.randn(19, 6, dtype=torch.float64), torch.randn(19, 1, dtype=torch.float64)
    call = todist.parallelize(todist.batch_partitioner, todist.mean_reducer, fan_out=fan_out)(loss_of)
    leaves = [*model.parameters()]
    with todist.profile() as profile:
        value = call(model, x, y)
        first = torch.autograd.grad(value, leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    assert lie_right(value, *first, *second)
    return [value.detach(), *(g.detach() for g in first), *second], profile


def plain_gradients(fan_out, model):
    """Not recorded: those of the large tensor come in chunks."""
    torch.manual_seed(3)
    x, y = torch.randn(19, 6, dtype=torch.float64), torch.randn(19, 1, dtype=torch.float64)
    call = todist.parallelize(todist.batch_partitioner, todist.mean_reducer, fan_out=fan_out)
    value = call(loss_of)(model, x, y)
    with todist.profile() as profile:
        gradients = torch.autograd.grad(value, [*model.parameters()])
    assert lie_right(*gradients)
    return gradients, profile


def bytes_to_the_caller(profile):
    return [span.size for span in profile.spans if 0 == span.peer != span.worker and span.phase == "reply"]


def values_are_those_of_a_star():
    """19 samples on 8 workers; and the caller sends and gets as much as it has children."""
    model = Model()
    expected, _ = derivatives(None, model)
    for fan_out in (1, 2, 3):
        found, profile = derivatives(fan_out, model)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-10)  # some are 0
        again, _ = derivatives(fan_out, model)
        assert all(map(torch.equal, found, again)), "two runs of one tree differ"
        sent = [span.size for span in profile.spans if 0 == span.worker != span.peer and span.phase == "pack"]
        plain, chunked = plain_gradients(fan_out, model)
        assert all(map(torch.equal, plain, found[1 : 1 + len(plain)])), "a sum of chunks has other bits"
        came, chunks = bytes_to_the_caller(profile), bytes_to_the_caller(chunked)
        for size in (sum(sent), sum(came), sum(chunks)):
            assert 0.99 < size / (fan_out * model.nbytes()) < 1.01
        assert max(*came, *chunks) < 1.1 * CHUNK, "gradients came whole"
    asynchronous = todist.parallelize_async(to_each(8), todist.sum_reducer, fan_out=2)(shifted)
    buffer = torch.ones(CHUNK // 8 + 1, dtype=torch.float64)
    small = torch.ones(3)
    future = asynchronous(buffer, small)
    buffer.zero_()
    small.zero_()
    assert future.wait() == 8 * (len(buffer) + 3) + 28


def refuse_to_relay(refuses):
    """On a worker: whether it refuses requests to hand something on."""
    values = getattr(relay_module, "values_before", relay_module.Relay.values)
    relay_module.values_before = values
    relay_module.Relay.values = _refuse if refuses else values


def _refuse(relay):
    raise AssertionError(f"worker {relay.branch.worker} is asked to hand on")


def workers_without_others_below_are_called_as_by_a_star():
    model, hosts = Model(), [member.host for member in current_group().members]
    parents = {parent for parent, _ in edges(tree(0, range(1, 8), hosts, 2))}
    for refusing, error in (({*range(8)} - parents, None), ({max(parents)}, AssertionError)):
        for worker in refusing:
            todist.remote_call(refuse_to_relay, worker, True)
        with nullcontext() if error is None else pytest.raises(error, match="is asked to hand on"):
            derivatives(2, model)
        for worker in refusing:
            todist.remote_call(refuse_to_relay, worker, False)


def shifted(buffer, small, rank):
    total = float(buffer.sum() + small.sum()) + rank
    buffer.add_(1)  # of this worker alone
    small.add_(1)
    return total


def using(one, other, unused, user, rank):
    return one.sum() if rank == user else other[::2].mean() * (1 + rank)


def gradients_that_some_workers_do_not_have():
    """Chunks hold pieces of those that there are; a gradient of a sum is not contiguous."""
    size = CHUNK // 4 + 3
    tensors = [torch.ones(size, requires_grad=True) for _ in range(3)]
    for user in (0, 1, 7):
        call = todist.parallelize(to_each(8), todist.sum_reducer, fan_out=2)(using)
        one, other, unused = torch.autograd.grad(call(*tensors, user), tensors, allow_unused=True)
        assert unused is None
        assert torch.equal(one, torch.ones(size))
        even = torch.full([(size + 1) // 2], (36 - 1 - user) / ((size + 1) // 2))
        torch.testing.assert_close(other[::2], even)
        assert not other[1::2].any()


def nested(x, rank):
    inner = todist.parallelize(to_each(4), todist.sum_reducer, fan_out=1)(power)
    return inner(x * (1 + rank))


def power(x, rank):
    return (x ** (rank + 1)).sum()


def calls_nest_in_relays():
    x = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    here = sum(power(x * (1 + rank), inner) for rank in range(5) for inner in range(4))
    there = todist.parallelize(to_each(5), todist.sum_reducer, fan_out=2)(nested)(x)
    for _ in range(3):
        torch.testing.assert_close(there, here)
        (here,), (there,) = (torch.autograd.grad(y.sum(), x, create_graph=True) for y in (here, there))


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rank, failing):
        ctx.fails = rank == failing
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ArithmeticError("in backward")
        return grad, None, None


def raising(x, failing, when, rank):
    if when == "forward" and rank == failing:
        raise ArithmeticError("in forward")
    return _Raises.apply(x, rank, failing).sum()


def errors_name_the_worker_that_has_raised():
    """Also where that is three relays down; and no gradient is half added up."""
    small, large = torch.ones(2, requires_grad=True), torch.ones(CHUNK // 2, requires_grad=True)
    for x, when, failing in (
        (small, "forward", 1),
        (small, "forward", 5),
        (small, "backward", 1),
        (small, "backward", 6),
        (large, "backward", 1),
        (large, "backward", 6),
    ):
        call = todist.parallelize(to_each(8), todist.sum_reducer, fan_out=2)(raising)
        with pytest.raises(ArithmeticError, match=f"in {when}") as raised:
            call(x, failing, when).backward()
        assert raised.value.worker == current_group().names[failing]
        assert x.grad is None, (when, failing, x.grad)
        assert not getattr(raised.value, "__notes__", [])


def hangs(x, rank):
    threading.Event().wait(60 if rank == 7 else 0)  # which 2 has called
    return x.sum()


def a_time_out_names_those_of_whom_one_is_late():
    call = todist.parallelize(to_each(8), todist.sum_reducer, fan_out=2, timeout=1.0)(hangs)
    # The caller's time limit ends with that of the relay, which knows who is late.
    with pytest.raises(
        CallTimeoutError, match=r"^`hangs` on (one of worker2, worker5, |)worker7 took longer"
    ) as caught:
        call(torch.ones(2))
    assert not isinstance(caught.value.__context__, CallTimeoutError)


def kept_after_collection():
    gc.collect()  # an error may hold a graph until then
    return kept()


def no_graph_is_left(workers):
    deadline = time.monotonic() + 20
    while any(left := [todist.remote_call(kept_after_collection, worker) for worker in workers]):
        assert time.monotonic() < deadline, left


def test_derivatives_values_and_errors_through_trees(world):
    def body():
        gradients_are_those_of_finite_differences()
        values_are_those_of_a_star()
        workers_without_others_below_are_called_as_by_a_star()
        gradients_that_some_workers_do_not_have()
        calls_nest_in_relays()
        errors_name_the_worker_that_has_raised()
        no_graph_is_left(range(8))
        a_time_out_names_those_of_whom_one_is_late()

    world(8, env=ZMQ).on_zero(body)


@pytest.mark.torch_rpc
def test_trees_over_rpc(world):
    def body():
        model = Model()
        expected, _ = derivatives(None, model)
        for fan_out in (1, 2):
            found, _ = derivatives(fan_out, model)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-10)  # some are 0

    world(4, env=RPC).on_zero(body)


# ------------------------------------------------------------------------------------------------------- lost relays


def kill_when(moment):
    """On a worker: let it die when it is asked to hand on the next call, or has handed on a part of it."""

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "before":
        relay_module.Child.__init__ = die
    elif moment == "while":
        relay_module.Child.hand_on = die


class _Dies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dies):
        ctx.dies = dies
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return grad, None


def doomed(x, victim, moment, rank):
    if (rank, moment) == (victim, "after"):
        os.kill(os.getpid(), signal.SIGKILL)
    return _Dies.apply(x, (rank, moment) == (victim, "backward")).mean()


@pytest.mark.parametrize("transport", ["zmq", pytest.param("rpc", marks=pytest.mark.nightly)])
def test_a_relay_that_dies_fails_the_call_by_name_and_the_others_go_on(world, transport):
    moments = ("before", "while", "after", "backward") if transport == "zmq" else ("while", "backward")
    size = len(moments) + 3

    def body():
        x = torch.ones(CHUNK // 2, requires_grad=True)
        alive = list(range(size))
        for moment in moments:
            # a chain: the second one hands on to the rest
            call = todist.parallelize(
                lambda *shared: [(rank, (*shared, rank), {}) for rank in alive],
                todist.sum_reducer,
                timeout=60,
                fan_out=1,
            )(doomed)
            assert call(x, -1, "") == len(alive)
            victim = alive[1 if moment == "before" else 2]
            todist.remote_call(kill_when, victim, moment)
            with pytest.raises(WorkerLostError, match=f"rank {victim} died"):
                call(x, victim, moment).backward()
            assert x.grad is None
            alive.remove(victim)
        assert call(x, -1, "") == len(alive)
        no_graph_is_left(alive)

    survive(world(size, env={"TODIST_TRANSPORT": transport}), body, killed=len(moments))


def survive(world, body, killed):
    """Run ``body`` on rank 0 of a world of which it kills so many workers."""

    def main():
        return body() if todist.get_rank() == 0 else None

    endings = world.endings(main, timeout=100, on_loss="continue")
    if endings[0].error is not None:
        raise endings[0].error
    codes = [ending.exitcode for ending in endings]
    assert codes.count(-signal.SIGKILL) == killed
    assert codes.count(0) == len(codes) - killed


def noisy(wide, small, doom, rank):
    """A function with random numbers, of a tensor that comes in chunks and one that does not."""
    victim, moment = doom
    if (todist.get_rank(), moment) == (victim, "after") or (rank, moment) == (victim, "anywhere"):
        os.kill(os.getpid(), signal.SIGKILL)
    noise = F.dropout(torch.ones(7, dtype=small.dtype), 0.5).sum()
    out = (wide * small.sin().sum()).square().mean() * (1 + rank + noise)
    return _DiesToo.apply(out, todist.get_rank() == victim, moment)


class _DiesToo(torch.autograd.Function):
    """The identity; its backward, and the backward of that, may kill. Autocast triples a gradient."""

    @staticmethod
    def forward(ctx, x, dies, moment):
        ctx.dies, ctx.moment = dies, moment
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.dies and ctx.moment == ("recorded" if torch.is_grad_enabled() else "backward"):
            os.kill(os.getpid(), signal.SIGKILL)
        again = "backward" if ctx.moment == "second order" else ""
        grad = grad * (3 if torch.is_autocast_enabled("cpu") else 1)
        return _DiesToo.apply(grad, ctx.dies, again), None, None


def all_derivatives(call, wide, small, doom):
    """The value, and the gradients, once not recorded and once recorded, and those of their squares."""
    torch.manual_seed(3)
    value = call(wide, small * wide[0], doom).square()  # arguments that depend on each other
    with torch.autocast("cpu"):
        plain = torch.autograd.grad(value, (wide, small), retain_graph=True)
    again = torch.autograd.grad(value, (wide, small), retain_graph=True)
    with torch.autocast("cpu"):
        first = torch.autograd.grad(value, (wide, small), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (wide, small))
    return [value.detach(), *plain, *again, *(g.detach() for g in first), *second]


@pytest.mark.parametrize("transport", [pytest.param("zmq", marks=pytest.mark.nightly), "rpc"])
def test_with_retries_a_relay_that_dies_changes_no_result(world, transport):
    """What it was to hand on goes another way, and its own share runs elsewhere; to the second order."""
    moments = ("before", "while", "after", "backward", "recorded", "second order", "asynchronous")
    if transport == "rpc":
        moments = ("while", "recorded")
    size = len(moments) + 3 + (transport == "rpc")

    def body():
        torch.manual_seed(0)
        wide = torch.randn(CHUNK // 8 + 9, dtype=torch.float64, requires_grad=True)
        small = torch.randn(3, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(3)
        seed = int(torch.randint(2**62, (), device="cpu"))

        def here(wide, small, doom):
            total = torch.zeros((), dtype=torch.float64)
            for rank in range(size):
                torch.manual_seed(seed + rank)
                total = total + noisy(wide, small, doom, rank)
            return total

        expected = all_derivatives(here, wide, small, (-1, ""))
        options = {"fan_out": 2, "retries": 1, "timeout": 60}
        call = todist.parallelize(to_each(size), todist.sum_reducer, **options)(noisy)
        alive = list(range(size))
        for number, moment in enumerate(moments):
            victim = alive[3 if number % 2 else 1]  # a child of the caller, or one of its child
            if moment == "asynchronous":
                todist.remote_call(kill_when, victim, "while")
                later = todist.parallelize_async(to_each(size), todist.sum_reducer, **options)(noisy)
                torch.manual_seed(3)
                one, other = wide.detach().clone(), small.detach().clone()
                future = later(one, other * one[0], (-1, ""))
                one.zero_()
                other.zero_()
                found = [future.wait().square()]
            else:
                todist.remote_call(kill_when, victim, moment)
                found = all_derivatives(call, wide, small, (victim, moment))
            alive.remove(victim)
            assert todist.alive() == tuple(alive), moment
            for place, (one, other) in enumerate(zip(found, expected, strict=False)):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=f"{moment} {place}")
        del one, other, found
        no_graph_is_left(alive)
        if transport == "rpc":
            with pytest.raises(WorkerLostError):  # one share kills whoever runs it
                call(wide, small, (alive[1], "anywhere"))
            assert len(todist.alive()) == len(alive) - 2

    killed = len(moments) + 2 * (transport == "rpc")
    survive(world(size, env={"TODIST_TRANSPORT": transport}), body, killed)
