"""Adan as the paper's algorithm 1 has it, a parameter at a time: torch has none to compare with."""

from __future__ import annotations

import torch


class Adan(torch.optim.Optimizer):
    """Xie et al. 2024; ``betas`` are one minus the paper's."""

    def __init__(self, params, lr=1e-3, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=0.0, maximize=False):
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2, b3 = group["betas"]
            lr = group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = -p.grad if group["maximize"] else p.grad.clone()
                if p.is_complex():
                    g, x = torch.view_as_real(g), torch.view_as_real(p)
                else:
                    x = p
                state = self.state[p]
                if not state:
                    state.update(
                        k=0, m=torch.zeros_like(g), v=torch.zeros_like(g), n=torch.zeros_like(g), last=g
                    )
                change = g - state["last"]
                state["k"] += 1
                state["m"] = b1 * state["m"] + (1 - b1) * g
                state["v"] = b2 * state["v"] + (1 - b2) * change
                state["n"] = b3 * state["n"] + (1 - b3) * (g + b2 * change) ** 2
                state["last"] = g
                m, v, n = (
                    state[name] / (1 - b ** state["k"]) for name, b in zip("mvn", (b1, b2, b3), strict=True)
                )
                eta = lr / (n.sqrt() + group["eps"])
                x.copy_((x - eta * (m + b2 * v)) / (1 + lr * group["weight_decay"]))
