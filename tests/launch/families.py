"""``start_a_family(folder)`` in a worker → three kinds of processes below it; seen from outside: which are left.

And the launcher as a program of its own, so that a test can end it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import psutil

from tests.processes import ON_TWO, ROOT, start_python
from tests.waits import say, soon, watch
from torchopt_dist.launching import _forkserver as forkserver

STARTED = []


def start_a_family(folder):
    """A child, a grandchild and an orphan that leads a session of its own; their pids in files."""
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(300)'])\n"
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
        "import os as _os; from torchopt_dist.launching import _forkserver; _forkserver._server ="
        f" _forkserver._Server({forkserver._server.address!r}, _forkserver.read_on_import(_os.environ))\n{code}"
    )


def start_program(code, *arguments, **env):
    """A program that launches."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return start_python("-c", with_this_server(code), *arguments, env=environ)


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
    """The forkserver that was started, and has forked the agent, or the successor that has."""
    server = psutil.Process(agent).parent()
    while is_forkserver(server.parent()):
        server = server.parent()
    return server.pid


def is_forkserver(process):
    if process is None:
        return False
    try:
        return "todist: forkserver" in "".join(process.cmdline()[:1])
    except psutil.ZombieProcess:  # an agent that has just ended
        return False


def successor():
    """The successor of this program's forkserver, when it has taken over."""
    while (
        pid := ON_TWO.run(lambda: psutil.Process(os.getppid()).ppid()).rank(0)
    ) == forkserver._server.process.pid:
        time.sleep(0.01)
    return pid
