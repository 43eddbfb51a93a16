"""This machine and this installation → the page to paste into a bug report, as text or as JSON."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import psutil
import torch

import torchopt_dist
from torchopt_dist.launching._cluster import find_hosts, name_hosts
from torchopt_dist.launching._machines import is_this_machine
from torchopt_dist.ops import library
from torchopt_dist.process import network
from torchopt_dist.process.resources import usable_cores

__all__ = ["SECTIONS", "Value", "collect", "to_json", "to_text"]

Value: TypeAlias = "str | int | list[str] | dict[str, Value]"
"""The value of a row; a dictionary means that rows of its own follow below the row."""

PACKAGES = ("numpy", "optree", "cloudpickle", "psutil", "setproctitle", "asyncssh")
OUTSIDE = ("192.0.2.1", "2001:db8::1")
"""Addresses that RFC 5737 and RFC 3849 keep for documentation: the route to them is the one to the world outside."""
RELEVANT = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|LOCAL_WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|(CUDA|HIP|ROCR)_VISIBLE_DEVICES|LD_PRELOAD|LD_LIBRARY_PATH"
    r"|((SLURM|OMP|GOMP|KMP|MKL|GLOO|TP|NCCL|RCCL)_|TORCH|PYTORCH|TODIST).*"
)
"""Names of the environment variables that are shown."""
SECRET = re.compile("TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|JWT", re.IGNORECASE)
IN_VALUE = re.compile(rf"({SECRET.pattern})\w*[=:\s]", re.IGNORECASE)
IN_URL = re.compile(r"(?<=://)[^/\s@]+@")
HIDDEN = "(hidden)"
LONG = 8
"""Characters of a secret that is looked for in all rows; a shorter one may be a word that stands there anyway."""
NVIDIA, AMD = Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")


def collect() -> dict[str, Value]:
    """Collect all sections of the report. A section that cannot be collected has one row, ``error``, with the reason.

    Returns:
        Section → rows, made of strings, integers, lists and dictionaries only. Values that look like secrets are
        hidden.

    Example:
        >>> from torchopt_dist.report import collect
        >>> ", ".join(collect()["memory"])
        'total, available, shared memory'
    """
    report: dict[str, Value] = {}
    for name, section in SECTIONS.items():
        try:
            report[name] = section()
        except Exception as error:
            report[name] = {"error": f"{type(error).__name__}: {error}"}
    secrets = [value for name, value in os.environ.items() if SECRET.search(name) and len(value) >= LONG]
    # The longest first, since one may be a part of another.
    return {name: _hide(rows, sorted(secrets, key=len, reverse=True)) for name, rows in report.items()}


def to_json(report: Mapping[str, Value]) -> str:
    """The report as JSON, for programs."""
    return json.dumps(report, indent=2)


def to_text(report: Mapping[str, Value]) -> str:
    """The report as text: a heading for each section and a line for each row.

    Example:
        >>> from torchopt_dist.report import to_text
        >>> print(to_text({"memory": {"total": "8 GiB", "of it free": "1 GiB"}}))
        memory
          total       8 GiB
          of it free  1 GiB
    """
    parts = []
    for name, rows in report.items():
        lines = list(_lines(rows if isinstance(rows, dict) else {"": rows}, "  "))
        width = max((len(label) for label, value in lines if value is not None), default=0)
        shown = [label if value is None else f"{label:{width}}  {value}".rstrip() for label, value in lines]
        parts.append("\n".join([name, *(shown or ["  none"])]))
    return "\n\n".join(parts)


def _lines(rows: Mapping[str, Value], indent: str) -> Iterator[tuple[str, str | None]]:
    """``(label, value)``; a value of ``None`` means that rows of its own follow."""
    for name, value in rows.items():
        if isinstance(value, dict) and value:
            yield indent + name, None
            yield from _lines(value, indent + "  ")
        else:
            text = ", ".join(value) if isinstance(value, (list, dict)) else str(value)
            # A reason may have several lines.
            first, *rest = text.splitlines() or [""]
            yield indent + name, first if text else "none"
            yield from (("", line) for line in rest)


def _hide(value: Value, secrets: list[str]) -> Value:
    if isinstance(value, dict):
        return {name: _hide(row, secrets) for name, row in value.items()}
    if isinstance(value, list):
        return [_hide_in(text, secrets) for text in value]
    return _hide_in(value, secrets) if isinstance(value, str) else value


def _hide_in(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    # Names and values may be bytes that are no UTF-8; they must not keep the page from being printed.
    return IN_URL.sub(f"{HIDDEN}@", text).encode("utf-8", "backslashreplace").decode()


def _versions() -> Value:
    os_name = platform.system()
    with contextlib.suppress(OSError):
        os_name = platform.freedesktop_os_release()["PRETTY_NAME"]
    home, folder = str(Path.home()), str(Path(torchopt_dist.__file__).parent)
    return {
        "torchopt_dist": torchopt_dist.__version__,
        "installed in": f"~{folder.removeprefix(home)}" if folder.startswith(f"{home}{os.sep}") else folder,
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": str(torch.__version__),
        "CUDA of torch": torch.version.cuda or "none",
        "ROCm of torch": torch.version.hip or "none",
        **{name: _version(name) for name in PACKAGES},
        "system": f"{os_name}, {platform.machine()}",
        "kernel": platform.release(),
        "C library": " ".join(platform.libc_ver()).strip() or "unknown",
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _kernels() -> Value:
    return {
        device: {op: library.why_not(op, device) or "yes" for op in library.OPS} for device in library.DEVICES
    }


def _interfaces() -> Value:
    families = (socket.AF_INET, socket.AF_INET6)
    states, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    known = {
        name: [each.address for each in addresses.get(name, []) if each.family in families]
        for name in {**states, **addresses}
    }
    up = {name for name in known if name not in states or states[name].isup}
    asked = os.environ.get("MASTER_ADDR")
    outside = next((route for host in OUTSIDE if (route := _route(host)) is not None), None)
    return {
        "host name": socket.gethostname(),
        "interfaces": {name: addresses for name, addresses in known.items() if name in up},
        "down": sorted(known.keys() - up),
        "to the outside": outside or "no route",
        **({f"to {asked}, MASTER_ADDR": _route(asked) or "no route"} if asked else {}),
        **_interface_variables(asked or next((host for host in OUTSIDE if _route(host)), OUTSIDE[0])),
    }


def _route(host: str) -> str | None:
    """The address that packets to a host leave from."""
    try:
        return network.local_address(host)
    except OSError:
        return None


def _interface_variables(host: str) -> dict[str, Value]:
    """The variables that ``auto_init_rpc`` would set if rank 0 were at a host. The environment stays as it is."""
    before = {name: os.environ.get(name) for name in network.VARIABLES}
    try:
        network.choose_interface(host)
        return {name: os.environ.get(name, "not set, since no interface routes there") for name in before}
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


def _processor() -> Value:
    return {
        "cores": os.cpu_count() or "unknown",
        "of them for this process": usable_cores(),
        "threads of torch": torch.get_num_threads(),
    }


def _memory() -> Value:
    memory = psutil.virtual_memory()
    rows: dict[str, Value] = {"total": _size(memory.total), "available": _size(memory.available)}
    if Path("/dev/shm").is_dir():
        shared = psutil.disk_usage("/dev/shm")
        rows["shared memory"] = f"{_size(shared.total)}, {_size(shared.free)} free"
    return rows


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


def _gpus() -> Value:
    rows: dict[str, Value] = {"count": torch.cuda.device_count(), "driver": _driver()}
    for index in range(torch.cuda.device_count()):
        try:
            gpu = torch.cuda.get_device_properties(index)
            rows[f"GPU {index}"] = (
                f"{gpu.name}, {_size(gpu.total_memory)}, capability {gpu.major}.{gpu.minor}"
            )
        except Exception as error:  # one broken GPU does not hide the others
            rows[f"GPU {index}"] = f"{type(error).__name__}: {error}"
    return rows


def _driver() -> str:
    found = []
    for name, file in (("NVIDIA", NVIDIA), ("AMD", AMD)):
        with contextlib.suppress(OSError):
            version = re.search(r"\d+\.\d+(\.\d+)*", file.read_text())
            found.append(f"{name} {version[0] if version else 'of unknown version'}")
    return " and ".join(found) or "none"


def _environment() -> Value:
    shown: dict[str, Value] = {}
    for name, value in sorted(os.environ.items()):
        if RELEVANT.fullmatch(name):
            shown[name] = HIDDEN if SECRET.search(name) or IN_VALUE.search(value) else value
    return shown


def _launch() -> Value:
    names = name_hosts("auto")
    if not all(map(is_this_machine, names)):  # a report logs in nowhere
        return {"workers": dict.fromkeys(names, "as many as it has GPUs, or else cores")}
    return {"workers": {host.name: host.workers for host in find_hosts(names, "auto")}}


SECTIONS: dict[str, Callable[[], Value]] = {
    "versions": _versions,
    "kernels": _kernels,
    "network": _interfaces,
    "processor": _processor,
    "memory": _memory,
    "GPUs": _gpus,
    "environment": _environment,
    "Launcher() would launch": _launch,
}
"""Heading → what makes its rows."""
