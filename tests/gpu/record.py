"""What is found → a line of JSON in the file ``GPU_RECORD`` as soon as it is known; a plugin for tests' outcomes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


def told(table: str, **cells: str) -> None:
    """Print a row of a table, and write it."""
    print(f"{table}: " + ", ".join(f"{name} {value}" for name, value in cells.items()), flush=True)
    if record := os.environ.get("GPU_RECORD"):
        with Path(record).open("a", encoding="utf-8") as file:
            print(json.dumps({"outcome": "told", "table": table, "cells": cells}), file=file, flush=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: Any) -> None:
    """Write what decides a test: a failure in any phase, a skip, or a call that passed."""
    if "PYTEST_XDIST_WORKER" in os.environ or not (report.when == "call" or report.outcome != "passed"):
        return
    row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    if report.outcome == "failed":
        row["why"] = report.longreprtext[-4000:]
    elif report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        row["why"] = report.longrepr[2]
    with Path(os.environ["GPU_RECORD"]).open("a", encoding="utf-8") as file:
        print(json.dumps(row), file=file, flush=True)
