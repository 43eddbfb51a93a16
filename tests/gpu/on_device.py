"""A pytest plugin: ``-p tests.gpu.on_device`` → tests that name no device make their tensors on the GPU."""

from __future__ import annotations

import torch

from tests.gpu.device import DEVICE


def pytest_configure() -> None:
    """Make the GPU the default device, before the tests are imported."""
    torch.set_default_device(DEVICE)
