"""Whatever goes wrong while a launch ends, everything is ended and closed, and what is known is not thrown away."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import sys
import time

import pytest

import torchopt_dist as todist
from tests.launch.descriptors import no_new_descriptors
from tests.launch.families import alive, assert_gone, family_of, start_a_family, start_program, successor
from tests.processes import ON_TWO
from tests.waits import say, soon, watch
from torchopt_dist.launching import Launcher

pytestmark = pytest.mark.timeout(60)


class MyError(Exception):
    pass


# Agents.


def test_an_agent_that_is_stopped_while_it_ends_its_workers_is_killed_with_all_below_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys.modules["torchopt_dist.launching._attempt"], "AGENT_SECONDS", 0.5)

    def work():
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGSTOP))
        start_a_family(tmp_path)
        if os.environ["RANK"] == "0":
            assert watch(tmp_path / "family1")
            raise MyError
        while True:
            time.sleep(60)

    launcher = Launcher(nproc_per_host=2, handlers=[], stop_timeout=0.2)
    launcher.run(int)
    with no_new_descriptors():
        with pytest.raises(MyError):
            launcher.run(work)
        assert_gone(family_of(tmp_path), 2.0)


def return_and_kill_the_agent(seconds):
    import atexit

    def kill():
        if os.environ["RANK"] == "0":
            time.sleep(0.1)
            os.kill(os.getppid(), signal.SIGKILL)

    atexit.register(kill)
    if os.environ["RANK"] == "1":
        time.sleep(seconds)
    return int(os.environ["RANK"]) + 10


def test_values_that_have_arrived_are_kept_when_their_agent_dies(caplog):
    start = time.monotonic()
    launcher = Launcher(hosts=["localhost", "localhost"], nproc_per_host=1, handlers=[], log_dir=None)
    result = launcher.run(return_and_kill_the_agent, 1.0)
    assert result.results == {"localhost": [10], "localhost#2": [11]}
    assert time.monotonic() - start < soon(5.0)  # `exit_timeout` is not waited for
    assert [record.getMessage() for record in caplog.records] == [
        "the agent on localhost died, after its workers had returned",
        "rank 0 on localhost returned its value, and then ended with status -9",
    ]


def test_an_agent_that_dies_when_one_of_its_workers_has_returned_is_an_error():
    with pytest.raises(
        todist.errors.AgentFailedError, match="localhost died; rank 1 on localhost was ended with it"
    ):
        ON_TWO.run(return_and_kill_the_agent, 60)


# Handlers.


def test_a_handler_that_raises_does_not_cut_the_end_short(tmp_path):
    class Broken(logging.Handler):
        def emit(self, record):
            raise MyError(record.getMessage())

    def work():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(tmp_path / f"pid{os.environ['RANK']}", str(os.getpid()))
        while not all((tmp_path / f"pid{rank}").exists() for rank in (0, 1)):
            time.sleep(0.001)
        while True:
            print("line", flush=True)
            time.sleep(0.001)

    with pytest.raises(MyError, match="line"):
        Launcher(nproc_per_host=2, handlers=[Broken()], log_dir=None, stop_timeout=0.3).run(work)
    assert alive([int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]) == []


class BrokenAtTheEnd(logging.Handler):
    """A part of a line is handed on when all has ended."""

    def emit(self, record):
        assert record.getMessage() == "part"
        raise ZeroDivisionError


def test_what_a_handler_raises_at_the_end_is_raised_unless_there_is_an_error_already():
    def work(error):
        os.write(1, b"part")
        if error is not None:
            raise error

    launcher = Launcher(nproc_per_host=1, handlers=[BrokenAtTheEnd()], log_dir=None)
    launcher.run(int)
    with no_new_descriptors():
        with pytest.raises(ZeroDivisionError):
            launcher.run(work, None)
        with pytest.raises(MyError):
            launcher.run(work, MyError())


# Times.


@pytest.mark.parametrize("seconds", [3e6, 1e20])
def test_times_that_are_longer_than_the_kernel_can_wait_are_as_good_as_others(seconds):
    names = ("timeout", "start_timeout", "stop_timeout", "exit_timeout")
    liveness = todist.Liveness(seconds, seconds)
    options = {
        "handlers": [],
        "log_dir": None,
        "rpc": True,
        "liveness": liveness,
        **dict.fromkeys(names, seconds),
    }
    launcher = Launcher(nproc_per_host=2, **options)
    assert launcher.run(int).results == {"localhost": [0, 0]}

    def work():
        if os.environ["RANK"] == "1":
            raise MyError
        time.sleep(60)

    with pytest.raises(MyError):
        launcher.run(work)


# Descriptors.


FEW = """
import errno, os, resource
from torchopt_dist.launching import launch
launch(int, nproc_per_host=1)
def count():
    return len(os.listdir("/proc/self/fd"))
before = count()
for more in range(11, -1, -1):
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + more, before + more))
    try:
        values = launch(int, nproc_per_host=4, log_dir=None, handlers=[]).results["localhost"]
        assert values == [0] * 4
        print("good")
    except OSError as error:
        assert error.errno == errno.EMFILE
        print(error.strerror)
    assert count() == before, count()
"""


def test_too_few_descriptors_for_all_workers_are_an_error_that_says_so_and_are_all_closed():
    program = start_program(FEW)
    try:
        out, err = program.communicate(timeout=50)
    finally:
        program.close()
    assert err == ""
    said = "too many open files: raise `ulimit -n`, or lower `nproc_per_host`"
    told = out.splitlines()
    good = told.count("good")
    assert 1 <= good <= 11
    assert told == ["good"] * good + [said] * (12 - good)


def test_too_few_descriptors_for_an_agent_are_an_error_that_says_so():
    server, number = successor(), resource.RLIMIT_NOFILE
    before = resource.prlimit(server, number)
    resource.prlimit(server, number, (20, before[1]))
    try:
        with (
            no_new_descriptors(),
            pytest.raises(OSError, match="too many open files: raise `ulimit -n`") as told,
        ):
            Launcher(nproc_per_host=8, handlers=[], log_dir=None).run(int)
        assert told.value.errno == errno.EMFILE
    finally:
        resource.prlimit(server, number, before)
    assert ON_TWO.run(int).results == {"localhost": [0, 0]}
