"""How long does a step without a graph take? Against torch.optim's foreach and fused implementations.

200 tensors of 10,000 float32 numbers, one thread. By default torch's own fused step runs where there is one, and for
RMSprop a kernel; ``fused=False`` is the formula in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from page import ratio, table
from workers import interleaved

import torchopt_dist as todist

TENSORS, NUMEL = 200, 10_000
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 1e-3}),
    "SGD, momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    "SGD, Nesterov": ("SGD", {"lr": 1e-3, "momentum": 0.9, "nesterov": True}),
    "SGD, dampening": ("SGD", {"lr": 1e-3, "momentum": 0.9, "dampening": 0.1}),
    "Adam": ("Adam", {"lr": 1e-3}),
    "AdamW": ("AdamW", {"lr": 1e-3, "weight_decay": 0.1}),
    "RMSprop": ("RMSprop", {"lr": 1e-3, "momentum": 0.9}),
    "Adamax": ("Adamax", {"lr": 1e-3}),
    "RAdam": ("RAdam", {"lr": 1e-3}),
    "Adagrad": ("Adagrad", {"lr": 1e-3}),
    "Adadelta": ("Adadelta", {"lr": 1e-3}),
}


def stepper(
    library: Any, name: str, options: dict[str, Any]
) -> tuple[list[torch.Tensor], Callable[[], None]]:
    torch.manual_seed(0)
    params = [torch.randn(NUMEL, requires_grad=True) for _ in range(TENSORS)]
    for p in params:
        p.grad = torch.randn(NUMEL)
    return params, getattr(library, name)(params, **options).step


def clipped(many: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        torch.nn.utils.clip_grad_norm_(many, 1.0, foreach=True)
        optimizer.step()

    return step


def chains() -> None:
    """Adam behind a schedule and behind clipping, on 2,000 small tensors, over torch's foreach."""

    def many() -> list[torch.Tensor]:
        params = [torch.randn(64, requires_grad=True) for _ in range(2000)]
        for p in params:
            p.grad = torch.randn(64)
        return params

    def foreach(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=1e-3, foreach=True)

    def chained(*links: todist.transform.GradientTransformation) -> Callable[[], None]:
        return todist.Optimizer(many(), todist.chain(*links)).step

    def decay(count: torch.Tensor) -> torch.Tensor:
        return 1e-3 * 0.99**count

    params = many()
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "plain": (foreach(many()).step, todist.Adam(many(), lr=1e-3).step),
        "a schedule": (foreach(many()).step, todist.Adam(many(), lr=decay).step),
        "clip by norm": (
            clipped(params, foreach(params)),
            chained(todist.transform.clip_grad_norm(1.0), todist.adam(lr=1e-3)),
        ),
    }
    rows = []
    for case, (peer, ours) in pairs.items():
        seconds = interleaved({"torch, foreach": peer, "ours": ours}, rounds=30, warmups=3)
        theirs = seconds["torch, foreach"]
        rows.append([case, f"{theirs * 1e3:.2f} ms", f"{seconds['ours'] / theirs:.2f}"])
    print("2,000 tensors of 64 numbers, Adam:")
    table(["behind", "torch, foreach", "ours, of it"], rows)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for case, (name, options) in CASES.items():
        has_choice = "fused" in getattr(todist, name).__signature__.parameters
        ways = {"torch, foreach": stepper(torch.optim, name, {**options, "foreach": True})}
        if name in ("SGD", "Adam", "AdamW"):
            ways["torch, fused"] = stepper(torch.optim, name, {**options, "fused": True})
        if has_choice:
            ways["ours, formula"] = stepper(todist, name, {**options, "fused": False})
        ways["ours"] = stepper(todist, name, options)
        for (
            _,
            step,
        ) in ways.values():  # one: torch's foreach SGD overwrites `p.grad` with Nesterov's look-ahead
            step()
        reference = ways["torch, foreach"][0]
        for way, (params, _) in ways.items():
            error = max((p - q).abs().max().item() for p, q in zip(params, reference, strict=True))
            assert error < 1e-5, f"{case}: {way} is {error} off"
        seconds = interleaved({way: step for way, (_, step) in ways.items()}, rounds=50, warmups=5)
        peer = seconds["torch, foreach"]
        over = {way: f"{s / peer:.2f}" for way, s in seconds.items()}
        columns = ("torch, fused", "ours", "ours, formula")
        rows.append([case, f"{peer * 1e3:.2f} ms", *(over.get(way, "") for way in columns)])
        if case == "Adam":
            answer = f"{over['ours']}; torch's fused one {over['torch, fused']}"
            ratio("a step of Adam without a graph", "torch's foreach", answer)
    print(f"{TENSORS} tensors of {NUMEL:,} float32 numbers; of the time of torch's foreach:")
    table(["", "torch, foreach", "torch, fused", "ours", "ours, formula"], rows)


if __name__ == "__main__":
    main()
    chains()
