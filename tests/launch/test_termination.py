"""A launcher that is terminated, interrupted or killed: what time its workers have, and that it does not hang."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time

import psutil
import pytest

from tests.launch.families import assert_gone, start_program
from tests.processes import ON_TWO, start_python
from tests.waits import say, watch
from torchopt_dist.launching import _agent as agent
from torchopt_dist.launching.launcher import ended_in_order
from torchopt_dist.process.signals import TERMINATED

pytestmark = pytest.mark.timeout(60)

LAUNCHER = """
import sys
from pathlib import Path
from tests.launch import test_termination
from torchopt_dist.launching import Launcher
function = getattr(test_termination, sys.argv[1])
launcher = Launcher(nproc_per_host=1, handlers=[], log_dir=None, stop_timeout=30)
try:
    launcher.run(function, Path(sys.argv[2]))
except SystemExit:
    print("the launcher's own end")
    raise
"""


@pytest.fixture
def start():
    """Starts programs, and ends those that a test has not."""
    started = []

    def make(*arguments):
        started.append(start_program(*arguments))
        return started[-1]

    yield make
    for program in started:
        program.close()


def save_slowly(folder):
    def save(*_):
        time.sleep(agent.ORPHANED_GRACE + 1)
        say(folder / "saved")
        os._exit(0)

    signal.signal(signal.SIGTERM, save)
    say(folder / "up", str(os.getpid()))
    time.sleep(300)


def hold_out(folder):
    signal.signal(signal.SIGTERM, lambda *_: say(folder / "asked"))
    say(folder / "up", str(os.getpid()))
    while True:
        time.sleep(1)


def test_workers_of_a_launcher_that_is_terminated_have_their_time(start, tmp_path):
    launcher = start(LAUNCHER, "save_slowly", tmp_path)
    assert watch(tmp_path / "up")
    launcher.send_signal(signal.SIGTERM)
    out, err = launcher.communicate(timeout=20)
    assert (launcher.returncode, out, err) == (TERMINATED, "the launcher's own end\n", "")
    assert (tmp_path / "saved").exists()  # and it has waited for that


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_who_ends_the_launcher_meanwhile_gives_workers_less_time(start, tmp_path, second):
    launcher = start(LAUNCHER, "hold_out", tmp_path)
    assert watch(tmp_path / "up")
    launcher.send_signal(signal.SIGINT)
    assert watch(tmp_path / "asked")
    launcher.send_signal(second)
    launcher.communicate(timeout=10)
    assert launcher.returncode == (TERMINATED if second == signal.SIGTERM else -second)
    assert_gone([int((tmp_path / "up").read_text())], agent.ORPHANED_GRACE + 5)


def test_workers_of_a_launcher_that_is_killed_have_little_time(start, tmp_path):
    launcher = start(LAUNCHER, "hold_out", tmp_path)
    assert watch(tmp_path / "up")
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate(timeout=10)
    assert_gone([int((tmp_path / "up").read_text())], agent.ORPHANED_GRACE + 5)


def test_sigterm_is_as_it_was_after_a_launch_and_a_program_s_own_way_is_left():
    def handler_within():
        with ended_in_order():
            return signal.getsignal(signal.SIGTERM)

    assert handler_within() is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for own in (signal.SIG_IGN, lambda *_: None):
        signal.signal(signal.SIGTERM, own)
        try:
            assert handler_within() is signal.getsignal(signal.SIGTERM) is own
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_launches_in_other_threads_are_left_alone():
    found = []
    thread = threading.Thread(target=lambda: found.append(ON_TWO.run(os.getpid)))
    thread.start()
    thread.join(30)
    assert len(found[0].results["localhost"]) == 2


FORK = """
import os, signal
from torchopt_dist.launching.launcher import ended_in_order
with ended_in_order():
    pid = os.fork()
    if pid == 0:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os._exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_process_forked_meanwhile_ends_by_the_signal(start):
    out, _ = start(FORK).communicate(timeout=30)
    assert out == f"{-signal.SIGTERM}\n"


STOPPED_SERVER = """
import psutil
from torchopt_dist.launching import launch
launch(int, nproc_per_host=1, handlers=[], log_dir=None)
(server,) = psutil.Process().children()
server.suspend()
print(server.pid, flush=True)
"""


def test_a_server_that_is_stopped_does_not_hold_up_the_program():
    with start_python("-c", STOPPED_SERVER) as program:
        pid = int(program.first_line())
        try:
            program.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            psutil.Process(pid).kill()
            program.communicate(timeout=10)
            raise
    assert program.returncode == 0
    assert_gone([pid])


TO_A_SILENT_HOST = """
import sys
from torchopt_dist.launching import Launcher
least = int(sys.argv[2]) or None
try:
    Launcher(hosts=["x@127.0.0.1:" + sys.argv[1]], nproc_per_host=1, start_timeout=50, min_hosts=least).run(int)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("min_hosts", ["0", "1"])
def test_ctrl_c_while_a_host_is_reached(start, min_hosts):
    pytest.importorskip("asyncssh")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        program = start(TO_A_SILENT_HOST, str(silent.getsockname()[1]), min_hosts)
        with silent.accept()[0]:
            started = time.monotonic()
            program.send_signal(signal.SIGINT)
            out, _ = program.communicate(timeout=15)
    assert (program.returncode, out) == (0, "interrupted\n")
    assert time.monotonic() - started < 15


COMMAND = """
import sys
from torchopt_dist.launching._command import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_command_ends_by_the_signal(start, tmp_path):
    (tmp_path / "sleep.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    job = start(COMMAND, "--nproc-per-host", "1", "--log-dir", "none", tmp_path / "sleep.py")
    assert job.first_line() == "[rank 0] up\n"
    job.send_signal(signal.SIGTERM)
    out, err = job.communicate(timeout=20)
    assert (job.returncode, out, err) == (TERMINATED, "[rank 0] up\n", "")
