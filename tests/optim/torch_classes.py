"""Torch's own optimizers that ``differentiable`` takes, and a program that follows their steps."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from torchopt_dist.optim.differentiable import differentiable


def takes(cls, option):
    return option in inspect.signature(cls).parameters


CLASSES = sorted(
    (
        cls
        for cls in vars(torch.optim).values()
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and takes(cls, "differentiable")
    ),
    key=lambda cls: cls.__name__,
)
FORMS = [
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
    (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    *((cls, {"weight_decay": 0.1}) for cls in CLASSES if takes(cls, "weight_decay")),
    *((cls, {"maximize": True}) for cls in CLASSES),
    *((cls, {}) for cls in CLASSES),
]
W = [0.3, -0.7, 1.1]


class One(nn.Module):
    """A module with one parameter, which may have a history."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(torch.zeros_like(w))
        self._parameters["w"] = w


def trajectory(cls, w, steps, **options):
    module = One(w.clone())
    optimizer = differentiable(cls, module, **options)
    scale = torch.arange(1.0, w.numel() + 1, dtype=w.dtype)
    for k in range(steps):
        optimizer.step((scale * (module.w * (k + 1)).sin() + module.w**4).sum())
    return module.w
