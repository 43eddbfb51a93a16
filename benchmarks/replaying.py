"""What does the exact gradient of a loop take that runs its steps again? Time and memory, of recording's.

The loops adapt transformers by Adam, with a weight for each sequence of which the gradient is asked. The rows are
shapes that strain different things: activations, depth, many steps, and parameters, which are everything in the last
but one. The last row is small, so that what Python does around each step counts. Each case is a process of its own,
on one thread, in turn, and the median of some counts. Memory is the process's peak above what it had after a gradient
of a small loop, with all that the C library keeps.

    python benchmarks replaying               # runs it, and fills its place in docs/benchmarks.md
    python benchmarks/replaying.py            # prints the tables
"""

from __future__ import annotations

import argparse
import json
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measured import in_turn, measured
from page import ratio, table
from torch import Tensor, nn

import torchopt_dist as todist


class Shape(NamedTuple):
    """Of a model, its data and its loop."""

    width: int
    layers: int
    sequences: int
    tokens: int
    steps: int


SHAPES = {
    "width 128, 4 layers, 12 steps": Shape(128, 4, 16, 64, 12),
    "width 64, 8 layers, 8 steps": Shape(64, 8, 8, 48, 8),
    "width 96, 3 layers, 40 steps": Shape(96, 3, 8, 48, 40),
    "width 256, 4 layers of 16 tokens, 20 steps": Shape(256, 4, 2, 8, 20),
    "a perceptron of width 64, 200 steps": Shape(64, 0, 64, 1, 200),
}
WAYS: dict[str, todist.adjoints.Adjoint] = {
    "Recorded()": todist.Recorded(),
    "Replayed()": todist.Replayed(),
    "Replayed(snapshots=4)": todist.Replayed(snapshots=4),
    'Replayed(blocks="auto")': todist.Replayed(blocks="auto"),
}


class Block(nn.Module):
    """One of a transformer, with four heads and attention as a formula."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform each token."""
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.attend(self.first(x)).chunk(3, -1)
        )
        mixed = torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


def problem(shape: Shape) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if shape.layers:
        made = [Block(shape.width) for _ in range(shape.layers)]
        return nn.Sequential(*made), torch.randn(shape.sequences, shape.tokens, shape.width)
    layers = [layer for _ in range(3) for layer in (nn.Linear(shape.width, shape.width), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(shape.width, shape.width)), torch.randn(
        shape.sequences, 1, shape.width
    )


def gradient(shape: Shape, adjoint: todist.adjoints.Adjoint) -> list[Tensor]:
    net, x = problem(shape)
    y, weights = torch.randn_like(x), torch.ones(shape.sequences, 1, 1, requires_grad=True)

    def loss(net: nn.Module) -> Tensor:
        return (weights * (net(x) - y) ** 2).mean()

    adapted = todist.inner_loop(loss, todist.adam(lr=1e-3), net, shape.steps, meta=weights, adjoint=adjoint)
    error = (adapted.params(x) - y)[:2].square().mean()
    return list(torch.autograd.grad([error], [weights], [torch.ones(())]))


def case(name: str, way: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    shape = SHAPES[name]
    small = shape._replace(width=8, layers=min(shape.layers, 2), sequences=2, tokens=2, steps=2)
    return measured(lambda: gradient(shape, WAYS[way]), lambda: gradient(small, WAYS[way]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--case", nargs=2, metavar=("SHAPE", "WAY"), help="measure this one, in this process")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(*options.case)))
        return
    rows = []
    for name, shape in SHAPES.items():
        ways = [way for way in WAYS if shape.layers or "blocks" not in way]
        found = in_turn(__file__, name, ways, options.rounds)
        seconds, bytes_ = ({way: one[what] for way, one in found.items()} for what in ("seconds", "bytes"))
        for way in ways[1:]:
            torch.testing.assert_close(found[way]["norms"], found[ways[0]]["norms"], rtol=1e-2, atol=0)
        first, second = seconds[ways[0]], bytes_[ways[0]]
        rows.append(
            [
                name,
                f"{first:.2f} s, {second / 1e6:,.0f} MB",
                *(f"{seconds[way] / first:.2f}, {bytes_[way] / second:.2f}" for way in ways[1:]),
                *([""] * (len(WAYS) - len(ways))),
            ]
        )
        if name == next(iter(SHAPES)):
            for way in ways[1:]:
                answer = f"{seconds[way] / first:.2f} of the time, {bytes_[way] / second:.2f} of the memory"
                ratio(f"exact gradient of 12 steps of a transformer, `{way}`", f"`{ways[0]}`", answer)
    table(["", *(f"`{way}`" for way in WAYS)], rows)
    print("Time and memory, the first in seconds and megabytes, the others of these.")


if __name__ == "__main__":
    main()
