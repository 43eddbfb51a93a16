"""A copy of the tree, with or without what a build needs → a library, or a note of why there is none."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import setuptools

from tests.packaging.stable import assert_stable
from tests.packaging.trees import OP, ROOT, TIMEOUT, copy_repository, copy_tree
from tests.warm_python import WarmPython
from torchopt_dist import ops

COMPILER = os.environ.get("CXX", "c++").split()[0]
TOOLS = [COMPILER, "c++", "g++", "cc", "gcc", "ld", "as", "nm"]
pytestmark = pytest.mark.timeout(2 * TIMEOUT)
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C++ compiler: `{COMPILER}`")
PROBE = f"import json; from torchopt_dist import ops; print(json.dumps([ops.__file__, ops.why_not({OP!r})]))"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return copy_tree(tmp_path / "tree")


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmPython]:
    """Forks of a process that has imported what setup.py does, and no part of this package."""
    server = WarmPython("torch", "setuptools")
    yield server
    server.close()


def environment(**env: str) -> dict[str, str]:
    """This process's, without a toolkit for CUDA; a variable that is to be absent is given as an empty text."""
    fixed = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "REQUIRE_EXT": "", "CUDA_HOME": "/no/toolkit"}
    return {name: value for name, value in {**os.environ, **fixed, **env}.items() if value}


def python(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


@pytest.fixture
def build(tree: Path, warm: WarmPython) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Build in place, with these variables in the environment."""

    def build(**env: str) -> subprocess.CompletedProcess[str]:
        arguments = ("setup.py", "build_ext", "--inplace")
        return warm.run(*arguments, cwd=tree, env=environment(**env), timeout=TIMEOUT)

    return build


def path_with(tmp_path: Path, tools: list[str]) -> str:
    """A folder of links to these programs and no others, to stand for PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in set(tools):
        if found := shutil.which(tool):
            (folder / Path(tool).name).symlink_to(found)
    return str(folder)


@pytest.fixture
def probe(tree: Path, warm: WarmPython) -> Callable[[], str | None]:
    """Say why the kernel that was built is not there."""

    def probe() -> str | None:
        done = warm.run("-c", PROBE, cwd=tree, env=environment(), timeout=TIMEOUT)
        assert done.returncode == 0, done.stderr
        file, reason = json.loads(done.stdout)
        assert Path(file).is_relative_to(tree)
        return None if reason is None else str(reason)

    return probe


def test_no_compiler_installs_pure_python_and_leaves_the_reason(tree, build, probe, tmp_path):
    (tree / "torchopt_dist/_C.abi3.so").write_text("stale")
    done = build(PATH=path_with(tmp_path, []), CXX="", CC="")
    assert done.returncode == 0, done.stderr
    reason = "there is no C++ compiler: `c++` is not on the PATH; `CXX` names another"
    assert f"torchopt_dist is installed without its kernels: {reason}" in done.stderr
    assert not [*tree.rglob("_C*.so")]
    assert probe() == f"the kernel library was not built: {reason}"


def test_no_compiler_with_require_ext_is_an_error(build, tmp_path):
    done = build(PATH=path_with(tmp_path, []), CXX="", CC="", REQUIRE_EXT="1")
    assert done.returncode == 1
    assert "error: REQUIRE_EXT=1, but the kernels were not built: there is no C++ compiler" in done.stderr


@needs_compiler
def test_failed_compilation_installs_pure_python(tree, build, probe):
    (tree / "csrc/schemas.cpp").write_text("this is not C++\n")
    done = build()
    assert done.returncode == 0, done.stderr
    assert "torchopt_dist is installed without its kernels: compiling csrc/ failed" in done.stderr
    reason = probe()
    assert reason is not None
    assert reason.startswith("the kernel library was not built: compiling csrc/ failed (")


def test_no_torch_installs_pure_python(tree, tmp_path):
    stub = tmp_path / "stub/torch"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("raise ImportError('No module named torch')\n")
    setup = ("setup.py", "build_ext", "--inplace")
    done = python(*setup, cwd=tree, PYTHONPATH=str(stub.parent))
    assert done.returncode == 0, done.stderr
    reason = "torch could not be imported when this package was built (No module named torch)"
    assert f"torchopt_dist is installed without its kernels: {reason}" in done.stderr
    assert python(*setup, cwd=tree, PYTHONPATH=str(stub.parent), REQUIRE_EXT="1").returncode == 1


def test_a_build_apart_as_pip_makes_it_finds_the_torch_of_the_environment(tree, tmp_path):
    """pip hides the folder of the environment's packages, and puts one of its own in its place."""
    apart = tmp_path / "apart"
    apart.mkdir()
    for name in ("setuptools", "_distutils_hack"):
        (apart / name).symlink_to(Path(setuptools.__file__).parents[1] / name)
    (apart / "sitecustomize.py").write_text(
        "import sys\nsys.path[:] = [folder for folder in sys.path if 'site-packages' not in folder]\n"
    )
    # It gets as far as looking for a compiler, which it does after torch.
    env = {"PYTHONPATH": str(apart), "PATH": path_with(tmp_path, []), "CXX": "", "CC": ""}
    done = python("setup.py", "build_ext", "--inplace", cwd=tree, **env)
    assert done.returncode == 0, done.stderr
    assert "torchopt_dist is installed without its kernels: there is no C++ compiler" in done.stderr


@pytest.fixture(scope="module")
def sdist(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], dict[str, str]]:
    """The files that git knows, and an sdist made of them alone: name → text."""
    tree, dist = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    try:
        files = copy_repository(tree)
    except RuntimeError as error:
        pytest.skip(str(error))
    done = warm.run("setup.py", "-q", "sdist", "-d", dist, cwd=tree, env=environment(), timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    (archive,) = dist.iterdir()
    with tarfile.open(archive) as tar:
        texts = {
            member.name.partition("/")[2]: file.read().decode("utf-8", "replace")
            for member in tar.getmembers()
            if (file := tar.extractfile(member)) is not None
        }
    return files, texts


def test_the_sdist_is_the_repository(sdist):
    files, texts = sdist
    assert not files - texts.keys()
    added = {name for name in texts.keys() - files if not name.startswith("torchopt_dist.egg-info/")}
    assert added == {"PKG-INFO", "setup.cfg"}


def test_the_metadata_stand_by_themselves(sdist):
    metadata = email.message_from_string(sdist[1]["PKG-INFO"])
    assert metadata["Author"] == "The torchopt_dist authors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = str(metadata.get_payload())
    assert "getting started (`docs/getting_started.md`)" in page
    assert not re.findall(r"\]\((?!https?:)", page)  # a link into the tree, which is not there
    assert set(re.findall(r"\(`([^`]+\.\w+)`\)", page)) <= sdist[0]


@needs_compiler
@pytest.mark.nightly
def test_no_ninja_builds_by_distutils(tree, build, probe, tmp_path):
    (tree / "torchopt_dist/_build_note.txt").write_text("stale")
    done = build(PATH=path_with(tmp_path, TOOLS), REQUIRE_EXT="1")
    assert done.returncode == 0, done.stderr
    assert "[1/2]" not in done.stdout
    assert (tree / "torchopt_dist/_C.abi3.so").is_file()
    assert not (tree / "torchopt_dist/_build_note.txt").exists()
    assert probe() is None


@needs_compiler
@pytest.mark.nightly
def test_wheel_is_abi3_and_works_outside_the_tree(tree, tmp_path):
    args = ["wheel", "-q", "--no-build-isolation", "--no-deps", "--wheel-dir", "dist", "."]
    done = python("-m", "pip", *args, cwd=tree, REQUIRE_EXT="1")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    assert re.search(r"-cp310-abi3-\w+\.whl$", wheel.name), wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "torchopt_dist/_C.abi3.so" in names
    assert "torchopt_dist/py.typed" in names
    assert not [name for name in names if name.startswith(("csrc", "tests", "setup"))]

    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    code = f"import sys; sys.path.insert(0, {str(target)!r}); {PROBE}"
    done = python("-I", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file, reason = json.loads(done.stdout)
    assert Path(file).is_relative_to(target)
    assert reason is None
    assert_stable(target / "torchopt_dist/_C.abi3.so")


@pytest.mark.skipif(ops.why_not("adam") is not None, reason="the kernels are not built")
def test_the_library_of_all_kernels_is_stable():
    """That of this installation; building all kernels once more would take a minute."""
    (library,) = Path(ops.__file__).parents[1].glob("_C.*")
    assert_stable(library)


def test_wheel_without_compiler_is_pure_and_carries_the_reason(tree, warm, tmp_path):
    env = environment(PATH=path_with(tmp_path, []), CXX="", CC="")
    done = warm.run("setup.py", "-q", "bdist_wheel", cwd=tree, env=env, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    archive = zipfile.ZipFile(wheel)
    assert b"there is no C++ compiler" in archive.read("torchopt_dist/_build_note.txt")
    assert not [name for name in archive.namelist() if "_C." in name]
    demo = archive.read("torchopt_dist/_few_shot.py")  # what `torchopt-dist demo` runs there
    assert demo == (ROOT / "examples" / "few_shot.py").read_bytes()


@pytest.mark.parametrize(
    "then",
    [
        "",
        "w = torch.ones(2, requires_grad=True)\n"
        "loop = lambda x: todist.inner_loop(lambda w: (w * x).sum(), todist.adam(lr=0.1), w, 2).params\n"
        "torch.vmap(loop)(torch.ones(3, 2)).sum().backward()\n",
    ],
    ids=["import", "a loop inside vmap"],
)
def test_the_package_does_not_import_the_compiler(warm: WarmPython, then: str) -> None:
    """Torch's takes as long to import as torch itself; it comes with the first optimizer, or ``torch.func.grad``."""
    code = f"import sys, torch, torchopt_dist as todist\n{then}print('torch._dynamo' in sys.modules)"
    done = warm.run("-c", code, cwd=ROOT, env=environment(), timeout=TIMEOUT)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
