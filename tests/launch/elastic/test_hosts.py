"""Hosts that stay, are lost, come back, or never come: the work goes on, or ends with the reason."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import torchopt_dist as todist
from tests.distributed.bare import say, soon, watch
from tests.launch.elastic.worlds import Aside, another_comes, host_of, in_worlds, launch, place, world_of
from tests.launch.families import assert_gone

pytestmark = pytest.mark.timeout(60)


# Hosts that stay.


def test_the_values_come_by_host_in_the_order_of_ranks():
    def main(x, *, y=2):
        info = todist.get_world_info()
        return x, y, info.world_rank, info.local_rank, info.world_size, os.environ["GROUP_RANK"]

    results = launch(main, 1, nproc=2)
    assert sorted(results) == ["localhost", "localhost#2"]
    assert list(results.values()) == [
        [(1, 2, 0, 0, 4, "0"), (1, 2, 1, 1, 4, "0")],
        [(1, 2, 2, 0, 4, "1"), (1, 2, 3, 1, 4, "1")],
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


def test_a_spare_host_waits_until_one_is_lost(tmp_path, unreachable):
    def kill():
        ((_, agent_of_torch, agent),) = world_of(tmp_path, 0, 1)
        unreachable.write_text(host_of(agent_of_torch))
        os.kill(agent, signal.SIGKILL)
        world_of(tmp_path, 1, 1)
        say(tmp_path / "end")

    with Aside(kill):
        results = launch(in_worlds, tmp_path, max_hosts=1)
    ((name, values),) = results.items()
    assert values == [(1, 0, 1)]
    assert name != unreachable.read_text()


# Hosts that are lost.


@pytest.mark.parametrize("killed", ["agent of torch", "agent"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_go_on_when_a_host_is_lost(tmp_path, unreachable, caplog, killed, rank):
    def kill():
        places = world_of(tmp_path, 0, 2)
        unreachable.write_text(host_of(places[rank][1]))
        os.kill(places[rank][1 if killed == "agent of torch" else 2], signal.SIGKILL)
        world_of(tmp_path, 1, 1)
        assert_gone(places[rank][:2])
        say(tmp_path / "end")

    with Aside(kill), caplog.at_level(logging.WARNING, "torchopt_dist.launch"):
        results = launch(in_worlds, tmp_path)
    ((name, values),) = results.items()
    assert values == [(1, 0, 1)]
    lost = unreachable.read_text()
    assert name != lost
    said = [record.getMessage() for record in caplog.records if record.name == "torchopt_dist.launch"]
    assert said[0].startswith(f"{lost} is lost; hosts that are left: {name}; the reason: ")
    assert len(said) == 1  # and not at each attempt to bring it back


def test_a_host_that_comes_back_takes_part_again(tmp_path):
    def kill():
        places = world_of(tmp_path, 0, 2)
        os.kill(places[1][2], signal.SIGKILL)
        again = world_of(tmp_path, 1, 2)
        assert not {worker for worker, *_ in places} & {worker for worker, *_ in again}
        say(tmp_path / "end")

    with Aside(kill):
        results = launch(in_worlds, tmp_path)
    assert list(results.values()) == [[(1, 0, 2)], [(1, 1, 2)]]


def test_a_host_that_comes_later_makes_the_world_larger(tmp_path, unreachable):
    unreachable.write_text("localhost")
    with another_comes(tmp_path, unreachable.unlink):
        results = launch(in_worlds, tmp_path)
    assert list(results.values()) == [[(1, 0, 2)], [(1, 1, 2)]]


def test_too_few_hosts_for_too_long_are_named(tmp_path, unreachable):
    def kill():
        places = world_of(tmp_path, 0, 2)
        unreachable.write_text(host_of(places[1][1]))
        os.kill(places[1][2], signal.SIGKILL)
        say(tmp_path / "killed", str(time.monotonic()))

    with (
        Aside(kill),
        pytest.raises(todist.errors.AgentFailedError, match="`min_hosts`") as caught,
    ):
        launch(in_worlds, tmp_path, min_hosts=2, start_timeout=3.0)
    assert 3.0 < time.monotonic() - float((tmp_path / "killed").read_text()) < soon(8.0)
    assert str(caught.value).splitlines() == [
        "there are 1 hosts, and at least 2 are needed (`min_hosts`), since 3 s (`start_timeout`):",
        f"{unreachable.read_text()}: no route",
    ]


def test_hosts_that_never_come_are_named(tmp_path, unreachable):
    unreachable.write_text("localhost localhost#2")
    with pytest.raises(
        todist.errors.AgentFailedError, match=r"(?s)0 hosts.*localhost: no route\nlocalhost#2: no"
    ):
        launch(in_worlds, tmp_path, start_timeout=1.0)


def test_what_follows_from_a_loss_is_no_restart(tmp_path, unreachable):
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
        unreachable.write_text(host_of(places[1][1]))
        os.kill(places[1][2], signal.SIGKILL)
        world_of(tmp_path, 1, 1)
        say(tmp_path / "end")

    with Aside(kill):
        results = launch(in_worlds, tmp_path, wait_for_the_other, rpc=True, max_restarts=0)
    assert list(results.values()) == [[(1, 0, 1)]]


def test_a_host_whose_work_is_done_does_it_again_in_a_new_world(tmp_path):
    def main(folder):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
            in_worlds_file(folder)
            return "early"
        in_worlds_file(folder)
        assert watch(folder / "end", 30.0)
        return "late"

    def in_worlds_file(folder):
        world, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        size = int(os.environ["WORLD_SIZE"])
        say(folder / f"world{world}.rank{rank}", json.dumps({"size": size, "place": place()}))

    def kill():
        places = world_of(tmp_path, 0, 2)
        assert_gone([places[0][0]])  # its value has been taken
        os.kill(places[1][2], signal.SIGKILL)
        world_of(tmp_path, 1, 2)
        say(tmp_path / "end")

    with Aside(kill):
        assert list(launch(main, tmp_path).values()) == [["late"], ["late"]]


def test_process_groups_form_in_every_world(tmp_path):
    def sum_of_ranks(world, rank):
        torch.distributed.init_process_group("gloo")
        total = torch.tensor([rank + 1])
        torch.distributed.all_reduce(total)
        assert total.item() == sum(range(1, int(os.environ["WORLD_SIZE"]) + 1))
        say(tmp_path / f"sum{world}.{rank}")

    def kill():
        places = world_of(tmp_path, 0, 2)
        assert all(watch(tmp_path / f"sum0.{rank}") for rank in (0, 1))
        os.kill(places[0][2], signal.SIGKILL)
        world_of(tmp_path, 1, 2)
        assert all(watch(tmp_path / f"sum1.{rank}") for rank in (0, 1))
        say(tmp_path / "end")

    with Aside(kill):
        assert len(launch(in_worlds, tmp_path, sum_of_ranks)) == 2
