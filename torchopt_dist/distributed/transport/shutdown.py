"""The RPC agent of this process → shut down: in order, together with the other ranks, or at once."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading

from torch.distributed import rpc

from torchopt_dist.distributed.membership.membership import Membership

__all__ = [
    "FINALLY_SECONDS",
    "GRACE_SECONDS",
    "SHUTDOWN_SECONDS",
    "exit_now",
    "shut_down_at_once",
    "shut_down_in_order",
]

SHUTDOWN_SECONDS = 30.0
"""How long a rank waits for replies when ``main`` has returned everywhere, and then for RPC's last handshake."""
GRACE_SECONDS = 0.4
"""How long a rank may take to end by itself after another one has failed."""
FINALLY_SECONDS = 5.0
"""How many more it has if it is running its ``finally`` blocks by then."""


def shut_down_in_order(membership: Membership) -> None:
    """Shut down RPC when no rank has an open request; alone, if one was lost, since RPC's own handshake needs all.

    Raises ``PeerFailedError`` if a rank failed meanwhile, and ``WorkerLostError`` if one was lost and the group does
    not go on without it, or one does not take part.
    """
    handshake = threading.Thread(target=rpc.shutdown, args=(True, SHUTDOWN_SECONDS), daemon=True)
    if not membership.lost:
        handshake.start()
        membership.wait_for(handshake, 2 * SHUTDOWN_SECONDS)
        # The store of the handshake is rank 0's: that rank ends only when all have read in it.
        membership.barrier(range(membership.world_size), "shut down", SHUTDOWN_SECONDS)
    if membership.lost:
        shut_down_at_once(None)


def shut_down_at_once(code: int | None) -> None:
    """Shut down RPC without waiting for other ranks; if its threads are left, the program ends by :func:`exit_now`."""
    shutdown = threading.Thread(target=rpc.shutdown, kwargs={"graceful": False}, daemon=True)
    shutdown.start()
    shutdown.join(GRACE_SECONDS)
    if shutdown.is_alive():
        atexit.register(exit_now, code)


def exit_now(code: int | None) -> None:
    """End the process at once: threads in C++ code would keep the interpreter from ending, or abort it.

    The exit code ``None`` means 0, or 1 if an uncaught exception ends the program.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(hasattr(sys, "last_value")) if code is None else code)
