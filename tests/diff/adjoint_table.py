"""Every adjoint and every optimizer of the conformance suite, a row each, and the loops by hand they are held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import torchopt_dist as todist

STEPS = 4


@dataclass(frozen=True)
class Row:
    """An adjoint."""

    adjoint: Any
    by_hand: Callable[[int, list[Tensor], Any], tuple[list[Tensor], Any]] = lambda number, params, state: (
        params,
        state,
    )
    """Number of a step, parameters and state before it → those that the loop by hand goes on with."""
    constant_gradients: bool = False


def _cut_before(number: int) -> Callable[[int, list[Tensor], Any], tuple[list[Tensor], Any]]:
    def cut(step: int, params: list[Tensor], state: Any) -> tuple[list[Tensor], Any]:
        if step != number:
            return params, state
        return [p.detach().requires_grad_() for p in params], todist.pytree.map_tensors(Tensor.detach, state)

    return cut


ADJOINTS = {
    "recorded": Row(todist.Recorded()),
    "replayed": Row(todist.Replayed()),
    "replayed from snapshots": Row(todist.Replayed(snapshots=2)),
    "truncated to all": Row(todist.Truncated(STEPS)),
    "truncated": Row(todist.Truncated(2), _cut_before(STEPS - 2)),
    "first order": Row(todist.FirstOrder(), constant_gradients=True),
}
ESTIMATORS: dict[str, Any] = {
    "finite difference": todist.FiniteDifference(),
    "SAMA": todist.SAMA(),
    "implicit": todist.Implicit(not_converged="ignore"),
    "evolution strategies": todist.EvolutionStrategies(samples=3, sigma=0.1),
    "persistent evolution strategies": todist.PersistentEvolutionStrategies(samples=3, sigma=0.1, unroll=2),
}
"""Those that estimate a gradient; `test_estimators.py` holds them to formulas."""
FINITE = {name: ESTIMATORS[name] for name in ("finite difference", "SAMA")}
SAMPLED = {name: adjoint for name, adjoint in ESTIMATORS.items() if "evolution" in name}
ALL = {
    **{name: row.adjoint for name, row in ADJOINTS.items()},
    "reptile": todist.Reptile(),
    **ESTIMATORS,
}
EXACT = ["recorded", "replayed", "replayed from snapshots", "truncated to all"]
"""Those with the gradient of recording."""

OPTIMIZERS: dict[str, Callable[[Tensor], Any]] = {
    "sgd": lambda lr: todist.sgd(lr=lr),
    "momentum": lambda lr: todist.sgd(lr=lr, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda lr: todist.sgd(lr=lr, momentum=0.9, nesterov=True),
    "adam": lambda lr: todist.adam(lr=lr, eps=1e-3),
    "adam of numbers": lambda lr: todist.adam(lr=0.1, eps=1e-3),
    "adamw": lambda lr: todist.adamw(lr=lr, weight_decay=0.1, eps=1e-3),
    "rmsprop": lambda lr: todist.rmsprop(lr=lr, momentum=0.5, eps=1e-3),
    "adan": lambda lr: todist.adan(lr=lr, eps=1e-3),
    "clipped adam": lambda lr: todist.chain(
        todist.transform.clip_grad_norm(0.5), todist.adam(lr=lr, eps=1e-3)
    ),
    "schedule": lambda lr: todist.sgd(lr=lambda step: lr * 0.5**step, momentum=0.9),
}


class Problem:
    """A small network with whatever a gradient may be for; all in float64."""

    def __init__(self, kind: str, optimizer: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        double = {"dtype": torch.float64}
        self.net = nn.Sequential(nn.Linear(3, 4, **double), nn.Tanh(), nn.Linear(4, 1, **double))
        self.weights = torch.rand(5, **double, requires_grad=True)
        self.head = nn.Linear(1, 1, **double)
        self.lr = torch.tensor(0.1, **double, requires_grad=True)
        self.xs = [torch.randn(5, 3, **double, requires_grad=True) for _ in range(STEPS)]
        self.params = self.net if kind == "module" else dict(self.net.named_parameters())
        self.make_optimizer = OPTIMIZERS[optimizer]
        first = self.optimizer.init(dict(self.net.named_parameters()))
        self.state = todist.pytree.map_tensors(self._moved, first)

    @property
    def optimizer(self) -> Any:
        """A new one each time: one may have computed something from the learning rate, which is one graph."""
        return self.make_optimizer(self.lr)

    def _moved(self, leaf: Tensor) -> Tensor:
        """A state as after some steps, with leaves that require grad."""
        if leaf.dtype != torch.float64:
            return leaf
        return (0.1 + torch.rand_like(leaf)).requires_grad_()

    def loss(self, params: Any, x: Tensor) -> Tensor:
        out = (
            params(x) if isinstance(params, nn.Module) else torch.func.functional_call(self.net, params, (x,))
        )
        return (self.weights * (self.head(out) - x.sum(1, keepdim=True)).squeeze(1) ** 2).mean()

    def outer(self, params: Any) -> Tensor:
        leaves = list(params.parameters()) if isinstance(params, nn.Module) else list(params.values())
        return sum((leaf**3).sum() for leaf in leaves) + (leaves[0].sum() * leaves[-1].sum())

    def tensors(self) -> dict[str, Tensor]:
        """What a gradient may be for."""
        state = [leaf for leaf in todist.pytree.flatten(self.state)[0] if leaf.requires_grad]
        return {
            **{f"first {name}": leaf for name, leaf in self.net.named_parameters()},
            "meta tensor": self.weights,
            **{f"meta module {name}": leaf for name, leaf in self.head.named_parameters()},
            "hyper-parameter": self.lr,
            **{f"first state {place}": leaf for place, leaf in enumerate(state)},
            **{f"batch {place}": x for place, x in enumerate(self.xs)},
        }

    def run(self, adjoint: Any, **options: Any) -> todist.typing.InnerLoopResult:
        meta = {"weights": self.weights, "head": self.head}
        given = {"meta": meta, "state": self.state, "adjoint": adjoint, **options}
        return todist.inner_loop(self.loss, self.optimizer, self.params, self.xs, **given)

    def by_hand(self, row: Row) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The last parameters and the losses."""
        names = [name for name, _ in self.net.named_parameters()]
        optimizer = self.optimizer
        # Not the first parameters themselves, which are in the graph of the loss as such, too.
        params, state = [leaf * 1.0 for leaf in self.net.parameters()], self.state
        losses = []
        for number, x in enumerate(self.xs):
            params, state = row.by_hand(number, params, state)
            loss = self.loss(dict(zip(names, params, strict=True)), x)
            grads = torch.autograd.grad(loss, params, create_graph=not row.constant_gradients)
            updates, state = optimizer.update(list(grads), _listed(state), params=params, inplace=False)
            params = [p + u for p, u in zip(params, updates, strict=True)]
            losses.append(loss)
        return dict(zip(names, params, strict=True)), losses


def _listed(state: Any) -> Any:
    """A state of named parameters as one of a list of parameters."""
    if isinstance(state, dict):
        return list(state.values())
    if isinstance(state, tuple):
        parts = [_listed(part) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state


def gradients(outer: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor | None]:
    found = torch.autograd.grad(outer, list(tensors.values()), allow_unused=True)
    return dict(zip(tensors, found, strict=True))


class Regression:
    """Linear regression with a weight for each example; the loss is of every kind known in closed form."""

    def __init__(self, ridge: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(3)
        double = {"dtype": torch.float64, "generator": generator}
        self.x, self.y = torch.randn(6, 3, **double), torch.randn(6, **double)
        self.weights = (0.5 + torch.rand(6, **double)).requires_grad_()
        self.first = torch.randn(3, **double).requires_grad_()
        self.outer = torch.randn(3, **double)
        self.ridge = ridge

    def loss(self, w: Tensor) -> Tensor:
        return (self.weights * (self.x @ w - self.y) ** 2).mean() / 2 + self.ridge / 2 * (w @ w)

    def gradient(self, w: Tensor) -> Tensor:
        return self.x.T @ (self.weights.detach() * (self.x @ w - self.y)) / 6 + self.ridge * w

    def of_weights(self, w: Tensor) -> Tensor:
        """The loss's gradient with respect to the examples' weights."""
        return (self.x @ w - self.y) ** 2 / 12

    def minimum(self) -> Tensor:
        hessian = self.x.T @ (self.weights[:, None] * self.x) / 6 + self.ridge * torch.eye(
            3, dtype=torch.float64
        )
        return torch.linalg.solve(hessian, self.x.T @ (self.weights * self.y) / 6)

    def run(self, adjoint: Any, optimizer: Any, steps: int, **options: Any) -> todist.typing.InnerLoopResult:
        return todist.inner_loop(
            self.loss, optimizer, self.first, steps, meta=self.weights, adjoint=adjoint, **options
        )
