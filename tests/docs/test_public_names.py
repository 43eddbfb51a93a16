"""Every public name is on a page of ``docs/api``, has a docstring, and every function a typed signature."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
from dataclasses import asdict
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import torchopt_dist as todist
from tests.rows import each_row
from tests.test_floors import ROOMS
from torchopt_dist.distributed.messages.payload import ExecutionOptions
from torchopt_dist.distributed.parallelize import CallKwargs

PAGES = {
    page.stem: page.read_text("utf-8")
    for page in sorted((Path(__file__).resolve().parents[2] / "docs" / "api").glob("*.md"))
}
MODULES = {
    "adjoints": todist.adjoints,
    "attribution": todist.attribution,
    "autograd": todist.autograd,
    "data": todist.data,
    "diff": todist.diff,
    "diff.implicit": todist.diff.implicit,
    "diff.zero_order": todist.diff.zero_order,
    "errors": todist.errors,
    "launching": todist.launching,
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


def found(name: str) -> Any:
    """What ``todist.<name>`` is, if it is anything."""
    return functools.reduce(lambda place, part: getattr(place, part, None), name.split("."), todist)


def directives() -> set[str]:
    """Names, without ``torchopt_dist.``, whose text Sphinx puts on a page; a module stands for each of its names."""
    names = set()
    for page in PAGES.values():
        module = ""
        for kind, name in re.findall(r"^\.\. (?:auto|py:)?(\w+):: ([\w.]+)", page, re.MULTILINE):
            if kind == "currentmodule":
                module = name
            elif kind == "module":
                public = found(name.partition(".")[2]).__all__
                names |= {f"{name}.{part}" for part in public}
            else:
                names.add(f"{module}.{name}")
    return {name.partition(".")[2] for name in names}


@functools.cache
def rows() -> dict[str, str]:
    """Name, without ``todist.`` → what its row says; of several names in a row, the first one."""
    read = {}
    for stem, page in PAGES.items():
        module = ""
        for line in page.splitlines():
            if line.startswith("## "):
                module = (re.findall(r"^## `todist\.([\w.]+)`$", line) or [""])[0]
            elif row := re.fullmatch(r"\| (`.+?`) \| (.+) \|", line):
                for name in row[1].strip("`").split("`, `"):
                    places = [f"{module}.{name}" if module else "", f"{stem}.{name}", name]
                    place = next((place for place in places if place and found(place) is not None), name)
                    read[place] = row[2] if row[1].startswith(f"`{name}`") else ""
    return read


def is_among(name: str, names: set[str]) -> bool:
    """Whether a name, or the same function or class by another name, is among some names."""
    thing = found(name)
    same = [other for other in names if other.rpartition(".")[2] == name.rpartition(".")[2]]
    return name in names or (callable(thing) and any(found(other) is thing for other in same))


def first_sentence(thing: Any) -> str:
    """Of a docstring, as a row has it."""
    text = thing.__doc__ if isinstance(thing, type) else inspect.getdoc(thing)
    text = inspect.cleandoc(text or "").split("\n\n")[0].replace("\n", " ")
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    text = re.sub(r":\w+:`~[\w.]*?(\w+)`", r"`\1`", text)
    text = re.sub(r":(?!math)\w+:`(?:torchopt_dist\.)?([\w.]+)`", r"`\1`", text)
    sentence = re.match(r".+?\.(?= [A-Z`]|$)", text)
    return (sentence[0] if sentence else text).replace("|", "\\|")


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


def test_every_name_has_a_row_and_a_text() -> None:
    in_rows, in_texts = set(rows()), directives()
    assert {
        name for name in todist.__all__ if isinstance(getattr(todist, name), ModuleType)
    } <= MODULES.keys()
    public = {name for name in todist.__all__ if name not in MODULES}
    for module, contents in MODULES.items():
        public |= {f"{module}.{name}" for name in contents.__all__ if f"{module}.{name}" not in MODULES}
    assert {name for name in public if not is_among(name, in_rows)} == set()
    theirs = {"typing.PyTree", "typing.RRef"}  # optree's and torch's
    assert {name for name in public if not is_among(name, in_texts)} == theirs


def test_the_pages_have_no_name_that_is_gone() -> None:
    assert [name for name in {*rows(), *directives()} if found(name) is None] == []


def test_a_row_says_what_the_docstring_says() -> None:
    """So a page of the repository is as right as ``help``; the message has the rows as they should be."""
    ours = {
        name: found(name)
        for name in rows()
        if isinstance(found(name), FunctionType | type) and found(name).__module__.startswith("torchopt_dist")
    }
    of_their_own = {
        "autograd.DistAutogradContext",
        "mean_reducer",
    }  # without a docstring; with a formula in it
    wrong = [
        f"| `{name}` | {first_sentence(thing)} |"
        for name, thing in ours.items()
        if rows()[name] not in ("", first_sentence(thing)) and name not in of_their_own
    ]
    assert wrong == []
    assert len(ours) > 200


def test_the_first_page_lists_the_pages() -> None:
    index = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text("utf-8")
    assert re.findall(r"\]\(api/(\w+)\.md\)", index) == re.findall(r"^api/(\w+)$", index, re.M)
    assert set(re.findall(r"^api/(\w+)$", index, re.M)) == PAGES.keys()


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
    # Rooms of `distributed` stand below its doors; what `diff` has on its upper floor is offered by the package, and
    # `optim` offers the optimizers that have no link of their own name.
    rooms = {room.rpartition(".")[2] for room in ROOMS}
    assert hidden <= {
        "distributed": rooms,
        "diff": {"adjoints", "compiled", "data_parallel", "estimate", "inner_loop", "replay"},
        "transform": {"adafactor", "sgd"},
    }.get(package, set())


@each_row("name", ["parallelize", "parallelize_async", "map", "remote_sync_call", "remote_async_call"])
def test_the_signature_of_a_call_has_every_option_and_its_default(name: str) -> None:
    (written,) = re.findall(rf"^\.\. autofunction:: {name}(\(.*\))$", PAGES["calls"], re.MULTILINE)
    shown = inspect.signature(eval(f"lambda {written[1:-1]}: None"))
    own = inspect.signature(found(name)).parameters
    options = {**dict.fromkeys(CallKwargs.__annotations__), **asdict(ExecutionOptions())}
    expected = {key: p.default for key, p in own.items() if key != "options"} | options
    if name == "map":  # an item is never split
        del expected["split"]
    assert {key: p.default for key, p in shown.parameters.items() if key != "timeout"} == {
        key: default for key, default in expected.items() if key != "timeout"
    }
    assert [p.kind for key, p in shown.parameters.items() if key in own] == [
        p.kind for key, p in own.items() if key != "options"
    ]
