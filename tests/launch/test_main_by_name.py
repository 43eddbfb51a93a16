"""What a script defines is in the ``__main__`` of its workers, where plain pickle looks for it."""

from __future__ import annotations

import functools
import sys

import cloudpickle
import pytest

from tests.launch.families import with_this_server
from tests.processes import start_python
from torchopt_dist.launching import _pickling as pickling

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
    pickling.fill_main((task,))
    assert main["first"] is first
    assert main["second"] is first.__globals__["second"]
    assert main["taken"] == "before"
    assert "print" not in main
    assert "len" not in main


def test_without_cloudpickle_s_list_of_classes_work_goes_on(main, monkeypatch):
    monkeypatch.delattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS")
    task = (max, (1, 2), {})
    assert pickling.unpack_task(pickling.pack_task(*task)) == task


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
from torchopt_dist.launching import _pickling as pickling
parts = cloudpickle.loads({parts!r})
pickling.fill_main(parts)
main = vars(sys.modules["__main__"])
assert main["Outer"] is type(parts[2])
assert [type(part).__name__ for part in parts] == ["Local", "function", "Outer", "Nested"]
assert not main.keys() & {{"Local", "inner", "Nested", "method"}}
"""
    program = start_python("-c", code)
    _, err = program.communicate(timeout=50)
    assert program.returncode == 0, err
