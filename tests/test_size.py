"""How large the package may be: who raises a number says in the commit what a user gets for it."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "torchopt_dist"
AT_MOST = {
    "files": 367,
    "classes": 523,
    "lines of code": 40_012,
    "files that use private names of torch": 61,
}
LONGEST = 575
"""Lines of a module, which is read in one sitting."""
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def lines_of_code(source: str) -> int:
    """Lines that have more than a comment, and are no docstring."""
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {
        line
        for token in tokens
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - texts)


def uses_private_names(source: str) -> bool:
    """Whether a module imports ``torch_private`` or from it; so does that room itself."""
    return "torchopt_dist.torch_private import" in source or "torchopt_dist import torch_private" in source


def test_the_package_is_no_larger_than_it_was() -> None:
    sources = [path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))]
    found = {
        "files": len(sources),
        "classes": sum(isinstance(node, ast.ClassDef) for s in sources for node in ast.walk(ast.parse(s))),
        "lines of code": sum(map(lines_of_code, sources)),
        "files that use private names of torch": sum(map(uses_private_names, sources)),
    }
    assert {name: count for name, count in found.items() if count > AT_MOST[name]} == {}


def test_no_module_is_too_long_for_one_sitting() -> None:
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path.name: length for path, length in lengths.items() if length > LONGEST} == {}


def test_docstrings_and_comments_are_no_code() -> None:
    assert (
        lines_of_code(
            '"""A.\n\nB."""\n\n# c\nx = (\n    1\n)  # d\n\n\ndef f():\n    """E."""\n    return x\n'
        )
        == 5
    )
