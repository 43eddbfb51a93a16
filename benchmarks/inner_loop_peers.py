"""What does the gradient of an inner loop cost beside Betty and TorchOpt? CPU time of a meta-step, in one process.

Betty's own example is logistic regression with a weight decay for each feature: one inner step of SGD, the gradient of
the weight decays by the difference of two gradients, one outer step of SGD; its release has that difference as
``darts``, with the identity for the optimizer's Jacobian, so that SAMA's gradient is the learning rate times its own.
TorchOpt's ``MetaAdam`` records each step, as ``Recorded`` and ``MetaAdam`` do. Numbers are compared first. A peer that
is not installed is left out.

    pip install --no-deps betty-ml torchopt
    python benchmarks/inner_loop_peers.py [sama|recorded]
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchopt_dist as todist

try:
    from betty.configs import Config, EngineConfig
    from betty.engine import Engine
    from betty.problems import ImplicitProblem
except ImportError:
    Engine = None
try:
    import torchopt
except ImportError:
    torchopt = None

LR, OUTER_LR, RADIUS = 0.1, 1.0, 0.01


def by_turns(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Milliseconds of CPU time of each, the median."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 2):
        for name, run in ways.items():
            start = time.thread_time()
            run()
            if turn > 1:
                times[name].append(1e3 * (time.thread_time() - start))
    return {name: sorted(found)[len(found) // 2] for name, found in times.items()}


class Regression:
    """Betty's example: the data, and the two losses."""

    def __init__(self, examples: int, features: int) -> None:
        torch.manual_seed(0)
        truth = torch.randn(features, dtype=torch.float64)
        draws = [torch.randn(examples, features, dtype=torch.float64) for _ in range(2)]
        self.train, self.valid = [(x, (x @ truth > 0).double()) for x in draws]
        self.features = features

    def inner(self, w: Tensor, decays: Tensor) -> Tensor:
        """The inner loss."""
        x, y = self.train
        penalty = (w.square() * decays.exp()).sum() / 2
        return F.binary_cross_entropy_with_logits(x @ w, y) + penalty / self.features

    def outer(self, w: Tensor) -> Tensor:
        """The outer loss."""
        return F.binary_cross_entropy_with_logits(self.valid[0] @ w, self.valid[1])

    def plain(self, steps: int) -> Tensor:
        """Training without meta-steps: the parameters."""
        decays = torch.ones(self.features, dtype=torch.float64)
        w = torch.zeros_like(decays, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=LR)
        for _ in range(steps):
            optimizer.zero_grad()
            self.inner(w, decays).backward()
            optimizer.step()
        return w

    def ours(self, steps: int) -> Tensor:
        """The weight decays after so many meta-steps."""
        decays = torch.ones(self.features, dtype=torch.float64, requires_grad=True)
        w, state = torch.zeros_like(decays).requires_grad_(), None
        optimizer, impl = torch.optim.SGD([decays], lr=OUTER_LR / LR), todist.sgd(lr=LR)
        adjoint = todist.SAMA(RADIUS)
        for _ in range(steps):
            made = todist.inner_loop(
                lambda w: self.inner(w, decays),
                impl,
                w,
                1,
                meta=decays,
                state=state,
                adjoint=adjoint,
            )
            optimizer.zero_grad()
            self.outer(made.params).backward()
            optimizer.step()
            w, state = made.params.detach().requires_grad_(), made.state
        return decays.detach()

    def betty(self, steps: int) -> Tensor:
        """As :meth:`ours`."""
        regression = self

        class Values(nn.Module):
            def __init__(self, value: float) -> None:
                super().__init__()
                self.values = nn.Parameter(torch.full((regression.features,), value, dtype=torch.float64))

            def forward(self) -> Tensor:
                return self.values

        class Outer(ImplicitProblem):
            def training_step(self, batch: Any) -> Tensor:
                return regression.outer(self.inner())

        class Inner(ImplicitProblem):
            def training_step(self, batch: Any) -> Tensor:
                return regression.inner(self.module(), self.outer())

        w, decays = Values(0.0), Values(1.0)
        settings = {"type": "darts", "unroll_steps": 1, "darts_alpha": RADIUS, "log_step": -1}
        problems = [
            made(
                name=name,
                config=Config(**settings),
                module=module,
                optimizer=torch.optim.SGD(module.parameters(), lr=rate),
                train_data_loader=[regression.train],
            )
            for made, name, module, rate in (
                (Outer, "outer", decays, OUTER_LR),
                (Inner, "inner", w, LR),
            )
        ]
        outer, inner = problems
        links = {"u2l": {outer: [inner]}, "l2u": {inner: [outer]}}
        every = EngineConfig(train_iters=steps, valid_step=steps + 1)
        Engine(config=every, problems=problems, dependencies=links).run()
        return decays.values.detach()


def sama(repeats: int = 20, steps: int = 20) -> None:
    for examples, features in ((1000, 20), (5000, 2000)):
        regression = Regression(examples, features)
        ways: dict[str, Callable[[], object]] = {
            "plain": lambda one=regression: one.plain(steps),
            "ours": lambda one=regression: one.ours(steps),
        }
        if Engine is None:
            print("Betty is not installed: pip install --no-deps betty-ml")
        else:
            logging.disable(logging.CRITICAL)
            ways["betty"] = lambda one=regression: one.betty(steps)
            # Betty leaves the parameters moved by the difference, so only the first step has the same numbers.
            torch.testing.assert_close(regression.ours(1), regression.betty(1), rtol=1e-6, atol=1e-9)
        found = by_turns(ways, repeats)
        print(f"\nlogistic regression, {examples} examples of {features} features: a meta-step")
        for name, total in found.items():
            print(f"{name:8}{total / steps:8.3f} ms{total / found['plain']:8.2f} of a plain step")


def recorded(repeats: int = 40, steps: int = 5) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).double()
    x, y = torch.randn(32, 64).double(), torch.randn(32, 64).double()

    def loss(net: Callable[[Tensor], Tensor]) -> Tensor:
        return (net(x) - y).square().mean()

    def grads(outer: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(outer, list(model.parameters())))

    def by_loop() -> list[Tensor]:
        made = todist.inner_loop(loss, todist.adam(lr=1e-2, eps=1e-3), model, steps)
        return grads(loss(made.params))

    def by_steps() -> list[Tensor]:
        net = todist.module_clone(model)
        optimizer = todist.MetaAdam(net, lr=1e-2, eps=1e-3)
        for _ in range(steps):
            optimizer.step(loss(net))
        return grads(loss(net))

    def by_torchopt() -> list[Tensor]:
        net = torchopt.module_clone(model, by="reference")
        optimizer = torchopt.MetaAdam(net, lr=1e-2, eps=1e-3)
        for _ in range(steps):
            optimizer.step(loss(net))
        return grads(loss(net))

    ways: dict[str, Callable[[], object]] = {"inner_loop": by_loop, "MetaAdam": by_steps}
    torch.testing.assert_close(by_loop(), by_steps(), rtol=1e-9, atol=1e-12)
    if torchopt is None:
        print("TorchOpt is not installed: pip install --no-deps torchopt")
    else:
        ways["TorchOpt"] = by_torchopt
        # Some of TorchOpt's numbers are of float32.
        torch.testing.assert_close(by_loop(), by_torchopt(), rtol=1e-4, atol=1e-7)
    found = by_turns(ways, repeats)
    print(f"\n{steps} recorded steps of Adam and their gradient")
    for name, total in found.items():
        print(f"{name:12}{total:8.2f} ms{total / found['inner_loop']:8.2f} of inner_loop")


if __name__ == "__main__":
    torch.set_num_threads(1)
    which = sys.argv[1] if len(sys.argv) > 1 else ""
    if which in ("sama", ""):
        sama()
    if which in ("recorded", ""):
        recorded()
