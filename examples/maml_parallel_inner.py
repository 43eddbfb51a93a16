"""Meta-learning through an inner loop whose *loss* is spread over the workers.

    python examples/maml_parallel_inner.py
    torchrun --nproc_per_node=2 examples/maml_parallel_inner.py

In ``maml_digits.py`` each task, with its whole inner loop, runs on one worker. Here there is one large task: the inner
loss is a mean over a thousand images, and at every inner step each worker computes it on its share of them. The outer
gradient then goes through all these calls, to second order. It learns an initialization and a learning rate for each
tensor, from which five steps of plain gradient descent classify handwritten digits. The baseline takes five steps from
the initialization before learning, at the best of five rates.

On one worker or on many, the numbers printed are the same up to rounding. The network is too small for a call in each
inner step to pay; one whose loss takes seconds is large enough.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from tqdm import trange

import torchopt_dist as todist

mpl.use("Agg")
import matplotlib.pyplot as plt

Params = dict[str, Tensor]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Learn an initialization and learning rates through a distributed inner loop."
    )
    parser.add_argument("--meta-steps", type=int, default=60, help="outer steps (default: %(default)s)")
    parser.add_argument("--inner-steps", type=int, default=5, help="inner steps (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=32, help="hidden units (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/maml_parallel_inner.png"), help="picture of the curve"
    )
    parser.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="write the curves there, too")
    return parser.parse_args()


def logits(params: Params, x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.mean_reducer)
def spread_loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss of a worker's share of the images; the reducer makes it the mean over all."""
    return F.cross_entropy(logits(params, x), y)


def adapt(params: Params, log_lrs: Params, x: Tensor, y: Tensor, steps: int) -> Params:
    """Gradient descent whose every step is part of the graph, remote calls included."""
    for _ in range(steps):
        loss = spread_loss(todist.replicated(params), x, y)
        grads = torch.autograd.grad(loss, tuple(params.values()), create_graph=True)
        params = {
            name: p - log_lrs[name].exp() * grad
            for (name, p), grad in zip(params.items(), grads, strict=True)
        }
    return params


@todist.rank_zero_only
def train(args: argparse.Namespace, write: todist.WriteScalars) -> None:
    torch.manual_seed(args.seed)
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    support, query, held_out = slice(0, 1000), slice(1000, 1400), slice(1400, None)

    params = {
        "w1": torch.randn(64, args.hidden) / 8,
        "b1": torch.zeros(args.hidden),
        "w2": torch.randn(args.hidden, 10) / args.hidden**0.5,
        "b2": torch.zeros(10),
    }
    params = {name: tensor.requires_grad_() for name, tensor in params.items()}
    log_lrs = {name: torch.tensor(0.1).log().requires_grad_() for name in params}
    optimizer = torch.optim.Adam([*params.values(), *log_lrs.values()], lr=0.02)

    def held_out_accuracy(log_rates: Params) -> float:
        adapted = adapt(params, log_rates, images[support], labels[support], args.inner_steps)
        return (logits(adapted, images[held_out]).argmax(1) == labels[held_out]).float().mean().item()

    baseline = max(
        held_out_accuracy({name: torch.tensor(rate).log() for name in params})
        for rate in (0.1, 0.3, 1, 3, 10)
    )
    losses, accuracies = [], []
    for step in trange(args.meta_steps, desc="meta-training", disable=None):
        adapted = adapt(params, log_lrs, images[support], labels[support], args.inner_steps)
        outer_loss = spread_loss(todist.replicated(adapted), images[query], labels[query])
        optimizer.zero_grad()
        outer_loss.backward()
        optimizer.step()
        losses.append(outer_loss.item())
        write(step + 1, {"loss after adaptation": losses[-1]})
        if step % 10 == 9 or step == args.meta_steps - 1:
            accuracies.append((step + 1, held_out_accuracy(log_lrs)))
            write(step + 1, {"held-out accuracy": accuracies[-1][1]})
    print(f"outer loss: {losses[0]:.4f} at first, {losses[-1]:.4f} after {args.meta_steps} meta-steps")
    print("learned rates: " + ", ".join(f"{k} {v.exp().item():.3f}" for k, v in log_lrs.items()))
    print(f"held-out accuracy after {args.inner_steps} steps: {accuracies[-1][1]:.1%}")
    print(f"from the first weights, at the best of five rates: {baseline:.1%}")
    draw(losses, accuracies, baseline, args.output)


def draw(losses: list[float], accuracies: list[tuple[int, float]], baseline: float, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    figure, (curve, tested) = plt.subplots(1, 2, figsize=(10, 3.8))
    curve.plot(losses)
    curve.set(xlabel="meta-step", ylabel="loss after adaptation", yscale="log")
    curve.set_title("An inner loop whose loss is spread over the workers", fontsize=10)
    tested.plot(*zip(*accuracies, strict=True), "o-", label="learned weights and rates")
    tested.axhline(baseline, color="C2", linestyle="--", label="first weights, best of five rates")
    tested.set(xlabel="meta-step", ylabel="held-out accuracy", ylim=(0, 1))
    tested.legend(loc="lower right")
    for axes in (curve, tested):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    print(f"curve: {output}")


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
def main() -> None:
    args = parse_arguments()
    with todist.scalar_writer(args.tensorboard) as write:
        train(args, write)


if __name__ == "__main__":
    main()
