"""Which sequences are worth training on, learned through one training that runs on several ranks.

    python examples/data_parallel_metagradients.py

A small transformer is trained by 100 steps of Adam to continue sequences. In half of the training sequences the tokens
are random. The loss on other, clean sequences after the training is a differentiable function of a weight for each
training sequence; its gradient goes back through all steps, and each weight moves by the sign of its gradient
(Engstrom et al. 2025, https://arxiv.org/abs/2503.13751). Each meta-step lowers the loss on clean sequences, and after
four the mean weight of random sequences is 0.83, that of the others 1.33.

There is one training, not one a task, so its batches are split: each rank has its part of the sequences, and their
weights are its own. ``parallel=todist.DataParallel(own=weights)`` makes one loop of it, and ``Replayed(sharded=True)``
has each rank keep its part of the history. The training is repeated on one, two and four ranks of this machine: the
curves are the same, and a rank's peak is 4.2, 2.5 and 1.8 MiB. What is left is the parameters and a step's graph.

Through 500 steps (``--steps 500``) the curves are the same, too; the peaks are 13.4, 7.8 and 4.9 MiB. There the loss
falls from 1.63 to 1.54, but the weights hardly differ: by then the network knows all sequences by heart.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from adjoints import PeakMemory
from matplotlib.figure import Figure
from torch import Tensor, nn

import torchopt_dist as todist

TOKENS, LENGTH, WIDTH, HEADS = 11, 12, 16, 2
BATCH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH),
        )
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.heads(self.norm(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        made: Tensor = x + self.mlp(x)
        return made


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.zeros(LENGTH - 1, WIDTH))
        self.block, self.last = Block(), nn.Linear(WIDTH, TOKENS)

    def forward(self, sequences: Tensor) -> Tensor:
        """The mean loss of each sequence's tokens."""
        logits = self.last(self.block(self.token(sequences[:, :-1]) + self.place))
        each = F.cross_entropy(logits.transpose(1, 2), sequences[:, 1:], reduction="none")
        return each.mean(-1)


def some_sequences(count: int, random: int, seed: int) -> Tensor:
    """Each goes on by 1, 2 or 3, modulo the number of tokens; every other one of the first is random."""
    generator = torch.Generator().manual_seed(seed)
    first, stride = (torch.randint(1, high, (count, 1), generator=generator) for high in (TOKENS, 4))
    clean = (first + stride * torch.arange(LENGTH)) % TOKENS
    clean[: 2 * random : 2] = torch.randint(TOKENS, (random, LENGTH), generator=generator)
    return clean


class Curve(NamedTuple):
    losses: list[float]
    weights: list[float]
    """Of this rank's sequences."""
    peak: float
    """Peak memory of a training and its gradient, in MiB."""
    seconds: float
    """A meta-step."""


def learn(args: argparse.Namespace) -> Curve:
    """Run on each rank: learn the weights of its sequences."""
    torch.set_num_threads(1)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = some_sequences(args.sequences, args.sequences // 2, seed=0)[rank::size]
    clean = some_sequences(64, 0, seed=1)[rank::size]
    torch.manual_seed(0)
    model = Transformer().double()
    weights = torch.ones(len(mine), dtype=torch.float64, requires_grad=True)

    def batch(number: int) -> Tensor:
        return (torch.arange(BATCH // size) + number * (BATCH // size)) % len(mine)

    def loss(model: Any, chosen: Tensor) -> Tensor:
        value: Tensor = (weights[chosen] * model(mine[chosen])).mean()
        return value

    losses, memory, begin = [], PeakMemory(), time.perf_counter()
    for meta_step in range(args.meta_steps):
        with memory if meta_step == args.meta_steps - 1 else nullcontext():  # it takes time
            adapted = todist.inner_loop(
                loss,
                todist.adam(lr=1e-2),
                model,
                batch,
                steps=args.steps,
                meta=weights,
                adjoint=todist.Replayed(sharded=True, sweep="reverse"),  # faster for a network this small
                parallel=todist.DataParallel(own=weights),
            )
            outer = adapted.params(clean).mean()
            (gradient,) = torch.autograd.grad(outer, weights)
        with torch.no_grad():
            weights -= args.rate * gradient.sign()
            weights.clamp_(0, 2)
        losses.append(todist.mean_over(outer.detach()).item())
    seconds = (time.perf_counter() - begin) / args.meta_steps
    return Curve(losses, weights.tolist(), memory.peak / 2**20, seconds)


def main(args: argparse.Namespace) -> None:
    curves: dict[int, Curve] = {}
    for size in args.ranks:
        made = todist.launch(learn, args=(args,), nproc_per_host=size, backend="gloo")
        of_ranks = [made.rank(rank) for rank in range(size)]
        weights = [of_ranks[place % size].weights[place // size] for place in range(args.sequences)]
        curves[size] = of_ranks[0]._replace(weights=weights)
        random, clean = weights[::2], weights[1::2]
        print(
            f"{size} rank(s)  loss on clean sequences {curves[size].losses[0]:.6f} -> {curves[size].losses[-1]:.6f}, "
            f"mean weight of random ones {sum(random) / len(random):.2f}, of the others {sum(clean) / len(clean):.2f}, "
            f"peak {curves[size].peak:.1f} MiB a rank, {curves[size].seconds:.1f} s a meta-step",
            flush=True,
        )
    draw(curves, args)


def draw(curves: dict[int, Curve], args: argparse.Namespace) -> None:
    figure = Figure(figsize=(13, 4), layout="constrained")
    losses, weights, memory = figure.subplots(1, 3)
    for place, (size, curve) in enumerate(curves.items()):
        losses.plot(curve.losses, marker="o", markersize=12 - 4 * place, label=f"{size} rank(s)")
    (last,) = list(curves.values())[-1:]
    weights.hist([last.weights[::2], last.weights[1::2]], label=["random", "others"], bins=12)
    memory.bar([str(size) for size in curves], [curve.peak for curve in curves.values()])
    losses.set(xlabel="meta-step", title="Loss on clean sequences after training")
    weights.set(xlabel="weight", title="Learned weights of training sequences")
    memory.set(xlabel="ranks", title="Peak memory of a rank, MiB")
    losses.legend()
    weights.legend()
    for axes in (losses, weights, memory):
        axes.grid(alpha=0.3)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=120)
    print(f"picture: {args.output}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="that run the training")
    parser.add_argument("--steps", type=int, default=100, help="of Adam (default: %(default)s)")
    parser.add_argument("--meta-steps", type=int, default=4, help="that move the weights")
    parser.add_argument("--sequences", type=int, default=64, help="to train on (default: %(default)s)")
    parser.add_argument(
        "--rate", type=float, default=0.25, help="by which a weight moves (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/data_parallel_metagradients.png"), help="picture to draw"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
