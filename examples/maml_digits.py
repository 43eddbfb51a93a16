"""Few-shot learning on handwritten digits by MAML, the tasks of a meta-step spread over the workers.

    torchrun --nproc_per_node=2 examples/maml_digits.py     # two workers
    python examples/maml_digits.py                          # one process, the same curve up to rounding

Model-Agnostic Meta-Learning (Finn et al., 2017, https://arxiv.org/abs/1703.03400) learns initial weights from which
a few gradient steps on a few labelled images learn classes never seen before. The outer loss is differentiated
through these steps, second derivatives included.

The images are scikit-learn's ``load_digits``, 8x8 pixels, with added noise (``--noise``). The noise makes a single
image hard to read, so it helps to have learned from other classes. A class is a digit in one of four rotations: 28
classes of the digits 0-6 are for meta-training, and 12 of the digits 7-9 are held out. As in the paper, batch
normalization uses the statistics of the current batch, even of the query set.

The picture has two baselines. Each is adapted to the held-out tasks by as many steps, at the best of three rates. One
starts from random weights, the other from weights that were trained in the ordinary way to tell the 28 classes apart,
on as many images as the meta-training sees.

Held-out accuracy after five steps, on 100 tasks:

    random weights       58.8 %
    ordinary training    64.5 %
    meta-trained         66.7 % after 10 meta-steps, 69.7 % after 50

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
from collections.abc import Iterable
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

HELD_OUT_SEED = 0
"""Every run is measured on the same held-out tasks, whatever its ``--seed``."""

Classes: TypeAlias = list[Tensor]
"""For each class its images, of shape (N, 1, H, W), ink 1 on paper 0."""

History: TypeAlias = list[dict[str, float]]
"""A row a meta-step, row 0 before the first; the held-out columns are there only where they were measured."""


class Task(NamedTuple):
    """One few-shot problem; a batch of them has one more dimension in front."""

    support_x: Tensor  # (ways * shots, 1, H, W)
    support_y: Tensor  # (ways * shots,)
    query_x: Tensor  # (ways * queries, 1, H, W)
    query_y: Tensor  # (ways * queries,)


class Result(NamedTuple):
    """How a task went, on its query set; 0-dimensional tensors."""

    loss: Tensor
    accuracy_before: Tensor
    accuracy_after: Tensor


# --- The inner loop: runs on the workers, one task a call ---------------------------------------------------


@todist.parallelize(partitioner=todist.tasks, reducer=todist.mean_reducer, retries=2)
def inner_loop(model: nn.Module, task: Task, inner_lr: float, inner_steps: int, device: str) -> Result:
    """Adapt a clone of the model to the support set, and test it on the query set."""
    here = worker_device(device)
    inner_model = todist.module_clone(model, by="reference", detach_buffers=True, device=here)
    task = Task(*(tensor.to(here) for tensor in task))

    with torch.no_grad():
        accuracy_before = accuracy(inner_model(task.query_x), task.query_y)
    with torch.enable_grad():  # also where the caller, who only evaluates, has no use for gradients
        inner_optimizer = todist.MetaSGD(inner_model, lr=inner_lr)
        for _ in range(inner_steps):
            inner_optimizer.step(F.cross_entropy(inner_model(task.support_x), task.support_y))
    logits = inner_model(task.query_x)
    loss = F.cross_entropy(logits, task.query_y)
    return Result(loss.cpu(), accuracy_before.cpu(), accuracy(logits, task.query_y).cpu())


def worker_device(device: str) -> torch.device:
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", todist.get_local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(dim=-1) == labels).float().mean()


# --- The outer loop: runs on rank 0 -------------------------------------------------------------------------


@todist.rank_zero_only
def train(
    args: argparse.Namespace, parser: argparse.ArgumentParser, write: todist.typing.WriteScalars
) -> None:
    train_classes, test_classes = (
        omniglot_classes(args.omniglot, parser) if args.omniglot else digit_classes(args.noise)
    )
    check_arguments(args, parser, train_classes, test_classes)

    torch.manual_seed(args.seed)
    model = conv_net(image_size=train_classes[0].shape[-1], ways=args.ways)
    outer_optimizer = todist.Adam(model.parameters(), lr=args.outer_lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(outer_optimizer, T_max=args.meta_steps)

    settings = (args.inner_lr, args.inner_steps, args.device)
    shape = (args.ways, args.shots, args.queries)
    held_out = torch.Generator().manual_seed(HELD_OUT_SEED)
    test_tasks = sample_tasks(test_classes, args.test_tasks, *shape, held_out)
    generator = torch.Generator().manual_seed(args.seed)

    def baseline(weights: nn.Module) -> float:
        """The held-out accuracy from other weights than meta-trained ones, at the best of three rates."""
        with torch.no_grad():
            rates = (args.inner_lr / 3, args.inner_lr, args.inner_lr * 3)
            return max(
                inner_loop(weights, test_tasks, rate, *settings[1:]).accuracy_after.item() for rate in rates
            )

    def evaluate(step: int) -> dict[str, float]:
        with torch.no_grad():
            result: Result = inner_loop(model, test_tasks, *settings)
        tqdm.write(
            f"meta-step {step:4d}: held-out accuracy {result.accuracy_before:5.1%} before adaptation, "
            f"{result.accuracy_after:5.1%} after"
        )
        return measured("held_out", result)

    baselines = {}
    if args.baselines:
        baselines["random weights, adapted"] = baseline(model)
        baselines["ordinary training, adapted"] = baseline(trained_in_the_ordinary_way(train_classes, args))
    for name, reached in baselines.items():
        tqdm.write(f"{name}: held-out {reached:5.1%}")
    start = time.perf_counter()
    if args.chaos:
        threading.Thread(target=kill_workers, args=(args.chaos, worker_processes()), daemon=True).start()
    history: History = []
    state: dict[str, Any] = {
        "model": model,
        "optimizer": outer_optimizer,
        "scheduler": scheduler,
        "generator": generator,
        "history": history,
    }
    done, checkpointer = 0, None
    if args.checkpoint:
        checkpointer = todist.Checkpointer(args.checkpoint, every=args.eval_every)
        done, state = checkpointer.restore(state)
        history = state["history"]
    if not history:
        history.append({"meta_step": 0, **evaluate(0)})
    steps = range(done + 1, args.meta_steps + 1)
    progress = tqdm(steps, desc="meta-training", unit="step", disable=None)
    for step in progress:
        tasks = sample_tasks(train_classes, args.tasks, *shape, generator)
        result: Result = inner_loop(model, tasks, *settings)
        outer_optimizer.zero_grad()
        result.loss.backward()
        outer_optimizer.step()
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
    plot_curve(args.output, history, baselines, test_tasks, args)
    print(f"curve saved as {args.output}")
    if args.csv:
        save_curve(args.csv, history)


def worker_processes() -> dict[int, int]:
    """The process of each rank but 0."""
    return {rank: todist.remote_call(os.getpid, rank) for rank in range(1, todist.get_world_size())}


def kill_workers(seconds: float, processes: dict[int, int]) -> None:
    """Kill one of the other ranks every ``seconds``, and leave one."""
    chance = random.Random(0)  # the generators of the training stay as they are
    while len(processes) > 1:
        time.sleep(seconds)
        rank = chance.choice(list(processes))
        os.kill(processes.pop(rank), signal.SIGKILL)
        tqdm.write(f"killed worker {rank}")


def conv_net(image_size: int, ways: int, channels: int = 32) -> nn.Sequential:
    """Convolutions that halve the image until one pixel is left, and a linear classifier."""
    layers: list[nn.Module] = []
    in_channels = 1
    for _ in range(int(math.log2(image_size))):
        layers += [
            nn.Conv2d(
                in_channels, channels, kernel_size=3, padding=1, bias=False
            ),  # the normalization has one
            nn.BatchNorm2d(channels, track_running_stats=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        in_channels = channels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, ways))


def trained_in_the_ordinary_way(classes: Classes, args: argparse.Namespace) -> nn.Sequential:
    """The same network, trained to tell all classes apart, and then given a new last layer."""
    generator = torch.Generator().manual_seed(args.seed)
    images = torch.cat(classes)
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor([len(part) for part in classes]))
    network = conv_net(images.shape[-1], len(classes))
    optimizer = torch.optim.Adam(network.parameters(), lr=args.outer_lr)
    batch = args.tasks * args.ways * (args.shots + args.queries)
    for _ in range(args.meta_steps):
        chosen = torch.randint(len(images), (batch,), generator=generator)
        loss = F.cross_entropy(network(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network[-1] = conv_net(images.shape[-1], args.ways)[-1]
    return network


# --- Tasks --------------------------------------------------------------------------------------------------


def sample_tasks(
    classes: Classes, tasks: int, ways: int, shots: int, queries: int, generator: torch.Generator
) -> Task:
    """Draw a batch of tasks: some of the classes, numbered anew, and disjoint support and query images of each."""

    def sample_task() -> Task:
        chosen = torch.randperm(len(classes), generator=generator)[:ways].tolist()
        images = torch.stack(
            [
                images[torch.randperm(len(images), generator=generator)[: shots + queries]]
                for images in (classes[index] for index in chosen)
            ]
        )
        labels = torch.arange(ways)
        return Task(
            support_x=images[:, :shots].flatten(end_dim=1),
            support_y=labels.repeat_interleave(shots),
            query_x=images[:, shots:].flatten(end_dim=1),
            query_y=labels.repeat_interleave(queries),
        )

    return Task(*map(torch.stack, zip(*(sample_task() for _ in range(tasks)), strict=True)))


def rotations(images: Tensor) -> Classes:
    return [torch.rot90(images, turns, dims=(-2, -1)) for turns in range(4)]


def digit_classes(noise: float = 0.0) -> tuple[Classes, Classes]:
    """The classes to meta-train on, and those held out; each image has noise of its own, the same in every run."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    draw = torch.Generator().manual_seed(0)

    def noisy(part: Tensor) -> Tensor:
        return part + noise * torch.randn(part.shape, generator=draw)

    def classes(chosen: Iterable[int]) -> Classes:
        return [noisy(rotated) for digit in chosen for rotated in rotations(images[digits == digit])]

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


# --- The curve ----------------------------------------------------------------------------------------------


def measured(tasks: str, result: Result) -> dict[str, float]:
    return {f"{tasks}_{name}": value.item() for name, value in result._asdict().items()}


def save_curve(path: Path, history: History) -> None:
    with path.open("w", newline="") as file:
        columns = dict.fromkeys(name for row in history for name in row)
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(history)


def plot_curve(
    path: Path, history: History, baselines: dict[str, float], test_tasks: Task, args: argparse.Namespace
) -> None:
    """Draw accuracy against meta-steps, beside the support set of a held-out task."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    curve, example = figure.subplots(1, 2, width_ratios=[2, 1])

    for column, label, style in (
        ("train_accuracy_after", "meta-training tasks, after adaptation", {"color": "0.8"}),
        ("held_out_accuracy_after", "held-out tasks, after adaptation", {"color": "C0", "marker": "o"}),
        ("held_out_accuracy_before", "held-out tasks, before adaptation", {"color": "C1", "marker": "o"}),
    ):
        rows = [row for row in history if column in row]
        curve.plot(
            [row["meta_step"] for row in rows],
            [row[column] for row in rows],
            label=label,
            **style,
            clip_on=False,
        )
    for (name, reached), dashes in zip(baselines.items(), ("--", "-."), strict=False):
        curve.axhline(reached, color="C2", linestyle=dashes, label=name)
    curve.axhline(1 / args.ways, color="0.5", linestyle=":", label="chance")
    curve.set(xlabel="meta-steps", ylabel="query accuracy", xlim=(0, args.meta_steps), ylim=(0, 1))
    curve.set_title(f"{args.ways}-way {args.shots}-shot MAML, {args.inner_steps} inner steps")
    curve.yaxis.set_major_formatter("{x:.0%}")
    curve.grid(alpha=0.3)
    curve.legend(loc="upper left", ncols=2, fontsize=8)

    framed = F.pad(test_tasks.support_x[0], (1, 1, 1, 1), value=0.3)
    support = framed.unflatten(0, (args.ways, args.shots)).squeeze(2)
    height = support.shape[-1]
    example.imshow(
        support.transpose(1, 2).flatten(2).flatten(0, 1).numpy(), cmap="gray_r", vmin=-0.5, vmax=1.5
    )
    example.set_yticks([height * (way + 0.5) - 0.5 for way in range(args.ways)], range(args.ways))
    example.set(title="support set of a held-out task", ylabel="label", xticks=[])

    figure.savefig(path, format="png", dpi=150)


# --- The command line ---------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="MAML on handwritten digits, the tasks of a meta-step spread over the workers of torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    count, rate = positive_int, positive_float
    parser.add_argument("--ways", type=count, default=5, help="classes in a task")
    parser.add_argument("--shots", type=count, default=5, help="support images a class")
    parser.add_argument("--queries", type=count, default=15, help="query images a class")
    parser.add_argument("--tasks", type=count, default=16, help="tasks in a meta-step")
    parser.add_argument("--meta-steps", type=count, default=60, help="steps of the outer optimizer")
    parser.add_argument("--inner-steps", type=count, default=5, help="steps of the inner optimizer")
    parser.add_argument(
        "--inner-lr", type=rate, default=0.1, help="learning rate of the inner optimizer, SGD"
    )
    parser.add_argument(
        "--outer-lr", type=rate, default=3e-3, help="learning rate of the outer optimizer, Adam"
    )
    parser.add_argument(
        "--noise", type=noise_level, default=0.5, help="standard deviation on the digits, whose ink is 1"
    )
    parser.add_argument("--test-tasks", type=count, default=100, help="held-out tasks")
    parser.add_argument(
        "--eval-every", type=count, default=10, help="meta-steps between held-out evaluations"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the training tasks")
    parser.add_argument(
        "--device",
        type=device_here,
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="of the inner loops",
    )
    parser.add_argument(
        "--omniglot", type=Path, metavar="DIR", help="Omniglot's folder, instead of the digits"
    )
    parser.add_argument(
        "--output", type=Path, metavar="PNG", default=Path("outputs/maml_digits.png"), help="the curve"
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="folder to save the state in, and to go on from"
    )
    parser.add_argument(
        "--chaos", type=rate, metavar="SECONDS", help="start four workers, and kill one of them so often"
    )
    parser.add_argument(
        "--no-baselines", dest="baselines", action="store_false", help="leave the two baselines out"
    )
    parser.add_argument("--csv", type=Path, metavar="CSV", help="write the measured values, too")
    parser.add_argument(
        "--tensorboard", type=Path, metavar="FOLDER", help="write the measured values there, too"
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


def device_here(text: str) -> str:
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("there is no CUDA device here")
    return text


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
