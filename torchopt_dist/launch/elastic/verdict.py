"""What failed in a world, and which hosts were lost → whether its workers start again, or the error that is the end.

A failure that may follow from a host's loss waits until that is known. It is a restart, which counts, or the end only
if no host was lost.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchopt_dist.errors import AgentFailedError
from torchopt_dist.launch.elastic.records import AGAIN, END, Failed, WorkerFailure, verdict_key
from torchopt_dist.launch.elastic.store import RendezvousStore
from torchopt_dist.launch.failures import EXIT_SECONDS, Failures, death, halt, revive
from torchopt_dist.launch.plan import Plan

__all__ = ["Verdicts"]

log = logging.getLogger("torchopt_dist.launch")

NOTICE_SECONDS, DEATH_SECONDS = 2.0, 1.0
"""How long a failure waits for the loss of a host, or another failure, that may be behind it: a broken connection for
so much longer than it takes to miss a silent host, and the end of a worker that said nothing."""


@dataclass
class _Trouble:
    """The failures in one world.

    Attributes:
        until: when it is to be judged, if the loss of a host does not explain it before.
        text: the likeliest cause.
        hosts: on which hosts.
        verdict: ``AGAIN`` or ``END``, once there is one.
    """

    until: float
    text: str
    hosts: set[str] = field(default_factory=set)
    verdict: str = ""


class Verdicts:
    """The failures of one launch, and what follows from them.

    Args:
        store: where the hosts wait for the verdicts.
        plan: what the launch is to do.
    """

    def __init__(self, store: RendezvousStore, plan: Plan) -> None:
        self._store, self._logs = store, plan.logs
        self._max_restarts, self._stop_seconds = plan.max_restarts, plan.times.stop
        self._echo_seconds = plan.times.agent + NOTICE_SECONDS
        self._restarts = 0
        self._losses: set[int] = set()
        """Worlds of which a host was missed."""
        self._troubles: dict[int, _Trouble] = {}
        self._ends: dict[str, Failed] = {}
        self._ending: _Trouble | None = None

    @property
    def is_end(self) -> bool:
        """Whether the launch is about to end with an error."""
        return self._ending is not None

    def take_loss(self, world: int) -> None:
        """A host of a world is lost, or missed by another."""
        self._losses.add(world)

    def take_failure(self, name: str, news: Mapping[str, Any]) -> None:
        """Workers of a host have failed, which waits for the verdict."""
        now = time.monotonic()
        wait = (
            self._echo_seconds
            if news["echo"] and news["raised"]
            else 0.0
            if news["raised"]
            else DEATH_SECONDS
        )
        text = f"{news['text']} (on {name})"
        trouble = self._troubles.setdefault(news["world"], _Trouble(now + wait, text))
        trouble.hosts.add(name)
        if not trouble.verdict and now + wait < trouble.until:
            trouble.until, trouble.text = now + wait, text

    def take_end(self, name: str, failed: Failed) -> None:
        """A host has ended, and says how its workers failed."""
        self._ends[name] = failed

    def judge(self, now: float) -> None:
        """Tell the hosts what is clear by now."""
        for world, trouble in self._troubles.items():
            if trouble.verdict:
                continue
            if world in self._losses:
                trouble.verdict = AGAIN
            elif now < trouble.until:
                continue
            elif self._restarts < self._max_restarts:
                self._restarts += 1
                trouble.verdict = AGAIN
                log.warning("restart %d of %d: %s", self._restarts, self._max_restarts, trouble.text)
            else:
                trouble.verdict = END
                trouble.until = now + self._stop_seconds + self._echo_seconds
                self._ending = trouble
            self._store.set(verdict_key(world), trouble.verdict)

    def raise_if_end(self, now: float) -> None:
        """Raise the cause, when all hosts on which workers failed have said how, or have had the time to."""
        ending = self._ending
        if ending is None or (now < ending.until and not ending.hosts <= self._ends.keys()):
            return
        if not self._ends:
            raise AgentFailedError(f"workers failed, and the hosts that knew how were lost: {ending.text}")
        failures = Failures()
        for name, failed in self._ends.items():
            for failure in failed.failures:
                failures.add(*self._error(name, failure))
        failures.raise_cause(all_known=True)

    def _error(self, name: str, failure: WorkerFailure) -> tuple[Exception, float | None]:
        if failure.told is not None:
            return revive(*failure.told, f"rank {failure.rank} on {name}"), None
        log_lines = self._logs.tail(failure.rank)
        if failure.halted:
            return halt(failure.rank, name, signal.SIGSTOP, failure.halted, log_lines), None
        wait = EXIT_SECONDS if failure.status >= 0 else 0.0
        return death(failure.rank, name, failure.status, log_lines, asked=failure.asked), wait
