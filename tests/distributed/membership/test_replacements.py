"""New processes of lost ranks: how they come into the membership of those that are there."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from types import SimpleNamespace

import pytest

import torchopt_dist as todist
from tests.waits import wait_until
from torchopt_dist.distributed.membership import replacements as replacements_module
from torchopt_dist.distributed.membership.link import OVER
from torchopt_dist.distributed.membership.members import Member
from torchopt_dist.distributed.membership.membership import Membership
from torchopt_dist.distributed.rendezvous.store import GroupEndedError


class Newcomer:
    """A new process of a rank, as a membership of this process."""

    def __init__(self, line, rank, incarnation, name="b", **about):
        me = Member(rank, name, "program.py", "here", "replace", incarnation=incarnation, **about)
        self.heard = []
        self.end = Membership(me, len(line.ends), self.heard.append)
        self.line = line

    def join(self):
        return self.end.join(self.line.store, "127.0.0.1", 5.0)

    def come(self):
        self.join()
        self.end.announce(5.0)
        self.end.start(5.0)
        return self.end


@pytest.fixture
def newcomers():
    made = []

    def make(*args, **options):
        made.append(Newcomer(*args, **options))
        return made[-1]

    yield make
    for newcomer in made:
        newcomer.end.close()


def lose(line, rank, *lost_before):
    line.cut(rank)
    others = [end for end in line.ends if end.me.rank not in (rank, *lost_before)]
    wait_until(lambda: all(rank in end.failures for end in others))


def test_a_new_process_knows_the_others_and_they_know_it(lines, newcomers):
    line = lines("a", "b", "c", "d", on_loss="replace")
    told = []
    line.ends[2]._on_replacement = told.append
    for turn in range(2):
        for future in [line.barrier(rank, [0, 1]) for rank in (0, 1)]:
            future.result()
        assert line.ends[0]._turns["", (0, 1)] == turn + 1
    lose(line, 3)
    lose(line, 1, 3)
    line.barrier(0, [0, 1]).result()  # opens without the lost one
    end = newcomers(line, 1, 1).come()
    assert end.lost.keys() == {3}
    for other in (line.ends[0], line.ends[2], end):
        assert [member.incarnation for member in other.members] == [0, 1, 0, 0]
    assert all(other.failures.keys() == {3} for other in (line.ends[0], line.ends[2]))
    assert line.ends[2].replaced.keys() == {1}
    assert [member.incarnation for member in told] == [1]
    # It joins where the others are, in barriers, and can be lost like them.
    for meets in [
        line.threads.submit(end.barrier, [0, 1], timeout=5.0),
        line.barrier(0, [0, 1], timeout=5.0),
    ]:
        meets.result()
    waits = line.barrier(0, [0, 1])
    end._loop.call_soon_threadsafe(end._to_hub.link.writer.transport.abort)
    waits.result(5.0)
    assert line.ends[0].failures[1].cause == "died"
    assert newcomers(line, 1, 2).come().lost.keys() == {3}


def test_who_is_stopped_is_looked_for_among_the_present_processes(lines, newcomers):
    line = lines("a", "b", "c", "d", on_loss="replace", pid=os.getpid(), process_table="one")
    lose(line, 3)
    lose(line, 1, 3)
    end = newcomers(line, 1, 1, pid=os.getppid(), process_table="one").come()
    wait_until(lambda: end._stopped is not None)
    assert end._stopped._processes.keys() == {0, 2}  # neither the lost one nor the one before itself
    for other in (line.ends[0], line.ends[2]):
        assert other._stopped._processes[1].pid == os.getppid()


def test_who_is_refused(lines, newcomers):
    line = lines("a", "b", on_loss="replace")
    lose(line, 1)
    for incarnation in (0, -1):
        with pytest.raises(todist.errors.InitializationError, match="the others go on without this rank"):
            newcomers(line, 1, incarnation).join()
    with pytest.raises(todist.errors.InitializationError, match="the name that the rank has, 'b', got 'a'"):
        newcomers(line, 1, 1, name="a").join()
    other = lines("a", "b", on_loss="continue")
    lose(other, 1)
    with pytest.raises(todist.errors.InitializationError, match="the others go on without this rank"):
        newcomers(other, 1, 1).join()


def test_a_new_process_proves_the_loss_of_the_old_one(lines, newcomers, limits):
    line = lines("a", "b", on_loss="replace")
    limits(old_seconds=0.02)
    newcomers(line, 1, 1).come()  # while the connection of the old one stands
    assert line.ends[0].replaced[1].cause == "died"


def test_two_new_processes_come_at_the_same_time(lines, newcomers):
    line = lines("a", "b", "c", on_loss="replace")
    lose(line, 1)
    lose(line, 2, 1)
    both = [newcomers(line, rank, 1, name=name).end for rank, name in ((1, "b"), (2, "c"))]
    for end in both:
        end.join(line.store, "127.0.0.1", 5.0)
    together = threading.Barrier(2, timeout=5.0)

    def announce(end):  # in its own loop, so that it answers nothing before both have been sent
        end._to_hub.link.put({"announce": dataclasses.asdict(end.me)})
        together.wait()

    for end in both:
        end._loop.call_soon_threadsafe(announce, end)
    wait_until(lambda: all(end._known for end in both))
    for future in [line.threads.submit(end.start, 5.0) for end in both]:
        future.result()
    assert not line.ends[0].failures


def test_a_new_process_that_dies_before_it_is_ready_stays_lost(lines, newcomers):
    line = lines("a", "b", "c", on_loss="replace")
    lose(line, 1)
    newcomer = newcomers(line, 1, 1)
    newcomer.join()
    newcomer.end.announce(5.0)
    assert 1 in line.ends[0].failures  # until it is ready
    newcomer.end._loop.call_soon_threadsafe(newcomer.end._to_hub.link.writer.transport.abort)
    wait_until(lambda: not line.ends[0]._hub._replacements.joining)
    line.barrier(0, [0, 1]).result(5.0)
    end = newcomers(line, 1, 2).come()
    assert line.ends[2].members[1].incarnation == end.me.incarnation == 2


def test_a_new_process_that_is_not_wanted_any_more_is_told(lines, newcomers):
    line = lines("a", "b", "c", on_loss="replace")
    lose(line, 1)
    joined = newcomers(line, 1, 1)
    joined.join()
    for future in [line.threads.submit(line.ends[rank].final_barrier) for rank in (0, 2)]:
        future.result(5.0)
    with pytest.raises(GroupEndedError):
        joined.end.announce(5.0)
    with pytest.raises(GroupEndedError):
        newcomers(line, 1, 2).join()


def test_a_new_process_that_comes_when_all_end_is_announced_to_nobody():
    """Otherwise it might hear that all know it before it has seen that they end."""
    links = {rank: SimpleNamespace(heard=[]) for rank in (1, 2)}
    for link in links.values():
        link.put = link.heard.append
    replacements = replacements_module.Replacements(True, links, {}, lambda message: None)
    replacements.incarnations[1] = 1
    replacements.joining.add(1)
    replacements.end()
    announced = replacements.announce({"rank": 1, "incarnation": 1})
    asyncio.run(asyncio.wait_for(announced, 1.0))
    assert [link.heard for link in links.values()] == [[{OVER: True}], []]
