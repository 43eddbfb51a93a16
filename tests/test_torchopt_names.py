"""TorchOpt's public names, ``torchopt_names.txt`` → each is there under ``compat``, imported or as an attribute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import python

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
    found = python("-c", LOOK, HERE / "torchopt_names.txt", how, cwd=HERE.parent, timeout=250)
    assert found.returncode == 0, found.stderr
    assert set(found.stdout.splitlines()) == set()
