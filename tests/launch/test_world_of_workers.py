"""The world that workers see: variables, groups, environment, folder and path."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import sys
import threading
import time
import weakref
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import torchopt_dist as todist
from tests.functions import my_rank
from tests.processes import ON_TWO, python, torchrun
from torchopt_dist.launching import Launcher

pytestmark = pytest.mark.timeout(60)


def test_every_variable_of_torchrun_is_set_as_torchrun_sets_it(tmp_path):
    script = tmp_path / "variables.py"
    script.write_text(
        "import json, os, sys\n"
        "with open(sys.argv[1] + os.environ['RANK'], 'w') as file:\n"
        "    json.dump(dict(os.environ), file)"
    )
    torchrun("--standalone", "--nproc-per-node=2", script, tmp_path / "rank")
    theirs = {rank: json.loads((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)}
    launcher = Launcher(nproc_per_host=2, handlers=[], env={"OMP_NUM_THREADS": "1"})
    ours = launcher.run(lambda: dict(os.environ)).results["localhost"]
    for rank in (0, 1):
        names = {name for name in theirs[rank] if name not in os.environ}
        assert "TORCHELASTIC_USE_AGENT_STORE" in names
        differing = {"MASTER_ADDR", "MASTER_PORT", "PYTHONPATH"}
        differing |= {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
        for name in sorted(names - differing):
            assert ours[rank].get(name) == theirs[rank][name], name
        for name in differing - {"PYTHONPATH"}:
            assert ours[rank][name]
    assert ours[0]["MASTER_PORT"] == ours[1]["MASTER_PORT"]
    assert ours[0]["TODIST_SECRET"] == ours[1]["TODIST_SECRET"]


def test_each_launch_has_a_secret_unless_one_is_given():
    secrets = {
        Launcher(nproc_per_host=1, handlers=[], env=env).run(os.getenv, "TODIST_SECRET").rank(0)
        for env in ({}, {}, {"TODIST_SECRET": "given to the launcher"})
    }
    assert sorted(len(secret) for secret in secrets) == [21, 64, 64]


def test_what_torch_records_of_an_exception_has_a_file_that_nobody_need_remove(capfd):
    def main():
        @record
        def fail():
            raise ValueError("told to a file")

        with contextlib.suppress(ValueError):
            fail()
        return Path(os.environ["TORCHELASTIC_ERROR_FILE"]).read_text()

    told = json.loads(Launcher(nproc_per_host=1, handlers=[]).run(main).rank(0))
    assert told["message"]["message"] == "ValueError: told to a file"


def test_a_host_given_twice_is_two_groups():
    def place():
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
        return tuple(int(os.environ[name]) for name in names)

    launcher = Launcher(hosts=["localhost", socket.gethostname(), "localhost"], nproc_per_host=[1, 1, 2])
    result = launcher.run(place)
    assert list(result.results) == ["localhost", socket.gethostname(), "localhost#2"]
    assert result.index("localhost", 0) == (0, 0, 0, 4, 1, 3)
    assert result.index(socket.gethostname(), 0) == (1, 0, 1, 4, 1, 3)
    assert result.index("localhost#2", 1) == result.rank(3) == (3, 1, 2, 4, 2, 3)


def test_auto_init_rpc_and_process_groups_work_in_repeated_launches():
    def by_hand():
        return todist.auto_init_rpc()(
            lambda: todist.remote_sync_call(os.getpid, partitioner=1)
        )(), os.getpid()

    def by_torch():
        torch.distributed.init_process_group("gloo")
        total = torch.tensor([1.0 + my_rank()])
        torch.distributed.all_reduce(total)
        torch.distributed.destroy_process_group()
        return total.item(), by_hand()

    for _ in range(2):
        (((pid,), _), ((same,), own)) = ON_TWO.run(by_hand).results["localhost"]
        assert pid == same == own
    assert [ON_TWO.run(by_torch).rank(rank)[0] for rank in (0, 1)] == [3.0, 3.0]


@pytest.mark.parametrize("rpc", [False, True])
def test_a_backend_makes_the_process_group(rpc):
    def total():
        x = torch.ones(1) + int(os.environ["RANK"])
        dist.all_reduce(x)
        return x.item(), dist.get_backend(), dist.get_world_size()

    def end_it():
        dist.barrier()  # else one could end it while the other is still joining
        dist.destroy_process_group()

    launcher = Launcher(nproc_per_host=2, backend="gloo", rpc=rpc, handlers=[])
    assert launcher.run(total).results == {"localhost": [(3.0, "gloo", 2)] * 2}
    # One that the function has ended itself, too.
    assert launcher.run(end_it).results == {"localhost": [None] * 2}


def test_calls_use_the_process_group_of_a_worker_whose_main_has_returned():
    def total(x):
        dist.all_reduce(x)
        return x.item()

    def runs_main():
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame is not None and not frame.f_code.co_qualname.endswith("has_returned.<locals>.main"):
            frame = frame.f_back
        return frame is not None

    def total_after_main():
        deadline = time.monotonic() + 30
        while runs_main():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return total(torch.ones(1))

    def main():
        if todist.get_rank() == 1:
            return None
        there = todist.remote_async_call(total_after_main, partitioner=1)
        return total(torch.ones(1)), there.wait()

    launcher = Launcher(nproc_per_host=2, backend="gloo", rpc=True, handlers=[])
    assert launcher.run(main).results == {"localhost": [(2.0, [2.0]), None]}


def test_rpc_connects_the_workers():
    def main(scale):
        if todist.get_rank() == 0:
            return [todist.remote_sync_call(my_rank, partitioner=rank)[0] * scale for rank in range(2)]
        return todist.get_world_info().worker_name

    result = Launcher(nproc_per_host=2, rpc=True, handlers=[]).run(main, 10)
    assert result.results == {"localhost": [[0, 10], "worker1"]}


def test_workers_start_afresh():
    def main():
        import random

        import numpy as np

        seen = os.environ.get("LEFT_BEHIND"), getattr(torch, "left_behind", None)
        os.environ["LEFT_BEHIND"] = torch.left_behind = "x"
        return seen, random.random(), float(np.random.rand()), os.getpid(), torch.get_num_threads()

    found = [value for _ in range(2) for value in ON_TWO.run(main).results["localhost"]]
    assert [value[0] for value in found] == [(None, None)] * 4
    for column in (1, 2, 3):
        assert len({value[column] for value in found}) == 4  # random numbers are not those of the others
    assert "LEFT_BEHIND" not in os.environ


@pytest.mark.parametrize("kind", [{}, {"min_hosts": 1}], ids=["plain", "elastic"])
def test_arguments_that_are_no_text_arrive_and_are_in_the_title(monkeypatch, kind):
    argv = ["train.py", "caf\udce9.txt", Path("/data")]
    monkeypatch.setattr(sys, "argv", argv)

    def main():
        return sys.argv, psutil.Process().cmdline()[0]

    seen, title = Launcher(nproc_per_host=1, handlers=[], log_dir=None, **kind).run(main).rank(0)
    assert seen == argv
    assert title == r"todist: rank 0 of 1: train.py caf\udce9.txt /data"


def test_the_environment_the_folder_and_the_path_are_those_of_the_launcher(tmp_path, monkeypatch):
    (tmp_path / "only_here_now.py").write_text("def f():\n    return 'found'\n")
    (tmp_path / ".env").write_text(
        "# a comment\n\nexport A=from the file\nB='q u # o'  # why\nC=3 # three\nD=\nE=x\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("INHERITED", "yes")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    spec = importlib.util.find_spec("only_here_now")
    module = importlib.util.module_from_spec(spec)
    sys.modules["only_here_now"] = module
    spec.loader.exec_module(module)

    def main(f):
        names = ("A", "B", "C", "D", "E", "INHERITED")
        return f(), os.getcwd(), torch.get_num_threads(), sys.argv, [os.environ[name] for name in names]

    try:
        launcher = Launcher(nproc_per_host=2, env={"E": "told"}, env_file=".env")
        found, folder, threads, argv, variables = launcher.run(main, module.f).rank(1)
    finally:
        del sys.modules["only_here_now"]
    assert found == "found"
    assert folder == os.path.realpath(tmp_path)
    assert threads == 2
    assert argv == sys.argv
    assert variables == ["from the file", "q u # o", "3", "", "told", "yes"]


def test_the_store_is_on_loopback_only():
    def main():
        port = int(os.environ["MASTER_PORT"])
        return {
            c.laddr.ip for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"
        }

    assert ON_TWO.run(main).rank(0) == {"127.0.0.1"}


def test_cores_and_the_mask_of_modes_are_those_of_the_launcher():
    """As they are at the launch, and not as they were when the server was started."""

    def main():
        mask = os.umask(0)
        return os.sched_getaffinity(0), mask, torch.get_num_threads()

    launcher = Launcher(nproc_per_host="cpu", handlers=[], env={"OMP_NUM_THREADS": ""})
    cores = os.sched_getaffinity(0)
    assert launcher.run(main).rank(0)[0] == cores
    one = {min(cores)}
    before = os.umask(0o037)
    try:
        os.sched_setaffinity(0, one)
        assert launcher.run(main).results == {"localhost": [(one, 0o037, 1)]}
    finally:
        os.umask(before)
        os.sched_setaffinity(0, cores)
    assert launcher.run(main).rank(0)[:2] == (cores, before)


PATH_IN_PATH = """
import sys
from pathlib import Path
from torchopt_dist.launching import launch
sys.path[:0] = [Path("/nowhere"), None]
print(launch(lambda: [type(entry).__name__ for entry in sys.path], nproc_per_host=1, log_dir=None).rank(0))
"""


def test_an_entry_of_the_path_that_is_no_string_is_passed_over():
    done = python("-c", PATH_IN_PATH, timeout=50)
    assert set(eval(done.stdout)) == {"str"}, done.stderr


def test_at_its_end_a_worker_finalizes_what_its_function_has_made_and_nothing_of_the_forkserver(capsys):
    """Torch has a finalizer for each of its libraries of operators, to call all of which takes tens of milliseconds."""

    def make():
        inherited = [each for each in vars(weakref.finalize)["_registry"] if each.atexit]
        weakref.finalize(todist, print, "finalized")
        return len(inherited)

    result = Launcher(nproc_per_host=1, log_dir=None).run(make)
    assert result.rank(0) == 0
    assert capsys.readouterr().out == "[rank 0] finalized\n"
