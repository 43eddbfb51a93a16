"""A failure is told once, by the rank that failed, with the frames of the user's program."""

from __future__ import annotations

import contextlib
import json
import pdb
import sys
import traceback

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import torchopt_dist as todist
from tests.distributed.failing_program import typo
from tests.processes import ROOT, free_port, python, start_python
from torchopt_dist.pickling.tracebacks import format_error, show_user_frames, summary

PROGRAM = ROOT / "tests/distributed/failing_program.py"
HEAD = "Traceback (most recent call last):"


def frames_of(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("size", [1, 2])
def test_an_error_of_the_own_share_keeps_its_frames(world, size):
    def loss_fn(x):
        return typo(x)

    def body():
        with pytest.raises(AttributeError, match="no_such_thing") as caught:
            todist.remote_sync_call(loss_fn, args=(torch.ones(2),))
        error = caught.value
        assert frames_of(error)[-2:] == ["loss_fn", "typo"]
        assert not isinstance(error, todist.RemoteError)
        innermost = pdb.Pdb().get_stack(None, error.__traceback__)[0][-1][0]
        assert innermost.f_locals["x"].tolist() == [1.0] * (2 // size)
        assert "in remote_sync_call" not in format_error(error)
        with pytest.MonkeyPatch.context() as debugging:
            debugging.setenv("TODIST_DEBUG", "1")
            assert "in remote_sync_call" in format_error(error)
        notes = "".join(getattr(error, "__notes__", []))
        assert ("1 more worker failed:\n  worker1 AttributeError" in notes) == (size == 2)

    world(size).on_zero(body)


def test_python_prints_the_user_s_frames_alone():
    done = python(PROGRAM, "everywhere", env={"PYTHONPATH": str(ROOT)}, timeout=100)
    lines = done.stderr.splitlines()
    assert (done.returncode, lines[0]) == (1, HEAD)
    places = [line for line in lines if line.startswith("  File")]
    assert [line.rpartition("in ")[2] for line in places[-3:]] == ["main", "loss_fn", "typo"]
    assert not any("torchopt_dist/distributed" in line for line in places)
    assert lines[-1] == "AttributeError: 'Tensor' object has no attribute 'no_such_thing'"


def failures(folder, where, size=2):
    """What each rank of the program prints, and torchrun's view of the failures, which it reads from files."""
    port, jobs = free_port(), []
    for rank in range(size):
        env = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_ERROR_FILE": str(folder / f"{rank}.json"),
        }
        jobs.append(start_python(PROGRAM, where, env=env))
    with contextlib.ExitStack() as stack:
        for job in jobs:
            stack.enter_context(contextlib.closing(job))
        ended = [job.finish(100) for job in jobs]
    assert [each.returncode for each in ended] == [1] * size
    found = {
        rank: ProcessFailure(rank, job.pid, job.returncode, str(folder / f"{rank}.json"))
        for rank, job in enumerate(jobs)
    }
    return [each.stderr for each in ended], ChildFailedError("program", found).get_first_failure()


@pytest.mark.parametrize(
    ("where", "tracebacks", "last"),
    [("everywhere", 1, "typo"), ("on one worker", 2, "main")],
)
def test_under_torchrun_a_failure_is_printed_once_and_is_the_root_cause(tmp_path, where, tracebacks, last):
    told, (rank, root) = failures(tmp_path, where)
    assert told[0].count(HEAD) == tracebacks
    assert told[0].count("\n    return x.no_such_thing") == 1
    assert "torchopt_dist/distributed" not in told[0].replace(str(PROGRAM), "")
    text = "AttributeError: 'Tensor' object has no attribute 'no_such_thing'"
    for other in told[1:]:
        (line,) = [line for line in other.splitlines() if "AttributeError" in line]
        assert f" is ended, since rank 0 failed: {text} (" in line
        assert line.endswith(f"in {last})")
        assert HEAD not in other
    # A rank that is ended tells why, too: it may be the only one that has ended when torchrun looks.
    echo = json.loads((tmp_path / "1.json").read_text())["message"]["message"]
    assert echo.startswith(f"rank 0 failed: {text}")
    assert rank == 0
    assert root.message["message"].startswith(text)


def test_of_four_ranks_one_prints_a_traceback_and_the_others_a_line(tmp_path):
    told, (rank, _) = failures(tmp_path, "in main", size=4)
    assert rank == 0
    ours = [[line for line in each.splitlines() if not line.startswith("[W")] for each in told]
    # torch's C++ code warns of each end of a connection that comes before the report of the failure.
    assert "".join(told).count("\n[W") + sum(each.startswith("[W") for each in told) < 6
    assert ours[0][0] == HEAD
    assert len(ours[0]) <= 10
    assert [len(each) for each in ours[1:]] == [1, 1, 1]  # so that of 8 ranks there are less than 30 lines


def test_of_another_rank_s_failure_one_line_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    show_user_frames()
    error = todist.PeerFailedError("rank 3 failed:\n\na long traceback")
    error.summary = "rank 3 failed: KeyError: 'x' (train.py:3, in step)"
    sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == f"this rank is ended, since {error.summary}\n"
    monkeypatch.setenv("TODIST_DEBUG", "1")
    sys.excepthook(type(error), error, None)
    assert "a long traceback" in capsys.readouterr().err


def test_what_is_printed_already_is_not_printed_again(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    first, other = ValueError("text"), ValueError("text")
    show_user_frames(told=first)
    sys.excepthook(ValueError, first, None)
    assert capsys.readouterr().err == ""
    sys.excepthook(ValueError, other, None)
    assert capsys.readouterr().err == "ValueError: text\n"


def test_a_program_s_own_excepthook_stays(monkeypatch):
    def own(*_):
        pass

    monkeypatch.setattr(sys, "excepthook", own)
    show_user_frames()
    assert sys.excepthook is own


def test_our_own_errors_show_the_frame_that_raised():
    try:
        todist.parallelize(timeout="soon")
    except TypeError as error:
        told = format_error(error)
    assert told.count("torchopt_dist/arguments/numbers.py") == 1
    assert "timeout must be a number" in told


def test_a_summary_is_one_line_with_a_place():
    try:
        typo(torch.ones(1))
    except AttributeError as error:
        said = summary(error)
    assert said.startswith("AttributeError: 'Tensor' object has no attribute 'no_such_thing' (")
    assert said.endswith("failing_program.py:13, in typo)")
    assert summary(ValueError("two\nlines")) == "ValueError: two"
    assert len(summary(ValueError("x" * 9999))) < 600
    assert summary(KeyboardInterrupt()) == "KeyboardInterrupt"
