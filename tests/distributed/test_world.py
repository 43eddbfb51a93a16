"""Rank, size and names of workers are those of torchrun's variables, read when asked; ``on_rank`` runs on some."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import torchopt_dist as todist
from tests.processes import World
from tests.rows import each_row
from torchopt_dist.distributed.group import group as group_module

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def place(monkeypatch):
    def place(**variables):
        for variable in VARIABLES:
            monkeypatch.delenv(variable, raising=False)
        for variable, value in variables.items():
            monkeypatch.setenv(variable, str(value))

    return place


@pytest.fixture
def three_workers(monkeypatch):
    group = SimpleNamespace(names=("ada", "grace", "emmy"), ending=False)
    monkeypatch.setattr(group_module, "_group", group)


# Who am I?


def test_without_an_environment_the_world_is_one_process():
    assert todist.get_world_info() == todist.typing.WorldInfo(
        world_size=1, world_rank=0, local_world_size=1, local_rank=0, worker_name="worker0"
    )


def test_every_getter_reads_its_own_variable(place):
    place(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)
    assert (todist.get_rank(), todist.get_rank(), todist.get_world_info().rank) == (5, 5, 5)
    assert todist.get_world_size() == 8
    assert todist.get_local_rank() == 1
    assert todist.get_local_world_size() == 4
    assert todist.get_world_info().worker_name == "worker5"


def test_the_environment_is_read_when_asked(place):
    place(RANK=0, WORLD_SIZE=2)
    assert todist.get_rank() == 0
    place(RANK=1, WORLD_SIZE=3)
    assert (todist.get_rank(), todist.get_world_size()) == (1, 3)
    place()
    assert (todist.get_rank(), todist.get_world_size()) == (0, 1)


def test_without_local_variables_all_workers_are_on_this_machine(place):
    place(RANK=2, WORLD_SIZE=3)
    assert (todist.get_local_rank(), todist.get_local_world_size()) == (2, 3)


def test_local_world_size_alone_places_the_local_rank(place):
    place(RANK=5, WORLD_SIZE=8, LOCAL_WORLD_SIZE=4)
    assert todist.get_local_rank() == 1


def test_world_info_cannot_be_changed():
    with pytest.raises(AttributeError):
        todist.get_world_info().world_size = 2


def test_the_name_is_that_of_the_living_group(place, three_workers):
    place(RANK=1, WORLD_SIZE=3)
    assert todist.get_world_info().worker_name == "grace"


@each_row(
    ("variables", "told"),
    [
        ({"RANK": 0}, ["WORLD_SIZE is missing"]),
        ({"WORLD_SIZE": 2}, ["RANK is missing"]),
        ({"RANK": "one", "WORLD_SIZE": 2}, ["RANK", "integer", "'one'"]),
        ({"RANK": "0", "WORLD_SIZE": ""}, ["WORLD_SIZE", "integer", "''"]),
        ({"RANK": "0", "WORLD_SIZE": "2.0"}, ["WORLD_SIZE", "integer", "'2.0'"]),
        ({"RANK": 2, "WORLD_SIZE": 2}, ["RANK=2", "WORLD_SIZE=2", "[0, WORLD_SIZE)"]),
        ({"RANK": -1, "WORLD_SIZE": 2}, ["RANK=-1", "WORLD_SIZE=2"]),
        ({"RANK": 0, "WORLD_SIZE": 0}, ["RANK=0", "WORLD_SIZE=0"]),
        ({"RANK": 0, "WORLD_SIZE": -4}, ["WORLD_SIZE=-4"]),
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": "a"}, ["LOCAL_RANK", "integer", "'a'"]),
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": "b"}, ["LOCAL_WORLD_SIZE", "integer", "'b'"]),
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 2}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        (
            {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 2},
            ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"],
        ),
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 0}, ["LOCAL_WORLD_SIZE=0"]),
    ],
)
def test_a_wrong_environment_is_told_by_variable_and_value(place, variables, told):
    place(**variables)
    with pytest.raises(todist.errors.InitializationError) as caught:
        todist.get_world_info()
    for words in told:
        assert words in str(caught.value)


def test_a_wrong_environment_keeps_main_from_running(place):
    place(RANK=3, WORLD_SIZE=2)
    ran = []
    with pytest.raises(todist.errors.InitializationError, match="RANK=3"):
        todist.auto_init_rpc()(lambda: ran.append(1))()
    assert not ran


# Ranks and names of workers.


def test_a_worker_is_found_by_name_by_rank_or_as_oneself(place, three_workers):
    place(RANK=2, WORLD_SIZE=3)
    assert [todist.get_worker_id(id) for id in ("ada", "grace", "emmy", 0, 1, 2, None)] == [
        0,
        1,
        2,
        0,
        1,
        2,
        2,
    ]
    assert todist.get_worker_id() == 2
    found = todist.get_worker_id(np.int64(1))
    assert (found, type(found)) == (1, int)


@each_row(
    ("id", "kind", "told"),
    [
        ("Ada", ValueError, ["'Ada'", "ada, grace, emmy"]),
        ("", ValueError, ["''", "ada, grace, emmy"]),
        (3, ValueError, ["[0, 3)", "got 3"]),
        (-1, ValueError, ["[0, 3)", "got -1"]),
        (1.0, TypeError, ["name or its rank", "float 1.0"]),
        (True, TypeError, ["name or its rank", "bool True"]),
        (("ada",), TypeError, ["name or its rank", "tuple"]),
    ],
)
def test_an_unknown_worker_is_told_with_the_rule(three_workers, id, kind, told):
    with pytest.raises(kind) as caught:
        todist.get_worker_id(id)
    for words in told:
        assert words in str(caught.value)


def test_without_a_group_only_oneself_has_an_id(place):
    place(RANK=1, WORLD_SIZE=2)
    assert todist.get_worker_id() == 1
    for id in (0, "worker0"):
        with pytest.raises(todist.errors.NotInitializedError):
            todist.get_worker_id(id)


def test_every_worker_sees_its_own_place_and_all_the_names(world):
    def me():
        return todist.get_world_info(), [todist.get_worker_id(f"worker{rank}") for rank in range(3)]

    for rank, (info, ids) in enumerate(world(3).run(me)):
        assert info == todist.typing.WorldInfo(3, rank, 3, rank, f"worker{rank}")
        assert ids == [0, 1, 2]


# Functions that run on some ranks.


def ranks_that_run(place, decorator, world_size=4):
    ran = []
    function = decorator(lambda: ran.append(todist.get_rank()) or "done")
    for rank in range(world_size):
        place(RANK=rank, WORLD_SIZE=world_size)
        assert function() == ("done" if rank in ran else None)
    return ran


@each_row(
    ("decorator", "ranks"),
    [
        (todist.on_rank(0), [0]),
        (todist.on_rank(1, 3), [1, 3]),
        (todist.on_rank(np.int64(1)), [1]),
        (todist.on_rank(3, 3, 7), [3]),
        (todist.not_on_rank(0), [1, 2, 3]),
        (todist.not_on_rank(1, 2), [0, 3]),
        (todist.not_on_rank(9), [0, 1, 2, 3]),
        (todist.not_on_rank(0, 1, 2, 3), []),
        (todist.rank_zero_only, [0]),
        (todist.rank_non_zero_only, [1, 2, 3]),
        (todist.rank_all, [0, 1, 2, 3]),
        (todist.rank_zero_only(), [0]),
        (todist.rank_non_zero_only(), [1, 2, 3]),
        (todist.rank_all(), [0, 1, 2, 3]),
    ],
)
def test_a_function_runs_on_its_ranks_and_gives_none_elsewhere(place, decorator, ranks):
    assert ranks_that_run(place, decorator) == ranks


def test_arguments_values_and_errors_pass_through(place):
    @todist.on_rank(0)
    def divide(a, *, by):
        """Divide."""
        return a / by

    assert divide(6, by=2) == 3
    assert (divide.__name__, divide.__doc__) == ("divide", "Divide.")
    with pytest.raises(ZeroDivisionError):
        divide(1, by=0)
    place(RANK=1, WORLD_SIZE=2)
    assert divide(1, by=0) is None


@each_row("decorator", [todist.on_rank, todist.not_on_rank])
@each_row(
    ("ranks", "kind", "told"),
    [
        ((), ValueError, "at least one rank"),
        ((-1,), ValueError, "at least 0, got -1"),
        ((0, -2), ValueError, "at least 0, got -2"),
        (("0",), TypeError, "str '0'"),
        ((1.0,), TypeError, "float 1.0"),
        ((True,), TypeError, "bool True"),
        ((None,), TypeError, "NoneType None"),
        (([0, 1],), TypeError, r"list \[0, 1\]"),
    ],
)
def test_a_bad_rank_is_told_when_decorating(decorator, ranks, kind, told):
    with pytest.raises(kind, match=told) as caught:
        decorator(*ranks)
    assert str(caught.value).startswith(decorator.__name__)


@pytest.mark.parametrize("decorator", [todist.on_rank, todist.not_on_rank])
def test_forgotten_parentheses_are_told(decorator):
    with pytest.raises(TypeError, match=rf"write `@{decorator.__name__}\(0\)`"):

        @decorator
        def function():
            pass


def test_a_function_that_would_run_nowhere_is_an_error_at_the_call(place):
    function = todist.on_rank(4, 5)(lambda: "done")
    place(RANK=4, WORLD_SIZE=6)
    assert function() == "done"
    for rank in range(2):
        place(RANK=rank, WORLD_SIZE=4)
        with pytest.raises(ValueError, match=r"on_rank\(4, 5\): .* would run nowhere.*\[0, 4\)"):
            function()


# Before there is a group.


def double(x):
    return x * 2


@pytest.mark.parametrize(
    "call",
    [
        lambda: todist.remote_sync_call(double, args=(torch.ones(2),)),
        lambda: todist.remote_sync_call(double, args=(1,), partitioner=0),
        lambda: todist.remote_sync_call(double, args=(1,), partitioner="worker0"),
        lambda: todist.remote_async_call(double, args=(1,), partitioner=0),
        lambda: todist.parallelize()(double)(torch.ones(2)),
        lambda: todist.parallelize(partitioner=0)(double)(1),
        lambda: todist.parallelize_async(reducer=todist.sum_reducer)(double)(torch.ones(2)),
        lambda: todist.barrier(),
        lambda: todist.barrier(["worker0"]),
        lambda: todist.batch_partitioner(torch.ones(2)),
        lambda: todist.dim_partitioner(0, exclusive=True, keepdim=True)(torch.ones(2)),
        lambda: todist.dim_partitioner(0, workers=["worker0"])(torch.ones(2)),
        pytest.param(lambda: todist.autograd.context().__enter__(), marks=pytest.mark.torch_rpc),
    ],
)
def test_a_call_before_init_says_how_to_init(call):
    with pytest.raises(todist.errors.NotInitializedError, match="auto_init_rpc"):
        call()


@pytest.mark.parametrize("size", [1, 2])
def test_after_main_there_is_no_group_any_more(size):
    def program():
        assert todist.auto_init_rpc()(lambda: todist.get_worker_id("worker0"))() == 0
        with pytest.raises(todist.errors.NotInitializedError, match="auto_init_rpc"):
            todist.remote_sync_call(double, args=(1,), partitioner=0)
        with pytest.raises(todist.errors.NotInitializedError, match="auto_init_rpc"):
            todist.barrier()
        return todist.get_world_info().worker_name

    assert World(size, rpc=False).run(program) == [f"worker{rank}" for rank in range(size)]
