"""Is ``compile=True`` as fast on what people write? Data weights through 200 steps of Adam, picked in five ways.

The loss of each step counts by a weight of the batch, ``w[i]``, and the gradient is that of the weights. The first row
needs no index, since each row of a batch has a weight; the others pick the weight by ``index_select``, by an index that
is a tensor, by a Python number, by a function of the step's number, and by random indices. Each is a process of its
own, on one thread; the first call, with an empty cache, compiles. Then compiled and plain calls take turns, and the
median counts. The gradients are compared.

    python benchmarks/compiled_as_written.py            # by hand, on a quiet machine; prints the table
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from page import ratio, table
from torch import Tensor, nn

import torchopt_dist as todist

STEPS, WIDTH, BATCH = 200, 64, 64
ROWS = {
    "one vector for all steps, a weight a row": "one",
    "`w.index_select(0, i[None])[0]`, `i` a tensor": "select",
    "`w[i]`, `i` a tensor of the batch": "tensor",
    "`w[i]`, `i` a Python number of the batch": "number",
    "`batches=lambda step: (x[step], step)`": "function",
    "`batches=lambda step: torch.randint(...)`": "random",
}


def gradient(kind: str) -> Callable[[bool], Tensor]:
    """``compile`` → the gradient of the weights."""
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    net = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    x, y = torch.randn(STEPS, BATCH, WIDTH), torch.randn(STEPS, BATCH, 10)
    rows, targets = x.flatten(0, 1), y.flatten(0, 1)
    numbers: Any = range(STEPS)
    batches: Any = {
        "one": [(x[i], y[i], i) for i in map(torch.tensor, numbers)],
        "select": [(x[i], y[i], i) for i in map(torch.tensor, numbers)],
        "tensor": [(x[i], y[i], i) for i in map(torch.tensor, numbers)],
        "number": [(x[i], y[i], i) for i in numbers],
        "function": lambda step: (x[step], y[step], step),
        "random": lambda step: torch.randint(0, len(rows), (BATCH,)),
    }[kind]

    def run(compile: bool) -> Tensor:
        w = torch.ones({"random": len(rows), "one": BATCH}.get(kind, STEPS), requires_grad=True)

        def loss(net: nn.Module, batch: Any) -> Tensor:
            if kind == "random":
                return (w[batch, None] * (net(rows[batch]) - targets[batch]).square()).mean()
            x, y, i = batch
            if kind == "one":
                return (w[:, None] * (net(x) - y).square()).mean()
            weight = w.index_select(0, i[None])[0] if kind == "select" else w[i]
            return weight * (net(x) - y).square().mean()

        torch.manual_seed(1)
        trained = todist.inner_loop(
            loss,
            todist.adam(lr=1e-3),
            net,
            batches,
            steps=STEPS,
            meta=w,
            adjoint=todist.Replayed(),
            compile=compile,
        )
        outer = (trained.params(rows[:256]) - targets[:256]).square().mean()
        return torch.autograd.grad(outer, w)[0]

    return run


def case(kind: str, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    run = gradient(kind)
    plain = run(False)
    start = time.perf_counter()
    made = run(True)
    first = time.perf_counter() - start
    torch.testing.assert_close(made, plain, rtol=1e-2, atol=1e-3 * float(plain.abs().max()))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for compile in (False, True):
            start = time.perf_counter()
            run(compile)
            seconds[compile].append(time.perf_counter() - start)
    plain_s, compiled_s = (1e3 * statistics.median(seconds[compile]) for compile in (False, True))
    return {"plain": plain_s, "compiled": compiled_s, "first": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument(
        "--case", metavar="KIND", choices=ROWS.values(), help="measure this one, in this process"
    )
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(options.case, options.rounds)))
        return
    found = {}
    for name, kind in ROWS.items():
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--case", kind, "--rounds", str(options.rounds)]
            env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        found[name] = json.loads(done.stdout)
    reference = found[next(name for name, kind in ROWS.items() if kind == "select")]["compiled"]
    table(
        ["", "plain", "compiled", "of `index_select`", "first call"],
        [
            [
                name,
                f"{one['plain']:,.0f} ms",
                f"{one['compiled']:,.0f} ms",
                f"{one['compiled'] / reference:.2f}",
                f"{one['first']:.0f} s",
            ]
            for name, one in found.items()
        ],
    )
    worst = max(
        one["compiled"] / reference for name, one in found.items() if ROWS[name] in ("tensor", "number")
    )
    ratio("compiled steps that pick a weight by `w[i]`", "`index_select`", f"{worst:.2f} of the time")


if __name__ == "__main__":
    main()
