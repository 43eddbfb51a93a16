"""``start_a_family(folder)`` in a worker → three kinds of processes below it; seen from outside: which are left.

And the launcher as a program of its own, so that a test can end it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.seeds import torchrun
from tests.waits import say, soon, watch
from tests.warm_python import warm_python
from torchopt_dist.launch import _forkserver as forkserver

STARTED = []


def start_a_family(folder):
    """A child, a grandchild and an orphan that leads a session of its own; their pids in files."""
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        open(f'{sys.argv[1]}.draft', 'w').write(str(os.getpid()))\n"
        "        os.rename(f'{sys.argv[1]}.draft', f'{sys.argv[1]}.orphan')\n"
        "        time.sleep(300)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "while not os.path.exists(f'{sys.argv[1]}.orphan'): time.sleep(0.001)\n"
        "print(child.pid, os.getpid(), open(f'{sys.argv[1]}.orphan').read(), flush=True)\n"
        "time.sleep(300)\n"
    )
    path = folder / f"family{os.environ['RANK']}"
    family = subprocess.Popen(
        [sys.executable, "-S", "-c", script, str(path)], stdout=subprocess.PIPE, text=True
    )
    STARTED.append(family)  # one that is running and forgotten is a ResourceWarning
    pids = family.stdout.readline().split()
    assert len(pids) == 3
    say(path, " ".join([*pids, str(os.getpid()), str(os.getppid())]))


def with_this_server(code=""):
    """The program, whose launches ask the forkserver of this process. One of its own would import torch once more."""
    forkserver.connect(os.environ).close()
    return (
        "import os as _os; from torchopt_dist.launch import _forkserver; _forkserver._server ="
        f" _forkserver._Server({forkserver._server.address!r}, _forkserver.read_on_import(_os.environ))\n{code}"
    )


class Program:
    """A running program, forked from a process that has imported torch; with what `subprocess.Popen` has."""

    def __init__(self, *arguments, **env):
        env = {**os.environ, "PYTHONPATH": str(torchrun.ROOT), **env}
        self._job = warm_python().start(*arguments, cwd=torchrun.ROOT, env=env)
        self.pid = self._job.pid

    @property
    def returncode(self):
        return self._job.poll()

    def first_line(self, seconds=30.0):
        """The first line that it prints."""
        printed = Path(f"/proc/{self.pid}/fd/1")
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError):
                line, end, _ = printed.read_text().partition("\n")
                if end:
                    return line + end
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def send_signal(self, number):
        os.kill(self.pid, number)

    def communicate(self, timeout):
        """What it has printed, when it has ended."""
        try:
            ended = self._job.finish(timeout)
            return ended.stdout, ended.stderr
        finally:
            self._job.close()

    def kill(self):
        self._job.close()


def start_program(code, *arguments, **env):
    """A program that launches."""
    return Program("-c", with_this_server(code), *arguments, **env)


def start_fresh_program(code, *arguments, **env):
    """A program in a new interpreter, with a forkserver of its own, as a user starts it."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=torchrun.ROOT,
        env={**os.environ, "PYTHONPATH": str(torchrun.ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def alive(pids):
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def assert_gone(pids, seconds=5.0):
    deadline = time.monotonic() + soon(seconds)
    while alive(pids):
        assert time.monotonic() < deadline, [psutil.Process(pid).cmdline() for pid in alive(pids)]
        time.sleep(0.005)


def family_of(folder, ranks=2):
    assert all(watch(folder / f"family{rank}") for rank in range(ranks))
    return [int(pid) for rank in range(ranks) for pid in (folder / f"family{rank}").read_text().split()]


def forkserver_of(agent):
    """The process that has forked it."""
    return psutil.Process(agent).ppid()
