"""Two workers on this machine."""

from __future__ import annotations

import os

from torchopt_dist.launch import Launcher

ON_TWO = Launcher(nproc_per_host=2, handlers=[])


def my_rank():
    return int(os.environ["RANK"])
