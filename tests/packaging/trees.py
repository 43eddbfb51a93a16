"""A folder → a copy there of what an installation reads, nothing built, with one kernel or with several."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNEL, OP = "add_scaled", "add_scaled_"
"""The folder below csrc/ that compiles in the shortest time, and the op in it."""
TIMEOUT = 900
"""Seconds after which a build hangs; builds of one kernel take 10, on a busy machine ten times as long."""


def copy_tree(to: Path, cuda_kernels: tuple[str, ...] = ()) -> Path:
    """Copy the sources, but of the kernels one alone, for the CPU and for CUDA, and for CUDA these others."""
    to.mkdir(exist_ok=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    ignore = shutil.ignore_patterns("_C*", "_build_note.txt", "_cuda_note.txt", "__pycache__")
    for name in ("csrc", "torchopt_dist"):
        shutil.copytree(ROOT / name, to / name, ignore=ignore)
    for path in (*to.glob("csrc/*/cpu.cpp"), *to.glob("csrc/*/cuda.cu")):
        if path.parent.name != KERNEL and not (path.suffix == ".cu" and path.parent.name in cuda_kernels):
            path.unlink()
    return to
