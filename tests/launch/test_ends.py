"""However a worker, an agent or the launcher ends: soon, with a clear error, and with nothing left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

import psutil
import pytest
import torch

import torchopt_dist as todist
from tests.functions import MyError, spin
from tests.launch.families import alive, assert_gone, family_of, start_a_family, start_program
from tests.processes import ON_TWO
from tests.waits import say, soon, watch
from torchopt_dist.launching import Launcher
from torchopt_dist.launching import _agent as agent

pytestmark = pytest.mark.timeout(60)


BUSY = {
    "in pure Python": spin,
    "asleep": lambda: time.sleep(60),
    "in one C++ call": lambda: torch.ones(1).expand(2**42).sum(),
    "waiting in a barrier": lambda: todist.barrier(),
    "waiting for a lock": lambda: threading.Event().wait(),
    "done": lambda: None,
}


def raise_while(busy, folder):
    if os.environ["RANK"] == "1":
        start_a_family(folder)
        assert watch(folder / "busy")
        say(folder / "raised", str(time.monotonic()))
        raise MyError(code=3)
    say(folder / "busy")
    busy()


@pytest.mark.parametrize(
    ("busy", "rpc"), [(busy, rpc) for busy in BUSY for rpc in (False, True) if rpc or "barrier" not in busy]
)
def test_what_a_worker_raises_is_raised_at_once_and_the_others_are_stopped(tmp_path, busy, rpc):
    with pytest.raises(MyError, match="code 3") as caught:
        Launcher(nproc_per_host=2, handlers=[], rpc=rpc).run(raise_while, BUSY[busy], tmp_path)
    took = time.monotonic() - float((tmp_path / "raised").read_text())
    assert took < soon(
        0.5 + agent.INTERRUPT_SECONDS * (busy == "in one C++ call")
    )  # which does not notice an interrupt
    error = caught.value
    assert isinstance(error, todist.RemoteError)
    assert error.code == 3
    assert error.worker == "rank 1 on localhost"
    assert "raise_while" in error.remote_traceback
    assert "launching/_worker.py" not in error.remote_traceback
    *family, worker, its_agent = (int(pid) for pid in (tmp_path / "family1").read_text().split())
    assert alive([*family, worker]) == []
    assert_gone([its_agent], 1.0)


DEATHS = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was ended by SIGKILL", None, "SIGKILL"),
    "SIGSEGV": (lambda: ctypes.string_at(0), "was ended by SIGSEGV", None, "SIGSEGV"),
    "abort": (os.abort, "was ended by SIGABRT", None, "SIGABRT"),
    "a real-time signal": (lambda: os.kill(os.getpid(), 40), "was ended by signal 40", None, "signal 40"),
    "sys.exit(3)": (lambda: sys.exit(3), r"called sys.exit\(3\)", 3, None),
    "sys.exit('text')": (lambda: sys.exit("text"), r"called sys.exit\(1\)", 1, None),
    "os._exit(0)": (lambda: os._exit(0), "exited with code 0", 0, None),
    "os._exit(7)": (lambda: os._exit(7), "exited with code 7", 7, None),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_worker_that_dies_is_named_with_its_last_lines(tmp_path, death):
    die, how, exit_code, name = DEATHS[death]

    def main():
        if os.environ["RANK"] == "1":
            for line in range(200):
                print("line", line)
            print("to stderr", file=sys.stderr)
            print("unfinished", end="", flush=True)
            say(tmp_path / "raised", str(time.monotonic()))
            die()
        time.sleep(60)

    memory = r"( \(.* for lack of memory\))?"  # another test may have asked for too much of it
    with pytest.raises(
        todist.errors.WorkerFailedError,
        match=f"^rank 1 on localhost {how}{memory} before its function returned",
    ) as caught:
        ON_TWO.run(main)
    assert time.monotonic() - float((tmp_path / "raised").read_text()) < soon(0.5)
    error = caught.value
    assert (error.rank, error.host, error.exit_code, error.signal) == (1, "localhost", exit_code, name)
    assert "unfinished" in error.log
    assert "line 199" in error.log
    assert len(error.log) == 100
    assert "line 199" in str(error)
    assert "to stderr" in str(error)
    assert len(str(error).splitlines()) == 11


def test_the_last_words_on_standard_error_come_after_what_was_printed(monkeypatch):
    """So the cause is among the last lines, whatever the pipes' numbers are: here those of stderr sort first."""
    told = []
    pipes = {}
    for name, number in (("stdout", 801), ("stderr", 800)):
        reading, writing = os.pipe()
        os.write(writing, name.encode())
        os.close(writing)
        pipes[os.dup2(reading, number)] = name
        os.close(reading)
    dying = object.__new__(agent.Agent)
    monkeypatch.setattr(dying, "_tell", lambda message, rank, *said: told.append(said))
    dying._drain(agent._Worker(0, pipes))
    assert told == [("stdout", b"stdout"), ("stderr", b"stderr")]


def test_the_cause_is_raised_and_not_what_follows_from_it():
    def main():
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()  # raises RuntimeError: Connection closed by peer

    for _ in range(3):
        with pytest.raises(todist.errors.WorkerFailedError, match="rank 1 on localhost was ended by SIGKILL"):
            ON_TWO.run(main)

    def by_rpc():
        if todist.get_rank() == 0:
            todist.remote_sync_call(os._exit, args=(9,), partitioner=1)

    with pytest.raises(todist.errors.WorkerFailedError, match="rank 1 on localhost exited with code 9"):
        Launcher(nproc_per_host=2, rpc=True, handlers=[]).run(by_rpc)


def exit_or_raise(folder):
    if os.environ["RANK"] == "0":
        say(folder / "first", str(os.getpid()))
        os._exit(1)
    assert watch(folder / "first")
    first = int((folder / "first").read_text())
    while psutil.pid_exists(first):
        time.sleep(0.01)
    raise MyError(code=3)


def test_a_rank_that_was_ended_waits_for_what_has_ended_it(tmp_path, monkeypatch):
    monkeypatch.setattr("torchopt_dist.launching._attempt.ECHO_SECONDS", 30.0)
    monkeypatch.setattr("torchopt_dist.launching._attempt.EXIT_SECONDS", 0.0)
    with pytest.raises(MyError, match="code 3"):
        todist.launch(exit_or_raise, (tmp_path,), nproc_per_host=2, handlers=[])


def test_an_error_of_a_broken_connection_that_nobody_has_caused_is_raised_too():
    def main():
        if os.environ["RANK"] == "1":
            raise ConnectionResetError("by a web site")
        time.sleep(60)

    with pytest.raises(ConnectionResetError, match="by a web site"):
        ON_TWO.run(main)


def test_an_error_of_a_launch_in_a_launch_comes_through():
    def inner():
        if os.environ["RANK"] == "1":
            os._exit(5)
        time.sleep(60)

    def outer():
        Launcher(nproc_per_host=2, handlers=[]).run(inner)

    with pytest.raises(todist.errors.WorkerFailedError, match=r"rank 1 .* exited with code 5") as caught:
        Launcher(nproc_per_host=1, handlers=[]).run(outer)
    assert isinstance(caught.value, todist.RemoteError)
    assert caught.value.exit_code == 5


def test_an_error_whose_class_is_not_known_here_keeps_its_traceback(tmp_path):
    (tmp_path / "only_there.py").write_text("class Odd(Exception): pass\n")

    def main():
        sys.path.insert(0, str(tmp_path))
        from only_there import Odd

        raise Odd("strange")

    with pytest.raises(todist.RemoteError, match=r"^Odd: strange$") as caught:
        Launcher(nproc_per_host=1, handlers=[]).run(main)
    assert "in main" in caught.value.remote_traceback


def test_a_data_loader_with_processes_of_its_own_works():
    def main():
        loader = torch.utils.data.DataLoader(torch.arange(10), batch_size=5, num_workers=2)
        return torch.cat(list(loader)).tolist()

    assert ON_TWO.run(main).results == {"localhost": [list(range(10))] * 2}


def fail():
    raise ValueError("my own")


class ClosedSlowly:
    def __init__(self, folder):
        self.folder = folder

    def __enter__(self):
        say(self.folder / "entered")

    def __exit__(self, kind, *_):
        say(self.folder / "leaves")
        time.sleep(2 * agent.INTERRUPT_SECONDS)  # SIGTERM does not follow
        say(self.folder / "closed", kind.__name__)


@pytest.mark.parametrize(
    ("busy", "when", "by"),
    [
        (BUSY["in pure Python"], "entered", "KeyboardInterrupt"),
        (BUSY["asleep"], "entered", "KeyboardInterrupt"),
        (fail, "leaves", "ValueError"),
    ],
)
def test_a_worker_that_is_ended_leaves_its_with_blocks(tmp_path, busy, when, by):
    def main():
        if os.environ["RANK"] == "1":
            assert watch(tmp_path / when)
            raise MyError(code=1)
        with ClosedSlowly(tmp_path):
            busy()

    with pytest.raises(MyError):
        Launcher(nproc_per_host=2, handlers=[], log_dir=None, stop_timeout=30).run(main)
    assert (tmp_path / "closed").read_text() == by


def test_a_worker_that_handles_sigterm_has_time_to(tmp_path):
    def main():
        if os.environ["RANK"] == "1":
            assert watch(tmp_path / "ready")
            raise MyError(code=1)

        def save(*_):
            time.sleep(0.2)
            say(tmp_path / "saved")
            sys.exit(0)

        signal.signal(signal.SIGTERM, save)
        say(tmp_path / "ready")
        time.sleep(60)

    with pytest.raises(MyError):
        ON_TWO.run(main)
    assert (tmp_path / "saved").exists()


def test_a_worker_that_ignores_sigterm_is_killed(tmp_path):
    def main():
        if os.environ["RANK"] == "1":
            assert watch(tmp_path / "ready")
            say(tmp_path / "raised", str(time.monotonic()))
            raise MyError(code=1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(tmp_path / "ready")
        time.sleep(60)

    with pytest.raises(MyError):
        Launcher(nproc_per_host=2, stop_timeout=0.3, handlers=[]).run(main)
    assert 0.3 < time.monotonic() - float((tmp_path / "raised").read_text()) < soon(0.8)


def test_a_stopped_worker_ends_by_the_timeout(tmp_path):
    def main():
        if os.environ["RANK"] == "1":
            start_a_family(tmp_path)
            os.kill(os.getpid(), signal.SIGSTOP)

    launcher = Launcher(nproc_per_host=2, timeout=1.5, stop_timeout=0.1, handlers=[])
    with pytest.raises(
        todist.CallTimeoutError, match=r"^rank 1 on localhost did not return within `timeout`, 1\.5 s"
    ):
        launcher.run(main)
    *family, worker, its_agent = family_of_one(tmp_path)
    assert alive([*family, worker]) == []
    assert_gone([its_agent], 1.0)


def family_of_one(folder):
    return [int(pid) for pid in (folder / "family1").read_text().split()]


class Slow:
    def __reduce__(self):
        return (time.sleep, (60,))


def test_workers_that_do_not_start_end_by_the_timeout():
    with pytest.raises(
        todist.errors.InitializationError,
        match=r"rank 0 on localhost, rank 1 on localhost did not start within `start_timeout`, 0\.3 s",
    ):
        Launcher(nproc_per_host=2, start_timeout=0.3, handlers=[]).run(print, Slow())


def test_a_process_that_does_not_end_after_its_function_is_killed():
    def main():
        threading.Thread(target=time.sleep, args=(60,)).start()
        return os.getpid()

    started = time.monotonic()
    result = Launcher(nproc_per_host=2, exit_timeout=0.3, handlers=[]).run(main)
    assert time.monotonic() - started < soon(2.0)
    assert alive(result.results["localhost"]) == []


def test_what_workers_register_for_their_exit_runs(tmp_path):
    def main():
        import atexit

        atexit.register(lambda: say(tmp_path / f"bye{os.environ['RANK']}"))

    ON_TWO.run(main)
    assert (tmp_path / "bye0").exists()
    assert (tmp_path / "bye1").exists()


def test_a_crash_after_the_function_has_returned_is_told_and_the_values_are_kept(caplog):
    def main():
        import atexit

        if os.environ["RANK"] == "1":
            atexit.register(os._exit, 9)
        return 5

    assert ON_TWO.run(main).results == {"localhost": [5, 5]}
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 on localhost returned its value, and then ended with status 9"
    ]


def test_a_worker_that_is_stopped_is_an_error_unless_it_goes_on_in_time(tmp_path):
    def work():
        print("before")
        if os.environ["RANK"] == "1":
            start_a_family(tmp_path)
            say(tmp_path / "pid", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return "went on"

    start = time.monotonic()
    with pytest.raises(
        todist.WorkerFailedError, match="rank 1 on localhost was stopped by SIGSTOP and did not go"
    ) as caught:
        Launcher(nproc_per_host=2, handlers=[], liveness=todist.Liveness(patience=1)).run(work)
    assert time.monotonic() - start < 15
    assert (caught.value.rank, caught.value.signal, caught.value.exit_code) == (1, "SIGSTOP", None)
    assert caught.value.log == ("before",)
    assert_gone([int(pid) for pid in (tmp_path / "family1").read_text().split()])

    def wake():
        assert watch(tmp_path / "pid")
        pid = int((tmp_path / "pid").read_text())
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.005)
        os.kill(pid, signal.SIGCONT)

    for name in ("pid", "family1"):
        (tmp_path / name).unlink()
    thread = threading.Thread(target=wake)
    thread.start()
    assert (
        Launcher(nproc_per_host=2, handlers=[], liveness=todist.Liveness(patience=30)).run(work).rank(1)
        == "went on"
    )
    thread.join()


def test_an_agent_that_gives_no_sign_of_life_is_killed_and_named(tmp_path):
    def work():
        start_a_family(tmp_path)
        if os.environ["RANK"] == "0":
            os.kill(os.getppid(), signal.SIGSTOP)
        threading.Event().wait()

    message = (
        "the agent on localhost gave no sign of life for 2 s, and was killed; rank 0 on localhost, rank 1"
    )
    start = time.monotonic()
    with pytest.raises(todist.errors.AgentFailedError, match=message):
        Launcher(nproc_per_host=2, handlers=[], liveness=todist.Liveness(patience=2)).run(work)
    assert time.monotonic() - start < 15
    assert_gone(family_of(tmp_path))


@pytest.mark.nightly
def test_a_launcher_that_is_stopped_for_a_while_finds_its_workers_at_work(tmp_path):
    """Ctrl-Z and fg: the launcher, too, has heard nothing for a while, and that was its own doing."""
    code = (
        "import os, sys, time\n"
        "from torchopt_dist.launching import Launcher\n"
        "os.environ['TODIST_LIVENESS'] = 'patience=2'\n"
        "def work():\n"
        "    open(sys.argv[1] + '/up', 'w').close()\n"
        "    while not os.path.exists(sys.argv[1] + '/down'): time.sleep(0.01)\n"
        "    return 1\n"
        "print(Launcher(nproc_per_host=1).run(work).rank(0))\n"
    )
    program = start_program(code, tmp_path)
    try:
        assert watch(tmp_path / "up")
        program.send_signal(signal.SIGSTOP)
        time.sleep(3)  # longer than the patience
        program.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        say(tmp_path / "down")
        out, err = program.communicate(timeout=30)
        assert (out, program.returncode) == ("1\n", 0), err
    finally:
        program.close()
