"""Transports: how a payload gets to a worker and its outcome back. One file each; ``base.py`` is what they share."""

from torchopt_dist.distributed.transport.base import Transport
from torchopt_dist.distributed.transport.local import LocalTransport
from torchopt_dist.distributed.transport.rpc import RPCTransport

__all__ = ["LocalTransport", "RPCTransport", "Transport"]
