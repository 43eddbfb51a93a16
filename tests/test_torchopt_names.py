"""TorchOpt's public names, ``torchopt_names.txt`` → each is there under ``compat``, but for those not there yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

NOT_YET = {
    "base UninitializedState",
    "diff.implicit ImplicitMetaGradientModule",
    "diff.implicit custom_root",
    "diff.zero_order ZeroOrderGradientModule",
    "diff.zero_order zero_order",
    "linalg cg",
    "linalg ns",
    "linalg ns_inv",
    "linear_solve solve_cg",
    "linear_solve solve_inv",
    "linear_solve solve_normal_cg",
    "nn ImplicitMetaGradientModule",
    "nn MetaGradientModule",
    "nn ZeroOrderGradientModule",
    "nn reparameterize",
    "nn reparametrize",
    "nn swap_state",
    "nn.stateless reparameterize",
    "nn.stateless reparametrize",
    "nn.stateless swap_state",
    "typing UninitializedState",
}

LOOK = """
import importlib, sys
from torchopt_dist import compat
compat.install()
for line in open(sys.argv[1]):
    module, name = line.split()
    try:
        getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        print(module.removeprefix("torchopt").removeprefix("."), name)
"""


def test_every_name_is_there_but_for_those_said_to_be_missing() -> None:
    found = subprocess.run(
        [sys.executable, "-c", LOOK, str(HERE / "torchopt_names.txt")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=HERE.parent,
    )
    assert set(found.stdout.splitlines()) == NOT_YET
