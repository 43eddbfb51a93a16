"""Hosts that are lost, come back, or never come: the work goes on, or ends with the reason."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

import torchopt_dist as todist
from tests.distributed.bare import say, soon, watch
from tests.launch.families import alive, assert_gone, start_a_family
from tests.launch.sshd import NEEDS_SSHD, Sshd
from tests.seeds import torchrun
from torchopt_dist.launch import Launcher, remote
from torchopt_dist.launch.elastic import host_job, members

pytestmark = pytest.mark.timeout(60)


def launch(
    func,
    *args,
    hosts=("localhost", "localhost"),
    nproc=1,
    min_hosts=1,
    max_hosts=2,
    max_restarts=0,
    rpc=False,
    handlers=(),
    ssh_config=None,
    timeout=40.0,
    start_timeout=20.0,
    stop_timeout=1.0,
    port=0,
    halted_timeout=5.0,
):
    launcher = Launcher(
        hosts=hosts,
        nproc_per_host=nproc,
        min_hosts=min_hosts,
        max_hosts=max_hosts,
        max_restarts=max_restarts,
        rpc=rpc,
        handlers=handlers,
        log_dir=None,
        ssh_config=ssh_config,
        timeout=timeout,
        start_timeout=start_timeout,
        stop_timeout=stop_timeout,
        master_port=port,
        halted_timeout=halted_timeout,
    )
    return launcher.run(func, *args).results


@pytest.fixture(autouse=True)
def soon_again(monkeypatch):
    """Lost hosts are tried again sooner."""
    monkeypatch.setattr(members, "RETRY_SECONDS", 0.5)


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    """A file; while it exists, hosts of which it has the names cannot be reached."""
    path = tmp_path / "unreachable"
    run = host_job.HostJob.run

    def run_if_reachable(job):
        if path.exists() and job._plan.hosts[0].name in path.read_text().split():
            raise todist.errors.AgentFailedError("no route")
        return run(job)

    monkeypatch.setattr(host_job.HostJob, "run", run_if_reachable)
    return path


def place():
    """This worker, its torch agent, and that one's agent of ours."""
    return os.getpid(), os.getppid(), psutil.Process(os.getppid()).ppid()


def in_worlds(folder, act=None):
    """A file for each rank of each world; on until there is a file ``end``."""
    world = os.environ["TORCHELASTIC_RESTART_COUNT"]
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    say(folder / f"world{world}.rank{rank}", json.dumps({"size": int(size), "place": place()}))
    if act is not None:
        act(int(world), int(rank))
    assert watch(folder / "end", 30.0)
    return int(world), int(rank), int(size)


def world_of(folder, world, size):
    """The places of its ranks."""
    told = []
    for rank in range(size):
        path = folder / f"world{world}.rank{rank}"
        assert watch(path, 20.0), (
            f"{path.name} has not come; there are {sorted(p.name for p in folder.iterdir())}"
        )
        told.append(json.loads(path.read_text()))
        assert told[-1]["size"] == size
    return [tuple(each["place"]) for each in told]


class Aside:
    """What is done beside a launch, in a thread; its error is raised at the end."""

    def __init__(self, function):
        self._function, self._error = function, None
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            self._function()
        except BaseException as error:
            self._error = error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace):
        self._thread.join()
        if self._error is not None:
            raise self._error


def host_of(pid):
    """Which host a torch agent is, by the title of its process."""
    title = " ".join(psutil.Process(pid).cmdline())
    return title.rpartition(" of ")[2].strip()


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

    def let_it_come():
        world_of(tmp_path, 0, 1)
        unreachable.unlink()
        world_of(tmp_path, 1, 2)
        say(tmp_path / "end")

    with Aside(let_it_come):
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


# Hosts that are reached by SSH.


@pytest.fixture
def sshd(tmp_path):
    """Starts and stops an SSH server that knows `node1`."""

    class Switch:
        config = tmp_path / "sshd" / "config"
        server = None

        def on(self):
            self.server = Sshd(tmp_path / "sshd")
            return self

        def off(self):
            """As a machine that fails: connections end, and there are no new ones."""
            sessions = psutil.Process(self.server.process.pid).children(recursive=True)
            self.server.stop()
            for process in sessions:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.name().startswith("sshd"):
                        process.kill()
            self.server = None

    switch = Switch().on()
    yield switch
    for machine in list(remote._machines.values()):
        machine.close()
    remote._machines.clear()
    if switch.server is not None:
        switch.server.stop()


@NEEDS_SSHD
def test_a_host_by_ssh_is_lost_and_comes_back(tmp_path, sshd, caplog):
    def switch():
        world_of(tmp_path, 0, 2)
        sshd.off()
        ((worker, *_),) = world_of(tmp_path, 1, 1)
        assert psutil.Process(worker).is_running()
        sshd.on()
        world_of(tmp_path, 2, 2)
        say(tmp_path / "end")

    with Aside(switch), caplog.at_level(logging.WARNING, "torchopt_dist.launch"):
        results = launch(
            in_worlds, tmp_path, hosts=["localhost", "node1"], ssh_config=sshd.config, timeout=50.0
        )
    assert sorted(results) == ["localhost", "node1"]
    assert list(results.values()) == [[(2, 0, 2)], [(2, 1, 2)]]
    said = [record.getMessage() for record in caplog.records if record.name == "torchopt_dist.launch"]
    assert said[0].startswith("node1 is lost; hosts that are left: localhost; the reason: ")


@NEEDS_SSHD
def test_a_host_by_ssh_that_is_not_there_at_the_start_comes_later(tmp_path, sshd):
    sshd.off()

    def switch():
        world_of(tmp_path, 0, 1)
        sshd.on()
        world_of(tmp_path, 1, 2)
        say(tmp_path / "end")

    with Aside(switch):
        results = launch(
            in_worlds, tmp_path, hosts=["localhost", "node1"], ssh_config=sshd.config, timeout=50.0
        )
    assert list(results.values()) == [[(1, 0, 2)], [(1, 1, 2)]]


@NEEDS_SSHD
def test_how_many_workers_a_host_has_that_is_not_there_must_be_said(sshd):
    sshd.off()
    with pytest.raises(
        todist.InitializationError, match=r"`nproc_per_host` must be a number for hosts .*node1"
    ):
        launch(os.getpid, hosts=["localhost", "node1"], nproc="cpu", ssh_config=sshd.config)


# Workers that fail.


class MyError(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


@pytest.mark.parametrize("rpc", [False, True])
def test_what_a_worker_raises_is_raised(tmp_path, rpc):
    def main():
        if os.environ["RANK"] == "1":
            say(tmp_path / "raised", str(time.monotonic()))
            raise MyError(code=3)
        torch.futures.Future().wait()

    with pytest.raises(MyError, match=r"^code 3$") as caught:
        launch(main, rpc=rpc)
    assert time.monotonic() - float((tmp_path / "raised").read_text()) < soon(4.0)
    assert isinstance(caught.value, todist.RemoteError)
    assert caught.value.code == 3
    assert caught.value.worker in ("rank 1 on localhost", "rank 1 on localhost#2")
    assert "in main" in caught.value.remote_traceback
    assert "torch/distributed" not in caught.value.remote_traceback
    assert "ChildFailedError" not in repr(caught.value.__cause__)


DEATHS = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was ended by SIGKILL", None, "SIGKILL"),
    "sys.exit(0)": (lambda: sys.exit(0), r"called sys.exit\(0\)", 0, None),
    "os._exit(7)": (lambda: os._exit(7), "exited with code 7", 7, None),
}


def test_a_worker_that_is_stopped_and_does_not_go_on_is_named():
    def main():
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)

    with pytest.raises(todist.errors.WorkerFailedError, match=r"^rank 1 on .* did not go on for 1\.\d"):
        launch(main, halted_timeout=1.0)


@pytest.mark.parametrize("death", DEATHS)
def test_a_worker_that_dies_is_named_with_its_last_lines(death):
    die, how, exit_code, name = DEATHS[death]

    def main():
        if os.environ["RANK"] == "1":
            print("last words", flush=True)
            die()
        time.sleep(60)

    with pytest.raises(
        todist.errors.WorkerFailedError, match=f"^rank 1 on localhost(#2)? {how} before its function returned"
    ) as caught:
        launch(main)
    error = caught.value
    assert (error.rank, error.exit_code, error.signal) == (1, exit_code, name)
    assert error.log == ("last words",)


def test_all_workers_are_started_again_as_often_as_asked(tmp_path, caplog):
    def fail(world, rank):
        assert os.environ["TORCHELASTIC_MAX_RESTARTS"] == "2"
        todist.auto_init_rpc()(todist.barrier)()
        if world < 2 and rank == world:  # a worker of one host, and then one of the other
            raise MyError(code=world)
        say(tmp_path / "end") if world == 2 else time.sleep(60)

    with caplog.at_level(logging.WARNING, "torchopt_dist.launch"):
        results = launch(in_worlds, tmp_path, fail, max_restarts=2)
    assert list(results.values()) == [[(2, 0, 2)], [(2, 1, 2)]]
    said = [record.getMessage() for record in caplog.records if record.name == "torchopt_dist.launch"]
    assert [line.partition(" (on")[0] for line in said] == [
        "restart 1 of 2: MyError: code 0",
        "restart 2 of 2: MyError: code 1",
    ]


def test_after_the_last_restart_the_function_is_not_called_again(tmp_path):
    def main():
        say(tmp_path / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}")
        raise MyError(code=1)

    with pytest.raises(MyError):
        launch(main, max_restarts=1)
    assert {path.name[0] for path in tmp_path.iterdir()} == {"0", "1"}


def test_a_value_that_cannot_be_sent_is_an_error():
    with pytest.raises(todist.SerializationError, match=r"rank \d returned lock"):
        launch(threading.Lock)


def test_the_whole_timeout_ends_a_launch(tmp_path):
    with pytest.raises(
        todist.CallTimeoutError, match=r"localhost, localhost#2 did not return within `timeout`, 4 s"
    ):
        launch(in_worlds, tmp_path, timeout=4.0)


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(todist.InitializationError, match=f"`master_port` must be free .* got {port}"):
            launch(os.getpid, port=port)


# What is left.


def hold_on(folder):
    start_a_family(folder)
    say(folder / f"place{os.environ['RANK']}", " ".join(map(str, place())))
    time.sleep(300)


def pids_in(folder, ranks=2):
    pids = []
    for rank in range(ranks):
        for kind in ("family", "place"):
            assert watch(folder / f"{kind}{rank}")
            pids += [int(pid) for pid in (folder / f"{kind}{rank}").read_text().split()]
    return set(pids)


def test_an_interrupt_goes_on_as_such_and_leaves_nothing(tmp_path):
    def interrupt():
        pids_in(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)

    threads = threading.active_count()
    with Aside(interrupt), pytest.raises(KeyboardInterrupt):
        launch(hold_on, tmp_path)
    assert_gone(pids_in(tmp_path), 1.0)
    assert threading.active_count() == threads


def test_a_lost_host_s_processes_are_ended(tmp_path, unreachable):
    def kill():
        pids = pids_in(tmp_path)
        agents = [int((tmp_path / f"place{rank}").read_text().split()[2]) for rank in (0, 1)]
        unreachable.write_text("localhost localhost#2")
        for agent in agents:
            os.kill(agent, signal.SIGKILL)
        assert_gone(pids)

    with Aside(kill), pytest.raises(todist.errors.AgentFailedError):
        launch(hold_on, tmp_path, start_timeout=2.0)


LAUNCHER = """
import sys
from pathlib import Path
from tests.launch.test_elastic import hold_on, launch
launch(hold_on, Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_ended_leaves_nothing(tmp_path, number):
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, tmp_path],
        cwd=torchrun.ROOT,
        env={**os.environ, "PYTHONPATH": str(torchrun.ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = pids_in(tmp_path)
    launcher.send_signal(number)
    launcher.communicate(timeout=10)
    assert_gone(pids, 5.0)
    assert launcher.returncode == -number


def test_no_descriptor_or_process_stays_after_a_launch(tmp_path):
    def main():
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise MyError(code=1)
        return place()

    def run():
        return {pid for values in launch(main, max_restarts=1).values() for each in values for pid in each}

    assert_gone(run(), 1.0)
    before = psutil.Process().num_fds()
    pids = run()
    assert_gone(pids, 1.0)
    assert psutil.Process().num_fds() == before
    assert alive(pids) == []
