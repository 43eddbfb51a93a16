"""A clone that shares its module's parameters, an optimizer that is to move them → a warning before its first step.

The parameters of the clone are those of the module until a step replaces them, so that gradients arrive there. A step
in place, as those of ``torch.optim`` are, would move the module itself. The module's own optimizer holds the same
tensors; what tells the two is that all it moves are in a clone that has not moved, at the first step seen of it.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["note_clone"]

_clones: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""Clones, each with its module."""
_known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that have made a step since the first clone."""
_hooks: list[Any] = []


def note_clone(clone: nn.Module, module: nn.Module) -> None:
    """Watch over a clone that shares its module's parameters, as long as both live."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check))
    _clones[clone] = weakref.ref(module)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or optimizer in _known:
        return
    _known.add(optimizer)
    by_closure = len(args) > 1 or bool(kwargs)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    moved = {id(p) for p in params if by_closure or p.grad is not None}
    if not moved or optimizer.state:
        return
    for clone, module in list(_clones.items()):
        if module() is not None and moved <= {id(p) for p in clone.parameters()}:
            kind = type(optimizer)
            home = "todist" if kind.__module__.startswith("torchopt_dist.") else "torch.optim"
            warnings.warn(
                f"the first step of this {home}.{kind.__name__} moves parameters that a `todist.module_clone` shares "
                f"with its module, a {type(clone).__name__}, and so the module itself, and no gradient goes back "
                "through such a step. Adapt the clone by todist.MetaSGD(clone, lr=...) or another MetaOptimizer; to "
                "train a copy in place, make it by todist.module_clone(module, by='deepcopy'). If the module itself is "
                "to move, let go of the clone before",
                RuntimeWarning,
                stacklevel=3,
            )
            return
