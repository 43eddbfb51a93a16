"""One host of an elastic launch → torch's own elastic agent, which starts workers again when the world changes.

This runs in a worker of ours, one a host. Torch's rendezvous says who takes part, and torch's agent starts and stops
the workers. Added are: one store a world, so that nothing of an earlier one is read; and the launcher is asked whether
a failure is a restart, since it alone knows of all hosts.
"""

from __future__ import annotations

import math
import os
import signal
import time
from datetime import timedelta
from typing import Any

import setproctitle
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from torchopt_dist._network import local_address
from torchopt_dist.launch.elastic.output import Output
from torchopt_dist.launch.elastic.records import (
    AGAIN,
    GO,
    HERE,
    STORE_SECONDS,
    Done,
    Failed,
    Place,
    WorkerFailure,
    verdict_key,
)
from torchopt_dist.launch.elastic.rendezvous import Rendezvous
from torchopt_dist.launch.elastic.watch import Watch
from torchopt_dist.launch.elastic.worker import State, Work
from torchopt_dist.launch.meeting import listen, store_at

__all__ = ["serve"]

MONITOR_SECONDS = 0.1
LONGEST_TEXT = 1000
"""Characters of a failure in a log."""


def serve(place: Place, task: bytes) -> Done | Failed:
    """Take part in the launch until a world of this host has returned, or has failed for good.

    Args:
        place: which host this is.
        task: the packed function and its arguments.
    """
    if place.workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    setproctitle.setproctitle(f"todist: elastic agent of {place.name}")
    store = dist.TCPStore(
        place.address, place.port, None, wait_for_workers=False, timeout=timedelta(seconds=STORE_SECONDS)
    )
    with Output(place) as output:
        output.tell(news="here")
        while not store.check([GO]):
            time.sleep(MONITOR_SECONDS / 2)
        agent = Agent(place, store, Work(task, place.workers, output), output)
        try:
            result = agent.run()
        except SignalException as ended:
            raise SystemExit(128 + ended.sigval) from None
    return agent.failed or agent.done(result)


class Agent(LocalElasticAgent):
    """Torch's, with a store for each world, a judge of failures, and an end that all hosts agree on.

    Workers say what came of them, and then end as a program does; torch would take their answers, and then wait for
    their ends without a bound.

    Args:
        place: which host this is.
        store: the launcher's.
        work: what the workers do.
        output: where news go.

    Attributes:
        failed: what this host ends with, if the launch has failed for good.
    """

    def __init__(self, place: Place, store: dist.Store, work: Work, output: Output) -> None:
        self._place, self._launcher, self._work, self._output = place, store, work, output
        self._address = local_address(place.address)
        self._master: dist.Store | None = None
        self._result: RunResult | None = None
        self._world = self._rank = self._size = 0
        self._meeting: dist.Store = store
        self.failed: Failed | None = None
        self._handler = Rendezvous.of(place, store, self._address, self._leave)
        spec = WorkerSpec(
            role="default",
            local_world_size=place.workers,
            rdzv_handler=self._handler,
            entrypoint=work.run,
            max_restarts=place.max_restarts,
            monitor_interval=MONITOR_SECONDS,
            local_addr=self._address,
        )
        super().__init__(
            spec,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
            start_method="fork",
            exit_barrier_timeout=place.agent_timeout,
        )

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                super()._rendezvous(worker_group)
                group: Any = worker_group  # whose attributes torch declares as `None`
                self._meeting, self._rank, self._size = group.store, group.group_rank, group.group_world_size
                if self._rank == 0:
                    if self._place.here and self._launcher.check([HERE]):
                        self._address = self._launcher.get(HERE).decode()  # as other machines know this one
                    self._master = store_at(listen(self._address, 0))
                    self._meeting.set("todist/master", f"{self._master.port} {self._address}")
                port, group.master_addr = self._meeting.get("todist/master").decode().split(" ")
                group.master_port = int(port)
                return
            except dist.DistError:  # a host was lost before it had told its rank: meet again
                continue

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # What torch calls the number of restarts is that of earlier worlds.
        self._world = self._handler.world
        self._remaining_restarts = worker_group.spec.max_restarts - self._world
        self._result = None
        self._told_late = self._told_returned = False
        self._all_returned_at: float | None = None
        self._work.forget()
        self._output.tell(
            news="world",
            world=self._world,
            size=self._size,
            workers=worker_group.workers[0].world_size,
        )
        pids = super()._start_workers(worker_group)
        self._watch = Watch(self._place, self._work, pids)
        return pids

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._pcontext is not None:  # `_shutdown` of torch 2.11 knows no time-out
            self._pcontext.close(signal.SIGTERM, self._place.stop_timeout)  # type: ignore[arg-type]
        self._shutdown()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = self._result or self._see(worker_group)
        if result.state == WorkerState.HEALTHY:
            return result
        if result.state == WorkerState.SUCCEEDED:
            if self._result is None:
                self._result = result
                self._meeting.add("todist/done", 1)
            if self._meeting.add("todist/done", 0) == self._size:
                self._end("done")
            return result if self._ended() == b"done" else RunResult(state=WorkerState.HEALTHY)
        self._judge(worker_group, result)
        return result

    def _see(self, worker_group: WorkerGroup) -> RunResult:
        """How the workers are: what they say counts, and torch is asked for those that end without a word."""
        ended = self._watch.ended()
        result = super()._monitor_workers(worker_group)
        states = self._work.states
        if all(state == State.RETURNED for state in states):
            return self._see_them_end(worker_group, ended, result)
        if result.state != WorkerState.HEALTHY:
            return result
        silent = {  # torch does not mind an exit with 0, nor sees an end while a child holds a pipe of the worker's
            worker.global_rank: ProcessFailure(
                worker.local_rank, worker.id, ended[worker.local_rank], os.devnull
            )
            for worker in worker_group.workers
            if worker.local_rank in ended and states[worker.local_rank] < State.RETURNED
        }
        if silent or State.RAISED in states:
            return RunResult(state=WorkerState.FAILED, failures=silent)
        self._watch.end_halted()
        late = self._watch.late_to_start()
        if late and not self._told_late:
            self._told_late = True
            self._output.tell(news="late", ranks=[worker_group.workers[i].global_rank for i in late])
        return result

    def _see_them_end(self, worker_group: WorkerGroup, ended: dict[int, int], result: RunResult) -> RunResult:
        """All functions here have returned, and processes may take a while to end once all others have."""
        returned = self._meeting.add("todist/returned", 0 if self._told_returned else 1)
        self._told_returned = True
        if self._all_returned_at is None and returned == self._size:
            self._all_returned_at = time.monotonic()
        until = (
            math.inf if self._all_returned_at is None else self._all_returned_at + self._place.exit_timeout
        )
        left = [worker.global_rank for worker in worker_group.workers if worker.local_rank not in ended]
        if left and result.state == WorkerState.HEALTHY and time.monotonic() < until:
            return result
        statuses = {worker_group.workers[i].global_rank: status for i, status in ended.items()}
        statuses.update({rank: failure.exitcode for rank, failure in result.failures.items()})
        for rank, status in statuses.items():
            if status:
                self._output.tell(news="bad exit", rank=rank, how=f"then ended with status {status}")
        for rank in left if result.state == WorkerState.HEALTHY else ():
            late = f"did not end within `exit_timeout`, {self._place.exit_timeout:g} s"
            self._output.tell(news="bad exit", rank=rank, how=late)
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGKILL)
        return RunResult(
            state=WorkerState.SUCCEEDED,
            return_values={worker.global_rank: None for worker in worker_group.workers},
        )

    def _leave(self) -> bool:
        """Whether this host may leave the world: not if all have done their work."""
        return self._end("left") != b"done"

    def _end(self, how: str) -> bytes:
        """How the world ended: what the first host to say so has said."""
        end: bytes = self._meeting.compare_set("todist/end", "", how)
        return end

    def _ended(self) -> bytes:
        return bytes(self._meeting.get("todist/end")) if self._meeting.check(["todist/end"]) else b""

    def _judge(self, worker_group: WorkerGroup, result: RunResult) -> None:
        """Ask the launcher whether the workers are to be started again."""
        world, verdict = self._world, verdict_key(self._world)
        failures = self._failures(worker_group, result)
        cause = min(failures, key=lambda failure: (failure.echo, failure.told is None))
        self._output.tell(
            news="failed",
            world=world,
            echo=cause.echo,
            raised=cause.told is not None,
            text=cause.text[:LONGEST_TEXT],
        )
        told = False
        while not self._launcher.check([verdict]):
            time.sleep(MONITOR_SECONDS / 2)
            if not told and self._handler.missing():
                told = True
                self._output.tell(news="missing", world=world)
        if self._launcher.get(verdict).decode() == AGAIN:
            self._remaining_restarts = 1  # for torch to take one
        else:
            self._remaining_restarts = 0
            self.failed = Failed(world, failures)

    def _failures(self, worker_group: WorkerGroup, result: RunResult) -> list[WorkerFailure]:
        statuses = {failure.local_rank: failure.exitcode for failure in result.failures.values()}
        found = []
        for worker in worker_group.workers:
            said = self._work.said(worker.local_rank)
            if said is not None and not said[0]:
                _, asked, status, told, echo, text = said
                found.append(WorkerFailure(worker.global_rank, status, asked, told, echo, text))
            elif worker.local_rank in statuses:
                status = statuses[worker.local_rank]
                how = f"was ended by signal {-status}" if status < 0 else f"exited with code {status}"
                halted = self._watch.halted_for(worker.local_rank)
                how = f"was stopped for {halted:.1f} s" if halted else how
                found.append(WorkerFailure(worker.global_rank, status, False, None, status >= 0, how, halted))
        return found or [WorkerFailure(worker_group.workers[0].global_rank, 1, False, None, True, "unknown")]

    def done(self, result: RunResult) -> Done:
        """What the workers have returned."""
        values = []
        for local_rank in range(self._place.workers):
            said = self._work.said(local_rank)
            assert said is not None
            assert said[0], result
            values.append(said[1])
        return Done(self._world, self._rank, self._size, values)
