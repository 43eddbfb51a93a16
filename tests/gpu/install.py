"""A pack of wheels and what this Python has → what it lacks installed into a folder; what was found is printed.

Called by ``run.sh``, on a machine without a network: ``python install.py PACK FOLDER``.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

SHOWN = ("torch", "numpy", "psutil", "cloudpickle", "triton", "jax", "optax")
"""What is not packed, and is told: there or not."""
NEWER: dict[str, tuple[int, ...]] = {"pytest": (8, 3), "hypothesis": (6, 100)}
"""The oldest versions that do."""


def version_of(name: str) -> str | None:
    """The version that is installed, or ``None``."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_there(name: str) -> bool:
    """Whether it need not be taken from the pack."""
    version = version_of(name)
    if version is None:
        return False
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return numbers < (82,) if name == "setuptools" else numbers >= NEWER.get(name, ())


def main(pack: Path, folder: Path) -> None:
    """Install what is missing."""
    found = [f"{name} {version_of(name) or 'is missing'}" for name in SHOWN]
    print("found: Python", sys.version.split()[0] + ",", ", ".join(found), flush=True)
    wheels = {path.name.split("-")[0].replace("_", "-").lower(): path for path in sorted(pack.glob("*.whl"))}
    there = [name for name in wheels if is_there(name)]
    taken = [name for name in wheels if name not in there]
    print("there already:", ", ".join(f"{name} {version_of(name)}" for name in there) or "none of the pack")
    print(
        "taken from the pack:",
        ", ".join(wheels[name].name.rsplit("-", 3)[0] for name in taken) or "nothing",
        flush=True,
    )
    if taken:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        command += ["--no-cache-dir", "--upgrade", "--target", str(folder)]
        subprocess.run([*command, *(str(wheels[name]) for name in taken)], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
