"""A launcher's variables → torchrun's: a row each, and what is no task, or contradicts itself, is told."""

from __future__ import annotations

import os

import pytest

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist.process.launchers import LAUNCHERS, NAMES, find_task
from torchopt_dist.process.slurm import expand_nodes, expand_numbers

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "3,1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_TASK_PID": "99",
}
"""As SLURM 22.05 sets them for `srun -N3 -n5`."""
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "2",
    "PMIX_NAMESPACE": "686948353",
}
"""As Open MPI 4.1.4 sets them."""
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
"""As MPICH 4.0.2 sets them."""
JSRUN = {
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
    "LSB_MCPU_HOSTS": "batch3 1 a01n01 42 a01n02 42",
    "LSB_JOBID": "7",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "0",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
SUBMITIT = {
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_LOCALID": "1",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_NODEID": "0",
    "SUBMITIT_LOCAL_JOB_ID": "4711",
}
"""As submitit 1.5.4 sets them without SLURM."""


def told(env, pid=None):
    """Rank, size, local rank, local size, address."""
    task = find_task(env, pid)
    return task and (task.rank, task.size, task.local_rank, task.local_size, task.address)


@each_row(
    ("env", "expected"),
    [
        (STEP, (3, 5, 0, 1, "n1")),
        ({**STEP, "SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"}, (2, 5, 2, 3, "n1")),
        (
            {**STEP, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0", "SLURM_LOCALID": "3"},
            (3, 5, 3, 5, "127.0.0.1"),
        ),
        (OPEN_MPI, (2, 4, 0, 2, None)),
        ({**OPEN_MPI, "SLURM_JOB_NODELIST": "n[07-08]"}, (2, 4, 0, 2, "n07")),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (2, 4, 0, 4, "127.0.0.1")),
        (MPICH, (1, 2, 1, 2, "127.0.0.1")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, None, None, None)),
        (JSRUN, (5, 8, 1, 4, "a01n01")),
        ({**JSRUN, "LSB_MCPU_HOSTS": "a01n01 42"}, (5, 8, 1, 4, "a01n01")),
        (MVAPICH, (0, 2, 0, 2, "127.0.0.1")),
        (SUBMITIT, (1, 2, 1, 2, "127.0.0.1")),
        ({**SUBMITIT, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}, (1, 2, 1, 2, "127.0.0.1")),
    ],
)
def test_each_row(env, expected):
    assert told(env) == expected


def test_every_row_is_tried():
    rows = {find_task(env).row.name for env in (STEP, OPEN_MPI, MPICH, JSRUN, MVAPICH, SUBMITIT)}
    assert rows == {row.name for row in LAUNCHERS}


@each_row(
    "env",
    [
        {},
        {
            "SLURM_JOB_ID": "17",
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "4",
            "SLURM_LOCALID": "0",
        },  # a batch script
        {**STEP, "RANK": "0", "WORLD_SIZE": "2"},  # torchrun on each node
        {**OPEN_MPI, "WORLD_SIZE": "2"},  # which `read_world` refuses
        {**STEP, "SLURM_PTY_PORT": "4000", "SLURM_TASK_PID": "1"},  # in the shell of `srun --pty bash`
    ],
)
def test_what_is_no_task(env):
    assert find_task(env) is None


def test_ports_differ_from_run_to_run_and_are_equal_within_one():
    def port(env, **more):
        return find_task({**env, **more}).port

    assert port(STEP) == port(STEP, SLURM_PROCID="1")
    assert len({port(STEP), port(STEP, SLURM_JOB_ID="18"), port(STEP, SLURM_STEP_ID="1")}) == 3
    assert port(OPEN_MPI) != port(OPEN_MPI, PMIX_NAMESPACE="1")
    assert port(MPICH) != port(MPICH, SLURM_JOB_ID="18")
    assert port(SUBMITIT) != port(SUBMITIT, SUBMITIT_LOCAL_JOB_ID="4712")
    assert port(SUBMITIT) == port(SUBMITIT, SUBMITIT_LOCAL_GLOBALID="0", SLURM_JOB_ID="18")
    assert 20_000 <= port(STEP) < 30_000
    assert port(MPICH) == 29_500


# One launcher in another.


DAEMONS = {**STEP, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_PROCID": "1"}
"""srun starts MPI's daemons, one on each node, as `mpirun` has it do in a job."""


@pytest.mark.parametrize("mpi", [OPEN_MPI, MPICH])
def test_mpirun_in_a_slurm_job_starts_its_daemons_by_srun(mpi):
    assert find_task({**DAEMONS, **mpi}, pid=120).row.name == find_task(mpi).row.name


ALONE = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}


def test_srun_with_a_terminal_starts_tasks_all_the_same():
    terminal = {**STEP, "SLURM_PTY_PORT": "4000"}
    assert told(terminal, pid=99)[:2] == (3, 5)  # `srun -n5 --pty python train.py`
    assert told({**terminal, **MPICH}, pid=1) == (1, 2, 1, 2, "127.0.0.1")  # mpirun, typed into its shell


def test_mpirun_in_a_shell_of_srun_counts():
    assert told({**ALONE, **MPICH}) == (1, 2, 1, 2, "127.0.0.1")
    assert told(ALONE)[:2] == (0, 1)


def test_srun_s_own_pmi_agrees():
    assert find_task({**STEP, "PMI_RANK": "3", "PMI_SIZE": "5"}).row.name == "srun"


@each_row(
    ("env", "pid"),
    [
        ({**STEP, **OPEN_MPI}, 1),  # several tasks of srun on one node
        ({**DAEMONS, **OPEN_MPI}, 99),  # srun inside mpirun: srun has started this very process
        (
            {**DAEMONS, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
            1,
        ),  # an mpirun in each task of srun
        ({**ALONE, **OPEN_MPI}, 99),  # srun in each task of mpirun
        ({**OPEN_MPI, "PMI_RANK": "1", "PMI_SIZE": "2"}, 1),
    ],
)
def test_launchers_that_contradict_each_other_are_told(env, pid):
    rule = r"two launchers have started this process.*contradict.*OMPI_COMM_WORLD_SIZE=.*set RANK, WORLD_SIZE"
    with pytest.raises(todist.errors.InitializationError, match=rule):
        find_task(env, pid)


# What is missing, or wrong.


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"PMI_RANK": "1"}, ["PMI_RANK=1", "PMI_SIZE is missing", "set RANK"]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_RANK is missing"]),
        ({**STEP, "SLURM_PROCID": "x"}, ["SLURM_PROCID must be an integer, got 'x'"]),
        ({**STEP, "SLURM_PROCID": "5"}, ["SLURM_PROCID=5", "SLURM_STEP_NUM_TASKS=5"]),
        ({**STEP, "SLURM_STEP_NODELIST": "n[1-"}, ["SLURM_STEP_NODELIST cannot be read", "'n[1-'"]),
        ({"PMIX_RANK": "3"}, ["PMIX_RANK=3", "no variable says how many tasks", "torchrun"]),
        ({"PALS_RANKID": "0"}, ["PALS_RANKID=0"]),
    ],
)
def test_several_tasks_that_cannot_be_told_apart_are_an_error(env, words):
    with pytest.raises(todist.errors.InitializationError) as caught:
        find_task(env)
    for word in words:
        assert word in str(caught.value)


# SLURM's lists.


@each_row("text", ["", "n[", "n[1-]", "n[1-3", "n]", "a,,b", "n[1-x]", "n[]", " a", "a,"])
def test_a_list_of_another_form_is_told(text):
    with pytest.raises(ValueError, match="must be of the form"):
        expand_nodes(text)


def test_numbers_of_another_form():
    assert [expand_numbers(text) for text in ("", "2x", "(x2)", "2(x)", "003")] == [
        None,
        None,
        None,
        None,
        [3],
    ]


# In programs.


def test_the_place_is_that_of_srun_and_torchrun_s_variables_are_there_in_main_only(monkeypatch):
    for name in (*NAMES, *os.environ):
        if name in NAMES or name.startswith("SLURM"):
            monkeypatch.delenv(name, raising=False)
    for name, value in {
        **STEP,
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1")
    monkeypatch.setenv("MASTER_PORT", "1234")  # the user's own

    def main():
        return {name: os.environ.get(name) for name in NAMES}

    seen = todist.auto_init_rpc()(main)()
    assert seen == dict(zip(NAMES, ("0", "1", "0", "1", "127.0.0.1", "1234"), strict=True))
    assert {name for name in NAMES if name in os.environ} == {"MASTER_PORT"}
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "5")
    assert (todist.get_rank(), todist.get_world_size()) == (0, 5)


# For other engines.


def test_world_variables():
    made = todist.launching.world_variables(1, 4, address="a", port=5, local_rank=1, local_size=2, restarts=3)
    assert made == {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "5",
        "TORCHELASTIC_RESTART_COUNT": "3",
    }


@each_row(
    ("more", "error", "rule"),
    [
        ({"rank": 2}, ValueError, r"`rank` must be in \[0, 2\), got 2"),
        ({"size": 0}, ValueError, r"`size` must be at least 1, got 0"),
        ({"rank": "1"}, TypeError, r"`rank` must be an integer, got str '1'"),
        ({"port": 0}, ValueError, r"`port` must be in \[1, 65536\), got 0"),
        ({"address": ""}, ValueError, r"`address` must name the machine of rank 0, got an empty string"),
        ({"address": None}, TypeError, r"`address` must be a string, got NoneType None"),
        (
            {"local_rank": 0},
            ValueError,
            r"`local_rank` and `local_size` must be given together, got 0 and None",
        ),
        ({"local_rank": 1, "local_size": 1}, ValueError, r"`local_rank` must be in \[0, 1\), got 1"),
        ({"local_rank": 1, "local_size": 3}, ValueError, r"`local_size` must be in \[1, 3\), got 3"),
        ({"restarts": -1}, ValueError, r"`restarts` must be at least 0, got -1"),
    ],
)
def test_wrong_world_variables(more, error, rule):
    with pytest.raises(error, match=rule):
        todist.launching.world_variables(**{"rank": 1, "size": 2, "address": "a", "port": 5, **more})
