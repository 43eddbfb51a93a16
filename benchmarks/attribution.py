"""What do exact scores of training examples cost? Time and memory, of an ordinary training and of recording all steps.

A small GPT of four layers is trained by AdamW on batches of sequences, and asked which of them made its losses on
others. Each case is a process of its own, on one thread, in turn, and the median of some counts. An ordinary training
has no weights and no way back. Memory is the process's peak above what it had before, with all that the C library
keeps. The gradients of all ways are compared.

    python benchmarks/attribution.py            # by hand, on a quiet machine; prints the table
"""

from __future__ import annotations

import argparse
import json
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measured import in_turn, measured
from page import ratio, table
from replaying import Block
from torch import Tensor, nn

import torchopt_dist as todist
from torchopt_dist.attribution import Training

VOCABULARY, WIDTH, LAYERS = 512, 128, 4


class Shape(NamedTuple):
    """Of the training."""

    sequences: int
    tokens: int
    steps: int


SHAPES = {
    "16 sequences of 128 tokens, 8 steps": Shape(16, 128, 8),
    "8 sequences of 64 tokens, 30 steps": Shape(8, 64, 30),
}


class Way(NamedTuple):
    """How scores are made; ``queries`` 0 is an ordinary training."""

    queries: int
    adjoint: todist.adjoints.Adjoint = todist.Replayed()
    accumulate: int = 1
    together: int = 8


WAYS = {
    "an ordinary training": Way(0),
    "one query, `Recorded()`": Way(1, todist.Recorded()),
    "one query, `Replayed()`": Way(1),
    "one query, `Replayed()`, `accumulate=4`": Way(1, accumulate=4),
    "24 queries, 8 together": Way(24),
    "24 queries, 24 together": Way(24, together=24),
}
TRAINING, FIRST = "an ordinary training", "one query, `Recorded()`"


class GPT(nn.Module):
    """Of `replaying`'s blocks, without a mask, for tokens at random."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of each sequence."""
        logits = self.last(self.norm(self.blocks(self.tokens(tokens[:, :-1]))))
        return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def scores(shape: Shape, way: Way, *, small: bool = False) -> list[Tensor]:
    """What a way gives of the first query, a sequence; the others are sequences, too."""
    generator = torch.Generator().manual_seed(0)
    count = shape.sequences * shape.steps
    text = torch.randint(VOCABULARY, (count + 24, shape.tokens + 1), generator=generator)
    torch.manual_seed(0)
    model = GPT(16, 1) if small else GPT()
    training = Training(
        lambda model, index: model(text[index]),
        todist.adamw(lr=1e-3, eps_root=1e-8),
        model,
        list(torch.arange(count).split(shape.sequences)),
        accumulate=way.accumulate,
    )
    if not way.queries:
        with torch.no_grad():
            trained = training.run(training.weights(), todist.FirstOrder()).params
        return [trained.last.weight.detach()]

    def queries(model: nn.Module) -> Tensor:
        losses: Tensor = model(text[count : count + way.queries])
        return losses

    found = todist.attribute(training, queries, adjoint=way.adjoint, together=way.together)
    return [found.scores[0]]


def case(name: str, way: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    chosen = WAYS[way]
    return measured(lambda: scores(SHAPES[name], chosen), lambda: scores(Shape(4, 4, 2), chosen, small=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="how often each is measured")
    parser.add_argument("--case", nargs=2, metavar=("SHAPE", "WAY"), help="measure this one, in this process")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(*options.case)))
        return
    rows: dict[str, list[str]] = {way: [way] for way in WAYS}
    for name in SHAPES:
        found = in_turn(__file__, name, [*WAYS], options.rounds)
        seconds = {way: one["seconds"] for way, one in found.items()}
        for way in WAYS:
            if WAYS[way].queries:
                torch.testing.assert_close(found[way]["norms"], found[FIRST]["norms"], rtol=1e-2, atol=0)
            rows[way].append(
                f"{seconds[way]:.1f} s, {seconds[way] / seconds[TRAINING]:.1f}, {found[way]['bytes'] / 1e6:,.0f} MB"
            )
        if name == next(iter(SHAPES)):
            for way, peer in (("one query, `Replayed()`", TRAINING), ("24 queries, 8 together", FIRST)):
                answer = f"{seconds[way] / seconds[peer]:.1f} of the time"
                ratio(f"exact scores of the examples of 8 steps of a GPT, {way}", peer, answer)
    table(["", *SHAPES], [*rows.values()])
    print("Seconds, trainings, and memory.")


if __name__ == "__main__":
    main()
