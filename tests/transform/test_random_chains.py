"""Random chains of transformations move parameters as loops written by hand do, and so do all their derivatives.

Each link stands here once more, as a function of one parameter's gradient and a dictionary that it remembers things in.
``make fuzz`` runs more of them, from a seed by chance; ``TODIST_FUZZ_SEED=<seed>`` runs the chains from this seed on.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchopt_dist as todist
from torchopt_dist import transform

MORE = os.environ.get("TODIST_FUZZ_CHAINS")
SEED = int(os.environ.get("TODIST_FUZZ_SEED") or (random.randrange(10**9) if MORE else 0))
CHAINS, STEPS = int(MORE or 40), 4
DAILY = CHAINS if MORE else 8
KINDS = ["scale", "value", "norm", "decay", "trace", "adam", "adamax"]
KINDS += ["rms", "rss", "adadelta", "schedule", "nan", "masked", "ema", "lion", "trust", "partition"]
KINDS += ["centralize", "adaptive", "lookahead", "average", "schedule free", "zero"]

Grads = dict[str, Tensor]
Loop = Callable[[Grads, Grads, dict[str, Any], int], Grads]
"""Gradients, parameters, memory, number of the step from 1 → updates."""


def each(function: Callable[[Tensor, Tensor, dict[str, Any], int], Tensor]) -> Loop:
    def loop(grads: Grads, params: Grads, memory: dict[str, Any], t: int) -> Grads:
        return {k: function(g, params[k], memory.setdefault(k, {}), t) for k, g in grads.items()}

    return loop


def momentum(mu: Any, dampening: float, nesterov: bool) -> Loop:
    def one(g: Tensor, p: Tensor, m: dict[str, Any], t: int) -> Tensor:
        m["sum"] = g if t == 1 else mu * m["sum"] + (1 - dampening) * g
        return g + mu * m["sum"] if nesterov else m["sum"]

    return each(one)


def adam(b1: float, b2: float, eps: float) -> Loop:
    def one(g: Tensor, p: Tensor, m: dict[str, Any], t: int) -> Tensor:
        m["m"] = b1 * m.get("m", 0.0) + (1 - b1) * g
        m["v"] = b2 * m.get("v", 0.0) + (1 - b2) * g * g
        return (m["m"] / (1 - b1**t)) / (torch.sqrt(m["v"] / (1 - b2**t)) + eps)

    return each(one)


def adamax(b1: float, b2: float, eps: float) -> Loop:
    def one(g: Tensor, p: Tensor, m: dict[str, Any], t: int) -> Tensor:
        m["m"] = b1 * m.get("m", 0.0) + (1 - b1) * g
        m["u"] = torch.maximum(b2 * m.get("u", torch.zeros_like(g)), g.abs() + eps)
        return m["m"] / (1 - b1**t) / m["u"]

    return each(one)


def rms(alpha: float, eps: float, centered: bool) -> Loop:
    def one(g: Tensor, p: Tensor, m: dict[str, Any], t: int) -> Tensor:
        m["v"] = alpha * m.get("v", 0.0) + (1 - alpha) * g * g
        m["m"] = alpha * m.get("m", 0.0) + (1 - alpha) * g
        return g / (torch.sqrt(m["v"] - (m["m"] ** 2 if centered else 0.0)) + eps)

    return each(one)


def rss(start: float, eps: float) -> Loop:
    def one(g: Tensor, p: Tensor, m: dict[str, Any], t: int) -> Tensor:
        m["sum"] = m.get("sum", start) + g * g
        return g / (torch.sqrt(m["sum"]) + eps)

    return each(one)


def adadelta(rho: float, eps: float) -> Loop:
    def one(g: Tensor, p: Tensor, m: dict[str, Any], t: int) -> Tensor:
        m["v"] = rho * m.get("v", 0.0) + (1 - rho) * g * g
        moved = torch.sqrt(m.get("d", torch.zeros_like(g)) + eps) / torch.sqrt(m["v"] + eps) * g
        m["d"] = rho * m.get("d", 0.0) + (1 - rho) * moved * moved
        return moved

    return each(one)


def norm(limit: Any) -> Loop:
    def loop(grads: Grads, params: Grads, memory: dict[str, Any], t: int) -> Grads:
        total = torch.sqrt(sum(((g * g).sum() for g in grads.values()), torch.zeros((), dtype=torch.float64)))
        factor = torch.clamp(limit / (total + 1e-6), max=1.0)
        return {k: g * factor for k, g in grads.items()}

    return loop


def ema(decay: Any, debias: bool) -> Loop:
    def one(g: Tensor, p: Tensor, m: dict[str, Any], t: int) -> Tensor:
        m["m"] = decay * m.get("m", 0.0) + (1 - decay) * g
        return m["m"] / (1 - decay**t) if debias else m["m"]

    return each(one)


def lion(b1: Any, b2: float) -> Loop:
    def one(g: Tensor, p: Tensor, m: dict[str, Any], t: int) -> Tensor:
        before = m.get("m", torch.zeros_like(g))
        m["m"] = b2 * before + (1 - b2) * g
        return torch.sign(b1 * before + (1 - b1) * g)

    return each(one)


def trust_ratio() -> Loop:
    def one(g: Tensor, p: Tensor, m: dict[str, Any], t: int) -> Tensor:
        if not g.any() or not p.any():
            return g
        return g * (torch.sqrt((p * p).sum()) / torch.sqrt((g * g).sum()))

    return each(one)


def centralized() -> Loop:
    return each(lambda g, p, m, t: g - g.sum(1, keepdim=True) / g.shape[1] if g.ndim == 2 else g)


def adaptively_clipped(clipping: Any, eps: float) -> Loop:
    def one(g: Tensor, p: Tensor, m: dict[str, Any], t: int) -> Tensor:
        made = []
        for of_unit, param in zip(g, p, strict=True) if g.ndim == 2 else [(g, p)]:
            size, most = (
                torch.sqrt((of_unit**2).sum()),
                clipping * torch.sqrt((param**2).sum()).clamp(min=eps),
            )
            made.append(of_unit if size <= most or not of_unit.any() else of_unit * most / size)
        return torch.stack(made) if g.ndim == 2 else made[0]

    return each(one)


def looking_ahead(inner: Loop, period: int, part: Any) -> Loop:
    def loop(grads: Grads, params: Grads, memory: dict[str, Any], t: int) -> Grads:
        slow = memory.setdefault("slow", dict(params))
        updates = inner(grads, params, memory.setdefault("inner", {}), t)
        if t % period == 0:
            for k, u in updates.items():
                slow[k] = (1 - part) * slow[k] + part * (params[k] + u)
                updates = updates | {k: slow[k] - params[k]}
        return updates

    return loop


def schedule_freely(inner: Loop, b1: Any) -> Loop:
    def loop(grads: Grads, params: Grads, memory: dict[str, Any], t: int) -> Grads:
        z, x = memory.setdefault("z", dict(params)), memory.setdefault("x", dict(params))
        made = {}
        for k, u in inner(grads, params, memory.setdefault("inner", {}), t).items():
            z[k] = z[k] + u
            x[k] = (1 - 1 / t) * x[k] + z[k] / t
            made[k] = (1 - b1) * z[k] + b1 * x[k] - params[k]
        return made

    return loop


def only(names: set[str], inner: Loop) -> Loop:
    def loop(grads: Grads, params: Grads, memory: dict[str, Any], t: int) -> Grads:
        return grads | inner({k: g for k, g in grads.items() if k in names}, params, memory, t)

    return loop


def halved(step: Any) -> Any:
    return 0.5 / (step + 1.0)


def draw(r: random.Random, h: Tensor, depth: int = 0) -> tuple[Any, Loop]:
    """One link and its loop; ``h`` is a hyper-parameter that requires grad, about 0.3."""
    kind = r.choice(KINDS)
    some: Any = h if r.random() < 0.4 else r.choice([0.2, 0.35])
    match kind:
        case "scale":
            return transform.scale(some), each(lambda g, p, m, t: g * some)
        case "value":
            limit = torch.as_tensor(some, dtype=torch.float64)
            return transform.clip_grad_value(some), each(
                lambda g, p, m, t: torch.minimum(torch.maximum(g, -limit), limit)
            )
        case "norm":
            return transform.clip_grad_norm(some), norm(some)
        case "decay":
            return transform.add_decayed_weights(some), each(lambda g, p, m, t: g + some * p)
        case "trace":
            dampening = r.choice([0.0, 0.0, 0.25])
            nesterov = dampening == 0 and r.random() < 0.5
            return transform.trace(some, dampening, nesterov), momentum(some, dampening, nesterov)
        case "adam":
            eps = r.choice([1e-8, 1e-3])
            return transform.scale_by_adam(0.8, 0.95, eps), adam(0.8, 0.95, eps)
        case "adamax":
            return transform.scale_by_adamax(0.8, 0.95, 1e-6), adamax(0.8, 0.95, 1e-6)
        case "rms":
            if r.random() < 0.5:
                return transform.scale_by_rms(0.9, 1e-2), rms(0.9, 1e-2, centered=False)
            return transform.scale_by_stddev(0.9, 1e-2), rms(0.9, 1e-2, centered=True)
        case "rss":
            return transform.scale_by_rss(0.1, 1e-6), rss(0.1, 1e-6)
        case "adadelta":
            return transform.scale_by_adadelta(0.9, 1e-3), adadelta(0.9, 1e-3)
        case "schedule":
            return transform.scale_by_schedule(halved), each(lambda g, p, m, t: g * halved(t - 1))
        case "nan":
            return transform.nan_to_num(), each(lambda g, p, m, t: g)
        case "ema":
            debias = r.random() < 0.5
            return transform.ema(some, debias), ema(some, debias)
        case "lion":
            return transform.scale_by_lion(some, 0.9), lion(some, 0.9)
        case "trust":
            return transform.scale_by_trust_ratio(), trust_ratio()
        case "centralize":
            return transform.centralize(), centralized()
        case "adaptive":
            return transform.adaptive_grad_clip(some, 1e-2), adaptively_clipped(some, 1e-2)
        case "average":
            return transform.average_params(r.choice([None, some])), each(lambda g, p, m, t: g)
        case "zero" if depth:
            return transform.set_to_zero(), each(lambda g, p, m, t: 0 * g)
    if depth == 2:
        return transform.identity(), each(lambda g, p, m, t: g)
    if kind in ("lookahead", "schedule free"):
        link, loop = draw(r, h, depth + 1)
        if kind == "lookahead":
            return transform.lookahead(link, 2, some), looking_ahead(loop, 2, some)
        return transform.schedule_free(link, some), schedule_freely(loop, some)
    names = {name for name in ("a", "b", "c") if r.random() < 0.6}
    link, loop = draw(r, h, depth + 1)
    if kind == "partition":
        other, another = draw(r, h, depth + 1)
        labels = {name: "one" if name in names else "other" for name in ("a", "b", "c")}
        mine, theirs = only(names, loop), only({"a", "b", "c"} - names, another)

        def both(grads: Grads, params: Grads, memory: dict[str, Any], t: int) -> Grads:
            grads = mine(grads, params, memory.setdefault("one", {}), t)
            return theirs(grads, params, memory.setdefault("other", {}), t)

        return transform.partition({"one": link, "other": other}, labels), both
    return transform.masked(link, {name: name in names for name in ("a", "b", "c")}), only(names, loop)


def start(seed: int) -> tuple[Grads, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (2, 3), "b": (3,), "c": ()}
    params = {
        k: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for k, shape in shapes.items()
    }
    data = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    return params, data, torch.tensor(0.3, dtype=torch.float64, requires_grad=True)


def loss_of(params: Grads, data: Tensor) -> Tensor:
    return (torch.tanh(data @ params["a"] + params["b"]) * (1.0 + params["c"])).square().sum()


def derivatives(params: Grads, leaves: list[Tensor]) -> list[Tensor]:
    """The parameters, and the first and second derivatives of a function of them by the leaves."""
    value = sum((torch.sin(p).sum() for p in params.values()), torch.zeros((), dtype=torch.float64))
    first = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
    slope = sum((torch.cos(g).sum() for g in first), torch.zeros((), dtype=torch.float64))
    second = torch.autograd.grad(slope, leaves, materialize_grads=True) if slope.requires_grad else ()
    return [*params.values(), *first, *second]


def by_transformation(impl: Any, params: Grads, data: Tensor) -> Grads:
    state = impl.init(params)
    for _ in range(STEPS):
        grads = torch.autograd.grad(loss_of(params, data), list(params.values()), create_graph=True)
        updates, state = impl.update(
            dict(zip(params, grads, strict=True)), state, params=params, inplace=False
        )
        params = {k: p - 0.05 * updates[k] for k, p in params.items()}
    return params


def by_hand(loops: list[Loop], params: Grads, data: Tensor) -> Grads:
    memories: list[dict[str, Any]] = [{} for _ in loops]
    for t in range(1, STEPS + 1):
        grads = torch.autograd.grad(loss_of(params, data), list(params.values()), create_graph=True)
        updates = dict(zip(params, grads, strict=True))
        for loop, memory in zip(loops, memories, strict=True):
            updates = loop(updates, params, memory, t)
        params = {k: p - 0.05 * updates[k] for k, p in params.items()}
    return params


@pytest.mark.parametrize(
    "number", [*range(DAILY), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(DAILY, CHAINS))]
)
def test_a_random_chain_is_a_loop_by_hand(number: int) -> None:
    seed = SEED + number
    print(f"TODIST_FUZZ_SEED={seed}")
    params, data, h = start(seed)
    leaves = [*params.values(), h]
    r = random.Random(seed)
    links, loops = zip(*(draw(r, h) for _ in range(r.randint(1, 4))), strict=True)
    found = derivatives(by_transformation(todist.chain(*links), params, data), leaves)
    wanted = derivatives(by_hand(list(loops), params, data), leaves)
    assert all(bool(x.isfinite().all()) for x in wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
