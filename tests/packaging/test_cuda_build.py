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
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EMULATED = Path(__file__).with_name("emulated_cuda")
COMPILER = os.environ.get("CXX", "c++").split()[0]
TOOLS = [COMPILER, "c++", "g++", "cc", "gcc", "ld", "as", "nm", "bash", "dirname", "cat"]
pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None or sys.platform == "win32", reason=f"no C++ compiler: `{COMPILER}`"
)
CUDA_TORCH = "import torch; torch.version.cuda = '13.0'; torch._C._cuda_getDeviceCount = lambda: 0\n"
SETUP = "import runpy, sys; sys.argv[0] = 'setup.py'; runpy.run_path('setup.py', run_name='__main__')\n"
LOADED = "torch finds no GPU"
"""What is said of a CUDA library that is there and loads."""
PROBE = "from torchopt_dist import ops; print(ops.why_not('add_scaled_', 'cuda'))"


def python(code: str, *args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run this Python; an environment variable that is to be absent is given as an empty text."""
    environ = {**os.environ, "REQUIRE_EXT": "", "FORCE_CUDA": "", "TORCH_CUDA_ARCH_LIST": "", **env}
    environ = {name: value for name, value in environ.items() if value}
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=cwd, env=environ, capture_output=True, text=True, timeout=220
    )


def build(tree: Path, *, cuda_torch: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    return python((CUDA_TORCH if cuda_torch else "") + SETUP, "build_ext", "--inplace", cwd=tree, **env)


def why_not(tree: Path, toolkit: Path, before: str = CUDA_TORCH) -> str:
    if torch.version.cuda is not None:  # then torch has a libtorch_cuda of its own, which is found first
        library = str(toolkit / "lib64/libtorch_cuda.so")
        before += f"import ctypes; ctypes.CDLL({library!r}, ctypes.RTLD_GLOBAL)\n"
    done = python(before + PROBE, cwd=tree, LD_LIBRARY_PATH=f"{toolkit}/lib64")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toolkit") / "cuda"
    shutil.copytree(EMULATED, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "lib64").mkdir()
    for name, source in (("torch_cuda", "runtime.cpp"), ("c10_cuda", "/dev/null"), ("cudart", "/dev/null")):
        target = folder / f"lib64/lib{name}.so"
        subprocess.run(
            [COMPILER, "-shared", "-fPIC", "-x", "c++", source, "-o", target], cwd=folder, check=True
        )
    return folder


def copy_tree(to: Path, kernels: tuple[str, ...] = ()) -> Path:
    """What an installation reads; of the CPU's kernels, one, and CUDA's for the same op and these."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    ignore = shutil.ignore_patterns("_C*", "_build_note.txt", "_cuda_note.txt", "__pycache__")
    for name in ("csrc", "torchopt_dist"):
        shutil.copytree(ROOT / name, to / name, ignore=ignore)
    for path in (*to.glob("csrc/*/cpu.cpp"), *to.glob("csrc/*/cuda.cu")):
        if path.parent.name != "add_scaled" and not (path.suffix == ".cu" and path.parent.name in kernels):
            path.unlink()
    return to


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    return copy_tree(tmp_path / "tree")


@pytest.mark.timeout(240)
def test_both_libraries_are_built_and_the_kernels_are_right(toolkit, tmp_path):
    tree = copy_tree(tmp_path, ("adam", "rmsprop", "sgd"))
    (tree / "torchopt_dist/_cuda_note.txt").write_text("stale")
    done = build(tree, CUDA_HOME=str(toolkit), REQUIRE_EXT="1", FORCE_CUDA="1")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tree.glob("torchopt_dist/_*")} - {"__init__.py", "__main__.py"} == {
        "_C.abi3.so",
        "_C_cuda.abi3.so",
    }
    assert why_not(tree, toolkit) == LOADED
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
        LD_LIBRARY_PATH=f"{toolkit}/lib64",
        PYTHONPATH=f"{toolkit}:{tree}",
        EMULATED_CUDA_DEVICE="cpu",
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert int(re.search(r"(\d+) passed", tested.stdout)[1]) > 50


def test_no_ninja_builds_by_distutils(toolkit, tree, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in {Path(tool).name: tool for tool in TOOLS}.values():
        if found := shutil.which(tool):
            (folder / Path(tool).name).symlink_to(found)
    done = build(tree, CUDA_HOME=str(toolkit), FORCE_CUDA="1", PATH=str(folder))
    assert done.returncode == 0, done.stderr
    assert why_not(tree, toolkit) == LOADED


def test_a_launch_that_fails_raises(toolkit, tree):
    assert build(tree, CUDA_HOME=str(toolkit), FORCE_CUDA="1").returncode == 0
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
        LD_LIBRARY_PATH=f"{toolkit}/lib64",
        PYTHONPATH=f"{toolkit}:{tree}",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["CUDA error: 700", "1 [1.0, 1.0, 1.0]"]


@pytest.mark.parametrize("case", ["no nvcc", "nvcc fails", "versions differ"])
def test_without_the_cuda_part_the_cpu_part_is_built(case, toolkit, tree, tmp_path):
    home = tmp_path / "cuda"
    shutil.copytree(toolkit, home)
    if case == "no nvcc":
        (home / "bin/nvcc").unlink()
        reason = rf"there is no nvcc in {home}/bin; `CUDA_HOME` names another toolkit"
    elif case == "nvcc fails":
        (tree / "csrc/add_scaled/cuda.cu").write_text("this is not CUDA\n")
        reason = r"compiling csrc/ failed \(\w+: .*"
    else:
        reason = r"compiling csrc/ failed \(RuntimeError: .*12\.4.*"
    version = "12.4" if case == "versions differ" else ""
    (tree / "torchopt_dist/_C_cuda.abi3.so").write_text("stale")
    done = build(tree, CUDA_HOME=str(home), EMULATED_CUDA=version)
    assert done.returncode == 0, done.stderr
    assert re.search(f"torchopt_dist is installed without CUDA kernels: {reason}", done.stderr), done.stderr
    assert (tree / "torchopt_dist/_C.abi3.so").is_file()
    assert not [*tree.rglob("_C_cuda*.so")]
    said = why_not(tree, home)
    assert re.match(
        "`add_scaled_` has no CUDA kernel; this build has CPU only: the CUDA library was not built: "
        + reason,
        said,
    )
    refused = build(tree, CUDA_HOME=str(home), EMULATED_CUDA=version, FORCE_CUDA="1")
    assert refused.returncode == 1
    assert "error: FORCE_CUDA=1, but " in refused.stderr


def test_a_torch_without_cuda(toolkit, tree):
    without = "import torch; torch.version.cuda = None\n"
    done = python(without + SETUP, "build_ext", "--inplace", cwd=tree, CUDA_HOME=str(toolkit))
    assert done.returncode == 0, done.stderr
    assert re.search(r"installed without CUDA kernels: torch \S+ is built without CUDA\n", done.stderr)
    assert re.fullmatch(
        r"`add_scaled_` has no CUDA kernel; this build has CPU only: torch \S+ is built without CUDA",
        why_not(tree, toolkit, without),
    )
    refused = python(
        without + SETUP, "build_ext", "--inplace", cwd=tree, CUDA_HOME=str(toolkit), FORCE_CUDA="1"
    )
    assert refused.returncode == 1
    assert re.search(
        r"FORCE_CUDA=1, but the CUDA kernels cannot be built: torch \S+ is built w", refused.stderr
    )


@pytest.mark.parametrize("spilled", [0, 8])
def test_compile_cuda_fails_where_registers_spill(spilled, tree, tmp_path):
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
        assert "csrc/add_scaled/cuda.cu: 1 kernels, 40 to 40 registers, no spills" in done.stdout


def test_compile_cuda_without_a_compiler_is_an_error(tree, tmp_path):
    done = python(SETUP, "compile_cuda", cwd=tree, CUDA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "there is no nvcc; `CUDA_HOME` names the toolkit" in done.stderr
