"""Optimizers that torch has not, a parameter at a time, as their papers' algorithms have them."""

from __future__ import annotations

from typing import ClassVar

import torch


class _ByParameter(torch.optim.Optimizer):
    """Each parameter with a gradient → its ``moved``, on pairs of real numbers where it is complex."""

    def __init__(self, params, **options):
        super().__init__(params, {"maximize": False, "weight_decay": 0.0, **self.OPTIONS, **options})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = -p.grad if group["maximize"] else p.grad
                g, x = (torch.view_as_real(t) if t.is_complex() else t for t in (g, p))
                x.copy_(self.moved(x, g, self.state[p], group))


class Lion(_ByParameter):
    """Chen et al. 2023, algorithm 2."""

    OPTIONS: ClassVar = {"lr": 1e-4, "betas": (0.9, 0.99)}

    def moved(self, x, g, state, group):
        b1, b2 = group["betas"]
        m = state.get("m", torch.zeros_like(g))
        c = torch.lerp(m, g, 1 - b1)  # b1 * m + (1 - b1) * g; bfloat16 would round each term
        state["m"] = torch.lerp(m, g, 1 - b2)
        return x - group["lr"] * (torch.sign(c) + group["weight_decay"] * x)


class LAMB(_ByParameter):
    """You et al. 2020, algorithm 2, with the identity for phi."""

    OPTIONS: ClassVar = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6}

    def moved(self, x, g, state, group):
        b1, b2 = group["betas"]
        state["t"] = state.get("t", 0) + 1
        state["m"] = b1 * state.get("m", torch.zeros_like(g)) + (1 - b1) * g
        state["v"] = b2 * state.get("v", torch.zeros_like(g)) + (1 - b2) * g * g
        m, v = state["m"] / (1 - b1 ** state["t"]), state["v"] / (1 - b2 ** state["t"])
        u = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * x
        norms = x.float().norm().item(), u.float().norm().item()
        if x.dtype is torch.float64:
            norms = x.norm().item(), u.norm().item()
        return x - group["lr"] * (norms[0] / norms[1] if min(norms) > 0 else 1.0) * u
