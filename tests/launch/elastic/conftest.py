from __future__ import annotations

import dataclasses

import pytest

import torchopt_dist as todist
from torchopt_dist.launching import _elastic as elastic


class Reachability:
    """Whether hosts that were lost can be reached again.

    Attributes:
        lost_for_good: names of hosts that cannot.
        tried: names of hosts that were tried, one after another.
        reached: names of hosts that were reached, one after another.
        times: options that say how long hosts are waited for, in place of the launcher's, which workers have to start.
    """

    def __init__(self):
        self.lost_for_good, self.tried, self.reached, self.times = set(), [], [], {}


@pytest.fixture(autouse=True)
def reachability(monkeypatch):
    """Lost hosts are tried again soon, and a test says which of them can be reached."""
    state = Reachability()
    reach_again = elastic.Membership._reach_again
    wait_for_hosts = elastic.Membership._wait_for_hosts

    def reach_if_allowed(membership, host):
        state.tried.append(host.name)
        if host.name in state.lost_for_good:
            raise todist.errors.AgentFailedError("no route")
        machine = reach_again(membership, host)
        state.reached.append(host.name)
        return machine

    def wait_as_told(membership, *args):
        plan = membership._plan
        membership._plan = dataclasses.replace(plan, options=dataclasses.replace(plan.options, **state.times))
        wait_for_hosts(membership, *args)

    monkeypatch.setattr(elastic, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(elastic, "GATHER_SECONDS", 0.05)
    monkeypatch.setattr(elastic.Membership, "_reach_again", reach_if_allowed)
    monkeypatch.setattr(elastic.Membership, "_wait_for_hosts", wait_as_told)
    return state
