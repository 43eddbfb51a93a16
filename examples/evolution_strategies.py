"""A controller that balances a pole, learned from returns alone; the episodes are spread over the workers.

    torchrun --nproc_per_node=2 examples/evolution_strategies.py     # two workers
    python examples/evolution_strategies.py                          # one process, the same curve up to rounding

Evolution strategies (Salimans et al., 2017, https://arxiv.org/abs/1703.03864) estimate the gradient of a return from
its values at points nearby, here by ``zero_order``. The simulator, a pole on a cart as in Barto, Sutton and Anderson
(1983), is a loop over plain numbers and has no derivative. A sample is a seed, so workers receive only seeds and the
controller's weights and send only returns back. The curve is the same, up to rounding, on any number of workers.

The controller is linear. Untrained it holds the pole for less than a second; after some thirty steps it holds it to the
end of the episode, a minute.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import torchopt_dist as todist
from torchopt_dist.diff.zero_order import zero_order

STEPS, DT = 3000, 0.02
"""Of an episode: at most so many steps, of so many seconds."""


def episode(weights: list[float], seed: int) -> float:
    """How long the pole stays up, as a part of the whole episode."""
    generator = torch.Generator().manual_seed(seed)
    x, v, angle, spin = (0.1 * (torch.rand(4, generator=generator) - 0.5)).tolist()
    for step in range(STEPS):
        if abs(x) > 2.4 or abs(angle) > 0.21:
            return step / STEPS
        force = 10 * math.tanh(weights[0] * x + weights[1] * v + weights[2] * angle + weights[3] * spin)
        sine, cosine = math.sin(angle), math.cos(angle)
        push = (force + 0.05 * spin**2 * sine) / 1.1
        turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        x, v = x + DT * v, v + DT * (push - 0.05 * turn * cosine / 1.1)
        angle, spin = angle + DT * spin, spin + DT * turn
    return 1.0


def failure(weights: Tensor, episodes: int) -> float:
    """One minus the mean return over some episodes, which begin alike for all weights."""
    return 1 - sum(episode(weights.tolist(), seed) for seed in range(episodes)) / episodes


@todist.auto_init_rpc()
@todist.rank_zero_only
def main(args: argparse.Namespace) -> None:
    everywhere = todist.parallelize(todist.batch_partitioner, todist.concatenate_reducer)
    smoothed = zero_order(
        torch.distributions.Normal(0.0, 1.0),
        "antithetic",
        num_samples=args.samples,
        sigma=args.sigma,
        parallel=everywhere,
    )(failure)
    torch.manual_seed(args.seed)
    weights = torch.zeros(4, requires_grad=True)
    optimizer = todist.Adam([weights], lr=args.lr)
    history = {}
    for step in range(args.steps + 1):
        if step % args.eval_every == 0 or step == args.steps:
            history[step] = (1 - failure(weights, args.episodes)) * STEPS * DT
            print(f"step {step:3d}: the pole stays up for {history[step]:.2f} s")
        optimizer.zero_grad()
        smoothed(weights, args.episodes).backward()
        optimizer.step()
    print(f"{2 * args.samples * args.episodes} episodes a step on {todist.get_world_size()} worker(s)")
    plot(args.output, history)
    print(f"picture saved as {args.output}")


def plot(path: Path, history: dict[int, float]) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(history), list(history.values()), marker="o")
    axes.axhline(STEPS * DT, color="gray", linestyle="--", label="end of the episode")
    axes.set(xlabel="step", ylabel="seconds", title="How long the pole stays up")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=45, help="of the optimizer")
    parser.add_argument("--samples", type=int, default=128, help="a step; each is evaluated on both sides")
    parser.add_argument("--episodes", type=int, default=16, help="an evaluation")
    parser.add_argument(
        "--eval-every", type=int, default=5, help="steps between evaluations of the controller"
    )
    parser.add_argument("--sigma", type=float, default=0.5, help="width of the smoothing")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/evolution_strategies.png"))
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
