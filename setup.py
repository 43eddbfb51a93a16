"""csrc/ → the kernel library ``torchopt_dist/_C``, or a note that says why there is none.

The metadata is in pyproject.toml. Without torch, without a compiler or after a failed compilation the
package is installed without kernels and says so when it is imported. ``REQUIRE_EXT=1`` makes that an error.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

Build: Any = build_ext
Library: Any = Extension
NO_TORCH: str | None = None
try:
    from torch.utils import cpp_extension
except ImportError as error:
    NO_TORCH = (
        f"torch cannot be imported at build time ({error}); install torch first, then this package with "
        "`pip install --no-build-isolation`"
    )
else:
    Build, Library = cpp_extension.BuildExtension, cpp_extension.CppExtension

HERE = Path(__file__).resolve().parent
PACKAGE = "torchopt_dist"
NOTE = "_build_note.txt"
REQUIRED = os.environ.get("REQUIRE_EXT", "0") not in ("", "0")

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


def sources(pattern: str) -> list[str]:
    """A pattern below csrc/ → the files, relative to this one, as setuptools wants them."""
    return sorted(path.relative_to(HERE).as_posix() for path in (HERE / "csrc").rglob(pattern))


def cpu_library() -> Any:
    """All of csrc/ that a C++ compiler alone can build → the extension ``_C``."""
    return Library(
        name=f"{PACKAGE}._C",
        sources=sources("*.cpp"),
        depends=sources("*.h"),
        define_macros=[("TORCH_TARGET_VERSION", OLDEST_TORCH)],
        extra_compile_args=MSVC_FLAGS if sys.platform == "win32" else FLAGS,
        py_limited_api=LIMITED_API,
    )


class BuildKernels(Build):
    """Builds the libraries; if that fails, leaves a note in the package in their place."""

    def run(self) -> None:
        """Build, and leave in the package either the libraries or the note, never both."""
        packages = [Path(self.build_lib) / PACKAGE]
        if self.inplace:
            packages.append(HERE / PACKAGE)
        for package in packages:
            (package / NOTE).unlink(missing_ok=True)
        try:
            super().run()
        except Exception as error:
            if REQUIRED:
                raise SystemExit(f"error: REQUIRE_EXT=1, but the kernels were not built: {error}") from error
            self.give_up(packages, str(error))

    def build_extensions(self) -> None:
        """Look for what a build needs, then build."""
        if NO_TORCH:
            raise RuntimeError(NO_TORCH)
        compiler = os.environ.get("CXX", "c++").split()[0]
        if sys.platform != "win32" and shutil.which(compiler) is None:
            raise RuntimeError(
                f"there is no C++ compiler: `{compiler}` is not on the PATH; `CXX` names another"
            )
        try:
            super().build_extensions()
        except Exception as error:
            raise RuntimeError(
                f"compiling csrc/ failed ({type(error).__name__}: {str(error).strip().splitlines()[0]}); "
                "`python setup.py build_ext --inplace` shows the compiler's messages"
            ) from error

    def give_up(self, packages: list[Path], reason: str) -> None:
        """Write the reason where ``torchopt_dist.ops.why_not`` reads it, and drop stale libraries."""
        for package in packages:
            package.mkdir(parents=True, exist_ok=True)
            (package / NOTE).write_text(reason + "\n", encoding="utf-8")
            for library in [*package.glob("_C*.so"), *package.glob("_C*.pyd")]:
                library.unlink()
        self.extensions.clear()
        wheel = self.distribution.get_command_obj("bdist_wheel", create=False)
        if wheel is not None:
            wheel.root_is_pure = True
        print(f"{PACKAGE} is installed without its kernels: {reason}", file=sys.stderr)


setup(
    ext_modules=[cpu_library()],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED_API else {},
)
