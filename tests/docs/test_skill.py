"""SKILL.md, from which an assistant writes programs: each block is a whole program, and names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torchopt_dist as todist
from tests.docs.test_examples import FENCE
from tests.processes import python, torchrun

ROOT = Path(__file__).resolve().parents[2]
SKILL = (ROOT / "SKILL.md").read_text("utf-8")
BLOCKS = [
    pytest.param(info, code, id=re.sub(r"\W+", "-", title.lower()))
    for title, section in re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", SKILL, re.MULTILINE)
    for info, code in FENCE.findall(section)
]


@pytest.mark.processes
@pytest.mark.parametrize(("info", "code"), BLOCKS)
def test_a_block_is_a_whole_program(info: str, code: str, tmp_path: Path) -> None:
    (script := tmp_path / "program.py").write_text(code)
    alone = python(script, cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.strip() not in ("", "False")
    assert info in ("python", "python torchrun")
    if info == "python torchrun":
        printed = torchrun("--standalone", "--nproc_per_node=2", script, cwd=tmp_path)
        assert alone.stdout.strip() in printed


def test_there_is_a_block_for_each_kind_of_program() -> None:
    assert len(BLOCKS) == 9


@pytest.mark.parametrize("text", ["SKILL.md", "docs/llms.txt"])
def test_names_are_there(text: str) -> None:
    for name in re.findall(r"\btodist\.([\w.]+\w)", (ROOT / text).read_text("utf-8")):
        thing = todist
        for part in name.split("."):
            thing = getattr(thing, part)


def test_the_list_of_pages_has_every_page() -> None:
    listed = re.findall(
        r"^- \[.+?\]\(([\w/]+)\.(?:md|html)\): .+", (ROOT / "docs/llms.txt").read_text("utf-8"), re.MULTILINE
    )
    docs = ROOT / "docs"
    pages = {
        path.relative_to(docs).with_suffix("").as_posix()
        for path in [*docs.glob("*.md"), *docs.glob("api/*.md")]
    }
    assert {*listed} == pages - {"index"}
    assert len(listed) == len({*listed})
