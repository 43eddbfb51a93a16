"""A world that is killed in the middle of a training ends with the parameters of an undisturbed one, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import torchopt_dist as todist
from tests.checkpoint.resumed_program import STEPS, train
from tests.processes import torchrun
from torchopt_dist.checkpoint._files import find


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    launcher = todist.Launcher(nproc_per_host=2, rpc=True, handlers=[])
    parameters, made = launcher.run(train, tmp_path_factory.mktemp("undisturbed"), None).rank(0)
    assert made == list(range(1, STEPS + 1))
    return parameters


def test_the_launcher_s_restart_goes_on(undisturbed, tmp_path):
    launcher = todist.Launcher(nproc_per_host=2, rpc=True, max_restarts=1, handlers=[])
    parameters, made = launcher.run(train, tmp_path, 0).rank(0)
    assert made == list(range(7, STEPS + 1)), "after the last checkpoint before step 8, that of step 6"
    assert parameters == undisturbed
    assert [file.step for file in find(tmp_path)] == [12, 9, 6]


def test_torchrun_s_restart_goes_on(undisturbed, tmp_path):
    program = Path(__file__).with_name("resumed_program.py")
    torchrun("--standalone", "--nproc-per-node=2", "--max-restarts=1", program, tmp_path, 1)
    parameters, made = json.loads((tmp_path / "result").read_text())
    assert made == list(range(7, STEPS + 1))
    assert parameters == undisturbed


def test_a_state_dict_of_a_module_is_restored_into_the_module(tmp_path):
    saved, new = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    saved(torch.randn(4, 2))
    todist.Checkpointer(tmp_path).save(1, {"net": saved.state_dict()})
    found = todist.Checkpointer(tmp_path).restore({"net": new.state_dict()}).objects["net"]
    for tensors in (new.state_dict(), found):
        assert all(torch.equal(tensors[name], tensor) for name, tensor in saved.state_dict().items())
