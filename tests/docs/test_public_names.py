"""Every public name is on the page ``docs/api.md``, has a docstring, and every function a typed signature."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import torchopt_dist as todist
from tests.test_floors import ROOMS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text("utf-8")
MODULES = {
    "autograd": todist.autograd,
    "data": todist.data,
    "diff": todist.diff,
    "diff.implicit": todist.diff.implicit,
    "diff.zero_order": todist.diff.zero_order,
    "linalg": todist.linalg,
    "linear_solve": todist.linear_solve,
    "nn": todist.nn,
    "nonlinear_solve": todist.nonlinear_solve,
    "ops": todist.ops,
    "pytree": todist.pytree,
    "schedule": todist.schedule,
    "transform": todist.transform,
    "typing": todist.typing,
    "visual": todist.visual,
}


def documented() -> set[str]:
    """Names, without ``torchopt_dist.``, that the page documents; a module stands for each of its names."""
    names = set()
    module = ""
    for kind, name in re.findall(r"^\.\. (?:auto|py:)?(\w+):: ([\w.]+)", PAGE, re.MULTILINE):
        if kind == "currentmodule":
            module = name
        elif kind == "module":
            public = functools.reduce(getattr, name.split(".")[1:], todist).__all__
            names |= {name, *(f"{name}.{part}" for part in public)}
        else:
            names.add(f"{module}.{name}")
    return {name.partition(".")[2] for name in names}


def public_functions_and_classes() -> dict[str, Any]:
    """Name → object; a class's public methods are among them. Types of other packages are left out."""
    found: dict[str, Any] = {}
    for module in (todist, *MODULES.values()):
        for name in module.__all__:
            thing = getattr(module, name)
            if not getattr(thing, "__module__", "").startswith("torchopt_dist"):
                continue
            if isinstance(thing, type):
                found[thing.__qualname__] = thing
                for method, function in vars(thing).items():
                    if isinstance(function, FunctionType) and not method.startswith("_"):
                        found[f"{thing.__qualname__}.{method}"] = function
            elif isinstance(thing, FunctionType):
                found[name] = thing
    return found


def test_every_name_is_on_the_page() -> None:
    names = documented()
    missing = [name for name in todist.__all__ if name not in names and name not in MODULES]
    for module, contents in MODULES.items():
        if f"## `todist.{module}`" not in PAGE and f"## `torchopt_dist.{module}`" not in PAGE:
            missing += [name for name in contents.__all__ if name not in names]
        else:
            missing += [
                f"{module}.{name}" for name in contents.__all__ if not {f"{module}.{name}", name} & names
            ]
    assert not missing
    modules = {name for name in todist.__all__ if isinstance(getattr(todist, name), ModuleType)}
    assert modules <= MODULES.keys()


def test_the_page_has_no_name_that_is_gone() -> None:
    gone = []
    for name in documented():
        try:
            functools.reduce(getattr, name.split("."), todist)
        except AttributeError:
            gone.append(name)
    assert not gone


def test_handles_and_balances_show_only_what_users_use() -> None:
    def shown(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert shown(todist.typing.Resident) == {"value", "local_value", "to_here", "close"}
    assert shown(todist.typing.Reference) == shown(todist.typing.Resident)
    assert shown(todist.Balance) == {"shares"}
    assert shown(todist.typing.Shards) == {"size", "dim", "selected", "close"}


def test_every_function_and_class_has_a_docstring() -> None:
    texts = {
        name: inspect.getdoc(thing) if isinstance(thing, FunctionType) else thing.__doc__
        for name, thing in public_functions_and_classes().items()
    }
    assert [name for name, text in texts.items() if not text or not text.strip()[0].isupper()] == []


def test_every_function_has_a_typed_signature() -> None:
    untyped = []
    for name, function in public_functions_and_classes().items():
        if not isinstance(function, FunctionType):
            continue
        signature = inspect.signature(function)
        untyped += [
            f"{name}({parameter.name})"
            for parameter in signature.parameters.values()
            if parameter.annotation is parameter.empty and parameter.name not in ("self", "cls")
        ]
        if signature.return_annotation is signature.empty:
            untyped.append(f"{name}() ->")
    assert not untyped


@pytest.mark.parametrize(
    "package",
    [
        "checkpoint",
        "compat",
        "diff",
        "distributed",
        "launching",
        "linalg",
        "linear_solve",
        "nn",
        "ops",
        "optim",
        "pytree",
        "schedule",
        "transform",
    ],
)
def test_a_file_without_public_names_begins_with_an_underscore(package: str) -> None:
    room = importlib.import_module(f"torchopt_dist.{package}")
    offered = [getattr(room, name) for name in room.__all__]
    public = {
        thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", "")
        for thing in offered
    }
    files = {info.name for info in pkgutil.iter_modules(room.__path__) if not info.name.startswith("_")}
    hidden = {name for name in files if f"{room.__name__}.{name}" not in public}
    # Rooms of `distributed` stand below its doors; what `diff` has on its upper floor is offered by the package.
    rooms = {room.rpartition(".")[2] for room in ROOMS}
    assert hidden <= {
        "distributed": rooms,
        "diff": {"adjoints", "compiled", "data_parallel", "inner_loop", "replay"},
    }.get(package, set())
