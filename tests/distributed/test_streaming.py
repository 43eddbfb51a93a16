"""``stream=True``: large tensors of tasks, and their gradients, travel while a worker runs; same numbers."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.distributed.programs import kept_on, lie_right
from torchopt_dist.distributed import _unicast
from torchopt_dist.distributed._gradient_streams import Arriving
from torchopt_dist.distributed._group import Group, current_group
from torchopt_dist.distributed._late_tensors import LateTensors
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._payload import ExecutionOptions, group_by_worker
from torchopt_dist.distributed._streams import CHUNK
from torchopt_dist.errors import WorkerLostError

ROWS = CHUNK // 64 + 3
"""Of eight float64s: more than one chunk a task."""


def rows(number=0, **options):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, 8, generator=generator, dtype=torch.float64, **options)


# ------------------------------------------------------------------------------------------------ which may come late


def late_of(*tasks):
    found = group_by_worker(print, [(1, task, {}) for task in tasks], ExecutionOptions())
    return LateTensors.of(found[1][0], snapshot=False)


class Holder:
    def __init__(self, held):
        self.held = held


def test_large_tensors_of_later_tasks_come_late():
    model, shared, one, two = nn.Linear(8, 8), rows(), rows(1), rows(2)
    small = torch.ones(3)
    late = late_of(
        (model, shared, one), (model, shared, small, {"x": [two]}), (model, shared, two, (one,), 7)
    )
    assert [id(tensor) for tensor in late.tensors] == [id(two)]
    assert late.tasks == [1]
    assert {id(tensor) for tensor in late.new} == {id(two), id(small)}
    assert sum(piece.values.numel() for chunk in late.chunks for piece in chunk) == two.numel()
    assert late_of((model, one)) is None
    assert late_of((model, one), (model, small)) is None
    assert late_of((model, one), (model, one)) is None
    assert late_of((Holder(1), one), (Holder(2), two)) is None, "a new object may read it when it is rebuilt"


def test_a_tensor_that_the_first_task_holds_unseen_does_not_come_late():
    one, two = rows(1), rows(2)
    late = late_of((Holder(two), one), (one, two))
    message = Message(b"", [two, one, late.mark], [False] * 3, [False] * 3)
    assert late.numbers_in(message) is None
    assert late.numbers_in(message.with_tensors([one, late.mark, two])) == [2]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"vectorize": True}, "vectorize needs all tasks at once"),
        ({"retries": 1}, "retries may send a share again"),
        ({"hedge_after": 1.0}, "hedge_after may send a share again"),
        ({"fan_out": 2}, "leave out fan_out=2"),
    ],
)
def test_what_needs_a_whole_share_is_an_error(options, match):
    with pytest.raises(ValueError, match=match):
        todist.parallelize(stream=True, **options)


# ------------------------------------------------------------------------------------------------------------ calls


def two_each(model, *tasks):
    return [(index % 3, (model, task), {"scale": index + 1.0}) for index, task in enumerate(tasks)]


def loss_of(model, x, scale):
    assert lie_right(x, *model.parameters())
    return (model(x) * scale).tanh().square().mean() + x.sin().mean()


@contextmanager
def chunks_of_gradients():
    """A list of those that come, each as the place and the start of its pieces."""
    came, put = [], Arriving.put

    def noting(self, index, chunk):
        came.append([piece[:2] for piece in chunk])
        put(self, index, chunk)

    Arriving.put = noting
    try:
        yield came
    finally:
        Arriving.put = put


def same_bits():
    """On three workers, of all orders; the model's gradients are small, those of the tasks come in chunks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    tasks = [rows(index, requires_grad=True) for index in range(9)]
    leaves = [*model.parameters(), *tasks]

    def derivatives(**options):
        call = todist.parallelize(two_each, todist.sum_reducer, **options)(loss_of)
        loss = call(model, *tasks)
        plain = torch.autograd.grad(loss, leaves, retain_graph=True)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return [loss, *plain, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]

    here = sum(loss_of(model, task, index + 1.0) for index, task in enumerate(tasks))
    with chunks_of_gradients() as came:
        whole = derivatives()
        torch.testing.assert_close(whole[0], here)
        torch.testing.assert_close(whole[1 : 1 + len(leaves)], [*torch.autograd.grad(here, leaves)])
        assert not came
        streamed = derivatives(stream=True)
        assert lie_right(*streamed, *whole)
        assert all(map(torch.equal, whole, streamed))
    # One of each of six tasks, in the backwards that are not recorded: that of first and that of second order.
    assert len(came) == 2 * 6


has_begun = threading.Event()


def begun():
    has_begun.set()


def telling(x, index):
    if index == 0:
        todist.remote_call(0, begun)
    return x.sum()


def to_one(*tasks):
    return [(1, (task, index), {}) for index, task in enumerate(tasks)]


def the_first_task_runs_while_the_others_are_not_sent():
    tasks, send, waited = [rows(index) for index in range(3)], _unicast.send_chunk, []

    def send_when_begun(*chunk):
        waited.append(has_begun.wait(60))
        send(*chunk)

    _unicast.send_chunk = send_when_begun
    try:
        call = todist.parallelize(to_one, stream=True)(telling)
        torch.testing.assert_close(torch.stack(call(*tasks)), torch.stack([x.sum() for x in tasks]))
    finally:
        _unicast.send_chunk = send
    assert len(waited) == 2
    assert all(waited)


def what_is_changed_after_an_asynchronous_call_has_been_copied():
    tasks = [rows(index) for index in range(3)]
    sums = [task.sum() for task in tasks]
    future = todist.parallelize_async(to_one, stream=True)(lambda x, index: x.sum())(*tasks)
    for task in tasks:
        task.zero_()
    torch.testing.assert_close(future.wait(), sums)


def raising(x, index):
    if index == 0:
        raise ArithmeticError("in the first task")
    return x.sum()


def left_over():
    streams = vars(current_group().streams)
    return len(streams["_queues"]), len(streams["_unwanted"])


def an_error_lets_go_of_what_still_comes():
    call = todist.parallelize(to_one, stream=True)(raising)
    with pytest.raises(ArithmeticError, match="in the first task"):
        call(*(rows(index, requires_grad=True) for index in range(4)))
    until = time.monotonic() + 60
    while todist.remote_call(1, left_over) != (0, 0):
        assert time.monotonic() < until
    assert kept_on(1) == 0


class _Unreadable:
    def __reduce__(self):
        return _read, ()


def _read():
    assert todist.get_rank() == 0, "cannot be read"
    return _Unreadable()


def a_call_that_its_worker_cannot_read_leaves_none_of_its_chunks():
    function = functools.partial(lambda unreadable, x, index: x.sum(), _Unreadable())
    call = todist.parallelize(to_one, stream=True)(function)
    for requires_grad in (False, True):
        with pytest.raises(todist.SerializationError, match="cannot be read"):
            call(*(rows(index, requires_grad=requires_grad) for index in range(4)))
        time.sleep(0.2)
        until = time.monotonic() + 10
        while todist.remote_call(1, left_over) != (0, 0):
            assert time.monotonic() < until


class _Backward(torch.autograd.Function):
    """The identity; its backward calls a function."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.function()
        return grad, None


chunk_has_come = threading.Event()


def wait_for_a_chunk():
    return chunk_has_come.wait(30)


def after_a_chunk_has_come(what):
    """In a backward on a worker: something, as soon as the caller has gradients of the task before."""
    if not todist.remote_call(0, wait_for_a_chunk):
        raise TimeoutError("no gradient has come before the backward was done")
    if what == "raise":
        raise ArithmeticError("in the last task")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def with_backward(x, index, what):
    """The engine begins with the last task, so the first task's backward is the last."""
    return _Backward.apply(x, lambda: after_a_chunk_has_come(what) if index == 0 else None).sin().sum()


def gradients_are_sent_before_the_backward_is_done(what="go on"):
    tasks, put = [rows(index, requires_grad=True) for index in range(3)], Arriving.put

    def telling_put(*arguments):
        put(*arguments)
        chunk_has_come.set()

    chunk_has_come.clear()
    call = todist.parallelize(
        lambda *tasks: [(1, (task, index, what), {}) for index, task in enumerate(tasks)],
        todist.sum_reducer,
        stream=True,
    )(with_backward)
    Arriving.put = telling_put
    try:
        call(*tasks).backward()
    except BaseException:
        assert all(task.grad is None for task in tasks)
        raise
    finally:
        Arriving.put = put
    for task in tasks:
        assert torch.equal(task.grad, task.detach().cos())


def a_failure_leaves_no_half_gradients():
    with pytest.raises(ArithmeticError, match="in the last task") as raised:
        gradients_are_sent_before_the_backward_is_done("raise")
    assert raised.value.worker == "worker1"
    del raised
    gc.collect()
    assert kept_on(1) == 0
    assert not vars(current_group().gradient_streams)["_arriving"]


class _Inner(torch.autograd.Function):
    """Its backward runs a backward of its own to the same leaf, as that of an implicit function does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.detach().square().sum()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            (inner,) = torch.autograd.grad(x.square().sum(), x)
        return grad * inner


def of_many_kinds(x, y, z, unused, parts):
    """Leaves that one backward inside another reaches, too; that share a gradient; that have a hook; of small size."""
    x.register_hook(lambda grad: 2 * grad)
    return sum(part.sum() for part in parts) + _Inner.apply(x) + (x * 3).sum() + (y + z).t().square().sum()


def gradients_of_many_kinds():
    """They are whole, sent once, and several share a chunk."""
    part = CHUNK // 8 // 3  # three of them are a little less than a chunk
    x, y, z, unused = (torch.randn(CHUNK // 8, 1, dtype=torch.float64, requires_grad=True) for _ in range(4))
    parts = [torch.ones(part, dtype=torch.float64, requires_grad=True) for _ in range(5)]
    leaves = [x, y, z, unused, *parts]
    call = todist.parallelize(lambda *given: [(1, given, {})], todist.sum_reducer, stream=True)(of_many_kinds)
    with chunks_of_gradients() as came:
        found = torch.autograd.grad(call(x, y, z, unused, parts), leaves, allow_unused=True)
    copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    here = of_many_kinds(*copies[:4], copies[4:])
    expected = torch.autograd.grad(here, copies, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
    pieces = [piece for chunk in came for piece in chunk]
    assert len({*pieces}) == len(pieces)
    assert max(map(len, came)) == 4
    assert len({place for place, _ in pieces}) == 3 + 4, "the last one comes with the reply"


def hide_the_engine_s_run():
    del torch._C._current_graph_task_id


def gradients_come_whole_if_the_engine_has_no_number():
    todist.remote_call(1, hide_the_engine_s_run)
    tasks = [rows(index, requires_grad=True) for index in range(2)]
    call = todist.parallelize(to_one, todist.sum_reducer, stream=True)(lambda x, index: x.sin().sum())
    with chunks_of_gradients() as came:
        gradients = torch.autograd.grad(call(*tasks), tasks)
    assert all(map(torch.equal, gradients, [task.detach().cos() for task in tasks]))
    assert not came


def items_and_hidden_tensors():
    x = [rows(index) for index in range(6)]
    sums = todist.map(
        lambda item, factor: (factor * item["x"]).sum(), [{"x": each} for each in x], args=(2,), stream=True
    )
    torch.testing.assert_close(torch.stack(sums), torch.stack([2 * each.sum() for each in x]))
    held = Holder(x[1])
    call = todist.parallelize(lambda: [(1, (held,), {}), (1, (x[1],), {}), (1, (x[2],), {})], stream=True)(
        lambda part: getattr(part, "held", part).sum()
    )
    torch.testing.assert_close(torch.stack(call()), torch.stack([x[1].sum(), x[1].sum(), x[2].sum()]))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(rows(10))

    def forward(self, x):
        return self.weight * x


def gradients_of_a_replica():
    """They are large, and stay on the workers."""
    module = Scaled()
    expected = [
        *torch.autograd.grad(
            sum(loss_of(module, rows(index), index + 1.0) for index in range(6)), module.parameters()
        )
    ]
    replica = todist.replica(module, torch.optim.SGD(module.parameters(), lr=1.0))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    call = todist.parallelize(two_each, todist.sum_reducer, stream=True)(loss_of)
    with chunks_of_gradients() as came:
        call(replica, *(rows(index) for index in range(6))).backward()
    assert not came
    replica.step()
    for old, new, grad in zip(before, module.parameters(), expected, strict=True):
        torch.testing.assert_close(old - new.detach(), grad)


def on_one_host_all_travels_at_once():
    sent, send = [], _unicast.send_chunk

    def noting(*chunk):
        sent.append(chunk)
        send(*chunk)

    _unicast.send_chunk = noting
    tasks = [rows(index, requires_grad=True) for index in range(3)]
    call = todist.parallelize(to_one, todist.sum_reducer, stream=True)(lambda x, index: x.sin().sum())
    try:
        with chunks_of_gradients() as came:
            gradients = torch.autograd.grad(call(*tasks), tasks)
    finally:
        _unicast.send_chunk = send
    assert all(map(torch.equal, gradients, [task.detach().cos() for task in tasks]))
    assert not sent
    assert not came


@pytest.mark.parametrize("transport", ["zmq", "rpc"])
def test_streamed_calls(world, transport):
    def body():
        on_one_host_all_travels_at_once()
        Group.on_this_host = lambda group, rank: rank == 0
        same_bits()
        gradients_are_sent_before_the_backward_is_done()
        if transport == "zmq":
            the_first_task_runs_while_the_others_are_not_sent()
            what_is_changed_after_an_asynchronous_call_has_been_copied()
            an_error_lets_go_of_what_still_comes()
            a_call_that_its_worker_cannot_read_leaves_none_of_its_chunks()
            a_failure_leaves_no_half_gradients()
            gradients_of_many_kinds()
            items_and_hidden_tensors()
            gradients_of_a_replica()
            gradients_come_whole_if_the_engine_has_no_number()

    world(3, env={"TODIST_TRANSPORT": transport}).on_zero(body)


def test_a_worker_that_dies_in_backward_after_its_first_gradients(world):
    def main():
        Group.on_this_host = lambda group, rank: rank == 0
        if todist.get_rank() == 0:
            with pytest.raises(WorkerLostError, match="rank 1 died"):
                gradients_are_sent_before_the_backward_is_done("die")

    endings = world(2, env={"TODIST_TRANSPORT": "zmq"}).endings(main, timeout=100, on_loss="continue")
    if endings[0].error is not None:
        raise endings[0].error
    assert [ending.exitcode for ending in endings] == [0, -signal.SIGKILL]
