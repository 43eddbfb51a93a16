"""A kernel library → nothing, or an error that names what it uses beside the stable ABI of torch 2.10."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path


def assert_stable(library: Path) -> None:
    """No symbol of torch but those of the C shim; none newer than torch 2.10, if torch-abi-audit is there."""
    if shutil.which("nm"):
        listing = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        )
        symbols = [line.split()[-1] for line in listing.stdout.splitlines()]
        assert [symbol for symbol in symbols if symbol.startswith("aoti_torch_")]
        assert not [symbol for symbol in symbols if re.match(r"_ZN?K?(2at|3c10|5torch|5caffe)|Py", symbol)]
    if shutil.which("torch-abi-audit", path=str(Path(sys.executable).parent)):
        audit = Path(sys.executable).with_name("torch-abi-audit")
        report = subprocess.run([audit, "--json", library], capture_output=True, text=True, check=True)
        (found,) = json.loads(report.stdout)["bundled_libs"]
        assert found["torch"]["stable"], found["torch"]["unstable_symbols"]
        assert found["torch"]["min_torch_version"] == "2.10.0", found["torch"]["version_defining_symbols"]
