"""A program that has imported torch → its forkserver, which is a fork of it: launches start without a second import."""

from __future__ import annotations

import os
import secrets
import socket

from torchopt_dist.launching import _forkserver as forkserver

__all__ = ["have_forkserver"]


def have_forkserver() -> None:
    """Let all launches of this program ask that forkserver; called before there are threads."""
    address, program = f"\0todist-{secrets.token_hex(16)}", os.getpid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        if os.fork() == 0:
            os.setsid()
            with open(os.devnull, "r+") as null:
                os.dup2(null.fileno(), 0)
                os.dup2(null.fileno(), 1)
            forkserver.serve(listener.detach(), program)
            os._exit(0)
    forkserver._server = forkserver._Server(address, forkserver.read_on_import(os.environ))
