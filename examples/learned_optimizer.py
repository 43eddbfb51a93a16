"""A learned optimizer, meta-trained by persistent evolution strategies, against tuned Adam on networks held out.

    torchrun --nproc_per_node=2 examples/learned_optimizer.py     # two workers
    python examples/learned_optimizer.py                          # one process, the same numbers up to rounding

A learned optimizer is a small network that turns what is known of a parameter into its update. Here, as in Metz et al.
(2022, https://arxiv.org/abs/2203.11860), that is the gradient, momenta of three decays and the time, and the network
has one hidden layer. All parameters share it, so it fits any model. Unlike theirs it begins as Adam: its output is
added to Adam's direction and to the logarithm of Adam's rate. So a minute of meta-training is enough.

The meta-loss is the mean loss of 100 steps of training. Pairs of trainings with noise on the optimizer's 89 numbers
give its gradient, with new noise every 20 steps. Some networks are trained at once, by ``vmap``; each such group is a
task of a meta-step, and tasks are spread over the workers.

The images are scikit-learn's ``load_digits``, 4x4 pixels. Meta-training sees networks of one to three layers of 16
hidden units. These and two larger architectures are then trained on images held out, by the learned optimizer and by
Adam with each of nine rates; the best rate of each architecture is compared.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor

import torchopt_dist as todist

DECAYS = torch.tensor([[0.5], [0.9], [0.99]])
HORIZONS = torch.tensor([0.03, 0.1, 0.3, 1.0])
"""Parts of a training, for the features of time."""
HIDDEN = 8
RATES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)
NETWORKS = ((16,), (16, 16), (16, 16, 16), (48,), (32, 32, 32))
"""The hidden units of each layer; meta-training sees the first three."""

Theta = dict[str, Tensor]
Units = tuple[int, ...]
Shape = tuple[int, int]


class Memory(NamedTuple):
    momenta: Tensor
    squares: Tensor
    step: Tensor


def learned_optimizer(theta: Theta, horizon: int) -> todist.transform.GradientTransformation:
    """Features of each parameter → a small network → an update, for trainings of ``horizon`` steps."""

    def init(params: Tensor) -> Memory:
        return Memory(params.new_zeros(len(DECAYS), *params.shape), torch.zeros_like(params), torch.zeros(()))

    def update(updates: Tensor, state: Memory, *, params: Any = None, inplace: bool = False) -> Any:
        step = state.step + 1
        momenta = DECAYS * state.momenta + (1 - DECAYS) * updates
        squares = 0.99 * state.squares + 0.01 * updates.square()
        scale = (squares / (1 - 0.99**step) + 1e-12).rsqrt()
        directions = momenta / (1 - DECAYS**step) * scale
        features = torch.cat([directions, (updates * scale).unsqueeze(0)]).mT
        time = torch.tanh(step / horizon / HORIZONS)
        hidden = torch.tanh(features @ theta["features"] + time @ theta["time"] + theta["bias"])
        direction, log_rate = (hidden @ theta["out"]).unbind(-1)
        rate = (theta["log rate"] + log_rate).exp()
        return -rate * (directions[1] + direction), Memory(momenta, squares, step)

    return todist.transform.GradientTransformation(init, update)


def adam(rate: float) -> Theta:
    """What the learned optimizer begins with."""
    shapes = {"features": (len(DECAYS) + 1, HIDDEN), "time": (len(HORIZONS), HIDDEN), "bias": (HIDDEN,)}
    theta = {name: 0.5 * torch.randn(shape) for name, shape in shapes.items()}
    theta |= {"out": torch.zeros(HIDDEN, 2), "log rate": torch.tensor(rate).log()}
    return {name: tensor.requires_grad_() for name, tensor in theta.items()}


def first_weights(units: Units) -> Tensor:
    """All weights of a network as one vector."""
    parts = []
    for inputs, outputs in pairwise((16, *units, 10)):
        parts += [torch.randn(inputs * outputs) / inputs**0.5, torch.zeros(outputs)]
    return torch.cat(parts)


def network_loss(weights: Tensor, units: Units, x: Tensor, y: Tensor) -> Tensor:
    end = 0
    for inputs, outputs in pairwise((16, *units, 10)):
        start, end = end, end + (inputs + 1) * outputs
        matrix = weights[start : end - outputs].reshape(inputs, outputs)
        x = (x if start == 0 else x.tanh()) @ matrix + weights[end - outputs : end]
    return F.cross_entropy(x, y)


def digits(held_out: bool) -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    images = F.avg_pool2d(torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8), 2).flatten(1)
    chosen = (torch.arange(len(images)) % 3 == 0) == held_out
    return ((images - images.mean(0)) / images.std())[chosen], torch.tensor(labels)[chosen]


def trainings(optimizer: Any, units: Units, shape: Shape, held_out: bool, **options: Any) -> Tensor:
    """The losses of networks in training, of shape (networks, steps); ``options`` are of the inner loop."""
    images, labels = digits(held_out)

    def train(weights: Tensor, batches: Tensor) -> Tensor:
        def loss(weights: Tensor, rows: Tensor) -> Tensor:
            return network_loss(weights, units, images[rows], labels[rows])

        return todist.inner_loop(loss, optimizer, weights, batches, **options).losses

    weights = torch.stack([first_weights(units) for _ in range(shape[0])])
    batches = torch.randint(len(images), (*shape, 32))
    losses: Tensor = torch.vmap(train, randomness="different")(weights, batches)
    return losses


def meta_loss(seed: int, theta: Theta, shape: Shape) -> Tensor:
    """On some worker: the mean loss of some networks, each trained with a pair of noise."""
    torch.manual_seed(seed)
    adjoint = todist.PersistentEvolutionStrategies(samples=1, sigma=0.05, unroll=shape[1] // 5)
    optimizer = learned_optimizer(theta, shape[1])
    units = NETWORKS[seed // 2 % 3]  # the two of a meta-step take the same time
    return trainings(optimizer, units, shape, held_out=False, meta=theta, adjoint=adjoint).mean()


def losses_of(case: tuple[Units, float], theta: Theta, shape: Shape, seed: int) -> Tensor:
    """On some worker: those of networks on images held out, by Adam of a rate, or, where it is 0, as learned."""
    torch.manual_seed(seed)
    optimizer = todist.adam(lr=case[1]) if case[1] else learned_optimizer(theta, shape[1])
    with torch.no_grad():
        return trainings(optimizer, case[0], shape, held_out=True)


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
@todist.rank_zero_only
def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    theta = adam(rate=0.03)
    optimizer = todist.Adam(list(theta.values()), lr=0.03)
    for step in range(args.meta_steps):
        optimizer.zero_grad()
        seeds, shape = range(2 * step, 2 * step + 2), (args.networks, args.steps)
        loss = todist.map(meta_loss, seeds, args=(theta, shape), reducer=todist.mean_reducer)
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.meta_steps - 1:
            print(f"meta-step {step:3d}: mean loss {loss:.4f}")
    cases = [(units, rate) for rate in (0.0, *RATES) for units in NETWORKS]
    cases = cases[::2] + cases[1::2]  # as much work for the first half as for the second
    theta = {name: tensor.detach() for name, tensor in theta.items()}
    tests = todist.map(losses_of, cases, args=(theta, (args.test_networks, args.steps), args.seed))
    report(dict(zip(cases, tests, strict=True)), args.output)


def report(losses: dict[tuple[Units, float], Tensor], output: Path) -> None:
    """Print the table and draw the curves: of each architecture, by the learned optimizer and by the best Adam."""
    figure = Figure(figsize=(14, 3.4), layout="constrained")
    figure.suptitle("Mean loss of networks in training, by their hidden units")
    print("\n| hidden units | tuned Adam | learned | difference | last steps | the paper |")
    print("|---|---|---|---|---|---|")
    for axes, units in zip(figure.subplots(1, len(NETWORKS), sharey=True), NETWORKS, strict=True):
        rate = min(RATES, key=lambda rate: float(losses[units, rate].mean()))
        adam, learned = losses[units, rate], losses[units, 0.0]
        name = "-".join(map(str, units)) + ("" if units in NETWORKS[:3] else ", not seen")
        gain = (adam - learned).mean(dim=1)
        row = [name, f"{adam.mean():.3f} (rate {rate:g})", f"{learned.mean():.3f}"]
        row += [f"{gain.mean():.3f} ± {1.96 * gain.std() / len(gain) ** 0.5:.3f}"]
        row += [f"{adam[:, -10:].mean():.3f}, {learned[:, -10:].mean():.3f}", "learned is better"]
        print(f"| {' | '.join(row)} |")
        axes.plot(adam.mean(dim=0), "C1", label=f"Adam, rate {rate:g}")
        axes.plot(learned.mean(dim=0), "C0", label="learned")
        axes.set(xlabel="step", yscale="log", title=name)
        axes.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    print(f"\npicture: {output}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--meta-steps", type=int, default=45)
    parser.add_argument("--steps", type=int, default=100, help="of a training")
    parser.add_argument("--networks", type=int, default=8, help="in each of the two tasks of a meta-step")
    parser.add_argument("--test-networks", type=int, default=16, help="of each architecture")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/learned_optimizer.png"))
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
