from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tests.worlds import World

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in a job in the background, whose Ctrl-C tests would wait
    signal.signal(signal.SIGINT, signal.default_int_handler)
_logs = tempfile.TemporaryDirectory(prefix="todist-logs-")
os.environ["TODIST_LOG_DIR"] = _logs.name  # so that launches of tests leave no files in the working folder


@pytest.fixture
def world() -> type[World]:
    """``world(n)``: n worker processes; see ``tests/worlds.py``."""
    return World
