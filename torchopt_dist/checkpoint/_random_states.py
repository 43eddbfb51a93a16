"""The generators of this process → plain values and tensors, and back: Python's, numpy's, torch's on CPU and CUDA."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["capture_random_states", "restore_random_states"]


def capture_random_states() -> dict[str, Any]:
    """The states of the default generators; those of CUDA if CUDA is in use."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore captured states; those of CUDA devices that do not exist here are left out."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)
