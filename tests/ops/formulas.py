"""The formula of every raw op of the kernel library, written with torch's ops → the numbers a kernel is to give."""

from __future__ import annotations

import torch
from torch import Tensor


def root(x: Tensor) -> Tensor:
    """The square root, with a derivative of 0 at 0."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())


def at_least_zero(x: Tensor) -> Tensor:
    """The number, or 0 for one below; the derivative is 1 or 0, and 1 at NaN, where that of ``clamp`` is 0."""
    return torch.where(x < 0, 0.0, x)


def adam(g, m, v, p, c, factor, kept, b1, b2, eps, eps_root, weight_decay=0.0, maximize=False):
    g = -g if maximize else g
    g = g + weight_decay * p if weight_decay else g
    m, v = m + (1 - b1) * (g - m), b2 * v + (1 - b2) * g * g
    u = factor * (m / c[0]) / (root(v / c[1] + eps_root) + eps)
    return u if p is None else kept * p + u, m, v


def sgd(g, b, p, taken, lr, momentum, nesterov, weight_decay, maximize):
    p = torch.zeros_like(g) if p is None else p
    g = -g if maximize else g
    g = g + weight_decay * p if weight_decay else g
    if b is None:
        return p - lr * g, None
    b = momentum * b + taken * g
    return p - lr * (g + momentum * b if nesterov else b), b


def sgd_gradients(du, db, taken, lr, momentum, nesterov, weight_decay, maximize):
    """What autograd makes of the formula: of its sum, and of its parameter, only where there is one."""
    g, b, p = (torch.zeros_like(du, requires_grad=True) for _ in range(3))
    with torch.enable_grad():
        u, new = sgd(g, b if momentum else None, p, taken, lr, momentum, nesterov, weight_decay, maximize)
        results = [(u, du), *([] if new is None or db is None else [(new, db)])]
        leaves = [g, *([b] if momentum else []), *([p] if weight_decay else [])]
        return torch.autograd.grad([x for x, _ in results], leaves, [d for _, d in results])


def rmsprop(g, v, a, b, p, factor, alpha, eps, momentum, nesterov):
    v = alpha * v + (1 - alpha) * g * g
    a = None if a is None else a + (1 - alpha) * (g - a)
    s = g / (root(v if a is None else at_least_zero(v - a * a)) + eps)
    if b is not None:
        b = momentum * b + s
        s = s + momentum * b if nesterov else b
    return factor * s if p is None else p + factor * s, v, a, b


def rmsprop_(p, g, v, a, b, lr, alpha, eps, momentum, nesterov, weight_decay, maximize):
    g = -g if maximize else g
    g = g + weight_decay * p if weight_decay else g
    return rmsprop(g, v, a, b, p, -lr, alpha, eps, momentum, nesterov)


def adam_gradients(
    du, dm, dv, g, m, v, p, c, factor, kept, b1, b2, eps, eps_root, weight_decay=0.0, maximize=False
):
    """What autograd makes of the formula, of its parameter only with this decay; the averages are the old ones."""
    sign = -1 if maximize else 1
    g = sign * g + weight_decay * p if weight_decay else sign * g
    m, v = m + (1 - b1) * (g - m), b2 * v + (1 - b2) * g * g
    m, v = m.detach().requires_grad_(), v.detach().requires_grad_()
    with torch.enable_grad():
        u = factor * (m / c[0]) / (root(v / c[1] + eps_root) + eps)
        to_m, to_v = torch.autograd.grad(u, (m, v), du)
    to_m, to_v = to_m + (0 if dm is None else dm), to_v + (0 if dv is None else dv)
    to_g = (1 - b1) * to_m + 2 * (1 - b2) * g * to_v
    return sign * to_g, b1 * to_m, b2 * to_v, kept * du + weight_decay * to_g if weight_decay else None


def rmsprop_gradients(dp, dv, da, db, g, v, a, *settings):
    """What autograd makes of the formula."""
    b = None if settings[3] == 0 else torch.zeros_like(g)
    inputs = [None if x is None else x.clone().requires_grad_() for x in (g, v, a, b)]
    with torch.enable_grad():
        results = rmsprop(*inputs, None, *settings)
        flows = [x if dx is None else (x, dx) for x, dx in zip(results, (dp, dv, da, db), strict=True)]
        known = [pair for pair in flows if isinstance(pair, tuple)]
        leaves = [x for x in inputs if x is not None]
        found = iter(torch.autograd.grad([x for x, _ in known], leaves, [dx for _, dx in known]))
    return tuple(None if x is None else next(found) for x in inputs)
