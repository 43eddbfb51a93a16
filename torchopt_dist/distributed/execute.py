"""``Payload`` → its values, the tasks run one after another under the caller's state."""

from __future__ import annotations

from typing import Any

from torchopt_dist.distributed.payload import Payload

__all__ = ["run"]


def run(payload: Payload) -> list[Any]:
    """Call the payload's function for each task; raises what a task raises, and the tasks after it do not run."""
    with payload.state.applied():
        return [payload.function(*args, **kwargs) for args, kwargs in payload.tasks]
