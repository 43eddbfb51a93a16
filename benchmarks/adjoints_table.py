"""Each adjoint of an inner loop → what it computes, and its memory and time against recording: the table of a page.

Each is a process of its own, on one thread: peak memory above what the process held after one step, and CPU time, of a
loop and its gradient. The problem is a network of three layers of 256 units on 256 examples, 64 steps of Adam; wanted
is the gradient of the weights of the examples and of the first parameters.

    python benchmarks adjoints_table          # runs it, and fills its place in docs/which_adjoint.md
    python benchmarks/adjoints_table.py       # prints the table
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, NamedTuple

import torch
from measured import measured
from page import table
from torch import Tensor, nn

import torchopt_dist as todist

STEPS, EXAMPLES, WIDTH = 64, 256, 256
DAMPED = todist.linear_solve.solve_cg(ridge=10.0, maxiter=20, not_converged="ignore")


class Row(NamedTuple):
    """A line of the table."""

    adjoint: todist.adjoints.Adjoint | None
    """As it is measured; ``None`` for the loop without a gradient."""
    name: str
    measured_as: str
    """Its settings there, if it has some."""
    gradient: str
    keeps: str


ROWS = (
    Row(
        todist.Recorded(),
        "`Recorded()`",
        "",
        "exact, any order",
        "the graph of all `T` steps",
    ),
    Row(
        todist.Replayed(snapshots=8),
        "`Replayed(memory=…)`",
        "`snapshots=8`",
        "exact, any order",
        "snapshots, and the graph of one step",
    ),
    Row(
        todist.Truncated(4),
        "`Truncated(k)`",
        "`k=4`",
        "through the last `k` steps",
        "the graph of `k` steps",
    ),
    Row(
        todist.FirstOrder(),
        "`FirstOrder()`",
        "",
        "`U(θ, g)` with `g` a constant",
        "the graph of the updates",
    ),
    Row(
        todist.Reptile(),
        "`Reptile()`",
        "",
        "`θ₀ - θ_T` for the first parameters",
        "nothing",
    ),
    Row(
        todist.FiniteDifference(),
        "`FiniteDifference(eps)`",
        "",
        "through the last step, `(∂L(θ+rv) - ∂L(θ-rv)) / 2r`, `v = (∂U/∂g)ᵀc` (DARTS)",
        "two copies of `θ` and the state",
    ),
    Row(
        todist.SAMA(),
        "`SAMA(alpha)`",
        "",
        "the same difference at `θ_T`: the implicit gradient with the identity for the inner Jacobian",
        "a copy of `θ` and the state",
    ),
    Row(
        todist.Implicit(DAMPED, not_converged="ignore"),
        "`Implicit(solver)`",
        "20 iterations of CG",
        "`-(∂²L/∂meta∂θ) H⁻¹ c` at a stationary point",
        "one step",
    ),
    Row(
        todist.EvolutionStrategies(4, 0.1),
        "`EvolutionStrategies(n, sigma)`",
        "`n=4`",
        "of the loop smoothed by noise: mean of `(f₊ - f₋) z / 2 sigma`",
        "nothing",
    ),
    Row(
        todist.PersistentEvolutionStrategies(4, 0.1, unroll=16),
        "`PersistentEvolutionStrategies(n, sigma, unroll=k)`",
        "`n=4`, `k=16`",
        "the same, with new noise every `k` steps",
        "nothing",
    ),
    Row(None, "no gradient, under `torch.no_grad()`", "", "", "nothing"),
)


def case(place: int) -> dict[str, Any]:
    """Memory and time of one row."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]
    net, x, y = nn.Sequential(*layers), torch.randn(EXAMPLES, WIDTH), torch.randn(EXAMPLES, 1)
    weights, adjoint = torch.ones(EXAMPLES, 1, requires_grad=True), ROWS[place].adjoint

    def loss(net: nn.Module) -> Tensor:
        return (weights * (net(x) - y) ** 2).mean()

    def adapt(steps: int) -> list[Tensor]:
        with torch.set_grad_enabled(adjoint is not None):
            adapted = todist.inner_loop(
                loss,
                todist.adam(lr=1e-3, eps=1e-4),
                net,
                steps,
                meta=weights,
                adjoint=adjoint or todist.Recorded(),
            ).params
            if adjoint is None:
                return []
            outer = (adapted(x) - y).square().mean()
            found = torch.autograd.grad(outer, [weights, *net.parameters()], allow_unused=True)
        return [grad for grad in found if grad is not None]

    return measured(lambda: adapt(STEPS), lambda: adapt(1))


def main() -> None:
    """Print the table."""
    rows, first = [], None
    for place, row in enumerate(ROWS):
        command = [sys.executable, __file__, "--case", str(place)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = json.loads(printed.splitlines()[-1])
        first = first or found
        ratios = [f"{found[what] / first[what]:.2f}" for what in ("bytes", "seconds")]
        if row.measured_as:
            ratios[1] += f" ({row.measured_as})"
        rows.append([row.name, row.gradient, row.keeps, *ratios])
    assert first is not None
    table(["adjoint", "gradient of the outer loss", "keeps", "memory", "time"], rows)
    print(
        f"Memory and time are relative to `Recorded()`: {first['bytes'] / 1e6:.0f} MB and {first['seconds']:.2f} s. "
        f"The problem is {STEPS} steps of Adam on three layers of {WIDTH} units with {EXAMPLES} examples; learned are "
        "the weights of the examples and the first parameters. Memory is the peak above one step, time is CPU time on "
        "one thread."
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(case(int(sys.argv[2]))))
    else:
        main()
