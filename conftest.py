from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tests.worlds import World


@pytest.fixture
def world() -> type[World]:
    """``world(n)``: n worker processes; see ``tests/worlds.py``."""
    return World
