"""``progress=True``: a bar counts the tasks that are done, on all workers, and results are the same."""

from __future__ import annotations

import io
import sys
import threading
import time
from typing import ClassVar

import pytest
import torch
import tqdm.auto

import torchopt_dist as todist
from torchopt_dist.distributed.group import progress as progress_module
from torchopt_dist.distributed.group.group import current_group


class Steps:
    """What a bar is told; stands for tqdm's."""

    made: ClassVar[list[Steps]] = []

    def __init__(self, **options):
        self.options, self.steps, self.closed = options, [], False
        Steps.made.append(self)

    def update(self, count):
        self.steps.append(count)

    def close(self):
        self.closed = True


def doubled(path, x):
    """The last task of a share waits until the caller knows of those before it."""
    if path is not None:
        while not path.exists():
            time.sleep(0.01)
    return 2 * x


def first_of_each(folder):
    tqdm.auto.tqdm = Steps
    progress_module.TELL_SECONDS = 0.0
    go = folder / "go"
    items = [(None if index in (0, 3) else go, torch.tensor(float(index))) for index in range(6)]
    future = todist.remote_async_call(
        lambda item: doubled(*item),
        partitioner=lambda: [(1 + index // 3, (item,), {}) for index, item in enumerate(items)],
        progress=True,
    )
    while not Steps.made or sum(Steps.made[0].steps) < 2:
        time.sleep(0.01)
    before = list(Steps.made[0].steps)
    go.touch()
    values = future.wait()
    (bar,) = Steps.made
    return before, sum(bar.steps), bar.options, bar.closed, values, dict(current_group().bars)


def set_tell_seconds(seconds):
    progress_module.TELL_SECONDS = seconds


def test_tasks_are_counted_while_the_call_runs(world, tmp_path):
    def body():
        set_tell_seconds(0.0)
        todist.barrier()
        return first_of_each(tmp_path) if todist.get_rank() == 0 else None

    before, total, options, closed, values, left = world(3).run(body)[0]
    assert before == [1, 1]
    assert total == 6
    assert options["total"] == 6
    assert closed
    assert left == {}
    assert [value.item() for value in values] == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def halved(x):
    return x / 2


@pytest.mark.parametrize("isolated", [True, False])
def test_the_caller_counts_its_own_tasks(monkeypatch, limits, isolated):
    monkeypatch.setattr(tqdm.auto, "tqdm", Steps)
    limits(tell_seconds=0.0)
    monkeypatch.setattr(Steps, "made", [])

    @todist.auto_init_rpc()
    def main():
        return todist.map(halved, [torch.ones(1)] * 5, progress=True, isolate_own_share=isolated)

    assert len(main()) == 5
    (bar,) = Steps.made
    assert bar.steps == [1] * 5
    assert bar.closed


def exits(x):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("function", "item", "error"), [(halved, threading.Lock(), TypeError), (exits, 1, SystemExit)]
)
def test_a_call_that_is_not_made_or_left_leaves_no_bar(monkeypatch, function, item, error):
    monkeypatch.setattr(tqdm.auto, "tqdm", Steps)
    monkeypatch.setattr(Steps, "made", [])

    @todist.auto_init_rpc()
    def main():
        with pytest.raises(error):
            todist.map(function, [item], progress=True)
        return dict(current_group().bars)

    assert main() == {}
    assert [bar.closed for bar in Steps.made] == [True]


def fails(x):
    raise ValueError("no")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO], ids=["terminal", "file"])
def test_a_bar_is_drawn_on_a_terminal_only_and_goes_also_after_an_error(monkeypatch, stream):
    terminal = stream()
    monkeypatch.setattr(sys, "stderr", terminal)

    @todist.auto_init_rpc()
    def main():
        values = todist.map(float, range(5), progress=True)
        with pytest.raises(ValueError, match="no"):
            todist.map(fails, range(5), progress=True)
        return values, len(current_group().bars)

    assert main() == ([0.0, 1.0, 2.0, 3.0, 4.0], 0)
    if stream is Terminal:
        assert "float" in terminal.getvalue()
        assert "/5" in terminal.getvalue()
    else:
        assert terminal.getvalue() == ""


def test_wrong_arguments_and_no_tqdm(monkeypatch):
    with pytest.raises(TypeError, match="progress must be True or False, got 'yes'"):
        todist.parallelize(todist.tasks, progress="yes")
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)

    @todist.auto_init_rpc()
    def main():
        with pytest.raises(ImportError, match="progress=True needs tqdm"):
            todist.map(float, range(5), progress=True)

    main()
