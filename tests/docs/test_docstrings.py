"""The examples in docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import torchopt_dist

MODULES = [
    module.name
    for module in pkgutil.walk_packages(torchopt_dist.__path__, "torchopt_dist.")
    if not module.name.endswith("__main__") and "._C" not in module.name
]


def examples_of(name: str) -> list[doctest.DocTest]:
    module = importlib.import_module(name)
    return [test for test in doctest.DocTestFinder().find(module, name) if test.examples]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.processes) if ".launch." in name else name for name in MODULES],
)
def test_examples(name: str) -> None:
    for test in examples_of(name):
        runner = doctest.DocTestRunner()
        said: list[str] = []
        runner.run(test, out=said.append)
        assert not runner.failures, "".join(said)


def test_there_are_examples() -> None:
    modules = ("transform.adam", "transform.clip", "pytree.arithmetic")
    assert sum(len(examples_of(f"torchopt_dist.{part}")) for part in modules) > 5
