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
from tests.distributed.bare import Bare, say, soon, watch
from torchopt_dist.distributed.rpc import _default_options, current_group, default_timeout

pytestmark = pytest.mark.timeout(60)


def alone():
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)


def rank_of_worker():
    return todist.get_rank()


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

    assert Bare(1).run(program) == [(3, 0.5)]


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

    assert Bare(2).run(program) == [["a1", "b1", "c1"], ["a0", "b0", "c0"]]


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

    assert Bare(2).run(program) == [("PeerFailedError", [1]), ("ValueError", [0])]


def test_auto_init_rpc_inside_main_uses_the_group_that_is_there(world):
    def main():
        group = current_group()
        inits = []

        @todist.auto_init_rpc(lambda: inits.append(1))
        def inner():
            assert current_group() is group
            return todist.remote_sync_call(rank_of_worker, partitioner=1)

        values = [inner(), inner()]
        todist.barrier()  # the group is still there
        return values

    assert world(2).run(main) == [[[1], [1]]] * 2


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
            with pytest.raises(todist.InitializationError, match=f"asks for another {told}"):
                todist.auto_init_rpc(**settings)(rank_of_worker)()
        return todist.auto_init_rpc()(rank_of_worker)()

    assert world(2).run(main) == [0, 1]


def test_a_program_that_has_called_init_rpc_is_told():
    def program():
        rpc.init_rpc("mine", rank=0, world_size=1)
        try:
            todist.auto_init_rpc()(rank_of_worker)()
        finally:
            rpc.shutdown()

    started = time.monotonic()
    ending = Bare(1).endings(program)[0]
    assert time.monotonic() - started < soon(5)
    assert isinstance(ending.error, todist.InitializationError)
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
    from tests.worlds import free_port

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


def by_role(*, world_rank, world_size, local_rank, local_world_size):
    return f"{'hub' if world_rank == 0 else 'spoke'}-{world_rank}:{local_rank}_of_{world_size}"


@pytest.mark.parametrize(
    ("worker_name_format", "names"),
    [
        (by_role, ["hub-0:0_of_2", "spoke-1:1_of_2"]),
        (lambda world_rank, **_: f"w{world_rank}", ["w0", "w1"]),
        ("trainer-{world_rank:03d}".format, ["trainer-000", "trainer-001"]),
    ],
    ids=["function", "lambda", "str.format"],
)
def test_workers_are_called_by_the_names_that_the_program_gives(world, worker_name_format, names):
    def main():
        assert todist.get_world_info().worker_name == names[todist.get_rank()]
        return [todist.remote_sync_call(rank_of_worker, partitioner=name) for name in names]

    assert world(2).run(main, worker_name_format=worker_name_format) == [[[0], [1]]] * 2


@pytest.mark.parametrize(
    ("worker_name_format", "told"),
    [
        (lambda **_: 7, ["worker_name_format must return", "int 7"]),
        (lambda **_: None, ["worker_name_format must return", "NoneType None"]),
        (lambda world_rank, **_: f"a b{world_rank}", ["name", "'a b"]),
        (lambda world_rank, **_: f"{'x' * 128}{world_rank}", ["name", "'xxx"]),
        (lambda **_: "same", ["ranks 0 and 1 the same name 'same'", "unique"]),
    ],
    ids=["int", "None", "with a blank", "too long", "twice the same"],
)
@pytest.mark.timeout(20)
def test_a_bad_name_is_told_on_every_rank(world, worker_name_format, told):
    endings = world(2).endings(rank_of_worker, worker_name_format=worker_name_format, timeout=10)
    for ending in endings:
        assert isinstance(ending.error, todist.InitializationError), ending
        for words in told:
            assert words in str(ending.error)


def test_calls_have_no_timeout_by_default():
    def main():
        return rpc.get_rpc_timeout(), default_timeout()

    def program():
        # Options that say nothing of a time-out ask for none.
        options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4)
        return [todist.auto_init_rpc()(main)(), todist.auto_init_rpc(rpc_backend_options=options)(main)()]

    assert Bare(1).run(program) == [[(0.0, 0.0)] * 2]


def test_the_timeout_of_the_options_is_that_of_calls():
    def main():
        if todist.get_rank() != 0:
            return None
        assert (rpc.get_rpc_timeout(), default_timeout()) == pytest.approx((0.2, 0.2))
        started = time.monotonic()
        with pytest.raises(todist.CallTimeoutError, match="worker1") as caught:
            todist.remote_sync_call(time.sleep, args=(1.0,), partitioner=1)
        assert isinstance(caught.value, TimeoutError)
        took = time.monotonic() - started
        # One call may ask for another; with none at all the function above has its time.
        return took, todist.remote_sync_call(time.sleep, args=(0.3,), partitioner=1, timeout=None)

    def program():
        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=0.2)
        return todist.auto_init_rpc(rpc_backend_options=options)(main)()

    took, value = Bare(2).run(program)[0]
    assert 0.15 < took < 0.9
    assert value == [None]


def test_options_can_be_used_again(world):
    def program():
        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=7)
        main = todist.auto_init_rpc(rpc_backend_options=options)(default_timeout)
        return [main(), main(), options.rpc_timeout, options.init_method]

    assert Bare(2).run(program) == [[7.0, 7.0, 7.0, "env://"]] * 2


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_the_workers_can_meet_elsewhere(scheme, tmp_path):
    from tests.worlds import free_port

    url = f"file://{tmp_path}/store" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"

    def program():
        for variable in ("MASTER_ADDR", "MASTER_PORT"):
            del os.environ[variable]
        options = rpc.TensorPipeRpcBackendOptions(init_method=url)
        main = todist.auto_init_rpc(rpc_backend_options=options)(
            lambda: todist.remote_sync_call(rank_of_worker, partitioner=1)
        )
        return main()

    assert Bare(2).run(program) == [[1], [1]]


@pytest.mark.parametrize("variable", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_address_is_told(variable):
    def program():
        del os.environ[variable]
        todist.auto_init_rpc()(rank_of_worker)()

    for ending in Bare(2).endings(program):
        assert isinstance(ending.error, todist.InitializationError)
        assert f"{variable} is missing" in str(ending.error)
        assert "WORLD_SIZE is 2" in str(ending.error)


@pytest.mark.parametrize(
    ("workers", "cores", "transports"),
    [
        (1, 1, None),
        (32, 128, None),
        (33, 128, ["uv"]),
        (64, 128, ["uv"]),
        (8, 16, None),
        (8, 15, ["uv"]),
        (2, 2, ["uv"]),
    ],
)
def test_the_transport_is_one_that_can_so_many_workers(monkeypatch, workers, cores, transports):
    # Torch's options do not show what they were made with.
    monkeypatch.setattr("torchopt_dist.distributed.rpc._cores", lambda: cores)
    monkeypatch.setattr(rpc, "TensorPipeRpcBackendOptions", lambda _transports=None: _transports)
    place = todist.WorldInfo(
        world_size=128, world_rank=0, local_world_size=workers, local_rank=0, worker_name="worker0"
    )
    assert _default_options(place) == transports


@pytest.mark.timeout(60)
def test_a_world_of_36_workers_on_one_machine(world):
    def main():
        futures = [
            todist.remote_async_call(lambda: todist.get_rank(), partitioner=rank) for rank in range(36)
        ]
        return [future.wait() for future in futures]

    assert world(36).on_zero(main) == [[rank] for rank in range(36)]


def test_a_barrier_waits_for_all(world, tmp_path):
    def main():
        if todist.get_rank() == 1:
            assert not watch(tmp_path / "through0", 0.2)
            assert not (tmp_path / "through2").exists()
        todist.barrier()
        say(tmp_path / f"through{todist.get_rank()}")

    world(3).run(main)


def test_a_barrier_of_some_waits_for_these_only(world, tmp_path):
    def main():
        if todist.get_rank() == 2:
            assert watch(tmp_path / "through")  # they do not wait for this one
        else:
            for _ in range(3):
                todist.barrier(["worker1", "worker0"])
            todist.barrier([1, 0, 0])
            say(tmp_path / "through")
        todist.barrier()
        return True

    assert world(3).run(main) == [True] * 3


def test_barriers_of_different_ranks_do_not_mix(world):
    def main():
        rank = todist.get_rank()
        for _ in range(10):
            if rank in (0, 1):
                todist.barrier([0, 1])
            if rank in (1, 2):
                todist.barrier([1, 2])
            todist.barrier()
        todist.barrier([rank])  # alone: at once
        return rank

    assert world(3).run(main) == [0, 1, 2]


def test_a_wrong_barrier_is_told(world):
    def main():
        with pytest.raises(TypeError, match=r"one string: write \['worker0'\]"):
            todist.barrier("worker0")
        with pytest.raises(ValueError, match="no worker is named 'worker9'"):
            todist.barrier(["worker0", "worker9"])
        with pytest.raises(ValueError, match=r"must be in \[0, 2\), got 2"):
            todist.barrier([0, 2])
        with pytest.raises(ValueError, match="must contain the calling worker 'worker0'"):
            todist.barrier(["worker1"])
        with pytest.raises(ValueError, match="must contain the calling worker 'worker0'"):
            todist.barrier([])
        with pytest.raises(TypeError, match="name or its rank"):
            todist.barrier([0, 1.0])
        return True

    assert world(2).on_zero(main)


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
        by_sample = todist.parallelize(todist.exclusive_batch_partitioner, todist.mean_reducer)(loss_fn)
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
        return todist.auto_init_rpc()(main)(), dict(os.environ).get("MASTER_PORT")

    assert Bare(1).run(program) == [(todist.WorldInfo(1, 0, 1, 0, "worker0"), None)]


def test_an_error_in_a_world_of_one_is_the_program_s_own():
    def program():
        alone()
        with pytest.raises(ZeroDivisionError) as caught:
            todist.auto_init_rpc()(lambda: 1 / 0)()
        assert caught.value.__cause__ is None
        with pytest.raises(SystemExit):
            todist.auto_init_rpc()(lambda: sys.exit(0))()
        return todist.auto_init_rpc()(rank_of_worker)()

    assert Bare(1).run(program) == [0]
