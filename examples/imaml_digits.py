"""Few-shot learning on handwritten digits by implicit MAML, the tasks of a meta-step spread over the workers.

    torchrun --nproc_per_node=2 examples/imaml_digits.py     # two workers
    python examples/imaml_digits.py                          # one process, the same curve up to rounding

Implicit MAML (Rajeswaran et al., 2019, https://arxiv.org/abs/1909.04630) adapts a copy of the weights to a task until
it minimizes the task's loss plus its squared distance to the meta-weights. The meta-gradient is that of the minimum. It
comes from one linear system, which five steps of conjugate gradients solve. So memory does not grow with the inner
steps, and you can take many of them, with any optimizer.

The images are scikit-learn's ``load_digits``, 8x8 pixels. A class is a digit in one of four rotations: 28 classes of
the digits 0-6 are for meta-training, and 12 of the digits 7-9 are held out. A task has 5 classes, with 5 images each to
adapt to and 10 to test on. Adaptation may move the weights only a little, so random weights reach 65 %. After 100
meta-steps the weights adapt to 79 %.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import torchopt_dist as todist
from torchopt_dist import linear_solve
from torchopt_dist.nn import ImplicitMetaGradientModule

WAYS, SHOTS, QUERIES = 5, 5, 10


class Adapted(
    ImplicitMetaGradientModule,
    linear_solve=linear_solve.solve_cg(maxiter=5, rtol=1e-3, not_converged="ignore"),
):
    """A copy of the meta-net, adapted to a task, not far from where it came from."""

    def __init__(self, meta_net: nn.Module, steps: int, proximity: float) -> None:
        super().__init__()
        self.meta_net = meta_net
        self.net = todist.module_clone(meta_net, by="deepcopy")
        self.steps, self.proximity = steps, proximity

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        pairs = zip(self.parameters(), self.meta_parameters(), strict=True)
        distance = torch.stack([(own - meta).square().sum() for own, meta in pairs]).sum()
        return F.cross_entropy(self(x), y) + 0.5 * self.proximity * distance

    def solve(self, x: Tensor, y: Tensor) -> None:
        own = list(self.parameters())
        optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.8)
        with torch.enable_grad():
            for _ in range(self.steps):
                optimizer.zero_grad()
                self.objective(x, y).backward(inputs=own)
                optimizer.step()


@todist.parallelize(todist.tasks, todist.mean_reducer)
def test_after_adaptation(
    meta_net: nn.Module, support: Tensor, queries: Tensor, steps: int, proximity: float
) -> tuple[Tensor, Tensor]:
    """On some worker, of one task: the loss and the accuracy on the queries."""
    labels = torch.arange(WAYS)
    adapted = Adapted(meta_net, steps, proximity)
    adapted.solve(support.flatten(0, 1), labels.repeat_interleave(support.shape[1]))
    logits = adapted(queries.flatten(0, 1))
    y = labels.repeat_interleave(queries.shape[1])
    return F.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()


def sample_tasks(classes: list[Tensor], tasks: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Support and query images, of shape (tasks, WAYS, images, 64)."""

    def task() -> Tensor:
        chosen = torch.randperm(len(classes), generator=generator)[:WAYS].tolist()
        picks = [torch.randperm(len(classes[c]), generator=generator)[: SHOTS + QUERIES] for c in chosen]
        return torch.stack([classes[c][pick] for c, pick in zip(chosen, picks, strict=True)])

    images = torch.stack([task() for _ in range(tasks)])
    return images[:, :, :SHOTS], images[:, :, SHOTS:]


def digit_classes() -> tuple[list[Tensor], list[Tensor]]:
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 8, 8)
    classes = [
        torch.rot90(images[labels == digit], turns, (1, 2)).flatten(1)
        for digit in range(10)
        for turns in range(4)
    ]
    return classes[:28], classes[28:]


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
@todist.rank_zero_only
def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    train, held_out = digit_classes()
    meta_net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, WAYS))
    optimizer = todist.Adam(meta_net.parameters(), lr=args.lr)
    generator = torch.Generator().manual_seed(args.seed)
    test_tasks = sample_tasks(held_out, args.test_tasks, torch.Generator().manual_seed(0))
    settings = (args.inner_steps, args.proximity)

    def evaluate(step: int) -> tuple[int, float]:
        with torch.no_grad():
            _, accuracy = test_after_adaptation(meta_net, *test_tasks, *settings)
        print(f"meta-step {step:3d}: held-out accuracy {accuracy:5.1%}")
        return step, float(accuracy)

    history = [evaluate(0)]
    for step in range(1, args.meta_steps + 1):
        tasks = sample_tasks(train, args.tasks, generator)
        optimizer.zero_grad()
        loss, _ = test_after_adaptation(meta_net, *tasks, *settings)
        loss.backward()
        optimizer.step()
        if step % args.eval_every == 0 or step == args.meta_steps:
            history.append(evaluate(step))
    print(f"{args.tasks} tasks a step on {todist.get_world_size()} worker(s)")
    plot(args.output, history)
    print(f"picture saved as {args.output}")


def plot(path: Path, history: list[tuple[int, float]]) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    steps, accuracies = zip(*history, strict=True)
    axes.plot(steps, [100 * value for value in accuracies], marker="o")
    axes.axhline(100 * accuracies[0], color="C1", linestyle=":", label="random weights, adapted")
    axes.axhline(100 / WAYS, color="gray", linestyle="--", label="chance")
    axes.set(xlabel="meta-step", ylabel="%", ylim=(0, 100), title="Held-out accuracy after adaptation")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--meta-steps", type=int, default=100)
    parser.add_argument("--tasks", type=int, default=16, help="in a meta-step")
    parser.add_argument("--inner-steps", type=int, default=15)
    parser.add_argument("--proximity", type=float, default=2.0, help="weight of the squared distance")
    parser.add_argument("--lr", type=float, default=5e-3, help="of the outer optimizer, Adam")
    parser.add_argument("--test-tasks", type=int, default=40)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/imaml_digits.png"))
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
