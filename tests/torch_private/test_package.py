"""One folder for all private names of torch and the standard library: no other file uses one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from torchopt_dist import torch_private as private

FOLDER = Path(str(private.__file__)).parent
PACKAGE = FOLDER.parent
PRIVATE_ATTRIBUTES = {
    "_version",
    "_parameters",
    "_buffers",
    "_sequence_nr",
    "_set_sequence_nr",
    "_backward_hooks",
}
MODULES = ("torch", "threading", "atexit", "asyncio", "multiprocessing", "socket", "subprocess", "concurrent")


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of torch or the standard library that a file uses.

    ``torch._foreach_*`` is public: torch's documentation has a section on these functions.
    """
    tree = ast.parse(source)
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in MODULES:
                    foreign.add(alias.asname or alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            foreign |= {alias.asname or alias.name for alias in node.names}
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in names if _is_private(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if node.attr in PRIVATE_ATTRIBUTES or (isinstance(root, ast.Name) and root.id in foreign):
                yield node.lineno, node.attr


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_foreach_"))


def test_no_other_file_uses_a_private_name() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line} uses {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != FOLDER
        for line, name in private_names(path.read_text("utf-8"))
    ]
    assert not found


def test_private_names_are_found() -> None:
    source = (
        "import torch, atexit\nfrom torch.distributed import rpc\nfrom torch._dynamo import reset\n"
        "torch._C._functorch.peek()\nrpc._set_rpc_timeout(1)\nrpc.api._agent\nx._version\nself._own\n"
        "torch._foreach_add(a, b)\natexit._run_exitfuncs()\ntorch.__version__\n"
    )
    assert sorted(set(private_names(source))) == [
        (3, "_dynamo"),
        (4, "_C"),
        (4, "_functorch"),
        (5, "_set_rpc_timeout"),
        (6, "_agent"),
        (7, "_version"),
        (10, "_run_exitfuncs"),
    ]


def test_the_package_offers_the_functions_of_its_files_and_each_is_tested() -> None:
    statements = [node for path in FOLDER.glob("*.py") for node in ast.parse(path.read_text("utf-8")).body]
    defined = {node.name for node in statements if isinstance(node, ast.FunctionDef)} | {
        "profiler_is_on",
        "Trace",
    }
    assert {name for name in defined if not name.startswith("_")} == {*private.__all__, "find"}
    tests = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in private.__all__ if not re.search(rf'private\.{name}\b|"{name}"', tests)] == []
