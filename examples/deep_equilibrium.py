"""A layer of infinite depth on letters, beside the same cell unrolled: accuracy, memory, seconds.

    python examples/deep_equilibrium.py

A deep equilibrium model (Bai et al., 2019, https://arxiv.org/abs/1909.01377) has one cell, here
``tanh(convolution(z) + injected image)``. Its output is the ``z`` that the cell does not change.
``todist.nn.Equilibrium`` finds it by plain iteration or by Anderson's method, and the gradient comes from one linear
system, so memory does not grow with the iterations. The usual way is to apply the cell a fixed number of times, and to
go back through all of them.

The data are Armenian letters of ``todist.data.glyphs()``, 81 classes. Every fifth drawing of a letter is held out. The
table has for each network the accuracy on these, the residual that its output has there, the peak memory of a step of
training beside the model, counted, and the seconds that the training took.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from adjoints import PeakMemory
from matplotlib.figure import Figure
from torch import Tensor, nn

import torchopt_dist as todist
from torchopt_dist import linear_solve, nonlinear_solve

TOLERANCE = 1e-3
Layer: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Injected images, the cell's weight → z."""


def cell(z: Tensor, injected: Tensor, weight: Tensor) -> Tensor:
    """A point → the next point."""
    return torch.tanh(F.conv2d(z, weight, padding=1) + injected)


def equilibria() -> dict[str, todist.nn.Equilibrium]:
    """By plain iteration and the series that belongs to it, which keep least; by Anderson's method and GMRES."""
    plain = nonlinear_solve.fixed_point_iteration(rtol=TOLERANCE)
    anderson = nonlinear_solve.anderson(rtol=TOLERANCE)
    series, gmres = (f(rtol=TOLERANCE) for f in (linear_solve.solve_neumann, linear_solve.solve_gmres))
    return {
        "equilibrium, plain": todist.nn.Equilibrium(cell, plain, series),
        "equilibrium, Anderson": todist.nn.Equilibrium(cell, anderson, gmres),
    }


def unrolled(iterations: int) -> Layer:
    """The cell, applied so often."""

    def output(injected: Tensor, weight: Tensor) -> Tensor:
        z = torch.zeros_like(injected)
        for _ in range(iterations):
            z = cell(z, injected, weight)
        return z

    return output


class Network(nn.Module):
    """Images → logits, by the layer in the middle."""

    def __init__(self, layer: Layer, channels: int, classes: int) -> None:
        super().__init__()
        self.inject = nn.Conv2d(1, channels, 5, stride=2, padding=2)
        self.weight = nn.Parameter(torch.randn(channels, channels, 3, 3) / (3 * channels**0.5))
        self.read = nn.Linear(channels * 7 * 7, classes)
        self.layer = layer

    def injected(self, images: Tensor) -> tuple[Tensor, Tensor]:
        # The cell's convolution is a part of one on a ring of 16 pixels a side, whose norm is the largest of its
        # frequencies'. It is below 1 here, so the cell is a contraction: there is exactly one fixed point.
        frequencies = torch.fft.fft2(self.weight, (16, 16)).permute(2, 3, 0, 1)
        return self.inject(images), 0.95 * self.weight / torch.linalg.matrix_norm(frequencies, 2).max()

    def forward(self, images: Tensor) -> Tensor:
        return self.read(F.avg_pool2d(self.layer(*self.injected(images)), 2).flatten(1))


class Result(NamedTuple):
    """What is shown of a network."""

    accuracies: list[float]
    residual: float
    megabytes: float
    seconds: float


def train(network: Network, letters: todist.data.Glyphs, epochs: int) -> Result:
    """Train on four drawings of five; the seed is that of ``main``, so all networks see the same batches."""
    drawing = torch.arange(len(letters)) % letters.images.shape[1]
    held_out, labels = letters[drawing % 5 == 0]
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    some = torch.nonzero(drawing % 5).flatten()
    with PeakMemory() as memory:
        images, targets = letters[some[:100]]
        before, memory.peak = memory.now, memory.now
        F.cross_entropy(network(images), targets).backward()
    accuracies, seconds = [], 0.0
    for _ in range(epochs):
        start = time.thread_time()
        for batch in some[torch.randperm(len(some))].split(100):
            images, targets = letters[batch]
            optimizer.zero_grad()
            F.cross_entropy(network(images), targets).backward()
            optimizer.step()
        seconds += time.thread_time() - start
        with torch.no_grad():
            accuracies.append(100 * float((network(held_out).argmax(1) == labels).float().mean()))
    with torch.no_grad():
        injected, weight = network.injected(held_out)
        z = network.layer(injected, weight)
        residual = float((cell(z, injected, weight) - z).norm() / z.norm())
    return Result(accuracies, residual, (memory.peak - before) / 2**20, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--channels", type=int, default=8, help="of the fixed point")
    parser.add_argument("--unrolled", type=int, nargs="*", default=[2, 8, 32], help="numbers of iterations")
    parser.add_argument("--drawings", type=int, default=80, help="of each letter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/deep_equilibrium.png"))
    args = parser.parse_args()
    scripts = {"train": ["ARMENIAN"]}
    letters = todist.data.glyphs(scripts=scripts, drawings=args.drawings, rotations=False).train
    solved = equilibria()
    layers: dict[str, Layer] = {**solved, **{f"unrolled {k} times": unrolled(k) for k in args.unrolled}}
    results: dict[str, Result] = {}
    networks: list[Network] = []
    print("| layer | held-out accuracy | residual | peak MiB of a step | seconds of training |")
    print("|---|---|---|---|---|")
    for name, one in layers.items():
        torch.manual_seed(args.seed)  # all begin with the same weights
        network = Network(one, args.channels, len(letters.names))
        found = results[name] = train(network, letters, args.epochs)
        row = (
            f"{found.accuracies[-1]:.1f} %",
            f"{found.residual:.0e}",
            f"{found.megabytes:.1f}",
            f"{found.seconds:.1f}",
        )
        print(f"| {name} | {' | '.join(row)} |", flush=True)
        networks.append(network)
    held_out = letters[torch.arange(0, len(letters), 5)][0]
    with torch.no_grad():
        injected = networks[0].injected(held_out)
        needed = [int(one.with_info(*injected)[1].iterations) for one in solved.values()]
    print(f"\n{needed[0]} plain iterations, {needed[1]} by Anderson's method, to a residual of {TOLERANCE:g}")
    plot(args.output, results)
    print(f"picture saved as {args.output}")


def plot(path: Path, results: dict[str, Result]) -> None:
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    colours = [f"C{place}" for place in range(len(results))]
    for found, colour in zip(results.values(), colours, strict=True):
        left.plot(range(1, len(found.accuracies) + 1), found.accuracies, ".-", color=colour)
    left.set(xlabel="epoch", ylabel="%", title="Held-out accuracy; colours as right")
    for axes, title in ((middle, "megabytes"), (right, "seconds")):
        bars = axes.barh(list(results), [getattr(found, title) for found in results.values()], color=colours)
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.2)
    middle.set_title("Peak MiB of a step")
    right.set_title("Seconds of training")
    right.set_yticks([])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    main()
