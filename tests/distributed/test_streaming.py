"""``stream=True``: a worker runs its first task while the others still travel; values and gradients are the same."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.distributed.programs import kept_on
from torchopt_dist.distributed import _unicast
from torchopt_dist.distributed._late_tensors import LateTensors
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._payload import ExecutionOptions, group_by_worker
from torchopt_dist.distributed._streams import CHUNK

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
    return (model(x) * scale).tanh().square().mean() + x.sin().mean()


def same_bits(hidden=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    tasks = [rows(index, requires_grad=True) for index in range(9)]
    leaves = [*model.parameters(), *tasks]

    def derivatives(**options):
        loss = todist.parallelize(two_each, todist.sum_reducer, **options)(loss_of)(model, *tasks)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return [loss, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]

    here = sum(loss_of(model, task, index + 1.0) for index, task in enumerate(tasks))
    whole = derivatives()
    torch.testing.assert_close(whole[0], here)
    assert all(map(torch.equal, whole, derivatives(stream=True)))


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
    assert len(waited) == 3
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
    from torchopt_dist.distributed._group import current_group

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


def gradients_of_a_replica():
    module = nn.Linear(8, 2).double()
    expected = [
        *torch.autograd.grad(
            sum(loss_of(module, rows(index), index + 1.0) for index in range(6)), module.parameters()
        )
    ]
    replica = todist.replica(module, torch.optim.SGD(module.parameters(), lr=1.0))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    call = todist.parallelize(two_each, todist.sum_reducer, stream=True)(loss_of)
    call(replica, *(rows(index) for index in range(6))).backward()
    replica.step()
    for old, new, grad in zip(before, module.parameters(), expected, strict=True):
        torch.testing.assert_close(old - new.detach(), grad)


@pytest.mark.parametrize("transport", ["zmq", "rpc"])
def test_streamed_calls(world, transport):
    def body():
        same_bits()
        if transport == "zmq":
            the_first_task_runs_while_the_others_are_not_sent()
            what_is_changed_after_an_asynchronous_call_has_been_copied()
            an_error_lets_go_of_what_still_comes()
            items_and_hidden_tensors()
            gradients_of_a_replica()

    world(3, env={"TODIST_TRANSPORT": transport}).on_zero(body)
