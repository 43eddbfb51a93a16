"""Three steps in one script, each on its own number of workers: pre-train on two, adapt on one, test on two.

    python examples/pipeline_of_steps.py

A small network learns to read scikit-learn's handwritten digits, 8x8 pixels. Then the images are rotated by 90 degrees.
A few labelled rotated images are enough to adapt the network, and the test shows the gain. The program prints:

    pre-train on 2 workers: 90.9% of 397 upright images
    adapt on 1 worker: 100 turned images
    test on 2 workers: turned images, 10.3% before and 74.6% after
    picture: outputs/pipeline_of_steps.png

Each step is a function that runs on its workers and returns what the next step needs. When a step is over, its workers
end and their memory is free. The workers of the next step start within a tenth of a second.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import torchopt_dist as todist
from torchopt_dist.launching import Launcher

State = dict[str, Tensor]
"""The parameters of the network."""


class Images(NamedTuple):
    x: Tensor  # (N, 64)
    y: Tensor  # (N,)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def loaded(state: State) -> nn.Module:
    model = network()
    model.load_state_dict(state)
    return model


# --- Step 1: two workers, each with half of every batch -----------------------------------------------------


@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.mean_reducer)
def batch_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@todist.rank_zero_only
def pre_train(images: Images, steps: int, seed: int) -> State:
    torch.manual_seed(seed)
    model = network()
    optimizer = todist.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        batch = torch.randint(len(images.x), (128,))
        optimizer.zero_grad()
        batch_loss(model, images.x[batch], images.y[batch]).backward()
        optimizer.step()
    return model.state_dict()


# --- Step 2: one worker -------------------------------------------------------------------------------------


def adapt(state: State, images: Images, steps: int) -> State:
    model = loaded(state)
    optimizer = todist.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images.x), images.y).backward()
        optimizer.step()
    return model.state_dict()


# --- Step 3: two workers, each with half of the images ------------------------------------------------------


def count_correct(states: list[State], images: Images) -> list[int]:
    """For each state, how many of this worker's share of the images it reads correctly."""
    mine = slice(todist.get_rank(), None, todist.get_world_size())
    x, y = images.x[mine], images.y[mine]
    with torch.no_grad():
        return [int((loaded(state)(x).argmax(dim=1) == y).sum()) for state in states]


# --- The script ---------------------------------------------------------------------------------------------


def digits(quarter_turns: int) -> Images:
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 8, 8)
    return Images(torch.rot90(images, quarter_turns, (1, 2)).flatten(start_dim=1), torch.tensor(labels))


def accuracies(workers: int, states: list[State], images: Images) -> list[float]:
    result = Launcher(nproc_per_host=workers).run(count_correct, states, images)
    shares = [result.rank(rank) for rank in range(workers)]
    return [sum(counts) / len(images.x) for counts in zip(*shares, strict=True)]


def draw(path: Path, images: Images, found: dict[str, float]) -> None:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    examples, bars = figure.subplots(1, 2, width_ratios=[1, 2])
    rows = [torch.cat([*F.pad(digit.view(3, 8, 8), (1, 1, 1, 1))], dim=1) for digit in images.x[:12].split(3)]
    examples.imshow(torch.cat(rows).numpy(), cmap="gray_r")
    examples.set(title="turned images", xticks=[], yticks=[])
    drawn = bars.bar([*found], [100 * value for value in found.values()], color=["0.75", "C1", "C0"])
    bars.bar_label(drawn, fmt="%.1f%%")
    bars.axhline(10, color="gray", linestyle="--", label="chance")
    bars.set(title="held-out images that are read correctly", ylabel="%", ylim=(0, 100))
    bars.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="for the first and the last step")
    parser.add_argument("--steps", type=int, default=200, help="of pre-training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/pipeline_of_steps.png"))
    args = parser.parse_args()
    upright, turned = digits(0), digits(1)
    train, held_out, few = slice(1400), slice(1400, None), slice(100)

    launcher = Launcher(nproc_per_host=args.workers, rpc=True)
    state = launcher.run(pre_train, Images(*(t[train] for t in upright)), args.steps, args.seed).rank(0)
    assert state is not None  # rank 0 returns one, the others served it
    test_set = Images(*(t[held_out] for t in upright))
    (accuracy,) = accuracies(args.workers, [state], test_set)
    print(f"pre-train on {args.workers} workers: {accuracy:.1%} of {len(test_set.x)} upright images")

    adapted = Launcher(nproc_per_host=1).run(adapt, state, Images(*(t[few] for t in turned)), 50).rank(0)
    print(f"adapt on 1 worker: {len(turned.x[few])} turned images")

    turned_test = Images(*(t[held_out] for t in turned))
    before, after = accuracies(args.workers, [state, adapted], turned_test)
    print(f"test on {args.workers} workers: turned images, {before:.1%} before and {after:.1%} after")
    found = {
        f"upright,\nby {args.workers} workers": accuracy,
        "turned,\nbefore": before,
        "turned, adapted\nby 1 worker": after,
    }
    draw(args.output, turned_test, found)


if __name__ == "__main__":
    main()
