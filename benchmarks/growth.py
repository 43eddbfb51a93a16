"""How does the cost of a MAML step grow with tasks, inner steps and parameters? Two workers, beside one process.

One of the three grows at a time, and the other two stay in the middle. The straight line through the points is the
cost of one more; the gradients of both are compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from page import table
from torch import Tensor, nn
from workers import interleaved, start_workers

import torchopt_dist as todist

MIDDLE = {"tasks": 16, "inner steps": 4, "width": 64}
GROWN = {"tasks": (4, 8, 16, 32, 64), "inner steps": (1, 2, 4, 8, 16), "width": (32, 64, 128, 256, 512)}


def task(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> Tensor:
    model = todist.module_clone(model)
    inner = todist.MetaSGD(model, lr=0.05)
    for _ in range(steps):
        inner.step(F.mse_loss(model(x[:20]), y[:20]))
    return F.mse_loss(model(x[20:]), y[20:])


spread = todist.parallelize(todist.dim_partitioner(0, exclusive=True, keepdim=False), todist.mean_reducer)(
    task
)


def build(tasks: int, steps: int, width: int) -> tuple[nn.Module, dict[str, Callable[[], None]]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )
    x, y = torch.rand(tasks, 40, 32), torch.rand(tasks, 40, 1)

    def here() -> None:
        losses = [task(model, *each, steps) for each in zip(x, y, strict=True)]
        torch.stack(losses).mean().backward()

    return model, {"one process": here, "two workers": lambda: spread(model, x, y, steps).backward()}


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
@todist.rank_zero_only
def main() -> None:
    rows = []
    for grown, sizes in GROWN.items():
        measured = []
        for size in sizes:
            model, ways = build(*{**MIDDLE, grown: size}.values())
            grads = []
            for way in ways.values():
                model.zero_grad()
                way()
                grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
            torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)
            seconds = interleaved(ways, rounds=7)
            parameters = sum(p.numel() for p in model.parameters())
            measured.append((parameters if grown == "width" else size, *seconds.values()))
        what = "parameters" if grown == "width" else grown
        for size, one, two in measured:
            rows.append(
                [f"{size:,} {what}", f"{one * 1e3:.1f} ms", f"{two * 1e3:.1f} ms", f"{two / one:.2f}"]
            )
        counts, *columns = zip(*measured, strict=True)
        slopes = [np.polyfit(counts, column, 1)[0] * 1e6 for column in columns]
        shown = [f"{slope:,.0f} µs" if what != "parameters" else f"{slope * 1e3:,.1f} ns" for slope in slopes]
        rows.append([f"one more of the {what}", *shown, f"{slopes[1] / slopes[0]:.2f}"])
    table(["", "one process", "two workers", "of its time"], rows)


if __name__ == "__main__":
    start_workers(2)
    main()
