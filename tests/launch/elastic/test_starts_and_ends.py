"""How long workers may take to start and to end, and what becomes of those that end otherwise."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import threading
import time

import pytest

import torchopt_dist as todist
from tests.functions import MyError
from tests.launch.elastic.worlds import launch, place
from tests.launch.families import assert_gone
from tests.waits import say, soon, watch

pytestmark = pytest.mark.timeout(30)


class SlowToArrive:
    def __reduce__(self):
        return time.sleep, (60,)


def test_workers_that_do_not_start_end_by_the_timeout():
    started = time.monotonic()
    with pytest.raises(
        todist.errors.InitializationError,
        match=r"^rank 0 on localhost, rank 1 on localhost did not start within `start_timeout`, 1.5 s: give more",
    ):
        launch(print, SlowToArrive(), hosts=["localhost"], nproc=2, start_timeout=1.5)
    assert 1.5 < time.monotonic() - started < soon(10.0)


def test_a_process_that_does_not_end_after_its_function_is_killed(caplog, tmp_path):
    def main():
        if os.environ["RANK"] == "1":
            threading.Thread(target=threading.Event().wait).start()
            say(tmp_path / "returns", str(time.monotonic()))
        return place()

    with caplog.at_level(logging.WARNING, "torchopt_dist.launching"):
        results = launch(main, exit_timeout=1.0)
    assert 1.0 < time.monotonic() - float((tmp_path / "returns").read_text()) < soon(6.0)
    assert_gone({pid for values in results.values() for each in values for pid in each}, 1.0)
    said = [record.getMessage() for record in caplog.records if record.name == "torchopt_dist.launching"]
    assert said == [
        f"rank 1 on {list(results)[1]} returned its value, but did not end within `exit_timeout`, 1 s"
    ]


def test_the_time_to_end_begins_when_all_functions_have_returned(caplog, tmp_path):
    def main():
        if os.environ["RANK"] == "0":  # of another host, and with something left to do for the other
            threading.Thread(
                target=lambda: say(tmp_path / "done") if watch(tmp_path / "asked") else None
            ).start()
            return "early"
        time.sleep(2.5)
        say(tmp_path / "asked")
        assert watch(tmp_path / "done")
        return "late"

    with caplog.at_level(logging.WARNING, "torchopt_dist.launching"):
        assert list(launch(main, exit_timeout=1.0).values()) == [["early"], ["late"]]
    assert [record for record in caplog.records if record.name == "torchopt_dist.launching"] == []


def test_what_workers_register_for_their_exit_runs_after_their_threads(tmp_path):
    def main():
        path = tmp_path / os.environ["RANK"]
        threading.Thread(target=lambda: (time.sleep(0.3), path.write_text("thread "))).start()
        atexit.register(lambda: path.write_text(path.read_text() + "atexit"))

    launch(main)
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == "thread atexit"


def test_a_crash_after_the_functions_have_returned_is_told_and_the_values_are_kept(caplog, tmp_path):
    def crash():
        assert watch(tmp_path / "returns")
        time.sleep(0.5)
        signal.raise_signal(signal.SIGSEGV)

    def main():
        atexit.register(crash) if os.environ["RANK"] == "0" else say(tmp_path / "returns")
        return os.environ["RANK"]

    with caplog.at_level(logging.WARNING, "torchopt_dist.launching"):
        assert launch(main, hosts=["localhost"], nproc=2) == {"localhost": ["0", "1"]}
    said = [record.getMessage() for record in caplog.records if record.name == "torchopt_dist.launching"]
    assert said == ["rank 0 on localhost returned its value, and then ended with status -11"]


def test_an_exit_with_0_before_the_function_returns_is_an_error():
    def main():
        if os.environ["RANK"] == "1":
            os._exit(0)
        time.sleep(60)

    with pytest.raises(todist.errors.WorkerFailedError, match=r"^rank 1 on .* exited with code 0 before"):
        launch(main, nproc=2, hosts=["localhost"])


def test_a_forked_child_that_goes_on_does_not_hold_up_the_end(tmp_path):
    def main():
        if os.fork() == 0:
            say(tmp_path / "child", str(os.getpid()))
            time.sleep(60)
        assert watch(tmp_path / "child")
        return "returned"

    assert launch(main, hosts=["localhost"]) == {"localhost": ["returned"]}
    assert_gone([int((tmp_path / "child").read_text())], 1.0)


def test_the_end_of_a_worker_is_seen_though_its_child_goes_on():
    def main():
        if os.fork() == 0:
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(todist.errors.WorkerFailedError, match=r"^rank 0 on localhost was ended by SIGKILL"):
        launch(main, hosts=["localhost"])


def test_an_error_is_raised_although_its_process_does_not_end():
    def main():
        threading.Thread(target=threading.Event().wait).start()
        raise MyError(code=4)

    started = time.monotonic()
    with pytest.raises(MyError, match="code 4"):
        launch(main, hosts=["localhost"])
    assert time.monotonic() - started < soon(10.0)


def test_a_child_that_writes_on_and_on_does_not_hold_up_the_end():
    def main():
        subprocess.Popen(["yes"])
        time.sleep(0.2)
        return "returned"

    assert launch(main, hosts=["localhost"]) == {"localhost": ["returned"]}
