"""What users do on a cluster, on a real SLURM of four nodes: srun as the launcher, batch scripts, requeues, ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.launch.slurm_cluster import NEEDS_SLURM
from tests.processes import ROOT
from tests.waits import wait_until
from torchopt_dist.process.slurm import expand_nodes

pytestmark = [NEEDS_SLURM, pytest.mark.timeout(240)]

WORLD = """
import json, os, sys
import torch, torch.distributed as dist
import torchopt_dist as todist

def place():
    world = todist.get_world_info()
    return world.rank, os.uname().nodename, world.local_rank, world.local_world_size

@todist.auto_init_rpc()
def main():
    total = torch.ones(1)
    if todist.get_world_size() > 1:
        dist.init_process_group("gloo")
        dist.all_reduce(total)
        dist.destroy_process_group()
    if todist.get_rank() == 0:
        places = [todist.remote_call(place, rank) for rank in range(todist.get_world_size())]
        port = int(os.environ.get("MASTER_PORT", 0))
        print(json.dumps({"places": places, "total": float(total), "port": port}), flush=True)

main()
"""
TRAINS = """
import os, sys, time
import torch
import torchopt_dist as todist
from tests.launch.forked_server import have_forkserver

def one(x):
    return x * 1.0

def train(steps):
    if todist.get_rank() > 0:
        return None
    checkpointer = todist.Checkpointer(os.environ["FOLDER"] + "/checkpoints")
    weight = torch.zeros(())
    start, state = checkpointer.restore({"weight": weight})
    weight = state["weight"]
    print("start at", start, flush=True)
    step = start
    try:
        for step in range(start + 1, steps + 1):
            weight += float(todist.remote_call(one, todist.get_world_size() - 1, torch.ones(())))
            while step == 3 and start == 0:
                open(os.environ["FOLDER"] + "/up", "w").close()
                time.sleep(0.01)
    finally:
        checkpointer.save(step, {"weight": weight})
        print("saved", step, flush=True)
    print("done", float(weight), flush=True)

if __name__ == "__main__":
    if sys.argv[1] == "srun":
        todist.auto_init_rpc()(train)(5)
    else:
        have_forkserver()
        todist.Launcher(nproc_per_host=1, rpc=True, log_dir=None, python=os.environ["PYTHON"]).run(train, 5)
"""
LAUNCHES = """
import json, os, sys
import torchopt_dist as todist
from tests.launch.forked_server import have_forkserver

def place():
    return todist.get_rank(), os.uname().nodename

options = json.loads(sys.argv[1])
have_forkserver()
try:
    launcher = todist.Launcher(rpc=True, log_dir=None, handlers=[], python=os.environ["PYTHON"], **options)
    results = launcher.run(place).results
    print(json.dumps({"results": results, "alone": todist.get_world_size()}))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
GPUS = """
import json, subprocess
from torchopt_dist.process import slurm
other = slurm.hosts_of_job()[1]
step = [*slurm.step(other), "printenv", "SLURM_GPUS_ON_NODE"]
done = subprocess.run(step, env=slurm.own_environment(), capture_output=True, text=True)
print(json.dumps({"job": slurm.gpus_per_host(2), "step": done.stdout.split()}))
"""


@pytest.fixture(scope="module")
def cluster(slurm):
    for name, text in {"world": WORLD, "trains": TRAINS, "launches": LAUNCHES, "gpus": GPUS}.items():
        (slurm.folder / f"{name}.py").write_text(text)
    return slurm


@pytest.fixture(scope="module")
def variables(cluster, warm_executable):
    return {"PYTHON": warm_executable, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def run(cluster, variables):
    """What a command prints on the login machine, of Python programs those that are warm."""
    return lambda *words, **options: cluster.run(*words, **{**variables, **options})


@pytest.fixture(scope="module")
def submit(cluster, variables):
    """The number of a job."""
    given = "\n".join(f"export {name}={value}" for name, value in variables.items())
    return lambda script, *options: cluster.submit(f"{given}\n{script}\n", *options)


def in_folder(path, script):
    """A script whose job has a folder of its own."""
    path.mkdir(exist_ok=True)
    return f"export FOLDER={path}\n{script}"


def answers(text):
    """The lines that are JSON."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


# srun as the launcher.


def test_the_tasks_of_srun_are_one_world(run, variables):
    (world,) = answers(run("srun", "-N3", "-n4", variables["PYTHON"], "world.py"))
    assert world["places"] == [[0, "n1", 0, 2], [1, "n1", 1, 2], [2, "n2", 0, 1], [3, "n3", 0, 1]]
    assert world["total"] == 4.0


@pytest.mark.nightly
def test_two_worlds_share_a_node_and_a_batch_script_is_no_task(cluster, submit):
    """In a heterogeneous job, whose steps may span its groups."""
    job = submit(
        """
srun --het-group=0,1 $PYTHON world.py &
srun --overlap --het-group=1 -N2 -n2 $PYTHON world.py &
wait
$PYTHON world.py
""",
        *["-N1", "-n1", ":", "-N2", "--ntasks-per-node=2"],
    )
    worlds = answers(cluster.finish(job))
    assert sorted([len(world["places"]) for world in worlds]) == [1, 2, 5], cluster.output(job)
    assert len({world["port"] for world in worlds[:2]}) == 2
    largest = max(worlds, key=lambda world: len(world["places"]))
    assert [place[1:3] for place in largest["places"]] == [
        ["n1", 0],
        ["n2", 0],
        ["n2", 1],
        ["n3", 0],
        ["n3", 1],
    ]


@pytest.mark.parametrize("mpirun", ["mpirun.openmpi", "mpiexec.hydra"])
@pytest.mark.nightly
def test_mpirun_in_a_job(cluster, submit, mpirun):
    if shutil.which(mpirun) is None:
        pytest.skip(f"there is no {mpirun}")
    allow = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    job = submit(f"{allow}\n{mpirun} $PYTHON world.py", "-N2", "--ntasks-per-node=2")
    (world,) = answers(cluster.finish(job))
    assert world["places"] == [[0, "n1", 0, 2], [1, "n1", 1, 2], [2, "n2", 0, 2], [3, "n2", 1, 2]]


NESTED = {
    "mpiexec.hydra -n 2 srun --overlap --quiet -N1 -n1": 2,
    "RANK=0 srun -N1 -n2": 2,
}
"""How a program is started, and how often."""


def test_launchers_that_contradict_each_other_are_told_at_once(cluster, submit):
    if shutil.which("mpiexec.hydra") is None:
        pytest.skip("there is no mpiexec.hydra, of the system package mpich")
    lines = [f"{command} $PYTHON world.py 2>&1 | grep -c Error:" for command in NESTED]
    told = cluster.finish(submit("\n".join(lines), "-N2", "--ntasks-per-node=2"))
    assert list(map(int, told.split())) == list(NESTED.values())


LISTENS = (
    "import socket, sys; s = socket.create_server(('', 23456)); print('up', flush=True); sys.stdin.read()"
)


def test_a_port_that_is_taken_ends_the_step(cluster, run, variables):
    command = cluster.command(variables["PYTHON"], "-c", LISTENS, on="n1")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=cluster.env) as other:
        other.stdout.readline()
        step = ["srun", "--kill-on-bad-exit", "-N2", "-n2", "-w", "n[1-2]", variables["PYTHON"], "world.py"]
        told = run(*step, check=False, timeout=100, MASTER_PORT="23456")
        other.stdin.close()
    assert "rank 0 of 2 cannot reach the store" in told
    assert "MASTER_ADDR:MASTER_PORT=n1:23456" in told
    assert "EADDRINUSE" in told


# One program that launches.


def test_a_job_that_refuses_ssh_is_launched_by_srun(cluster, submit):
    """All groups of a heterogeneous job; the first line of the error says what was tried."""
    launch = '$PYTHON launches.py \'{"nproc_per_host": "cpu"}\''
    job = submit(launch, "-N1", "-n1", ":", "-N2", "-n4", "--ntasks-per-node=2", "--gres=gpu:2")
    text = cluster.finish(job)
    assert answers(text), text
    (told,) = answers(text)
    cores = min(2, len(os.sched_getaffinity(0)))
    assert list(told["results"]) == ["n1", "n2", "n3"]
    assert [[place[1] for place in places] for places in told["results"].values()] == [
        ["n1"],
        ["n2"] * cores,
        ["n3"] * cores,
    ]
    assert told["alone"] == 1
    assert "so srun starts what runs on the hosts" in text


GPUS_ASKED_FOR = ("--gres=gpu:2", "--gpus=4", "--gpus-per-task=1", "--gpus-per-node=2")


@pytest.fixture(scope="module")
def jobs_with_gpus(submit):
    return {gpus: submit("$PYTHON gpus.py", "-N2", "--ntasks-per-node=2", gpus) for gpus in GPUS_ASKED_FOR}


@pytest.mark.parametrize("gpus", GPUS_ASKED_FOR)
@pytest.mark.nightly
def test_gpus_are_those_of_the_job_however_it_asked(cluster, jobs_with_gpus, gpus):
    """Here, and for the step by which another host is reached."""
    (told,) = answers(cluster.finish(jobs_with_gpus[gpus]))
    assert told == {"job": [2, 2], "step": ["2"]}


def test_a_launcher_in_several_tasks_is_told(run, variables):
    told = run("srun", "-N1", "-n3", variables["PYTHON"], "launches.py", "{}")
    assert told.count("ValueError: a launcher must run once, got 3 tasks of srun") == 3


def test_the_user_s_own_srun_starts_steps_of_the_job(cluster, submit):
    """And no job of its own, which would wait for other nodes."""
    shell = "srun --overlap --quiet --nodes=1 --ntasks=1 -w {host}"
    options = json.dumps({"nproc_per_host": 1, "shell": shell})
    job = submit(f"$PYTHON launches.py '{options}'", "-N2", "--exclusive")
    (told,) = answers(cluster.finish(job))
    assert list(told["results"]) == ["n1", "n2"]


def test_a_host_that_is_not_of_the_job_is_told(run, variables):
    options = json.dumps({"hosts": ["n4"], "nproc_per_host": 1, "shell": "srun", "start_timeout": 60})
    told = run("srun", "-N1", "-n1", "-w", "n1", variables["PYTHON"], "launches.py", options)
    assert "InitializationError: " in told
    assert "did not start on n4 by `srun --jobid=" in told
    assert "srun: error:" in told


# The end of a job.


SCRIPTS = {
    "srun": """
srun $PYTHON trains.py srun
[ $? != 143 ] || scontrol requeue $SLURM_JOB_ID
""",
    "launch": """
trap 'kill -TERM $pid; wait $pid; scontrol requeue $SLURM_JOB_ID' TERM
$PYTHON trains.py launch & pid=$!
wait $pid
""",
}
SIGNAL = {"srun": (), "launch": ("--batch",)}
"""`--signal=TERM@120` goes to the steps, `--signal=B:TERM@120` to the script, and so does `scancel`."""


@pytest.fixture(scope="module")
def requeued(cluster, submit, run):
    """Way → what a job has said that was told to end, and what the same script says then."""
    folders = {way: cluster.folder / f"requeued-{way}" for way in SCRIPTS}
    scripts = {way: in_folder(folders[way], SCRIPTS[way]) for way in SCRIPTS}
    size = ("-N2", "--ntasks-per-node=1")
    jobs = {way: submit(scripts[way], *size, "--requeue", "--open-mode=append") for way in SCRIPTS}
    for way, job in jobs.items():
        cluster.wait_for(folders[way] / "up", job)
        run("scancel", "--signal=TERM", *SIGNAL[way], job)
    for job in jobs.values():
        wait_until(
            lambda job=job: waits_for_its_next_start(run("scontrol", "show", "job", job)),
            60,
            lambda job=job: cluster.output(job),
        )
        run("scancel", job)  # it would start in two minutes; the same script now
    again = {way: submit(scripts[way], *size) for way in SCRIPTS}
    return {way: (said(cluster.output(jobs[way])), said(cluster.finish(again[way]))) for way in SCRIPTS}


@pytest.mark.parametrize("way", SCRIPTS)
@pytest.mark.nightly
def test_a_job_that_is_told_to_end_saves_and_its_requeue_resumes(requeued, way):
    ended, resumed = requeued[way]
    assert ended == ["start at 0", "saved 3"]
    assert resumed == ["start at 3", "saved 5", "done 5.0"]


def waits_for_its_next_start(told):
    return all(word in told for word in ("Restarts=1", "JobState=PENDING", "Reason=BeginTime"))


def said(text):
    lines = [line.removeprefix("[rank 0] ") for line in text.splitlines()]
    return [line for line in lines if line.startswith(("start", "saved", "done"))]


@pytest.mark.nightly
def test_nothing_is_left_of_a_job_that_is_cancelled(cluster, submit, run):
    """Here Python is started as users start it: what tests fork in its place is no process of the job."""
    folder = cluster.folder / "cancelled"
    script = in_folder(folder, f"PYTHON={sys.executable} exec {sys.executable} trains.py launch")
    job = submit(script, "-N2", "--ntasks-per-node=1")
    cluster.wait_for(folder / "up", job)
    run("scancel", job)
    cluster.finish(job)
    wait_until(
        lambda: not cluster.processes("n1") + cluster.processes("n2"),
        30,
        cluster.tree,
    )


LOST = r"rank 2 was lost: the machine of worker2 on n4 gives no answer|the agent on n4 gave no sign of life"
DOWN = {
    "launch": ("$PYTHON trains.py launch", "-w", "n[1-2,4]", "--ntasks-per-node=1"),
    "srun": ("srun $PYTHON trains.py srun", "-w", "n[3-4]", "-n3"),
}
"""Two jobs that share n4; both have rank 2 there."""


@pytest.fixture(scope="module")
def without_n4(cluster, submit, run):
    """Way → what a job has said when n4 was down, and nothing was left on its other nodes."""
    jobs = {}
    for way, (command, *where) in DOWN.items():
        script = in_folder(cluster.folder / f"down-{way}", f"export TODIST_LIVENESS=patience=3\n{command}")
        jobs[way] = submit(script, *where, "--no-requeue")
    for way, job in jobs.items():
        cluster.wait_for(cluster.folder / f"down-{way}" / "up", job)
    cluster.cut("n4")
    cluster.kill("n4")
    try:
        for job in jobs.values():
            wait_until(
                lambda job=job: re.search(LOST, cluster.output(job)), 60, lambda job=job: cluster.output(job)
            )
        wait_until(lambda: not cluster.processes("n1") + cluster.processes("n2"), 60, cluster.tree)
        run("scontrol", "update", "NodeName=n4", "State=DOWN", "Reason=test")  # for which srun waits
        wait_until(lambda: not cluster.processes("n3"), 60, cluster.tree)
        return {way: cluster.output(job) for way, job in jobs.items()}
    finally:
        cluster.join("n4")
        cluster.run("slurmd", on="n4")
        cluster.wait_until_idle()


@pytest.mark.parametrize("way", DOWN)
@pytest.mark.nightly
def test_a_node_that_goes_down_ends_the_others_by_name(without_n4, way):
    """Nothing of it answers any more, and nothing is left on the others."""
    assert re.search(LOST, without_n4[way])
    assert "saved 3" in without_n4[way]


def test_lists_are_those_of_scontrol(run):
    for text in ("n[1-3,5],m2", "a[08-11,2]b[1-2]", "login", "x[007]"):
        assert run("scontrol", "show", "hostnames", text).split() == expand_nodes(text)
