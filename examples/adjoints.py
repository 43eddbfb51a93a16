"""One inner loop, and every way to compute its gradient: how wrong each way is, and what it costs.

    python examples/adjoints.py
    torchrun --nproc_per_node=2 examples/adjoints.py

Softmax regression on handwritten digits is trained with momentum. Its loss on other images depends on a weight of each
of the ten classes and on the ridge penalty. The program computes the gradient of this validation loss with respect to
these eleven numbers by every adjoint that has one; only the argument ``adjoint=`` changes. The picture shows the error
of each adjoint against its time and against the memory that it adds to the program.

``Recorded`` is exact and keeps every step. ``Replayed`` is as exact, and keeps snapshots. ``Truncated`` saves memory
and makes an error. ``Implicit`` saves memory and is exact where training has converged: its error falls with
``--steps``. ``FiniteDifference`` and ``SAMA`` use the last step only; they are meant for training and meta-learning at
the same time. The noise of ``EvolutionStrategies`` falls with the square root of the number of pairs, which are spread
over the workers; the estimate is the same on any number of them. ``FirstOrder`` and ``Reptile`` are missing, because
they give gradients of the initial parameters only.
"""

from __future__ import annotations

import argparse
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchopt_dist as todist

FLOOR = 1e-4
"""Where errors below it are drawn."""


class Problem(NamedTuple):
    x: Tensor
    y: Tensor
    held_out_x: Tensor
    held_out_y: Tensor
    meta: dict[str, Tensor]  # a weight for each class, and the ridge's logarithm
    steps: int

    def gradient(self, adjoint: Any) -> Tensor:
        """Of the validation loss after training, for the eleven numbers."""
        class_weights, log_ridge = self.meta["class weights"], self.meta["log ridge"]

        def loss(w: Tensor) -> Tensor:
            losses = F.cross_entropy(self.x @ w, self.y, reduction="none")
            return (class_weights[self.y] * losses).mean() + log_ridge.exp() / 2 * w.square().sum()

        adapted = todist.inner_loop(
            loss,
            todist.sgd(lr=0.5, momentum=0.9),
            torch.zeros(64, 10, dtype=torch.float64, requires_grad=True),
            self.steps,
            meta=self.meta,
            adjoint=adjoint,
        )
        outer = F.cross_entropy(self.held_out_x @ adapted.params, self.held_out_y)
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(outer, list(self.meta.values()))])


class Row(NamedTuple):
    name: str
    error: float
    seconds: float
    megabytes: float


class PeakMemory(TorchDispatchMode):
    """How many bytes of tensors, made while it is active, there were at most at a time."""

    def __init__(self) -> None:
        begin: Any = super().__init__  # which has no types
        begin()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        try:
            place, size = storage.data_ptr(), storage.nbytes()
        except RuntimeError:  # zeros that have no memory, which forward mode makes
            return
        if place in self._known or size == 0:
            return
        self._known.add(place)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


def problem(steps: int) -> Problem:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(digits.data)[order] / 16, torch.tensor(digits.target)[order]
    meta = {
        "class weights": torch.ones(10, dtype=torch.float64, requires_grad=True),
        "log ridge": torch.tensor(-3.0, dtype=torch.float64, requires_grad=True),
    }
    return Problem(x[:300], y[:300], x[300:900], y[300:900], meta, steps)


def adjoints(steps: int, samples: int) -> dict[str, Any]:
    everywhere = todist.parallelize(todist.batch_partitioner, todist.concatenate_reducer)
    some = {f"Truncated({k})": todist.Truncated(k) for k in (1, 4, 16, 64) if k < steps}
    return {
        "Recorded()": todist.Recorded(),
        "Replayed('all')": todist.Replayed(snapshots="all"),
        "Replayed(5)": todist.Replayed(snapshots=5),
        **some,
        "Implicit()": todist.Implicit(todist.linear_solve.solve_cg(rtol=1e-8), not_converged="ignore"),
        "FiniteDifference()": todist.FiniteDifference(),
        "SAMA()": todist.SAMA(),
        f"EvolutionStrategies({samples})": todist.EvolutionStrategies(samples, 0.1, everywhere),
        f"EvolutionStrategies({4 * samples})": todist.EvolutionStrategies(4 * samples, 0.1, everywhere),
        f"PersistentEvolutionStrategies({4 * samples})": todist.PersistentEvolutionStrategies(
            4 * samples, 0.1, everywhere, unroll=max(1, steps // 4)
        ),
    }


def measure(given: Problem, name: str, adjoint: Any, exact: Tensor) -> Row:
    def gradient() -> Tensor:
        torch.manual_seed(0)
        return given.gradient(adjoint)

    start = time.perf_counter()
    found = gradient()
    seconds = time.perf_counter() - start
    memory = PeakMemory()
    is_spread = getattr(adjoint, "parallel", None) is not None
    # Nothing of a pair stays: the loop of one shows what they all take, in this process.
    watched = type(adjoint)(1, adjoint.sigma) if is_spread else adjoint
    with memory:
        given.gradient(watched)
    error = ((found - exact).norm() / exact.norm()).item()
    return Row(name, error, seconds, memory.peak / 2**20)


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
@todist.rank_zero_only
def main(args: argparse.Namespace) -> None:
    given = problem(args.steps)
    exact = given.gradient(todist.Recorded())
    print(f"{args.steps} steps on {todist.get_world_size()} worker(s)")
    rows = []
    for name, adjoint in adjoints(args.steps, args.samples).items():
        rows.append(measure(given, name, adjoint, exact))
        row = rows[-1]
        print(f"{name:24s} error {row.error:.2e}   {row.seconds:7.3f} s   {row.megabytes:8.2f} MiB")
    draw(rows, args)


def draw(rows: list[Row], args: argparse.Namespace) -> None:
    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    kinds = [row.name.partition("(")[0] for row in rows]
    order = list(dict.fromkeys(kinds))
    for axes, column, label in ((left, "seconds", "seconds"), (right, "megabytes", "peak memory, MiB")):
        for row, kind in zip(rows, kinds, strict=True):
            place = (getattr(row, column), max(row.error, FLOOR))
            number = order.index(kind)
            first = kind not in axes.get_legend_handles_labels()[1]
            axes.scatter(
                *place,
                color=f"C{number}",
                marker="os^DvPX*"[number],
                s=90,
                alpha=0.8,
                label=kind if first else None,
                zorder=3,
            )
            setting = row.name.partition("(")[2].strip("')")
            axes.annotate(setting, place, xytext=(7, 5), textcoords="offset points", fontsize=8)
        axes.set(xscale="log", yscale="log", xlabel=label)
        axes.margins(x=0.12, y=0.1)
        axes.grid(alpha=0.3)
    right.xaxis.set_minor_formatter("{x:g}")
    right.xaxis.set_major_formatter("{x:g}")
    left.set_ylabel("relative error of the gradient")
    left.set_yticks([FLOOR, 1e-3, 1e-2, 1e-1, 1], ["exact", "0.1 %", "1 %", "10 %", "100 %"])
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
    figure.suptitle(f"The gradient of a validation loss through {args.steps} steps of training, by adjoint")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=120)
    print(f"picture: {args.output}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="of training (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=16, help="pairs of loops (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/adjoints.png"), help="picture to draw")
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
