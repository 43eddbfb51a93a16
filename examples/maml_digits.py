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
    ordinary training    58.6 %
    meta-trained         63.3 % after 20 meta-steps, 67.9 % after 100

``--checkpoint DIR`` saves the state every ``--eval-every`` meta-steps. If you start the program again, by hand or by
``torchrun --max-restarts=3``, it resumes from there and ends with the same curve.

``python examples/maml_digits.py --chaos 3`` starts four workers and kills one of them every three seconds, until two
are left. The tasks of the lost workers run on the others, and the curve is that of four workers, bit for bit.
(torchrun ends all workers of a machine when one is killed, so the program starts these workers itself.)

``--omniglot DIR`` uses Omniglot (https://github.com/brendenlake/omniglot) instead, unpacked to
``DIR/images_background`` (meta-train) and ``DIR/images_evaluation`` (held out), each ``Alphabet/characterNN/*.png``.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import setproctitle
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


def spread(workers: list[int] | None = None, retries: int = 0) -> Any:
    """The mean result of tasks that are spread over these workers, or over all."""
    tasks = todist.dim_partitioner(0, exclusive=True, keepdim=False, workers=workers)
    return todist.parallelize(tasks, todist.mean_reducer, vectorize=True, retries=retries, device="auto")(
        adapt
    )


on_all = spread(retries=2)


def seconds_a_step(on: Any, model: nn.Module, tasks: Task, *settings: float) -> float:
    """Of the fastest of three meta-steps."""
    took = []
    for _ in range(3):
        start = time.perf_counter()
        torch.autograd.grad(on(model, tasks, *settings).loss, list(model.parameters()))
        took.append(time.perf_counter() - start)
    return min(took)


# --- The outer loop: runs on rank 0 -------------------------------------------------------------------------


@todist.rank_zero_only
def train(
    args: argparse.Namespace, parser: argparse.ArgumentParser, write: todist.typing.WriteScalars
) -> None:
    train_classes, test_classes = (
        omniglot_classes(args.omniglot, parser) if args.omniglot else digit_classes(args.noise)
    )
    check_arguments(args, parser, train_classes, test_classes)
    if args.double:
        train_classes, test_classes = (
            [part.double() for part in each] for each in (train_classes, test_classes)
        )
    torch.manual_seed(args.seed)
    model = conv_net(train_classes[0], args.ways)
    optimizer = todist.Adam(model.parameters(), lr=args.outer_lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.meta_steps)
    settings = (args.inner_lr, args.inner_steps)
    training_tasks = sampler(train_classes, args, args.seed)
    held_out = sampler(test_classes, args, seed=0).batch(range(args.test_tasks))  # whatever the run's seed

    def adapted(weights: nn.Module, lr: float = args.inner_lr) -> Result:
        with torch.no_grad():
            return on_all(weights, held_out, lr, args.inner_steps)

    def evaluate(step: int) -> dict[str, float]:
        result = adapted(model)
        tqdm.write(
            f"meta-step {step:4d}: held-out accuracy {result.accuracy_before:5.1%} before adaptation, "
            f"{result.accuracy_after:5.1%} after"
        )
        return measured("held_out", result)

    baselines: dict[str, float] = {}
    if args.baselines:
        ordinary = trained_in_the_ordinary_way(train_classes, args)
        for name, weights in (("random weights", model), ("ordinary training", ordinary)):
            rates = (args.inner_lr / 3, args.inner_lr, args.inner_lr * 3)
            reached = max(adapted(weights, rate).accuracy_after.item() for rate in rates)
            baselines[f"{name}, adapted"] = reached
            tqdm.write(f"{name}, adapted: held-out {reached:5.1%}")
        if (workers := todist.get_world_size()) > 1:
            tasks = training_tasks.batch(range(args.tasks))
            alone, together = (seconds_a_step(on, model, tasks, *settings) for on in (spread([0]), on_all))
            tqdm.write(
                f"a meta-step takes {alone:.2f} s on one worker and {together:.2f} s on {workers}: "
                f"{alone / together:.1f} times as fast"
            )
    start = time.perf_counter()
    if args.chaos:
        processes = {rank: todist.remote_call(os.getpid, rank) for rank in range(1, todist.get_world_size())}
        threading.Thread(target=kill_workers, args=(args.chaos, processes), daemon=True).start()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "history": []}
    done, checkpointer = 0, None
    if args.checkpoint:
        checkpointer = todist.Checkpointer(args.checkpoint, every=args.eval_every)
        done, state = checkpointer.restore(state)
    history: History = state["history"]
    if not history:
        history.append({"meta_step": 0, **evaluate(0)})
    steps = range(done + 1, args.meta_steps + 1)
    progress = tqdm(steps, desc="meta-training", unit="step", disable=None)
    for step in progress:
        tasks = training_tasks.batch(range((step - 1) * args.tasks, step * args.tasks))
        result: Result = on_all(model, tasks, *settings)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        scheduler.step()

        history.append({"meta_step": step, **measured("train", result)})
        progress.set_postfix(loss=f"{result.loss:.3f}", accuracy=f"{result.accuracy_after:.1%}")
        if step % args.eval_every == 0 or step == args.meta_steps:
            history[-1] |= evaluate(step)
        write(step, {name: value for name, value in history[-1].items() if name != "meta_step"})
        if checkpointer:
            checkpointer.save(step, state)

    print(
        f"{len(steps)} meta-steps of {args.tasks} tasks on {todist.get_world_size()} worker(s) "
        f"took {time.perf_counter() - start:.0f} s"
    )
    plot_curve(args.output, history, baselines, held_out, args)
    print(f"curve saved as {args.output}")
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(name for row in history for name in row), restval="")
            writer.writeheader()
            writer.writerows(history)


def measured(tasks: str, result: Result) -> dict[str, float]:
    return {f"{tasks}_{name}": value.item() for name, value in result._asdict().items()}


def kill_workers(seconds: float, processes: dict[int, int]) -> None:
    """Kill one of the other ranks every ``seconds``, and leave one."""
    chance = random.Random(0)  # the generators of the training stay as they are
    while len(processes) > 1:
        time.sleep(seconds)
        rank = chance.choice(list(processes))
        os.kill(processes.pop(rank), signal.SIGKILL)
        tqdm.write(f"killed worker {rank}")


def conv_net(images: Tensor, ways: int, channels: int = 16) -> nn.Sequential:
    """Convolutions that halve such images until one pixel is left, and a linear classifier."""
    layers: list[nn.Module] = []
    for depth in range(int(math.log2(images.shape[-1]))):
        convolution = nn.Conv2d(channels if depth else 1, channels, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(channels, track_running_stats=False)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, ways)).to(images.dtype)


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


# --- Images -------------------------------------------------------------------------------------------------


def labelled(classes: Classes) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor([len(images) for images in classes])
    return torch.cat(classes), torch.arange(len(classes)).repeat_interleave(sizes)


def sampler(classes: Classes, args: argparse.Namespace, seed: int) -> TaskSampler:
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


def omniglot_classes(folder: Path, parser: argparse.ArgumentParser) -> tuple[Classes, Classes]:
    """The classes to meta-train on, and those held out."""

    def read(path: Path) -> Tensor:
        with Image.open(path) as image:
            paper = np.asarray(image.convert("L").resize((28, 28)), dtype=np.float32) / 255
        return torch.from_numpy(1 - paper).unsqueeze(0)

    def classes(part: str) -> Classes:
        characters = sorted({path.parent for path in (folder / part).glob("*/*/*.png")})
        if not characters:
            parser.error(f"argument --omniglot: no Alphabet/characterNN/*.png in {folder / part}")
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
    figure.savefig(path, format="png", dpi=150)


# --- The command line ---------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="MAML on handwritten digits, the tasks of a meta-step spread over the workers of torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options: tuple[tuple[str, Any, Any, str], ...] = (
        ("ways", positive_int, 5, "classes in a task"),
        ("shots", positive_int, 5, "support images a class"),
        ("queries", positive_int, 15, "query images a class"),
        ("tasks", positive_int, 16, "tasks in a meta-step"),
        ("meta-steps", positive_int, 100, "steps of the outer optimizer"),
        ("inner-steps", positive_int, 5, "steps of the inner optimizer"),
        ("inner-lr", positive_float, 0.1, "learning rate of the inner optimizer, SGD"),
        ("outer-lr", positive_float, 3e-3, "learning rate of the outer optimizer, Adam"),
        ("noise", noise_level, 0.5, "standard deviation on the digits, whose ink is 1"),
        ("test-tasks", positive_int, 100, "held-out tasks"),
        ("eval-every", positive_int, 20, "meta-steps between held-out evaluations"),
        ("seed", int, 0, "of the initial weights and the training tasks"),
        ("omniglot", Path, None, "Omniglot's folder, instead of the digits"),
        ("output", Path, Path("outputs/maml_digits.png"), "the curve, a PNG"),
        ("checkpoint", Path, None, "folder to save the state in, and to go on from"),
        (
            "chaos",
            positive_float,
            None,
            "start four workers, and kill one of them after so many seconds each",
        ),
        ("csv", Path, None, "write the measured values, too"),
        ("tensorboard", Path, None, "folder to write the measured values into, too"),
    )
    for name, kind, default, explained in options:
        parser.add_argument(f"--{name}", type=kind, default=default, help=explained)
    parser.add_argument(
        "--double",
        action="store_true",
        help="in double precision, where rounding grows to no visible difference",
    )
    parser.add_argument(
        "--no-baselines",
        dest="baselines",
        action="store_false",
        help="leave the baselines and the timing out",
    )
    return parser


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")


def noise_level(text: str) -> float:
    return 0.0 if text == "0" else positive_float(text)


def check_arguments(
    args: argparse.Namespace, parser: argparse.ArgumentParser, train_classes: Classes, test_classes: Classes
) -> None:
    classes = min(len(train_classes), len(test_classes))
    if args.ways > classes:
        parser.error(f"argument --ways: must be at most {classes}, the number of classes, got {args.ways}")
    images = min(len(images) for images in train_classes + test_classes)
    if args.shots + args.queries > images:
        parser.error(
            f"argument --shots, --queries: their sum must be at most {images}, the images of a class, "
            f"got {args.shots} + {args.queries}"
        )
    if args.chaos and "TORCHELASTIC_RUN_ID" in os.environ:
        parser.error("argument --chaos: torchrun ends all workers when one is killed; start it by python")
    for name in ("output", "csv"):
        path: Path | None = vars(args)[name]
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        except OSError as error:
            parser.error(f"argument --{name}: {error}")


def worker_init_fn() -> None:
    setproctitle.setproctitle(f"maml_digits: worker {todist.get_rank()} of {todist.get_world_size()}")
    torch.set_num_threads(1)  # a worker a core


def start_workers(count: int) -> None:
    """Start the same program as ranks 1 and on; this process is rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for rank in reversed(range(count)):
        os.environ.update(
            RANK=f"{rank}", WORLD_SIZE=f"{count}", MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}"
        )
        if rank:
            subprocess.Popen([sys.executable, *sys.argv])


@todist.auto_init_rpc(worker_init_fn, on_loss="continue")
def main(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    with todist.scalar_writer(args.tensorboard) as write:
        train(args, parser, write)


if __name__ == "__main__":
    parser = build_parser()
    args = parser.parse_args()
    if args.chaos and "RANK" not in os.environ:
        start_workers(4)
    main(args, parser)
