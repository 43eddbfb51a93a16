"""``python -m tests.packaging.engine ray`` → ``build/engines/ray``: that engine, and this environment's packages."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PACKAGES = {"ray": ["ray[train]"], "dask": ["distributed"], "monarch": ["torchmonarch"]}


def main(engine: str) -> None:
    """Make the environment."""
    folder = Path("build/engines") / engine
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    Path(own, "of_the_tree.pth").write_text(f"{sysconfig.get_path('purelib')}\n{Path.cwd()}\n")
    subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES[engine]], check=True)


if __name__ == "__main__":
    main(sys.argv[1])
