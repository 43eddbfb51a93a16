"""The names of what this package needs → wheels for a machine with a GPU and no network, in one folder.

``make gpu-pack`` calls it, where there is a network. What such a machine has with its torch (torch itself, numpy,
triton, JAX and the like) is not packed; ``install.py`` takes from the folder what the machine lacks.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "gpu-pack"
THERE = {"torch", "numpy", "psutil", "cloudpickle"}
"""What comes with torch for CUDA or is installed beside it nearly everywhere: too large, or built for that machine."""
TESTS = (
    "pytest",
    "iniconfig",
    "pluggy",
    "pygments",
    "packaging",
    "pytest-timeout",
    "pytest-xdist",
    "execnet",
)
BUILD = ("ninja", "setuptools<82", "wheel")  # torch 2.11 refuses setuptools 82
NEEDED_BY_THESE = ("typing-extensions", "sortedcontainers")
LIMIT = 60 * 2**20
"""Bytes, with the tree."""
GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
"""Minor versions, in which manylinux tags are counted."""


def needed() -> list[str]:
    """The requirements of the package, of ZeroMQ's transport, of its tests on a GPU, and of its build."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    own = [*project["dependencies"], *project["optional-dependencies"]["zmq"]]
    return [
        *(one for one in own if re.split(r"[^\w-]", one)[0] not in THERE),
        *(*TESTS, "hypothesis>=6.100", *NEEDED_BY_THESE, *BUILD),
    ]


def size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tree_size() -> int:
    """Bytes of the files that travel: those git tracks, and those it neither tracks nor ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> None:
    """Download what is not in the folder yet, and say how large all is."""
    parser = argparse.ArgumentParser(prog="tests/gpu/pack.py", description=__doc__)
    parser.add_argument(
        "--python", default="3.12", help="the Python of the machine with the GPU (default: 3.12)"
    )
    parser.add_argument("--arch", default="x86_64", help="its processor (default: x86_64)")
    args = parser.parse_args()
    platforms = [f"manylinux_2_{minor}_{args.arch}" for minor in GLIBC]
    platforms += [f"{old}_{args.arch}" for old in ("manylinux2014", "manylinux2010", "manylinux1")]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", args.python, "-d", str(FOLDER)]
    command += [word for platform in platforms for word in ("--platform", platform)]
    done = subprocess.run([*command, *needed()], text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stderr}\npip could not download all of {', '.join(needed())}")
    for path in sorted(FOLDER.glob("*.whl")):
        print(f"packed {path.name}: {path.stat().st_size / 2**20:.2f} MiB")
    total = size(FOLDER) + tree_size()
    print(
        f"{FOLDER.relative_to(ROOT)}: {size(FOLDER) / 2**20:.1f} MiB, {total / 2**20:.1f} MiB with the tree"
    )
    if total > LIMIT:
        sys.exit(f"the pack with the tree must be at most {LIMIT / 2**20:g} MiB, has {total / 2**20:.1f}")


if __name__ == "__main__":
    main()
