"""What is written for TensorBoard: floats by name and step, on rank 0 and into a folder; else no package is needed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import torchopt_dist as todist

MODULE = "torch.utils.tensorboard"


class Recorder:
    """In the place of ``SummaryWriter``."""

    made: list[Recorder]

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.written: list[tuple[str, float, int]] = []
        self.closed = False
        self.made.append(self)

    def close(self) -> None:
        self.closed = True

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        assert type(value) is float
        self.written.append((name, value, step))


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    module = ModuleType(MODULE)
    vars(module)["SummaryWriter"] = Recorder
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(Recorder, "made", [], raising=False)
    return Recorder.made


def trains(folder: Path | None) -> None:
    with todist.scalar_writer(folder) as write:
        write(0, {"loss": torch.tensor([2.0], requires_grad=True), "accuracy": 0.5})
        write(1, {"loss": 1})


def test_rank_zero_writes_floats_by_name_and_step(recorders: list[Recorder], tmp_path: Path) -> None:
    trains(tmp_path)
    (recorder,) = recorders
    assert recorder.folder == str(tmp_path)
    assert recorder.written == [("loss", 2.0, 0), ("accuracy", 0.5, 0), ("loss", 1.0, 1)]
    assert recorder.closed


def test_other_ranks_write_nothing(
    recorders: list[Recorder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    trains(tmp_path)
    assert not recorders


def test_what_was_written_before_an_error_is_kept(recorders: list[Recorder], tmp_path: Path) -> None:
    def diverges() -> None:
        with todist.scalar_writer(tmp_path) as write:
            write(3, {"loss": 1.0})
            write(4, {"loss": 1 / 0})

    with pytest.raises(ZeroDivisionError):
        diverges()
    assert recorders[0].written == [("loss", 1.0, 3)]
    assert recorders[0].closed


def test_the_package_is_needed_only_with_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    trains(None)
    with pytest.raises(
        ImportError, match=r"needs the package tensorboard.*: pip install 'torchopt_dist\[tensorboard\]'"
    ):
        trains(tmp_path)


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    loader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    trains(tmp_path)
    found = loader.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(0, 2.0), (1, 1.0)]


def test_it_writes_without_a_with_statement(recorders: list[Recorder], tmp_path: Path) -> None:
    write = todist.scalar_writer(tmp_path)
    write(0, {"loss": 2.0})
    (recorder,) = recorders
    assert recorder.written == [("loss", 2.0, 0)]
    assert not recorder.closed
    write.close()
    assert recorder.closed
    with pytest.raises(ValueError, match="`scalar_writer` is closed: write inside"):
        write(1, {"loss": 1.0})
    todist.scalar_writer(None).close()
    todist.scalar_writer(tmp_path)  # dropped, so ended
    assert recorders[1].closed
