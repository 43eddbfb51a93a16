"""TorchOpt's public names, ``torchopt_names.txt`` → each is there under ``compat``, imported or as an attribute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

LOOK = """
import functools, importlib, sys
from torchopt_dist import compat
compat.install()
import torchopt
for line in open(sys.argv[1]):
    module, name = line.split()
    try:
        if sys.argv[2] == "imported":
            getattr(importlib.import_module(module), name)
        else:
            functools.reduce(getattr, [*module.split(".")[1:], name], torchopt)
    except (ImportError, AttributeError):
        print(module.removeprefix("torchopt").removeprefix("."), name)
"""


@pytest.mark.parametrize("how", ["imported", "an attribute"])
def test_every_name_is_there(how: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", LOOK, str(HERE / "torchopt_names.txt"), how],
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
        cwd=HERE.parent,
    )
    assert set(found.stdout.splitlines()) == set()
