"""The same training, MAML on digits, under each launcher: one curve, up to rounding.

Ray and Dask are in `test_engines.py`, and Kubernetes' Pods in `test_kubernetes.py`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest

from tests.launch.curves import TRAIN, curve, expected
from tests.launch.slurm_cluster import NEEDS_SLURM
from tests.launch.sshd import NEEDS_SSHD
from tests.processes import ROOT, torchrun
from torchopt_dist.launching import Launcher
from torchopt_dist.launching import _cluster as cluster

pytestmark = pytest.mark.timeout(200)
SUBMITIT = """
import sys
import digits, submitit

executor = submitit.SlurmExecutor(folder=sys.argv[2], python=sys.argv[1])
executor.update_parameters(nodes=1, ntasks_per_node=2, time=5)
curve, nothing = executor.submit(digits.main).results()
for step, loss in enumerate(curve, 1):
    print(f"step {step} on 2 workers: {loss:.12f}")
"""


def test_torchrun():
    assert curve(torchrun("--standalone", "--nproc_per_node=2", TRAIN), 2) == expected()


@NEEDS_SLURM
@pytest.mark.nightly
def test_srun(slurm, warm_executable):
    told = slurm.run("srun", "-N2", "-n2", warm_executable, TRAIN, PYTHONPATH=str(ROOT))
    assert curve(told, 2) == expected()


@NEEDS_SLURM
@pytest.mark.nightly
def test_submitit(slurm, warm_executable):
    found = importlib.util.find_spec("submitit")
    assert found is not None, "submitit is one of the packages for tests"
    folder = slurm.folder / "submitit"
    path = os.pathsep.join(
        map(str, (ROOT, TRAIN.parent, os.path.dirname(found.submodule_search_locations[0])))
    )
    told = slurm.run(warm_executable, "-c", SUBMITIT, warm_executable, folder, PYTHONPATH=path)
    assert curve(told, 2) == expected()


PACKAGES = {"mpirun.openmpi": "openmpi-bin", "mpiexec.hydra": "mpich"}


@pytest.mark.parametrize("mpirun", PACKAGES)
@pytest.mark.nightly
def test_mpirun(mpirun, warm_executable):
    if shutil.which(mpirun) is None:
        pytest.skip(f"needs {mpirun}, of the system package {PACKAGES[mpirun]}")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    more = ["--oversubscribe"] if mpirun == "mpirun.openmpi" else []
    env = {**os.environ, **allowed, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [mpirun, *more, "-n", "2", warm_executable, TRAIN]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert curve(done.stdout, 2) == expected()


def on_launched_workers(**options):
    """The curve that two workers of a launch draw."""
    launcher = Launcher(nproc_per_host=1, handlers=[], log_dir=None, env={"OMP_NUM_THREADS": "1"}, **options)
    try:
        return launcher.run(run_main).rank(0)
    finally:
        cluster.close_all(options["hosts"])


def run_main():
    spec = importlib.util.spec_from_file_location("digits", TRAIN)
    program = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = program  # where the others look for its functions
    spec.loader.exec_module(program)
    return program.main()


@pytest.mark.nightly
def test_launch_by_a_command(warm_executable):
    found = on_launched_workers(hosts=["pod-0", "pod-1"], shell="env POD={host}", python=warm_executable)
    assert found == expected()


@NEEDS_SSHD
def test_launch_by_ssh(sshd, warm_executable):
    found = on_launched_workers(hosts=["node1", "node2"], ssh_config=sshd.config, python=warm_executable)
    assert found == expected()
