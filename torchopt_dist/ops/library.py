"""The kernel libraries beside this package → ops of torch, or the reason why one cannot be used.

``_C`` registers the ops with torch when it is loaded, and ``_C_cuda`` adds their kernels for CUDA, where torch has
CUDA; torch's dispatcher is then asked which devices have a kernel. Without the libraries everything works by the
reference formulas. The reason and the command that builds the libraries are logged at import, through the logger
``torchopt_dist`` and not as a warning: they concern the machine, not the program, so they must not break a program that
turns warnings into errors. Logging shows them on stderr by default. Only one process of a program logs them: neither
other ranks than rank 0, nor processes that a process starts. CUDA is not mentioned where there is no GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

from torchopt_dist import torch_private
from torchopt_dist.core.types import Device
from torchopt_dist.ops._remedy import remedy

__all__ = ["accelerated_op_available", "is_available", "why_not"]

OPS = (
    "adam",
    "adam_backward",
    "rmsprop",
    "rmsprop_",
    "rmsprop_backward",
    "sgd",
    "sgd_backward",
)
"""Every op that has a kernel; a new one is one more row."""
DEVICES = ("cpu", "cuda")
"""Device types that a kernel may be written for."""

_torch_ops: Any = torch.ops
_LIBRARIES = {"_C": ("kernel library", "_build_note.txt"), "_C_cuda": ("CUDA library", "_cuda_note.txt")}
_PACKAGE = Path(__file__).resolve().parent.parent
_TOLD = "TODIST_TOLD_OF_KERNELS"
"""An environment variable, which the processes that a program starts inherit."""


def load(package: Path = _PACKAGE, name: str = "_C") -> str | None:
    """Load a kernel library that lies in a folder.

    Args:
        package: the folder; ``setup.py`` leaves in it either the library or a note that says why not.
        name: ``"_C"``, or ``"_C_cuda"``, which needs the other one.

    Returns:
        None if the library is loaded, else the reason why it is not.
    """
    title, note = _LIBRARIES[name]
    for suffix in EXTENSION_SUFFIXES:
        library = package / f"{name}{suffix}"
        if library.is_file():
            try:
                _torch_ops.load_library(str(library))
            except OSError as error:
                return f"the {title} failed to load: {error}"
            return None
    if (package / note).is_file():
        return f"the {title} was not built: {(package / note).read_text(encoding='utf-8').strip()}"
    return f"the {title} was not built: there is no {name}{EXTENSION_SUFFIXES[-1]} in {package}"


def _load_cuda() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return _PROBLEM or load(name="_C_cuda")


def _registered() -> frozenset[tuple[str, str]]:
    """Ask torch's dispatcher for the (op, device type) that have a kernel."""
    return frozenset(
        (op, device) for op in OPS for device in DEVICES if torch_private.has_kernel(f"todist::{op}", device)
    )


def _tell(what: str, reason: str) -> None:
    """Log why there are no kernels, and the command that builds them, if no other process of this program does."""
    if os.environ.get("RANK", "0") == "0" and os.environ.setdefault(_TOLD, str(os.getpid())) == str(
        os.getpid()
    ):
        logging.getLogger("torchopt_dist").warning(
            "torchopt_dist runs without its %s by the slower reference formulas: %s. This command builds them: %s",
            *(what, reason, remedy(_PACKAGE)),
        )


_PROBLEM = load()
_CUDA_PROBLEM = _load_cuda()
_KERNELS = _registered()
if _PROBLEM:
    _tell("kernels,", _PROBLEM)
elif _CUDA_PROBLEM and torch.version.cuda is not None and torch.cuda.device_count() > 0:
    _tell("CUDA kernels, on GPUs", _CUDA_PROBLEM)


def why_not(op: str, device: Device = "cpu") -> str | None:
    """Say why an op has no kernel for a device.

    Args:
        op: name of the op, such as ``"adam"``.
        device: the device that the tensors are on; only its type counts.

    Returns:
        None if there is a kernel, else the reason: the library was not built, it failed to load, it has no
        kernel for this device, or torch has no such devices.

    Raises:
        ValueError: ``op`` is not the name of an op.
    """
    if op not in OPS:
        raise ValueError(f"`op` must be one of {', '.join(OPS)}; got {op!r}")
    kind = torch.device(device).type
    if (op, kind) in _KERNELS:
        return "torch finds no GPU" if kind == "cuda" and torch.cuda.device_count() == 0 else None
    if _PROBLEM:
        return _PROBLEM
    have = " and ".join(there.upper() for name, there in sorted(_KERNELS) if name == op)
    rest = f"this build has {have} only" if have else "this build has none of it"
    because = f": {_CUDA_PROBLEM}" if kind == "cuda" and _CUDA_PROBLEM else ""
    return f"`{op}` has no {kind.upper()} kernel; {rest}{because}"


def is_available(op: str, device: Device = "cpu") -> bool:
    """Tell whether an op has a kernel for a device; see :func:`why_not` for the reason if not."""
    return why_not(op, device) is None


def accelerated_op_available(devices: Device | Iterable[Device] | None = None) -> bool:
    """Tell whether Adam's kernels are there, by TorchOpt's name; ``ops.why_not`` says why if not.

    Args:
        devices: one or several, a number being that of a CUDA device; by default the CPU, and CUDA where torch can
            use it.
    """
    if devices is None:
        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    elif isinstance(devices, (str, int, torch.device)):
        devices = [devices]
    named = [f"cuda:{device}" if isinstance(device, int) else device for device in devices]
    return all(is_available(op, device) for device in named for op in ("adam", "adam_backward"))
