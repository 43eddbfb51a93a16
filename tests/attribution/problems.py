"""Small trainings, in double precision, whose scores are known by other ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import torchopt_dist as todist
from torchopt_dist.attribution import Training

DOUBLE: Any = {"dtype": torch.float64}
EXAMPLES, TOKENS, QUERIES = 12, 3, 5


class Data:
    """Examples of a few tokens, and queries."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(EXAMPLES, TOKENS, 4, generator=generator, **DOUBLE)
        self.y = torch.randn(EXAMPLES, TOKENS, generator=generator, **DOUBLE)
        self.asked = torch.randn(QUERIES, 4, generator=generator, **DOUBLE)
        self.mask = torch.rand(EXAMPLES, TOKENS, generator=generator) > 0.3
        self.mask[:, 0] = True
        self.groups = torch.arange(EXAMPLES) % 4

    def of_tokens(self, model: Any, index: Tensor) -> Tensor:
        """A loss for each token."""
        return (model(self.x[index]).squeeze(2) - self.y[index]) ** 2

    def of_examples(self, model: Any, index: Tensor) -> Tensor:
        """A loss for each example, of its first token."""
        return self.of_tokens(model, index)[:, 0]

    def queries(self, model: Any) -> Tensor:
        """A loss for each query."""
        return (model(self.asked).squeeze(1) - 0.5) ** 2


def network(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3, **DOUBLE), *middle, nn.Tanh(), nn.Linear(3, 1, **DOUBLE))


def batches(steps: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randperm(EXAMPLES, generator=generator)[:5] for _ in range(steps)]


def adamw() -> Any:
    return todist.adamw(lr=0.05, eps=1e-3)


def training(data: Data, **options: Any) -> Training:
    loss = data.of_tokens if "mask" in options else data.of_examples
    given: dict[str, Any] = {"loss": loss, "optimizer": adamw(), "model": network(), "batches": batches()}
    return Training(**{**given, **options})


def on_workers() -> dict[str, Any]:
    """What rank 0 of a launch finds, with the other's help."""
    torch.set_num_threads(1)
    data = Data()
    of = training(data, seed=3)
    found = todist.attribute(of, data.queries)
    products = todist.attribute(of, data.queries, method="checkpoints", checkpoints=2)
    checked = todist.attribution.validate(of, data.queries, found, retrains=8, left_out=0.3)
    return {
        "scores": found.scores,
        "losses": found.query_losses,
        "products": products.scores,
        "correlations": checked.correlations["exact"],
        "retrained": checked.losses,
        "counterfactual": todist.attribution.counterfactual(of, data.queries, found, 2)["exact"],
        "smoothness": torch.tensor(todist.attribution.metasmoothness(of)),
    }


def rank_zero_on_workers() -> dict[str, Any] | None:
    """A program of two workers, of which the first asks."""
    return on_workers() if todist.get_rank() == 0 else None


def on_ranks(parallel: Any = None) -> dict[str, Any]:
    """What one process finds, or ranks that make each training together."""
    torch.set_num_threads(1)
    data, found = Data(), {}
    kinds: dict[str, dict[str, Any]] = {
        "examples": {},
        "micro-batches": {"accumulate": 2},
        "tokens": {"mask": data.mask},
        "groups": {"mask": data.mask, "groups": data.groups},
    }
    for kind, options in kinds.items():
        of = training(data, parallel=parallel, **options)
        for method in ("exact", "checkpoint"):
            scores = todist.attribute(of, data.queries, tokens=kind == "tokens", method=method).scores
            found[f"{kind}, {method}"] = scores
    of = training(data, parallel=parallel)
    chance = torch.randn(QUERIES, EXAMPLES, generator=torch.Generator().manual_seed(0))
    found["retrained"] = todist.attribution.validate(of, data.queries, chance, retrains=3, left_out=3).losses
    found["smoothness"] = torch.tensor(todist.attribution.metasmoothness(of))
    return found


def together() -> dict[str, Any]:
    """A program of ranks that make each training together; the second time each has a part of the optimizer's state."""
    parted = todist.attribute(training(Data(), parallel=todist.DataParallel(shard="state")), Data().queries)
    return {**on_ranks(todist.DataParallel()), "parted": parted.scores}


def sizes() -> set[int]:
    """Of how many examples a rank has taken the loss at a time."""
    data, found = Data(), set()

    def loss(model: Any, index: Tensor) -> Tensor:
        found.add(len(index))
        return data.of_examples(model, index)

    todist.attribute(training(data, parallel=todist.DataParallel(), loss=loss), data.queries)
    return found


def too_small() -> str:
    """What a rank is told of a batch that has not an example for each."""
    of = training(Data(), parallel=todist.DataParallel(), batches=[torch.tensor([0])])
    try:
        todist.attribute(of, Data().queries)
    except ValueError as error:
        return str(error)
    raise AssertionError
