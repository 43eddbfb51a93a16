"""Learning from labels half of which are wrong: weights of the examples are learned during training, by SAMA.

    python examples/sama_reweighting.py
    torchrun --nproc_per_node=2 examples/sama_reweighting.py

A network is trained with Adam on 1,000 handwritten digits. After each step the loss on 100 clean images is
differentiated with respect to the weights of the examples in the batch, and the weights are updated, too. No step is
differentiated twice: ``SAMA`` takes the difference of two first-order gradients at points nearby, in the direction that
Adam's own derivative makes of the clean loss's gradient (Choe et al. 2023, https://arxiv.org/abs/2310.05674).
``FiniteDifference`` does the same one step earlier, and ``Truncated(1)`` gives the exact gradient of that step; only
the argument ``adjoint=`` differs.

The inner loss is spread over the workers. On one worker or on many, the numbers printed are the same up to rounding.
The network is too small for its calls to pay.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import torchopt_dist as todist

BATCH = 100
POINTS = 20
"""How often the accuracy is measured."""


class Images(NamedTuple):
    x: Tensor
    y: Tensor


class Data(NamedTuple):
    noisy: Images
    wrong: Tensor  # which labels of the noisy images are
    clean: Images
    test: Images


class Run(NamedTuple):
    accuracies: list[float]
    weights: Tensor
    seconds: float  # a step


def digits(noise: float) -> Data:
    """1000 images, part of whose labels are another digit, 100 that have the right ones, and the rest to test on."""
    generator = torch.Generator().manual_seed(0)
    loaded = load_digits()
    order = torch.randperm(len(loaded.target), generator=generator)
    x, y = torch.tensor(loaded.data)[order] / 16, torch.tensor(loaded.target)[order]
    wrong = torch.rand(1000, generator=generator) < noise
    others = (y[:1000] + torch.randint(1, 10, (1000,), generator=generator)) % 10
    noisy = Images(x[:1000], torch.where(wrong, others, y[:1000]))
    return Data(noisy, wrong, Images(x[1000:1100], y[1000:1100]), Images(x[1100:], y[1100:]))


@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.sum_reducer)
def weighted_loss(model: nn.Module, batch: Images, weights: Tensor) -> Tensor:
    return weights @ F.cross_entropy(model(batch.x), batch.y, reduction="none") / BATCH


def train(data: Data, adjoint: Any, args: argparse.Namespace) -> Run:
    """Train, and move the examples' weights beside it, unless there is no adjoint: then all are 1."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double()
    logits = torch.zeros(len(data.noisy.y), dtype=torch.float64, requires_grad=True)
    optimizer, meta_optimizer = todist.adam(lr=args.lr), torch.optim.Adam([logits], lr=args.meta_lr)
    state, accuracies = None, []
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        chosen = torch.randperm(len(data.noisy.y))[:BATCH]
        weights = 2 * logits.sigmoid()

        def loss(model: nn.Module, chosen: Tensor, weights: Tensor = weights) -> Tensor:
            return weighted_loss(model, Images(data.noisy.x[chosen], data.noisy.y[chosen]), weights[chosen])

        with torch.set_grad_enabled(adjoint is not None):
            result = todist.inner_loop(
                loss, optimizer, model, [chosen], state=state, meta=weights, adjoint=adjoint or todist.SAMA()
            )
        if adjoint is not None:
            meta_optimizer.zero_grad()
            F.cross_entropy(result.params(data.clean.x), data.clean.y).backward()
            meta_optimizer.step()
        todist.stop_gradient(result.params)
        model = result.params.requires_grad_()
        state = todist.pytree.map_tensors(Tensor.detach, result.state)
        if step * POINTS // args.steps > (step - 1) * POINTS // args.steps:
            accuracies.append((model(data.test.x).argmax(-1) == data.test.y).double().mean().item())
    seconds = (time.perf_counter() - start) / args.steps
    return Run(accuracies, 2 * logits.sigmoid().detach(), seconds)


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
@todist.rank_zero_only
def main(args: argparse.Namespace) -> None:
    data = digits(args.noise)
    ways = {
        "equal weights": None,
        "Truncated(1)": todist.Truncated(1),
        "FiniteDifference()": todist.FiniteDifference(),
        "SAMA()": todist.SAMA(),
    }
    print(f"{args.steps} steps on {todist.get_world_size()} worker(s)")
    runs = {}
    for name, adjoint in ways.items():
        runs[name] = run = train(data, adjoint, args)
        share = (run.weights[data.wrong].sum() / run.weights.sum()).item()
        print(
            f"{name:18s} test accuracy {run.accuracies[-1]:.1%}, wrong labels have {share:.1%} of the weight, "
            f"{1000 * run.seconds:.1f} ms a step"
        )
    draw(data, runs, args)


def draw(data: Data, runs: dict[str, Run], args: argparse.Namespace) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, run in runs.items():
        steps = [args.steps * (point + 1) / len(run.accuracies) for point in range(len(run.accuracies))]
        left.plot(steps, run.accuracies, label=name, linewidth=2.5 if name == "SAMA()" else 1.5)
    left.set(xlabel="step", ylabel="test accuracy", title=f"{args.noise:.0%} of the labels are wrong")
    left.yaxis.set_major_formatter("{x:.0%}")
    left.legend(loc="lower right")
    weights, bins = runs["SAMA()"].weights, torch.linspace(0, 2, 41).tolist()
    right.hist(weights[~data.wrong].tolist(), bins, alpha=0.6, label="right label")
    right.hist(weights[data.wrong].tolist(), bins, alpha=0.6, label="wrong label")
    right.set(xlabel="weight", ylabel="examples", title="Weights learned by SAMA()")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=120)
    print(f"picture: {args.output}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=600, help="of training (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.003, help="Adam's learning rate")
    parser.add_argument("--meta-lr", type=float, default=0.1, help="of the weights' logits")
    parser.add_argument(
        "--noise", type=float, default=0.5, help="share of wrong labels (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/sama_reweighting.png"), help="picture to draw"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
