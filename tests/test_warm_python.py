"""A Python command in a fork of a server → what a new Python does with it: output, exit code, warnings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.warm_python import WarmPython

SHOWS = """
import os, sys
print(sys.argv[1:], sys.path[0], os.getcwd(), os.environ["GIVEN"], __name__, sys.modules["__main__"].SHOWN)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[WarmPython]:
    made = WarmPython("json")
    yield made
    made.close()


@pytest.mark.parametrize("warm", [True, False], ids=["forked", "new"])
@pytest.mark.parametrize("kind", ["script", "-c", "-m"])
def test_a_program_sees_what_python_gives_it(
    server: WarmPython, tmp_path: Path, kind: str, warm: bool
) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"SHOWN = 3{SHOWS}")
    command = {"script": [program], "-c": ["-c", program.read_text()], "-m": ["-m", "program"]}[kind]
    env = {**os.environ, "GIVEN": "yes"}
    done = server.run(*command, "--a", 1, cwd=tmp_path, env=env, warm=warm, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    first = "" if kind == "-c" else str(tmp_path)
    assert done.stdout == f"['--a', '1'] {first} {tmp_path} yes __main__ 3\n"


@pytest.mark.parametrize(
    ("code", "returncode", "stderr"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("raise ValueError('bad')", 1, "ValueError: bad\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(print, 'at the end', file=sys.stderr)", 0, "at the end\n"),
    ],
)
def test_it_ends_as_python_ends(server: WarmPython, code: str, returncode: int, stderr: str) -> None:
    done = server.run("-c", code, timeout=100)
    assert done.returncode == returncode
    assert done.stderr.endswith(stderr)
    assert bool(done.stderr) == bool(stderr)


def test_a_warning_is_an_error_where_the_command_says_so(server: WarmPython) -> None:
    code = "import warnings; warnings.warn('look', RuntimeWarning); print('on')"
    mild, strict = (server.run(*options, "-c", code, timeout=100) for options in ((), ("-W", "error")))
    assert (mild.returncode, mild.stdout) == (0, "on\n")
    assert "RuntimeWarning: look" in mild.stderr
    assert (strict.returncode, strict.stdout) == (1, "")


def test_stdout_and_stderr_may_be_one(server: WarmPython) -> None:
    done = server.run("-c", "import os; os.write(2, b'1'); os.write(1, b'2')", merged=True, timeout=100)
    assert (done.stdout, done.stderr) == ("12", "")


def test_what_does_not_end_is_killed_with_its_children(server: WarmPython) -> None:
    child = "import time; print('up', flush=True); time.sleep(1000)"
    code = (
        f"import subprocess, sys, time\nchild = subprocess.Popen([{sys.executable!r}, '-c', {child!r}])\n"
        "print(child.pid, flush=True)\ntime.sleep(1000)"
    )
    with closing(server.start("-c", code)) as job:
        with pytest.raises(subprocess.TimeoutExpired) as late:
            job.finish(0.1)
        while not (family := psutil.Process(job.pid).children()):
            job.poll(0.01)
        assert job.poll() is None
    assert late.value.timeout == 0.1
    assert job.returncode == -signal.SIGKILL
    _, left = psutil.wait_procs(family, timeout=60)
    assert left == []


def test_a_server_that_is_closed_ends_what_it_runs() -> None:
    server = WarmPython()
    job = server.start("-c", "import time; time.sleep(1000)")
    process = psutil.Process(job.pid)
    server.close()
    assert psutil.wait_procs([process], timeout=60)[1] == []
    job.close()
    assert job.returncode == -signal.SIGKILL
