"""Settings of the RPC group: names of workers, time-outs, where they meet, and by which transport they talk."""

from __future__ import annotations

import os
import time

import pytest
from torch.distributed import rpc

import torchopt_dist as todist
from tests.distributed.programs import rank_of_worker
from tests.processes import World, free_port
from tests.waits import soon
from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.transport.rpc import default_options


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
def test_a_bad_name_is_told_on_every_rank(world, worker_name_format, told):
    endings = world(2).endings(rank_of_worker, worker_name_format=worker_name_format, timeout=100)
    for ending in endings:
        assert isinstance(ending.error, todist.errors.InitializationError), ending
        for words in told:
            assert words in str(ending.error)


def test_calls_have_no_timeout_by_default():
    def main():
        return rpc.get_rpc_timeout(), current_group().call_timeout

    def program():
        # Options that say nothing of a time-out ask for none.
        options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4)
        return [todist.auto_init_rpc()(main)(), todist.auto_init_rpc(rpc_backend_options=options)(main)()]

    assert World(1, rpc=False).run(program) == [[(0.0, 0.0)] * 2]


def test_the_timeout_of_the_options_is_that_of_calls():
    def main():
        if todist.get_rank() != 0:
            return None
        assert (rpc.get_rpc_timeout(), current_group().call_timeout) == pytest.approx((0.2, 0.2))
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

    took, value = World(2, rpc=False).run(program)[0]
    assert 0.15 < took < soon(0.9)
    assert value == [None]


def test_options_can_be_used_again():
    def program():
        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=7)
        main = todist.auto_init_rpc(rpc_backend_options=options)(lambda: current_group().call_timeout)
        return [main(), main(), options.rpc_timeout, options.init_method]

    assert World(2, rpc=False).run(program) == [[7.0, 7.0, 7.0, "env://"]] * 2


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_the_workers_can_meet_elsewhere(scheme, tmp_path):

    url = f"file://{tmp_path}/store" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"

    def program():
        for variable in ("MASTER_ADDR", "MASTER_PORT"):
            del os.environ[variable]
        options = rpc.TensorPipeRpcBackendOptions(init_method=url)
        main = todist.auto_init_rpc(rpc_backend_options=options)(
            lambda: todist.remote_sync_call(rank_of_worker, partitioner=1)
        )
        return main()

    assert World(2, rpc=False).run(program) == [[1], [1]]


@pytest.mark.parametrize("variable", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_address_is_told(variable):
    def program():
        del os.environ[variable]
        todist.auto_init_rpc()(rank_of_worker)()

    for ending in World(2, rpc=False).endings(program):
        assert isinstance(ending.error, todist.errors.InitializationError)
        assert f"{variable} is missing" in str(ending.error)
        assert "WORLD_SIZE is 2" in str(ending.error)


@pytest.mark.parametrize(
    ("workers", "cores", "transports"),
    [
        (1, 1, ["uv"]),
        (1, 128, ["uv"]),
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
    monkeypatch.setattr("torchopt_dist.distributed.transport.rpc.usable_cores", lambda: cores)
    monkeypatch.setattr(rpc, "TensorPipeRpcBackendOptions", lambda _transports=None: _transports)
    assert default_options(workers) == transports


def test_a_world_of_36_workers_on_one_machine(world):
    def main():
        futures = [
            todist.remote_async_call(lambda: todist.get_rank(), partitioner=rank) for rank in range(36)
        ]
        return [future.wait() for future in futures]

    assert world(36).on_zero(main) == [[rank] for rank in range(36)]
