"""``sys.exit`` on a worker → the status that the system would make of it, and its text among the last lines."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

import torchopt_dist as todist
from torchopt_dist.launching import _worker as worker
from torchopt_dist.launching import launch

pytestmark = pytest.mark.timeout(60)

KINDS = {"plain": {}, "elastic": {"min_hosts": 1}}


class Mute:
    def __str__(self):
        raise RuntimeError("str")


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        (None, 0, ""),
        (0, 0, ""),
        (3, 3, ""),
        (True, 1, ""),
        (-1, 255, ""),
        (-9, 247, ""),
        (256, 0, ""),
        (10**10, 0, ""),
        ("config is missing", 1, "config is missing\n"),
        (("a", 2), 1, "('a', 2)\n"),
        (Mute(), 1, ""),
    ],
    ids=lambda part: type(part).__name__ if isinstance(part, Mute) else repr(part),
)
def test_the_status_is_what_python_and_the_system_make_of_it(code, status, said, capsys):
    assert worker.asked_to_exit(SystemExit(code)) == status
    assert capsys.readouterr() == ("", said)


def test_other_exceptions_are_no_exit(capsys):
    assert worker.asked_to_exit(KeyboardInterrupt("text")) is None
    assert worker.asked_to_exit(ValueError("text")) is None
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_negative_status_is_no_signal(kind):
    with pytest.raises(todist.errors.WorkerFailedError, match=r"called sys.exit\(247\)") as caught:
        launch(sys.exit, (-9,), nproc_per_host=1, log_dir=None, handlers=[], **KINDS[kind])
    assert (caught.value.exit_code, caught.value.signal) == (247, None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_an_exit_is_in_the_log_and_in_the_error(kind):
    with pytest.raises(todist.errors.WorkerFailedError, match=r"called sys.exit\(1\)") as caught:
        launch(sys.exit, ("config is missing",), nproc_per_host=1, log_dir=None, handlers=[], **KINDS[kind])
    assert caught.value.exit_code == 1
    assert caught.value.log == ("config is missing",)
    assert str(caught.value).endswith("\n    config is missing")


@pytest.fixture
def memory_group():
    """A control group that may use 600 MB, as a file to write a process's number into."""
    new = Path("/sys/fs/cgroup")  # version 2; else version 1
    root, limit = (
        (new, "memory.max") if (new / "cgroup.procs").exists() else (new / "memory", "memory.limit_in_bytes")
    )
    group = root / f"todist{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(600 << 20))
        with contextlib.suppress(OSError):
            (group / "memory.swap.max").write_text("0")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group for memory can be made: {error}")
    yield group / "cgroup.procs"
    for _ in range(1000):
        with contextlib.suppress(OSError):
            group.rmdir()
            return


def use_all_memory(group):
    Path(group).write_text(str(os.getpid()))
    return len(bytearray(b"1") * (2 << 30))


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_the_kernel_kills_for_lack_of_memory_is_told_of_as_such(kind, memory_group):
    with pytest.raises(
        todist.errors.WorkerFailedError, match=r"SIGKILL \(the kernel has .* lack of memory\)"
    ) as caught:
        launch(use_all_memory, (memory_group,), nproc_per_host=1, log_dir=None, handlers=[], **KINDS[kind])
    assert caught.value.signal == "SIGKILL"


def test_a_worker_that_is_killed_otherwise_is_not():
    with pytest.raises(
        todist.errors.WorkerFailedError, match="was ended by SIGKILL before its function returned"
    ):
        launch(os.kill, (0, signal.SIGKILL), nproc_per_host=1, log_dir=None, handlers=[])


@pytest.mark.parametrize("rpc", [False, True])
def test_zero_is_a_good_end_as_under_torchrun(rpc):
    def main():
        if os.environ["RANK"] == "1":
            sys.exit(0)
        return todist.Liveness.from_environment()

    options = {"log_dir": None, "handlers": [], "rpc": rpc}
    result = launch(main, nproc_per_host=2, liveness=todist.Liveness(2, 30), **options)
    assert result.results == {"localhost": [todist.Liveness(2, 30), None]}  # one policy for all
    result = launch(main, nproc_per_host=2, env={"TODIST_LIVENESS": "interval=2"}, **options)
    assert result.rank(0) == todist.Liveness(2, 10)
