"""Which training examples made a network's mistakes: exact scores beside products of gradients, checked by retraining.

    torchrun --nproc_per_node=2 examples/attribution.py     # queries and trainings on two workers
    python examples/attribution.py                          # one process, the same numbers up to rounding

A small network learns 256 of scikit-learn's digits by 64 steps of AdamW; 20 of them have a wrong label. For 24 other
digits the program asks how their losses would change without each of the training examples. The exact score is the
derivative of such a loss with respect to the example's weight, through all steps. It is compared with the usual product
of gradients of the trained network, with their sum over five networks on the way, and with random numbers.

The check is to train again without some examples, chosen at random, and to see whether the scores have put the new
losses into the right order. The rank correlation, the linear datamodeling score, is 0.98 for exact scores with 10 % of
the examples left out, and 0.60 for the products. Of the 20 examples with a wrong label, 14 are among the 20 that harm
most by exact scores, and 6 by the products.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import torchopt_dist as todist
from torchopt_dist.attribution import (
    Attribution,
    Training,
    attribute,
    counterfactual,
    metasmoothness,
    validate,
)


class Digits:
    """Training examples, some with a wrong label, and other digits whose losses are asked about."""

    def __init__(self, examples: int, wrong: int, queries: int) -> None:
        pixels, digits = load_digits(return_X_y=True)
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
        x, y = torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(digits)[order]
        self.x, self.y = x[:examples], y[:examples].clone()
        self.asked_x, self.asked_y = x[examples:][:queries], y[examples:][:queries]
        self.wrong = torch.randperm(examples, generator=torch.Generator().manual_seed(5))[:wrong]
        self.y[self.wrong] = (self.y[self.wrong] + 1) % 10
        self.names = [f"#{number}, a {label}" for number, label in enumerate(self.y.tolist())]

    def loss(self, model: nn.Module, index: Tensor) -> Tensor:
        """Of each of some examples."""
        return F.cross_entropy(model(self.x[index]), self.y[index], reduction="none")

    def queries(self, model: nn.Module) -> Tensor:
        """The losses that are asked about."""
        return F.cross_entropy(model(self.asked_x), self.asked_y, reduction="none")


def training_of(digits: Digits, epochs: int, accumulate: int) -> Training:
    """AdamW with a little `eps_root`, so that the training is a smooth function of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    generator = torch.Generator().manual_seed(2)
    batches = [
        batch for _ in range(epochs) for batch in torch.randperm(len(digits.x), generator=generator).split(32)
    ]
    return Training(
        digits.loss,
        todist.adamw(lr=3e-3, eps_root=1e-6),
        model,
        batches,
        names=digits.names,
        accumulate=accumulate,
    )


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
@todist.rank_zero_only
def main() -> None:
    args = arguments()
    digits = Digits(args.examples, args.wrong, args.queries)
    training = training_of(digits, args.epochs, args.accumulate)
    found: dict[str, Attribution | Tensor] = {
        "exact": attribute(training, digits.queries),
        "checkpoint": attribute(training, digits.queries, method="checkpoint"),
        "checkpoints": attribute(training, digits.queries, method="checkpoints"),
        "random": torch.randn(args.queries, args.examples, generator=torch.Generator().manual_seed(9)),
    }
    exact = found["exact"]
    assert isinstance(exact, Attribution)
    print(f"{len(training.batches)} steps, {args.queries} queries, {todist.get_world_size()} worker(s)")
    print(exact.table(k=2, queries=range(min(4, args.queries))))
    print(f"metasmoothness {metasmoothness(training):.2f}")
    wrong = {digits.names[number] for number in digits.wrong.tolist()}
    print("\n| method | 10 % left out | 50 % left out | without the 5 that help | wrong labels found |")
    print("|---|---|---|---|---|")
    parts = [
        validate(training, digits.queries, found, left_out=part, retrains=args.retrains).means
        for part in (0.1, 0.5)
    ]
    grown = counterfactual(training, digits.queries, {n: t for n, t in found.items() if n != "random"}, 5)
    for name, scores in found.items():
        table = scores.per_example if isinstance(scores, Attribution) else scores
        harmful = {
            digits.names[place] for place in table.mean(0).argsort(descending=True)[: len(wrong)].tolist()
        }
        cells = [f"{means[name]:.3f}" for means in parts]
        print(
            f"| {name} | {' | '.join(cells)} | {grown[name].mean():+.4f} | {len(harmful & wrong)} of {len(wrong)} |"
        )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    exact.plot(args.output)
    exact.save(args.output.with_suffix(".safetensors"))
    print(f"picture: {args.output}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--examples", type=int, default=256, help="to train on (default: %(default)s)")
    parser.add_argument("--wrong", type=int, default=20, help="of these with a wrong label")
    parser.add_argument("--queries", type=int, default=24, help="digits that are asked about")
    parser.add_argument("--epochs", type=int, default=8, help="of the training (default: %(default)s)")
    parser.add_argument("--retrains", type=int, default=48, help="trainings for each check")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/attribution.png"), help="picture to draw"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
