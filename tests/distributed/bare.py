"""``Bare(n).run(fn)``: like ``world(n)``, but ``fn`` runs outside any RPC group, and makes its own."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

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
