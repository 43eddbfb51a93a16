"""What ``torchopt_dist`` offers by name: what programs call; other names are in one module each."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import warnings
from pathlib import Path
from types import ModuleType

import pytest

import torchopt_dist as todist
from tests.processes import python
from tests.rows import each_row
from torchopt_dist.compat._second_names import SECOND_NAMES

LINES = (Path(__file__).parent / "torchopt_names.txt").read_text("utf-8").splitlines()
SPELLINGS = ("AdaDelta", "AdaGrad", "AdaMax", "RMSProp")
DOCUMENTED = [
    name
    for module, name in (line.split() for line in LINES)
    if module in ("torchopt", "torchopt.distributed") and not name.endswith(SPELLINGS)
]
"""The names of TorchOpt's two flat modules, in the one spelling that each has here."""


def test_names_of_modules_are_in_one_module_each() -> None:
    root = set(todist.__all__)
    modules = {name for name in root if isinstance(getattr(todist, name), ModuleType)}
    assert len(root - modules) <= 115, (
        "the root is what programs call: links, types, plumbing have other places"
    )
    assert root & {*todist.transform.__all__} == {"apply_updates", "chain"}
    assert not root & {*todist.typing.__all__}
    assert not root & {*todist.ops.__all__}
    assert {*todist.adjoints.__all__} - root == {"Adjoint"}


def test_no_function_hides_a_module() -> None:
    for info in pkgutil.iter_modules(todist.__path__):
        if not info.name.startswith("_"):
            module = importlib.import_module(f"torchopt_dist.{info.name}")
            assert getattr(todist, info.name) is module
    import torchopt_dist.launching as launching

    assert launching.launch is todist.launch
    with pytest.raises(ModuleNotFoundError, match=r"torchopt_dist\.launch'"):
        importlib.import_module("torchopt_dist.launch")


def test_names_that_torchopt_documents_are_there() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not [name for name in DOCUMENTED if getattr(todist, name, None) is None]
    assert {*DOCUMENTED} & {*SECOND_NAMES} == {*DOCUMENTED} - {*todist.__all__}


def test_second_names_are_neither_shown_nor_new_things() -> None:
    assert not {*SECOND_NAMES} & {*todist.__all__, *dir(todist)}
    assert todist.get_world_rank is todist.get_rank
    assert todist.parallelize_sync is todist.parallelize
    assert todist.clip_grad_norm is todist.transform.clip_grad_norm
    assert pickle.loads(pickle.dumps(todist.module_detach_)) is todist.module_detach_
    from torchopt_dist import exclusive_batch_partitioner, rank_all

    assert exclusive_batch_partitioner is SECOND_NAMES["exclusive_batch_partitioner"]
    assert rank_all(rank_all) is rank_all() is rank_all


@each_row(
    ("name", "hint"),
    [
        ("masked", "; it is `torchopt_dist.transform.masked`"),
        ("Restored", "; it is `torchopt_dist.typing.Restored`"),
        ("CheckpointError", "; it is `torchopt_dist.errors.CheckpointError`"),
        ("paralelize", ": did you mean `parallelize`?"),
        ("zyx", ""),
        ("_nothing", ""),
    ],
)
def test_a_name_that_is_not_there_is_told_where_it_is(name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(todist, name)
    assert str(caught.value) == f"module 'torchopt_dist' has no attribute {name!r}{hint}"


def test_an_import_reads_no_second_names() -> None:
    ended = python(
        "-c", "import sys, torchopt_dist; print(*(m for m in sys.modules if 'compat' in m and 'dist' in m))"
    )
    assert ended.stdout.split() == [], ended.stderr
