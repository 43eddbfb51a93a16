"""Modules → snapshots, copies, and modules with other tensors in them."""

from torchopt_dist.nn.module_state import (
    ModuleState,
    extract_state_dict,
    module_clone,
    module_detach_,
    recover_state_dict,
    stop_gradient,
)

__all__ = [
    "ModuleState",
    "extract_state_dict",
    "module_clone",
    "module_detach_",
    "recover_state_dict",
    "stop_gradient",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
