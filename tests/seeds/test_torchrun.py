"""torchrun.txt: ways to start, stacked jobs, environment variables, restarts → the same world and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.processes import PROGRAMS, finish, free_port, start_torchrun, torchrun
from tests.seeds.findings import compare

CENSUS = PROGRAMS / "census.py"


def workers_in(out: Path) -> list[dict[str, Any]]:
    workers: list[dict[str, Any]] = json.loads((out / "workers.json").read_text())
    return workers


def test_environment_variables_are_the_world_information(tmp_path: Path) -> None:
    torchrun("--standalone", "--nproc-per-node=2", CENSUS, "--out", tmp_path)
    workers = workers_in(tmp_path)
    assert len(workers) == 2
    for rank, worker in enumerate(workers):
        told, info = worker["told"], worker["info"]
        assert info == worker["getters"]
        assert int(told["RANK"]) == int(told["ROLE_RANK"]) == info["world_rank"] == rank
        assert int(told["LOCAL_RANK"]) == info["local_rank"] == rank
        assert int(told["WORLD_SIZE"]) == int(told["ROLE_WORLD_SIZE"]) == info["world_size"] == 2
        assert int(told["LOCAL_WORLD_SIZE"]) == info["local_world_size"] == 2
        assert told["TORCHELASTIC_RESTART_COUNT"] == "0"
    compare(tmp_path, "census", "float32")


def test_two_stacked_jobs_do_not_meet(tmp_path: Path) -> None:
    outs = [tmp_path / "one", tmp_path / "other"]
    jobs = []
    for out in outs:
        out.mkdir()
        endpoint = f"--rdzv-endpoint=localhost:{free_port()}"
        jobs.append(
            start_torchrun(
                "--rdzv-backend=c10d", endpoint, "--nnodes=1", "--nproc-per-node=2", CENSUS, "--out", out
            )
        )
    finish(*jobs)
    one, other = (workers_in(out) for out in outs)
    assert len(one) == len(other) == 2
    assert not {worker["pid"] for worker in one} & {worker["pid"] for worker in other}
    assert one[0]["told"]["MASTER_PORT"] != other[0]["told"]["MASTER_PORT"]
    for out in outs:
        compare(out, "census", "float32")


def test_a_killed_worker_is_restarted(tmp_path: Path) -> None:
    marker = tmp_path / "died"
    output = torchrun(
        *("--standalone", "--nproc-per-node=2", "--max-restarts=2"),
        *(CENSUS, "--out", tmp_path, "--die_once", marker),
    )
    assert marker.exists()
    for worker in workers_in(tmp_path):
        assert worker["told"]["TORCHELASTIC_RESTART_COUNT"] == "1", output
        assert worker["told"]["TORCHELASTIC_MAX_RESTARTS"] == "2"
    compare(tmp_path, "census", "float32")
