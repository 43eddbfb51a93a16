"""csrc/ → the kernel libraries ``torchopt_dist/_C`` and ``_C_cuda``, or notes that say why there is none.

The metadata is in pyproject.toml. Without torch, without a compiler or after a failed compilation the
package is installed without kernels and says so when it is imported. ``REQUIRE_EXT=1`` makes that an error.

pip builds in an environment of its own, without torch. The kernels then are built with the torch of the environment
that they are installed into; they use its stable ABI only, so any newer torch can load them.

``_C_cuda`` is built where torch is a CUDA build and nvcc is there; where it cannot be built, ``_C`` still is.
``FORCE_CUDA=1`` makes that an error. ``python setup.py compile_cuda`` needs neither a GPU nor torch's CUDA
build: it compiles the kernels, links nothing, and fails where they need more registers than there are.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

# torch takes the folder above nvcc's for the toolkit's; a wrapper on the PATH misleads it.
TOOLKIT = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
if (TOOLKIT / "bin/nvcc").is_file():
    os.environ["CUDA_HOME"] = str(TOOLKIT)

Build: Any = build_ext
Library: Any = Extension
NO_TORCH: str | None = None
if importlib.util.find_spec("torch") is None:
    for folder in dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")):
        site.addsitedir(folder)  # pip's own environment runs the same interpreter, and hides this folder
try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    NO_TORCH = f"torch could not be imported when this package was built ({error})"
else:
    Build, Library = cpp_extension.BuildExtension, cpp_extension.CppExtension

HERE = Path(__file__).resolve().parent
PACKAGE = "torchopt_dist"
CPU, CUDA = f"{PACKAGE}._C", f"{PACKAGE}._C_cuda"
NOTE, CUDA_NOTE = "_build_note.txt", "_cuda_note.txt"


def is_set(variable: str) -> bool:
    """Whether an environment variable says yes."""
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "no", "off")


REQUIRED, FORCE_CUDA = is_set("REQUIRE_EXT"), is_set("FORCE_CUDA")

OLDEST_TORCH = "0x020a000000000000"  # 2.10; without it, symbols of the newest torch slip in
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fvisibility=hidden",
]
MSVC_FLAGS = ["/std:c++17", "/O2"]
CUDA_FLAGS = ["-std=c++17", "-O3", "-fmad=false"]  # no fused multiply-add: the numbers are those of the CPU
ARCHITECTURES = "8.0;9.0"  # where no GPU says what to compile for


def sources(pattern: str) -> list[str]:
    """A pattern below csrc/ → the files, relative to this one, as setuptools wants them."""
    return sorted(path.relative_to(HERE).as_posix() for path in (HERE / "csrc").rglob(pattern))


def cpu_library() -> Any:
    """All of csrc/ that a C++ compiler alone can build → the extension ``_C``."""
    return Library(
        name=CPU,
        sources=sources("*.cpp"),
        depends=sources("*.h"),
        define_macros=[("TORCH_TARGET_VERSION", OLDEST_TORCH)],
        extra_compile_args=MSVC_FLAGS if sys.platform == "win32" else FLAGS,
        py_limited_api=LIMITED_API,
    )


def cuda_library() -> Any:
    """All of csrc/ that needs nvcc → the extension ``_C_cuda``."""
    if not os.environ.get("TORCH_CUDA_ARCH_LIST") and torch.cuda.device_count() == 0:
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{ARCHITECTURES}+PTX"
    hidden = [] if sys.platform == "win32" else ["-Xcompiler", "-fvisibility=hidden"]
    return cpp_extension.CUDAExtension(
        name=CUDA,
        sources=sources("*.cu"),
        depends=sources("*.h"),
        define_macros=[("TORCH_TARGET_VERSION", OLDEST_TORCH), ("USE_CUDA", None)],
        extra_compile_args={"cxx": [], "nvcc": [*CUDA_FLAGS, *hidden]},
        py_limited_api=LIMITED_API,
    )


def nvcc() -> str | None:
    """The CUDA compiler that torch calls; a build of torch for the CPU knows of none."""
    home = cpp_extension.CUDA_HOME or TOOLKIT
    return shutil.which("nvcc", path=str(Path(home) / "bin"))


def no_cuda() -> str | None:
    """Say why ``_C_cuda`` is not built, if it is not."""
    if NO_TORCH:
        return NO_TORCH
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if nvcc() is None:
        return (
            f"there is no nvcc in {cpp_extension.CUDA_HOME or TOOLKIT}/bin; `CUDA_HOME` names another toolkit"
        )
    return None


class BuildKernels(Build):
    """Builds the libraries; where one cannot be built, leaves a note in the package in its place."""

    def run(self) -> None:
        """Build, and leave in the package either a library or its note, never both."""
        self.packages = [Path(self.build_lib) / PACKAGE]
        if self.inplace:
            self.packages.append(HERE / PACKAGE)
        for package in self.packages:
            (package / NOTE).unlink(missing_ok=True)
            (package / CUDA_NOTE).unlink(missing_ok=True)
        if FORCE_CUDA and NO_CUDA:
            raise SystemExit(f"error: FORCE_CUDA=1, but the CUDA kernels cannot be built: {NO_CUDA}")
        try:
            super().run()
        except Exception as error:
            if REQUIRED or FORCE_CUDA:
                which = "REQUIRE_EXT" if REQUIRED else "FORCE_CUDA"
                raise SystemExit(f"error: {which}=1, but the kernels were not built: {error}") from error
            self.give_up(NOTE, "_C", f"{PACKAGE} is installed without its kernels: ", str(error))
            self.extensions.clear()
            wheel = self.distribution.get_command_obj("bdist_wheel", create=False)
            if wheel is not None:
                wheel.root_is_pure = True

    def build_extensions(self) -> None:
        """Look for what a build needs, then build one library after the other."""
        if NO_TORCH:
            raise RuntimeError(NO_TORCH)
        compiler = os.environ.get("CXX", "c++").split()[0]
        if sys.platform != "win32" and shutil.which(compiler) is None:
            raise RuntimeError(
                f"there is no C++ compiler: `{compiler}` is not on the PATH; `CXX` names another"
            )
        wanted, reason = list(self.extensions), NO_CUDA
        self.extensions[:] = [extension for extension in wanted if extension.name == CPU]
        self.build_these()
        built = list(self.extensions)
        for name in ("compile", "_compile"):
            self.compiler.__dict__.pop(name, None)  # what torch has put there for one library
        self.extensions[:] = [extension for extension in wanted if extension.name == CUDA]
        if self.extensions:
            try:
                self.build_these()
            except RuntimeError as error:
                if REQUIRED or FORCE_CUDA:
                    raise
                reason = str(error)
            else:
                built += self.extensions
        self.extensions[:] = built
        if reason:
            self.give_up(CUDA_NOTE, "_C_cuda", f"{PACKAGE} is installed without CUDA kernels: ", reason)

    def build_these(self) -> None:
        """Build what ``extensions`` holds now."""
        try:
            super().build_extensions()
        except Exception as error:
            raise RuntimeError(
                f"compiling csrc/ failed ({type(error).__name__}: {str(error).strip().splitlines()[0]}); "
                "`python setup.py build_ext --inplace` shows the compiler's messages"
            ) from error

    def give_up(self, note: str, library: str, prefix: str, reason: str) -> None:
        """Write the reason where ``torchopt_dist.ops.why_not`` reads it, and drop stale libraries."""
        for package in self.packages:
            package.mkdir(parents=True, exist_ok=True)
            (package / note).write_text(reason + "\n", encoding="utf-8")
            for path in [*package.glob(f"{library}*.so"), *package.glob(f"{library}*.pyd")]:
                path.unlink()
        print(prefix + reason, file=sys.stderr)


class BuildModules(build_py):
    """Copies the modules, and beside them the example that ``torchopt-dist demo`` runs."""

    def run(self) -> None:
        """Copy them; an editable installation runs the example where it is."""
        super().run()
        if not self.editable_mode:
            self.copy_file(
                str(HERE / "examples/few_shot.py"), str(Path(self.build_lib) / PACKAGE / "_few_shot.py")
            )


class CompileCuda(Command):
    """Compiles the CUDA kernels and prints the registers they take; a kernel that spills is an error."""

    description = "compile the CUDA kernels, link nothing; fails where registers spill"
    user_options: ClassVar = [
        ("architectures=", None, f"compute capabilities (default: {ARCHITECTURES})"),
        ("objects=", None, "folder for the object files (default: none is kept)"),
    ]

    def initialize_options(self) -> None:
        """Set the defaults."""
        self.architectures, self.objects = ARCHITECTURES, ""

    def finalize_options(self) -> None:
        """Nothing depends on another command."""

    def run(self) -> None:
        """Compile each file, as many at a time as there are processors."""
        if NO_TORCH or nvcc() is None:
            raise SystemExit(f"error: {NO_TORCH or 'there is no nvcc; `CUDA_HOME` names the toolkit'}")
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
            target = Path(self.objects or folder)
            target.mkdir(parents=True, exist_ok=True)
            compiled = list(pool.map(lambda source: self.compile(source, target), sources("*.cu")))
        if not all(compiled):
            raise SystemExit("error: a CUDA kernel does not compile, or spills registers")

    def compile(self, source: str, target: Path) -> bool:
        """Compile one file, say what it takes, and whether that is well."""
        archs = [arch.replace(".", "") for arch in self.architectures.split(";")]
        # What nobody links the host's compiler need not make fast; what the GPU runs stays as it is.
        unkept = [] if self.objects or sys.platform == "win32" else ["-Xcompiler", "-O0"]
        command = [
            *(str(nvcc()), "-c", source, "-o", str(target / (Path(source).parent.name + ".o"))),
            *(*CUDA_FLAGS, "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden", *unkept),
            *(f"-DTORCH_TARGET_VERSION={OLDEST_TORCH}", "-DUSE_CUDA", *cpp_extension.COMMON_NVCC_FLAGS),
            *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs),
            *(flag for folder in cpp_extension.include_paths() for flag in ("-isystem", folder)),
        ]
        done = subprocess.run(command, cwd=HERE, text=True, capture_output=True, check=False)
        registers = [int(found) for found in re.findall(r"Used (\d+) registers", done.stderr)]
        spills = [int(found) for found in re.findall(r"(\d+) bytes spill", done.stderr)]
        well = done.returncode == 0 and bool(registers) and not any(spills)
        if well:
            print(
                f"{source}: {len(registers)} kernels, {min(registers)} to {max(registers)} registers, no spills"
            )
        else:
            print(shlex.join(command), done.stderr, f"{source}: FAILED", sep="\n", file=sys.stderr)
        return well


def readme() -> str:
    """README.md, to be read where its neighbours are not: a link into this tree becomes the path of the file."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^!\[.*\n\n", "", text, flags=re.MULTILINE)  # pictures of this tree
    text = re.sub(r"\[([^]]+)\]\((?!\w+:)([^)#]+)(#[^)]*)?\)", r"\1 (`\2`)", text)
    return text + "\nThe files that are named here are in the source distribution.\n"


NO_CUDA = no_cuda()
setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[cpu_library(), *([] if NO_CUDA else [cuda_library()])],
    cmdclass={"build_py": BuildModules, "build_ext": BuildKernels, "compile_cuda": CompileCuda},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED_API else {},
)
