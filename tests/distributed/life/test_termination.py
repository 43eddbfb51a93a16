"""SIGTERM, as schedulers send it some time before they kill, is an exception in ``main``, which can still save."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import torchopt_dist as todist
from tests.processes import World, start_python
from tests.waits import say, wait_until, watch
from torchopt_dist.distributed.life import interruption
from torchopt_dist.launching._processes import handles

SECONDS = 0.3
"""In place of those that `finally` blocks have after a loss."""


def terminate_all_soon():
    """Send SIGTERM to both ranks, as a scheduler does."""
    pids = [os.getpid(), todist.remote_call(os.getpid, 1)]

    def send():
        time.sleep(0.1)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGTERM)

    threading.Thread(target=send).start()


def wait_for_the_end():
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_main_can_save_though_the_others_are_told_to_end_as_well(tmp_path, transport):
    """For longer than after a loss: who has sent the signal says how long."""

    def main():
        if todist.get_rank() > 0:
            return
        interruption.FINALLY_SECONDS = SECONDS
        terminate_all_soon()
        try:
            wait_for_the_end()
        except SystemExit:
            say(tmp_path / "told")
            raise
        finally:
            time.sleep(3 * SECONDS + 1)
            say(tmp_path / "saved")

    endings = World(2).endings(main, transport=transport)
    assert [ending.exitcode for ending in endings] == [143, 143]
    assert isinstance(endings[0].error, SystemExit)
    assert watch(tmp_path / "saved", 0.1)


def told_in_a_clean_up(folder):
    try:
        pass
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        say(folder / "saved")
    wait_for_the_end()


def test_a_clean_up_is_not_interrupted(tmp_path):
    (ending,) = World(1).endings(told_in_a_clean_up, tmp_path)
    assert (ending.exitcode, type(ending.error)) == (143, SystemExit)
    assert watch(tmp_path / "saved", 0.1)


def test_a_main_that_returns_meanwhile_ends_by_the_code_too():
    def main():
        try:
            raise ValueError
        except ValueError:
            os.kill(os.getpid(), signal.SIGTERM)
            return 3

    (ending,) = World(1).endings(main)
    assert (ending.value, ending.exitcode) == (None, 143)


def test_one_rank_that_is_told_alone_is_named():
    def main():
        if todist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        wait_for_the_end()

    endings = World(2).endings(main)
    assert [ending.exitcode for ending in endings] == [1, 143]
    assert isinstance(endings[0].error, todist.PeerFailedError)
    assert "rank 1 failed:\n\nSystemExit: 143, on SIGTERM" in str(endings[0].error)


def test_a_program_s_own_handler_and_forked_processes_are_left_alone():
    def main():
        before = signal.getsignal(signal.SIGTERM)
        pid = os.fork()
        if pid == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os._exit(3)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return callable(before), ended

    def own():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        inside = todist.auto_init_rpc()(lambda: signal.getsignal(signal.SIGTERM))()
        return inside, signal.getsignal(signal.SIGTERM)

    assert World(1).run(main) == [(True, -signal.SIGTERM)]
    assert World(1, rpc=False).run(own) == [(signal.SIG_IGN, signal.SIG_IGN)]


WAITS_FOR_OTHERS = """
import os, torchopt_dist as todist
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
print("waits", flush=True)
todist.auto_init_rpc()(print)()
"""


def test_who_waits_for_the_others_ends_at_once():
    with start_python("-c", WAITS_FOR_OTHERS) as program:
        program.first_line()
        wait_until(lambda: handles(program.pid, signal.SIGTERM))
        program.send_signal(signal.SIGTERM)
        program.communicate(timeout=20)
    assert program.returncode == 143
