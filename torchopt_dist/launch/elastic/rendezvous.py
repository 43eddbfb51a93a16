"""Hosts → the world that they form, by torch's rendezvous.

Added to torch's is that a host that has gone is noticed, and not only one that comes.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Self

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from torchopt_dist.launch.elastic.records import Place

__all__ = ["Rendezvous"]

HEARTBEAT_SECONDS = 1
"""Between signs of life of a host."""
LAST_CALL_SECONDS = 2
"""For further hosts to come when there are enough."""
FOREVER = timedelta(days=365)


class Rendezvous(DynamicRendezvousHandler):
    """Torch's, which also tells when a host of the world has gone.

    Attributes:
        world_size: how many hosts the world has.
        may_leave: asked when hosts have come or gone: whether this one may leave the world for a new one.
    """

    world_size = 0
    may_leave: Callable[[], bool]

    @classmethod
    def of(cls, place: Place, store: dist.Store, address: str, may_leave: Callable[[], bool]) -> Self:
        """The one of a host.

        Args:
            place: which host this is.
            store: the launcher's.
            address: the host's.
            may_leave: see above.
        """
        made = cls.from_backend(
            place.run_id,
            store,
            C10dRendezvousBackend(store, place.run_id),
            place.min_hosts,
            place.max_hosts,
            address,
            RendezvousTimeout(FOREVER, timedelta(seconds=LAST_CALL_SECONDS), FOREVER, FOREVER),
            HEARTBEAT_SECONDS,
            math.ceil(place.agent_timeout / HEARTBEAT_SECONDS),  # which may be missed
        )
        made.may_leave = may_leave
        return made

    @property
    def use_agent_store(self) -> bool:
        """Workers find a store at MASTER_PORT, and need not open one."""
        return True

    @property
    def world(self) -> int:
        """The number of the world, from 0."""
        return int(self._state_holder.state.round)

    def next_rendezvous(self) -> RendezvousInfo:
        """Torch's, without the store that it would keep from world to world."""
        with _variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"):
            info = super().next_rendezvous()
        self.world_size = info.world_size
        return info

    def missing(self) -> int:
        """How many hosts of the world have gone."""
        self.is_closed()  # reads the state
        return max(0, self.world_size - len(self._state_holder.state.participants))

    def num_nodes_waiting(self) -> int:
        """How many hosts have come or gone; none if the world's work is done."""
        changed = super().num_nodes_waiting() + self.missing()
        return changed if changed and self.may_leave() else 0


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
