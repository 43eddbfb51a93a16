"""Not the documents': several programs in one start of torchrun, as `python -m torchopt_dist.compat` runs each."""

import sys
from pathlib import Path

from torchopt_dist import compat

here = Path(__file__).parent
out, *programs = sys.argv[1:]
for program in programs:
    for dtype in ("float32", "float64"):
        compat.run_script(str(here / f"{program}.py"), ["--out", out, "--dtype", dtype])
