"""What goes to workers and comes back, launches one after another and at the same time, and attempts."""

from __future__ import annotations

import logging
import os
import threading
import time

import psutil
import pytest
import torch

import torchopt_dist as todist
from tests.functions import my_rank
from tests.launch.descriptors import no_new_descriptors
from tests.launch.families import forkserver_of, with_this_server
from tests.processes import ON_TWO, python
from tests.waits import soon
from torchopt_dist.launching import Launcher, LaunchResult, launch
from torchopt_dist.launching import _forkserver as forkserver

pytestmark = pytest.mark.timeout(60)


# Functions, arguments, results.


def test_a_function_of_a_module_and_a_lambda_and_a_closure_and_a_method():
    assert ON_TWO.run(my_rank).results == {"localhost": [0, 1]}
    assert ON_TWO.run(lambda: "x").results == {"localhost": ["x", "x"]}
    seven = 7

    def closure(a, *, b):
        return a + b + seven

    assert ON_TWO.run(closure, 1, b=2).rank(1) == 10
    assert ON_TWO.run("a-b".split, "-").rank(1) == ["a", "b"]
    assert launch(closure, (1,), {"b": 3}, nproc_per_host=1, handlers=[]).rank(0) == 11


def test_tensors_that_require_grad_come_back_as_such():
    def main(leaf, other):
        assert leaf.requires_grad
        assert leaf.is_leaf
        model = torch.nn.Linear(2, 1)
        return leaf, leaf * 2, other, model, model(leaf)

    given = torch.tensor([1.0, 2.0], requires_grad=True)
    leaf, result, other, model, output = ON_TWO.run(main, given, given * 3).rank(1)
    assert leaf.requires_grad
    assert result.requires_grad
    assert output.requires_grad
    assert torch.equal(result, torch.tensor([2.0, 4.0]))
    assert torch.equal(other, given * 3)
    assert all(p.requires_grad for p in model.parameters())
    output.sum().backward()  # a leaf here: its graph stayed on the worker
    assert torch.equal(output.grad, torch.ones(1))


def test_large_values_go_and_come_whole():
    tensor = torch.arange(3_000_000)

    def double(given):
        return given * 2

    assert all(torch.equal(value, tensor * 2) for value in ON_TWO.run(double, tensor).results["localhost"])


SCRIPT = """
import dataclasses, enum, sys, traceback
from torchopt_dist.launching import launch

class Colour(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Point:
    x: float
    made = []
    def norm(self):
        return abs(self.x)

class Special(Point):
    def norm(self):
        return super().norm() + 1

class MyError(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code

def main(point):
    Point.made.append(1)
    return point, Special(point.x - 5), Colour.RED, len(Point.made)

def bad():
    raise MyError(code=7)

norm = Point.norm
for _ in range(2):
    point, special, colour, made = launch(main, (Point(-2.0),), nproc_per_host=2).rank(1)
    assert type(point) is Point and type(special) is Special and colour is Colour.RED and made == 1
    assert special.norm() == 8.0
    assert Point.norm is norm and Point.made == [], "a launch has changed a class of this process"
try:
    launch(bad, nproc_per_host=2)
except MyError as error:
    assert error.code == 7 and str(error) == "code 7"
    traceback.print_exc(file=sys.stdout)
print("DONE")
"""


@pytest.mark.parametrize("by", ["a file", "standard input"])
def test_classes_of_main_go_and_come_and_are_left_alone(tmp_path, by):
    # Standard input is what a notebook is, too: a `__main__` that nobody else can import.
    script = tmp_path / "script.py"
    script.write_text(with_this_server(SCRIPT))
    if by == "a file":
        done = python("-W", "error", script, timeout=50)
    else:
        done = python("-W", "error", read=script.read_text(), timeout=50)
    out = done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert out.endswith("DONE\n")
    assert out.count("in bad") == 1  # the worker's traceback, once
    assert "on rank 0 on localhost" in out or "on rank 1 on localhost" in out


def test_results_by_rank_by_host_and_local_rank():
    result = LaunchResult({"a": [10, 11], "b": [20]})
    assert [result.rank(i) for i in range(3)] == [10, 11, 20]
    assert result.index("a", 1) == 11
    assert result.index("b", 0) == 20
    with pytest.raises(IndexError, match=r"`rank` must be in \[0, 3\), got 3"):
        result.rank(3)
    with pytest.raises(IndexError, match="got -1"):
        result.rank(-1)
    with pytest.raises(TypeError, match="`rank` must be an integer, got str '0'"):
        result.rank("0")
    with pytest.raises(KeyError, match="`host` must be one of a, b, got 'c'"):
        result.index("c", 0)
    with pytest.raises(IndexError, match=r"`local_rank` must be in \[0, 1\) on b, got 1"):
        result.index("b", 1)


# One launch after another.


def test_launches_in_a_launch_and_at_the_same_time_do_not_meet():
    def inner(name):
        todist.barrier()
        return name, os.environ["MASTER_PORT"], os.environ["WORLD_SIZE"]

    def outer():
        result = Launcher(nproc_per_host=2, rpc=True, handlers=[]).run(inner, my_rank())
        return result.rank(1), os.environ["MASTER_PORT"], os.getppid()

    started = time.monotonic()
    results = ON_TWO.run(outer).results["localhost"]
    took = time.monotonic() - started
    assert [inner[0] for inner, _, _ in results] == [0, 1]
    assert all(inner[2] == "2" for inner, _, _ in results)
    assert len({results[0][0][1], results[1][0][1], results[0][1]}) == 3
    assert took < soon(4.0), "the inner launches did not use the warm server"

    found = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: ON_TWO.run(lambda: n).rank(1)}))
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 0, 1: 1, 2: 2}


def test_a_second_launch_is_quick_and_nothing_of_the_first_is_left():
    ON_TWO.run(my_rank)
    me = psutil.Process()
    before = set(me.children(recursive=True))
    times = []
    with no_new_descriptors():
        for _ in range(5):
            started = time.time()
            times.append(max(ON_TWO.run(time.time).results["localhost"]) - started)
    assert min(times) < soon(0.25), times
    deadline = time.monotonic() + 1  # an agent closes its channel in the course of its exit
    while set(me.children(recursive=True)) - before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert set(me.children(recursive=True)) <= before


def test_a_variable_that_libraries_read_when_imported_makes_a_new_server():
    def parent():
        return os.getppid(), os.environ.get("TORCH_SHOW_CPP_STACKTRACES")

    def server_of(launcher):
        def main():
            return forkserver_of(os.getppid())

        return launcher.run(main).rank(0)

    plain = Launcher(nproc_per_host=1, handlers=[])
    changed = Launcher(nproc_per_host=1, handlers=[], env={"TORCH_SHOW_CPP_STACKTRACES": "1"})
    first = server_of(plain)
    assert server_of(plain) == first
    assert server_of(changed) != first
    assert changed.run(parent).rank(0)[1] == "1"
    assert not psutil.pid_exists(first)


def test_variables_that_make_a_new_server():
    """Those of the compiler too, which a server imports when it is idle; compiling itself sets the last one."""
    given = (
        "TORCH_LOGS",
        "TORCHDYNAMO_VERBOSE",
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        "HOME",
        "TORCHINDUCTOR_CACHE_DIR",
    )
    assert list(forkserver.read_on_import(dict.fromkeys(given, "1"))) == list(given[:3])


def test_a_server_that_died_is_replaced():
    def main():
        return forkserver_of(os.getppid())

    server = psutil.Process(ON_TWO.run(main).rank(0))
    server.kill()
    psutil.wait_procs([server], timeout=5)
    assert ON_TWO.run(main).rank(0) != server.pid


# Restarts.


def test_workers_are_started_again_as_often_as_asked(tmp_path, caplog):
    def main(folder):
        count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        (folder / f"{my_rank()}.{count}").touch()
        if my_rank() == 1 and count < 2:
            if count == 0:
                raise ValueError("the first time")
            os.kill(os.getpid(), 9)
        todist.auto_init_rpc()(todist.barrier)()
        return count, os.environ["TORCHELASTIC_MAX_RESTARTS"], os.environ["TORCHELASTIC_RUN_ID"]

    with caplog.at_level(logging.WARNING):
        result = Launcher(nproc_per_host=2, max_restarts=2, handlers=[]).run(main, tmp_path)
    assert result.rank(0)[:2] == result.rank(1)[:2] == (2, "2")
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "restart 1 of 2: ValueError: the first time"
    assert said[1].startswith("restart 2 of 2: rank 1 on localhost was ended by SIGKILL")
    with pytest.raises(todist.RemoteError, match="the first time"):
        Launcher(nproc_per_host=2, handlers=[]).run(main, tmp_path)


def test_a_timeout_is_for_all_attempts():
    def fail():
        time.sleep(0.5)
        raise ValueError("again")

    launcher = Launcher(nproc_per_host=1, timeout=2, max_restarts=100, handlers=[])
    started = time.monotonic()
    with pytest.raises(todist.CallTimeoutError, match="did not return within `timeout`, 2 s"):
        launcher.run(fail)
    assert time.monotonic() - started < soon(4)
