"""Names → machines, with a stand-in for each that cannot be reached."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from torchopt_dist.errors import InitializationError
from torchopt_dist.launch.at_once import at_once
from torchopt_dist.launch.cluster import Reach
from torchopt_dist.launch.machine import Machine

__all__ = ["reach_some"]


def reach_some(reach: Reach) -> Reach:
    """A way to reach machines that goes on without those that it does not reach.

    Args:
        reach: names of machines → these.
    """

    def reach_each(names: Sequence[str]) -> dict[str, Machine]:
        def one(name: str) -> Machine:
            try:
                return reach([name])[name]
            except InitializationError as error:
                return Unreached(name, str(error))

        return dict(zip(names, at_once(one, names), strict=True))

    return reach_each


class Unreached(Machine):
    """A machine that cannot be reached at the start, and perhaps later.

    Args:
        name: its name.
        why: what was tried, and how it failed.
    """

    here = False
    cores = gpus = 0

    def __init__(self, name: str, why: str) -> None:
        self.name, self._why = name, why
        self.env, self.path = {}, []

    def request_agent(self, env: Mapping[str, str]) -> socket.socket:
        """Raises the reason."""
        raise InitializationError(self._why)

    def open_meeting(self) -> socket.socket:
        """Raises the reason."""
        raise InitializationError(self._why)

    def kill_agent(self, pid: int) -> None:
        """There is none."""

    def why_lost(self) -> str:
        """The reason."""
        return self._why
