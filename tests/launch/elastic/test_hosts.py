"""Hosts that stay, are lost, come back, or never come: the work goes on, or ends with the reason."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

import torchopt_dist as todist
from tests.launch.elastic.worlds import Aside, in_worlds, kill_agent, launch, place, world_of
from tests.launch.families import assert_gone
from tests.waits import say, soon, wait_until, watch
from torchopt_dist.launching import _attempt as attempt
from torchopt_dist.launching import _elastic as elastic
from torchopt_dist.launching._attempt import Attempt
from torchopt_dist.launching._machines import ThisMachine

pytestmark = pytest.mark.timeout(60)


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "torchopt_dist.launching"]


# Hosts that stay.


def test_the_values_come_by_host_and_ranks_follow_the_order_of_hosts():
    def main(x, *, y=2):
        info = todist.get_world_info()
        return x, y, info.world_rank, info.local_rank, info.world_size, os.environ["GROUP_RANK"]

    results = launch(main, 1, nproc=2)
    assert list(results.items()) == [
        ("localhost", [(1, 2, 0, 0, 4, "0"), (1, 2, 1, 1, 4, "0")]),
        ("localhost#2", [(1, 2, 2, 0, 4, "1"), (1, 2, 3, 1, 4, "1")]),
    ]


def test_workers_are_connected_over_hosts():
    @todist.rank_zero_only
    def main():
        x = torch.arange(6.0, requires_grad=True)
        parallel = todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.sum_reducer)
        parallel(lambda x: x.pow(3).sum())(x).backward()
        return x.grad.tolist(), x

    results = [value for values in launch(main, rpc=True).values() for value in values]
    gradient, x = results[0]
    assert gradient == [3.0 * i * i for i in range(6)]
    assert x.requires_grad
    assert results[1] is None


def test_lines_have_the_rank_of_their_world_and_the_host(capfd):
    records = []
    handler = logging.Handler()
    handler.emit = records.append

    def main():
        rank = os.environ["RANK"]
        if rank == "3":
            print("x" * 2_000_000)
        print(f"to stdout {rank}\rbar\nno end", end="")
        print(f"to stderr {rank}", file=sys.stderr)
        subprocess.run(["echo", "from a child"], check=True)

    results = launch(main, handlers=[handler], nproc=2)
    for rank, local_rank, host in [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]:
        own = [record for record in records if record.rank == rank]
        assert {(record.local_rank, record.host) for record in own} == {(local_rank, list(results)[host])}
        assert [r.getMessage() for r in own if r.stream == "stderr"] == [f"to stderr {rank}"]
        said = [r.getMessage() for r in own if r.stream == "stdout"]
        if rank == 3:
            long = [line for line in said if line.startswith("xx")]
            assert sum(map(len, long)) == 2_000_000
            said = said[len(long) :]
        assert said[:2] == [f"to stdout {rank}", "bar"]
        assert "from a child" in said[-2] + said[-1]
    assert capfd.readouterr() == ("", "")


# Hosts that are lost.


@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_go_on_when_a_host_is_lost(tmp_path, reachability, caplog, rank):
    names = ["localhost", "localhost#2"]
    lost, left = names[rank], names[1 - rank]
    reachability.lost_for_good.add(lost)

    def kill():
        places = world_of(tmp_path, 0, 2)
        kill_agent(places, rank)
        ((worker, _),) = world_of(tmp_path, 1, 1)
        assert worker not in [pid for pid, _ in places]  # all workers are new ones
        assert_gone([places[rank][0]])
        say(tmp_path / "end")

    with Aside(kill), caplog.at_level(logging.INFO, "torchopt_dist.launching"):
        assert launch(in_worlds, tmp_path) == {left: [(1, 0, 1)]}
    assert messages(caplog) == [
        "world 0: 2 hosts, 2 workers",
        f"{lost} is lost; hosts that are left: {left}; the reason: its agent died",
        "world 1: 1 hosts, 1 workers",
    ]  # and no line for each attempt to reach the host again


def test_a_host_that_gives_no_sign_of_life_is_lost(tmp_path, reachability, caplog):
    reachability.lost_for_good.add("localhost#2")

    def halt():
        places = world_of(tmp_path, 0, 2)
        os.kill(places[1][1], signal.SIGSTOP)
        world_of(tmp_path, 1, 1)
        assert_gone(places[1])
        say(tmp_path / "end")

    with Aside(halt), caplog.at_level(logging.WARNING, "torchopt_dist.launching"):
        assert launch(in_worlds, tmp_path, patience=2.0) == {"localhost": [(1, 0, 1)]}
    (line,) = messages(caplog)
    assert line.endswith("the reason: its agent gave no sign of life for 2 s, and was killed")


def test_what_follows_from_a_loss_is_no_restart(tmp_path, reachability):
    reachability.lost_for_good.add("localhost#2")

    def wait_for_the_other(world, rank):
        if world == 0:
            todist.barrier()
            say(tmp_path / f"met{rank}")
            todist.barrier([0]) if rank == 0 else todist.barrier([1])
            torch.futures.Future().wait() if rank == 1 else todist.remote_sync_call(
                time.sleep, args=(60,), partitioner=1
            )

    def kill():
        places = world_of(tmp_path, 0, 2)
        assert all(watch(tmp_path / f"met{rank}") for rank in (0, 1))
        kill_agent(places, 1)
        world_of(tmp_path, 1, 1)
        say(tmp_path / "end")

    with Aside(kill):
        results = launch(in_worlds, tmp_path, wait_for_the_other, rpc=True, max_restarts=0)
    assert results == {"localhost": [(1, 0, 1)]}


def test_an_error_that_is_not_the_loss_of_a_host_is_the_end_though_a_host_is_lost_with_it(
    tmp_path, monkeypatch
):
    def main():
        if os.environ["RANK"] == "1":
            say(tmp_path / "agent", str(os.getppid()))
            time.sleep(60)
        assert watch(tmp_path / "agent")
        raise ValueError("wrong")

    raised = Attempt.raised

    def kill_first(running, *said):
        os.kill(int((tmp_path / "agent").read_text()), signal.SIGKILL)
        raised(running, *said)

    monkeypatch.setattr(Attempt, "raised", kill_first)
    with pytest.raises(ValueError, match=r"^wrong$"):
        launch(main)


def test_a_host_whose_work_is_done_does_it_again_in_a_new_world(tmp_path, reachability):
    reachability.lost_for_good.add("localhost#2")

    def main():
        world, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        size = int(os.environ["WORLD_SIZE"])
        say(tmp_path / f"world{world}.rank{rank}", json.dumps({"size": size, "place": place()}))
        if (world, rank) == ("0", "0"):
            return "early"
        assert watch(tmp_path / "end", 30.0)
        return "late"

    def kill():
        places = world_of(tmp_path, 0, 2)
        assert_gone([places[0][0]])  # its value has been taken
        kill_agent(places, 1)
        world_of(tmp_path, 1, 1)
        say(tmp_path / "end")

    with Aside(kill):
        assert launch(main) == {"localhost": ["late"]}


def test_values_that_have_come_are_kept_when_their_host_is_lost(tmp_path):
    def main():
        if os.environ["RANK"] == "1":
            say(tmp_path / "place", json.dumps(place()))
            return "early"
        assert watch(tmp_path / "end", 30.0)
        return "late"

    def kill():
        assert watch(tmp_path / "place")
        worker, agent = json.loads((tmp_path / "place").read_text())
        assert_gone([worker])
        time.sleep(1.0)  # the value is on its way to the launcher, which nobody sees come
        os.kill(agent, signal.SIGKILL)
        assert_gone([agent])
        say(tmp_path / "end")

    with Aside(kill):
        assert launch(main) == {"localhost": ["late"], "localhost#2": ["early"]}


def test_process_groups_form_in_every_world(tmp_path):
    def sum_of_ranks(world, rank):
        torch.distributed.init_process_group("gloo")
        total = torch.tensor([rank + 1])
        torch.distributed.all_reduce(total)
        size = int(os.environ["WORLD_SIZE"])
        assert total.item() == sum(range(1, size + 1))
        say(tmp_path / f"sum.{size}.{world}.{rank}")

    def kill():
        places = world_of(tmp_path, 0, 2)
        assert all(watch(tmp_path / f"sum.2.0.{rank}") for rank in (0, 1))
        kill_agent(places, 0)
        wait_until(  # the host comes back, though it may do so before the next world
            lambda: any(tmp_path.glob("sum.2.[12].0")) and any(tmp_path.glob("sum.2.[12].1")),
            tell=lambda: f"{sorted(path.name for path in tmp_path.iterdir())}",
        )
        say(tmp_path / "end")

    with Aside(kill):
        assert len(launch(in_worlds, tmp_path, sum_of_ranks)) == 2


# Hosts that come.


def test_a_host_that_comes_back_takes_part_again(tmp_path, reachability):
    reachability.lost_for_good.add("localhost")

    def save_when_told_to_stop(world, rank):
        def save(*_):
            say(tmp_path / f"saved{world}.rank{rank}")
            sys.exit(0)

        signal.signal(signal.SIGTERM, save)

    def kill():
        kill_agent(world_of(tmp_path, 0, 2), 0)
        ((worker, _),) = world_of(tmp_path, 1, 1)
        reachability.lost_for_good.clear()
        again = world_of(tmp_path, 2, 2)
        assert worker not in [pid for pid, _ in again]
        assert (tmp_path / "saved1.rank0").exists()  # workers have `stop_timeout` to end
        say(tmp_path / "end")

    with Aside(kill):
        results = launch(in_worlds, tmp_path, save_when_told_to_stop, stop_timeout=10.0)
    assert list(results.items()) == [("localhost", [(2, 0, 2)]), ("localhost#2", [(2, 1, 2)])]


def test_spare_hosts_wait_until_one_is_lost(tmp_path, reachability):
    def kill():
        kill_agent(world_of(tmp_path, 0, 1), 0)
        places = world_of(tmp_path, 1, 1)
        wait_until(lambda: reachability.reached == ["localhost"], tell=lambda: f"{reachability.reached}")
        time.sleep(0.5)
        assert not (tmp_path / "world2.rank0").exists()  # there was no room for the host that came back
        kill_agent(places, 0)
        world_of(tmp_path, 2, 1)
        say(tmp_path / "end")

    with Aside(kill):
        assert launch(in_worlds, tmp_path, max_hosts=1) == {"localhost": [(2, 0, 1)]}


def test_a_host_that_comes_back_when_all_functions_have_returned_changes_nothing(tmp_path, reachability):
    reachability.lost_for_good.add("localhost#2")

    def end_late(world, rank):
        if world == 1:
            threading.Thread(target=watch, args=(tmp_path / "exit", 30.0)).start()

    def kill():
        kill_agent(world_of(tmp_path, 0, 2), 1)
        ((worker, _),) = world_of(tmp_path, 1, 1)
        say(tmp_path / "end")
        wait_until(lambda: (tmp_path / "returned").exists(), tell=lambda: "it has not returned")
        reachability.lost_for_good.clear()
        wait_until(lambda: reachability.reached == ["localhost#2"], tell=lambda: f"{reachability.reached}")
        time.sleep(0.5)
        os.kill(worker, 0)  # it has not been told to stop
        say(tmp_path / "exit")

    def main():
        value = in_worlds(tmp_path, end_late)
        threading.Timer(0.2, say, (tmp_path / "returned",)).start()
        return value

    with Aside(kill):
        assert launch(main) == {"localhost": [(1, 0, 1)]}


def test_a_host_that_is_lost_again_and_again_is_tried_later_and_later(tmp_path, monkeypatch):
    monkeypatch.setattr(elastic, "RETRY_SECONDS", 0.3)
    pauses = []

    def kill():
        for world, size in [(0, 2), (2, 2), (4, 2)]:
            kill_agent(world_of(tmp_path, world, size), 1)
            lost = time.monotonic()
            world_of(tmp_path, world + 2, size)
            pauses.append(time.monotonic() - lost)
        say(tmp_path / "end")

    with Aside(kill):
        assert len(launch(in_worlds, tmp_path)) == 2
    assert [pause > least for pause, least in zip(pauses, (0.3, 0.6, 1.2), strict=True)] == [True] * 3


# Too few hosts.


def test_too_few_hosts_for_too_long_are_named(tmp_path, reachability):
    reachability.lost_for_good.add("localhost#2")
    reachability.times["start_timeout"] = 1.0

    def kill():
        kill_agent(world_of(tmp_path, 0, 2), 1)
        say(tmp_path / "killed", str(time.monotonic()))

    with (
        Aside(kill),
        pytest.raises(todist.errors.AgentFailedError, match="`min_hosts`") as caught,
    ):
        launch(in_worlds, tmp_path, min_hosts=2)
    assert 1.0 < time.monotonic() - float((tmp_path / "killed").read_text()) < soon(6.0)
    assert str(caught.value).splitlines() == [
        "there are 1 hosts, and at least 2 are needed (`min_hosts`), since 1 s (`start_timeout`):",
        "localhost#2: no route",
    ]


def test_a_host_that_comes_in_time_is_enough(tmp_path, reachability):
    reachability.lost_for_good.add("localhost#2")

    def kill():
        kill_agent(world_of(tmp_path, 0, 2), 1)
        time.sleep(0.5)
        assert not (tmp_path / "world1.rank0").exists()
        reachability.lost_for_good.clear()
        world_of(tmp_path, 1, 2)
        say(tmp_path / "end")

    with Aside(kill):
        results = launch(in_worlds, tmp_path, min_hosts=2)
    assert list(results.values()) == [[(1, 0, 2)], [(1, 1, 2)]]


def test_the_whole_timeout_holds_while_hosts_are_waited_for(tmp_path, reachability):
    reachability.lost_for_good.add("localhost#2")
    reachability.times["timeout"] = 1.5

    def kill():
        kill_agent(world_of(tmp_path, 0, 2), 1)

    started = time.monotonic()
    with (
        Aside(kill),
        pytest.raises(
            todist.CallTimeoutError,
            match=r"(?s)^there are 1 hosts, .*`timeout`, 1.5 s, has passed:\nlocalhost#2: ",
        ),
    ):
        launch(in_worlds, tmp_path, min_hosts=2)
    assert 1.5 < time.monotonic() - started < soon(10.0)


def test_a_host_whose_agent_never_gives_a_sign_of_life_is_lost(monkeypatch, caplog):
    """As one whose forkserver has been stopped: there is a connection, and nobody answers."""
    monkeypatch.setattr(attempt, "AGENT_SECONDS", 0.2)
    launch(int)
    connect, silent = ThisMachine.connect, []

    def connect_once(machine, env):
        if len(silent) == 2:
            return connect(machine, env)
        ours, theirs = socket.socketpair()
        silent.append(theirs)
        return ours

    monkeypatch.setattr(ThisMachine, "connect", connect_once)
    with caplog.at_level(logging.WARNING, "torchopt_dist.launching"):
        results = launch(lambda: os.environ["WORLD_SIZE"], start_timeout=1.0, stop_timeout=0.2)
    for end in silent:
        end.close()
    assert {value for values in results.values() for value in values} <= {"1", "2"}
    assert sum("its agent did not end when it was told to" in text for text in messages(caplog)) == 2
