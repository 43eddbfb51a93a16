"""Ranks that another launcher than torchrun has started form one world, and know who shares their machine."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist

import torchopt_dist as todist
from tests.processes import World

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def on_a_pod(rank):
    """As Kubeflow starts them: no LOCAL_*, two pods, ranks in turn."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    socket.gethostname = lambda: f"pod{rank % 2}"


def place():
    world = todist.get_world_info()
    return world.rank, world.local_rank, world.local_world_size, world.worker_name


def test_without_local_variables_the_machines_are_counted():
    def program():
        def name(*, world_rank, local_rank, **_):
            return f"{world_rank}-{local_rank}"

        found = todist.auto_init_rpc(worker_name_format=name)(lambda: (place(), os.environ["LOCAL_RANK"]))()
        return *found, [name for name in NAMES if name not in os.environ]

    missing = ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    assert World(3, rpc=False, enter=on_a_pod).run(program) == [
        ((0, 0, 2, "0-0"), "0", missing),
        ((1, 0, 1, "1-0"), "0", missing),
        ((2, 1, 2, "2-1"), "1", missing),
    ]


@pytest.mark.parametrize("start", ["OMPI_COMM_WORLD", "MV2_COMM_WORLD", "JSM_NAMESPACE"])
def test_the_tasks_of_another_launcher_are_one_world(start):
    """Its process groups, too; afterwards its variables are as they were."""

    def enter(rank):
        parts = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        for name, part in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), parts, strict=True):
            os.environ[f"{start}_{part}"] = os.environ.pop(name)
        del os.environ["MASTER_ADDR"]

    def program():
        def main():
            dist.init_process_group("gloo")
            total = torch.ones(2) * (todist.get_rank() + 1)
            dist.all_reduce(total)
            dist.destroy_process_group()
            called = todist.remote_sync_call(place, partitioner=1) if todist.get_rank() == 0 else None
            return total.tolist(), called

        found = todist.auto_init_rpc()(main)()
        return *found, [name for name in NAMES if name in os.environ]

    called = [(1, 1, 2, "worker1")]
    assert World(2, rpc=False, enter=enter).run(program) == [
        ([3.0, 3.0], called, ["MASTER_PORT"]),
        ([3.0, 3.0], None, ["MASTER_PORT"]),
    ]


def test_a_task_whose_machine_of_rank_zero_is_unknown_is_told_what_to_set():
    def enter(rank):
        os.environ.update(OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE="2")
        for name in NAMES:
            del os.environ[name]

    for ending in World(2, enter=enter).endings(lambda: None):
        assert isinstance(ending.error, todist.errors.InitializationError)
        assert "MASTER_ADDR is missing, and WORLD_SIZE is 2: set it in all tasks" in str(ending.error)
