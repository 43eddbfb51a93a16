"""Few-shot learning by MAML: letters of scripts never seen, recognized after one example.

    torchrun --nproc_per_node=2 examples/few_shot.py                   # two workers: `make demo`
    python examples/few_shot.py                                        # one process
    torchrun --nproc_per_node=2 examples/few_shot.py --minutes 30      # the long version

MAML (Finn et al., 2017, https://arxiv.org/abs/1703.03400) learns initial weights from which one gradient step on a
letter of each of five classes tells further letters apart. The outer loss is differentiated through this step, second
derivatives included. The workers share the tasks, and each computes its own at once.

Training sees Latin, Greek and Cyrillic letters of ``todist.data.glyphs()``; the tests are Armenian, Georgian, Canadian
syllabics and others, with a rate of adaptation that is chosen on Arabic and Hebrew. Network and settings are those of
the paper's Omniglot experiment, at half its width. First-order MAML and ordinary training, which tells all classes
apart and gets a new last layer, see as many letters. With ``--checkpoint DIR``, the program goes on after a crash.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

import torchopt_dist as todist
from torchopt_dist.data import GlyphSplit, Task, TaskSampler

WAYS, QUERIES, SHOTS, RATES = 5, 5, (1, 5), (0.1, 0.4, 1.0)
MAML, FIRST_ORDER, ORDINARY, SCRATCH = "MAML", "first-order MAML", "ordinary training", "no training"
Models: TypeAlias = dict[str, nn.Sequential]


def adapt(
    model: nn.Module, task: Task, rate: float, steps: int, first_order: bool = False
) -> dict[str, Tensor]:
    """One task, on some worker: adapt a copy of the model to the support letters, test it on the query letters."""
    model = todist.module_clone(model)
    with torch.enable_grad():  # in a test, too, which differentiates nothing else
        optimizer = todist.MetaSGD(model, lr=rate)
        for _ in range(steps):
            loss = F.cross_entropy(model(task.support), task.support_labels)
            optimizer.step(loss, first_order=first_order)
    logits = model(task.query)
    right = (logits.argmax(-1) == task.query_labels).float().mean()
    return {"loss": F.cross_entropy(logits, task.query_labels), "right": right}


@todist.parallelize(reducer=todist.mean_reducer)  # each worker gets a part of the batch
def ordinary_loss(model: nn.Module, letters: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(letters), labels)


def conv4(classes: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (1, width, width, width):  # 28 pixels a side become 14, 7, 4, 2
        convolution = nn.Conv2d(channels, width, 3, stride=2, padding=1)
        layers += [convolution, nn.BatchNorm2d(width, track_running_stats=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width, classes))


def seconds(loss: Callable[[], Tensor]) -> float:
    """How long a loss and its gradient take, the fastest of five."""
    took = []
    for _ in range(5):
        start = time.perf_counter()
        loss().backward()
        took.append(time.perf_counter() - start)
    return min(took)


def train(args: argparse.Namespace, letters: GlyphSplit, models: Models) -> None:
    """Make a step of each method in turn; before that, measure what the workers gain."""
    sampler, everywhere = TaskSampler(letters.train, WAYS, 1, QUERIES), todist.tasks
    here = todist.dim_partitioner(0, exclusive=True, keepdim=False, workers=[0])

    def meta_loss(tasks: Task, name: str, workers: Any) -> Tensor:
        mean = todist.parallelize(workers, todist.mean_reducer, vectorize=True)(adapt)
        return mean(models[name], tasks, 0.4, 1, name == FIRST_ORDER)["loss"]

    def losses(step: int) -> dict[str, Tensor]:
        tasks = sampler.batch(range(step * args.tasks, (step + 1) * args.tasks))
        some = torch.randint(len(letters.train), (args.tasks * WAYS * (1 + QUERIES),))
        ordinary = ordinary_loss(models[ORDINARY], *letters.train[some])
        return {ORDINARY: ordinary} | {
            name: meta_loss(tasks, name, everywhere) for name in (MAML, FIRST_ORDER)
        }

    if (workers := todist.get_world_size()) > 1:
        tasks = sampler.batch(range(args.tasks))
        one, every = (seconds(partial(meta_loss, tasks, MAML, where)) for where in (here, everywhere))
        gain = f"{one / every:.2f} times as fast"
        print(f"a meta-step takes {one:.3f} s on one worker, {every:.3f} s on {workers}: {gain}", flush=True)
    of_all = seconds(lambda: torch.stack([*losses(0).values()]).sum())
    steps = args.steps or max(1, round(60 * args.minutes / of_all))
    trained = (MAML, FIRST_ORDER, ORDINARY)
    optimizers = {name: torch.optim.Adam(models[name].parameters(), lr=3e-3) for name in trained}
    rates = {name: CosineAnnealingLR(optimizer, steps) for name, optimizer in optimizers.items()}
    state: dict[str, Any] = {"models": models, "optimizers": optimizers, "rates": rates, "steps": steps}
    checkpointer = todist.Checkpointer(args.checkpoint, every=20) if args.checkpoint else None
    done, state = checkpointer.restore(state) if checkpointer else (0, state)
    steps = state["steps"]  # as long as it was planned at first
    start = time.perf_counter()
    with todist.scalar_writer(args.tensorboard) as write:
        for step in (bar := tqdm(range(done, steps), desc="training", unit="step", disable=None)):
            for name, loss in (found := losses(step)).items():
                optimizers[name].zero_grad()
                loss.backward()
                optimizers[name].step()
                rates[name].step()
            bar.set_postfix({name: f"{loss.item():.2f}" for name, loss in found.items()})
            write(step, found)
            if checkpointer:
                checkpointer.save(step + 1, state)
    took = time.perf_counter() - start
    print(f"{steps - done} steps of {args.tasks} tasks by each method took {took:.0f} s", flush=True)


def test(sampler: TaskSampler, count: int, models: Models, rate: dict[str, float]) -> dict[str, Tensor]:
    """Method → the accuracy of each task."""
    run = todist.parallelize(todist.tasks, todist.stack_reducer, vectorize=True)(adapt)
    found: dict[str, list[Tensor]] = {}
    for start in range(0, count, 100):
        tasks = sampler.batch(range(start, min(start + 100, count)))
        nearest = torch.cdist(tasks.query.flatten(2), tasks.support.flatten(2)).argmin(-1)
        right = tasks.support_labels.gather(1, nearest) == tasks.query_labels
        found.setdefault("nearest neighbours", []).append(right.float().mean(1))
        for name, model in models.items():
            found.setdefault(name, []).append(run(model, tasks, rate[name], 3)["right"])
    return {name: torch.cat(parts) for name, parts in found.items()}


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))  # a worker a core
@todist.rank_zero_only
def main(args: argparse.Namespace) -> None:
    parts = zip(("train", "validation", "test"), args.scripts or (), strict=False)
    letters = todist.data.glyphs(scripts={part: [script] for part, script in parts} or None)
    print(f"train on {letters.train}\n test on {letters.test}")
    torch.manual_seed(0)
    models = {name: conv4(WAYS, args.width) for name in (MAML, FIRST_ORDER, SCRATCH)}
    for model in models.values():  # all begin with the same weights
        model.load_state_dict(models[MAML].state_dict())
    models[ORDINARY] = conv4(len(letters.train.names), args.width)
    train(args, letters, models)
    models[ORDINARY][-1] = nn.Linear(4 * args.width, WAYS)
    axes = (figure := Figure(figsize=(8, 3), layout="constrained")).subplots()
    for place, shots in enumerate(SHOTS):
        with torch.no_grad():
            some, tests = (TaskSampler(part, WAYS, shots, QUERIES) for part in letters[1:])
            tried = [test(some, min(args.test_tasks, 100), models, dict.fromkeys(models, r)) for r in RATES]
            best = {
                name: max((t[name].mean(), r) for t, r in zip(tried, RATES, strict=True))[1]
                for name in models
            }
            table = test(tests, args.test_tasks, models, best)
        for row, (name, right) in enumerate(table.items()):
            mean, apart = 100 * right.mean().item(), 196 * right.std().item() / len(right) ** 0.5
            print(f"{WAYS}-way {shots}-shot, {name:18} {mean:5.1f} ± {apart:.1f} %")
            label = "" if row else f"{shots}-shot"
            axes.barh(row + 0.4 * place, mean, 0.4, xerr=apart, color=f"C{place}", label=label)
    axes.legend(loc="lower right")
    axes.set_yticks([row + 0.2 for row in range(len(table))], list(table))
    axes.set(title="Scripts never seen: 1 example of each class, and 5", xlabel="right, %", xlim=(0, 100))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output)
    print(f"picture saved as {args.output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.4, help="of training, by three methods together")
    parser.add_argument("--steps", type=int, help="of each method, in place of minutes")
    parser.add_argument("--tasks", type=int, default=32, help="in a step")
    parser.add_argument("--test-tasks", type=int, default=600)
    parser.add_argument("--width", type=int, default=32, help="of the network")
    parser.add_argument("--scripts", nargs=3, help="one for each part: LATIN HEBREW ARMENIAN")
    parser.add_argument("--checkpoint", type=Path, help="folder to save the state in, and to go on from")
    parser.add_argument("--tensorboard", type=Path, help="folder to write curves into")
    parser.add_argument("--output", type=Path, default=Path("outputs/few_shot.png"))
    main(parser.parse_args())
