"""A worker that raises, ends or stops: all start again as often as asked, or the launch ends with the reason."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time

import pytest
import torch

import torchopt_dist as todist
from tests.functions import MyError
from tests.launch.elastic.worlds import Aside, in_worlds, kill_agent, launch, world_of
from tests.waits import say, soon, watch

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("rpc", [False, True])
def test_what_a_worker_raises_is_raised(tmp_path, rpc):
    def main():
        if os.environ["RANK"] == "1":
            say(tmp_path / "raised", str(time.monotonic()))
            raise MyError(code=3)
        torch.futures.Future().wait()

    with pytest.raises(MyError, match=r"^code 3$") as caught:
        launch(main, rpc=rpc)
    assert time.monotonic() - float((tmp_path / "raised").read_text()) < soon(4.0)
    assert isinstance(caught.value, todist.RemoteError)
    assert caught.value.code == 3
    assert caught.value.worker in ("rank 1 on localhost", "rank 1 on localhost#2")
    assert "in main" in caught.value.remote_traceback
    assert "torch/distributed" not in caught.value.remote_traceback
    assert "ChildFailedError" not in repr(caught.value.__cause__)


DEATHS = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was ended by SIGKILL", None, "SIGKILL"),
    "sys.exit(3)": (lambda: sys.exit(3), r"called sys.exit\(3\)", 3, None),
    "os._exit(7)": (lambda: os._exit(7), "exited with code 7", 7, None),
}


def test_a_worker_that_is_stopped_and_does_not_go_on_is_named():
    def main():
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)

    with pytest.raises(todist.errors.WorkerFailedError, match=r"^rank 1 on .* did not go on for 1 s"):
        launch(main, patience=1.0)


@pytest.mark.parametrize("death", DEATHS)
def test_a_worker_that_dies_is_named_with_its_last_lines(death):
    die, how, exit_code, name = DEATHS[death]

    def main():
        if os.environ["RANK"] == "1":
            print("last words", flush=True)
            die()
        time.sleep(60)

    with pytest.raises(
        todist.errors.WorkerFailedError, match=f"^rank 1 on localhost(#2)? {how} before its function returned"
    ) as caught:
        launch(main)
    error = caught.value
    assert (error.rank, error.exit_code, error.signal) == (1, exit_code, name)
    assert error.log == ("last words",)


def test_all_workers_are_started_again_as_often_as_asked(tmp_path, caplog):
    def fail(world, rank):
        assert os.environ["TORCHELASTIC_MAX_RESTARTS"] == "2"
        todist.auto_init_rpc()(todist.barrier)()
        if world < 2 and rank == world:  # a worker of one host, and then one of the other
            raise MyError(code=world)
        say(tmp_path / "end") if world == 2 else time.sleep(60)

    with caplog.at_level(logging.WARNING, "torchopt_dist.launching"):
        results = launch(in_worlds, tmp_path, fail, max_restarts=2)
    assert list(results.values()) == [[(2, 0, 2)], [(2, 1, 2)]]
    said = [record.getMessage() for record in caplog.records if record.name == "torchopt_dist.launching"]
    assert said == [
        "restart 1 of 2: MyError: code 0",
        "restart 2 of 2: MyError: code 1",
    ]


def test_losses_and_returns_of_hosts_use_up_no_restart(tmp_path, caplog, reachability):
    reachability.lost_for_good.add("localhost#2")

    def fail(world, rank):
        if world == 1:
            raise MyError(code=world)
        if world == 3 and rank == 0:
            assert watch(tmp_path / "world3.rank1")
            raise MyError(code=world)

    def kill():
        kill_agent(world_of(tmp_path, 0, 2), 1)
        world_of(tmp_path, 2, 1)  # after a loss and a restart
        reachability.lost_for_good.clear()
        world_of(tmp_path, 3, 2)  # after a return

    with (
        Aside(kill),
        caplog.at_level(logging.WARNING, "torchopt_dist.launching"),
        pytest.raises(MyError, match=r"^code 3$"),
    ):
        launch(in_worlds, tmp_path, fail, max_restarts=1)
    said = [record.getMessage() for record in caplog.records if record.name == "torchopt_dist.launching"]
    assert len(said) == 2
    assert said[0].startswith("localhost#2 is lost")
    assert said[1] == "restart 1 of 1: MyError: code 1"


def test_after_the_last_restart_the_function_is_not_called_again(tmp_path):
    def main():
        say(tmp_path / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}")
        raise MyError(code=1)

    with pytest.raises(MyError):
        launch(main, max_restarts=1)
    assert {path.name[0] for path in tmp_path.iterdir()} == {"0", "1"}


def test_a_value_that_cannot_be_sent_is_an_error():
    with pytest.raises(todist.errors.SerializationError, match=r"rank \d returned lock"):
        launch(threading.Lock)


def test_the_whole_timeout_ends_a_launch(tmp_path):
    def fail(world, rank):
        if world == rank == 0:
            raise MyError(code=world)

    with pytest.raises(
        todist.CallTimeoutError,
        match=r"^rank 0 on localhost, rank 1 on localhost#2 did not return within `timeout`, 3 s",
    ):
        launch(in_worlds, tmp_path, fail, timeout=3.0, max_restarts=1)
    assert (tmp_path / "world1.rank0").exists()


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            todist.errors.InitializationError, match=f"`master_port` must be free .* got {port}"
        ):
            launch(os.getpid, port=port)
