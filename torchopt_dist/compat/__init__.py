"""A program written for TorchOpt → the same program, unchanged, run on torchopt_dist.

``python -m torchopt_dist.compat train.py --lr 0.1`` runs a script in which ``import torchopt`` and everything below it
(``torchopt.distributed as todist``, ``from torchopt.nn import …``) mean torchopt_dist; so does
``torchrun --nproc_per_node=2 -m torchopt_dist.compat train.py --lr 0.1``. A program that may be changed calls
:func:`install` before its first ``import torchopt`` instead, or imports this module as ``torchopt``.

``torchopt.x`` offers TorchOpt's own spellings (``_names.py``), then what ``torchopt_dist.x`` offers, the same objects,
and after that torchopt_dist's flat names: so ``todist.module_clone`` works in a program that only imports
``torchopt.distributed as todist``. A name that torchopt_dist does not have is an error that says so.

``python -m torchopt_dist.compat --install`` does it for a whole environment: in every process of its Python,
``import torchopt`` then means torchopt_dist, whether or not TorchOpt is installed, until ``--uninstall``. Both that and
the first way reach the processes that a program starts; after :func:`install` these need one of their own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torchopt_dist.compat._names import CALLS, FLAT, NAMES

__all__ = ["install", "main", "run_script"]

FOREIGN, OURS = "torchopt", "torchopt_dist"
OPTIMIZERS = ("adadelta", "adagrad", "adam", "adamax", "adamw", "radam", "rmsprop", "sgd")
KINDS = ("implicit", "zero_order")
FLAT_ONLY = frozenset(
    f"{FOREIGN}.{name}"
    for name in (
        *("accelerated_op", "accelerated_op.adam_op", "base", "clip", "combine", "hook", "update", "utils"),
        *("version", "distributed.api", "distributed.world"),
        *("alias", "alias.utils", *(f"alias.{name}" for name in OPTIMIZERS)),
        *("linalg.cg", "linalg.ns", "linalg.utils", "linear_solve.utils", "nn.module"),
        *("schedule.exponential_decay", "transform.utils"),
        *("transform.scale_by_schedule", "transform.scale_by_stddev"),
        *("optim.base", "optim.func", "optim.func.base", "optim.meta", "optim.meta.base"),
        *(f"{where}.{name}" for where in ("optim", "optim.meta") for name in OPTIMIZERS),
        *(f"diff.{kind}.{name}" for kind in KINDS for name in ("decorator", "nn", "nn.module")),
    )
)
"""Modules of TorchOpt that have no module of ours beside them: their names are among our flat ones."""
FUNCTIONS = ("alias", "linalg", "schedule", "transform")
"""Packages of TorchOpt whose attribute ``x`` is the function ``x``, also after an import of their module ``x``."""
STAND_IN = Path(__file__).parent / "stand_in"
"""A folder in which ``torchopt`` is a module that means torchopt_dist."""
PTH = "torchopt_dist_compat.pth"
"""The file of an environment that has the folder searched first."""


def install() -> None:
    """Let ``import torchopt`` mean torchopt_dist in this process, whether or not TorchOpt is there; idempotent.

    Raises:
        ImportError: TorchOpt itself has been imported already.
    """
    if _is_installed():
        return
    if FOREIGN in sys.modules:
        where = getattr(sys.modules[FOREIGN], "__file__", None)
        raise ImportError(
            f"torchopt_dist cannot stand in for torchopt: torchopt itself is imported already, from {where}; "
            "call `torchopt_dist.compat.install()` before the first `import torchopt`"
        )
    sys.meta_path.insert(0, _Finder())


def run_script(path: str, args: Sequence[str] = ()) -> None:
    """Run a script as ``python path args…`` does, with torchopt_dist standing in for torchopt.

    While it runs it is ``__main__``, so that its functions can be sent to workers by name.

    Args:
        path: the script.
        args: its arguments, ``sys.argv[1:]`` there.

    Raises:
        ImportError: TorchOpt itself has been imported already.
        FileNotFoundError: there is no such script.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no script {path!r} in {os.getcwd()}")
    install()
    argv, search, of_children = sys.argv, sys.path, os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STAND_IN), of_children)))
    sys.argv = [path, *args]
    # Children by `subprocess` have the environment, those of `multiprocessing` the path.
    beside = [] if sys.flags.safe_path else [os.path.dirname(os.path.realpath(path))]
    sys.path = [*beside, str(STAND_IN), *search]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv, sys.path = argv, search
        if of_children is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = of_children


def main(argv: list[str] | None = None, prog: str = "python -m torchopt_dist.compat") -> int:
    """``python -m torchopt_dist.compat SCRIPT [ARGUMENT…]``, also as ``torchopt-dist compat``; or with ``--install``.

    Args:
        argv: the script and its arguments; ``None`` means those of this process.
        prog: the command as the user typed it, for its usage and errors.

    Returns:
        0, if the script ends without ``sys.exit``, or the environment has been changed.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv in (["--install"], ["--uninstall"]):
        print(_change_environment(argv[0] == "--install", prog))
        return 0
    if not argv or argv[0].startswith("-"):
        sys.exit(
            f"usage: {prog} SCRIPT [ARGUMENT...] | --install | --uninstall\n"
            "runs a script written for torchopt on torchopt_dist; or has `import torchopt` mean torchopt_dist in the "
            "whole environment of this Python"
        )
    if not sys.flags.safe_path:
        del sys.path[0]  # `python -m` has put the working directory there, a console command its own folder
    try:
        run_script(argv[0], argv[1:])
    except FileNotFoundError as error:
        if os.path.exists(argv[0]):
            raise
        sys.exit(f"{prog}: {error}")
    return 0


def _change_environment(stand_in: bool, prog: str) -> str:
    """Write or remove the file by which an environment's Python searches our ``torchopt`` first; what to tell."""
    file = Path(sysconfig.get_path("purelib")) / PTH
    try:
        if stand_in:
            file.write_text(f"import sys; sys.path.insert(0, {str(STAND_IN)!r})\n", encoding="utf-8")
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        sys.exit(f"{prog}: {file} must be writable, got: {error}; use a virtual environment of your own")
    if stand_in:
        return f"`import torchopt` means torchopt_dist for {sys.executable}, by {file}; `{prog} --uninstall` removes it"
    return f"`import torchopt` means TorchOpt again for {sys.executable}, where that is installed"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """``torchopt.x`` → a module whose names are looked up in torchopt_dist when they are used."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != FOREIGN:
            return None
        if not _exists(_twin(fullname)) and fullname not in FLAT_ONLY:
            # Without its `name` the error also ends `from torchopt import x`, which would swallow it otherwise.
            raise ModuleNotFoundError(_no_such(fullname))
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        of_calls = CALLS.get(module.__name__.removeprefix(FOREIGN).removeprefix("."))
        if of_calls is not None:
            module.__class__ = type("CallableModule", (ModuleType,), {"__call__": staticmethod(of_calls)})
        twin = _twin(module.__name__)
        if not _exists(twin):
            twin = twin.rpartition(".")[0]
        ours = [importlib.import_module(name) for name in dict.fromkeys((twin, OURS)) if _exists(name)]
        if module.__name__ in (f"{FOREIGN}.{name}" for name in FUNCTIONS):
            module.__class__ = _OfFunctions
        module.__doc__ = ours[0].__doc__
        own = NAMES.get(module.__name__.removeprefix(FOREIGN).removeprefix("."), {})
        vars(module).update(
            __all__=sorted({*ours[0].__all__, *own}),
            __getattr__=functools.partial(_look_up, module.__name__, {**FLAT, **own}, ours),
            __dir__=lambda: sorted({*FLAT, *own, *(name for place in ours for name in dir(place))}),
        )


class _OfFunctions(ModuleType):
    """A module of :data:`FUNCTIONS`: an import of the module of a function leaves the function in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, ModuleType) or isinstance(getattr(self, name, value), ModuleType):
            super().__setattr__(name, value)


def _look_up(module: str, spellings: dict[str, Any], ours: list[ModuleType], name: str) -> Any:
    below = f"{module}.{name}"
    if below in FLAT_ONLY and (name == "utils" or module.removeprefix(f"{FOREIGN}.") not in FUNCTIONS):
        return _stand_in(below)
    if name in spellings:
        return spellings[name]
    for place in ours[:1] if name.startswith("_") else ours:
        if hasattr(place, name):
            value = getattr(place, name)
            if isinstance(value, ModuleType) and value.__name__.startswith(f"{OURS}."):
                return _stand_in(FOREIGN + value.__name__.removeprefix(OURS))
            return value
    raise AttributeError(_no_such(f"{module}.{name}"))


def _is_installed() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def _stand_in(fullname: str) -> ModuleType:
    """The module ``torchopt.x``, imported only where ``import torchopt`` means torchopt_dist."""
    return importlib.import_module(fullname) if _is_installed() else _made(fullname)


@functools.cache
def _made(fullname: str) -> ModuleType:
    module = ModuleType(fullname)
    _Finder().exec_module(module)
    return module


def __getattr__(name: str) -> Any:
    """For ``import torchopt_dist.compat as torchopt``: TorchOpt's names."""
    return _look_up(FOREIGN, FLAT, [importlib.import_module(OURS)], name)


def _twin(fullname: str) -> str:
    return OURS + fullname.removeprefix(FOREIGN)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not there, or is no package
        return False


def _no_such(name: str) -> str:
    return f"there is no `{name}`: torchopt_dist stands in for torchopt here, and it has no such name (yet)"
