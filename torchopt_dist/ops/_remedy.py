"""How this package was installed → the command that builds its kernels."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import shlex
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

__all__ = ["remedy"]

NAME = "torchopt_dist"


def remedy(package: Path) -> str:
    """The command, for a shell.

    Args:
        package: the folder of the package.

    Returns:
        A ``pip install`` of what this installation was made from, which pip has noted beside it (PEP 610); for a source
        tree that is not installed, a build in place.
    """
    tree = package.parent
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.distribution(NAME)
        source = _source(installed)
        if source == ["-e", str(tree)]:
            return f"pip install --no-deps {shlex.join(source)}"
        if Path(str(installed.locate_file(NAME))).resolve() == package:
            return f"pip install --no-deps --force-reinstall --no-cache-dir {shlex.join(source)}"
    return f"cd {shlex.quote(str(tree))} && python setup.py build_ext --inplace"


def _source(installed: importlib.metadata.Distribution) -> list[str]:
    """The source from which pip installed the package."""
    source = json.loads(installed.read_text("direct_url.json") or "{}")
    url = str(source.get("url", ""))
    if not url or url.endswith(".whl"):  # a wheel stays as it is: the kernels are built from the sources
        return ["--no-binary", NAME, f"{NAME}=={installed.version}"]
    if "dir_info" in source:
        path = url2pathname(urlsplit(url).path)
        return ["-e", path] if source["dir_info"].get("editable") else [path]
    if "vcs_info" in source:
        url = f"{source['vcs_info']['vcs']}+{url}@{source['vcs_info']['commit_id']}"
    return [f"{NAME} @ {url}"]
