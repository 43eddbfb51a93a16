from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seeds.torchrun import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "maml_parallel_inner.py"
