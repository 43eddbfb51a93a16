"""A worker, or a program that it has left behind, writes faster than the launcher takes it, or without end."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import socket
import subprocess
import sys
import time

import pytest

import torchopt_dist as todist
from tests.launch.families import STARTED, assert_gone
from tests.launch.sshd import NEEDS_SSHD
from tests.processes import ON_TWO
from tests.waits import say, soon, watch
from torchopt_dist.launching._connections import carry, in_loop, log_in
from torchopt_dist.launching._hosts import WorkerHandle
from torchopt_dist.launching.logs import WorkerLogs

pytestmark = pytest.mark.timeout(60)


DEATHS = {
    "os._exit": (lambda: os._exit(3), "exited with code 3"),
    "sys.exit": (lambda: sys.exit(3), r"called sys.exit\(3\)"),
    "stopped": (lambda: os.kill(os.getpid(), 19), "was stopped by SIGSTOP"),
}


def leave_a_writer(folder, die):
    print("before")
    if os.environ["RANK"] != "0":
        time.sleep(60)
    writer = subprocess.Popen(["yes"])
    STARTED.append(writer)
    time.sleep(0.2)
    say(folder / "died", f"{writer.pid} {time.monotonic()}")
    die()


@pytest.mark.parametrize("name", DEATHS)
def test_a_program_that_writes_on_does_not_hold_up_the_error_of_its_worker(tmp_path, name):
    die, how = DEATHS[name]
    with pytest.raises(todist.WorkerFailedError, match=f"rank 0 on localhost {how}") as caught:
        todist.Launcher(nproc_per_host=2, handlers=[], log_dir=None, liveness=todist.Liveness(0.2, 1.0)).run(
            leave_a_writer, tmp_path, die
        )
    writer, then = (tmp_path / "died").read_text().split()
    assert time.monotonic() - float(then) < soon(4.0)  # a worker that is stopped has a second to be woken
    assert caught.value.log == ("y",) * 100
    assert_gone([int(writer)])


def test_all_that_was_written_before_the_end_is_read_though_more_follows():
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    def work():
        for number in range(20000):
            print("line", number)
        STARTED.append(subprocess.Popen(["yes"]))
        os._exit(3)

    with pytest.raises(todist.WorkerFailedError):
        todist.Launcher(nproc_per_host=1, handlers=[Keep()], log_dir=None).run(work)
    assert [line for line in lines if line.strip("y")] == [f"line {number}" for number in range(20000)]


@NEEDS_SSHD
def test_a_program_that_writes_on_elsewhere_does_not_hold_it_up_either(launcher, tmp_path):
    launcher(log_dir=None).run(int)
    with pytest.raises(todist.WorkerFailedError, match="rank 0 on node1 exited with code 3"):
        launcher(log_dir=None).run(leave_a_writer, tmp_path, lambda: os._exit(3))
    writer, then = (tmp_path / "died").read_text().split()
    assert time.monotonic() - float(then) < soon(8.0)
    assert_gone([int(writer)])


class Slow(logging.Handler):
    def emit(self, record):
        time.sleep(0.001)


@NEEDS_SSHD
def test_a_worker_elsewhere_is_not_lost_since_its_lines_are_taken_slowly(launcher):
    """What its agent says, that it lives, waits behind them for longer than is given to a silent agent."""

    def work():
        for _ in range(6000):
            print("x" * 100)
        return "done"

    start = time.monotonic()
    assert (
        launcher(handlers=[Slow()], log_dir=None, liveness=todist.Liveness(patience=2)).run(work).rank(0)
        == "done"
    )
    assert time.monotonic() - start > 6.0


@NEEDS_SSHD
def test_what_is_not_read_here_makes_the_writer_elsewhere_wait(sshd, tmp_path):
    """And it does not fill the memory."""
    write = (
        "import os, sys\n"
        "written, told = 0, os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
        "while True:\n"
        "    written += os.write(1, bytes(1 << 16))\n"
        "    os.pwrite(told, b'%12d' % written, 0)\n"
    )
    (tmp_path / "write.py").write_text(write)
    command = [sys.executable, "-S", str(tmp_path / "write.py"), str(tmp_path / "written")]

    async def start(end):
        connection = await log_in("node1", str(sshd.config), 5.0, 10.0)
        process = await connection.run(shlex.join(command))
        return connection, asyncio.create_task(carry(end, process.stdout, process.stdin))

    async def stop(connection):
        connection.close()

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    connection, _ = in_loop(start(theirs)).result(20)
    with ours:
        ours.settimeout(10)
        assert watch(tmp_path / "written")
        read = 0
        while read < 10_000_000:
            time.sleep(0.01)  # so that more than is read has come
            read += len(ours.recv(1 << 16))
        ahead = int((tmp_path / "written").read_text()) - read
    in_loop(stop(connection)).result(20)
    assert ahead < 20_000_000  # what pipes, sockets and SSH hold


class Stopped(logging.Handler):
    """Takes no line until the writer can write no more."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def emit(self, record):
        assert watch(self.folder / "full", 30.0)


def write_until_nobody_takes_it(folder):
    os.set_blocking(1, False)
    written, since = 0, time.monotonic()
    while time.monotonic() - since < 0.5:
        try:
            written += os.write(1, b"x" * 1023 + b"\n")
            since = time.monotonic()
        except BlockingIOError:
            time.sleep(0.005)
    say(folder / "full", str(written))
    os.set_blocking(1, True)


def test_what_is_not_taken_by_the_launcher_makes_the_writer_wait(tmp_path):
    """And it does not fill the memory of the agent, or of the launcher."""
    todist.Launcher(nproc_per_host=1, handlers=[Stopped(tmp_path)], log_dir=None).run(
        write_until_nobody_takes_it, tmp_path
    )
    assert int((tmp_path / "full").read_text()) < 4_000_000  # what pipes, sockets and buffers hold


def test_a_large_result_holds_up_neither_lines_nor_the_death_of_another(tmp_path):
    class Answer(logging.Handler):
        def emit(self, record):
            say(tmp_path / "heard")

    def work():
        if os.environ["RANK"] == "0":
            return bytes(300_000_000)
        time.sleep(0.1)  # the result is on its way
        print("a line")
        assert watch(tmp_path / "heard")
        os._exit(5)

    with pytest.raises(todist.WorkerFailedError, match="rank 1 on localhost exited with code 5"):
        todist.Launcher(nproc_per_host=2, handlers=[Answer()], log_dir=None).run(work)


def test_long_lines_are_cut_in_the_message_and_whole_in_the_log():
    log = ("short", "x" * 5000)
    worker = WorkerHandle(0, 0, "here", WorkerLogs([], None, range(1)))
    worker.lines["stdout"].feed("\n".join(log).encode())
    error = worker.death(1)
    assert str(error).splitlines()[1:] == ["    short", f"    {'x' * 1000} ... and 4000 more characters"]
    assert error.log == log


def test_a_megabyte_without_an_end_of_line_makes_no_long_message():
    def work():
        os.write(1, b"x" * (3 << 20))
        os._exit(1)

    with pytest.raises(todist.WorkerFailedError) as caught:
        ON_TWO.run(work)
    assert len(str(caught.value)) < 5000
    assert len("".join(caught.value.log)) == 3 << 20
