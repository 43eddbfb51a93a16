"""Two workers, of which several may share a GPU → what one process on the CPU computes, over both transports."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import torchopt_dist as todist
from tests.diff.data_parallel_cases import Problem
from tests.gpu.device import DEVICE, GPU, assert_near, needs_gpu, on_device
from tests.processes import World

TRANSPORTS = ["rpc", "zmq"]
KIND = DEVICE.type


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def data() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 6 * 10 * 3).reshape(6, 10, 3).sin()
    return x, x.sum(-1, keepdim=True)


def adapted_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model = todist.module_clone(model)
    inner = todist.MetaAdam(model, lr=0.05, eps=1e-3)
    for _ in range(2):
        inner.step(F.mse_loss(model(x[:5]), y[:5]))
    return F.mse_loss(model(x[5:]), y[5:])


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def expected() -> list[Tensor]:
    """In one process on the CPU."""
    model, (x, y) = network(), data()
    return gradients(
        torch.stack([adapted_loss(model, *task) for task in zip(x, y, strict=True)]).mean(), model
    )


def device_of_task(model: nn.Module, x: Tensor) -> tuple[str, str, int]:
    return next(model.parameters()).device.type, x.device.type, todist.get_rank()


def automatic() -> None:
    """The program is on the CPU, its tasks on the GPU of their workers."""
    model, (x, y) = network(), data()
    where = todist.parallelize(todist.tasks, list, device="auto")(device_of_task)(model, x)
    assert {place for *kinds, _ in where for place in kinds} == {KIND}
    assert {rank for *_, rank in where} == {0, 1}
    for options in ({}, {"vectorize": True}):
        spread = todist.parallelize(todist.tasks, todist.mean_reducer, device="auto", **options)
        found = gradients(spread(adapted_loss)(model, x, y), model)
        assert found[0].device.type == KIND
        assert {x.device.type for x in found[1:]} == {"cpu"}
        assert_near(found, expected(), 1e-4)


def of_both_kinds() -> None:
    """Without ``device=`` each tensor stays on its kind of device, and so does its gradient."""
    model, (x, y) = on_device(network()), data()

    def task(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        assert (x.device.type, next(model.parameters()).device.type) == ("cpu", KIND)
        return adapted_loss(model, x.to(DEVICE), y.to(DEVICE))

    found = gradients(todist.parallelize(todist.tasks, todist.mean_reducer)(task)(model, x, y), model)
    assert {x.device.type for x in found} == {KIND}
    assert_near(found, expected(), 1e-4)
    second = torch.autograd.grad(
        todist.parallelize(todist.tasks, todist.mean_reducer)(task)(model, x, y),
        list(model.parameters()),
        create_graph=True,
    )
    assert_near(
        torch.autograd.grad(sum((g**2).sum() for g in second), list(model.parameters())),
        _second_of_one_process(),
        1e-3,
    )


def _second_of_one_process() -> list[Tensor]:
    model, (x, y) = network(), data()
    loss = torch.stack([adapted_loss(model, *task) for task in zip(x, y, strict=True)]).mean()
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return list(torch.autograd.grad(sum((g**2).sum() for g in first), list(model.parameters())))


def resident() -> None:
    """What ``put`` has brought to the workers is on the kind of device it was on."""
    model, (x, y) = on_device(network()), data()
    kept = todist.put({"x": on_device(x), "y": on_device(y)})

    def task(model: nn.Module, kept: Any, index: Tensor) -> Tensor:
        assert kept["x"].device.type == KIND
        return adapted_loss(model, kept["x"][index], kept["y"][index])

    spread = todist.parallelize(todist.tasks, todist.mean_reducer)
    found = gradients(spread(task)(model, kept, torch.arange(6)), model)
    assert_near(found, expected(), 1e-4)


def large() -> None:
    """Tensors of a MiB, which ZeroMQ's receivers read out of the sender's memory."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)), torch.randn(4, 512, 512)

    def task(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - x).square().mean()

    expected = gradients(torch.stack([task(model, one) for one in x]).mean(), model)
    for place, given in (("auto", (model, x)), (None, on_device((model, x)))):
        spread = todist.parallelize(todist.tasks, todist.mean_reducer, device=place)(task)
        for _ in range(2):  # the second call's messages take the places of the first one's
            assert_near(gradients(spread(*given), given[0]), expected, 1e-4)


def noise(index: Tensor) -> Tensor:
    return F.dropout(torch.ones(20, device=DEVICE), 0.5) * index.to(DEVICE) + torch.randn(20, device=DEVICE)


def random_numbers() -> list[float]:
    """What tasks draw on their GPUs is the same on one and on two workers."""
    torch.manual_seed(4)
    spread = todist.parallelize(todist.tasks, todist.stack_reducer)(noise)
    drawn = spread(torch.arange(1.0, 7.0)).cpu()
    assert len({tuple(row) for row in drawn.tolist()}) == 6
    return drawn.tolist()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("program", [automatic, of_both_kinds, resident, large], ids=lambda f: f.__name__)
def test_tasks_of_two_workers(program: Callable[[], None], transport: str) -> None:
    World(2).on_zero(program, transport=transport)


def test_a_tree_passes_tensors_of_the_device_on() -> None:
    def body() -> None:
        model, (x, y) = on_device(network()), data()

        def task(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return adapted_loss(model, x.to(DEVICE), y.to(DEVICE))

        spread = todist.parallelize(todist.tasks, todist.mean_reducer, fan_out=1)
        assert_near(gradients(spread(task)(model, x, y), model), expected(), 1e-4)

    World(3).on_zero(body)


def test_random_numbers_do_not_depend_on_the_number_of_workers() -> None:
    drawn = [World(size).on_zero(random_numbers) for size in (1, 2)]
    assert drawn[0] == drawn[1]


@needs_gpu
def test_a_device_map_sends_tensors_from_gpu_to_gpu() -> None:
    from torch.distributed.rpc import TensorPipeRpcBackendOptions

    def body() -> None:
        model, (x, y) = on_device(network()), on_device(data())
        spread = todist.parallelize(todist.tasks, todist.mean_reducer)(adapted_loss)
        found = gradients(spread(model, x, y), model)
        assert {x.device.type for x in found} == {"cuda"}
        assert_near(found, expected(), 1e-4)

    def main() -> None:
        maps = {f"worker{rank}": {0: 0} for rank in range(2)}
        options = TensorPipeRpcBackendOptions(device_maps=maps)
        todist.auto_init_rpc(transport="rpc", rpc_backend_options=options)(todist.rank_zero_only(body))()

    World(2, rpc=False).run(main)


@pytest.mark.parametrize("size", [1, 2])
def test_a_mirror_takes_the_steps_of_one_process(size: int) -> None:
    def body() -> None:
        model, (x, y) = on_device(network()), on_device(data())
        alone = on_device(network())
        mirrored = todist.mirror(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        spread = todist.parallelize(todist.tasks, todist.mean_reducer)(adapted_loss)
        for _ in range(3):
            loss = spread(mirrored, x, y)
            mirrored.zero_grad()
            loss.backward()
            mirrored.step()
            optimizer.zero_grad()
            torch.stack([adapted_loss(alone, *task) for task in zip(x, y, strict=True)]).mean().backward()
            optimizer.step()
        assert {p.device.type for p in model.parameters()} == {KIND}
        assert_near(model.parameters(), alone.parameters(), 1e-4)

    World(size).on_zero(body)


def of_ranks(backend: str, parts: dict[str, Any]) -> list[Any]:
    """A loop whose batches are spread over the ranks, on the device."""
    if not dist.is_initialized():
        dist.init_process_group(backend)
    made = OnDevice(dist.get_rank(), dist.get_world_size())
    found = made.gradients(
        partial(todist.Replayed, snapshots=2), lambda lr: todist.adam(lr=lr, eps=1e-3), parts=parts
    )
    dist.destroy_process_group()
    return found


class OnDevice(Problem):
    """The problem of the tests of ranks, with all its tensors on the device."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        for name in ("model", "x", "y", "weights", "own", "decay", "lr"):
            setattr(self, name, on_device(getattr(self, name)))

    def batch(self, number: int) -> Tensor:
        return super().batch(number).to(DEVICE)


def of_all_ranks(numbers: list[Any]) -> list[Tensor]:
    """Without those of this rank's examples."""
    return [torch.tensor(x, dtype=torch.float64) for x in numbers[1:] if x is not None]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shard", [None, "state"])
def test_ranks_of_one_loop_on_the_device(shard: str | None) -> None:
    parts: dict[str, Any] = {} if shard is None else {"shard": shard}
    alone = World(1, rpc=False).run(of_ranks, "gloo", {})[0]
    own = "nccl" if GPU else "gloo"
    for size, backend in ((1, own), (2, "gloo" if torch.cuda.device_count() < 2 else own)):
        found = World(size, rpc=False).run(of_ranks, backend, parts, timeout=40.0)
        for of_rank in found:
            assert_near(of_all_ranks(of_rank), of_all_ranks(alone), 1e-6)


def test_a_checkpoint_keeps_the_device_and_the_generators(tmp_path: Any) -> None:
    def made() -> tuple[nn.Module, Any]:
        model = on_device(network())
        return model, todist.Adam(model.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: Any) -> None:
        x = torch.randn(5, 3, device=DEVICE)
        optimizer.zero_grad()
        F.dropout(model(x), 0.5).square().mean().backward()
        optimizer.step()

    torch.manual_seed(3)
    (model, optimizer), (other, other_optimizer) = made(), made()
    step(model, optimizer)
    todist.Checkpointer(tmp_path).save(1, {"model": model, "optimizer": optimizer})
    step(model, optimizer)
    after = torch.rand(2, device=DEVICE)
    torch.manual_seed(99)
    step(other, other_optimizer)
    todist.Checkpointer(tmp_path).restore({"model": other, "optimizer": other_optimizer})
    step(other, other_optimizer)
    assert torch.equal(torch.rand(2, device=DEVICE), after)
    assert {p.device.type for p in other.parameters()} == {KIND}
    assert_near(other.parameters(), model.parameters(), 1e-7)


def ending(model: nn.Module, place: Tensor) -> Tensor:
    """A task in whose middle its worker dies, if that is worker 1."""
    made = sum(p.square().sum() for p in model.parameters())
    if todist.get_rank() == 1:
        if GPU:
            torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    return made * place


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_that_is_killed_in_the_middle(transport: str, retries: int) -> None:
    def body() -> tuple[float, list[Tensor]]:
        model, places = network(), torch.arange(1.0, 5.0)
        spread = todist.parallelize(todist.tasks, todist.mean_reducer, device="auto", retries=retries)
        started, found = time.monotonic(), []
        if retries:
            found = [x.cpu() for x in gradients(spread(ending)(model, places), model)]
        else:
            with pytest.raises(todist.WorkerLostError):
                spread(ending)(model, places)
        return time.monotonic() - started, found

    ends = World(2).endings(body_on_zero(body), transport=transport, on_loss="continue")
    assert ends[0].error is None, ends[0].trace
    seconds, found = ends[0].value
    assert seconds < 60
    if retries:
        model = network()
        alone = 2.5 * sum(p.square().sum() for p in model.parameters())
        assert_near(found, gradients(alone, model), 1e-5)


def body_on_zero(body: Callable[[], Any]) -> Callable[[], Any]:
    return todist.rank_zero_only(body)
