"""``torchopt-dist check`` says that all parts work where they do, and what to fix where one is broken."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import torchopt_dist as todist
from torchopt_dist import check
from torchopt_dist.ops import library


def test_all_parts_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 0
    *parts, last = capsys.readouterr().out.splitlines()
    assert last == "all parts work"
    names = [part.removeprefix("ok").strip().partition(":")[0] for part in parts if part.startswith("ok ")]
    assert names == [*check.CHECKS]


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = todist.inner_loop

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs, adjoint=todist.FirstOrder())

    monkeypatch.setattr(todist, "inner_loop", wrong)
    found = check.CHECKS["gradient"]()
    assert not found.works
    assert "please report this" in found.remedy


def test_missing_kernels_are_no_failure_and_are_told_how_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "why_not", lambda op, device: f"no {device}")
    found = check.CHECKS["kernels"]()
    assert found.works
    assert found.said.startswith("0 of 7 for CPU: no cpu")
    assert library.remedy(library.PACKAGE) in found.remedy


def test_workers_that_cannot_start_are_told_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise todist.CallTimeoutError("no reply")

    monkeypatch.setattr(todist.Launcher, "run", broken)
    found = check.CHECKS["two workers, torch's RPC"]()
    assert (found.works, found.said) == (False, "CallTimeoutError: no reply")
    assert "torchopt-dist report" in found.remedy


def test_a_gradient_that_comes_back_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Result:
        def rank(self, _: int) -> float:
            return float("nan")

    monkeypatch.setattr(todist.Launcher, "run", lambda *_: Result())
    assert not check.CHECKS["two workers, torch's RPC"]().works


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = check.CHECKS["two workers, ZeroMQ"]()
    assert found.works  # it is needed only where torch has no RPC
    assert "pip install pyzmq" in found.remedy


def test_a_part_that_raises_is_one_line_and_the_others_are_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> check.Finding:
        raise ImportError("libgomp.so.1\nis missing")

    monkeypatch.setattr(check, "CHECKS", {"kernels": broken, "versions": check.CHECKS["versions"]})
    assert check.main([]) == 1
    first, *_, second, last = capsys.readouterr().out.splitlines()
    assert first == "FAILED  kernels: ImportError: libgomp.so.1"
    assert second.startswith("ok      versions: torchopt_dist")
    assert last == "to fix: kernels"
