"""A disk that is full, a terminal that has gone or knows few characters: the work goes on, and little is said of it."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from tests.launch.families import with_this_server
from tests.processes import python, start_python
from torchopt_dist.launching import Launcher
from torchopt_dist.launching.logs import TerminalHandler, WorkerLogs

pytestmark = pytest.mark.timeout(60)


def test_a_full_disk_is_told_once_and_the_values_and_other_files_are_kept(tmp_path, caplog):
    (tmp_path / "rank0.log").symlink_to("/dev/full")

    def work():
        for number in range(10):
            print("line", number)
        return 42

    result = Launcher(nproc_per_host=2, log_dir=tmp_path, handlers=[]).run(work)
    assert result.results == {"localhost": [42, 42]}
    assert (tmp_path / "rank1.log").read_text() == "".join(f"line {number}\n" for number in range(10))
    said = f"{tmp_path}/rank0.log is not complete: No space left on device"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_a_file_that_fails_when_it_is_closed_is_told_and_the_others_are_closed(tmp_path, caplog):
    logs = WorkerLogs([], tmp_path, range(3))
    for rank in range(3):
        logs.write("line", rank, rank, "here", "stdout")
    os.close(logs._files[0]._file.fileno())
    logs.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/rank0.log is not complete: Bad file descriptor"
    ]
    assert all(logs._files[rank]._file.closed for rank in range(3))


def test_a_folder_that_cannot_be_made_is_told_once_a_file(caplog):
    logs = WorkerLogs([], Path("/proc/none"), range(1))
    for _ in range(2):
        logs.write("line", 0, 0, "here", "stdout")
    logs.close()
    assert [record.getMessage() for record in caplog.records] == [
        "there will be no /proc/none/rank0.log: No such file or directory"
    ]


def write_to(monkeypatch, capsys, stdout, *lines):
    """What comes on standard error when lines are written to that standard output."""
    monkeypatch.setattr(sys, "stdout", stdout)
    logs = WorkerLogs([TerminalHandler()], None, range(1))
    for line in lines:
        logs.write(line, 0, 0, "here", "stdout")
    logs.write("an error", 0, 0, "here", "stderr")
    monkeypatch.undo()
    return capsys.readouterr().err


def test_no_standard_output_is_no_error(monkeypatch, capsys):
    assert write_to(monkeypatch, capsys, None, "one", "two") == "[rank 0] an error\n"


def test_a_terminal_that_knows_fewer_characters_shows_their_numbers(monkeypatch, capsys):
    shown = io.BytesIO()
    stdout = io.TextIOWrapper(shown, "ascii", newline="")
    assert write_to(monkeypatch, capsys, stdout, "3 µs", "plain") == "[rank 0] an error\n"
    assert shown.getvalue() == b"[rank 0] 3 \\xb5s\n[rank 0] plain\n"


def test_a_reader_that_has_gone_is_written_to_no_more(monkeypatch, capsys):
    class Gone(io.StringIO):
        calls = 0

        def write(self, text):
            self.calls += 1
            raise BrokenPipeError

    stdout = Gone()
    assert write_to(monkeypatch, capsys, stdout, "one", "two", "three") == "[rank 0] an error\n"
    assert stdout.calls == 1


def test_a_program_whose_output_goes_to_head_goes_on_in_peace():
    code = (
        "import sys\n"
        "from torchopt_dist.launching import launch\n"
        "def work():\n"
        "    for number in range(20000): print(number)\n"
        "    return 7\n"
        "print(launch(work, nproc_per_host=1, log_dir=None).rank(0), file=sys.stderr)\n"
        "sys.stdout = None\n"
    )
    head, its_input = os.pipe()
    with start_python("-c", with_this_server(code), stdout=its_input) as program:
        os.close(its_input)
        with os.fdopen(head) as lines:
            assert lines.readline() == "[rank 0] 0\n"
        _, said = program.communicate(timeout=20)
    assert "7\n" in said
    assert "Logging error" not in said


@pytest.mark.parametrize("closed", [(1,), (0, 1)])
def test_a_program_without_standard_streams_can_launch(closed):
    code = (
        "import os, sys\n"
        "from torchopt_dist.launching import launch\n"
        f"for number in {closed}:\n    os.close(number)\n"
        "sys.stdout = None  # as where Python starts without this descriptor, so that a socket may have its number\n"
        "print(launch(lambda: print('line') or 5, nproc_per_host=1, log_dir=None).rank(0), file=sys.stderr)\n"
    )
    done = python("-c", code, timeout=50)
    assert (done.returncode, done.stderr) == (0, "5\n")
