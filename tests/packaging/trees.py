"""A folder → a copy there of what an installation reads, nothing built, with one kernel or with several."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNEL, OP = "add_scaled", "add_scaled_"
"""A kernel that compiles in the shortest time: its folder here, which goes below csrc/, and the op in it."""
SCHEMA = 'library.def("add_scaled_(Tensor(a!)[] params, Tensor[] updates, float alpha) -> ()");'
TIMEOUT = 900
"""Seconds after which a build hangs; builds of one kernel take 10, on a busy machine ten times as long."""


def copy_tree(to: Path, cuda_kernels: tuple[str, ...] = ()) -> Path:
    """Copy the sources, with one small kernel in the place of all, for the CPU and for CUDA, and for CUDA these."""
    to.mkdir(exist_ok=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    (to / "examples").mkdir()
    shutil.copy(ROOT / "examples/few_shot.py", to / "examples")  # which goes into the package
    ignore = shutil.ignore_patterns("_C*", "_build_note.txt", "_cuda_note.txt", "__pycache__")
    for name in ("csrc", "torchopt_dist"):
        shutil.copytree(ROOT / name, to / name, ignore=ignore)
    for path in (*to.glob("csrc/*/cpu.cpp"), *to.glob("csrc/*/cuda.cu")):
        if not (path.suffix == ".cu" and path.parent.name in cuda_kernels):
            path.unlink()
    shutil.copytree(Path(__file__).parent / KERNEL, to / "csrc" / KERNEL)
    _replace(to / "csrc/schemas.cpp", ", library) {", f", library) {{\n  {SCHEMA}")
    _replace(to / "torchopt_dist/ops/library.py", "OPS = (", f"OPS = (\n    {OP!r},")
    return to


def copy_repository(to: Path) -> set[str]:
    """Copy the files that git knows, and no others; their names, relative to the repository.

    Raises:
        RuntimeError: this tree is no clone.
    """
    found = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"{ROOT} is no clone: {found.stderr.strip()}")
    files = {name for name in found.stdout.splitlines() if (ROOT / name).is_file()}
    for name in files:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name)
    return files


def _replace(path: Path, old: str, new: str) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{path} must have one {old!r}"
    path.write_text(source.replace(old, new), encoding="utf-8")
