"""``python -m torchopt_dist`` says what is the case, hides secrets, and survives whatever is broken."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import socket
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import torchopt_dist as todist
from tests.processes import python
from tests.rows import each_row
from torchopt_dist import __main__ as program
from torchopt_dist import report as page
from torchopt_dist.launching import _cluster as cluster

ROOT = Path(__file__).resolve().parents[1]
SECRETS = {
    "HF_TOKEN": "hf-0123456789",
    "TODIST_API_KEY": "short",
    "SLURM_JWT": "jwt-0123456789",
    "NCCL_PASSWORD": "pass-0123456789",
    "GLOO_SECRET": "gloo-0123456789",
}
SHOWN = {
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RUN_ID": "run 7",
    "SLURM_JOB_NAME": "of hf-0123456789",
    "TODIST_PROXY": "https://name:pw@host/path",
    "NCCL_OPTIONS": "--token abcdefgh --rings 2",
    "OMP_SCHEDULE": "static",
}


BOUND = """
import os, runpy, sys

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
runpy.run_module("torchopt_dist", run_name="__main__", alter_sys=True)
"""
"""The command, by a process that may use one core."""


def run(*arguments: str, warm: bool = True, **env: str) -> str:
    """What Python prints when it is run with these arguments; nothing may be said on standard error."""
    environ = {**os.environ, **env}
    ended = python("-W", "error", *arguments, cwd=ROOT, env=environ, warm=warm, timeout=250)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


@pytest.fixture(scope="module")
def text() -> str:
    """In a new Python, as users start it."""
    return run("-m", "torchopt_dist", warm=False, **SECRETS, **SHOWN)


@pytest.fixture(scope="module")
def report() -> dict:
    return json.loads(run("-c", BOUND, "--json", **SECRETS, **SHOWN, OMP_NUM_THREADS="1"))


def test_no_secret_is_printed(text: str, report: dict) -> None:
    for printed in (text, json.dumps(report)):
        for secret in [*SECRETS.values(), "name:pw", "abcdefgh"]:
            assert secret not in printed
    assert report["environment"] == {
        **{name: value for name, value in os.environ.items() if page.RELEVANT.fullmatch(name)},
        "GLOO_SECRET": "(hidden)",
        "MASTER_ADDR": "127.0.0.1",
        "NCCL_OPTIONS": "(hidden)",
        "NCCL_PASSWORD": "(hidden)",
        "OMP_NUM_THREADS": "1",
        "OMP_SCHEDULE": "static",
        "SLURM_JOB_NAME": "of (hidden)",
        "SLURM_JWT": "(hidden)",
        "TODIST_API_KEY": "(hidden)",
        "TODIST_PROXY": "https://(hidden)@host/path",
        "TORCHELASTIC_RUN_ID": "run 7",
    }
    assert re.search(r"^  SLURM_JOB_NAME +of \(hidden\)$", text, re.MULTILINE)


@each_row(
    ("name", "shown"),
    [
        ("RANK", True),
        ("LOCAL_WORLD_SIZE", True),
        ("ROLE_RANK", True),
        ("SLURM_JOB_NUM_NODES", True),
        ("TP_SOCKET_IFNAME", True),
        ("TORCHINDUCTOR_CACHE_DIR", True),
        ("TODIST_WORKER_NAME", True),
        ("TPUT", False),
        ("HOME", False),
        ("MY_RANK", False),
        ("HF_TOKEN", False),
    ],
)
def test_variables_that_matter_are_shown(name: str, shown: bool) -> None:
    assert bool(page.RELEVANT.fullmatch(name)) is shown


def test_versions_are_those_of_the_packages(report: dict) -> None:
    told = report["versions"]
    assert told["torchopt_dist"] == todist.__version__
    assert told["torch"] == torch.__version__
    assert told["Python"].split() == ["CPython", ".".join(map(str, sys.version_info[:3]))]
    for package in ("numpy", "optree", "cloudpickle", "psutil"):
        assert told[package] == version(package)
    assert told["kernel"] == os.uname().release
    assert told["system"].endswith(os.uname().machine)
    assert told["C library"] == "glibc " + os.confstr("CS_GNU_LIBC_VERSION").split()[1]
    assert told["CUDA of torch"] == (torch.version.cuda or "none")


def test_numbers_are_the_kernels_own(report: dict) -> None:
    (total,) = re.findall(r"^MemTotal: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert report["memory"]["total"] == f"{int(total) / 2**20:.1f} GiB"
    assert report["processor"]["cores"] == len(
        re.findall("^processor", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    )
    assert report["processor"]["of them for this process"] == 1  # it was bound to one
    interfaces = {*report["network"]["interfaces"], *report["network"]["down"]}
    assert interfaces == {name for _, name in socket.if_nameindex()}
    assert "127.0.0.1" in report["network"]["interfaces"]["lo"]
    assert report["network"]["host name"] == platform.node()


def test_kernels_are_there_or_the_reason_is(report: dict, text: str) -> None:
    for device, ops in report["kernels"].items():
        assert "adam" in ops
        for op, told in ops.items():
            assert told == (todist.ops.why_not(op, device) or "yes")
            assert (told == "yes") is todist.ops.is_available(op, device)
            assert f"{op:16}  {told}" in text
    assert list(report["kernels"]) == ["cpu", "cuda"]


def test_workers_would_meet_where_master_addr_is(report: dict) -> None:
    assert report["network"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert report["network"]["TP_SOCKET_IFNAME"] == "lo"
    assert report["network"]["to 127.0.0.1, MASTER_ADDR"] == "127.0.0.1"


def test_the_environment_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TP_SOCKET_IFNAME", "mine")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = dict(os.environ)
    told = page.collect()["network"]
    assert isinstance(told, dict)
    assert (told["GLOO_SOCKET_IFNAME"], told["TP_SOCKET_IFNAME"]) == ("lo", "mine")
    assert dict(os.environ) == before


def test_without_a_network_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> str:
        raise OSError("Network is unreachable")

    for variable in (*page.network.VARIABLES, "MASTER_ADDR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(page.network, "local_address", unreachable)
    told = page.collect()["network"]
    assert isinstance(told, dict)
    assert told["to the outside"] == "no route"
    assert told["GLOO_SOCKET_IFNAME"] == "not set, since no interface routes there"


def test_launcher_would_launch_what_find_hosts_finds(
    report: dict, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report["Launcher() would launch"] == {"workers": {"localhost": torch.cuda.device_count() or 1}}
    workers = torch.cuda.device_count() or len(psutil.Process().cpu_affinity() or ())
    assert text.endswith(f"Launcher() would launch\n  workers\n    localhost  {workers}\n")

    def two(hosts: list[str], nproc_per_host: str) -> list[cluster.Host]:
        assert (hosts, nproc_per_host) == (["localhost"], "auto")
        return [SimpleNamespace(name="a", workers=1), SimpleNamespace(name="b", workers=3)]

    monkeypatch.setattr(page, "find_hosts", two)
    assert page.collect()["Launcher() would launch"] == {"workers": {"a": 1, "b": 3}}

    # The hosts of a SLURM job are named, and not logged in on.
    monkeypatch.setattr(page, "name_hosts", lambda hosts: ["node1", "node2"])
    told = "as many as it has GPUs, or else cores"
    assert page.collect()["Launcher() would launch"] == {"workers": {"node1": told, "node2": told}}


def test_a_broken_section_says_why_and_the_others_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("`hosts` must be here\nand are not")

    monkeypatch.setattr(page, "find_hosts", broken)
    monkeypatch.setattr(page.psutil, "virtual_memory", broken)
    assert program.main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["memory"] == {"error": "ValueError: `hosts` must be here\nand are not"}
    assert told["versions"]["torch"] == torch.__version__
    assert program.main([]) == 0
    printed = capsys.readouterr().out
    assert "\nmemory\n  error  ValueError: `hosts` must be here\n         and are not\n\nGPUs\n" in printed
    assert printed.endswith("would launch\n  error  ValueError: `hosts` must be here\n         and are not\n")


def test_a_secret_in_the_reason_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_PASSWORD", "correct horse")
    monkeypatch.setitem(page.SECTIONS, "memory", lambda: int("correct horse"))
    assert page.collect()["memory"] == {
        "error": "ValueError: invalid literal for int() with base 10: '(hidden)'"
    }


def test_gpus_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def properties(index: int) -> SimpleNamespace:
        if index == 1:
            raise RuntimeError("CUDA error: out of order")
        return SimpleNamespace(name="Big GPU", total_memory=80 * 2**30, major=9, minor=0)

    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    monkeypatch.setattr(page, "NVIDIA", driver)
    monkeypatch.setattr(page, "AMD", tmp_path / "none")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert page.collect()["GPUs"] == {
        "count": 2,
        "driver": "NVIDIA 580.65.06",
        "GPU 0": "Big GPU, 80.0 GiB, capability 9.0",
        "GPU 1": "RuntimeError: CUDA error: out of order",
    }


def test_bytes_that_are_no_text_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environb, b"SLURM_JOB_NAME", b"caf\xe9")
    environment = page.collect()["environment"]
    assert isinstance(environment, dict)
    assert environment["SLURM_JOB_NAME"] == "caf\\udce9"


def test_the_page_of_the_docs_shows_every_section_and_commands_that_run() -> None:
    told = (ROOT / "docs" / "debugging.md").read_text("utf-8").partition("## Report a problem")[2]
    assert re.findall(r"^\| `(.+?)` \|", told, re.MULTILINE) == list(page.SECTIONS)
    commands = re.findall(r"^```bash\n(.+)\n```$", told, re.MULTILINE)
    for command, start in zip(commands, ("versions\n", "{"), strict=True):
        python, *arguments = shlex.split(command)
        assert python == "python"
        assert run(*arguments).startswith(start)


def test_an_unknown_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        program.main(["--yaml"])
    assert ending.value.code == 2
    assert "unrecognized arguments: --yaml" in capsys.readouterr().err
