"""The formula of every raw op of the kernel library, written with torch's ops → the numbers a kernel is to give."""

from __future__ import annotations

import torch
from torch import Tensor


def root(x: Tensor) -> Tensor:
    """The square root, with a derivative of 0 at 0."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())


def adam(g, m, v, p, c, factor, kept, b1, b2, eps, eps_root):
    m, v = m + (1 - b1) * (g - m), b2 * v + (1 - b2) * g * g
    u = factor * (m / c[0]) / (root(v / c[1] + eps_root) + eps)
    return u if p is None else kept * p + u, m, v


def adam_(p, g, m, v, c, lr, b1, b2, eps, eps_root, weight_decay, decoupled, maximize):
    g = -g if maximize else g
    if decoupled:
        p = p * (1 - lr * weight_decay)
    elif weight_decay:
        g = g + weight_decay * p
    m, v = m + (1 - b1) * (g - m), b2 * v + (1 - b2) * g * g
    return p - lr / c[0] * m / ((v + eps_root * c[1]).sqrt() / c[1].sqrt() + eps), m, v


def sgd_(p, g, b, taken, lr, momentum, nesterov, weight_decay, maximize):
    g = -g if maximize else g
    g = g + weight_decay * p if weight_decay else g
    if b is None:
        return p - lr * g, None
    b = momentum * b + taken * g
    return p - lr * (g + momentum * b if nesterov else b), b


def sgd(g, b, p, taken, *numbers):
    return sgd_(torch.zeros_like(g) if p is None else p, g, b, taken, *numbers)


def sgd_gradients(du, db, taken, lr, momentum, nesterov, weight_decay, maximize):
    """What autograd makes of the formula: of its sum, and of its parameter, only where there is one."""
    g, b, p = (torch.zeros_like(du, requires_grad=True) for _ in range(3))
    with torch.enable_grad():
        u, new = sgd(g, b if momentum else None, p, taken, lr, momentum, nesterov, weight_decay, maximize)
        results = [(u, du), *([] if new is None or db is None else [(new, db)])]
        leaves = [g, *([b] if momentum else []), *([p] if weight_decay else [])]
        return torch.autograd.grad([x for x, _ in results], leaves, [d for _, d in results])


def rmsprop(g: Tensor, v: Tensor, a: Tensor | None, alpha: float, eps: float) -> tuple:
    v = alpha * v + (1 - alpha) * g * g
    if a is None:
        return g / (root(v) + eps), v, None
    a = a + (1 - alpha) * (g - a)
    return g / (root(v - a * a) + eps), v, a


def rmsprop_(p, g, v, a, b, lr, alpha, eps, momentum, nesterov, weight_decay, maximize):
    g = -g if maximize else g
    g = g + weight_decay * p if weight_decay else g
    s, v, a = rmsprop(g, v, a, alpha, eps)
    if b is not None:
        b = momentum * b + s
        s = s + momentum * b if nesterov else b
    return p - lr * s, v, a, b


def adam_gradients(du, dm, dv, g, m, v, c, factor, b1, b2, eps, eps_root):
    """What autograd makes of the formula; the averages are the old ones."""
    m, v = m + (1 - b1) * (g - m), b2 * v + (1 - b2) * g * g
    m, v = m.detach().requires_grad_(), v.detach().requires_grad_()
    with torch.enable_grad():
        u = factor * (m / c[0]) / (root(v / c[1] + eps_root) + eps)
        to_m, to_v = torch.autograd.grad(u, (m, v), du)
    to_m, to_v = to_m + (0 if dm is None else dm), to_v + (0 if dv is None else dv)
    return (1 - b1) * to_m + 2 * (1 - b2) * g * to_v, b1 * to_m, b2 * to_v


def rmsprop_gradients(du, dv, da, g, v, a, alpha, eps):
    """What autograd makes of the formula, from the new averages on."""
    g, v = g.clone().requires_grad_(), v.clone().requires_grad_()
    a = None if a is None else a.clone().requires_grad_()
    with torch.enable_grad():
        u = g / (root(v if a is None else v - a * a) + eps)
        leaves = [g, v] if a is None else [g, v, a]
        to_g, to_v, *to_a = torch.autograd.grad(u, leaves, du)
    to_v = to_v + (0 if dv is None else dv)
    to_g = to_g + 2 * (1 - alpha) * g.detach() * to_v
    if not to_a:
        return to_g, alpha * to_v, None
    (a_grad,) = to_a
    a_grad = a_grad + (0 if da is None else da)
    return to_g + (1 - alpha) * a_grad, alpha * to_v, alpha * a_grad
