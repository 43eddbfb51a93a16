"""States of workers, agents and hosts: what follows what, and what comes too late to change anything."""

from __future__ import annotations

import pytest

import torchopt_dist as todist
from torchopt_dist.launching._hosts import FOLLOWS, AgentState, HostState, WorkerHandle, WorkerState
from torchopt_dist.launching.logs import WorkerLogs

FIRST = {WorkerState: WorkerState.REQUESTED, AgentState: AgentState.WORKING, HostState: HostState.SPARE}


@pytest.fixture
def worker():
    return WorkerHandle(1, 1, "here", WorkerLogs([], None, range(2)))


@pytest.mark.parametrize("kind", FIRST)
def test_the_table_has_every_state_and_each_can_be_reached(kind):
    reached = [FIRST[kind]]
    for state in reached:
        assert all(isinstance(follower, kind) for follower in FOLLOWS[state])
        reached += [follower for follower in FOLLOWS[state] if follower not in reached]
    assert set(reached) == set(kind)


def test_a_state_that_may_not_follow_is_not_entered(worker):
    assert worker.enter(WorkerState.STARTED)
    assert not worker.enter(WorkerState.REQUESTED)
    assert worker.state is WorkerState.STARTED
    assert worker.is_starting


@pytest.mark.parametrize("first", ["returned", "lost", "failed"])
def test_what_comes_after_the_outcome_changes_nothing(worker, first):
    """As the value of a worker that was stopped for so long that the others went on without it."""
    worker.enter(WorkerState.STARTED)
    worker.enter(WorkerState.RUNNING)
    steps = {
        "returned": lambda: worker.give_value(b"value"),
        "lost": lambda: worker.lose(todist.WorkerFailedError("it died", rank=1, host="here")),
        "failed": lambda: worker.enter(WorkerState.FAILED),
    }
    steps.pop(first)()
    outcome = worker.state, worker.value, worker.lost
    assert worker.is_decided
    for late in steps.values():
        late()
    assert (worker.state, worker.value, worker.lost) == outcome
    assert worker.is_good is (first != "failed")
