"""How fast are steps in place and the kernels with a graph? Against torch.optim's best, and a triad, ``c = a + 2 * b``.

In place Adam and SGD are torch's own fused steps, so that a ratio above 1 is what is put around them; RMSprop has a
kernel here, and only a foreach implementation in torch.

A triad moves 12 bytes an element in float32, and is what the memory gives. Fresh results of many megabytes cost page
faults, which are the allocator's and not the kernel's: it is told to keep its memory, and the faults that are left are
printed.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
from page import ratio, table
from workers import interleaved

import torchopt_dist as todist
from torchopt_dist.ops._adam import adam

KEEP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 40), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
ROWS: list[list[str]] = []
RMSPROP: list[float] = []
BIG, SMALL, MIDDLE = (1, 10_000_000), (2_000, 5_000), (1, 1_000_000)


def parameters(count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    params = [torch.randn(numel).to(dtype).requires_grad_() for _ in range(count)]
    for p in params:
        p.grad = torch.randn(numel).to(dtype)
    return params


def in_place(name: str, count: int, numel: int, dtype: torch.dtype = torch.float32, **options: float) -> None:
    best = "foreach" if name == "RMSprop" else "fused"
    theirs = getattr(torch.optim, name)(parameters(count, numel, dtype), lr=1e-3, **options, **{best: True})
    ours = getattr(todist, name)(parameters(count, numel, dtype), lr=1e-3, **options, fused=True)
    theirs.step(), ours.step()
    tolerance = {} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}  # torch rounds more often
    for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q, **tolerance)
    what = f"{name}, {count} x {numel}, {str(dtype).removeprefix('torch.')}, in place"
    report(what, {"ours": ours.step, f"torch, {best}": theirs.step})


def with_a_graph() -> None:
    g, m, v = (torch.randn(BIG[1]) for _ in range(3))
    v.square_()
    a, b, c = (torch.randn(BIG[1]) for _ in range(3))
    step = torch.tensor(3.0)
    numbers: dict[str, Any] = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "eps_root": 0.0}
    report(
        "Adam's direction, 10 M, forward",
        {
            "ours": lambda: adam([g], [m], [v], [step], **numbers),
            "formula": lambda: adam([g], [m], [v], [step], **numbers, fused=False),
            "triad": lambda: torch.add(a, b, alpha=2.0, out=c),
        },
    )
    leaves = [x.clone().requires_grad_() for x in (g, m, v)]
    made = adam([leaves[0]], [leaves[1]], [leaves[2]], [step], **numbers)
    grad_outputs = [a, b, c]

    def backward() -> None:
        torch.autograd.grad([x[0] for x in made[:3]], leaves, grad_outputs, retain_graph=True)

    d = torch.empty_like(c)
    report("and backward", {"ours": backward, "triad": lambda: torch.add(a, b, alpha=2.0, out=d)})


def report(what: str, ways: dict[str, Callable[[], object]]) -> None:
    for way in ways.values():
        way()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    seconds = interleaved(ways, rounds=20, warmups=3)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    *_, peer = seconds
    over = {way: value / seconds[peer] for way, value in seconds.items()}
    formula = f"{over['formula']:.2f}" if "formula" in over else ""
    ROWS.append(
        [
            what,
            f"{torch.get_num_threads()}",
            peer,
            f"{seconds[peer] * 1e3:.3f} ms",
            f"{over['ours']:.2f}",
            formula,
            f"{faults}",
        ]
    )
    if what.startswith("RMSprop") and "float32" in what:
        RMSPROP.append(over["ours"])


def main() -> None:
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for sizes in (BIG, SMALL):
            in_place("Adam", *sizes)
            in_place("SGD", *sizes, momentum=0.9)
            in_place("RMSprop", *sizes, momentum=0.9)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            in_place("Adam", *MIDDLE, dtype)
            in_place("SGD", *MIDDLE, dtype, momentum=0.9)
            # Torch computes in the parameters' dtype, and 1e-8 is 0 in float16.
            eps = 1e-3 if dtype is torch.float16 else 1e-8
            in_place("RMSprop", *MIDDLE, dtype, momentum=0.9, eps=eps)
        with_a_graph()
    table(["", "threads", "against", "its time", "ours, of it", "the formula, of it", "page faults"], ROWS)
    answer = f"{min(RMSPROP):.2f} to {max(RMSPROP):.2f}"
    ratio("RMSprop's kernel in place, float32", "torch's foreach", answer)


if __name__ == "__main__":
    if not todist.ops.is_available("adam"):
        sys.exit(f"no kernels: {todist.ops.why_not('adam')}")
    if any(name not in os.environ for name in KEEP):  # the allocator reads them when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP})
    main()
