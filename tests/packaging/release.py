"""The tree → ``dist/``: a wheel and a source distribution, both tried outside the tree with several versions of torch.

``python -m tests.packaging.release [--dist DIST] [TORCH…]`` is what ``make wheel`` runs. A version is a number or
``newest``. For each an environment is made in a temporary folder, and removed at the end. There the wheel is installed
and tried, and then the source distribution, which builds the kernels anew.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

from tests.packaging.stable import assert_stable
from tests.packaging.trees import ROOT, copy_repository

NEWEST = "newest"
TOOLS = ("pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.100", "setuptools>=77,<82")
SMOKE = (
    "tests/ops/test_adam.py",
    "tests/ops/test_library.py",
    "tests/optim/test_sgd.py",
    "tests/diff/test_in_place.py",
    "tests/distributed/test_map.py",
    "tests/distributed/calls/test_awaited.py",
    "tests/distributed/test_short_requests.py",
    "tests/torch_private",
    "tests/formulas/test_normalization.py",
    "tests/core/test_random_turns.py",
    "tests/formulas/test_normalization_nodes.py",
    "tests/test_command.py",
)
"""Tests of every room: kernels, optimizers, inner loops, calls between processes, torch's private names and faults."""


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints; where it fails, all that it printed, and the end."""
    print("+", *command, flush=True)
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "REQUIRE_EXT": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}\nFAILED with exit code {done.returncode}: {command[0]}")
    return done.stdout


def build(dist: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution, of the files that git knows; the wheel is made of the other."""
    with tempfile.TemporaryDirectory() as name:
        tree, made = Path(name, "tree"), Path(name, "dist")
        copy_repository(tree)
        run(sys.executable, "setup.py", "-q", "sdist", "-d", made, cwd=tree)
        (sdist,) = made.glob("*.tar.gz")
        pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps")
        run(*pip, "--wheel-dir", made, sdist, cwd=made)
        (wheel,) = made.glob("*.whl")
        if "-abi3-" not in wheel.name:
            sys.exit(f"the wheel is not for the stable ABI of Python: {wheel.name}")
        zipfile.ZipFile(wheel).extract("torchopt_dist/_C.abi3.so", name)
        assert_stable(Path(name, "torchopt_dist/_C.abi3.so"))
        dist.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, dist)), Path(shutil.copy(sdist, dist))


def try_out(torch: str, packages: tuple[Path, Path]) -> list[str]:
    """Install torch and one package after the other into a fresh environment, and run the smoke tests with each."""
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv/bin/python"
        pip = (python, "-m", "pip", "install", "-q")
        run(*pip, "torch" if torch == NEWEST else f"torch=={torch}", *TOOLS, cwd=folder)
        outside = folder / "outside"
        outside.mkdir()
        shutil.copytree(ROOT / "tests", outside / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        for needed in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / needed, outside)
        for package in packages:
            started = time.monotonic()
            run(python, "-m", "pip", "uninstall", "-q", "-y", "torchopt_dist", cwd=folder)
            run(*pip, f"torchopt_dist[zmq] @ {package.as_uri()}", cwd=folder)
            report = json.loads(run(folder / "venv/bin/torchopt-dist", "report", "--json", cwd=outside))
            check(report, folder)
            print(run(folder / "venv/bin/torchopt-dist", "check", cwd=outside), flush=True)
            run(folder / "venv/bin/torchopt-dist", "demo", "--show", cwd=outside)
            print(run(folder / "venv/bin/torchopt-dist", "bench", "--rounds", "5", cwd=outside), flush=True)
            passed = run(
                python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *SMOKE, cwd=outside
            )
            passed = passed.strip().splitlines()[-1]
            took = time.monotonic() - started
            lines.append(
                f"{package.name} with torch {report['versions']['torch']}: {passed}; {took:.0f} s in all"
            )
            print(lines[-1], flush=True)
    return lines


def check(report: dict[str, dict[str, object]], folder: Path) -> None:
    """The package is the installed one, and has all kernels for the CPU."""
    where, kernels = report["versions"]["installed in"], report["kernels"]["cpu"]
    if not Path(str(where)).is_relative_to(folder / "venv"):
        sys.exit(f"not the installed package was tried, but that in {where}")
    if not isinstance(kernels, dict) or not kernels or set(kernels.values()) != {"yes"}:
        sys.exit(f"kernels are missing: {kernels}")


def main() -> None:
    """Build, try, and say what was tried."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("torches", nargs="*", metavar="TORCH", help="versions of torch; none: build only")
    parser.add_argument(
        "--dist", type=Path, default=ROOT / "dist", help="where both are put (default: dist/)"
    )
    options = parser.parse_args()
    packages = build(options.dist.resolve())
    lines = [line for torch in options.torches for line in try_out(torch, packages)]
    print("", *packages, *lines, sep="\n")


if __name__ == "__main__":
    main()
