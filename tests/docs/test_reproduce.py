"""``make reproduce`` writes a program's tables and minutes into its place, and says what differs on two workers."""

from __future__ import annotations

import importlib
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reproductions.md").read_text("utf-8")
TABLE = "| a | seconds |\n|---|---|\n| -1.98 ± 0.10, 21 % | 7 |"


@pytest.fixture
def reproduce(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "docs")])
    for name in ("page", "pages", "reproduce"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("reproduce")


def test_every_program_of_the_page_is_short_and_has_row_and_picture(reproduce: ModuleType) -> None:
    names = reproduce.programs(PAGE)
    assert names
    assert len(names) == len(set(names))
    for name in names:
        source = (ROOT / "examples" / f"{name}.py").read_text("utf-8")
        assert len(source.splitlines()) <= 200, name
        assert f"torchrun --nproc_per_node=2 examples/{name}.py" in source
        assert f"`python examples/{name}.py` |\n" in PAGE
        assert f"](_pictures/{name}.png)\n" in PAGE


@pytest.mark.parametrize(
    ("other", "apart"),
    [
        (TABLE, 0),
        (TABLE.replace("7", "90"), 0),
        (TABLE.replace("-1.98", "-1.97"), 0),
        (TABLE.replace("0.10", "0.08"), 0.2),
        (TABLE.replace("21", "25"), 0.16),
        (TABLE.replace("a", "b"), math.inf),
        (TABLE + "\n| 1 | 1 |", math.inf),
    ],
)
def test_numbers_of_two_runs_are_compared_but_for_what_was_measured(
    reproduce: ModuleType, other: str, apart: float
) -> None:
    assert reproduce.difference(TABLE, other) == pytest.approx(apart)
    two = TABLE.replace("seconds", "error")
    assert reproduce.difference(f"{TABLE}\n\n{two}", f"{TABLE}\n\n{two.replace('7', '14')}") == 0.5


def test_a_program_s_tables_come_into_its_place(
    reproduce: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("same", "other", "none", "fails")
    programs = {
        "same": f"print('begins')\nprint({TABLE!r})\nprint('picture: x')\n",
        "other": "import os\nprint('| a |\\n|---|\\n|', 2 * int(os.environ.get('WORLD_SIZE', 1)), '|')\n",
        "none": "",
        "fails": "raise SystemExit(1)\n",
    }
    (tmp_path / "examples").mkdir()
    for name in names:
        text = f'"""torchrun --nproc_per_node=2 examples/{name}.py"""\n{programs[name]}'
        (tmp_path / "examples" / f"{name}.py").write_text(text)
    pages = sys.modules["pages"]
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "PICTURES", tmp_path / "pictures")
    monkeypatch.setattr(pages, "TIMES", tmp_path / "pictures" / "times.json")
    monkeypatch.setattr(pages, "SPREAD", "by two")
    ways = {pages.ALONE: [sys.executable], "by two": ["env", "WORLD_SIZE=2", sys.executable]}
    monkeypatch.setattr(pages, "ways_to_run", lambda source: ways)
    monkeypatch.setattr(reproduce, "PAGE", tmp_path / "page.md")
    page = "".join(f"<!-- bench: {name} -->\nold {name}\n<!-- end -->\n" for name in names)
    reproduce.PAGE.write_text(page)

    assert reproduce.main([]) == (
        "other: other numbers on two workers, by up to 50 %\nnone: printed no table\nfails: failed"
    )
    same, other, none, fails = reproduce.PAGE.read_text().split("<!-- end -->\n")[:4]
    took = r"\n\n`python examples/same\.py`, \d\.\d minutes on one worker and \d\.\d on two, there the same numbers; \d"
    assert re.fullmatch(rf"<!-- bench: same -->\n{re.escape(TABLE)}{took}.*\n", same)
    assert "\n| 2 |\n" in other
    assert "there numbers up to 50 % from these" in other
    assert "old none" in none
    assert "old fails" in fails
    assert set(pages.known_times()) == {"same", "other", "none"}
    assert reproduce.main(["sane"]) == "NAME must be one of same, other, none, fails, got sane"
