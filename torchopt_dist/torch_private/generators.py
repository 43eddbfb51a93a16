"""Torch's seeds for GPUs that are not in use yet."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import torch

from torchopt_dist.torch_private.lookup import find

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
