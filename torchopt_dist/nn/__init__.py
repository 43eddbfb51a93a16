"""Modules → snapshots, copies, modules with other tensors in them, and modules with meta-gradients."""

from torchopt_dist.nn.equilibrium import Equilibrium
from torchopt_dist.nn.implicit_meta_module import ImplicitMetaGradientModule
from torchopt_dist.nn.learned import LearnedHyperparameters, learned
from torchopt_dist.nn.meta_module import MetaGradientModule
from torchopt_dist.nn.module_state import (
    ModuleState,
    extract_state_dict,
    module_clone,
    recover_state_dict,
    stop_gradient,
)
from torchopt_dist.nn.stateless import reparametrize, swap_state
from torchopt_dist.nn.zero_order_module import ZeroOrderGradientModule

__all__ = [
    "Equilibrium",
    "ImplicitMetaGradientModule",
    "LearnedHyperparameters",
    "MetaGradientModule",
    "ModuleState",
    "ZeroOrderGradientModule",
    "extract_state_dict",
    "learned",
    "module_clone",
    "recover_state_dict",
    "reparametrize",
    "stop_gradient",
    "swap_state",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
