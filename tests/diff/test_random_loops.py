"""Random inner loops have the same gradients by every exact adjoint, in a loop over tasks and in ``vmap``.

``make fuzz`` runs more of them. ``TODIST_FUZZ_SEED=<seed>`` runs the loops from this seed on, and ``TODIST_FUZZ_LOOPS``
says how many.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchopt_dist as todist
from torchopt_dist.core import programs

MORE = os.environ.get("TODIST_FUZZ_LOOPS")
LOOPS = [int(MORE)] if MORE else [8, pytest.param(15, marks=pytest.mark.nightly)]
SEED = int(os.environ.get("TODIST_FUZZ_SEED") or (random.randrange(10**9) if MORE else 0))
D = torch.float64
TASKS, ROWS = 2, 5

# Adam divides a gradient that is rounding only by `eps`, so an usual one would make large numbers of it.
OPTIMIZERS: list[Callable[[Tensor], Any]] = [
    lambda lr: todist.sgd(lr=lr),
    lambda lr: todist.sgd(lr=lr, momentum=0.9, nesterov=True),
    lambda lr: todist.sgd(lr=0.1, momentum=0.8, weight_decay=lr),
    lambda lr: todist.adam(lr=lr, eps=0.01),
    lambda lr: todist.adam(lr=0.05, betas=(0.8, 0.9), eps=0.01, amsgrad=True),
    lambda lr: todist.adamw(lr=0.05, weight_decay=lr, eps=0.01),
    lambda lr: todist.rmsprop(lr=lr, centered=True, momentum=0.5, eps=0.01),
    lambda lr: todist.adan(lr=lr, eps=0.01),
    lambda lr: todist.chain(todist.transform.clip_grad_norm(0.3), todist.adam(lr=lr, eps=0.01)),
    lambda lr: todist.sgd(lr=lambda step: lr * 0.9**step),
]


class Drawn:
    """A network, a loss, an optimizer, and what gradients are for."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.seed, self.draw = seed, draw
        self.net = nn.Sequential(
            *(self._block(width) for width in (3, 4, 4)[: draw.randint(1, 3)]), nn.Linear(4, 2)
        )
        self.net.to(D)
        if draw.random() < 0.3:
            self.net[-1].bias.requires_grad_(False)
        self.lr = torch.tensor(0.05, dtype=D, requires_grad=True)
        self.weights = torch.rand(ROWS, dtype=D, requires_grad=True)
        self.scale = torch.rand(2, dtype=D, requires_grad=True)
        self.factor = self.scale.sin()  # declared tensors may depend on each other
        self.steps = draw.choice([1, 2, 3, 6])
        self.xs = torch.randn(TASKS, self.steps, ROWS, 3, dtype=D, requires_grad=True)
        self.labels = torch.randint(0, 2, (TASKS, ROWS))
        self.is_tree, self.reads = draw.random() < 0.4, draw.choice(["rows", "function"])
        self.is_classified, self.has_aux = draw.random() < 0.5, draw.random() < 0.3
        self.optimizer = draw.choice(OPTIMIZERS)
        self.twice = draw.random() < 0.3
        self.vmap = draw.random() < 0.4
        self.compiles = bool(MORE) and not self.twice and draw.random() < 0.2

    def _block(self, width: int) -> nn.Module:
        draw = self.draw
        norms = [
            nn.Identity(),
            nn.LayerNorm(4),
            nn.GroupNorm(2, 4),
            nn.BatchNorm1d(4, track_running_stats=False),
        ]
        activation = draw.choice([nn.Tanh(), nn.GELU(), nn.SiLU(), nn.Softplus()])
        dropout = [nn.Dropout(0.3)] if draw.random() < 0.2 else []
        return nn.Sequential(
            nn.Linear(width, 4, bias=draw.random() < 0.7), draw.choice(norms), activation, *dropout
        )

    def adjoint(self) -> todist.Replayed:
        """A replayed loop, with settings that fit."""
        settings: list[dict[str, Any]] = [
            {},
            {"snapshots": 1},
            {"snapshots": 2},
            {"blocks": None},
            {"memory": "1MB", "check": True},
        ]
        if not self.is_tree:
            settings += [{"blocks": self.net}, {"blocks": self.net, "snapshots": 2}]
        return todist.Replayed(**self.draw.choice(settings))

    def tensors(self) -> list[Tensor]:
        """What gradients are for."""
        params = [p for p in self.net.parameters() if p.requires_grad]
        return [*params, self.lr, self.weights, self.scale, self.xs]

    def outer(self, adjoint: Any, xs: Tensor, labels: Tensor, *, compile: bool = False) -> Tensor:
        """An outer loss of one task."""

        def loss(params: Any, x: Tensor) -> Any:
            made = (
                params(x) if params is self.net or isinstance(params, nn.Module) else self._called(params, x)
            )
            logits = made * self.factor
            if self.is_classified:
                each = F.cross_entropy(logits, labels, reduction="none")
            else:
                each = (logits - x.sum(-1, keepdim=True)).square().mean(-1)
            value = (self.weights * each).mean()
            return (value, logits.detach()) if self.has_aux else value

        result = todist.inner_loop(
            loss,
            self.optimizer(self.lr),
            dict(self.net.named_parameters()) if self.is_tree else self.net,
            list(xs) if self.reads == "rows" else lambda step: xs[step],
            meta=(self.weights, self.factor, self.scale, xs),
            adjoint=adjoint,
            has_aux=self.has_aux,
            seed=self.seed,
            steps=self.steps,
            compile=compile,
        )
        params = list(result.params.values() if self.is_tree else result.params.parameters())
        return sum((p.square().sum() for p in params), result.losses.square().sum())

    def _called(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(self.net, params, (x,))
        return made

    def found(self, adjoint: Any, *, vmap: bool, compile: bool = False) -> list[Tensor]:
        """Outer losses, their gradients, and perhaps second derivatives."""
        if vmap:
            values = torch.vmap(lambda xs, labels: self.outer(adjoint, xs, labels), randomness="same")(
                self.xs, self.labels
            )
        else:
            tasks = zip(self.xs, self.labels, strict=True)
            values = torch.stack([self.outer(adjoint, xs, labels, compile=compile) for xs, labels in tasks])
        found = [values]
        for again in range(1 + self.twice):
            whole = sum((made.square().sum() for made in found[again:] if made.requires_grad), values.sum())
            grads = torch.autograd.grad(
                whole,
                self.tensors(),
                create_graph=self.twice and not again,
                retain_graph=True,
                allow_unused=True,
            )
            found += [
                torch.zeros_like(x) if grad is None else grad
                for grad, x in zip(grads, self.tensors(), strict=True)
            ]
        return [made.detach() for made in found]


@pytest.mark.timeout(max(300, 4 * int(MORE or 0)))
@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_random_loops_have_the_gradients_of_recorded_ones(
    monkeypatch: pytest.MonkeyPatch, loops: int
) -> None:
    monkeypatch.setattr(programs, "kernels", lambda _captured, graph, _inputs: graph)
    print(f"TODIST_FUZZ_SEED={SEED}: {loops} loops")
    for seed in range(SEED, SEED + loops):
        drawn = Drawn(seed)
        expected = drawn.found(todist.Recorded(), vmap=False)
        ways = {"replayed": (drawn.adjoint(), False)}
        if drawn.vmap:
            ways |= {
                "recorded in vmap": (todist.Recorded(), True),
                "replayed in vmap": (drawn.adjoint(), True),
            }
        if drawn.compiles:
            ways["compiled"] = (todist.Replayed(snapshots=drawn.draw.choice([None, 2])), False)
        for way, (adjoint, vmap) in ways.items():
            found = drawn.found(adjoint, vmap=vmap, compile=way == "compiled")
            differing = _difference(found, expected)
            if differing and _is_beyond_rounding(seed, found, expected):
                raise AssertionError(f"TODIST_FUZZ_SEED={seed}, {way}, {adjoint}: {differing}")


def _difference(found: list[Tensor], expected: list[Tensor]) -> str:
    try:
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    except AssertionError as error:
        return str(error)
    return ""


def _is_beyond_rounding(seed: int, found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether they differ by more than recorded ones do if the inputs are changed by a little more than rounding.

    A normalization of rows that are almost constant has second derivatives of 1e11, and few digits of them are right.
    """
    drawn = Drawn(seed)
    for tensor in drawn.tensors():
        tensor.data *= 1 + 1e-14 * torch.randn_like(tensor)
    drawn.factor = drawn.scale.sin()
    allowed = [
        (a - b).abs().max() for a, b in zip(drawn.found(todist.Recorded(), vmap=False), expected, strict=True)
    ]
    return any(
        bool((a - b).abs().max() > limit) for a, b, limit in zip(found, expected, allowed, strict=True)
    )
