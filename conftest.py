from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tests.worlds import World

_logs = tempfile.TemporaryDirectory(prefix="todist-logs-")
os.environ["TODIST_LOG_DIR"] = _logs.name  # so that launches of tests leave no files in the working folder


@pytest.fixture
def world() -> type[World]:
    """``world(n)``: n worker processes; see ``tests/worlds.py``."""
    return World
