"""A folder with, without, or with a broken kernel library → what ops says of it."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.rows import each_row
from tests.warm_python import WarmPython
from torchopt_dist import ops
from torchopt_dist.ops import library
from torchopt_dist.ops.library import remedy

PACKAGE = Path(ops.__file__).resolve().parent.parent
BUILT = any(PACKAGE.glob("_C.*"))
WITH_CUDA = ops.why_not("adam", "cuda") in (None, "torch finds no GPU")


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    """Forks of a process that has imported torch, and no part of this package."""
    server = WarmPython("torch", "torch.distributed.rpc")
    yield server
    server.close()


def run_copy(
    python: WarmPython, tmp_path: Path, code: str, files: dict[str, str], keep: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run code on a copy of the package that has these files instead of its libraries, except one to keep."""
    ignore = shutil.ignore_patterns("_C*", "_build_note.txt", "_cuda_note.txt", "*.pyc.*")
    shutil.copytree(PACKAGE, tmp_path / "torchopt_dist", ignore=ignore)
    for path in PACKAGE.glob(keep) if keep else ():
        shutil.copy(path, tmp_path / "torchopt_dist")
    for name, text in files.items():
        (tmp_path / "torchopt_dist" / name).write_text(text)
    return python.run("-W", "error", "-c", code, cwd=tmp_path, timeout=250)


def test_truth_about_this_build():
    assert ops.is_available("adam") is BUILT
    assert (ops.why_not("adam") is None) is BUILT
    assert not ops.is_available("adam", "meta")


@pytest.mark.skipif(not BUILT, reason="the kernel library is not built here")
def test_a_device_without_a_kernel():
    have = "CPU and CUDA" if WITH_CUDA else "CPU"
    expected = f"`adam` has no META kernel; this build has {have} only"
    assert ops.why_not("adam", "meta") == expected
    assert ops.why_not("adam", torch.device("cpu", 0)) is None


@pytest.mark.skipif(not BUILT or WITH_CUDA, reason="needs a build for the CPU only")
def test_cuda_without_a_cuda_kernel():
    reason = ops.why_not("adam", "cuda:1")
    assert reason is not None
    start, _, because = reason.partition(": ")
    assert start == "`adam` has no CUDA kernel; this build has CPU only"
    if torch.version.cuda is None:
        assert because == f"torch {torch.__version__} is built without CUDA"
    else:
        assert because.startswith("the CUDA library ")


def test_unknown_op():
    with pytest.raises(ValueError, match=r"`op` must be one of .*adam.*; got 'sgdd'"):
        ops.is_available("sgdd")


def test_load_says_that_nothing_is_there(tmp_path):
    reason = library.load(tmp_path)
    assert reason is not None
    assert reason.startswith("the kernel library was not built: there is no _C")
    assert str(tmp_path) in reason


def test_load_reads_the_note_of_the_build(tmp_path):
    (tmp_path / "_build_note.txt").write_text("there is no C++ compiler\n")
    assert library.load(tmp_path) == "the kernel library was not built: there is no C++ compiler"


def test_load_tells_the_libraries_apart(tmp_path):
    (tmp_path / "_cuda_note.txt").write_text("there is no nvcc\n")
    assert library.load(tmp_path, "_C_cuda") == "the CUDA library was not built: there is no nvcc"
    assert "there is no _C" in (library.load(tmp_path) or "")
    (tmp_path / "_C_cuda.abi3.so").write_bytes(b"not a library")
    assert (library.load(tmp_path, "_C_cuda") or "").startswith("the CUDA library failed to load: ")
    assert "there is no _C" in (library.load(tmp_path) or "")


def test_load_says_what_the_loader_said(tmp_path):
    (tmp_path / "_C.abi3.so").write_bytes(b"not a library")
    reason = library.load(tmp_path)
    assert reason is not None
    assert reason.startswith("the kernel library failed to load: ")
    assert "_C.abi3.so" in reason


WITHOUT = """
import torch
import torchopt_dist
from torchopt_dist import ops
from torchopt_dist.ops._sgd import sgd
grads, params = [torch.ones(3), torch.ones(2, 2)], [torch.ones(3), torch.zeros(2, 2)]
moved, = sgd(grads, params=params, lr=-0.5)
assert moved[0].tolist() == [1.5] * 3 and moved[1].tolist() == [[0.5] * 2] * 2
assert not ops.is_available("sgd")
print(ops.why_not("sgd"))
try:
    sgd(grads, params=params, lr=-0.5, fused=True)
except RuntimeError as error:
    print(error)
"""


def test_package_without_library_works_and_says_so_once(python, tmp_path):
    done = run_copy(python, tmp_path, WITHOUT, {"_build_note.txt": "there is no C++ compiler"})
    assert done.returncode == 0, done.stderr
    reason = "the kernel library was not built: there is no C++ compiler"
    assert done.stdout.splitlines() == [reason, f"`fused=True` cannot be used: {reason}"]
    note = f"torchopt_dist runs without its kernels, by the slower reference formulas: {reason}. "
    build = f"This command builds them: cd {tmp_path} && python setup.py build_ext --inplace"
    assert done.stderr.splitlines() == [note + build]


ONCE = """
import importlib, os
from torchopt_dist.ops import library
own = os.getpid()
os.getpid = lambda: own + 1  # a process that has inherited the environment of this one
importlib.reload(library)
del os.environ["TODIST_TOLD_OF_KERNELS"]  # one that has not, beside rank 0
os.environ["RANK"] = "1"
importlib.reload(library)
os.environ["RANK"] = "0"
importlib.reload(library)
"""


FROM_SOURCES = (
    "pip install --no-deps --force-reinstall --no-cache-dir --no-binary torchopt_dist torchopt_dist==7.8"
)


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        (None, FROM_SOURCES),
        ({"url": "file:///w/torchopt_dist-7.8-py3-none-any.whl", "archive_info": {}}, FROM_SOURCES),
        (
            {"url": "file:///a/folder%20of%20mine", "dir_info": {}},
            "pip install --no-deps --force-reinstall --no-cache-dir '/a/folder of mine'",
        ),
        ({"url": "file://{tree}", "dir_info": {"editable": True}}, "pip install --no-deps -e {tree}"),
        (
            {"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "1f2e"}},
            "pip install --no-deps --force-reinstall --no-cache-dir 'torchopt_dist @ git+https://host/x.git@1f2e'",
        ),
        (
            {"url": "https://host/x.tar.gz", "archive_info": {}},
            "pip install --no-deps --force-reinstall --no-cache-dir 'torchopt_dist @ https://host/x.tar.gz'",
        ),
    ],
    ids=["index", "wheel", "folder", "editable", "git", "archive"],
)
def test_the_remedy_installs_what_was_installed(tmp_path, monkeypatch, noted, command):
    info = tmp_path / "torchopt_dist-7.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchopt_dist\nVersion: 7.8\n")
    if noted is not None:
        (info / "direct_url.json").write_text(json.dumps(noted).replace("{tree}", str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)
    assert remedy(tmp_path / "torchopt_dist") == command.replace("{tree}", str(tmp_path))
    other = tmp_path / "other tree/torchopt_dist"
    assert remedy(other) == f"cd '{other.parent}' && python setup.py build_ext --inplace"


def test_package_with_broken_library_works_and_says_so_in_one_process_of_a_program(python, tmp_path):
    done = run_copy(python, tmp_path, WITHOUT + ONCE, {"_C.abi3.so": "broken"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the kernel library failed to load: ")
    assert done.stderr.count("torchopt_dist runs without its kernels") == 2  # the first one's, and rank 0's


CUDA_NOTE = """
import torch
torch.version.cuda, torch.cuda.device_count = "13.0", lambda: {gpus}
from torchopt_dist import ops
print(ops.why_not("adam", "cuda"))
"""


@pytest.mark.skipif(not BUILT, reason="the kernel library is not built here")
@pytest.mark.parametrize("gpus", [0, 1])
def test_a_missing_cuda_library_is_said_once_where_there_is_a_gpu(python, tmp_path, gpus):
    done = run_copy(
        python, tmp_path, CUDA_NOTE.format(gpus=gpus), {"_cuda_note.txt": "there is no nvcc"}, keep="_C.*"
    )
    assert done.returncode == 0, done.stderr
    because = "the CUDA library was not built: there is no nvcc"
    assert done.stdout.strip() == f"`adam` has no CUDA kernel; this build has CPU only: {because}"
    note = f"torchopt_dist runs without its CUDA kernels, on GPUs by the slower reference formulas: {because}"
    assert [line.partition(". This command")[0] for line in done.stderr.splitlines()] == [note] * gpus


def test_the_note_can_be_silenced(python, tmp_path):
    code = (
        "import logging; logging.getLogger('torchopt_dist').setLevel(logging.ERROR); import torchopt_dist.ops"
    )
    done = run_copy(python, tmp_path, code, {})
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not BUILT, reason="the kernel library is not built here")
def test_a_built_package_says_nothing(python):
    done = python.run("-c", "import torchopt_dist.ops", cwd=PACKAGE.parent, timeout=250)
    assert (done.returncode, done.stderr) == (0, "")


def test_logger_is_the_package_own():
    assert logging.getLogger("torchopt_dist").level == logging.NOTSET


@each_row("devices", [None, "cpu", torch.device("cpu"), ["cpu", "cpu"]])
def test_torchopts_question_gets_a_true_answer(devices):
    assert ops.accelerated_op_available(devices) is (ops.why_not("adam", "cpu") is None)
    assert ops.accelerated_op_available(["cpu", "cuda"]) is ops.is_available("adam", "cuda")


def test_a_number_is_a_cuda_device_and_there_may_be_none():
    assert ops.accelerated_op_available(0) is ops.is_available("adam", "cuda:0")
    assert ops.is_available("adam", "cuda") is (torch.cuda.device_count() > 0 and WITH_CUDA)
