"""The examples in docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib
import itertools
import pkgutil

import pytest

import torchopt_dist

MODULES = [
    module.name
    for module in pkgutil.walk_packages(torchopt_dist.__path__, "torchopt_dist.")
    if not module.name.endswith("__main__") and "._C" not in module.name
]
ROOMS = {
    room: [*modules]
    for room, modules in itertools.groupby(sorted(MODULES), key=lambda module: module.split(".")[1])
}


def examples_of(name: str) -> list[doctest.DocTest]:
    module = importlib.import_module(name)
    return [test for test in doctest.DocTestFinder().find(module, name) if test.examples]


@pytest.mark.parametrize(
    "room", [pytest.param(room, marks=pytest.mark.processes) if room == "launch" else room for room in ROOMS]
)
def test_examples(room: str) -> None:
    said: list[str] = []
    runner = doctest.DocTestRunner()
    for test in itertools.chain.from_iterable(map(examples_of, ROOMS[room])):
        runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)


def test_there_are_examples() -> None:
    modules = ("transform.adam", "transform.clip", "pytree.arithmetic")
    assert sum(len(examples_of(f"torchopt_dist.{part}")) for part in modules) > 5
