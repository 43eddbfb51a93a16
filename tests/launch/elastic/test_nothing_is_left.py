"""Processes and descriptors of an elastic launch: gone, however it ends."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import torchopt_dist as todist
from tests.functions import MyError
from tests.launch.descriptors import no_new_descriptors
from tests.launch.elastic.worlds import Aside, launch, place
from tests.launch.families import alive, assert_gone, start_a_family, start_program
from tests.waits import say, wait_until, watch

pytestmark = pytest.mark.timeout(60)


def hold_on(folder):
    start_a_family(folder)
    say(folder / f"place{os.environ['RANK']}", " ".join(map(str, place())))
    time.sleep(300)


def pids_in(folder, ranks=2):
    pids = []
    for rank in range(ranks):
        for kind in ("family", "place"):
            assert watch(folder / f"{kind}{rank}")
            pids += [int(pid) for pid in (folder / f"{kind}{rank}").read_text().split()]
    return set(pids)


def test_an_interrupt_goes_on_as_such_and_leaves_nothing(tmp_path):
    def interrupt():
        pids_in(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)

    threads = threading.active_count()
    with Aside(interrupt), pytest.raises(KeyboardInterrupt):
        launch(hold_on, tmp_path)
    assert_gone(pids_in(tmp_path), 1.0)
    assert threading.active_count() == threads


def test_an_interrupt_while_hosts_are_waited_for_leaves_nothing(tmp_path, reachability):
    reachability.lost_for_good.add("localhost#2")

    def interrupt():
        pids_in(tmp_path)
        os.kill(int((tmp_path / "place1").read_text().split()[1]), signal.SIGKILL)
        assert_gone(pids_in(tmp_path))
        wait_until(lambda: reachability.tried, tell=lambda: "nobody tries to reach the host again")
        os.kill(os.getpid(), signal.SIGINT)

    threads = threading.active_count()
    with Aside(interrupt), pytest.raises(KeyboardInterrupt):
        launch(hold_on, tmp_path, min_hosts=2)
    assert threading.active_count() == threads


def test_a_lost_host_s_processes_are_ended(tmp_path, reachability):
    reachability.lost_for_good.update(["localhost", "localhost#2"])
    reachability.times["start_timeout"] = 0.5

    def kill():
        pids = pids_in(tmp_path)
        agents = [int((tmp_path / f"place{rank}").read_text().split()[1]) for rank in (0, 1)]
        for agent in agents:
            os.kill(agent, signal.SIGKILL)
        assert_gone(pids)

    with Aside(kill), pytest.raises(todist.errors.AgentFailedError):
        launch(hold_on, tmp_path, min_hosts=2)


LAUNCHER = """
import sys
from pathlib import Path
from tests.launch.elastic.test_nothing_is_left import hold_on
from tests.launch.elastic.worlds import launch
launch(hold_on, Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_ended_leaves_nothing(tmp_path, number):
    launcher = start_program(LAUNCHER, tmp_path)
    pids = pids_in(tmp_path)
    launcher.send_signal(number)
    launcher.communicate(timeout=10)
    assert_gone(pids, 5.0)
    # The signal to terminate is an exception in the launcher, whose code is a shell's for a signal.
    assert launcher.returncode == (128 + number if number == signal.SIGTERM else -number)


def test_no_descriptor_or_process_stays_after_a_launch(tmp_path):
    def main():
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise MyError(code=1)
        return place()

    def run():
        return {pid for values in launch(main, max_restarts=1).values() for each in values for pid in each}

    assert_gone(run(), 1.0)
    with no_new_descriptors():
        pids = run()
        assert_gone(pids, 1.0)
    assert alive(pids) == []
