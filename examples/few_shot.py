"""Few-shot learning by MAML: letters of scripts never seen, recognized after one example.

    torchrun --nproc_per_node=2 examples/few_shot.py                   # two workers: `make demo`
    python examples/few_shot.py                                        # one process

MAML (Finn et al., 2017, https://arxiv.org/abs/1703.03400) learns initial weights from which one gradient step on a
letter of each of five classes tells further letters apart. The outer loss is differentiated through this step, second
derivatives included. The workers share the tasks, and each computes its own at once.

Training sees Latin, Greek and Cyrillic letters of ``todist.data.glyphs()``; the tests are Armenian, Georgian, Canadian
syllabics and others, at the rate that was best on Arabic and Hebrew. Network and settings are those of the paper for
Omniglot, at half the width. First-order MAML and ordinary training, which tells all classes apart and gets a new last
layer, see as many letters. ``--minutes 30`` is the long version, and ``--checkpoint DIR`` lets it go on after a crash.
"""

import argparse
from pathlib import Path
from timeit import default_timer, repeat

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

import torchopt_dist as todist
from torchopt_dist.data import GlyphSplit, Task, TaskSampler

WAYS, QUERIES, WIDTH = 5, 5, 32
MAML, FIRST_ORDER, ORDINARY = "MAML", "first-order MAML", "ordinary training"
Numbers = dict[str, Tensor]


def adapt(model: nn.Module, task: Task, rate: float, steps: int, first_order: bool = False) -> Numbers:
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
def classify(model: nn.Module, letters: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(letters), labels)


def conv4(classes: int) -> nn.Sequential:
    torch.manual_seed(0)  # all begin with the same weights
    layers: list[nn.Module] = []
    for channels in (1, WIDTH, WIDTH, WIDTH):  # 28 pixels a side become 14, 7, 4, 2
        convolution = nn.Conv2d(channels, WIDTH, 3, stride=2, padding=1)
        layers += [convolution, nn.BatchNorm2d(WIDTH, track_running_stats=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * WIDTH, classes))


def train(args: argparse.Namespace, letters: GlyphSplit, models: dict[str, nn.Sequential]) -> None:
    """Make a step of each method at once; before that, measure what the workers gain."""
    sampler = TaskSampler(letters.train, WAYS, 1, QUERIES)

    def loss(name: str, tasks: Task, workers: list[int] | None = None) -> Tensor:
        if name == ORDINARY:
            some = letters.train[torch.randint(len(letters.train), (args.tasks * WAYS * (1 + QUERIES),))]
            return classify(models[name], *some)
        by_task = todist.dim_partitioner(exclusive=True, keepdim=False, workers=workers)
        mean = todist.parallelize(by_task, todist.mean_reducer, vectorize=True)(adapt)
        return mean(models[name], tasks, 0.4, 1, name == FIRST_ORDER)["loss"]

    def seconds(name: str, workers: list[int] | None = None) -> float:
        tasks = sampler.batch(range(args.tasks))
        return min(repeat(lambda: loss(name, tasks, workers).backward(), number=1, repeat=5))

    if (n := todist.get_world_size()) > 1:
        alone, all_ = seconds(MAML, [0]), seconds(MAML)
        gain = f"{all_:.3f} s on {n}: {alone / all_:.2f} times as fast"
        print(f"a meta-step takes {alone:.3f} s on one worker, {gain}", flush=True)
    steps = args.steps or max(1, round(60 * args.minutes / sum(map(seconds, models))))
    optimizer = torch.optim.Adam([p for model in models.values() for p in model.parameters()], lr=3e-3)
    schedule = CosineAnnealingLR(optimizer, steps)
    state = {"models": models, "optimizer": optimizer, "schedule": schedule}
    checkpointer = todist.Checkpointer(args.checkpoint, every=20) if args.checkpoint else None
    done = checkpointer.restore(state).step if checkpointer else 0
    start, steps = default_timer(), schedule.T_max  # of a training that goes on, as many as were planned
    with todist.scalar_writer(args.tensorboard) as write:
        for step in (bar := tqdm(range(done, steps), desc="training", unit="step", disable=None)):
            optimizer.zero_grad()
            tasks = sampler.batch(range(step * args.tasks, (step + 1) * args.tasks))
            losses = {name: loss(name, tasks) for name in models}
            torch.stack([*losses.values()]).sum().backward()
            optimizer.step()
            schedule.step()
            bar.set_postfix({name: f"{one.item():.2f}" for name, one in losses.items()})
            write(step, losses)
            if checkpointer:
                checkpointer.save(step + 1, state)
    print(f"{steps - done} steps of {args.tasks} tasks by each method took {default_timer() - start:.0f} s")


@torch.no_grad()
def test(args: argparse.Namespace, letters: GlyphSplit, models: dict[str, nn.Sequential]) -> None:
    """Print and draw how many letters of the test scripts each method recognizes, at the best of three rates."""
    run = todist.parallelize(todist.tasks, todist.stack_reducer, vectorize=True, chunk_size=50)(adapt)
    axes = (figure := Figure(layout="constrained")).add_subplot(xlabel="letters recognized, %", xlim=(0, 100))
    for shots in (1, 5):
        validation, tests = (TaskSampler(part, WAYS, shots, QUERIES) for part in letters[1:])
        some, tasks = validation.batch(range(min(args.test_tasks, 100))), tests.batch(range(args.test_tasks))
        nearest = torch.cdist(tasks.query.flatten(2), tasks.support.flatten(2)).argmin(-1)
        right = tasks.support_labels.gather(1, nearest) == tasks.query_labels
        accuracies = {"nearest neighbours": right.float().mean(1)}
        for name, model in models.items():
            rate = max((0.1, 0.4, 1.0), key=lambda rate: run(model, some, rate, 3)["right"].mean().item())
            accuracies[name] = run(model, tasks, rate, 3)["right"]
        for name, each in accuracies.items():
            mean, apart = 100 * each.mean().item(), 196 * each.std().item() / len(each) ** 0.5
            print(f"{WAYS}-way {shots}-shot, {name:18} {mean:5.1f} ± {apart:.1f} %")
            axes.barh(f"{name}, {shots}-shot", mean, xerr=apart, color=f"C{shots // 5}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output)
    print(f"picture saved as {args.output}")


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))  # a worker a core
@todist.rank_zero_only
def main(args: argparse.Namespace) -> None:
    parts = zip(GlyphSplit._fields, args.scripts or (), strict=False)
    letters = todist.data.glyphs(scripts={part: [script] for part, script in parts} or None)
    print(f"train on {letters.train}\n test on {letters.test}")
    models = {MAML: conv4(WAYS), FIRST_ORDER: conv4(WAYS), ORDINARY: conv4(len(letters.train.names))}
    train(args, letters, models)
    models["no training"] = conv4(WAYS)
    models[ORDINARY][-1] = conv4(WAYS)[-1]
    test(args, letters, models)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.1, help="of training, by three methods together")
    parser.add_argument("--steps", type=int, help="of each method, in place of minutes")
    parser.add_argument("--tasks", type=int, default=32, help="in a step")
    parser.add_argument("--test-tasks", type=int, default=600)
    parser.add_argument("--scripts", nargs=3, help="one for each part: LATIN HEBREW ARMENIAN")
    parser.add_argument("--checkpoint", type=Path, help="folder to save the state in, and to go on from")
    parser.add_argument("--tensorboard", type=Path, help="folder to write curves into")
    parser.add_argument("--output", type=Path, default=Path("outputs/few_shot.png"))
    main(parser.parse_args())
