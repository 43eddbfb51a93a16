"""The programs of docs/launchers.md start the same `main` on other engines' workers: values, the cause, restarts.

`make engines` installs each engine into an environment of its own in `build/engines`; without that nothing is run.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.curves import TRAIN, curve, expected
from tests.processes import ROOT

ENGINES = Path(os.environ.get("TODIST_ENGINES", ROOT / "build" / "engines"))
VALUES = "['0 of 2, 0 of 2 here', '1 of 2, 1 of 2 here']"
FAILS = """
import os, time
import torchopt_dist as todist


@todist.auto_init_rpc()
def main():
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first and todist.get_rank() == 1:
        raise KeyError("the cause")
    while first:
        time.sleep(0.01)
    return todist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
"""
TRY = """
    try:
        start(fails.main)
    except KeyError as error:
        print("KeyError", "the cause" in str(error), flush=True)
"""
PROGRAMS = {
    "ray": f"""
import digits, fails, ray
from on_ray import launch
if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    start = lambda main: launch(main, 2)
    print("curve", start(digits.main)[0], flush=True)
{TRY}
    print(launch(fails.main, 2, max_restarts=1), flush=True)
""",
    "dask": f"""
import digits, fails
from dask.distributed import Client
from on_dask import launch
if __name__ == "__main__":
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        start = lambda main: launch(client, main, 2)
        print("curve", start(digits.main)[0], flush=True)
{TRY.replace("    ", "        ")}
""",
}
RAY_TRAIN = """
import sys
import digits, ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

if __name__ == "__main__":
    ray.init(num_cpus=3, include_dashboard=False)
    run_config = RunConfig(storage_path=sys.argv[1])
    TorchTrainer(lambda: digits.main(), scaling_config=ScalingConfig(num_workers=2), run_config=run_config).fit()
"""
pytestmark = pytest.mark.timeout(280)


def run(engine, program, folder, *arguments):
    python = ENGINES / engine / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {python}: `make engines` makes it")
    path = os.pathsep.join(map(str, (folder, ROOT / "examples" / "engines", ROOT)))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, program, *arguments], env=env, capture_output=True, text=True, timeout=270, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("engine", ["ray", "dask", "monarch"])
def test_main_runs_on_an_engine_s_workers(engine, tmp_path):
    text = run(engine, ROOT / "examples" / "engines" / f"on_{engine}.py", tmp_path)
    assert VALUES in text
    assert "['rank 0 has [0.0, 1.0]', 'rank 1 has [2.0, 3.0]']" in text or engine == "monarch"


@pytest.mark.parametrize("engine", PROGRAMS)
def test_the_curve_is_the_same_and_the_cause_is_raised_and_all_start_again(engine, tmp_path):
    """On Dask the caller starts again."""
    (tmp_path / "digits.py").write_text(TRAIN.read_text())
    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "program.py").write_text(PROGRAMS[engine])
    lines = run(engine, tmp_path / "program.py", tmp_path).splitlines()
    (losses,) = [json.loads(line.removeprefix("curve ")) for line in lines if line.startswith("curve ")]
    assert losses == expected()
    assert "KeyError True" in lines
    if engine == "ray":
        assert "[(0, '1'), (1, '1')]" in lines


def test_the_curve_is_the_same_under_ray_train(tmp_path):
    (tmp_path / "digits.py").write_text(TRAIN.read_text())
    (tmp_path / "program.py").write_text(RAY_TRAIN)
    assert curve(run("ray", tmp_path / "program.py", tmp_path, tmp_path / "results"), 2) == expected()
