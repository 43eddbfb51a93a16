"""Meta-learning through one inner loop that runs on all workers, each with its part of the data.

    python examples/maml_parallel_inner.py
    torchrun --nproc_per_node=2 examples/maml_parallel_inner.py

In ``maml_digits.py`` each task, with its whole inner loop, runs on one worker. Here there is one large task: the inner
loss is a mean over a thousand images. A *team* of all workers runs its inner loop: each has the same parameters and its
part of the images, and in each step the gradients are averaged. The outer gradient goes back through these steps, to
second order. It learns an initialization of a network of four convolutions of 64 filters, as MAML's, and a learning
rate for each tensor, from which five steps of plain gradient descent classify handwritten digits. The baseline takes
five steps from the initialization before learning, at the best of five rates.

On one worker or on many, the numbers printed are the same up to rounding, which training amplifies in single precision;
with ``--double`` all printed digits are the same. ``CPU time`` is that of the first worker.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import trange

import torchopt_dist as todist

mpl.use("Agg")
import matplotlib.pyplot as plt

Examples = tuple[Tensor, Tensor]
Rates = dict[str, Tensor]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Learn an initialization and learning rates through an inner loop on all workers."
    )
    parser.add_argument("--meta-steps", type=int, default=40, help="outer steps (default: %(default)s)")
    parser.add_argument("--inner-steps", type=int, default=5, help="inner steps (default: %(default)s)")
    parser.add_argument("--filters", type=int, default=64, help="filters of a layer (default: %(default)s)")
    parser.add_argument(
        "--images", type=int, default=1000, help="of the inner loss, at most 1000 (default: %(default)s)"
    )
    parser.add_argument("--double", action="store_true", help="compute in double precision")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/maml_parallel_inner.png"), help="picture of the curve"
    )
    parser.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="write the curves there, too")
    return parser.parse_args()


def network(filters: int) -> nn.Module:
    """Four convolutions, each but the last followed by pooling, and a linear layer."""
    layers: list[nn.Module] = []
    for number in range(4):
        convolution = nn.Conv2d(filters if number else 1, filters, 3, padding=1)
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        layers += [convolution, nn.ReLU(), nn.MaxPool2d(2) if number < 3 else nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(filters, 10))


def after_adaptation(
    model: nn.Module, log_rates: Rates, sets: Sequence[Examples], steps: int
) -> dict[str, Tensor]:
    """The loss on the second set and the accuracy on the third, after adaptation to the first."""
    team = todist.team()
    (x, y), (x_query, y_query), (x_test, y_test) = (
        (images[team.rank :: team.size], labels[team.rank :: team.size]) for images, labels in sets
    )

    def loss(model: Any) -> Tensor:
        return F.cross_entropy(model(x), y)

    adapted: Any = todist.inner_loop(
        loss,
        todist.sgd(lr={name: log_rate.exp() for name, log_rate in log_rates.items()}),
        model,
        steps,
        parallel=todist.DataParallel(team),
    ).params
    with torch.no_grad():
        accuracy = (adapted(x_test).argmax(1) == y_test).float().mean()
    found: dict[str, Tensor] = todist.mean_over(
        {"loss": F.cross_entropy(adapted(x_query), y_query), "accuracy": accuracy}, team
    )
    return found


@todist.rank_zero_only
def train(args: argparse.Namespace, write: todist.typing.WriteScalars) -> None:
    torch.set_default_dtype(
        torch.float64 if args.double else torch.float32
    )  # the calls' workers have it, too
    torch.manual_seed(args.seed)
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    images = torch.tensor(digits.images, dtype=torch.get_default_dtype())[order, None] / 16
    labels = torch.tensor(digits.target)[order]
    parts = slice(0, args.images), slice(1000, 1400), slice(1400, 1796)
    sets = [(images[part], labels[part]) for part in parts]

    model = network(args.filters)
    log_rates = {name: torch.tensor(0.1).log().requires_grad_() for name, _ in model.named_parameters()}
    optimizer = torch.optim.Adam([*model.parameters(), *log_rates.values()], lr=0.01)

    # One task, of rank 0, for a team of all workers; in one process it is a plain call.
    on_all = todist.parallelize(0, todist.mean_reducer, team=todist.get_world_size())(after_adaptation)

    def evaluated(log_rates: Rates) -> float:
        with torch.no_grad():
            return on_all(model, log_rates, sets, args.inner_steps)["accuracy"].item()

    baseline = max(
        evaluated({name: torch.tensor(rate).log() for name in log_rates}) for rate in (0.1, 0.3, 1, 3, 10)
    )
    losses, accuracies = [], []
    begin = time.process_time()
    for step in trange(args.meta_steps, desc="meta-training", disable=None):
        found = on_all(model, log_rates, sets, args.inner_steps)
        optimizer.zero_grad()
        found["loss"].backward()
        optimizer.step()
        losses.append(found["loss"].item())
        accuracies.append(found["accuracy"].item())
        write(step + 1, {"loss after adaptation": losses[-1], "held-out accuracy": accuracies[-1]})
    seconds = (time.process_time() - begin) / args.meta_steps
    print(f"outer loss: {losses[0]:.4f} at first, {losses[-1]:.4f} after {args.meta_steps} meta-steps")
    print("learned rates: " + ", ".join(f"{k} {v.exp().item():.3f}" for k, v in log_rates.items()))
    print(f"held-out accuracy after {args.inner_steps} steps: {accuracies[-1]:.1%}")
    print(f"from the first weights, at the best of five rates: {baseline:.1%}")
    print(f"CPU time: {seconds:.2f} s a meta-step on {todist.get_world_size()} worker(s)")
    draw(losses, accuracies, baseline, args.output)


def draw(losses: list[float], accuracies: list[float], baseline: float, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    figure, (curve, tested) = plt.subplots(1, 2, figsize=(10, 3.8))
    curve.plot(losses)
    curve.set(xlabel="meta-step", ylabel="loss after adaptation", yscale="log")
    curve.set_title("An inner loop that runs on all workers", fontsize=10)
    tested.plot(accuracies, label="learned weights and rates")
    tested.axhline(baseline, color="C2", linestyle="--", label="first weights, best of five rates")
    tested.set(xlabel="meta-step", ylabel="held-out accuracy", ylim=(0, 1))
    tested.legend(loc="lower right")
    for axes in (curve, tested):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    print(f"curve: {output}")


@todist.auto_init_rpc(lambda: torch.set_num_threads(1), process_group="gloo")
def main() -> None:
    args = parse_arguments()
    with todist.scalar_writer(args.tensorboard) as write:
        train(args, write)


if __name__ == "__main__":
    main()
