"""``orphan_program.py FOLDER BUSY``: an agent, and its worker, which is busy for a minute and notes what ends it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torchopt_dist as todist
from tests.waits import say


@todist.auto_init_rpc()
def main(folder: Path, busy: str) -> None:
    deadline = time.monotonic() + 60
    try:
        say(folder / "busy", str(os.getpid()))
        while time.monotonic() < deadline:
            if busy == "in C":
                time.sleep(60)
    except todist.errors.AgentFailedError as error:
        say(folder / "end", f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    worker = os.fork()
    if worker:
        os.waitpid(worker, 0)
    else:
        main(Path(sys.argv[1]), sys.argv[2])
