"""Tensors → how often each has been changed in place, and an error where one has been changed since."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from torchopt_dist._torch_private import tensor_version

__all__ = ["Versioned", "check_versions", "versioned"]


class Versioned(NamedTuple):
    """A tensor, and how often it had been changed in place at a given time."""

    tensor: Tensor
    version: int | None


def versioned(tensors: Iterable[Tensor]) -> list[Versioned]:
    """The tensors with their present versions; a tensor made under ``torch.inference_mode()`` has none."""
    return [Versioned(x, None if x.is_inference() else tensor_version(x)) for x in tensors]


def check_versions(inputs: list[Versioned]) -> None:
    """Raise :class:`RuntimeError` if a tensor has been changed in place since."""
    for place, (tensor, version) in enumerate(inputs):
        if version is not None and tensor_version(tensor) != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"of the tensors that a remote call differentiates, number {place}, of shape {tuple(tensor.shape)}, "
                f"is at version {tensor_version(tensor)}; expected version {version} instead"
            )
