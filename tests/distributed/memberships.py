"""The memberships of several ranks in one process, without any worker."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from torchopt_dist.distributed.membership.members import Member
from torchopt_dist.distributed.membership.membership import Membership
from torchopt_dist.distributed.rendezvous.sealed_store import SealedStore


class Lines:
    """The memberships of several ranks, all in this process."""

    def __init__(self, names, on_loss, **about):
        self.store = SealedStore(dist.HashStore())
        self.heard = [[] for _ in names]
        self.ends = [
            Membership(
                Member(rank, name, "program.py", "here", on_loss, **about),
                len(names),
                self.heard[rank].append,
            )
            for rank, name in enumerate(names)
        ]
        self.threads = ThreadPoolExecutor(2 * len(names))

    def join(self, ranks=None, timeout=5.0):
        return [
            self.threads.submit(self.ends[rank].join, self.store, "127.0.0.1", timeout)
            for rank in (range(len(self.ends)) if ranks is None else ranks)
        ]

    def barrier(self, rank, ranks, **options):
        return self.threads.submit(self.ends[rank].barrier, ranks, **options)

    def hub(self):
        return json.loads(self.store.told("membership")[0])

    def close(self):
        for end in reversed(self.ends):
            end.close()
        self.threads.shutdown()

    def cut(self, rank):
        """What the others see when a rank's process dies."""
        end = self.ends[rank]
        end._loop.call_soon_threadsafe(end._to_hub.link.writer.transport.abort)
