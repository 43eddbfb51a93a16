"""Buffers that tasks change come back as the caller says, or the call says that they do not."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist

D = torch.float64
XS = torch.linspace(-1, 2, 5 * 4 * 3, dtype=D).reshape(5, 4, 3).sin()


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(D)


def loss(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


def flat_loss(net: nn.Module, x: Tensor) -> Tensor:
    return loss(net, x.reshape(-1, 3))


def named(item: Tensor, *, nets: dict[str, nn.Module]) -> Tensor:
    return loss(nets["first"], item) + loss(nets["again"], item)


def adapts(net: nn.Module, x: Tensor) -> Tensor:
    """A call in a task; the task's own network gets the buffers, and so the caller's."""
    return todist.remote_sync_call(loss, args=(net, x), partitioner=todist.get_rank(), buffers="first")[0]


def statistics(net: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in net.buffers()]


def one_by_one(xs: list[Tensor], times: int = 1) -> list[list[Tensor]]:
    """What each task makes of the buffers in plain Python."""
    found = []
    for x in xs:
        net = make()
        for _ in range(times):
            net(x)
        found.append(statistics(net))
    return found


def expected(xs: list[Tensor], buffers: str, weights: list[float] | None = None, times: int = 1):
    each = one_by_one(xs, times)
    if buffers == "first":
        return each[0]
    weight = torch.tensor(weights or [1.0] * len(xs), dtype=D)
    mean = [
        torch.tensordot(weight / weight.sum(), torch.stack(c), 1) for c in list(zip(*each, strict=True))[:2]
    ]
    return [*mean, torch.tensor(times)]


def buffers_come_back():
    for buffers in ("mean", "first"):
        for options in ({}, {"vectorize": True}, {"isolate_own_share": False}, {"fan_out": 1}):
            net = make()
            held = list(net.buffers())
            call = todist.parallelize(
                todist.tasks, todist.mean_reducer, buffers=buffers, strict=True, **options
            )
            value = call(loss)(net, XS)
            value.backward()
            assert all(a is b for a, b in zip(net.buffers(), held, strict=True))  # as torch itself, in place
            torch.testing.assert_close(statistics(net), expected(list(XS), buffers))
            plain = make()
            torch.stack([loss(plain, x) for x in XS]).mean().backward()
            torch.testing.assert_close(net[0].weight.grad, plain[0].weight.grad)
    uneven = make()
    todist.parallelize(reducer=todist.mean_reducer, buffers="mean")(flat_loss)(uneven, XS)
    sizes = [len(part) for part in XS.tensor_split(todist.get_world_size())]
    parts = [part.reshape(-1, 3) for part in XS.tensor_split(todist.get_world_size())]
    torch.testing.assert_close(statistics(uneven), expected(parts, "mean", sizes))

    twice = make()
    todist.map(named, XS, kwargs={"nets": {"first": twice, "again": twice}}, buffers="mean")
    torch.testing.assert_close(statistics(twice), expected(list(XS), "mean", times=2))

    later = make()
    todist.parallelize_async(todist.tasks, buffers="mean")(loss)(later, XS).wait()
    torch.testing.assert_close(statistics(later), expected(list(XS), "mean"))

    nested = make()
    todist.parallelize(todist.tasks, buffers="mean")(adapts)(nested, XS)
    torch.testing.assert_close(statistics(nested), expected(list(XS), "mean"))

    for itself in (make(), functools.partial(loss, make())):
        todist.map(itself, XS, buffers="mean")
        net = itself if isinstance(itself, nn.Module) else itself.args[0]
        torch.testing.assert_close(statistics(net), expected(list(XS), "mean"))

    with torch.no_grad():
        left = make().eval()
        todist.parallelize(todist.tasks, buffers="mean")(loss)(left, XS)
    torch.testing.assert_close(statistics(left), statistics(make()))


def test_buffers_come_back_as_of_one_process_with_a_task_each(world):
    todist.auto_init_rpc()(buffers_come_back)()
    world(2).on_zero(buffers_come_back)


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x])
        return self.seen.sum()


def test_a_buffer_may_get_another_shape():
    def body():
        net = Grows()
        todist.map(net, [torch.ones(2), torch.ones(3)], buffers="first")
        assert net.seen.tolist() == [1, 1]
        with pytest.raises(ValueError, match=r"`seen` of shapes \[\(3,\), \(4,\)\]: write buffers=\"first\""):
            todist.map(net, [torch.ones(1), torch.ones(2)], buffers="mean")

    todist.auto_init_rpc()(body)()


def test_that_buffers_do_not_come_back_is_said_once_by_name_and_is_an_error_if_strict(world):
    def body():
        text = r"`loss` has changed buffers .*: `net\.1\.running_mean`, .*tracked`\. Write .*buffers=\"mean\""
        for worker in range(todist.get_world_size()):
            call = functools.partial(todist.remote_sync_call, loss, args=(make(), XS[0]), partitioner=worker)
            call(buffers="first")
            with pytest.warns(UserWarning, match=text):
                call()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                call()  # once
                todist.remote_sync_call(loss, args=(make().eval(), XS[0]), partitioner=worker, strict=True)
            with pytest.raises(RuntimeError, match=text):
                call(strict=True)

    todist.auto_init_rpc()(body)()
    world(2).on_zero(body)


def test_wrong_values_are_errors():
    with pytest.raises(ValueError, match=r"buffers must be \"mean\", \"first\" or None, got 'sum'"):
        todist.parallelize(buffers="sum")
