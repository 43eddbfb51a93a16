"""A small GPT that learns to learn a secret alphabet: it adapts to a text in a few steps, and predicts more of it.

    python examples/transformer_meta.py
    torchrun --nproc_per_node=2 examples/transformer_meta.py

The text ships with Python: the source files of its standard library. A task is a file in its own alphabet, in which
every character stands for another one, with four pieces of the file to adapt to and four others to test on. Initial
weights and a rate for each tensor are learned through the inner steps. The baseline is the same network, trained in the
ordinary way on as many pieces, and adapted by as many steps at the best of three rates. Both are tested on files and
alphabets that they have not seen; the numbers are bits per character.

An inner step takes a gradient of a gradient, for which attention must be computed by its formula; ``step`` does this
if you give it a function. The tasks of a meta-step are spread over the workers, and each worker sends back one gradient
of the whole network. On one worker or on many, the numbers printed are the same up to rounding.

    bits per character     before    after 3 steps
    ordinary training      6.03      5.05
    meta-trained           6.34      4.93

The meta-trained network pays a price for this: before it has seen an alphabet, it is the worse one.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import torchopt_dist as todist

LENGTH = 48
"""Characters of a piece."""

PIECES = 4
"""Of a file to adapt to; as many to be tested with."""

VOCABULARY = 97
"""Printable ASCII, the end of a line, and everything else."""


class Task(NamedTuple):
    """Pieces of a file, each of shape (PIECES, LENGTH + 1)."""

    known: Tensor
    new: Tensor


class GPT(nn.Module):
    def __init__(self, width: int = 48, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) / 10)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, text: Tensor) -> Tensor:
        """Bits a character, of pieces of shape (N, LENGTH + 1)."""
        hidden = self.characters(text[:, :-1]) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.out(hidden).flatten(0, 1), text[:, 1:].flatten()) / math.log(2)


@todist.parallelize(todist.tasks, todist.mean_reducer)
def adapted_loss(model: GPT, rates: dict[str, Tensor], task: Task, steps: int) -> Tensor:
    """Bits a character of the new pieces, after steps on the known ones."""
    adapted = todist.module_clone(model)
    inner = todist.MetaSGD(adapted, lr=rates)
    for _ in range(steps):
        inner.step(lambda: adapted(task.known))
    loss: Tensor = adapted(task.new)
    return loss


def library() -> list[Tensor]:
    """The files of the standard library that are long enough, as numbers of characters."""
    files = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        known = torch.where((text >= 32) & (text < 127), text - 31, 0)
        files.append(torch.where(text == 10, 96, known))
    return [text for text in files if len(text) > 20 * LENGTH]


def sample_tasks(files: list[Tensor], tasks: int, generator: torch.Generator) -> Task:
    def sample_task() -> Tensor:
        text = files[int(torch.randint(len(files), (), generator=generator))]
        places = torch.randperm(len(text) // (LENGTH + 1), generator=generator)[: 2 * PIECES] * (LENGTH + 1)
        alphabet = torch.randperm(VOCABULARY, generator=generator)
        return alphabet[torch.stack([text[place : place + LENGTH + 1] for place in places.tolist()])]

    pieces = torch.stack([sample_task() for _ in range(tasks)])
    return Task(pieces[:, :PIECES], pieces[:, PIECES:])


@todist.rank_zero_only
def train(args: argparse.Namespace, write: todist.typing.WriteScalars) -> None:
    files = library()
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = sample_tasks([files[i] for i in order[:30]], args.test_tasks, torch.Generator().manual_seed(1))
    files = [files[i] for i in order[30:]]

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    curve, bars = figure.subplots(1, 2, width_ratios=[1.4, 1])
    for name, inner_steps in (("ordinary training", 0), ("meta-trained", args.inner_steps)):
        torch.manual_seed(args.seed)
        generator = torch.Generator().manual_seed(args.seed)
        model = GPT()
        log_rates = {key: torch.tensor(args.inner_lr).log() for key, _ in model.named_parameters()}
        learned: list[Tensor] = [*model.parameters()]
        if inner_steps:
            learned += [rate.requires_grad_() for rate in log_rates.values()]
        optimizer = todist.Adam(learned, lr=args.lr)
        losses = []
        start = time.perf_counter()
        for step in range(args.meta_steps):
            rates = {key: rate.exp() for key, rate in log_rates.items()}
            loss: Tensor = adapted_loss(model, rates, sample_tasks(files, args.tasks, generator), inner_steps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            write(step, {f"bits a character/{name}": losses[-1]})
        seconds = time.perf_counter() - start

        def tested(
            steps: int, factor: float = 1.0, model: GPT = model, log_rates: dict[str, Tensor] = log_rates
        ) -> float:
            with torch.no_grad():
                rates = {key: factor * rate.exp() for key, rate in log_rates.items()}
                bits: Tensor = adapted_loss(model, rates, held_out, steps)
            return bits.item()

        before, after = tested(0), tested(args.inner_steps)
        if not inner_steps:
            after = min(after, tested(args.inner_steps, 1 / 3), tested(args.inner_steps, 3.0))
        print(
            f"{name:18s} new alphabets, before {before:.2f} bits, after {args.inner_steps} steps {after:.2f}"
        )
        print(f"{'':18s} {seconds:.0f} s on {todist.get_world_size()} worker(s)")
        width = max(1, len(losses) // 20)
        curve.plot(torch.tensor(losses).unfold(0, width, 1).mean(dim=1).tolist(), label=name)
        drawn = bars.bar([f"{name}\nbefore", f"{name}\nafter"], [before, after], color=["0.75", "C0"])
        bars.bar_label(drawn, fmt="%.2f")
    curve.set(xlabel="meta-steps", ylabel="bits a character in training")
    curve.legend()
    bars.set(title="new files, new alphabets", ylabel="bits a character")
    bars.tick_params(axis="x", labelsize=7)
    bars.margins(y=0.1)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=120)
    print(f"picture: {args.output}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small GPT that learns to learn a secret alphabet.")
    parser.add_argument("--meta-steps", type=int, default=70, help="outer steps (default: %(default)s)")
    parser.add_argument("--inner-steps", type=int, default=3, help="of SGD (default: %(default)s)")
    parser.add_argument("--inner-lr", type=float, default=0.1, help="that all rates begin with")
    parser.add_argument("--lr", type=float, default=3e-3, help="of the outer Adam (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=12, help="files a step (default: %(default)s)")
    parser.add_argument("--test-tasks", type=int, default=40, help="held out (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/transformer_meta.png"), help="picture to draw"
    )
    parser.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="write the curves there, too")
    return parser.parse_args()


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
def main() -> None:
    args = parse_arguments()
    with todist.scalar_writer(args.tensorboard) as write:
        train(args, write)


if __name__ == "__main__":
    main()
