"""The examples in docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib
import itertools
import pkgutil

import pytest

import torchopt_dist
from tests.rows import each_row

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


@each_row("room", [room for room in ROOMS if room != "launching"])
def test_examples(room: str) -> None:
    they_print_what_they_say(room)


@pytest.mark.processes
def test_examples_that_launch() -> None:
    they_print_what_they_say("launching")


def they_print_what_they_say(room: str) -> None:
    said: list[str] = []
    runner = doctest.DocTestRunner()
    for test in itertools.chain.from_iterable(map(examples_of, ROOMS[room])):
        runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)


def test_there_are_examples() -> None:
    modules = ("transform.adam", "transform.clip", "pytree.arithmetic")
    assert sum(len(examples_of(f"torchopt_dist.{part}")) for part in modules) > 5
