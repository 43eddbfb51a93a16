"""A copy of the tree and a toolkit for CUDA, real or emulated → the second library, or a note of why there is none.

The emulated toolkit has a compiler that runs the kernels' threads one after the other on the CPU, so that the whole
way from setup.py to the numbers can be walked without a GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.packaging.trees import KERNEL, OP, ROOT, TIMEOUT, copy_tree
from tests.warm_python import WarmPython

EMULATED = Path(__file__).with_name("emulated_cuda")
COMPILER = os.environ.get("CXX", "c++").split()[0]
TOOLS = [COMPILER, "c++", "g++", "cc", "gcc", "ld", "as", "nm", "bash", "dirname", "cat"]
pytestmark = [
    pytest.mark.skipif(
        shutil.which(COMPILER) is None or sys.platform == "win32", reason=f"no C++ compiler: `{COMPILER}`"
    ),
    pytest.mark.timeout(2 * TIMEOUT),
]
CUDA_TORCH = "import torch; torch.version.cuda = '13.0'; torch._C._cuda_getDeviceCount = lambda: 0\n"
SETUP = "import runpy, sys; sys.argv[0] = 'setup.py'; runpy.run_path('setup.py', run_name='__main__')\n"
LOADED = "torch finds no GPU"
"""What is said of a CUDA library that is there and loads."""
PROBE = f"from torchopt_dist import ops; print(ops.why_not({OP!r}, 'cuda'))"


def python_path(*folders: Path) -> str:
    """These folders, before those of this process."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


class Python:
    """Runs Python with the emulated toolkit's libraries; the value of a variable that is to be absent is empty."""

    def __init__(self, toolkit: Path) -> None:
        self.toolkit = toolkit
        self.server = WarmPython("torch", "setuptools", LD_LIBRARY_PATH=f"{toolkit}/lib64")

    def __call__(self, code: str, *args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
        others = ("REQUIRE_EXT", "FORCE_CUDA", "TORCH_CUDA_ARCH_LIST", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")
        absent = dict.fromkeys(others, "")
        environ = {**os.environ, **absent, "CXX": f"{self.toolkit}/bin/c++", **env}
        environ = {name: value for name, value in environ.items() if value}
        return self.server.run("-c", code, *args, cwd=cwd, env=environ, timeout=TIMEOUT)

    def build(self, tree: Path, before: str = CUDA_TORCH, **env: str) -> subprocess.CompletedProcess[str]:
        return self(before + SETUP, "build_ext", "--inplace", cwd=tree, **env)

    def why_not(self, tree: Path, before: str = CUDA_TORCH) -> str:
        if torch.version.cuda is not None:  # then torch has a libtorch_cuda of its own, which is found first
            library = str(self.toolkit / "lib64/libtorch_cuda.so")
            before += f"import ctypes; ctypes.CDLL({library!r}, ctypes.RTLD_GLOBAL)\n"
        done = self(before + PROBE, cwd=tree)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toolkit") / "cuda"
    shutil.copytree(EMULATED, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "lib64").mkdir()
    # What is built is tried, not timed: -O3 takes the compiler longer.
    (folder / "bin/c++").write_text(
        f'#!/usr/bin/env bash\nexec "{shutil.which(COMPILER)}" "${{@/#-O3/-O0}}"\n'
    )
    (folder / "bin/c++").chmod(0o755)
    for name, source in (("torch_cuda", "runtime.cpp"), ("c10_cuda", "/dev/null"), ("cudart", "/dev/null")):
        target = folder / f"lib64/lib{name}.so"
        subprocess.run(
            [COMPILER, "-shared", "-fPIC", "-x", "c++", source, "-o", target], cwd=folder, check=True
        )
    return folder


@pytest.fixture(scope="module")
def python(toolkit: Path) -> Iterator[Python]:
    made = Python(toolkit)
    yield made
    made.server.close()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("sources") / "tree")


@pytest.fixture
def tree(sources: Path) -> Path:
    """The sources, with nothing built but the object files of the tests before, at the place where these left them.

    As they have the times of the sources, ninja compiles again what a test has changed, or compiles otherwise.
    """
    place, kept = sources.with_name("used"), sources.with_name("objects")
    found = [*place.glob("build/temp*")]
    if found:
        found[0].rename(kept)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(sources, place)
    if found:
        (place / "build").mkdir()
        kept.rename(place / "build" / found[0].name)
    return place


@pytest.mark.nightly
def test_both_libraries_are_built_and_the_kernels_are_right(python, toolkit, tmp_path):
    tree = copy_tree(tmp_path, ("adam", "rmsprop", "sgd"))
    (tree / "torchopt_dist/_cuda_note.txt").write_text("stale")
    done = python.build(tree, CUDA_HOME=str(toolkit), REQUIRE_EXT="1", FORCE_CUDA="1")
    assert done.returncode == 0, done.stderr
    made = {path.name for path in tree.glob("torchopt_dist/_*.*") if path.suffix != ".py"}
    assert made == {"_C.abi3.so", "_C_cuda.abi3.so"}
    assert python.why_not(tree) == LOADED
    if shutil.which("nm"):
        library = tree / "torchopt_dist/_C_cuda.abi3.so"
        listing = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        )
        symbols = [line.split()[-1] for line in listing.stdout.splitlines()]
        assert "aoti_torch_get_current_cuda_stream" in symbols
        assert not [symbol for symbol in symbols if re.match(r"_ZN?K?(2at|3c10|5torch|5caffe)|Py", symbol)]

    (tree / "tests/ops").mkdir(parents=True)
    for name in ("test_cuda.py", "cases.py", "formulas.py"):
        shutil.copy(ROOT / "tests/ops" / name, tree / "tests/ops")
    options = "['-q', '-p', 'redispatch', '-p', 'no:cacheprovider', 'tests/ops/test_cuda.py']"
    tested = python(
        f"import pytest, sys; sys.exit(pytest.main({options}))",
        cwd=tree,
        CUDA_HOME=str(toolkit),
        PYTHONPATH=python_path(toolkit, tree),
        EMULATED_CUDA_DEVICE="cpu",
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert int(re.search(r"(\d+) passed", tested.stdout)[1]) > 50


@pytest.mark.nightly
def test_no_ninja_builds_by_distutils(python, toolkit, tree, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in {Path(tool).name: tool for tool in TOOLS}.values():
        if found := shutil.which(tool):
            (folder / Path(tool).name).symlink_to(found)
    done = python.build(tree, CUDA_HOME=str(toolkit), FORCE_CUDA="1", PATH=str(folder))
    assert done.returncode == 0, done.stderr
    assert python.why_not(tree) == LOADED


@pytest.mark.nightly
def test_a_launch_that_fails_raises(python, toolkit, tree):
    assert python.build(tree, CUDA_HOME=str(toolkit), FORCE_CUDA="1").returncode == 0
    code = """
import redispatch, torch
from torchopt_dist import ops
from ctypes import c_long
params, updates = [torch.ones(3)] * 3, [torch.ones(3) for _ in range(3)]
c_long.in_dll(redispatch.runtime, "emulated_failure").value = 700
try:
    torch.ops.todist.add_scaled_(params, updates, 1.0)
except RuntimeError as error:
    print(error)
torch.ops.todist.add_scaled_([torch.ones(3) for _ in range(3)], updates, 1.0)
torch.ops.todist.add_scaled_([torch.empty(0)], [torch.empty(0)], 1.0)
print(c_long.in_dll(redispatch.runtime, "emulated_launches").value, params[0].tolist())
"""
    done = python(
        code,
        cwd=tree,
        CUDA_HOME=str(toolkit),
        PYTHONPATH=python_path(toolkit, tree),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["CUDA error: 700", "1 [1.0, 1.0, 1.0]"]


@pytest.mark.parametrize("case", ["no nvcc", "nvcc fails", "versions differ"])
def test_without_the_cuda_part_the_cpu_part_is_built(python, case, toolkit, tree, tmp_path):
    home = tmp_path / "cuda"
    shutil.copytree(toolkit, home)
    if case == "no nvcc":
        (home / "bin/nvcc").unlink()
        reason = rf"there is no nvcc in {home}/bin; `CUDA_HOME` names another toolkit"
    elif case == "nvcc fails":
        (tree / f"csrc/{KERNEL}/cuda.cu").write_text("this is not CUDA\n")
        reason = r"compiling csrc/ failed \(\w+: .*"
    else:
        reason = r"compiling csrc/ failed \(RuntimeError: .*12\.4.*"
    version = "12.4" if case == "versions differ" else ""
    (tree / "torchopt_dist/_C_cuda.abi3.so").write_text("stale")
    done = python.build(tree, CUDA_HOME=str(home), EMULATED_CUDA=version)
    assert done.returncode == 0, done.stderr
    assert re.search(f"torchopt_dist is installed without CUDA kernels: {reason}", done.stderr), done.stderr
    assert (tree / "torchopt_dist/_C.abi3.so").is_file()
    assert not [*tree.rglob("_C_cuda*.so")]
    said = python.why_not(tree)
    assert re.match(
        f"`{OP}` has no CUDA kernel; this build has CPU only: the CUDA library was not built: " + reason,
        said,
    )
    refused = python.build(tree, CUDA_HOME=str(home), EMULATED_CUDA=version, FORCE_CUDA="1")
    assert refused.returncode == 1
    assert "error: FORCE_CUDA=1, but " in refused.stderr


def test_a_torch_without_cuda(python, toolkit, tree):
    without = "import torch; torch.version.cuda = None\n"
    done = python.build(tree, without, CUDA_HOME=str(toolkit))
    assert done.returncode == 0, done.stderr
    assert re.search(r"installed without CUDA kernels: torch \S+ is built without CUDA\n", done.stderr)
    assert re.fullmatch(
        rf"`{OP}` has no CUDA kernel; this build has CPU only: torch \S+ is built without CUDA",
        python.why_not(tree, without),
    )
    refused = python.build(tree, without, CUDA_HOME=str(toolkit), FORCE_CUDA="1")
    assert refused.returncode == 1
    assert re.search(
        r"FORCE_CUDA=1, but the CUDA kernels cannot be built: torch \S+ is built w", refused.stderr
    )


@pytest.mark.parametrize("spilled", [0, 8])
def test_compile_cuda_fails_where_registers_spill(python, spilled, tree, tmp_path):
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    report = f"ptxas info: 0 bytes stack frame, {spilled} bytes spill stores\\nptxas info: Used 40 registers"
    nvcc.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/arguments"\nprintf "{report}\\n" >&2\n')
    nvcc.chmod(0o755)
    without = "import torch; torch.version.cuda = None\n"
    done = python(
        without + SETUP, "compile_cuda", "--architectures=9.0a", cwd=tree, CUDA_HOME=f"{tmp_path}/cuda"
    )
    assert done.returncode == (1 if spilled else 0), done.stderr
    assert "code=sm_90a" in (tmp_path / "arguments").read_text()
    if spilled:
        assert "error: a CUDA kernel does not compile, or spills registers" in done.stderr
    else:
        assert f"csrc/{KERNEL}/cuda.cu: 1 kernels, 40 to 40 registers, no spills" in done.stdout


def test_compile_cuda_without_a_compiler_is_an_error(python, tree, tmp_path):
    done = python(SETUP, "compile_cuda", cwd=tree, CUDA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "there is no nvcc; `CUDA_HOME` names the toolkit" in done.stderr
