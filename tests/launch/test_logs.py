"""Lines of workers: whole, by rank, on the terminal, in files, in handlers of one's own."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import torchopt_dist as todist
from tests.launch.families import with_this_server
from tests.processes import python
from torchopt_dist.launching import Launcher, on_ranks
from torchopt_dist.launching.logs import LineSplitter, TerminalHandler, WorkerLogs

pytestmark = pytest.mark.timeout(60)


class Kept(logging.Handler):
    """Keeps (rank, stream, line)."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.rank, record.stream, record.getMessage()))


def say_something():
    rank = os.environ["RANK"]
    print(f"out of {rank}")
    print(f"err of {rank}", file=sys.stderr)
    subprocess.run(["echo", f"child of {rank}"], check=True)
    logging.getLogger("x").warning("logged by %s", rank)
    os.write(1, b"no end of line")


def test_the_first_worker_of_each_host_is_on_the_terminal_though_a_host_is_lost(capsys):
    logs = WorkerLogs([TerminalHandler.of_first_workers()], None, range(4))
    logs.write("two hosts", 2, 0, "b", "stdout")  # of a's two workers and b's two
    logs.write("the second one there", 3, 1, "b", "stdout")
    logs.write("b alone", 0, 0, "b", "stdout")
    logs.write("the second one there", 1, 1, "b", "stdout")
    logs.write("three hosts", 1, 0, "c", "stdout")  # of one worker each
    logs.close()
    assert capsys.readouterr().out.splitlines() == [
        "[rank 2] two hosts",
        "[rank 0] b alone",
        "[rank 1] three hosts",
    ]


def test_rank_zero_of_each_host_is_on_the_terminal_with_a_prefix(capsys):
    Launcher(hosts=["localhost", "localhost"], nproc_per_host=[2, 1]).run(say_something)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == sorted(
        f"[rank {rank}] {line}"
        for rank in (0, 2)
        for line in (f"out of {rank}", f"child of {rank}", "no end of line")
    )
    assert sorted(err.splitlines()) == [
        f"[rank {rank}] {line} {rank}" for rank in (0, 2) for line in ("err of", "logged by")
    ]


def test_every_rank_has_a_file_that_grows(tmp_path, capsys):
    folder = tmp_path / "new" / "logs"
    launcher = Launcher(nproc_per_host=2, log_dir=folder, handlers=[])
    for times in (1, 2):
        launcher.run(say_something)
        assert sorted(path.name for path in folder.iterdir()) == ["rank0.log", "rank1.log"]
        for rank in (0, 1):
            lines = (folder / f"rank{rank}.log").read_text().splitlines()
            expected = [f"{text} {rank}" for text in ("out of", "err of", "child of", "logged by")] + [
                "no end of line"
            ]
            assert sorted(lines) == sorted(expected * times)
            out = [line for line in lines if not line.startswith(("err", "logged"))]
            assert out == [f"out of {rank}", f"child of {rank}", "no end of line"] * times
    assert capsys.readouterr() == ("", "")


def test_only_the_user_can_read_a_file(tmp_path):
    before = os.umask(0)
    try:
        logs = WorkerLogs([], tmp_path / "new", range(1))
        logs.write("a password perhaps", 0, 0, "localhost", "stdout")
    finally:
        os.umask(before)
    logs.close()
    path = tmp_path / "new" / "rank0.log"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)  # whoever is to read it, too, still can when it grows
    logs = WorkerLogs([], tmp_path / "new", range(1))
    logs.write("more", 0, 0, "localhost", "stdout")
    logs.close()
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.read_text() == "a password perhaps\nmore\n"


def test_handlers_get_the_ranks_and_the_stream_that_they_ask_for():
    everything, some, bad = Kept(), Kept(), Kept()
    bad.setLevel(logging.WARNING)
    handlers = [everything, on_ranks(some, [1], "stdout"), on_ranks(bad, stream="stderr")]
    Launcher(nproc_per_host=3, handlers=handlers).run(say_something)
    assert len(everything.lines) == 15
    assert some.lines == [(1, "stdout", line) for line in ("out of 1", "child of 1", "no end of line")]
    assert sorted(bad.lines) == sorted(
        (rank, "stderr", f"{text} {rank}") for rank in range(3) for text in ("err of", "logged by")
    )
    with pytest.raises(ValueError, match='`stream` must be "stdout", "stderr" or None, got \'out\''):
        on_ranks(Kept(), stream="out")


def test_a_record_knows_where_it_is_from():
    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append(record)

    Launcher(hosts=["localhost", "localhost"], nproc_per_host=1, handlers=[Keep()]).run(print, "100 %d", "x")
    assert sorted((r.rank, r.local_rank, r.host, r.stream, r.getMessage()) for r in records) == [
        (0, 0, "localhost", "stdout", "100 %d x"),
        (1, 0, "localhost#2", "stdout", "100 %d x"),
    ]
    assert {(r.name, r.levelname) for r in records} == {("torchopt_dist.launching", "INFO")}


def test_lines_come_while_the_workers_run(tmp_path):
    class Answer(logging.Handler):
        def emit(self, record):
            (tmp_path / "answer").touch()

    def main():
        print("question")
        deadline = time.monotonic() + 20
        while not (tmp_path / "answer").exists():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    Launcher(nproc_per_host=1, handlers=[Answer()]).run(main)


def test_lines_of_many_writers_are_whole_and_none_is_lost():
    kept = Kept()

    def main():
        for number in range(3000):
            print(f"{number} " + "x" * 300)

    Launcher(nproc_per_host=3, handlers=[kept]).run(main)
    for rank in range(3):
        lines = [line for r, _, line in kept.lines if r == rank]
        assert lines == [f"{number} " + "x" * 300 for number in range(3000)]


def test_the_last_lines_of_a_worker_that_dies_are_not_lost():
    kept = Kept()

    def main():
        if os.environ["RANK"] == "1":
            print("x\n" * 5000 + "the end")
            os._exit(3)
        time.sleep(60)

    with pytest.raises(todist.errors.WorkerFailedError) as caught:
        Launcher(nproc_per_host=2, handlers=[kept]).run(main)
    assert kept.lines[-1] == (1, "stdout", "the end")
    assert len(kept.lines) == 5001
    assert caught.value.log[-1] == "the end"


def test_an_exception_is_not_printed_by_the_worker(capsys):
    def main():
        raise ValueError("only raised")

    with pytest.raises(ValueError, match="only raised"):
        Launcher(nproc_per_host=2).run(main)
    assert capsys.readouterr() == ("", "")


def test_a_handler_that_raises_ends_the_launch():
    class Broken(logging.Handler):
        def emit(self, record):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Launcher(nproc_per_host=2, handlers=[Broken()]).run(say_something)


def lines_of(*chunks, last=b""):
    kept = Kept()
    splitter = LineSplitter(WorkerLogs([kept], None, range(1)), 0, 0, "here", "stdout")
    for chunk in (*chunks, last):
        splitter.feed(chunk)
    splitter.finish()
    splitter.finish()  # there is nothing any more
    return [line for _, _, line in kept.lines]


@pytest.mark.parametrize(
    ("chunks", "last", "lines"),
    [
        ((b"a\nb\n",), b"", ["a", "b"]),
        ((b"a", b"b\nc"), b"", ["ab", "c"]),
        ((b"a\r\nb\r", b"\nc\rd"), b"\r", ["a", "b", "c", "d"]),
        ((b"\n\n",), b"x", ["", "", "x"]),
        (("é".encode()[:1], "é".encode()[1:]), b"\xff", ["é\ufffd"]),
        ((b"10%\r20%\r",), b"\n", ["10%", "20%"]),
        ((b"a\x0cb\xe2\x80",), b"\xa8c", ["a\x0cb\u2028c"]),
        ((b"\r",), b"", [""]),
        ((), b"", []),
    ],
)
def test_bytes_become_lines(chunks, last, lines):
    assert lines_of(*chunks, last=last) == lines


def test_a_line_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(sys.modules["torchopt_dist.launching.logs"], "LONGEST_LINE", 10)
    assert lines_of(b"x" * 11, b"y" * 3) == ["x" * 11, "yyy"]


@pytest.mark.parametrize("letter", ["é", "漢", "😀"])
@pytest.mark.parametrize("before", range(4))
def test_a_line_without_end_is_cut_between_characters(monkeypatch, letter, before):
    monkeypatch.setattr(sys.modules["torchopt_dist.launching.logs"], "LONGEST_LINE", 10)
    text = "x" * before + letter * 30
    lines = lines_of(*(text.encode()[start : start + 3] for start in range(0, len(text.encode()), 3)))
    assert "".join(lines) == text
    assert len(lines) > 2


def test_a_notebook_sees_the_lines_in_its_cell():
    # A notebook replaces `sys.stdout`, and file descriptor 1 is not the cell's.
    program = (
        "import io, sys\nfrom torchopt_dist.launching import launch\n"
        "cell = sys.stdout = io.StringIO()\nlaunch(print, ('hello',), nproc_per_host=2)\n"
        "assert cell.getvalue() == '[rank 0] hello\\n', cell.getvalue()\n"
    )
    ended = python("-W", "error", read=with_this_server(program), timeout=50)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_files_are_made_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Launcher(nproc_per_host=1, handlers=[]).run(say_something)
    assert list(Path().iterdir()) == []


def test_by_default_every_rank_has_a_file_of_this_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("TODIST_LOG_DIR", str(tmp_path / "logs"))

    def work():
        if os.environ["RANK"] != "2":
            print("I am", os.environ["RANK"])

    for _ in range(2):
        Launcher(nproc_per_host=3, handlers=[]).run(work)
    folders = sorted((tmp_path / "logs").iterdir())
    assert len(folders) == 2
    for folder in folders:  # a rank that says nothing has no file
        assert {file.name: file.read_text() for file in folder.iterdir()} == {
            "rank0.log": "I am 0\n",
            "rank1.log": "I am 1\n",
        }
    monkeypatch.delenv("TODIST_LOG_DIR")
    monkeypatch.chdir(tmp_path)
    Launcher(nproc_per_host=1, handlers=[]).run(work)
    assert [file.name for file in (tmp_path / "todist_logs").rglob("*.log")] == ["rank0.log"]


def test_a_launch_that_is_silent_or_asked_to_makes_no_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TODIST_LOG_DIR", str(tmp_path / "logs"))
    Launcher(nproc_per_host=1, handlers=[]).run(lambda: None)
    Launcher(nproc_per_host=1, handlers=[], log_dir=None).run(print, "line")
    Launcher(nproc_per_host=1, handlers=[], log_dir="none").run(print, "line")
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("TODIST_LOG_DIR", "/proc/todist/logs")  # where no folder can be made
    assert Launcher(nproc_per_host=1, handlers=[]).run(lambda: print("line") or 3).rank(0) == 3
