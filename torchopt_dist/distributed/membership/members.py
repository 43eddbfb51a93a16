"""A worker and the way it failed → the error for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from torchopt_dist.distributed.membership.link import DIED
from torchopt_dist.errors import InitializationError, PeerFailedError, WorkerLostError

__all__ = ["Failure", "Member", "OnLoss", "check_members"]

OnLoss: TypeAlias = Literal["end", "continue", "replace"]

TEXTS = MappingProxyType(
    {
        "died": "died: the process of {who} ended without a report",
        "unreachable": "was lost: the machine of {who} gives no answer",
        "stopped": "was stopped: the process of {who} did not go on, and was killed",
    }
)


@dataclass(frozen=True)
class Member:
    """The data that a worker sends to the others.

    Attributes:
        name: unique among the workers.
        program: the path of its ``__main__``; on workers with the same path ``__main__.f`` is the same function.
        host: the name of its machine.
        on_loss: what it does when another worker dies; the same on all workers.
        pid: the id of its process; 0 if it is not to be watched.
        process_table: see :func:`process_table`.
        link: the address for watching the network to it; see :class:`DirectLinks`.
        incarnation: how often the rank has been given to a new process before this one.
    """

    rank: int
    name: str
    program: str
    host: str = ""
    on_loss: OnLoss = "end"
    pid: int = 0
    process_table: str = ""
    link: str = ""
    incarnation: int = 0


@dataclass(frozen=True)
class Failure:
    """The failure of a rank.

    Attributes:
        report: its traceback; empty if the rank was lost without sending one.
        summary: the error in one line.
        cause: why it was lost; see :class:`WorkerLostError`.
        worker: its name.
        host: the name of its machine.
        out_of_memory: whether the kernel has killed processes there for lack of memory.
    """

    rank: int
    report: str
    summary: str = ""
    cause: str = DIED
    worker: str = ""
    host: str = ""
    out_of_memory: bool = False

    def error(self) -> PeerFailedError | WorkerLostError:
        """The exception to raise on the other ranks."""
        if self.report:
            error = PeerFailedError(f"rank {self.rank} failed:\n\n{self.report.rstrip()}")
            error.rank, error.summary = self.rank, f"rank {self.rank} failed: {self.summary}"
            return error
        who = f"{self.worker or 'the rank'} on {self.host}" if self.host else self.worker or "the rank"
        why = "; the kernel has killed processes there for lack of memory" if self.out_of_memory else ""
        return WorkerLostError(
            f"rank {self.rank} {TEXTS[self.cause].format(who=who)}{why}",
            rank=self.rank,
            worker=self.worker,
            host=self.host,
            cause=self.cause,
        )


def check_members(members: Sequence[Member], me: Member) -> None:
    """Raise ``InitializationError`` if two have one name, or differ in ``on_loss``, or ``me`` replaces another name."""
    if members[me.rank].name != me.name:
        raise InitializationError(
            f"worker_name_format must give a new process of rank {me.rank} the name that the rank has, "
            f"{members[me.rank].name!r}, got {me.name!r}"
        )
    names = [member.name for member in members]
    for rank, name in enumerate(names):
        if name in names[:rank]:
            raise InitializationError(
                f"worker_name_format gave ranks {names.index(name)} and {rank} the same name {name!r}; "
                "names must be unique"
            )
    for member in members:
        if member.on_loss != me.on_loss:
            raise InitializationError(
                f"on_loss must be the same on all workers, got {me.on_loss!r} on {me.name} "
                f"and {member.on_loss!r} on {member.name}"
            )
