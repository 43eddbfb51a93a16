"""A number → a SLURM cluster of so many nodes on this machine, with the real daemons.

Each node has a network namespace, a host name, and an address of its own, and so has the machine ``login``, which runs
the controller. Nothing of SLURM's or munge's own folders is used.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.machines import PATH, Machines
from tests.waits import wait_until

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "munged", "ip", "unshare")
missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
NEEDS_SLURM = pytest.mark.skipif(
    bool(missing) or os.getuid() != 0,
    reason=f"needs root and SLURM (Debian: slurmctld slurmd slurm-client munge iproute2), without {missing}",
)
DAEMONS = ("slurmd", "slurmctld", "munged")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

CONFIGURATION = """
ClusterName=tests
SlurmctldHost=login({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,batch_sched_delay=0
ReturnToService=2
SlurmdParameters=config_overrides
JobRequeue=1
KillWait=2
GresTypes=gpu
NodeName=n[1-{size}] CPUs=4 CoresPerSocket=4 RealMemory=1000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=n[1-{size}] Default=YES MaxTime=INFINITE State=UP
"""


class Cluster(Machines):
    """A running cluster.

    Args:
        folder: for its files.
        size: how many nodes there are: ``n1``, ``n2``, …
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.nodes = [f"n{number + 1}" for number in range(size)]
        super().__init__(folder, ["login", *self.nodes])

    def start(self) -> None:
        """Make the machines, and start the daemons; skip the test where that is forbidden."""
        self.make()
        self._configure()
        munge = [
            f"--{what}={self.folder}/munge.{what}" for what in ("key-file", "socket", "pid-file", "log-file")
        ]
        self.run("munged", "--force", *munge, f"--seed-file={self.folder}/munge.seed")
        self.run("slurmctld")
        for name in self.nodes:
            self.run("slurmd", on=name)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Wait until all nodes are up and have nothing to do."""
        wait_until(lambda: self.idle() == len(self.nodes), 60, self._logs)

    def _configure(self) -> None:
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key-file"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        text = CONFIGURATION.format(address=self.addresses["login"], folder=self.folder, size=len(self.nodes))
        (self.folder / "slurm.conf").write_text(text)
        for number in range(2):  # devices that SLURM counts, and hands out
            (self.folder / f"gpu{number}").touch()
        gpus = f"Name=gpu Flags=nvidia_gpu_env File={self.folder}/gpu[0-1]"
        (self.folder / "gres.conf").write_text(f"NodeName=n[1-{len(self.nodes)}] {gpus}\n")

    @property
    def env(self) -> dict[str, str]:
        """The environment of commands there."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TODIST"))}
        return {**ours, "SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": PATH, "OMP_NUM_THREADS": "1"}

    def run(
        self, *words: object, on: str = "login", timeout: float = 120, check: bool = True, **env: str
    ) -> str:
        """What a command prints there, errors included; fails if it does not end well."""
        done = subprocess.run(
            self.command(*words, on=on),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**self.env, **env},
            timeout=timeout,
            check=False,
            cwd=self.folder,
        )
        if check and done.returncode:
            pytest.fail(f"{words} ended with {done.returncode}:\n{done.stdout}\n{self._logs()}")
        return done.stdout

    def submit(self, script: str, *options: str) -> str:
        """The number of a new job, whose output is in ``<number>.out``."""
        file = self.folder / "job.sh"
        file.write_text(f"#!/bin/bash\n{script}")
        return self.run("sbatch", "--parsable", "--output=%j.out", *options, file).strip()

    def output(self, job: str) -> str:
        """What a job has printed."""
        file = self.folder / f"{job}.out"
        return file.read_text() if file.exists() else ""

    def state(self, job: str) -> str:
        """What a job is doing."""
        found = re.search(r"JobState=(\S+)", self.run("scontrol", "show", "job", job, check=False))
        return found[1] if found else ""

    def wait_for(self, file: Path, job: str) -> None:
        """Wait until a job has made a file; fail if it has ended without that."""
        wait_until(lambda: file.exists() or self.state(job) in ENDED, 100, lambda: self.output(job))
        assert file.exists(), self.output(job)

    def finish(self, job: str) -> str:
        """Wait for the end of a job: what it has printed."""
        wait_until(lambda: self.state(job) in ENDED, 100, lambda: f"{self.state(job)}: {self.output(job)}")
        return self.output(job)

    def processes(self, on: str) -> list[psutil.Process]:
        """What runs on a machine, but for the daemons."""
        found = []
        for process in super().processes(on):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() not in DAEMONS:
                    found.append(process)
        return found

    def tree(self) -> str:
        """What runs on the nodes."""
        return str({name: self.processes(name) for name in self.nodes})

    def idle(self) -> int:
        """How many nodes have nothing to do."""
        return len(self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).split())

    def _logs(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log*"))
        )
