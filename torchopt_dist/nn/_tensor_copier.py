"""A tensor and a copy mode → its copy, the same one each time the tensor is met."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchopt_dist.core.types import CopyMode, Device
from torchopt_dist.core.vmap import detached

__all__ = ["TensorCopier"]

_MODES = {
    "reference": "reference",
    "ref": "reference",
    "copy": "copy",
    "clone": "copy",
    "deepcopy": "deepcopy",
}


class TensorCopier:
    """Copies each tensor once, so that tied weights stay tied.

    Args:
        by: ``'reference'`` (``'ref'``), the tensor itself; ``'copy'`` (``'clone'``), a clone through which
            gradients flow back, recorded even under ``torch.no_grad``; ``'deepcopy'``, a leaf of its own
            memory that requires grad as the original does, an ``nn.Parameter`` for an ``nn.Parameter``.
        device: where to move the copies; if not given, they stay on the tensor's device. A moved reference is a
            copy with a history.

    Raises:
        ValueError: ``by`` is none of these.
    """

    def __init__(self, by: CopyMode, device: Device | None = None) -> None:
        if by not in _MODES:
            raise ValueError(f"`by` must be one of {', '.join(map(repr, _MODES))}, got {by!r}")
        self._mode = _MODES[by]
        self._device = None if device is None else torch.device(device)
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """Copy one tensor, or return the copy that was made of it before."""
        if self._mode == "reference" and self._device is None:
            return tensor
        if id(tensor) not in self._seen:
            self._seen[id(tensor)] = tensor, self._copy(tensor)  # the original is kept, and with it its id
        return self._seen[id(tensor)][1]

    def _copy(self, tensor: Tensor) -> Tensor:
        if self._mode == "deepcopy":
            if isinstance(tensor, nn.Parameter):
                copy = self._moved(tensor.detach().clone())
                return nn.Parameter(copy, requires_grad=tensor.requires_grad)
            with torch.enable_grad():
                moved = self._moved(tensor)
            return detached(moved, copy=True)
        with torch.enable_grad():
            return self._moved(tensor.clone() if self._mode == "copy" else tensor)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor if self._device is None else tensor.to(self._device)
