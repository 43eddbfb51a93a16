"""The workers of a host compile one after another, so that all but the first find what they need on disk."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from torchopt_dist import _programs
from torchopt_dist._programs import Program

pytestmark = pytest.mark.compiles


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host of two workers; the folder of its locks."""
    monkeypatch.setattr(_programs, "how_to_compile", lambda _constant: {"backend": "eager"})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "1234")
    return tmp_path


def doubled() -> Program:
    """A program that has not been compiled."""

    def double(x: Tensor) -> Tensor:
        return 2 * x

    return Program(double, "a test")


def called(program: Program) -> float:
    """What it makes of 1."""
    value: Tensor = program(torch.ones(()), otherwise=lambda: pytest.fail("the compiler has refused it"))
    return value.item()


def lock_of(host: Path) -> Path:
    """The file of the lock."""
    return host / f"torchopt_dist-{os.getuid()}-1234-compiles.lock"


def test_a_worker_waits_while_another_one_compiles(host: Path) -> None:
    program, made = doubled(), []
    file = lock_of(host)
    worker = threading.Thread(target=lambda: made.append(called(program)))
    with FileLock(file):
        worker.start()
        worker.join(0.3)
        assert worker.is_alive()
        assert not made
    worker.join(60)
    assert made == [2.0]


def test_a_wait_ends_and_a_program_that_has_run_waits_for_nobody(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, program = lock_of(host), doubled()
    monkeypatch.setattr(_programs, "LONGEST_WAIT", 0.1)
    with FileLock(file):
        assert called(program) == 2.0
        monkeypatch.setattr(_programs, "LONGEST_WAIT", 1e9)
        assert called(program) == 2.0


def test_a_worker_that_is_alone_on_its_host_takes_no_lock(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert called(doubled()) == 2.0
    assert not list(host.iterdir())
