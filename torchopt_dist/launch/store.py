"""A port → the key-value store at which the workers of a launch meet, on the address that only this machine reaches."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from torchopt_dist.errors import InitializationError

__all__ = ["ADDRESS", "open_store"]

ADDRESS = "127.0.0.1"
SECONDS = 60


def open_store(port: int) -> dist.TCPStore:
    """Open a store. The launcher holds it while the workers live, so that nobody else can get its port.

    Args:
        port: where it listens; 0 means any free port.

    Raises:
        InitializationError: the port is taken.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((ADDRESS, port))
            listener.listen(1024)
        except OSError as error:
            raise InitializationError(
                f"`master_port` must be free on {ADDRESS}, or 0 for any free port, got {port}: {error.strerror}"
            ) from error
        return dist.TCPStore(
            ADDRESS,
            listener.getsockname()[1],
            None,
            is_master=True,
            timeout=timedelta(seconds=SECONDS),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
