"""Every import inside ``torchopt_dist`` goes down: from a room to the floors below it, never up or across.

Between the files of a room there is no circle either, and an import in a string is an import.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rows import each_row

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchopt_dist"

GROUND = {
    "arguments",
    "collectives",
    "core",
    "errors",
    "formulas",
    "pickling",
    "process",
    "pytree",
    "torch_private",
}
FIRST = GROUND | {"ops", "linear_solve", "schedule"}
SECOND = FIRST | {"transform", "linalg", "nonlinear_solve", "nn"}

BELOW = GROUND | {"nn", "nn.module_state", "nn._module_copy"}
ROOMS = [
    "distributed.messages",
    "distributed.serialization",
    "distributed.rendezvous",
    "distributed.membership",
    "distributed.transport",
    "distributed.group",
    "distributed.worker",
    "distributed.calls",
    "distributed.life",
]
"""Each may import those before it."""

MAY_IMPORT = {
    **dict.fromkeys(GROUND, GROUND),
    **dict.fromkeys(("ops", "linear_solve", "schedule"), GROUND),
    **dict.fromkeys(("transform", "linalg"), FIRST),
    "nonlinear_solve": FIRST | {"diff.implicit"},
    "nn": FIRST
    | {
        "nonlinear_solve",
        "diff.implicit",
        "diff.zero_order",
    },  # functions of functions, which know no modules
    "diff": FIRST,  # functions of functions; below are the parts of it that know optimizers' steps and modules
    "diff.inner_loop": SECOND
    | {"diff", "diff.adjoints", "diff.replay", "diff.compiled", "diff.data_parallel"},
    "diff.estimate": SECOND | {"diff", "diff.adjoints", "diff.replay", "diff.inner_loop"},
    "diff.data_parallel": SECOND | {"diff", "diff.adjoints"},
    "diff.compiled": SECOND | {"diff", "diff.adjoints"},
    "diff.adjoints": SECOND | {"diff", "diff.replay"},
    "diff.replay": SECOND | {"diff", "diff.adjoints"},
    "optim": SECOND | {"diff"},
    "attribution": SECOND
    | {"diff", "diff.adjoints", "diff.data_parallel", "diff.inner_loop", "optim", "distributed"},
    "visual": GROUND | {"nn"},
    "distributed": BELOW | set(ROOMS),  # the doors: what users call
    **{room: BELOW | set(ROOMS[:floor]) for floor, room in enumerate(ROOMS)},
    "checkpoint": GROUND | {"distributed.world"},
    "data": GROUND,
    "scalars": {"distributed.world"},
    "launching": {"arguments", "errors", "pickling", "process", "torch_private"},
}
"""Room → what it may import beside itself; a dotted name is a part of a room, a plain one the whole of it.

A part of a room that has a row of its own is a room by itself: the parts of ``diff`` are above the rest of it, those of
``distributed`` below.
"""
ROOF = {"__init__", "__main__", "bench", "check", "compat", "report", "typing"}
"""These stand on everything."""


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """All nodes of a file's syntax tree; each file is asked for by several tests."""
    return list(ast.walk(ast.parse(source)))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name, without ``torchopt_dist.``, of everything of the package that a file imports."""
    here = ["torchopt_dist", *path.relative_to(PACKAGE).parent.parts]
    for node in nodes(path.read_text(encoding="utf-8")):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*package, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "torchopt_dist":
                yield node.lineno, name.partition(".")[2]


def hidden_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of everything of the package that a file imports by a string.

    Such are names for ``importlib.import_module`` or ``__import__``, and programs for another interpreter.
    """
    for node in nodes(path.read_text(encoding="utf-8")):
        strings: list[str] = []
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"}:
                strings = [f"import {a.value}" for a in node.args if isinstance(a, ast.Constant)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings = [node.value]
        for text in strings:
            for name in re.findall(r"(?:^|;) *(?:from|import) torchopt_dist\b([\w.]*)", text, re.MULTILINE):
                yield node.lineno, name.removeprefix(".")


def file_of(name: str) -> Path:
    """A dotted name inside the package → the file that an import of it reads."""
    parts = name.split(".") if name else []
    while parts:
        path = PACKAGE.joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
        parts.pop()
    return PACKAGE / "__init__.py"


def circle() -> list[str]:
    """Files that import each other in a circle; imports in functions and for type checkers count."""
    graph = {path: {file_of(name) for _, name in imports(path)} - {path} for path in PACKAGE.rglob("*.py")}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [path.relative_to(PACKAGE).as_posix() for path in error.args[1]]
    return []


def room_of(path: Path) -> str:
    """The row of a file: its part of a room, where that has one, otherwise the room."""
    names = [name.removesuffix(".py") for name in path.relative_to(PACKAGE).parts]
    part = ".".join(names[:2])
    return part if part in MAY_IMPORT else names[0]


def allowed(room: str, name: str) -> bool:
    """Whether a file of ``room`` may import ``name``, such as ``nn.module_state.ModuleState``."""
    first, *rest = name.split(".")
    upper = rest and f"{first}.{rest[0]}" in MAY_IMPORT
    may = MAY_IMPORT[room]
    if first == room.partition(".")[0]:
        part = f"{first}.{rest[0]}" if upper else first
        return part == room or part in may
    parts = {entry.partition(".")[2] for entry in may if entry.startswith(f"{first}.")}
    if not parts or not rest:
        return first in may
    # Some parts of that room only: these, and what the room itself offers.
    return rest[0] in parts or (first in may and not is_part(first, rest[0]))


def is_part(room: str, name: str) -> bool:
    return (PACKAGE / room / f"{name}.py").is_file() or (PACKAGE / room / name).is_dir()


def test_imports_go_down() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(path)
        if room in ROOF:
            continue
        assert room in MAY_IMPORT, f"{room} stands on no floor: give it a row in {Path(__file__).name}"
        wrong += [
            f"{path.relative_to(ROOT)}:{line} imports {name}; {room} may import {sorted(MAY_IMPORT[room])}"
            for line, name in imports(path)
            if not allowed(room, name)
        ]
    assert not wrong


@each_row(
    ("room", "name", "may"),
    [
        ("optim", "transform.base.chain", True),
        ("transform", "optim.sgd", False),
        ("transform", "nn", False),
        ("distributed", "nn.ModuleState", True),
        ("distributed", "nn.module_state.ModuleState", True),
        ("distributed", "nn._tensor_copier.TensorCopier", False),
        ("distributed", "optim.sgd", False),
        ("ops", "distributed.world", False),
        ("distributed", "distributed.calls.graph", True),
        ("distributed.calls", "distributed.worker.handler.handle_request", True),
        ("distributed.calls", "distributed.calls.tree", True),
        ("distributed.worker", "distributed.calls.graph", False),
        ("distributed.calls", "distributed.partition", False),
        ("launching", "distributed", False),
        ("launching", "torch_private.interpreter_flags", True),
        ("launching", "core.vmap", False),
        ("torch_private", "torch_private.lookup.find", True),
        ("torch_private", "core.types.OptionalTensor", True),
        ("nn", "typing", False),
        ("torch_private", "ops", False),
        ("diff", "diff.implicit", True),
        ("diff", "diff.inner_loop", False),
        ("diff", "nn", False),
        ("diff.adjoints", "diff.replay.step", True),
        ("diff.adjoints", "optim", False),
        ("nn", "diff.adjoints", False),
        ("optim", "diff.inner_loop.inner_loop", True),
        ("checkpoint", "distributed.world.get_rank", True),
        ("checkpoint", "distributed.init_rpc", False),
        ("checkpoint", "optim", False),
    ],
)
def test_floors(room: str, name: str, may: bool) -> None:
    assert allowed(room, name) is may


def test_imports_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "room").mkdir()
    file = tmp_path / "room" / "file.py"
    file.write_text(
        "import torch\nimport torchopt_dist.nn\nfrom torchopt_dist import pytree\n"
        "def f():\n    from torchopt_dist.optim.sgd import sgd\n    from . import other\n    from .. import errors\n"
    )
    assert sorted(imports(file)) == [
        (2, "nn"),
        (3, "pytree"),
        (5, "optim.sgd.sgd"),
        (6, "room.other"),
        (7, "errors"),
    ]


def test_files_import_each_other_in_no_circle() -> None:
    assert circle() == []


def test_circles_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "room").mkdir()
    (tmp_path / "__init__.py").write_text("from torchopt_dist.room.a import f\n")
    (tmp_path / "room" / "__init__.py").write_text("from torchopt_dist.room.a import f\n")
    (tmp_path / "room" / "a.py").write_text("from torchopt_dist.room import b\n")
    (tmp_path / "room" / "b.py").write_text("import torch\n")
    assert circle() == []
    (tmp_path / "room" / "b.py").write_text("def g():\n    from torchopt_dist.room.a import f\n")
    assert sorted(set(circle())) == ["room/a.py", "room/b.py"]


def test_no_import_in_a_string_goes_up() -> None:
    hidden = [
        f"{path.relative_to(ROOT)}:{line} imports `torchopt_dist.{name}`, which its floor does not offer"
        for path in sorted(PACKAGE.rglob("*.py"))
        if (room := room_of(path)) not in ROOF
        for line, name in hidden_imports(path)
        if not name or not allowed(room, name)
    ]
    assert not hidden


def test_hidden_imports_are_found(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        'import importlib\nimportlib.import_module("torchopt_dist.optim")\nimportlib.import_module("torch")\n'
        'PROGRAM = "import sys; from torchopt_dist.launching import forkserver"\n__import__("torchopt_dist")\n'
        'def f():\n    """See torchopt_dist.\n\n    >>> import torchopt_dist\n    """\n'
    )
    assert sorted(hidden_imports(file)) == [(2, "optim"), (4, "launching"), (5, "")]


def test_no_file_is_called_utils_or_helpers() -> None:
    folders = ("torchopt_dist", "csrc", "tests", "examples", "benchmarks", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    assert [path for path in files if path.stem in {"util", "utils", "helper", "helpers"}] == []


@pytest.mark.parametrize(
    ("page", "part"),
    [("docs/design.md", r"## The house\n(.*?)\n- "), ("CONTRIBUTING.md", r"\n\| folder \|(.*?)\n\n")],
)
def test_every_folder_of_the_package_is_shown_to_contributors(page: str, part: str) -> None:
    (shown,) = re.findall(part, (ROOT / page).read_text("utf-8"), re.DOTALL)
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders - set(re.findall(r"\w+", shown)) == set()
    named = re.findall(r"`(\w+/|\w+\.py)`", "".join(re.findall(r"^\| [^|]+", shown, re.MULTILINE)))
    assert [name for name in named if not any((place / name).exists() for place in (PACKAGE, ROOT))] == []
