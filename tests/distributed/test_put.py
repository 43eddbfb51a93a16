"""``todist.put``: a value travels to a worker once, is the value there, and changes and ends are noticed."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import queue
import signal
import threading
import time
from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.distributed.calls.test_lost_workers import Backward, die, survive
from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.group.kept import Residents
from torchopt_dist.errors import NotInitializedError, ResidentError, WorkerLostError


def kept_here():
    residents = current_group().residents
    return len(residents), sum(tensor.nbytes for kept in residents.values() for tensor in kept.tensors)


def kept_everywhere():
    return [todist.remote_call(kept_here, rank) for rank in range(todist.get_world_size())]


def loss(weight, data, scale=1.0):
    return ((data["x"] @ weight - data["y"]) ** 2).mean() * scale


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def large():
    return {"x": draw(6000, 5), "y": draw(6000, 1)}  # 240 kB and more


def sent_bytes(profile, worker):
    return sum(span.size for span in profile.spans if span.phase in ("pack", "reply") and span.peer == worker)


@pytest.mark.parametrize("fails", [False, True])
def test_a_value_that_is_freed_while_it_is_on_its_way_is_not_kept(fails):
    """Where its home says so sooner than it sends the value."""
    residents, key = Residents(lambda _: False), (0, 7)

    def fetch():
        residents.release(key)
        if fails:
            raise WorkerLostError("gone")
        return torch.ones(3)

    if fails:
        with pytest.raises(WorkerLostError):
            residents.on(key, None, fetch)
    else:
        assert residents.on(key, None, fetch).sum() == 3
    assert len(residents) == len(vars(residents)["_coming"]) == 0


class Interrupting:
    """An object, while whose bytes are compared something else is done."""

    def __init__(self):
        self.meanwhile = lambda: None

    def __reduce__(self):
        self.meanwhile()
        return Interrupting, ()


def test_other_values_are_found_while_the_bytes_of_one_that_is_handed_out_are_compared():
    residents, key, other, value = Residents(lambda _: False), (0, 7), (0, 8), Interrupting()
    residents.put(key, value, check=True)
    residents.put(other, 3, check=False)
    found = queue.SimpleQueue()

    def look():
        thread = threading.Thread(target=lambda: found.put(residents.find(other).value), daemon=True)
        thread.start()
        assert found.get(timeout=60) == 3

    value.meanwhile = look
    assert residents.hand_out(key, 1) is value
    assert residents.find(key).holders == {1}


def test_a_value_that_is_freed_while_its_bytes_are_compared_is_not_handed_out():
    residents, key, value = Residents(lambda _: False), (0, 7), Interrupting()
    residents.put(key, value, check=True)
    value.meanwhile = lambda: residents.release(key)
    with pytest.raises(ResidentError, match="its handle had been closed"):
        residents.hand_out(key, 1)


@pytest.mark.parametrize("size", [1, 3])
def test_calls_and_gradients_are_those_of_the_value(world, size):
    def body():
        data, weight = large(), draw(5, 1).requires_grad_()
        handle = todist.put(data)
        results = []
        for argument in (data, handle):
            values = [todist.remote_call(loss, rank, weight, argument) for rank in range(size)]
            (grad,) = torch.autograd.grad(sum(values), weight, create_graph=True)
            (second,) = torch.autograd.grad((grad**2).sum(), weight)
            results.append((torch.stack(values).detach(), grad.detach(), second))
        return results

    plain, kept = world(size).on_zero(body)
    for expected, found in zip(plain, kept, strict=True):
        assert torch.equal(expected, found)


def test_a_value_travels_to_each_worker_once_and_goes_with_its_handle(world):
    def body():
        handle, weight = todist.put(large()), draw(5, 1)
        nbytes = 6000 * 6 * 8
        traffic = []
        for _ in range(3):
            with todist.profile() as profile:
                for _ in range(2):
                    todist.map(loss, [weight] * 6, args=(handle,))
            traffic.append(sum(span.size for span in profile.spans))
        # Both other workers fetch the value in the first step, and nobody does after that.
        assert 2 * nbytes < traffic[0] < 2 * nbytes + 50_000, traffic
        assert max(traffic[1:]) < 50_000, traffic
        assert kept_everywhere() == [(1, nbytes)] * 3
        del handle
        gc.collect()
        while kept_everywhere() != [(0, 0)] * 3:  # the request to forget it is on its way
            pass

    world(3).on_zero(body, timeout=100)


@dataclass
class Batch:
    data: object
    weight: torch.Tensor


def loss_of(batch):
    return loss(batch.weight, batch.data)


def pass_on(rank, weight, handle):
    return todist.remote_call(loss, rank, weight, handle)


def value_of(handle):
    return type(handle).__name__, loss(draw(5, 1), handle.value)


def test_a_tensor_of_inference_mode_can_be_put(world):
    """Torch counts no changes of such a tensor."""

    def body():
        with torch.inference_mode():
            data = draw(3)
        handle = todist.put(data)
        return [todist.remote_call(torch.sum, rank, handle) for rank in range(2)], data.sum()

    sums, expected = world(2).on_zero(body)
    assert sums == [expected] * 2


def test_a_handle_may_be_anywhere(world):
    def body():
        data, weight = large(), draw(5, 1)
        handle = todist.put(data)
        expected = loss(weight, data)
        in_a_container = todist.remote_call(loss_of, 1, Batch(handle, weight))
        in_a_closure = todist.remote_call(lambda: value_of(handle), 1)
        given_as_an_argument = todist.remote_call(pass_on, 1, 2, weight, handle.value)
        nested = todist.remote_call(lambda: todist.remote_call(loss, 2, weight, handle), 1)
        plain = todist.remote_sync_call(loss, args=(weight, handle), partitioner=0, isolate_own_share=False)[
            0
        ]
        assert in_a_closure[0] == "Resident"
        for found in (in_a_container, in_a_closure[1], given_as_an_argument, nested, plain):
            assert torch.equal(found, expected)

    world(3).on_zero(body)


def frozen():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 50), nn.Tanh(), nn.Linear(50, 2)).double().requires_grad_(False)


def features(x, module):
    return module(x).sum(1)


def test_a_frozen_module_stays_also_under_vmap(world):
    def body():
        module, x = frozen(), draw(8, 3, 5).requires_grad_()
        results = []
        for argument in (module, todist.put(module)):
            spread = todist.parallelize(todist.tasks, todist.stack_reducer, vectorize=True)(features)
            value = spread(x, argument)
            results.append((value.detach(), *torch.autograd.grad(value.sum(), x)))
        return results

    plain, kept = world(2).on_zero(body)
    torch.testing.assert_close(kept, plain, rtol=0, atol=0)


def rows(x, y, shift):
    return todist.get_rank(), x + y + shift


class EveryNth(todist.distributed.TensorDimensionPartitioner):
    """Rank r gets the rows r, r + n, r + 2n, ... of tensors."""

    def __call__(self, *args, **kwargs):
        size = todist.get_world_size()
        rows = [torch.cat([x[rank::size] for rank in range(size)]) if torch.is_tensor(x) else x for x in args]
        return super().__call__(*rows, **kwargs)


def pair(x, y):
    return torch.stack([x, y])


def test_a_partitioner_that_takes_other_rows_never_meets_those_of_put(world):
    def body():
        x, call = torch.arange(6.0), functools.partial(todist.remote_sync_call, pair)
        (first, second) = call(args=(x, x), partitioner=EveryNth(0))
        assert first.tolist() == [[0, 2, 4]] * 2
        assert second.tolist() == [[1, 3, 5]] * 2
        with pytest.raises(TypeError, match=r"put needs what `dim_partitioner` .* got EveryNth .* by itself"):
            call(args=(todist.put(x, EveryNth(0)), x), partitioner=todist.batch_partitioner)
        with pytest.raises(
            TypeError, match=r"EveryNth, a subclass .* must not split .* got <Shards 2 of size 6"
        ):
            call(args=(todist.put(x, todist.batch_partitioner), x), partitioner=EveryNth(0))
        parts = [todist.put(x[rank::2]) for rank in range(2)]  # what the error says

        def own(x):
            return [(rank, (part, x[rank::2]), {}) for rank, part in enumerate(parts)]

        found = call(args=(x,), partitioner=own)
        assert [each.tolist() for each in found] == [[[0, 2, 4]] * 2, [[1, 3, 5]] * 2]

    world(2).on_zero(body)


@pytest.mark.parametrize("partitioner", [todist.batch_partitioner, todist.tasks, todist.dim_partitioner(-1)])
def test_shards_are_split_as_the_value_would_be(world, partitioner):
    def body():
        x, y, shift = draw(7, 3), draw(7, 3), torch.tensor(1.0)
        shards = todist.put(x, partitioner)
        plain = todist.remote_sync_call(rows, args=(x, y, shift), partitioner=partitioner)
        kept = [
            todist.remote_sync_call(rows, args=(shards, y, shift), partitioner=partitioner) for _ in range(2)
        ]
        others = [nbytes for _, nbytes in kept_everywhere()][1:]
        return plain, kept, others, x.nbytes

    plain, kept, others, nbytes = world(3).on_zero(body)
    for found in kept:
        assert [rank for rank, _ in found] == [rank for rank, _ in plain]
        for (_, value), (_, expected) in zip(found, plain, strict=True):
            assert torch.equal(value, expected)
    assert 0 < sum(others) < nbytes  # each worker has its own part only


def changes(x):
    return x.add_(1)


def test_changes_and_ends_are_errors():
    @todist.auto_init_rpc()
    def main():
        x = torch.ones(3)
        handle = todist.put(x)
        x.add_(1)
        with pytest.raises(ResidentError, match=r"a tensor of shape \(3,\), was changed in place"):
            todist.remote_call(torch.sum, 0, handle)
        handle.close()
        with pytest.raises(ResidentError, match="after its handle had been closed"):
            todist.remote_call(torch.sum, 0, handle)

        array = np.ones(4)
        unchecked, checked = todist.put(array), todist.put(array, check=True)
        assert todist.remote_call(np.sum, 0, checked) == 4
        array += 1
        assert todist.remote_call(np.sum, 0, unchecked) == 8
        with pytest.raises(ResidentError, match="an object of class ndarray, was changed in place"):
            todist.remote_call(np.sum, 0, checked)

        with pytest.raises(ValueError, match=r"shape \(2,\) that requires grad"):
            todist.put(torch.ones(2, requires_grad=True), todist.batch_partitioner)
        with pytest.raises(ValueError, match=r"shape \(2,\) that requires grad"):
            todist.put(UserDict(w=torch.ones(2, requires_grad=True)))
        with pytest.raises(TypeError, match=r"cannot pickle .*lock"):
            todist.put(threading.Lock())
        with pytest.raises(TypeError, match=r"check must be True or False, got 'no'"):
            todist.put(x, check="no")
        with pytest.raises(TypeError, match=r"put needs what `dim_partitioner` returns.*got int 1"):
            todist.put(x, 1)
        shards = todist.put(torch.ones(4), todist.tasks)
        with pytest.raises(ValueError, match="give both the same partitioner"):
            todist.remote_sync_call(torch.sum, args=(shards,), partitioner=todist.batch_partitioner)
        shards.close()
        with pytest.raises(ResidentError, match="closed"):
            todist.remote_sync_call(torch.sum, args=(shards,), partitioner=todist.tasks)
        return todist.put(x)

    late = main()
    with pytest.raises(NotInitializedError):
        todist.put(torch.ones(1))

    @todist.auto_init_rpc()
    def again():
        with pytest.raises(ResidentError, match="the RPC group in which it was put had ended"):
            todist.remote_call(torch.sum, 0, late)

    again()


def test_a_change_on_a_worker_is_told_at_the_next_use(world):
    def body():
        handle = todist.put(torch.zeros(3))
        todist.remote_call(changes, 1, handle)
        with pytest.raises(ResidentError, match="changed in place") as caught:
            todist.remote_call(torch.sum, 1, handle)
        return caught.value.worker

    assert world(2).on_zero(body) == "worker1"


def scaled(x, value, doom):
    die(doom, "forward")
    return x * Backward.apply(value * x, doom, "backward")


@pytest.mark.parametrize("inside", [False, True])
def test_a_handle_lives_as_long_as_a_share_may_run_again(world, tmp_path, inside):
    def body():
        value = torch.full((3,), 2.0)
        held = {"value": todist.put(value)} if inside else todist.put(value)
        function = (lambda x, h, doom: scaled(x, h["value"], doom)) if inside else scaled
        x = torch.arange(3.0).requires_grad_()
        doom = (tmp_path, 1, "backward")
        (loss,) = todist.remote_sync_call(function, args=(x, held, doom), partitioner=1, retries=1)
        del held
        gc.collect()
        (grad,) = torch.autograd.grad(loss.sum(), x)  # worker 1 dies, and another one fetches the value
        assert todist.alive() == (0, 2)
        assert torch.equal(grad, 4 * x.detach())
        del loss, grad
        return [left_in_the_end(rank) for rank in todist.alive()]

    assert survive(world(3), body) == [0, 0]


def test_values_of_a_lost_worker_are_freed(world):
    def body():
        handle = todist.remote_call(put_there, 1)
        assert todist.remote_call(torch.sum, 2, handle) == 6.0
        assert todist.remote_call(torch.sum, 0, handle) == 6.0
        with contextlib.suppress(WorkerLostError):
            todist.remote_call(os.kill, 1, todist.remote_call(os.getpid, 1), signal.SIGKILL)
        assert [left_in_the_end(rank) for rank in (0, 2)] == [0, 0]
        with pytest.raises(WorkerLostError, match="rank 1 died"):
            todist.remote_call(torch.sum, 2, handle)

    survive(world(3), body)


def put_there():
    global _held
    _held = todist.put(torch.arange(4.0))
    return _held


def left_in_the_end(rank):
    """How many values a worker keeps when what is under way has ended."""
    until = time.monotonic() + 30
    while (left := todist.remote_call(kept_here, rank)[0]) and time.monotonic() < until:
        time.sleep(0.01)
    return left
