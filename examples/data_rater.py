"""A network that rates text: what is worth training on, learned by metagradients while small GPTs train.

    torchrun --nproc_per_node=2 examples/data_rater.py     # the GPTs spread over two workers
    python examples/data_rater.py                          # one process, the same numbers up to rounding

The text is the source of Python's standard library, and most of it is spoilt: of four sources only one is clean, and
the others are the same text with a third of its characters wrong, with its characters shuffled, and as the base64
code of the bytes. Nobody tells which is which. A second network, the rater, reads a piece and says how much it is to
count. Its only teacher is the loss of a GPT on other, clean pieces after some steps of training on rated ones: a
differentiable function of the ratings, through the steps of Adam (DataRater, Calian et al. 2025,
https://arxiv.org/abs/2505.17895).

Several GPTs train at the same time, each from its own first weights, and begin anew from time to time, so that
ratings are good for all of a training. Each is a task: it goes on for some steps wherever there is a worker, and
comes back with its gradient. Then fresh GPTs are trained with all pieces counting the same, with the rater's ratings,
and on the clean pieces alone, and tested on files that nobody has seen.

    source                      clean    typos    shuffled    base64
    rating of unseen pieces     2.97     0.51       0.53       0.00

    a GPT trained on            all the same    rated    clean alone
    bits a character                3.74        3.43        3.20
"""

from __future__ import annotations

import argparse
import base64
import math
import sysconfig
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import torchopt_dist as todist

LENGTH, WIDTH, VOCABULARY = 48, 48, 97
SOURCES = ("clean", "typos", "shuffled", "base64")
OPTIMIZER = todist.adam(lr=3e-3, eps_root=1e-8)


def encoded(text: bytes) -> Tensor:
    """Printable ASCII, the end of a line, and everything else."""
    bytes_ = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    known = torch.where((bytes_ >= 32) & (bytes_ < 127), bytes_ - 31, 0)
    return torch.where(bytes_ == 10, 96, known)


class Corpus:
    """Files → pieces of every source; the same file is in all of them."""

    def __init__(self, files: list[bytes]) -> None:
        self._texts = torch.cat([encoded(text) for text in files])
        self._codes = torch.cat([encoded(base64.b64encode(text)) for text in files])

    def pieces(self, source: str, count: int, generator: torch.Generator) -> Tensor:
        """Pieces of shape (count, LENGTH + 1)."""
        text = self._codes if source == "base64" else self._texts
        starts = torch.randint(len(text) - LENGTH, (count, 1), generator=generator)
        found = text[starts + torch.arange(LENGTH + 1)]
        if source == "typos":
            wrong = torch.rand(found.shape, generator=generator) < 1 / 3
            return torch.where(wrong, torch.randint(VOCABULARY, found.shape, generator=generator), found)
        if source == "shuffled":
            return found.gather(1, torch.rand(found.shape, generator=generator).argsort(1))
        return found

    def batch(self, each: int, generator: torch.Generator) -> Tensor:
        """As many pieces of each source, in the order of ``SOURCES``."""
        return torch.cat([self.pieces(source, each, generator) for source in SOURCES])


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Parameter(torch.zeros(LENGTH, WIDTH)),
        )
        self.block = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, text: Tensor) -> Tensor:
        """Bits a character of each piece."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.block(self.characters(text[:, :-1]) + self.places, src_mask=mask, is_causal=True)
        each = F.cross_entropy(self.out(hidden).transpose(1, 2), text[:, 1:], reduction="none")
        return each.mean(1) / math.log(2)


class Rater(nn.Module):
    """A piece → a number; in a batch, the softmax of the numbers says how much each piece counts."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, 16)
        self.pairs = nn.Conv1d(16, 32, 3)
        self.out = nn.Sequential(nn.ReLU(), nn.Linear(32, 1))

    def forward(self, text: Tensor) -> Tensor:
        """Weights of mean 1."""
        seen = self.pairs(self.characters(text).transpose(1, 2)).relu().mean(2)
        return self.out(seen)[:, 0].softmax(0) * len(text)


class Window(NamedTuple):
    """What a GPT does between two steps of the rater."""

    batches: Tensor
    clean: Tensor


def go_on(member: tuple[GPT, Any, Window], rater: Rater) -> tuple[Tensor, list[Tensor], Any]:
    """Train a GPT for a window: its loss on clean pieces, connected to the rater; and where it goes on from."""
    gpt, state, window = member
    trained = todist.inner_loop(
        lambda model, batch: (rater(batch) * model(batch)).mean(),
        OPTIMIZER,
        gpt,
        window.batches,
        meta=rater,
        state=state,
    )
    loss: Tensor = trained.params(window.clean).mean()
    ends = todist.pytree.map_tensors(torch.detach, ([*trained.params.parameters()], trained.state))
    return loss, *ends


def learn(corpus: Corpus, args: argparse.Namespace) -> tuple[Rater, list[float]]:
    """The rater, and the loss on clean pieces after each window."""
    generator = torch.Generator().manual_seed(args.seed)
    torch.manual_seed(args.seed)
    rater = Rater()
    optimizer = todist.Adam(rater.parameters(), lr=args.lr)
    gpts, states, losses = [GPT() for _ in range(args.gpts)], [None] * args.gpts, []
    for number in range(args.windows):
        for place in range(args.gpts):
            if number % args.life == place * args.life // args.gpts:  # each begins anew at its own time
                gpts[place], states[place] = GPT(), None
        windows = [
            Window(
                torch.stack([corpus.batch(4, generator) for _ in range(args.steps)]),
                corpus.pieces("clean", 32, generator),
            )
            for _ in gpts
        ]
        done = todist.map(go_on, zip(gpts, states, windows, strict=True), args=(rater,))
        loss = torch.stack([each for each, *_ in done]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for place, (_, params, state) in enumerate(done):
            states[place] = state
            with torch.no_grad():
                for parameter, value in zip(gpts[place].parameters(), params, strict=True):
                    parameter.copy_(value)
        losses.append(loss.item())
    return rater, losses


def train(way: str, corpus: Corpus, unseen: Corpus, rater: Rater, steps: int) -> list[float]:
    """Bits a character of unseen files, on the way of a fresh GPT that is trained in one of three ways."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    gpt, found = GPT(), []
    optimizer = todist.Adam(gpt.parameters(), lr=3e-3)
    asked = unseen.pieces("clean", 128, torch.Generator().manual_seed(2))
    for number in range(steps + 1):
        if number % max(1, steps // 10) == 0:
            with torch.no_grad():
                found.append(gpt(asked).mean().item())
        batch = corpus.batch(4, generator)
        if way == "clean alone":
            batch = corpus.pieces("clean", len(batch), generator)
        with torch.no_grad():
            weights = rater(batch) if way == "rated" else torch.ones(len(batch))
        optimizer.zero_grad()
        (weights * gpt(batch)).mean().backward()
        optimizer.step()
    return found


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
@todist.rank_zero_only
def main() -> None:
    args = arguments()
    files = [path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    files = [text for text in files if len(text) > 2000]
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    unseen, corpus = (Corpus([files[i] for i in part]) for part in (order[:20], order[20:]))
    start = time.perf_counter()
    rater, losses = learn(corpus, args)
    print(
        f"{args.windows} steps of the rater in {time.perf_counter() - start:.0f} s, {todist.get_world_size()} worker(s)"
    )
    new = torch.Generator().manual_seed(3)
    with torch.no_grad():
        ratings = rater(unseen.batch(64, new)).view(len(SOURCES), -1).mean(1).tolist()
    print("\n| source | mean rating of unseen pieces |\n|---|---|")
    for source, rating in zip(SOURCES, ratings, strict=True):
        print(f"| {source} | {rating:.2f} |")
    ways = ("all the same", "rated", "clean alone")
    curves = todist.map(train, ways, args=(corpus, unseen, rater, args.test_steps))
    print(
        f"\n| a GPT trained on | bits a character of unseen files, after {args.test_steps} steps |\n|---|---|"
    )
    for way, curve in zip(ways, curves, strict=True):
        print(f"| {way} | {curve[-1]:.2f} |")
    draw(args.output, ratings, dict(zip(ways, curves, strict=True)), losses, args.test_steps)
    print(f"picture: {args.output}")


def draw(
    path: Path, ratings: list[float], curves: dict[str, list[float]], losses: list[float], steps: int
) -> None:
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    learning, rated, trained = figure.subplots(1, 3)
    learning.plot(losses, color="0.5")
    learning.set(xlabel="step of the rater", ylabel="bits a character, clean", title="While the rater learns")
    bars = rated.bar(SOURCES, ratings, color=["C0", "0.75", "0.75", "0.75"])
    rated.bar_label(bars, fmt="%.2f")
    rated.set(title="How much unseen pieces count")
    rated.margins(y=0.1)
    for way, curve in curves.items():
        trained.plot(torch.linspace(0, steps, len(curve)).tolist(), curve, label=way)
    trained.set(
        xlabel="step of a fresh GPT", ylabel="bits a character, unseen files", title="What it is worth"
    )
    trained.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--windows", type=int, default=60, help="steps of the rater (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="of a GPT in a window (default: %(default)s)")
    parser.add_argument("--gpts", type=int, default=4, help="that train at the same time")
    parser.add_argument("--life", type=int, default=20, help="windows until a GPT begins anew")
    parser.add_argument("--lr", type=float, default=3e-2, help="of the rater's Adam (default: %(default)s)")
    parser.add_argument("--test-steps", type=int, default=300, help="of the GPTs that are compared")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/data_rater.png"), help="picture to draw")
    return parser.parse_args()


if __name__ == "__main__":
    main()
