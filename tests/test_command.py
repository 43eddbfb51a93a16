"""``torchopt-dist`` finds its commands and hands them their arguments; ``bench`` times what gives the same numbers."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torchopt_dist as todist
from torchopt_dist import __main__ as program
from torchopt_dist import bench

ROOT = Path(__file__).resolve().parents[1]


def test_the_console_command_is_the_module() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    module, _, name = scripts.pop("torchopt-dist").partition(":")
    assert getattr(importlib.import_module(module), name) is program.main
    assert not scripts


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ["launch", "--nproc-per-host", "2", "nothing.py", "--lr", "1"],
            2,
            "must be a file, got 'nothing.py'",
        ),
        (["bench", "--rounds", "0"], 2, "argument --rounds: must be a number of at least 1, got '0'"),
        (["train.py"], 2, "invalid choice: 'train.py' (choose from"),
        (["report", "--yaml"], 2, "unrecognized arguments: --yaml"),
        (["--help"], 0, "time an optimizer's step"),
        (
            ["estimate", "nothing.py:problem"],
            2,
            "must be a file and a function of it, got 'nothing.py:problem'",
        ),
    ],
)
def test_a_command_gets_its_arguments(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        program.main(arguments)
    assert ending.value.code == code
    assert said in "".join(capsys.readouterr())


@pytest.mark.parametrize("typed", ["torchopt-dist", "python -m torchopt_dist"])
@pytest.mark.parametrize("command", ["report", "check", "demo", "estimate", "launch", "bench", "compat"])
def test_help_names_the_command_that_was_typed(
    typed: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = "/usr/bin/torchopt-dist" if typed == "torchopt-dist" else program.__file__
    monkeypatch.setattr(sys, "argv", [file, command, "--help"])
    with pytest.raises(SystemExit) as ending:
        program.main()
    said = capsys.readouterr().out or str(ending.value.code)
    assert said.startswith(f"usage: {typed} {command} ")
    assert "python -m" not in said.removeprefix(f"usage: {typed} ")


def test_compat_gets_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/folder/of/the/command", *sys.path])
    with pytest.raises(SystemExit, match=r"there is no script 'nothing\.py'"):
        program.main(["compat", "nothing.py"])
    with pytest.raises(SystemExit, match="usage: "):
        program.main(["compat"])


def test_bench_prints_a_ratio_a_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setenv("TODIST_TRANSPORT", "zmq")  # the peer is torch's RPC
    assert program.main(["bench", "--rounds", "1", "--workers", "1"]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert f"torch {torch.__version__}" in first
    shown = [re.fullmatch(r"(\w.*?) +([\d.]+) ms +([\d.]+) of .* \(([\d.]+) ms\)", row) for row in rows]
    assert [row[1].split(",")[0] for row in shown if row] == [
        "a step of Adam",
        "5 differentiable steps of Adam",
        "a call without arguments",
        "a call with 1 MiB",
    ]
    for row in shown:
        assert row is not None
        assert float(row[2]) / float(row[4]) == pytest.approx(float(row[3]), abs=0.06 * float(row[3]) + 0.02)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("name", ["adam", "Adam"])
def test_bench_times_nothing_that_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(todist, name)
    monkeypatch.setattr(todist, name, lambda *args, lr: right(*args, lr=1.1 * lr))
    with pytest.raises(RuntimeError, match=r"Adam, .*: the two differ by up to .*, so nothing is timed"):
        list(bench.collect(rounds=1, workers=1))


def test_medians_are_of_rounds_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    taken = {"one": iter([90, 1, 3, 2]), "two": iter([90, 7, 5, 9])}

    def timed(name: str) -> None:
        order.append(name)
        clock.now += next(taken[name])

    functions = {name: lambda name=name: timed(name) for name in taken}
    assert bench.interleaved(functions, rounds=3, warmups=1) == {"one": 2, "two": 7}
    assert order == ["one", "two"] * 4


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    code = (
        "import sys; from torchopt_dist import __main__ as program; "
        "program.COMMANDS['report'] = (lambda *_: print('x' * 200_000) or 0, ''); sys.exit(program.main([]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


PROBLEM = """
import torch
import torchopt_dist as todist

def problem():
    w = torch.ones(1000, requires_grad=True)
    return {"loss": lambda w: w.square().sum(), "optimizer": todist.sgd(lr=0.1), "params": w, "batches": 50}

def nothing():
    return None
"""


@pytest.mark.parametrize(
    ("function", "more", "code", "said"),
    [
        ("problem", [], 0, "Recorded()"),
        ("problem", ["--fits", "1GB"], 0, "Replayed()"),
        ("problem", ["--fits", "9B"], 1, "no adjoint fits 9B"),
        ("problem", ["--fits", "9 lines"], 2, "argument --fits: `memory` must be like '2GiB'"),
        ("nothing", [], 2, "`nothing` must be a function that returns the arguments of todist.estimate"),
        ("missing", [], 2, "`missing` must be a function that returns the arguments of todist.estimate"),
    ],
)
def test_estimate_prints_a_table(
    function: str,
    more: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (file := tmp_path / "train.py").write_text(PROBLEM)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ending:
        sys.exit(program.main(["estimate", f"{file}:{function}", *more]))
    assert ending.value.code == code
    assert said in "".join(capsys.readouterr())


PACKAGE = Path(todist.__file__).parent
IN_CLONE = PACKAGE.parent / "examples" / "few_shot.py"
DEMO = IN_CLONE if IN_CLONE.is_file() else PACKAGE / "_few_shot.py"  # of an installed wheel


def test_demo_launches_the_example_on_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(program, "launch", lambda argv, prog: given.append(argv) or 7)
    assert program.main(["demo", "--workers", "3", "--minutes", "30"]) == 7
    # Of an argument that is given twice the last one counts.
    short = ["--minutes", "0.5", "--test-tasks", "200"]
    assert given == [["--nproc-per-host", "3", str(DEMO), *short, "--minutes", "30"]]


def test_demo_says_where_its_program_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["demo", "--show"]) == 0
    assert capsys.readouterr().out == f"{DEMO}\n"


def test_demo_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        program.main(["demo"])
    assert "pip install matplotlib tqdm" in capsys.readouterr().err
    monkeypatch.setattr(program.torchopt_dist, "__file__", str(tmp_path / "package" / "__init__.py"))
    with pytest.raises(SystemExit, match="2"):
        program.main(["demo"])
    assert "it is in the repository" in capsys.readouterr().err
