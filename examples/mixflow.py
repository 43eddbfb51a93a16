"""Memory and time of a meta-gradient through a transformer's training, as its depth and its number of steps grow.

    python examples/mixflow.py
    torchrun --nproc_per_node=2 examples/mixflow.py

A small transformer is trained by Adam to continue sequences. Its loss on other sequences is differentiated through the
training with respect to a weight for each training sequence. Autograd's way is to record all steps, and the graph of
each inner gradient. MixFlow-MG (Kemaev et al., 2025, https://arxiv.org/abs/2505.00793) goes back one step at a time,
with what is computed again by block, and takes each step's products with second derivatives by forward over reverse
mode. The paper reports more than 10 times less memory and up to 25 % less time.

Here it is one word: ``adjoint=Replayed()`` for ``Recorded()``. With ``blocks="auto"`` each step's graph is that of one
layer at a time, as in the paper. Derivatives are by reverse over reverse mode: what saves memory is what is computed
again. All ways give the same gradient, and the program checks that.

Every measurement is a task, and the tasks are spread over the workers. Memory is the most that tensors took at a time,
and the same on any worker; time is CPU time of one thread.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from adjoints import PeakMemory
from matplotlib.figure import Figure
from torch import Tensor, nn

import torchopt_dist as todist

TOKENS, LENGTH, WIDTH, HEADS, SEQUENCES = 16, 64, 32, 2, 8
WAYS: dict[str, Any] = {
    "Recorded()": todist.Recorded(),
    "Replayed()": todist.Replayed(),
    'Replayed(blocks="auto")': todist.Replayed(blocks="auto"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        wide = 4 * WIDTH
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.heads(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def transformer(layers: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(layers)]
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH), *blocks, nn.Linear(WIDTH, TOKENS))


def token_losses(model: Any, sequences: Tensor) -> Tensor:
    """The mean loss of each sequence's tokens."""
    logits = model(sequences[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), sequences[:, 1:], reduction="none").mean(-1)


class Case(NamedTuple):
    layers: int
    steps: int
    way: str


class Cost(NamedTuple):
    mebibytes: float
    seconds: float
    gradient: Tensor


def meta_gradient(case: Case) -> Tensor:
    """Of the loss after training, for the weights of the training sequences."""
    model, draw = transformer(case.layers), torch.Generator().manual_seed(1)
    train, test = torch.randint(TOKENS, (2, SEQUENCES, LENGTH + 1), generator=draw)
    weights = torch.ones(SEQUENCES, requires_grad=True)

    def loss(model: Any) -> Tensor:
        return (weights * token_losses(model, train)).mean()

    adam = todist.adam(lr=1e-3, eps=1e-4)
    adapted = todist.inner_loop(loss, adam, model, case.steps, meta=weights, adjoint=WAYS[case.way])
    return torch.autograd.grad(token_losses(adapted.params, test).mean(), weights)[0]


def measured(case: Case) -> Cost:
    """The least time of three, and then memory, which is counted at every operation and so takes time."""
    meta_gradient(case._replace(layers=1, steps=1))  # what torch loads is not counted
    seconds = []
    for _ in range(3):
        start = time.thread_time()
        gradient = meta_gradient(case)
        seconds.append(time.thread_time() - start)
    with PeakMemory() as memory:
        meta_gradient(case)
    return Cost(memory.peak / 2**20, min(seconds), gradient)


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
@todist.rank_zero_only
def main(args: argparse.Namespace) -> None:
    deeper = [(layers, args.steps[1]) for layers in args.layers]
    longer = [(args.layers[1], steps) for steps in args.steps]
    sizes = list(dict.fromkeys(deeper + longer))
    cases = [Case(*size, way) for way in WAYS for size in sizes]
    cases = cases[::2] + cases[1::2]  # as much work for the first half as for the second
    costs = dict(zip(cases, todist.map(measured, cases), strict=True))

    names = " | ".join(f"`{way}`" for way in WAYS)
    print(f"| layers, steps | gradient's length | {names} | less memory | time, of recording's |")
    print("|---" * (len(WAYS) + 4) + "|")
    for size in sizes:
        row = [costs[Case(*size, way)] for way in WAYS]
        exact = row[0].gradient
        for cost in row:
            torch.testing.assert_close(cost.gradient, exact, rtol=1e-3, atol=1e-3 * exact.abs().max().item())
        shown = [f"{cost.mebibytes:.1f} MiB, {cost.seconds:.2f} s" for cost in row]
        saved = [row[0].mebibytes / cost.mebibytes for cost in row[1:]]
        longer_by = [cost.seconds / row[0].seconds for cost in row[1:]]
        ratios = f"{saved[0]:.1f} and {saved[1]:.1f} times | {longer_by[0]:.2f} and {longer_by[1]:.2f}"
        print(f"| {size[0]}, {size[1]} | {exact.norm():.2e} | {' | '.join(shown)} | {ratios} |")
    print(f"| the paper | |{' |' * len(WAYS)} more than 10 times | down to 0.75 |")
    draw(costs, deeper, longer, args)


def draw(
    costs: dict[Case, Cost],
    deeper: list[tuple[int, int]],
    longer: list[tuple[int, int]],
    args: argparse.Namespace,
) -> None:
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    depth, length, times = figure.subplots(1, 3)
    for place, way in enumerate(WAYS):
        style: dict[str, Any] = {"marker": "o", "label": way}
        depth.plot(args.layers, [costs[Case(*size, way)].mebibytes for size in deeper], **style)
        length.plot(args.steps, [costs[Case(*size, way)].mebibytes for size in longer], **style)
        ratios = [
            costs[Case(*size, way)].seconds / costs[Case(*size, "Recorded()")].seconds for size in longer
        ]
        times.bar([step + 0.2 * place - 0.3 for step in range(len(longer))], ratios, 0.2)
    depth.set(xlabel="layers", title=f"peak MiB, {args.steps[1]} steps", yscale="log", xscale="log")
    length.set(xlabel="steps", title=f"peak MiB, {args.layers[1]} layers", yscale="log", xscale="log")
    times.set(xlabel="steps", title="time, of recording's", xticks=range(len(longer)))
    times.set_xticklabels(args.steps)
    depth.legend(fontsize=7)
    for axes, ticks in ((depth, args.layers), (length, args.steps)):
        axes.set_xticks(ticks, ticks, minor=False)
        axes.set_xticks([], minor=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=120)
    print(f"picture: {args.output}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    count: dict[str, Any] = {"type": int, "nargs": 3}
    parser.add_argument("--layers", **count, default=[1, 3, 9], help="the second also as the steps grow")
    parser.add_argument("--steps", **count, default=[2, 6, 18], help="the second also as the layers grow")
    parser.add_argument("--output", type=Path, default=Path("outputs/mixflow.png"), help="picture to draw")
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
