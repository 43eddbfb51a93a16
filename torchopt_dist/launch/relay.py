"""Standard input and output, which SSH connects to the launcher ⇄ agents on this machine.

The launcher starts this program on each other host. It stands there for the launcher: it has imported torch, forks the
forkserver, and carries everything between the launcher and the agents. When the launcher ends, when it is not heard of
any more, or when this process ends, the agents end what they have started.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import platform
import socket
import sys
import threading
from typing import Any

import cloudpickle
import setproctitle
import torch

from torchopt_dist.launch import meeting
from torchopt_dist.launch.ferry import Ferry
from torchopt_dist.launch.forkserver import PRELOAD, fork_server, request_agent
from torchopt_dist.launch.machine import allow_many_files, kill
from torchopt_dist.launch.messages import KillAgent, OpenAgent, pair

__all__ = ["MARK", "PROGRAM", "main", "versions"]

MARK = b"\0todist\0"
"""Stands before the greeting; what a shell's start-up files print comes before."""
PROGRAM = (
    "import json,os,sys;"
    "start=json.loads(open(0,'rb',0,closefd=False).readline());"
    "os.environ.update(start['env']);"
    "sys.path+=[p for p in start['path'] if p not in sys.path];"
    "from torchopt_dist.launch.relay import main;"
    "main(start)"
)
"""What Python is given to run. Variables and paths come by standard input: a command line is for all to see."""


def versions() -> dict[str, str]:
    """What must be the same on all hosts, since they send each other pickles and call each other's kernels."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
        "torchopt_dist": str(importlib.import_module("torchopt_dist").__version__),
        "cloudpickle": cloudpickle.__version__,
    }


def main(start: dict[str, Any]) -> None:
    """Greet the launcher, and carry until the end.

    Args:
        start: ``patience`` and ``folder`` of the launcher, beside what :data:`PROGRAM` has used.
    """
    into, out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)  # whatever is printed here is no frame
    setproctitle.setproctitle(f"todist: relay of {start['launcher']}")
    for name in PRELOAD:
        importlib.import_module(name)
    allow_many_files()
    fork_server(not_for_it=(into, out))
    connection = os.environ.get("SSH_CONNECTION", "").split()
    greeting = {
        "versions": versions(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": torch.cuda.device_count(),
        "env": dict(os.environ),
        "path": sys.path,
        "has_folder": os.path.isdir(start["folder"]),
        "launcher_address": connection[0] if len(connection) == 4 else "",
        "address": connection[2] if len(connection) == 4 else "",
    }
    with os.fdopen(os.dup(out), "wb") as file:
        file.write(MARK + json.dumps(greeting).encode() + b"\n")
    Ferry(into, out, odd=False, patience=start["patience"], opener=_open).run()
    os._exit(0)  # agents see that, and end


def _open(payload: bytes) -> socket.socket:
    wanted = pickle.loads(payload)
    if isinstance(wanted, OpenAgent):
        return request_agent(wanted.env)
    ours, theirs = pair()
    if isinstance(wanted, KillAgent):
        kill(wanted.pid)
        theirs.close()
        return ours
    threading.Thread(target=meeting.serve, args=(theirs,), name="todist meeting", daemon=True).start()
    return ours
