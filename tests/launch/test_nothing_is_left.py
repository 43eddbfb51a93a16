"""Processes that workers have started, and shared memory: gone, however the launch or its launcher ends."""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

import torchopt_dist as todist
from tests.functions import MyError
from tests.launch.descriptors import no_new_descriptors
from tests.launch.families import (
    alive,
    assert_gone,
    family_of,
    start_a_family,
    with_this_server,
)
from tests.processes import ON_TWO, ROOT, start_python
from tests.waits import say, soon, wait_until, watch
from torchopt_dist.launching import Launcher
from torchopt_dist.launching import _forkserver as forkserver
from torchopt_dist.launching import _processes as processes
from torchopt_dist.process.signals import INTERRUPT

pytestmark = pytest.mark.timeout(60)


def test_children_that_outlive_a_good_end_are_ended(tmp_path):
    ON_TWO.run(start_a_family, tmp_path)
    pids = family_of(tmp_path)
    for own in (pids[:5], pids[5:]):
        *family, worker, its_agent = own
        assert alive([*family, worker]) == []
        assert_gone([its_agent], 1.0)


def test_an_agent_that_is_killed_is_an_error_and_leaves_no_worker(tmp_path):
    def main():
        start_a_family(tmp_path)
        if os.environ["RANK"] == "1":
            assert watch(tmp_path / "family0")
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(
        todist.errors.AgentFailedError,
        match="the agent on localhost died; rank 0 on localhost, rank 1 on localhost was ended with it",
    ):
        ON_TWO.run(main)
    assert time.monotonic() - started < soon(5.0)
    pids = family_of(tmp_path)
    assert_gone(pids)
    assert ON_TWO.run(os.getpid).results  # and the next launch is as good


def test_a_server_that_cannot_start_is_an_error(tmp_path, monkeypatch, capfd):
    (tmp_path / "psutil.py").write_text("raise RuntimeError('broken here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(forkserver, "_server", None)  # the one that there is stays for the tests that follow
    with pytest.raises(todist.errors.AgentFailedError, match="died, before it started a worker"):
        Launcher(nproc_per_host=1, handlers=[]).run(os.getpid)
    forkserver._server.stop()
    assert "broken here" in capfd.readouterr().err


LAUNCHER = """
import sys
from pathlib import Path
from tests.launch.test_nothing_is_left import hold_on
from torchopt_dist.launching import Launcher
print("up", flush=True)
Launcher(nproc_per_host=2, handlers=[], rpc=sys.argv[2] == "rpc").run(hold_on, Path(sys.argv[1]))
"""


def hold_on(folder):
    shared = torch.ones(3).share_memory_()  # first: who is killed while torch makes the file leaves it
    start_a_family(folder)
    time.sleep(300)
    del shared


@pytest.mark.parametrize(
    ("number", "rpc"), [(signal.SIGINT, "rpc"), (signal.SIGTERM, "alone"), (signal.SIGKILL, "rpc")]
)
def test_a_launcher_that_is_ended_leaves_nothing(tmp_path, number, rpc):
    (tmp_path / "tmp").mkdir()
    code = LAUNCHER if number == signal.SIGKILL else with_this_server(LAUNCHER)  # one has its own forkserver
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}
    launcher = start_python("-c", code, tmp_path, rpc, env=env)
    pids = family_of(tmp_path)
    assert len(set(pids)) == 9  # 2 workers with 3 each, their agent
    servers = [process.pid for process in psutil.Process(launcher.pid).children()]
    assert len(servers) == (1 if number == signal.SIGKILL else 0)
    pids += servers
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=10)
    assert_gone(pids, 5.0)
    # The signal to terminate is an exception in the launcher, whose code is a shell's for a signal.
    assert launcher.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert out == "up\n"
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert err.count("Traceback") <= 1
    left = [path.name for path in (tmp_path / "tmp").iterdir()]
    assert not [
        name for name in left if not name.startswith("torchinductor_")
    ]  # a cache of torch's, for all programs
    shared = [path.name for path in Path("/dev/shm").iterdir()]
    assert not [name for name in shared if {int(part) for part in re.findall(r"\d+", name)} & set(pids)]


def test_an_interrupt_goes_on_as_such_and_leaves_nothing(tmp_path):
    def interrupt():
        family_of(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as interrupted:
        ON_TWO.run(hold_on, tmp_path)
    thread.join()
    frames = traceback.extract_tb(interrupted.tb)
    assert [frame.name for frame in frames if frame.filename != __file__] == ["run"]
    pids = family_of(tmp_path)
    assert_gone(pids, 1.0)
    assert ON_TWO.run(os.getpid).results  # and the next launch is as good


class Unreadable:
    def __reduce__(self):
        return fail_to_read, ()


def fail_to_read():
    print("read")
    os.kill(os.getppid(), signal.SIGSTOP)  # so that the agent hears of this at the end of the process
    atexit.register(be_interrupted)
    raise MyError(code=3)


def be_interrupted():
    os.kill(os.getppid(), signal.SIGCONT)
    wait_until(lambda: signal.getsignal(INTERRUPT) is signal.SIG_DFL)  # it has come


def test_a_worker_that_cannot_read_its_task_is_not_interrupted_as_it_ends(tmp_path):
    launcher = Launcher(nproc_per_host=1, handlers=[], log_dir=str(tmp_path))
    with pytest.raises(todist.errors.SerializationError, match="cannot be read on the worker: MyError"):
        launcher.run(print, Unreadable())
    (log,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert log.read_text() == "read\n"


def test_who_unlinks_shared_memory_is_let_do_so(tmp_path):
    def main():
        from multiprocessing import shared_memory

        block = shared_memory.SharedMemory(create=True, size=100)
        say(tmp_path / f"name{os.environ['RANK']}", block.name)
        if os.environ["RANK"] == "1":
            assert watch(tmp_path / "name0")
            raise MyError(code=2)
        time.sleep(60)

    with pytest.raises(MyError):
        ON_TWO.run(main)
    for rank in (0, 1):
        assert not Path("/dev/shm", (tmp_path / f"name{rank}").read_text()).exists()


def share_by_files(folder, how):
    """Share a tensor as torch does where descriptors are few; then die, or let the agent die."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    share_by_files.kept = torch.ones(3).share_memory_()
    names = [path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]
    assert len(names) == 1
    say(folder / f"name{os.environ['RANK']}", names[0])
    if os.environ["RANK"] == "1":
        assert watch(folder / "name0")
        os.kill(os.getpid() if how == "worker" else os.getppid(), signal.SIGKILL)
    time.sleep(60)


def shared_by_files(folder):
    names = [(folder / f"name{rank}").read_text() for rank in (0, 1)]
    return [name for name in names if Path("/dev/shm", name).exists()]


@pytest.mark.parametrize("liveness", [todist.Liveness(), todist.Liveness(interval=0.1, patience=0.8)])
def test_torch_is_let_unlink_what_killed_workers_have_shared_by_files(tmp_path, liveness):
    launcher = Launcher(nproc_per_host=2, handlers=[], liveness=liveness)
    with pytest.raises(todist.errors.WorkerFailedError, match="rank 1"):
        launcher.run(share_by_files, tmp_path, "worker")
    assert shared_by_files(tmp_path) == []


def test_torch_is_let_unlink_what_was_shared_by_files_when_the_agent_is_killed(tmp_path):
    with pytest.raises(todist.errors.AgentFailedError, match="died"):
        ON_TWO.run(share_by_files, tmp_path, "agent")
    wait_until(lambda: shared_by_files(tmp_path) == [])


def test_janitors_are_known_by_their_command():
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()
    of_python = psutil.Process(resource_tracker._resource_tracker._pid)
    program = "input() # from joblib.externals.loky.backend.resource_tracker import main; main(5, False)"
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE) as of_joblib:
        for tracker in (of_python, psutil.Process(of_joblib.pid)):
            wait_until(partial(processes.is_janitor, tracker))  # until it has called exec
        of_joblib.kill()
    assert not processes.is_janitor(psutil.Process())


def test_no_descriptor_stays_open_after_a_failure(tmp_path):
    def main(how):
        if os.environ["RANK"] == "0":
            return torch.ones(1000)
        if how == "die":
            os._exit(1)
        raise MyError(code=1) if how == "raise" else SystemExit(4)

    def fail():
        for how in ("die", "raise", "exit"):
            # Rank 0's value has arrived when rank 1 fails, or has not.
            with pytest.raises((MyError, todist.errors.WorkerFailedError)):
                ON_TWO.run(main, how)
        with pytest.raises(todist.errors.SerializationError):
            ON_TWO.run(main, threading.Lock())

    fail()
    with no_new_descriptors():
        fail()
