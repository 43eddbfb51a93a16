"""What a script defines is in the ``__main__`` of its workers, where plain pickle looks for it."""

from __future__ import annotations

import functools
import sys

import cloudpickle
import pytest

from tests.launch.families import with_this_server
from tests.processes import start_python
from torchopt_dist.launching import _packing as packing

pytestmark = pytest.mark.timeout(60)

SCRIPT = """
import dataclasses, enum, functools, os, pickle, sys
import torch, torch.distributed as dist
from torchopt_dist.launching import Launcher

class Net(torch.nn.Linear):
    pass

@dataclasses.dataclass
class Stat:
    loss: float

class Color(enum.Enum):
    RED = 1

def double(x):
    return 2 * x

def use():
    return double(Color.RED.value)

def save(path):
    path += os.environ["RANK"]
    torch.save(Net(2, 2), path)
    assert type(torch.load(path, weights_only=False)) is Net
    return pickle.dumps([Color.RED, Stat(1.0), double, save])

def gather():
    found = [None] * 2
    dist.all_gather_object(found, Stat(float(os.environ["RANK"])))
    assert all(isinstance(each, Stat) for each in found)
    return found

elastic = {"min_hosts": 1} if sys.argv[2] == "elastic" else {}
launcher = Launcher(nproc_per_host=2, handlers=[], log_dir=None, **elastic)
dumped = launcher.run(save, sys.argv[1] + "/net").rank(1)
assert pickle.loads(dumped) == [Color.RED, Stat(1.0), double, save]
assert isinstance(torch.load(sys.argv[1] + "/net1", weights_only=False), Net)
assert launcher.run(functools.partial(use)).rank(0) == 2
(found,) = {str(each) for each in Launcher(
    nproc_per_host=2, backend="gloo", handlers=[], log_dir=None, **elastic
).run(gather).results["localhost"]}
assert found == "[Stat(loss=0.0), Stat(loss=1.0)]", found
both = launcher.run(lambda: (Stat, Stat(2.0))).rank(0)
assert both[0] is Stat and isinstance(both[1], Stat)
print("DONE")
"""


@pytest.mark.parametrize("kind", ["plain", "elastic"])
def test_what_a_script_defines_can_be_pickled_by_name(tmp_path, kind):
    script = tmp_path / "script.py"
    script.write_text(with_this_server(SCRIPT))
    program = start_python(script, tmp_path, kind)
    out, err = program.communicate(timeout=50)
    assert (program.returncode, out) == (0, "DONE\n"), err


DECORATED = """
import functools, typing
import torchopt_dist as todist
from torchopt_dist.launching import Launcher

T, Ts, P = typing.TypeVar("T"), typing.TypeVarTuple("Ts"), typing.ParamSpec("P")
Id = typing.NewType("Id", int)

class Box(typing.Generic[T, typing.Unpack[Ts]]):
    def __init__(self, value):
        self.value = value

class Task(typing.Generic[P]):
    made: "Box[Id]"

@functools.lru_cache(maxsize=7)
def table(n):
    return 1 if n < 2 else n * table(n - 1)  # refers to the cache, not to what it wraps

@functools.singledispatch
def kind(x):
    "What it is."
    return "object"

@kind.register
def _(x: int):
    return "int"

@kind.register
def _(x: list):
    return [kind(each) for each in x]

class Steps(functools.cached_property):
    pass

class Config:
    @functools.cached_property
    def steps(self):
        return 3

    @Steps
    def more(self):
        return self.steps + 1

    @functools.cache
    def twice(self, x):
        return 2 * x

    @functools.singledispatchmethod
    def show(self, x):
        return "object"

    @show.register
    def _(self, x: str):
        return "str"

def use():
    assert table(5) == 120 and table.cache_info().misses == 5 and table.cache_parameters()["maxsize"] == 7
    assert kind([1, None]) == ["int", "object"] and kind.__doc__ == "What it is." and kind.__name__ == "kind"
    config = Config()
    assert (config.steps, config.more, config.twice(4)) == (3, 4, 8)
    assert (config.show("s"), config.show(0)) == ("str", "object")
    assert vars(config) == {"steps": 3, "more": 4}
    assert Box[int, str](3).value == 3 and Task[[int, str]].__args__ == ((int, str),)
    assert Box.__parameters__[0] is T and (T.__name__, P.__name__, Id(2), Id.__supertype__) == ("T", "P", 2, int)
    return kind, table, Box[Id, str](config), Id, P

def call():
    return todist.remote_call(lambda n: (table(n), kind(n), Config().steps), 1, 4)

if __name__ == "__main__":
    launcher = Launcher(nproc_per_host=1, handlers=[], log_dir=None)
    kind_, table_, box, *_ = launcher.run(use).rank(0)
    assert (kind_(1), table_(3), type(box) is Box, type(box.value) is Config) == ("int", 6, True, True)
    for each, args, y in ((table, (4,), 24), (kind, ("s",), "object"), (functools.partial(table, 3), (), 6)):
        assert launcher.run(each, *args).rank(0) == y
    two = Launcher(nproc_per_host=2, rpc=True, handlers=[], log_dir=None)
    assert two.run(todist.rank_zero_only(call)).rank(0) == (24, "int", 3)
    print("DONE")
"""

CHILD = """
import multiprocessing, os, sys, typing

T = typing.TypeVar("T")

class Box(typing.Generic[T]):
    def __init__(self, value):
        self.value = value

def rank(box):
    return Box(box.value + int(os.environ["RANK"]))

def child():
    from torchopt_dist.launching import Launcher
    boxes = Launcher(nproc_per_host=2, handlers=[], log_dir=None).run(rank, Box(3)).results["localhost"]
    assert all(type(box) is Box for box in boxes)
    print([box.value for box in boxes], flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[2]).Process(target=child)
    process.start(); process.join()
    print("DONE" if process.exitcode == 0 else process.exitcode)
"""

BY_HAND = """
import importlib.util, pathlib, sys
import torchopt_dist as todist
from torchopt_dist.launching import Launcher

file = pathlib.Path(sys.argv[1]) / "exp_one.py"
file.write_text('''
import dataclasses, functools, os, typing
T = typing.TypeVar("T")
@dataclasses.dataclass
class Cfg(typing.Generic[T]):
    n: int
@functools.cache
def base():
    return 1
def work(c):
    return Cfg(c.n + base() + int(os.environ["RANK"]))
''')
spec = importlib.util.spec_from_file_location("experiments.one", file)
one = sys.modules["experiments.one"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(one)
launcher = Launcher(nproc_per_host=2, handlers=[], log_dir=None)
assert launcher.run(one.work, one.Cfg(5)).results["localhost"] == [one.Cfg(6), one.Cfg(7)]
assert launcher.run(lambda: one.work(one.Cfg(5))).rank(1) == one.Cfg(7)  # the module itself
two = Launcher(nproc_per_host=2, rpc=True, handlers=[], log_dir=None)
assert two.run(todist.rank_zero_only(lambda: todist.remote_call(one.work, 1, one.Cfg(5)))).rank(0) == one.Cfg(7)
print("DONE")
"""


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        (DECORATED, "", "DONE\n"),
        pytest.param(CHILD, "spawn", "[3, 4]\nDONE\n", marks=pytest.mark.nightly),
        (CHILD, "forkserver", "[3, 4]\nDONE\n"),
        (BY_HAND, "", "DONE\n"),
    ],
    ids=["decorated", "spawn", "forkserver", "by hand"],
)
def test_what_pickle_would_look_for_by_name_is_sent_by_its_parts(tmp_path, text, more, words):
    script = tmp_path / "script.py"
    script.write_text(text if more else with_this_server(text))
    program = start_python(script, tmp_path, more)
    out, err = program.communicate(timeout=50)
    assert (program.returncode, out) == (0, words), err


IMPORTED = """
from torchopt_dist.launching import Launcher

def f():
    return 3

found = Launcher(nproc_per_host=1, handlers=[], log_dir=None, timeout=30).run(f).rank(0)
"""

IMPORTS = """
import torchopt_dist as todist
from torchopt_dist.launching import Launcher

try:
    import launches
except todist.errors.InitializationError as error:
    assert isinstance(error, todist.RemoteError), error
    assert "module 'launches' launches workers at its top level" in str(error), error
except todist.errors.SerializationError as error:
    assert "module 'launches' launches workers at its top level" in str(error), error
else:
    raise AssertionError
print("DONE")
"""


def test_a_module_that_launches_while_workers_import_it_is_told(tmp_path):
    (tmp_path / "launches.py").write_text(IMPORTED)
    (tmp_path / "script.py").write_text(with_this_server(IMPORTS))
    out, err = start_python(tmp_path / "script.py").communicate(timeout=50)
    assert out == "DONE\n", err


SIGNALS = """
import os, signal, time
import torchopt_dist as todist
from torchopt_dist.launching import Launcher

blocked = {signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1, signal.SIGRTMAX - 1}
signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
for number in (signal.SIGCHLD, signal.SIGUSR2, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)

def main():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)

def tell():
    numbers = (signal.SIGCHLD, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM)
    own = [signal.getsignal(number) is signal.SIG_IGN for number in numbers]
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), own

launcher = Launcher(nproc_per_host=2, handlers=[], log_dir=None, timeout=20)
assert launcher.run(tell).rank(1) == ([], [False] * 4), launcher.run(tell)
try:
    launcher.run(main)
except todist.errors.WorkerFailedError:
    print("DONE")
"""


def test_signals_that_the_program_blocks_or_ignores_reach_its_workers(tmp_path):
    (tmp_path / "script.py").write_text(SIGNALS)
    out, err = start_python(tmp_path / "script.py").communicate(timeout=50)
    assert out == "DONE\n", err


@pytest.fixture
def main(monkeypatch):
    """What is in a ``__main__`` of its own, in a copy of this process's."""
    fresh = type(sys)("__main__")
    fresh.taken = "before"
    monkeypatch.setitem(sys.modules, "__main__", fresh)
    return vars(fresh)


def functions(**names):
    there = {"__name__": "__main__"}
    code = "\n".join(f"def {name}(): {body}" for name, body in names.items())
    exec(code, there)
    return cloudpickle.loads(cloudpickle.dumps([there[name] for name in names]))


def test_functions_and_those_that_they_call_are_put_there(main):
    first, *_ = functions(first="return second()", second="return taken()", taken="return 3")
    task = functools.partial(print, functools.partial(first), key=len)
    packing.fill_main((task,))
    assert main["first"] is first
    assert main["second"] is first.__globals__["second"]
    assert main["taken"] == "before"
    assert "print" not in main
    assert "len" not in main


def test_without_cloudpickle_s_list_of_classes_work_goes_on(main, monkeypatch):
    monkeypatch.delattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS")
    task = (max, (1, 2), {})
    assert packing.unpack_task(packing.pack_task(*task)) == task


def test_what_a_function_or_a_class_defines_is_not_put_there(main):
    there = {"__name__": "__main__"}
    exec(
        "def outer():\n"
        "    class Local:\n"
        "        def method(self): pass\n"
        "    def inner(): pass\n"
        "    return Local(), inner\n"
        "class Outer:\n"
        "    class Nested:\n"
        "        def method(self): pass\n"
        "    def method(self): pass\n",
        there,
    )
    parts = cloudpickle.dumps((*there["outer"](), there["Outer"](), there["Outer"].Nested()))
    code = f"""
import cloudpickle, sys
from torchopt_dist.launching import _packing as packing
parts = cloudpickle.loads({parts!r})
packing.fill_main(parts)
main = vars(sys.modules["__main__"])
assert main["Outer"] is type(parts[2])
assert [type(part).__name__ for part in parts] == ["Local", "function", "Outer", "Nested"]
assert not main.keys() & {{"Local", "inner", "Nested", "method"}}
"""
    program = start_python("-c", code)
    _, err = program.communicate(timeout=50)
    assert program.returncode == 0, err
