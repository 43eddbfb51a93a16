"""lightning_torchrun.rst: one command on each of two nodes → four workers, one world, one process's gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import PROGRAMS, finish, free_port, start_torchrun
from tests.seeds.findings import compare


@pytest.mark.torch_rpc
def test_four_workers_on_two_nodes(tmp_path: Path) -> None:
    port = free_port()
    nodes = [
        start_torchrun(
            *("--nproc_per_node=2", "--nnodes=2", "--node_rank", node),
            *("--master_addr", "127.0.0.1", "--master_port", port),
            *(PROGRAMS / "one_after_another.py", tmp_path, "census", "full_example"),
        )
        for node in (0, 1)
    ]
    finish(*nodes)

    workers = json.loads((tmp_path / "workers.json").read_text())
    assert [worker["info"]["world_rank"] for worker in workers] == [0, 1, 2, 3]
    assert [worker["info"]["local_rank"] for worker in workers] == [0, 1, 0, 1]
    assert [worker["told"]["GROUP_RANK"] for worker in workers] == ["0", "0", "1", "1"]
    assert {(w["info"]["world_size"], w["info"]["local_world_size"]) for w in workers} == {(4, 2)}
    assert len({worker["pid"] for worker in workers}) == 4
    for dtype in ("float32", "float64"):
        compare(tmp_path, "census", dtype)
        compare(tmp_path, "full_example", dtype)
