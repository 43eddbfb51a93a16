"""``Bare(n).run(fn)``: like ``world(n)``, but ``fn`` runs outside any RPC group, and makes its own."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle

from tests import worlds


class Bare(worlds.World):
    """n worker processes with torchrun's variables and nothing else; ``sys.exit`` gives the exit code."""

    def work(self) -> Callable[..., None]:
        """What each process does."""
        return _work


def _work(env: dict[str, str], path: list[str], task: bytes, sender: Connection) -> None:
    os.environ.update(env)
    sys.path[:] = path
    import torch

    torch.set_num_threads(1)
    function, args, _ = cloudpickle.loads(task)
    error: BaseException | None = None
    try:
        answer = (function(*args), None, "")
    except BaseException as raised:
        error, answer = raised, (None, raised, traceback.format_exc())
    sender.send_bytes(cloudpickle.dumps(answer))
    sender.close()
    if isinstance(error, SystemExit):
        raise error
    if error is not None:
        sys.exit(1)


def watch(path: Path, seconds: float = 20.0) -> bool:
    """Wait until a file is there: whether it came within the time."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def say(path: Path, text: str = "") -> None:
    """Make a file in one step, so that who watches for it finds it whole."""
    draft = path.with_suffix(f".draft{os.getpid()}")
    draft.write_text(text)
    draft.rename(path)


def soon(seconds: float) -> float:
    """The seconds, or more where others want the cores as well."""
    return seconds * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))
