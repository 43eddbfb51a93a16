from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torchopt_dist as todist

ROOT = Path(__file__).parents[1]

SAME_OBJECTS = """
import torchopt_dist as ours
from torchopt_dist import compat

compat.install()
compat.install()  # a second time it does nothing

import pickle
import sys

import torchopt
import torchopt.distributed as todist
import torchopt.optim.sgd
from torchopt import MetaSGD, distributed, module_clone
from torchopt.base import GradientTransformation
from torchopt.combine import chain
from torchopt.distributed.autograd import context
from torchopt.nn import *
from torchopt.utils import extract_state_dict

assert torchopt is sys.modules["torchopt"] and todist is distributed is torchopt.distributed
assert torchopt.distributed.parallelize is todist.parallelize is ours.parallelize
assert todist.module_clone is torchopt.module_clone is module_clone is ours.module_clone
assert todist.autograd is torchopt.distributed.autograd and todist.autograd.context is context is ours.autograd.context
assert MetaSGD is ours.MetaSGD and GradientTransformation is ours.GradientTransformation and chain is ours.chain
assert extract_state_dict is ours.extract_state_dict and stop_gradient is ours.stop_gradient
assert torchopt.__version__ == ours.__version__
assert "parallelize" in dir(todist) and "MetaSGD" in dir(torchopt) and "module_clone" in dir(torchopt.nn)
assert callable(ours.optim.sgd), "an import of torchopt.optim.sgd, a module, leaves ours alone"
assert pickle.loads(pickle.dumps(torchopt.SGD)) is ours.SGD
assert not hasattr(torchopt, "NoSuchName") and not hasattr(todist, "_private")
"""


def python(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=50
    )


@pytest.mark.timeout(60)
def test_torchopt_means_torchopt_dist() -> None:
    ended = python("-c", SAME_OBJECTS)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.timeout(60)
def test_missing_names_say_what_is_missing() -> None:
    program = """
from torchopt_dist import compat

compat.install()
import torchopt.distributed
for statement in ("import torchopt.nothing", "from torchopt import Nothing", "import torchopt.nn.nothing",
                  "from torchopt.distributed import nothing", "torchopt.Nothing", "torchopt.distributed.nothing"):
    try:
        exec(statement)
    except (ImportError, AttributeError) as error:
        print(f"{statement}: {type(error).__name__}: {error}")
"""
    lines = python("-c", program).stdout.splitlines()
    assert len(lines) == 6
    for line in lines:
        statement, kind, message = line.split(": ", 2)
        assert kind == ("ModuleNotFoundError" if "import" in statement else "AttributeError")
        assert message.startswith("there is no `torchopt.")
        assert "torchopt_dist stands in for torchopt here, and it has no such name (yet)" in message


@pytest.mark.timeout(60)
def test_refuses_where_torchopt_is_imported_already(tmp_path: Path) -> None:
    (tmp_path / "torchopt.py").write_text("")
    program = "import torchopt; from torchopt_dist import compat; compat.install()"
    ended = python("-c", program, cwd=tmp_path)
    assert "ImportError: torchopt_dist cannot stand in for torchopt" in ended.stderr
    assert str(tmp_path / "torchopt.py") in ended.stderr


@pytest.mark.timeout(60)
def test_a_script_runs_as_python_would_run_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("import torchopt\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pickle, sys\n"
        "import beside, torchopt.distributed as todist\n"
        "from torchopt_dist.distributed import init_rpc\n"
        "def function(): ...\n"
        "@todist.auto_init_rpc()\n"
        "def main():\n"
        "    [value] = todist.remote_sync_call(abs, args=(-3,), partitioner=0)\n"
        "    return value\n"
        "if __name__ == '__main__':\n"
        "    assert sys.modules['__main__'].function is function is pickle.loads(pickle.dumps(function))\n"
        "    print(sys.argv, sys.path[0], init_rpc._program(), os.getcwd() in sys.path, main(), sep='\\n')\n"
        "    sys.exit(7)\n"
    )
    ended = python("-m", "torchopt_dist.compat", script, "--lr", "0.1", "-m", cwd=ROOT)
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout.splitlines() == [
        str([str(script), "--lr", "0.1", "-m"]),
        str(tmp_path),
        str(script),
        "False",
        "3",
    ]


@pytest.mark.timeout(60)
def test_usage_and_missing_script(tmp_path: Path) -> None:
    ended = python("-m", "torchopt_dist.compat")
    assert ended.returncode == 1
    assert ended.stderr.startswith("usage: python -m torchopt_dist.compat SCRIPT [ARGUMENT...]")
    ended = python("-m", "torchopt_dist.compat", tmp_path / "nothing.py")
    assert ended.returncode == 1
    assert f"there is no script '{tmp_path / 'nothing.py'}'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_flat_names_stay_ours() -> None:
    assert "torchopt" not in sys.modules, "a test must not leave the stand-in behind"
    assert todist.distributed.__name__ == "torchopt_dist.distributed"
