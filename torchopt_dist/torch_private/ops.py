"""Torch's ops: which code runs, in which precision, and with which seeds on GPUs that are not in use yet."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from torchopt_dist.torch_private.lookup import find


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


PendingSeeds: TypeAlias = tuple[Any, Any, list[Any]]
"""What is done to the generators of GPUs when these come into use."""


def pending_gpu_seeds() -> PendingSeeds | None:
    """What torch has queued; ``None`` without the name: then what the first task draws on a GPU is not seeded."""
    tracker = find("cuda._lazy_seed_tracker")
    if tracker is None:
        return None
    return tracker.manual_seed_all_cb, tracker.manual_seed_cb, tracker.call_order


def set_pending_gpu_seeds(seeds: PendingSeeds | None) -> None:
    """Let that be queued, or done where GPUs are in use by now."""
    tracker = find("cuda._lazy_seed_tracker")
    if tracker is None or seeds is None:
        return
    tracker.manual_seed_all_cb, tracker.manual_seed_cb, tracker.call_order = seeds
    if torch.cuda.is_initialized():
        calls = [call for call, _ in filter(None, seeds[2])]
        for call in calls or [partial(_seed_gpus, DEFAULT_SEED)]:
            call()


def queue_gpu_seed(seed: int) -> None:
    """Let the generators of GPUs have a seed when these come into use, as torch does."""
    tracker = find("cuda._lazy_seed_tracker")
    if tracker is not None:
        tracker.queue_seed_all(partial(_seed_gpus, seed), ())


DEFAULT_SEED = 67280421310721
"""That of a generator which nobody has seeded."""


def _seed_gpus(seed: int) -> None:
    for generator in torch.cuda.default_generators:
        generator.manual_seed(seed)
