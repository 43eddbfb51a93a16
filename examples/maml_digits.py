"""Few-shot learning on handwritten digits by MAML, the tasks of a meta-step spread over the workers.

    torchrun --nproc_per_node=2 examples/maml_digits.py     # two workers
    python examples/maml_digits.py                          # one process, the same curve up to rounding

Model-Agnostic Meta-Learning (Finn et al., 2017, https://arxiv.org/abs/1703.03400) learns initial weights from which
a few gradient steps on a few labelled images learn classes never seen before. The outer loss is differentiated
through these steps, second derivatives included. A worker adapts to all its tasks at once (``vectorize=True``).

The images are scikit-learn's ``load_digits``, 8x8 pixels, with added noise (``--noise``), which makes a single image
hard to read. A class is a digit in one of four rotations: 28 classes of the digits 0-6 are for meta-training, and 12 of
the digits 7-9 are held out. As in the paper, batch normalization uses the statistics of the current batch.

The baselines are adapted to the held-out tasks by as many steps, at the best of three rates. One starts from random
weights, the other from weights trained in the ordinary way to tell the 28 classes apart, on as many images as the
meta-training sees. On several workers the program times a meta-step on one worker and on all, and prints the ratio.

Held-out accuracy after five steps, on 100 tasks:

    random weights       52.1 %
    ordinary training    57.5 %; 54 to 59 % with other batches and rates
    meta-trained         64.3 % after 10 meta-steps, 67.8 % after 60

``--checkpoint DIR`` saves the state every ``--eval-every`` meta-steps. If you start the program again, by hand or by
``torchrun --max-restarts=3``, it resumes from there and ends with the same curve.

``python examples/maml_digits.py --chaos 3`` launches four workers and kills one of them every three seconds, until two
are left. The tasks of the lost workers run on the others, and the curve is that of four workers, bit for bit.

``--omniglot DIR`` uses Omniglot (https://github.com/brendenlake/omniglot) instead, unpacked to
``DIR/images_background`` (meta-train) and ``DIR/images_evaluation`` (held out), each ``Alphabet/characterNN/*.png``.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

import torchopt_dist as todist
from torchopt_dist.data import Task, TaskSampler

Classes: TypeAlias = list[Tensor]
"""For each class its images, of shape (N, 1, H, W), ink 1 on paper 0."""

History: TypeAlias = list[dict[str, float]]
"""A row a meta-step, row 0 before the first; the held-out columns are there only where they were measured."""


class Result(NamedTuple):
    """How a task went, on its query set; 0-dimensional tensors."""

    loss: Tensor
    accuracy_before: Tensor
    accuracy_after: Tensor


# --- The inner loop: runs on the workers, on one task -------------------------------------------------------


def adapt(model: nn.Module, task: Task, lr: float, steps: int) -> Result:
    """Adapt a clone of the model to the support set, and test it on the query set."""
    adapted = todist.module_clone(model, by="reference", detach_buffers=True)
    with torch.no_grad():
        before = accuracy(adapted(task.query), task.query_labels)
    with torch.enable_grad():  # also where the caller, who only evaluates, has no use for gradients
        optimizer = todist.MetaSGD(adapted, lr=lr)
        for _ in range(steps):
            optimizer.step(F.cross_entropy(adapted(task.support), task.support_labels))
    logits = adapted(task.query)
    loss = F.cross_entropy(logits, task.query_labels)
    return Result(loss, before, accuracy(logits, task.query_labels))


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(dim=-1) == labels).float().mean()


def spread(workers: list[int] | None = None) -> Any:
    """The mean result of tasks that are spread over these workers, or over all."""
    tasks = todist.dim_partitioner(0, exclusive=True, keepdim=False, workers=workers)
    return todist.parallelize(tasks, todist.mean_reducer, vectorize=True, retries=2, device="auto")(adapt)


on_all = spread()


# --- The outer loop: runs on rank 0 -------------------------------------------------------------------------


@todist.rank_zero_only
def train(args: argparse.Namespace, write: todist.typing.WriteScalars) -> None:
    classes, held_out_classes = (
        omniglot_classes(args.omniglot) if args.omniglot else digit_classes(args.noise)
    )
    if args.double:
        classes, held_out_classes = ([part.double() for part in each] for each in (classes, held_out_classes))
    torch.manual_seed(args.seed)
    model = conv_net(classes[0], args.ways)
    optimizer = todist.Adam(model.parameters(), lr=args.outer_lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.meta_steps)
    sampler = tasks_of(classes, args, args.seed)
    held_out = tasks_of(held_out_classes, args, seed=0).batch(range(args.test_tasks))
    baselines = measured_baselines(model, classes, held_out, args) if args.baselines else {}
    if args.baselines and todist.get_world_size() > 1:
        compare_times(model, sampler.batch(range(args.tasks)), args)

    start = time.perf_counter()
    if args.chaos:
        kill_workers(args.chaos)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "history": []}
    done, checkpointer = 0, None
    if args.checkpoint:
        checkpointer = todist.Checkpointer(args.checkpoint, every=args.eval_every)
        done, state = checkpointer.restore(state)
    history: History = state["history"]
    if not history:
        history.append({"meta_step": 0, **evaluated(model, held_out, 0, args)})
    steps = range(done + 1, args.meta_steps + 1)
    for step in tqdm(steps, desc="meta-training", unit="step", disable=None):
        tasks = sampler.batch(range((step - 1) * args.tasks, step * args.tasks))
        result: Result = on_all(model, tasks, args.inner_lr, args.inner_steps)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        scheduler.step()

        row = {f"train_{name}": value.item() for name, value in result._asdict().items()}
        if step % args.eval_every == 0 or step == args.meta_steps:
            row |= evaluated(model, held_out, step, args)
        write(step, row)
        history.append({"meta_step": step, **row})
        if checkpointer:
            checkpointer.save(step, state)

    print(
        f"{len(steps)} meta-steps of {args.tasks} tasks on {todist.get_world_size()} worker(s) "
        f"took {time.perf_counter() - start:.0f} s"
    )
    plot_curve(args.output, history, baselines, held_out, args)
    print(f"curve saved as {args.output}")
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(name for row in history for name in row), restval="")
            writer.writeheader()
            writer.writerows(history)


def evaluated(model: nn.Module, held_out: Task, step: int, args: argparse.Namespace) -> dict[str, float]:
    """Held-out loss and accuracies after some meta-steps."""
    with torch.no_grad():
        result: Result = on_all(model, held_out, args.inner_lr, args.inner_steps)
    before, after = result.accuracy_before, result.accuracy_after
    tqdm.write(f"meta-step {step:4d}: held-out accuracy {before:5.1%} before adaptation, {after:5.1%} after")
    return {f"held_out_{name}": value.item() for name, value in result._asdict().items()}


def conv_net(images: Tensor, ways: int, channels: int = 16) -> nn.Sequential:
    """Convolutions that halve such images until one pixel is left, and a linear classifier."""
    layers: list[nn.Module] = []
    for depth in range(int(math.log2(images.shape[-1]))):
        convolution = nn.Conv2d(channels if depth else 1, channels, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(channels, track_running_stats=False)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, ways)).to(images.dtype)


# --- What it is compared with --------------------------------------------------------------------------------


def measured_baselines(
    model: nn.Module, classes: Classes, held_out: Task, args: argparse.Namespace
) -> dict[str, float]:
    """Held-out accuracies, each at the best of three rates."""
    found = {}
    ordinary = trained_in_the_ordinary_way(classes, args)
    for name, weights in (("random weights, adapted", model), ("ordinary training, adapted", ordinary)):
        with torch.no_grad():
            rates = (args.inner_lr / 3, args.inner_lr, args.inner_lr * 3)
            results = [on_all(weights, held_out, rate, args.inner_steps) for rate in rates]
        found[name] = max(result.accuracy_after.item() for result in results)
        tqdm.write(f"{name}: held-out {found[name]:5.1%}")
    return found


def trained_in_the_ordinary_way(classes: Classes, args: argparse.Namespace) -> nn.Sequential:
    """The same network, trained to tell all classes apart, and then given a new last layer."""
    generator = torch.Generator().manual_seed(args.seed)
    images, labels = labelled(classes)
    network = conv_net(images, len(classes))
    optimizer = torch.optim.Adam(network.parameters(), lr=args.outer_lr)
    batch = args.tasks * args.ways * (args.shots + args.queries)
    for _ in range(args.meta_steps):
        chosen = torch.randint(len(images), (batch,), generator=generator)
        loss = F.cross_entropy(network(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network[-1] = conv_net(images, args.ways)[-1]
    return network


def compare_times(model: nn.Module, tasks: Task, args: argparse.Namespace) -> None:
    """Print how long a meta-step takes on one worker and on all, the fastest of three."""
    seconds = []
    for on in (spread([0]), on_all):
        took = []
        for _ in range(3):
            start = time.perf_counter()
            loss = on(model, tasks, args.inner_lr, args.inner_steps).loss
            torch.autograd.grad(loss, list(model.parameters()))
            took.append(time.perf_counter() - start)
        seconds.append(min(took))
    alone, together = seconds
    tqdm.write(
        f"a meta-step takes {alone:.2f} s on one worker and {together:.2f} s on {todist.get_world_size()}: "
        f"{alone / together:.1f} times as fast"
    )


def kill_workers(seconds: float) -> None:
    """From now on, kill one of the other ranks every ``seconds``, and leave one."""
    processes = {rank: todist.remote_call(os.getpid, rank) for rank in range(1, todist.get_world_size())}
    chance = random.Random(0)  # the generators of the training stay as they are

    def kill() -> None:
        while len(processes) > 1:
            time.sleep(seconds)
            rank = chance.choice(list(processes))
            os.kill(processes.pop(rank), signal.SIGKILL)
            tqdm.write(f"killed worker {rank}")

    threading.Thread(target=kill, daemon=True).start()


# --- Images -------------------------------------------------------------------------------------------------


def labelled(classes: Classes) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor([len(images) for images in classes])
    return torch.cat(classes), torch.arange(len(classes)).repeat_interleave(sizes)


def tasks_of(classes: Classes, args: argparse.Namespace, seed: int) -> TaskSampler:
    return TaskSampler(labelled(classes), args.ways, args.shots, args.queries, seed=seed)


def rotations(images: Tensor) -> Classes:
    return [torch.rot90(images, turns, dims=(-2, -1)) for turns in range(4)]


def digit_classes(noise: float = 0.0) -> tuple[Classes, Classes]:
    """The classes to meta-train on, and those held out; each image has noise of its own, the same in every run."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    draw = torch.Generator().manual_seed(0)

    def classes(chosen: range) -> Classes:
        turned = [part for digit in chosen for part in rotations(images[digits == digit])]
        return [part + noise * torch.randn(part.shape, generator=draw) for part in turned]

    return classes(range(7)), classes(range(7, 10))


def omniglot_classes(folder: Path) -> tuple[Classes, Classes]:
    """The classes to meta-train on, and those held out."""

    def read(path: Path) -> Tensor:
        with Image.open(path) as image:
            paper = np.asarray(image.convert("L").resize((28, 28)), dtype=np.float32) / 255
        return torch.from_numpy(1 - paper).unsqueeze(0)

    def classes(part: str) -> Classes:
        characters = sorted({path.parent for path in (folder / part).glob("*/*/*.png")})
        if not characters:
            raise FileNotFoundError(f"--omniglot: no Alphabet/characterNN/*.png in {folder / part}")
        return [
            rotated
            for character in tqdm(characters, desc=f"reading {part}", disable=None)
            for rotated in rotations(torch.stack([read(path) for path in sorted(character.glob("*.png"))]))
        ]

    return classes("images_background"), classes("images_evaluation")


def plot_curve(
    path: Path, history: History, baselines: dict[str, float], held_out: Task, args: argparse.Namespace
) -> None:
    """Draw accuracy against meta-steps, beside the support set of a held-out task."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    curve, example = figure.subplots(1, 2, width_ratios=[2, 1])
    for column, label, style in (
        ("train_accuracy_after", "meta-training tasks, after adaptation", {"color": "0.8"}),
        ("held_out_accuracy_after", "held-out tasks, after adaptation", {"color": "C0", "marker": "o"}),
        ("held_out_accuracy_before", "held-out tasks, before adaptation", {"color": "C1", "marker": "o"}),
    ):
        points = [(row["meta_step"], row[column]) for row in history if column in row]
        curve.plot(*zip(*points, strict=True), label=label, **style, clip_on=False)
    for (name, reached), dashes in zip(baselines.items(), ("--", "-."), strict=False):
        curve.axhline(reached, color="C2", linestyle=dashes, label=name)
    curve.axhline(1 / args.ways, color="0.5", linestyle=":", label="chance")
    curve.set(xlabel="meta-steps", ylabel="query accuracy", xlim=(0, args.meta_steps), ylim=(0, 1))
    curve.set_title(f"{args.ways}-way {args.shots}-shot MAML, {args.inner_steps} inner steps")
    curve.yaxis.set_major_formatter("{x:.0%}")
    curve.grid(alpha=0.3)
    curve.legend(loc="lower right", ncols=2, fontsize=8)
    rows = F.pad(held_out.support[0, :, 0], (1, 1, 1, 1), value=0.3).unflatten(0, (args.ways, args.shots))
    height = rows.shape[-1]
    picture = rows.transpose(1, 2).flatten(2).flatten(0, 1).numpy()
    example.imshow(picture, cmap="gray_r", vmin=-0.5, vmax=1.5)
    example.set_yticks([height * (way + 0.5) - 0.5 for way in range(args.ways)], range(args.ways))
    example.set(title="support set of a held-out task", ylabel="label", xticks=[])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


# --- The command line ---------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="MAML on handwritten digits, the tasks of a meta-step spread over the workers of torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--ways", type=int, default=5, help="classes in a task")
    add("--shots", type=int, default=5, help="support images a class")
    add("--queries", type=int, default=15, help="query images a class")
    add("--tasks", type=int, default=32, help="tasks in a meta-step")
    add("--meta-steps", type=int, default=60, help="steps of the outer optimizer")
    add("--inner-steps", type=int, default=5, help="steps of the inner optimizer")
    add("--inner-lr", type=float, default=0.1, help="learning rate of the inner optimizer, SGD")
    add("--outer-lr", type=float, default=6e-3, help="learning rate of the outer optimizer, Adam")
    add("--noise", type=float, default=0.5, help="standard deviation on the digits, whose ink is 1")
    add("--test-tasks", type=int, default=100, help="held-out tasks")
    add("--eval-every", type=int, default=10, help="meta-steps between held-out evaluations")
    add("--seed", type=int, default=0, help="of the initial weights and the training tasks")
    add(
        "--double",
        action="store_true",
        help="in double precision, where rounding grows to no visible difference",
    )
    add("--no-baselines", dest="baselines", action="store_false", help="leave baselines and timing out")
    add("--omniglot", type=Path, help="Omniglot's folder, instead of the digits")
    add("--output", type=Path, default=Path("outputs/maml_digits.png"), help="the curve, a picture")
    add("--csv", type=Path, help="write the measured values, too")
    add("--tensorboard", type=Path, help="folder to write the measured values into, too")
    add("--checkpoint", type=Path, help="folder to save the state in, and to go on from")
    add("--chaos", type=float, help="launch four workers, and kill one of them after so many seconds each")
    return parser


@todist.auto_init_rpc(lambda: torch.set_num_threads(1), on_loss="continue")  # a worker a core
def main(args: argparse.Namespace) -> None:
    with todist.scalar_writer(args.tensorboard) as write:
        train(args, write)


if __name__ == "__main__":
    args = build_parser().parse_args()
    if args.chaos:
        todist.launch(main, args=(args,), nproc_per_host=4, on_loss="continue")
    else:
        main(args)
