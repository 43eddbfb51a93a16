"""The model and the simulation behind ``docs/scaling.md``, against closed forms, and what the page says of them."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scaling():
    before = sys.path[:]
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import scaling

        return scaling
    finally:
        sys.path[:] = before


def test_the_fit_finds_what_points_were_made_of(scaling):
    cost = scaling.Cost(fixed=2e-3, own=3e-9, worker=4e-4, byte=5e-10)
    points = {(w, m): cost.seconds(w, m) for w in (1, 2, 4, 8, 16, 32) for m in (10**5, 10**6, 10**7)}
    assert points[4, 10**6] == pytest.approx(2e-3 + 3e-3 + 3 * (4e-4 + 5e-4))
    found = scaling.Cost.fit(points)
    for name in ("fixed", "own", "worker", "byte"):
        assert getattr(found, name) == pytest.approx(getattr(cost, name), rel=1e-6)


@pytest.mark.parametrize("size", [2, 7, 40])
def test_messages_arrive_when_chains_and_stars_say(scaling, size):
    nbytes, others = 8 * scaling.CHUNK, size - 1
    chunk = scaling.CHUNK / scaling.LINE
    chain = scaling.arrival(scaling.grown(size, 1), nbytes)
    assert chain == (pytest.approx(others * (chunk + scaling.LATENCY) + 7 * chunk), [])
    assert scaling.arrival(_star(size), nbytes) == (pytest.approx(others * 8 * chunk + scaling.LATENCY), [])


def _star(size):
    return [[*range(1, size)], *([] for _ in range(size - 1))]


@pytest.mark.parametrize("fan_out", [2, 3])
def test_a_death_cuts_off_what_is_below(scaling, fan_out):
    children = scaling.grown(100, fan_out)
    assert sorted(child for each in children for child in each) == [*range(1, 100)]
    assert max(map(len, children)) == fan_out

    def below(rank):
        return sorted([rank, *(other for child in children[rank] for other in below(child))])

    for rank in (1, 2, 50, 99):
        seconds, without = scaling.arrival(children, 10**7, {rank: 0.0})
        assert without == below(rank)
        assert math.isfinite(seconds)
        assert scaling.arrival(children, 10**7, {rank: 1e9})[1] == []


def test_the_page_holds_figures_that_the_program_has_written(scaling, monkeypatch, tmp_path):
    text = scaling.PAGE.read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if ", seconds |" in line]
    assert len(rows) == 4
    for name, *_, fitted, held_out in rows:
        assert float(held_out.rstrip("%")) <= 15, name
        assert fitted.endswith("%")
    page = tmp_path / "page.md"
    page.write_text(text, "utf-8")
    monkeypatch.setattr(scaling, "PAGE", page)
    scaling.write(["| new |", "|---|"])
    after = page.read_text("utf-8")
    assert "| new |\n|---|\n\n`python benchmarks/scaling.py`, " in after
    assert "## The fit" not in after
    assert after.partition("<!-- bench")[0] == text.partition("<!-- bench")[0]
    assert after.partition("<!-- end -->")[2] == text.partition("<!-- end -->")[2]
