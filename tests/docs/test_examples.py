"""README and every page of docs: the Python blocks run, and print what the page says they print.

A page's blocks marked ``python`` are one program, run in one plain process. Those marked ``python torchrun`` are
another, run by torchrun on two workers; ``tests/docs/test_works_with.py`` runs those marked ``python with``. The lines
of a block marked ``text output`` are among what the program of the block before it prints, in this order.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import python, torchrun

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(.*)\n((?:(?!```).*\n)*)```$", re.MULTILINE)


class Program(NamedTuple):
    """The blocks of one kind of a page, each on the lines that it has there, so that tracebacks show them."""

    code: str
    output: list[str]


def programs(text: str) -> dict[str, Program]:
    """``{"python": …, "python torchrun": …}``, of those that the page has."""
    found: dict[str, Program] = {}
    kind = ""
    for fence in FENCE.finditer(text):
        info, block = fence.group(1).strip(), fence.group(2)
        if info in ("python", "python torchrun"):
            kind = info
            program = found.get(kind, Program("", []))
            start = text.count("\n", 0, fence.start(2))
            blank = "\n" * (start - program.code.count("\n"))
            found[kind] = Program(program.code + blank + block, program.output)
        elif info.startswith("python with "):
            kind = info
            assert kind not in found, f"two programs with one library: {kind}"
            found[kind] = Program(block, [])
        elif info == "text output":
            found[kind].output.extend(block.splitlines())
        else:
            assert not info.startswith("python"), f"an unknown kind of block: {info!r}"
    return found


def all_of(kind: str, daily: tuple[str, ...] | None = None) -> list[object]:
    """``(page, program)`` of each page that has one of this kind; if daily ones are given, the others are nightly."""
    found = ((page, programs(page.read_text("utf-8")).get(kind)) for page in PAGES)
    return [
        pytest.param(
            page,
            program,
            id=page.stem,
            marks=[] if daily is None or page.stem in daily else pytest.mark.nightly,
        )
        for page, program in found
        if program is not None
    ]


def check_output(program: Program, printed: str) -> None:
    lines = iter(printed.splitlines())
    for expected in program.output:
        assert expected in lines, f"not printed, or not in this order: {expected!r}\n{printed}"


ALONE = [
    pytest.param(page, programs(page.read_text("utf-8"))["python torchrun"], id=page.stem, marks=marks)
    for page, marks in (
        (PAGES[0], pytest.mark.nightly),  # by day it runs on two workers
        (ROOT / "docs" / "getting_started.md", ()),
    )
]
"""They say that plain ``python`` prints the same."""


@pytest.mark.parametrize(("page", "program"), [*ALONE, *all_of("python")])
def test_page(page: Path, program: Program, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text(program.code)
    done = python(script, cwd=tmp_path, merged=True)
    assert done.returncode == 0, done.stdout
    check_output(program, done.stdout)


@pytest.mark.parametrize(
    ("page", "program"), all_of("python torchrun", daily=("README", "getting_started", "gradients"))
)
def test_page_on_two_workers(page: Path, program: Program, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text(program.code)
    # The page that readers start from is run as they run it.
    arguments = ("--standalone", "--nproc_per_node=2", script)
    check_output(program, torchrun(*arguments, cwd=tmp_path, warm=page.stem != "README"))


def test_blocks_keep_their_lines() -> None:
    page = "# a\n\n```python\nx = 1\n```\n\n```bash\nls\n```\n```python torchrun\ny = 1\n```\n"
    page += "```text output\n1\n```\n```python\nprint(x)\n```\n"
    found = programs(page)
    assert found["python torchrun"].output == ["1"]
    for kind, lines in (("python", ["x = 1", "print(x)"]), ("python torchrun", ["y = 1"])):
        code = found[kind].code.splitlines()
        assert [line for line in code if line] == lines
        assert [code.index(line) for line in lines] == [page.splitlines().index(line) for line in lines]
    with pytest.raises(AssertionError, match="not printed, or not in this order: 'a'"):
        check_output(Program("", ["b", "a"]), "a\nb\n")
