"""The life of the RPC group: its start, ``main`` on every worker, its end, and a group after a group."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc

import torchopt_dist as todist
from tests.distributed.programs import rank_of_worker
from tests.processes import World, free_port
from tests.waits import say, soon, watch
from torchopt_dist.distributed.group.group import current_group


def alone():
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)


def test_what_main_returns_comes_back_on_every_rank(world):
    def main(a, *, b=1):
        return {"rank": todist.get_rank(), "sum": torch.ones(2) * a + b}

    values = world(2).run(main, 3)
    assert [value["rank"] for value in values] == [0, 1]
    assert all(torch.equal(value["sum"], torch.full((2,), 4.0)) for value in values)


def test_main_keeps_its_name_and_its_arguments():
    @todist.auto_init_rpc()
    def train(steps, *, rate):
        """Train."""
        return steps, rate

    assert (train.__name__, train.__doc__) == ("train", "Train.")

    def program():
        alone()
        return todist.auto_init_rpc()(lambda steps, *, rate: (steps, rate))(3, rate=0.5)

    assert World(1, rpc=False).run(program) == [(3, 0.5)]


def test_worker_init_fn_runs_on_all_before_main_runs_on_any(world, tmp_path):
    def init():
        if todist.get_rank() == 1:  # the slow one: main must not have begun elsewhere
            assert not watch(tmp_path / "main0", 0.3)
        say(tmp_path / f"init{todist.get_rank()}")

    def main():
        say(tmp_path / f"main{todist.get_rank()}")
        return sorted(path.name for path in tmp_path.glob("init?"))

    assert world(3).run(main, worker_init_fn=init) == [["init0", "init1", "init2"]] * 3


def test_worker_init_fn_can_call_the_group(world):
    def init():
        assert todist.get_worker_id(f"worker{todist.get_rank()}") == todist.get_rank()
        todist.barrier()

    assert world(2).run(rank_of_worker, worker_init_fn=init) == [0, 1]


def test_a_worker_serves_until_all_are_done(world, tmp_path):
    def main():
        if todist.get_rank() == 1:
            say(tmp_path / "done")
            return None
        assert watch(tmp_path / "done")
        # Rank 1's `main` has returned; its process answers still.
        return [todist.remote_sync_call(rank_of_worker, partitioner=1) for _ in range(20)]

    assert world(2).run(main)[0] == [[1]] * 20


@pytest.mark.parametrize("argument", ["worker_init_fn", "worker_name_format"])
def test_what_is_no_function_is_told_when_decorating(argument):
    with pytest.raises(TypeError, match=rf"{argument} must be callable, got int 3"):
        todist.auto_init_rpc(**{argument: 3})


def test_decorating_no_function_is_told():
    with pytest.raises(TypeError, match="decorates a function, got int 3"):
        todist.auto_init_rpc()(3)


def test_a_second_group_is_made_after_the_first_has_ended():
    def program():
        names = []
        for letter in "abc":
            main = todist.auto_init_rpc(worker_name_format=(letter + "{world_rank}").format)(
                lambda: todist.remote_sync_call(
                    lambda: todist.get_world_info().worker_name, partitioner=1 - todist.get_rank()
                )
            )
            names += main()
        return names

    assert World(2, rpc=False).run(program) == [["a1", "b1", "c1"], ["a0", "b0", "c0"]]


def test_a_second_group_is_made_after_the_first_has_failed():
    def first():
        if todist.get_rank() == 1:
            raise ValueError("once")
        todist.barrier()

    def program():
        try:
            todist.auto_init_rpc()(first)()
        except (ValueError, todist.PeerFailedError) as error:
            kind = type(error).__name__
        return kind, todist.auto_init_rpc()(
            lambda: todist.remote_sync_call(rank_of_worker, partitioner=1 - todist.get_rank())
        )()

    assert World(2, rpc=False).run(program) == [("PeerFailedError", [1]), ("ValueError", [0])]


def test_auto_init_rpc_inside_main_uses_the_group_that_is_there(world):
    def main():
        group = current_group()
        inits = []

        @todist.auto_init_rpc(lambda: inits.append(1))
        def inner():
            assert current_group() is group
            return todist.remote_sync_call(rank_of_worker, partitioner=1)

        with pytest.warns(UserWarning, match=r"`worker_init_fn` of the decorated .*inner` is not called"):
            values = [inner(), inner()]
        todist.barrier()  # the group is still there
        assert not inits
        return values

    assert world(2).run(main) == [[[1], [1]]] * 2


def test_a_decorated_function_that_is_decorated_again_is_prepared_as_it_asks():
    inits = []
    main = todist.rank_zero_only(todist.auto_init_rpc(lambda: inits.append(1))(rank_of_worker))
    assert todist.auto_init_rpc(on_loss="end")(main)() == 0  # what `launch(main, rpc=True)` does
    assert inits == [1]


@pytest.mark.torch_rpc
def test_auto_init_rpc_inside_main_cannot_ask_for_another_group(world):
    def other_format(**place):
        return f"other{place['world_rank']}"

    def main():
        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=5)
        for settings, told in (
            ({"worker_name_format": other_format}, "worker_name_format"),
            ({"rpc_backend_options": options}, "rpc_backend_options"),
            ({"backend": rpc.BackendType.TENSORPIPE}, "backend"),
        ):
            with pytest.raises(todist.errors.InitializationError, match=f"asks for another {told}"):
                todist.auto_init_rpc(**settings)(rank_of_worker)()
        return todist.auto_init_rpc()(rank_of_worker)()

    assert world(2).run(main) == [0, 1]


@pytest.mark.torch_rpc
def test_a_program_that_has_called_init_rpc_is_told():
    def program():
        rpc.init_rpc("mine", rank=0, world_size=1)
        try:
            todist.auto_init_rpc()(rank_of_worker)()
        finally:
            rpc.shutdown()

    started = time.monotonic()
    ending = World(1, rpc=False).endings(program)[0]
    assert time.monotonic() - started < soon(5)
    assert isinstance(ending.error, todist.errors.InitializationError)
    assert "must not" in str(ending.error)
    assert "init_rpc" in str(ending.error)


def test_a_process_group_of_the_program_s_own_works_beside(world):
    def main():
        os.environ["MASTER_PORT"] = todist.remote_sync_call(own_port, partitioner=0, reducer=lambda r: r[0])
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        total = torch.tensor([todist.get_rank() + 1.0])
        dist.all_reduce(total)
        values = todist.remote_sync_call(rank_of_worker, partitioner=1 - todist.get_rank())
        dist.destroy_process_group()
        return total.item(), values

    assert world(2).run(main) == [(3.0, [1]), (3.0, [0])]


def own_port():
    # A port of its own: rank 0's store holds MASTER_PORT only while the group is made, or for as long as it lives.

    with _one_at_a_time:  # rank 0 asks itself while it answers rank 1
        own_port.port = getattr(own_port, "port", None) or str(free_port())
    return own_port.port


_one_at_a_time = threading.Lock()


def test_a_process_group_on_the_same_port_works_beside(world):
    def main():
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        total = torch.tensor([todist.get_rank() + 1.0])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item()

    assert world(2).run(main) == [3.0, 3.0]


@pytest.mark.torch_rpc
def test_plain_python_is_a_world_of_one_in_which_everything_works():
    def main():
        model = torch.nn.Linear(3, 1, dtype=torch.float64)
        batch = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
        expected = torch.autograd.grad(model(batch).mean(), list(model.parameters()))

        def loss_fn(model, batch):
            return model(batch).mean()

        def close(gradients):
            return all(torch.allclose(a, b, atol=1e-12) for a, b in zip(gradients, expected, strict=True))

        parallel = todist.parallelize(todist.batch_partitioner, todist.mean_reducer)(loss_fn)
        assert close(torch.autograd.grad(parallel(model, batch), list(model.parameters())))
        by_sample = todist.parallelize(
            todist.dim_partitioner(0, exclusive=True, keepdim=True), todist.mean_reducer
        )(loss_fn)
        assert close(torch.autograd.grad(by_sample(model, batch), list(model.parameters())))
        with todist.autograd.context() as context_id:
            loss = parallel(model, batch)
            assert close(todist.autograd.grad(context_id, loss, list(model.parameters())))
        with todist.autograd.context() as context_id:
            todist.autograd.backward(context_id, parallel(model, batch))
        assert close([parameter.grad for parameter in model.parameters()])

        assert todist.remote_sync_call(rank_of_worker, partitioner=0) == [0]
        assert todist.remote_sync_call(rank_of_worker, partitioner="worker0") == [0]
        assert todist.remote_async_call(rank_of_worker, partitioner=0).wait() == [0]
        assert rpc.rpc_sync("worker0", rank_of_worker) == 0
        todist.barrier()
        todist.barrier(["worker0"])
        return todist.get_world_info()

    def program():
        alone()
        return todist.auto_init_rpc()(main)(), os.environ.get("MASTER_PORT")

    assert World(1, rpc=False).run(program) == [(todist.typing.WorldInfo(1, 0, 1, 0, "worker0"), None)]


def test_an_error_in_a_world_of_one_is_the_program_s_own():
    def program():
        alone()
        with pytest.raises(ZeroDivisionError) as caught:
            todist.auto_init_rpc()(lambda: 1 / 0)()
        assert caught.value.__cause__ is None
        with pytest.raises(SystemExit):
            todist.auto_init_rpc()(lambda: sys.exit(0))()
        return todist.auto_init_rpc()(rank_of_worker)()

    assert World(1, rpc=False).run(program) == [0]


def test_the_default_device_of_worker_init_fn_holds_in_the_threads_that_serve(world):
    """The device "meta" stands for a GPU: it is none that a new thread has."""

    def init():
        torch.set_default_device("meta")
        todist.barrier()
        # Threads that answer before the settings are known take them over afterwards.
        todist.remote_sync_call(rank_of_worker, partitioner=1 - todist.get_rank())

    def where(x):
        return torch.ones(2).device.type, (x**2).sum()

    def body():
        x = torch.full((3,), 2.0, device="cpu", requires_grad=True)
        for _ in range(2):  # calls need tensors of their own, which are on the CPU
            for worker in (1, 0):
                ((device, value),) = todist.remote_async_call(where, args=(x,), partitioner=worker).wait()
                assert device == "meta"
                (gradient,) = torch.autograd.grad(value, x, create_graph=True)
                assert gradient.tolist() == [4.0] * 3
            ((device, _),) = todist.remote_sync_call(where, args=(x,), partitioner=1)
            assert device == "meta"

    world(2).on_zero(body, worker_init_fn=init)
