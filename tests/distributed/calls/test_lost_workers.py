"""A worker is lost, and its share runs again elsewhere: the numbers are those of an undisturbed run, bit for bit."""

from __future__ import annotations

import gc
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import torchopt_dist as todist
from tests.distributed.programs import count, data, kept_on, mlp, runs, survive
from tests.rows import each_row
from tests.waits import say, wait_until, watch
from torchopt_dist.core import random_turns
from torchopt_dist.distributed.calls.again import Again, gradients_again
from torchopt_dist.distributed.messages.caller_state import CallerState
from torchopt_dist.distributed.messages.payload import ExecutionOptions
from torchopt_dist.distributed.transport.retries import Ask, Attempt, Deadline, Retries, Sent
from torchopt_dist.process.future import Future


def die(doom, moment):
    """Kill this process, if it is the one that is to die now: ``doom`` is ``(folder, rank, moment)``."""
    folder, rank, when = doom
    if (todist.get_rank(), moment) == (rank, when):
        (folder / f"died{rank}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Backward(torch.autograd.Function):
    """The identity; its backward, and the backward of that, may kill."""

    @staticmethod
    def forward(ctx, x, doom, moment):
        ctx.doom, ctx.moment = doom, moment
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        die(ctx.doom, ctx.moment)
        return Backward.apply(grad, ctx.doom, "second order"), None, None


def loss(model, x, y, doom):
    die(doom, "forward")
    out = F.dropout(torch.tanh(model(x)), 0.3)  # the seeds of the lost share are those of its first run
    return F.mse_loss(Backward.apply(out, doom, "backward"), y)


def derivatives(call, model, doom):
    """The value, and the derivatives of order 1 and 2; some tensors are sent in a buffer, and some by themselves."""
    torch.manual_seed(3)
    x, y = data(rows=13)
    wide = torch.linspace(0, 1, 13 * 9000, dtype=torch.float64).reshape(9000, 13).T
    value = call(model, torch.stack([x, x.flip(0)], 1).mean(1) + wide[:, :6], y, doom)
    parameters = [*model.parameters()]
    first = torch.autograd.grad(value, parameters, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
    return [value.detach(), *(g.detach() for g in first), *second]


@pytest.mark.parametrize(("exclusive", "transport"), [(False, "rpc"), (True, "zmq")])
def test_a_loss_in_forward_or_backward_of_any_order_changes_no_bit(world, tmp_path, exclusive, transport):
    if transport == "zmq":
        pytest.importorskip("zmq")

    def body():
        model, nobody = mlp(), (tmp_path, -1, "")
        split = todist.dim_partitioner(exclusive=exclusive)
        spread = todist.parallelize(split, todist.mean_reducer, retries=1)(loss)
        undisturbed = derivatives(spread, model, nobody)
        for rank, moment in ((1, "forward"), (2, "second order"), (3, "backward")):
            disturbed = derivatives(spread, model, (tmp_path, rank, moment))
            assert (tmp_path / f"died{rank}").exists()
            assert all(map(torch.equal, disturbed, undisturbed)), moment
            assert todist.alive() == (0, *range(rank + 1, 4))
            again = derivatives(spread, model, nobody)  # a worker that is known to be lost costs no retry
            assert all(map(torch.equal, again, undisturbed))
            assert not any(map(kept_on, todist.alive()))  # nor graphs that were made again

    survive(world(4), body, transport=transport)


def square(folder, x):
    count(folder)
    if todist.get_rank():
        os.kill(os.getpid(), signal.SIGKILL)
    return x**2


def test_after_so_many_retries_a_loss_is_an_error(world, tmp_path):
    def body():
        with pytest.raises(todist.WorkerLostError):
            todist.remote_sync_call(square, args=(tmp_path, torch.ones(())), partitioner=1, retries=1)
        return runs(tmp_path), todist.alive()

    assert survive(world(4), body) == ([1, 2], (0, 3))


def cube_of_row(doom, x):
    die(doom, "forward")
    return (x**3).sum()


def test_the_rows_of_a_lost_worker_are_stacked_when_they_run_elsewhere(world, tmp_path):
    def body():
        x = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(9, 2).requires_grad_()
        spread = todist.parallelize(todist.tasks, todist.sum_reducer, vectorize=True, retries=1)(cube_of_row)
        value = spread(todist.replicated((tmp_path, 1, "forward")), x)
        torch.testing.assert_close(value, (x**3).sum())
        torch.testing.assert_close(torch.autograd.grad(value, x)[0], 3 * x.detach() ** 2)
        return todist.alive()

    assert survive(world(3), body) == (0, 2)


class Deadly(torch.autograd.Function):
    """The identity; its backward kills each worker but the caller."""

    @staticmethod
    def forward(ctx, x, folder):
        ctx.folder = folder
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        count(ctx.folder)
        if todist.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)
        return grad, None


def deadly(folder, x):
    return Deadly.apply(x, folder)


def test_after_so_many_retries_a_loss_in_backward_is_an_error(world, tmp_path):
    def body():
        x = torch.ones((), requires_grad=True)
        (value,) = todist.remote_sync_call(deadly, args=(tmp_path, x), partitioner=1, retries=1)
        with pytest.raises(todist.WorkerLostError):
            value.backward()
        assert x.grad is None
        return runs(tmp_path), todist.alive()

    assert survive(world(4), body) == ([1, 2], (0, 3))


def test_a_graph_that_is_retained_is_made_again_for_each_backward_after_a_loss(world, tmp_path):
    def body():
        x = torch.full((), 3.0, requires_grad=True)
        (value,) = todist.remote_sync_call(cube, args=(tmp_path, x), partitioner=1, retries=1)
        with pytest.raises(todist.WorkerLostError):
            todist.remote_call(signal.raise_signal, 1, signal.SIGKILL)
        for _ in range(3):
            (grad,) = torch.autograd.grad(value, x, retain_graph=True)
            assert grad.item() == 27.0
        del value
        return runs(tmp_path), kept_on(2)

    assert survive(world(3), body) == ([1, 2, 2, 2], 0)


def cube(folder, x):
    count(folder)
    return x**3


def test_when_all_others_are_lost_the_caller_does_their_work(world, tmp_path):
    def body():
        x = torch.full((), 3.0, requires_grad=True)
        future = todist.remote_async_call(square, args=(tmp_path, x), partitioner=1, retries=2)
        (value,) = future.wait()
        value.backward()
        return value.item(), x.grad.item(), runs(tmp_path), todist.alive()

    assert survive(world(3), body) == (9.0, 6.0, [1, 2, 0], (0,))


def fail(folder, kind):
    count(folder)
    raise kind("raised by the function")


@pytest.mark.parametrize("kind", [ZeroDivisionError, todist.WorkerLostError])
def test_what_the_function_raises_is_not_retried(world, tmp_path, kind):
    def body():
        with pytest.raises(kind, match="by the function") as caught:
            todist.remote_sync_call(fail, args=(tmp_path, kind), partitioner=1, retries=3)
        assert isinstance(caught.value, todist.RemoteError)
        return runs(tmp_path)

    assert survive(world(3), body) == [1]


def wait_for(folder, name):
    count(folder)
    assert watch(folder / name, 60)


def test_a_time_out_is_not_retried(world, tmp_path):
    def body():
        with pytest.raises(todist.CallTimeoutError):
            todist.remote_sync_call(wait_for, args=(tmp_path, "told"), partitioner=1, retries=3, timeout=0.2)
        say(tmp_path / "told")
        return set(runs(tmp_path))

    assert survive(world(3), body) <= {1}


def test_arguments_that_were_changed_since_are_not_used_for_a_gradient(world, tmp_path):
    def body():
        spread = todist.parallelize(1, todist.sum_reducer, retries=1)(loss)
        model, doom = mlp(), (tmp_path, 1, "backward")
        x = torch.zeros(2000, 6, dtype=torch.float64)
        value = spread(model, x, torch.zeros(2000, 3, dtype=torch.float64), doom)
        x.add_(1)
        with pytest.raises(RuntimeError, match="has been changed in place since"):
            value.backward()

    survive(world(3), body)


def test_names_mean_what_they_meant_in_the_call_where_a_loss_is_mended(world):
    """The message was made then; also where the caller itself does the work of the others."""

    def body():
        w = torch.full((), 3.0, requires_grad=True)
        scale, values = 0.0, []

        def scaled(x):
            return x * scale

        for number in range(1, 4):
            scale = float(number)
            values += todist.remote_sync_call(scaled, args=(w,), partitioner=1, retries=1)
        with pytest.raises(todist.WorkerLostError):
            todist.remote_call(signal.raise_signal, 1, signal.SIGKILL)
        return torch.autograd.grad(sum(values), w)[0].item()

    assert survive(world(2), body) == 6.0


def noise(folder, x):
    """Random numbers, drawn in two parts with time between."""
    first = torch.rand(())
    if todist.get_rank() == 1 and not (folder / "died1").exists():
        die((folder, 1, "forward"), "forward")
    time.sleep(0.02)
    return x * first * torch.rand(())


def test_shares_of_lost_workers_do_not_mix_their_random_numbers_with_others(world, tmp_path):
    def body():
        call = todist.parallelize(reducer=todist.concatenate_reducer, retries=1)(noise)
        results = []
        for _ in range(2):  # worker 1 dies in the first run, and is missing in the second one
            torch.manual_seed(0)
            results.append([call(tmp_path, torch.ones(8)) for _ in range(4)])
        (tmp_path / "died1").unlink()
        torch.manual_seed(0)
        seeds = [int(torch.randint(2**62, (), device="cpu")) for _ in range(4)]
        for seed, *values in zip(seeds, *results, strict=True):
            for rank in range(4):
                torch.manual_seed(seed + rank)
                expected = torch.rand(()) * torch.rand(())
                assert all(torch.equal(value[2 * rank], expected) for value in values)

    survive(world(4), body)


def nested(folder, x):
    """A call of a worker that dies, in a share of the caller, when there is no other worker."""
    return todist.remote_sync_call(kills, args=(folder, x), partitioner=1, retries=1)[0] + 1


def kills(folder, x):
    die((folder, 1, "forward"), "forward")
    return x * torch.rand(())


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_share_of_the_caller_may_wait_for_one_that_only_the_caller_can_run(world, tmp_path, timeout):
    def body():
        x = torch.full((), 3.0, requires_grad=True)
        (value,) = todist.remote_sync_call(nested, args=(tmp_path, x), partitioner=0, timeout=timeout)
        (grad,) = torch.autograd.grad(value, x)
        torch.testing.assert_close(grad * x + 1, value)
        return todist.alive()

    assert survive(world(2), body) == (0,)


def each_waits(folder, x, rank):
    """On the caller a call of a worker that dies; on the other worker one that leads back to the caller, and there."""
    function, worker = (kills, 1) if rank == 0 else (nested, 0)
    return todist.remote_sync_call(function, args=(folder, x), partitioner=worker, retries=1)[0]


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_shares_that_wait_for_lost_ones_on_each_others_worker_end(world, tmp_path, transport):
    """The caller's own share and that of the other worker wait for two lost shares, and both workers have work."""

    def body():
        x = torch.full((), 3.0, requires_grad=True)
        both = todist.remote_sync_call(
            each_waits,
            args=(tmp_path, x),
            partitioner=lambda folder, x: [(rank, (folder, x, rank), {}) for rank in (0, 2)],
            retries=1,
        )
        (grad,) = torch.autograd.grad(sum(both), x)
        torch.testing.assert_close(grad * x + 1, sum(both))
        return todist.alive()

    assert survive(world(3), body, transport=transport) == (0, 2)


def draws(folder, which):
    """Random numbers: one share is lost, one waits for a while between its numbers, and one keeps the caller busy."""
    if which == 1:
        die((folder, 1, "forward"), "forward" if folder.exists() else "never")
    if which == 0:
        time.sleep(1)
    first = torch.rand(())
    if which == 2:
        todist.remote_call(time.sleep, 0, 0.3)
    numbers = [first]
    for _ in range(8):
        time.sleep(0.05)
        numbers.append(torch.rand(()))
    return torch.stack(numbers)


def test_a_share_at_a_worker_that_has_other_work_does_not_mix_its_random_numbers_with_it(world, tmp_path):
    def body():
        results = []
        for folder in (tmp_path / "nobody dies", tmp_path):
            torch.manual_seed(0)
            results.append(
                todist.remote_sync_call(
                    draws,
                    args=(folder,),
                    partitioner=lambda folder: [(which, (folder, which), {}) for which in range(3)],
                    retries=1,
                )
            )
        assert todist.alive() == (0, 2)
        assert all(map(torch.equal, *results))

    survive(world(3), body)


@each_row(
    ("lost", "avoided", "tried", "chosen"),
    [
        ((), (), (), 1),  # its own worker
        ((1,), (), (), 2),  # the one with the least to do
        ((1,), (), (2,), 3),
        ((1,), (2,), (), 3),
        ((), (1,), (), 2),  # which is late
        ((1, 2, 3), (), (), 0),  # the caller
        ((1, 2), (3,), (), 0),
        ((1, 2), (0, 3), (), 3),  # of those that are late another worker
        ((1, 2, 3), (0,), (), 0),
        ((1, 2, 3), (), (0,), None),
    ],
)
def test_who_is_asked_next(lost, avoided, tried, chosen):
    def transport(rank):
        return SimpleNamespace(has_lost=lost.__contains__)

    member = SimpleNamespace(rank=0)
    membership = SimpleNamespace(me=member, world_size=4, failures=lost)
    retries = Retries(membership, None, None, SimpleNamespace(to=transport), lambda: (0, 2))
    retries._under_way.update({3: 1})
    home = Attempt(1, transport(1), (0, 1))
    ask = Ask(None, home, True, None, 1, None, None, lambda: transport(0), lambda rank: True, avoided)
    ask.attempts += [Attempt(rank, transport(rank), (0, 3)) for rank in tried]
    attempt = retries._next(ask)
    assert (attempt and attempt.worker) == chosen


def computes_until_the_other_has_begun(folder, value, rank):
    if rank:
        say(folder / "begun")
        return value.sum()
    assert watch(folder / "begun")
    return value.sum()


def test_a_value_is_handed_out_while_its_home_computes_a_task_that_is_alone(world, tmp_path):
    def body():
        random_turns.SHORT_PATIENCE = 1000.0
        handle = todist.put(torch.ones(3))
        found = todist.remote_sync_call(
            computes_until_the_other_has_begun,
            args=(tmp_path, handle),
            partitioner=lambda folder, value: [(rank, (folder, value, rank), {}) for rank in range(2)],
            retries=1,
        )
        assert [value.item() for value in found] == [3.0, 3.0]

    survive(world(2), body)


def test_an_error_of_what_is_made_again_is_told_however_soon_it_comes():
    """And not the loss for which it was made again."""

    def make(*_):
        raise RuntimeError("has been changed in place since")

    graph = Again(make, lambda *_: {}, lambda *_: True, lambda _: None, outputs=[0])
    at_once = SimpleNamespace(names=("a", "b"), threads=SimpleNamespace(run=lambda work: work()))
    x, lost = torch.ones(2, requires_grad=True), Future()
    lost.set_exception(todist.WorkerLostError("rank 1 died"))
    again = gradients_again(graph, [torch.ones(2)], [True], [x], CallerState.capture())
    made = again.instead_of(lost, at_once, 1, ExecutionOptions(retries=1), Deadline(0.0))
    with pytest.raises(RuntimeError, match="has been changed in place since"):
        made.result(10)


def kept_requests():
    gc.collect()
    return sum(isinstance(each, Sent) for each in gc.get_objects())


def test_what_was_sent_is_kept_no_longer_than_it_may_be_needed(world):
    """A thread that has passed a reply on may hold the request for a moment."""

    def body():
        x = torch.ones((), requires_grad=True)
        call = todist.parallelize(1, lambda values: values[0], retries=1)(torch.sin)
        value = call(x)
        assert kept_requests() == 1
        value.backward()
        wait_until(lambda: kept_requests() == 0)
        unused = call(x)
        assert kept_requests() == 1
        del unused
        wait_until(lambda: kept_requests() == 0)
        with torch.no_grad():
            value = call(x)
        wait_until(lambda: kept_requests() == 0)

    survive(world(2), body)


def test_a_share_of_a_lost_worker_keeps_its_place(world, tmp_path):
    """Also without ``retries``: what is split over all workers is split so still."""

    def body():
        x = torch.arange(7.0)
        spread = todist.parallelize(reducer=lambda parts: parts)(lambda x: (x, todist.get_rank()))
        before = [part.tolist() for part, _ in spread(x)]
        with pytest.raises(todist.WorkerLostError):
            todist.remote_sync_call(square, args=(tmp_path, x), partitioner=1)
        parts, ranks = zip(*spread(x), strict=True)
        assert [part.tolist() for part in parts] == before
        assert 1 not in ranks
        assert 1 not in todist.map(lambda _: todist.get_rank(), range(6))
        for chosen in (1, todist.dim_partitioner(workers=[1, 2])):  # somebody has asked for this worker
            with pytest.raises(todist.WorkerLostError):
                todist.remote_sync_call(torch.sum, args=(x,), partitioner=chosen)

    survive(world(3), body)


class Failing(torch.autograd.Function):
    """The identity; its backward raises, or kills, on one rank."""

    @staticmethod
    def forward(ctx, x, rank, error):
        ctx.fails, ctx.error = todist.get_rank() == rank, error
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails and ctx.error is todist.WorkerLostError:
            os.kill(os.getpid(), signal.SIGKILL)
        if ctx.fails:
            raise ctx.error("raised in backward")
        return grad, None, None


def failing(leaf, rank, error):
    return Failing.apply(leaf, rank, error).square().sum()


@pytest.mark.parametrize(
    ("rank", "error"), [(0, ZeroDivisionError), (2, ZeroDivisionError), (2, todist.WorkerLostError)]
)
def test_an_error_in_a_backward_of_a_call_writes_no_grad(world, rank, error):
    def body():
        leaves = [torch.full((), float(n), requires_grad=True) for n in range(3)]
        losses = todist.map(failing, leaves, args=(rank, error))
        with pytest.raises(error):
            torch.stack(losses).sum().backward()
        assert [leaf.grad for leaf in leaves] == [None] * 3
        torch.stack(todist.map(failing, leaves, args=(-1, error))).sum().backward()
        assert [leaf.grad.item() for leaf in leaves] == [0.0, 2.0, 4.0]

    survive(world(3), body)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_a_backward_that_fails_leaves_no_graph(world, rank, transport):
    """The error refers to the frames that it came through, and one of these to the graphs of other calls."""
    error = todist.WorkerLostError if rank else ZeroDivisionError

    def body():
        def step():
            leaves = [torch.full((), float(n), requires_grad=True) for n in range(4)]
            losses = todist.map(failing, leaves, args=(rank, error))
            other = todist.remote_sync_call(torch.square, args=(leaves[3],), partitioner=1)
            torch.stack(losses).sum().backward()
            return other

        with pytest.raises(error):
            step()
        until = time.monotonic() + 10
        while (left := [kept_on(worker, 0.1) for worker in todist.alive()]) and any(left):
            assert time.monotonic() < until, left
            gc.collect()  # a thread that has been told of the loss may refer to the error for a moment

    survive(world(4), body, transport=transport)


def test_settings_are_checked():
    for wrong in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match="retries must be"):
            todist.parallelize(retries=wrong)
    for wrong in (-1.0, True, float("nan"), "1"):
        with pytest.raises(ValueError, match="hedge_after must be"):
            todist.parallelize(hedge_after=wrong)

    @todist.auto_init_rpc()
    def main():
        with pytest.raises(ValueError, match="on_loss"):
            todist.remote_sync_call(abs, args=(1,), partitioner=0, retries=1)

    main()
