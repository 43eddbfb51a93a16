"""docs/works_with.md: each row of its table has a program there, which runs where its library is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.test_examples import Program, check_output, programs
from tests.processes import python

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "works_with.md").read_text("utf-8")
PROGRAMS = {kind.removeprefix("python with "): program for kind, program in programs(PAGE).items()}
INSTALLED = [name for name in PROGRAMS if importlib.util.find_spec(name) is not None]
"""`make works-with` installs the others."""


@pytest.mark.processes
@pytest.mark.parametrize("name", INSTALLED)
def test_the_program_of_a_library_runs(name: str, tmp_path: Path) -> None:
    program: Program = PROGRAMS[name]
    # A script must not have the library's name.
    (script := tmp_path / f"with_{name}.py").write_text(program.code)
    done = python(script, cwd=tmp_path, env={**os.environ, "WANDB_SILENT": "true"})
    assert done.returncode == 0, done.stderr
    check_output(program, done.stdout)


def test_each_row_has_a_program_that_prints_something() -> None:
    sections = dict(re.findall(r"^## (.+)\n(?:(?!##).*\n)*?```python with (\w+)$", PAGE, re.MULTILINE))
    rows = re.findall(r"^\| \[(.+?)\]\(#.+?\) \| .+ \| [\d.]+ \|$", PAGE, re.MULTILINE)
    assert rows == [*sections]
    assert [*sections.values()] == [*PROGRAMS]
    assert all(program.output for program in PROGRAMS.values())


def test_what_the_tests_need_is_installed() -> None:
    assert {"submitit", "tensorboard", "safetensors"} <= {*INSTALLED}


def test_pip_finds_the_extras_that_pages_and_targets_ask_for() -> None:
    """For one that it does not find pip only prints a warning; an older pip finds no name with an underscore."""
    extras = {
        *tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    }
    texts = [ROOT / "Makefile", ROOT / "README.md", ROOT / "pyproject.toml", *ROOT.glob("docs/**/*.md")]
    named = re.findall(
        r"(?:torchopt_dist|\.)\[([\w,-]+)\]", "".join(path.read_text("utf-8") for path in texts)
    )
    assert {"zmq", "works-with"} <= {extra for names in named for extra in names.split(",")} <= extras
    assert [name for name in extras if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name)] == []
