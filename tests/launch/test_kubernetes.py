"""The manifests of `examples/kubernetes`, read as a cluster reads them, and run on machines that stand for Pods."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.launch.curves import STEP, TRAIN, curve, expected
from tests.machines import NEEDS_MACHINES, PATH, Machines
from tests.processes import ROOT
from tests.waits import wait_until
from tests.warm_python import warm_python

FOLDER = ROOT / "examples" / "kubernetes"
MANIFESTS = ("indexed_job.yaml", "jobset.yaml", "pytorchjob.yaml")
SECRETS = {"train": {"secret": "0123456789abcdef0123456789abcdef"}}
WAITS = """
import os, time
import torchopt_dist as todist

save = todist.Checkpointer.save

def save_and_wait(self, step, state):
    save(self, step, state)
    while step == 3 and os.path.exists("wait"):
        time.sleep(0.01)

todist.Checkpointer.save = save_and_wait
"""


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


# What the controllers make of the manifests.


@dataclass
class Pod:
    """A Pod.

    Attributes:
        name: its host name.
        spec: the manifest's.
        env: the variables that the controller sets.
        published: the names under which the others know it.
    """

    name: str
    spec: dict
    env: dict
    published: list

    @property
    def container(self):
        (container,) = self.spec["containers"]
        return container

    def variables(self):
        """All variables of its container."""
        return {**self.env, **{each["name"]: value_of(each) for each in self.container["env"]}}

    def command(self):
        """What its container runs: `$(NAME)` is a variable."""
        words = [*self.container["command"], *self.container["args"]]
        env = self.variables()
        return [re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], word) for word in words]

    def mounts(self):
        """Mount path → the volume there."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        return {each["mountPath"]: volumes[each["name"]] for each in self.container["volumeMounts"]}


def value_of(variable):
    if "value" in variable:
        return variable["value"]
    reference = variable["valueFrom"]["secretKeyRef"]
    return SECRETS[reference["name"]][reference["key"]]


def pods_of(documents):
    """The Pods that a cluster starts, rank 0 first."""
    *services, workload = documents
    name, spec = workload["metadata"]["name"], workload["spec"]
    if workload["kind"] == "Job":
        return pods_of_job(name, spec, services)
    if workload["kind"] == "JobSet":
        subdomain = spec["network"].get("subdomain", name)
        service = {"metadata": {"name": subdomain}, "spec": {"clusterIP": "None", "selector": {}}}
        pods = []
        for job in spec["replicatedJobs"]:
            for replica in range(job["replicas"]):
                made = job["template"]["spec"]
                made["template"]["spec"]["subdomain"] = subdomain
                pods += pods_of_job(f"{name}-{job['name']}-{replica}", made, [service])
        return pods
    assert workload["kind"] == "PyTorchJob"
    roles = spec["pytorchReplicaSpecs"]
    names = [(role, f"{name}-{role.lower()}-{i}") for role in roles for i in range(roles[role]["replicas"])]
    place = {"MASTER_ADDR": f"{name}-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": str(len(names))}
    return [
        Pod(pod, roles[role]["template"]["spec"], {**place, "RANK": str(rank)}, [pod])
        for rank, (role, pod) in enumerate(names)
    ]


def pods_of_job(name, spec, services):
    assert spec["completionMode"] == "Indexed"
    template = spec["template"]
    labels = {"job-name": name, **template.get("metadata", {}).get("labels", {})}
    pods = []
    for index in range(min(spec["completions"], spec["parallelism"])):  # those that run at the same time
        pod = Pod(f"{name}-{index}", template["spec"], {"JOB_COMPLETION_INDEX": str(index)}, [])
        for service in services:
            is_headless = service["spec"]["clusterIP"] == "None"
            selects = service["spec"]["selector"].items() <= labels.items()
            if is_headless and selects and template["spec"].get("subdomain") == service["metadata"]["name"]:
                pod.published.append(f"{pod.name}.{service['metadata']['name']}")
        pods.append(pod)
    return pods


# What they say.


def read_by(model, document):
    """What a model of the interface has read; what it does not know is not among that."""
    return model.from_dict(document).to_dict()


def models():
    return importlib.import_module("kubeflow_trainer_api.models")


KINDS = {
    "Service": "IoK8sApiCoreV1Service",
    "Job": "IoK8sApiBatchV1Job",
    "PersistentVolumeClaim": "IoK8sApiCoreV1PersistentVolumeClaim",
    "JobSet": "JobsetV1alpha2JobSet",
}


@pytest.mark.parametrize("name", ["storage.yaml", *MANIFESTS])
def test_the_interface_knows_every_field(name):
    """The operator's own models; of PyTorchJob, the Pods' templates."""
    for document in documents(name):
        if document["kind"] == "PyTorchJob":
            for role in document["spec"]["pytorchReplicaSpecs"].values():
                assert read_by(models().IoK8sApiCoreV1PodTemplateSpec, role["template"]) == role["template"]
        else:
            assert read_by(getattr(models(), KINDS[document["kind"]]), document) == document


def test_the_fields_of_a_pytorchjob_are_those_of_its_operator():
    (job,) = documents("pytorchjob.yaml")
    assert set(job["spec"]) <= {"runPolicy", "pytorchReplicaSpecs", "nprocPerNode", "elasticPolicy"}
    assert set(job["spec"]["runPolicy"]) <= {"backoffLimit", "cleanPodPolicy", "activeDeadlineSeconds"}
    for role in job["spec"]["pytorchReplicaSpecs"].values():
        assert set(role) == {"replicas", "restartPolicy", "template"}
        assert role["restartPolicy"] in {"OnFailure", "Never", "ExitCode", "Always"}
        assert [each["name"] for each in role["template"]["spec"]["containers"]] == ["pytorch"]


@pytest.mark.parametrize(
    ("path", "value"), [("template.spec.subdomian", "train"), ("completions", "two"), ("backofLimit", 3)]
)
def test_a_field_that_the_interface_does_not_know_is_found(path, value):
    _, job = documents("indexed_job.yaml")
    *folders, name = path.split(".")
    place = job["spec"]
    for folder in folders:
        place = place[folder]
    place[name] = value
    with contextlib.suppress(ValueError):
        assert read_by(models().IoK8sApiBatchV1Job, job) != job


def gibibytes(text):
    return int(text.removesuffix("Gi"))


@pytest.mark.parametrize("name", MANIFESTS)
def test_names_and_numbers_fit_each_other(name):
    pods = pods_of(documents(name))
    (claim,) = documents("storage.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    known = [each for pod in pods for each in pod.published]
    for rank, pod in enumerate(pods):
        words, env, mounts = pod.command(), pod.variables(), pod.mounts()
        assert len(env["TODIST_SECRET"]) >= 16
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"  # and it counts as the container's memory
        size = gibibytes(mounts["/dev/shm"]["emptyDir"]["sizeLimit"])
        assert size < gibibytes(pod.container["resources"]["limits"]["memory"])
        assert mounts[words[-1]]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        place = {"master-addr": env.get("MASTER_ADDR"), "nproc-per-node": "1"}
        place |= dict(word.removeprefix("--").split("=") for word in words if word.startswith("--"))
        assert place["master-addr"] == pods[0].published[0] in known
        assert int(place.get("nnodes", len(pods))) == len(pods)
        assert int(place.get("node-rank", rank)) == rank
        assert int(pod.container["resources"]["requests"]["cpu"]) == int(place["nproc-per-node"])


def test_the_image_has_what_the_manifests_run():
    text = (FOLDER / "Dockerfile").read_text()
    program = re.search(r"^ARG PROGRAM=(.+)$", text, re.MULTILINE)[1]
    assert ROOT / program == TRAIN
    assert "COPY ${PROGRAM} train.py" in text
    assert re.search(r"^ARG BUILD=cpu\n.*whl/\$\{BUILD\}$", text, re.MULTILINE)
    (torch,) = set(re.findall(r"torch==([\d.]+)", text))
    assert f"TORCH ?= torch=={torch}\n" in (ROOT / "Makefile").read_text()
    for path in re.findall(r"PROGRAM=(\S+)", text):
        assert (ROOT / path).is_file()


# Machines that stand for Pods.


class Running:
    """Machines on which Pods run.

    Args:
        folder: for their files.
        pods: the Pods.
    """

    def __init__(self, folder: Path, pods: list[Pod]) -> None:
        self.pods, self.work = pods, folder / "work"
        published = {name: pod.name for pod in pods for name in pod.published}
        self.machines = Machines(folder, [pod.name for pod in pods], published)
        for name in ("work", "bin", "claims", "claims/checkpoints"):
            (folder / name).mkdir()
        self.image(TRAIN.read_text())
        warm_python().executable(folder / "bin" / "python")
        torchrun = folder / "bin" / "torchrun"
        torchrun.write_text(
            '#!/bin/sh\nexec python -m torch.distributed.run --run-path --start-method=fork "$@"\n'
        )
        torchrun.chmod(0o755)
        self.folder = folder

    def image(self, program: str) -> None:
        """Put another program into the image."""
        (self.work / "train.py").write_text(program)

    def start(self) -> list[subprocess.Popen]:
        """Start the container of each Pod."""
        return [self._start(pod) for pod in self.pods]

    def _start(self, pod: Pod) -> subprocess.Popen:
        mounts = ["mount -t tmpfs tmpfs /mnt"]
        for path, volume in pod.mounts().items():
            if "emptyDir" in volume:
                size = volume["emptyDir"]["sizeLimit"].removesuffix("i")
                mounts.append(f"mount -t tmpfs -o size={size} tmpfs {path}")
            else:
                claim = self.folder / "claims" / volume["persistentVolumeClaim"]["claimName"]
                mounts.append(f"mkdir {path} && mount --bind {claim} {path}")
        env = {
            "PATH": f"{self.folder}/bin:{PATH}",
            "HOME": os.environ.get("HOME", "/"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **pod.variables(),
        }
        command = self.machines.command(*pod.command(), on=pod.name, first=" && ".join(mounts))
        out = (self.folder / f"{pod.name}.out").open("w")
        with out:
            return subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=self.work)

    def said(self, pod: Pod) -> str:
        return (self.folder / f"{pod.name}.out").read_text()

    def finish(self, containers: list[subprocess.Popen]) -> list[int]:
        """Wait for their ends."""
        return [container.wait(100) for container in containers]


@pytest.fixture
def running(tmp_path):
    made = []

    def make(name):
        made.append(Running(tmp_path, pods_of(documents(name))))
        made[0].machines.make()
        return made[0]

    yield make
    for each in made:
        each.machines.remove()


@NEEDS_MACHINES
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [*MANIFESTS[:1], *(pytest.param(name, marks=pytest.mark.nightly) for name in MANIFESTS[1:])]
)
def test_the_pods_are_one_world_and_draw_the_curve(running, name):
    job = running(name)
    assert job.finish(job.start()) == [0, 0], [job.said(pod) for pod in job.pods]
    workers = 2 if name == "pytorchjob.yaml" else 4
    assert curve(job.said(job.pods[0]), workers) == expected()
    assert not STEP.findall(job.said(job.pods[1]))


@NEEDS_MACHINES
@pytest.mark.timeout(120)
def test_a_pod_that_is_killed_ends_the_others_and_new_pods_go_on(running):
    job = running("indexed_job.yaml")
    wait, checkpoints = job.work / "wait", job.folder / "claims" / "checkpoints"
    wait.touch()
    job.image(WAITS + TRAIN.read_text())
    containers = job.start()
    wait_until(lambda: len([*checkpoints.iterdir()]) == 3, 60, lambda: str(map(job.said, job.pods)))
    job.machines.kill(job.pods[1].name)
    ends = job.finish(containers)
    before = job.said(job.pods[0])
    assert ends[0] == 1, before
    assert re.search(r"(WorkerLostError|PeerFailedError): rank [23]", before)
    assert not job.machines.processes(job.pods[0].name)
    wait.unlink()
    assert job.finish(job.start()) == [0, 0], [job.said(pod) for pod in job.pods]
    assert curve(before.partition("step 4")[0] + job.said(job.pods[0]), 4) == expected()
