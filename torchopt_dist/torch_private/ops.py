"""Torch's ops and its compiler: which code runs, and in which precision."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from torchopt_dist.torch_private.lookup import find

P = ParamSpec("P")
R = TypeVar("R")


def has_kernel(op: str, device_type: str) -> bool:
    """Whether an op, such as ``"todist::adam"``, has a kernel for a device type.

    Without the name the answer is always no: formulas run where kernels could.
    """
    has_kernel_for_key = find("_C._dispatch_has_kernel_for_dispatch_key")
    try:
        return has_kernel_for_key is not None and bool(has_kernel_for_key(op, device_type.upper()))
    except RuntimeError:  # torch knows no such op
        return False


def fused_step(name: str) -> Callable[..., None] | None:
    """The op that ``torch.optim`` calls for ``fused=True``, by its optimizer: ``"adam"``, ``"adamw"``, ``"sgd"``.

    Without the name it is ``None``: formulas run, or this package's own kernels.
    """
    return cast("Callable[..., None] | None", getattr(torch, f"_fused_{name}_", None))


def places_of_weight_norm() -> list[tuple[ModuleType, str]]:
    """The modules, and a name in each, that weight normalization calls its function by.

    Without the name there are none: inside of ``vmap`` its second derivative then is torch's.
    """
    modules = [torch, sys.modules.get("torch.nn.utils.weight_norm")]
    return [(x, "_weight_norm") for x in modules if x is not None and hasattr(x, "_weight_norm")]


def name_of_op(obj: object) -> str | None:
    """The path under ``torch.ops`` of what is there, such as ``aten.relu.default`` or ``aten.relu``.

    Without the names it is ``None``, as for other objects: an operation cannot be sent but in a function that finds it.
    """
    return str(obj) if type(obj) in _KINDS_OF_OPS else None


_KINDS_OF_OPS = frozenset((find("_ops.OpOverload"), find("_ops.OpOverloadPacket"))) - {None}


def is_zero_tensor(tensor: Tensor) -> bool:
    """Whether it is one of torch's gradients of 0 without memory, which no op takes to be overwritten.

    Without the name none is.
    """
    is_zero = getattr(torch, "_is_zerotensor", None)
    return is_zero is not None and bool(is_zero(tensor))


def autocast_is_on() -> bool:
    """Whether autocast is on for any type of device.

    Without the name the CPU and GPUs are asked one by one.
    """
    is_on = getattr(torch._C, "_is_any_autocast_enabled", None)
    if is_on is None:
        return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return bool(is_on())


def left_to_python(function: Callable[P, R]) -> Callable[P, R]:
    """A function that ``torch.compile`` runs as it is, and does not look into.

    As ``torch.compiler.disable``, which would import the compiler now. Without the name it is the function itself, and
    the compiler finds out slowly, function by function, what it cannot trace.
    """
    disable = find("_compile._disable_dynamo")
    return function if disable is None else cast("Callable[P, R]", disable(function))
