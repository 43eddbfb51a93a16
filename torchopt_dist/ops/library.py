"""The kernel libraries beside this package → ops of torch; lists of tensors → whether one of them runs, or why not.

``_C`` registers the ops with torch when it is loaded, and ``_C_cuda`` adds their kernels for CUDA, where torch has
CUDA; torch's dispatcher is then asked which devices have a kernel. Without the libraries everything works by the
reference formulas. The reason and the command that builds the libraries are logged at import, through the logger
``torchopt_dist`` and not as a warning: they concern the machine, not the program, so they must not break a program that
turns warnings into errors. Logging shows them on stderr by default. Only one process of a program logs them: neither
other ranks than rank 0, nor processes that a process starts. CUDA is not mentioned where there is no GPU.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import torch
from torch import Tensor

from torchopt_dist import torch_private
from torchopt_dist.core.types import Device
from torchopt_dist.core.uncompiled import is_traced
from torchopt_dist.ops._columns import PLAIN, lie_alike
from torchopt_dist.ops._foreach import Factor, Factors

__all__ = [
    "accelerated_op_available",
    "are_concrete",
    "check_choice",
    "is_available",
    "remedy",
    "torch_fused_step",
    "transforms_allow",
    "use_kernel",
    "why_not",
]

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

_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_torch_ops: Any = torch.ops
_NAME = "torchopt_dist"
_LIBRARIES = {"_C": ("kernel library", "_build_note.txt"), "_C_cuda": ("CUDA library", "_cuda_note.txt")}
PACKAGE = Path(__file__).resolve().parent.parent
_TOLD = "TODIST_TOLD_OF_KERNELS"
"""An environment variable, which the processes that a program starts inherit."""


def remedy(package: Path) -> str:
    """The command, for a shell.

    Args:
        package: the folder of the package.

    Returns:
        A ``pip install`` of what this installation was made from, which pip has noted beside it (PEP 610); for a source
        tree that is not installed, a build in place.
    """
    tree = package.parent
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.distribution(_NAME)
        source = _source(installed)
        if source == ["-e", str(tree)]:
            return f"pip install --no-deps {shlex.join(source)}"
        if Path(str(installed.locate_file(_NAME))).resolve() == package:
            return f"pip install --no-deps --force-reinstall --no-cache-dir {shlex.join(source)}"
    return f"cd {shlex.quote(str(tree))} && python setup.py build_ext --inplace"


def _source(installed: importlib.metadata.Distribution) -> list[str]:
    """The source from which pip installed the package."""
    source = json.loads(installed.read_text("direct_url.json") or "{}")
    url = str(source.get("url", ""))
    if not url or url.endswith(".whl"):  # a wheel stays as it is: the kernels are built from the sources
        return ["--no-binary", _NAME, f"{_NAME}=={installed.version}"]
    if "dir_info" in source:
        path = url2pathname(urlsplit(url).path)
        return ["-e", path] if source["dir_info"].get("editable") else [path]
    if "vcs_info" in source:
        url = f"{source['vcs_info']['vcs']}+{url}@{source['vcs_info']['commit_id']}"
    return [f"{_NAME} @ {url}"]


def load(package: Path = PACKAGE, name: str = "_C") -> str | None:
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
            *(what, reason, remedy(PACKAGE)),
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


def use_kernel(
    op: str, first: Sequence[Tensor], rest: Sequence[Tensor], fused: bool | None, *factors: Factor
) -> bool:
    """Whether an op's kernel is to be used.

    Args:
        op: name of the op.
        first: tensors with the shapes, dtypes and devices that the op's other tensors must have.
        rest: the op's other tensors, column by column, of as many tensors each.
        fused: None uses the kernel where it can be used (not under ``torch.compile``, which fuses the reference formula
            itself), False never uses it, True raises an error where it cannot be used.
        factors: hyper-parameters, for which the kernel has no derivatives if they are tensors.

    Raises:
        TypeError: ``fused`` is none of these.
        RuntimeError: ``fused=True`` where the kernel cannot be used; the message says why.
    """
    check_choice(fused)
    if fused is False or (fused is None and (is_traced() or not first)):
        return False
    reason = "`torch.compile` compiles the formula itself" if is_traced() else _obstacle(op, first, rest)
    if reason is None and any(isinstance(factor, Tensor) for factor in factors):
        reason = "the kernel takes hyper-parameters that are numbers; leave `fused` out"
    if reason is not None and fused:
        raise RuntimeError(f"`fused=True` cannot be used: {reason}")
    return reason is None


def check_choice(fused: bool | None) -> None:
    """Raise ``TypeError`` unless ``fused`` is True, False or None."""
    if fused is not None and not isinstance(fused, bool):
        raise TypeError(f"`fused` must be True, False or None; got {fused!r}")


def torch_fused_step(
    name: str, columns: Sequence[Sequence[Tensor]], fused: bool | None
) -> Callable[..., None] | None:
    """The op of a ``torch.optim`` optimizer's fused step, if it takes these tensors.

    Args:
        name: the optimizer: ``"adam"``, ``"adamw"``, ``"sgd"``, ``"adagrad"``.
        columns: parameters, gradients and the lists of the state, of one length.
        fused: False never uses the op; True and None use it where it can be used.

    Returns:
        The op, or ``None``: then a kernel of this package or a formula is to make the step.

    Raises:
        TypeError: ``fused`` is neither a bool nor None.
    """
    check_choice(fused)
    step = torch_private.fused_step(name)
    if step is None or fused is False or not columns[0] or is_traced():
        return None
    tensors = [x for column in columns for x in column]
    if {*map(type, tensors)} - PLAIN or {x.layout for x in tensors} != {torch.strided}:
        return None
    if torch_private.forward_mode_is_active() or torch_private.transforms_are_active():
        return None
    if any(
        map(torch_private.is_zero_tensor, columns[1])
    ):  # torch's op counts gradients among what it overwrites
        return None
    devices = {x.device for x in tensors}
    if len(devices) > 1 or devices.pop().type not in DEVICES:
        return None
    dtypes = {x.dtype for x in columns[0]}
    return step if dtypes <= _DTYPES and len(dtypes) == 1 and lie_alike(columns) else None


def _obstacle(op: str, tensors: Sequence[Tensor], rest: Sequence[Tensor] = ()) -> str | None:
    """The reason for which an op's kernel cannot be used for these tensors; ``None`` if it can."""
    if not is_traced():
        for kind in {*map(type, tensors), *map(type, rest)} - PLAIN:
            return f"the kernel takes plain tensors; got a {kind.__name__}"
        if torch_private.forward_mode_is_active():
            return "forward-mode differentiation is active, and the kernel carries no tangents"
        if torch_private.transforms_are_active() and (op.endswith("_") or not transforms_allow()):
            return "a transformation of `torch.func` is active, and the kernel has no rule for it"
    devices = {tensor.device for tensor in tensors} or {torch.device("cpu")}
    if len(devices) > 1:
        return f"the kernel takes tensors of one device; got {', '.join(sorted(map(str, devices)))}"
    for device in devices:
        reason = why_not(op, device)
        if reason is not None:
            return reason
    dtypes = [tensor.dtype for tensor in tensors]
    for dtype in {*dtypes} - _DTYPES:
        return f"the kernel has no {dtype}"
    if [tensor.dtype for tensor in rest] != dtypes * (len(rest) // max(len(dtypes), 1)):
        return "the kernel takes tensors of one dtype, and some that belong together differ"
    for layout in {tensor.layout for tensor in (*tensors, *rest)} - {torch.strided}:
        return f"the kernel takes dense tensors; got layout {layout}"
    return None


def are_concrete(values: Factors, fused: bool | None) -> bool:
    """Whether a kernel can read the numbers made from the step counts; it cannot where ``vmap`` batches these.

    Args:
        values: the numbers, from ``bias_correction.values``.
        fused: as in :func:`use_kernel`.

    Raises:
        RuntimeError: ``fused=True`` where the kernel cannot.
    """
    batched = isinstance(values, list) and any(isinstance(value, Tensor) for value in values)
    if not batched or not torch_private.transforms_are_active():
        return True
    if fused:
        raise RuntimeError("`fused=True` cannot be used: the kernel must read `steps`, which `vmap` batches")
    return False


def transforms_allow() -> bool:
    """Whether no transformation is active but those that a kernel's node has rules for: ``grad``, ``vjp``, ``vmap``."""
    if is_traced() or torch_private.forward_mode_is_active():
        return False
    return torch_private.transforms_are_only("Grad", "Vmap")
