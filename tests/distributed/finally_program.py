"""``finally_program.py FOLDER``: rank 1 fails while rank 0 is busy, and rank 0 writes a file before it ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torchopt_dist as todist
from tests.waits import say, watch


def write_slowly(path):
    """Write a file in 1 s, part by part."""
    with path.open("w") as file:
        for part in range(10):
            print(part, file=file, flush=True)
            time.sleep(0.1)
        print("whole", file=file)


def is_whole(path):
    return path.exists() and path.read_text().endswith("9\nwhole\n")


@todist.auto_init_rpc()
def main(folder):
    if todist.get_rank() == 1:
        assert watch(folder / "busy")
        raise ValueError("the root of it")
    if todist.get_rank() == 0:
        try:
            say(folder / "busy")
            while True:
                pass
        finally:
            write_slowly(folder / "written")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
