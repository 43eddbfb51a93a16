"""Random losses that change between calls: compiled loops and tasks agree with plain ones after each change.

A loss draws what it reads: numbers, helpers, tensors, indices, in closures, globals, defaults and objects; its module
has hooks, modes and attributes; its optimizer a mask, numbers and schedules. Between two calls one of these becomes
another. Programs run torch's own operations, and nightly those of a few losses are kernels. ``make fuzz`` runs more of
them; ``TODIST_FUZZ_SEED=<seed>`` runs those from this seed on, ``TODIST_FUZZ_LOOPS`` says how many, and
``TODIST_FUZZ_KERNELS`` how many as kernels.
"""

from __future__ import annotations

import functools
import os
import random
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from torchopt_dist.core import programs

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
MORE, KERNELS = os.environ.get("TODIST_FUZZ_LOOPS"), os.environ.get("TODIST_FUZZ_KERNELS")
LOSSES = {
    "traced": max(1, int(MORE) // 10) if MORE else 1,
    "kernels": int(KERNELS or 3),
}
SEED = int(os.environ.get("TODIST_FUZZ_SEED") or (random.randrange(10**9) if MORE else 0))
CHANGES = 3
D = torch.float64
NUMBER: Any = 1.5
WHOLE: Any = 3
TABLE: dict[str, Any] = {"by": 1.5, "all": [1.0, 2.0]}
TENSOR = torch.ones(2, dtype=D)
ARRAY = np.ones(2)


def helper(x: Tensor) -> Tensor:
    return 1.5 * x


@pytest.fixture(
    autouse=True,
    params=["traced", pytest.param("kernels", marks=[] if KERNELS else pytest.mark.nightly)],
)
def losses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many there are, whose programs the compiler has traced only, or has made kernels of."""
    if request.param == "traced":
        monkeypatch.setattr(programs, "kernels", lambda _captured, graph, _inputs: graph)
    programs.programs_of.cache_clear()
    for name in ("NUMBER", "WHOLE", "TENSOR", "helper"):
        monkeypatch.setitem(globals(), name, globals()[name])
    monkeypatch.setitem(globals(), "ARRAY", np.ones(2))
    monkeypatch.setitem(globals(), "TABLE", {"by": 1.5, "all": [1.0, 2.0]})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*compile=True")
        yield LOSSES[request.param]


class Scaled(nn.Module):
    """Has a mode, a number, a whole number, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.by, self.times = 1.5, 2
        self.register_buffer("shift", torch.ones((), dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        made = x * self.by * self.times + self.shift
        return made if self.training else made * 2


def powered(x: Tensor, by: float = 1.5, *, more: float = 0.5) -> Tensor:
    return by * x + more


Term = Callable[[Tensor, Any], Tensor]


class Drawn:
    """A network, the terms of a loss of it, an optimizer, and changes of all of these."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(2, 2), Scaled(), nn.Tanh(), nn.Linear(2, 2)).to(D)
        self.weights = torch.rand(4, dtype=D, requires_grad=True)
        self.rows, self.rate, self.least, self.kind = 2, 0.05, 2, 0
        self.hooks: list[Any] = []
        self.whole_as = self.draw.choice([int, np.int64])
        self.own = SimpleNamespace(
            number=1.5, whole=2, of=functools.partial(powered, by=0.5), entries=[1.5, 2], array=np.ones(2)
        )
        named = sorted(self.TERMS)
        self.terms = self.draw.sample(named, 4)
        self.changes = [
            self.draw.choice([*self.terms, *self.terms, *sorted(self.OTHERS)]) for _ in range(CHANGES)
        ]

    def number(self) -> float:
        return self.draw.choice([0.0, 1.0, 0.5, 2.5, -1.5, self.draw.random()])

    def whole(self) -> int:
        return self.draw.randint(0, 9)

    def loss(self) -> Callable[[Any, Any], Tensor]:
        """A loss, made anew as a program does at each call."""
        terms = [self.TERMS[name][0](self) for name in self.terms]
        weights = self.weights

        def loss(net: Any, batch: Any) -> Tensor:
            x, tensor, number = batch
            each = net(x).sum(-1)
            value = (each * weights[: len(each)]).sum() + weights[tensor] * each[number % len(each)]
            for term in terms:
                value = term(value, batch)
            return value.cos()

        return loss

    def closure(self) -> Term:
        number, whole = self.own.number, self.own.whole
        return lambda value, _: value * number + whole

    def closure_changed(self) -> None:
        self.own.number, self.own.whole = self.number(), self.whole()

    def by_default(self) -> Term:
        def term(value: Tensor, _: Any, by: Any = self.own.number, *, more: Any = self.own.whole) -> Tensor:
            return by * value + more

        return term

    def by_partial(self) -> Term:
        of = self.own.of
        return lambda value, _: of(value)

    def partial_changed(self) -> None:
        self.own.of = self.draw.choice(
            [
                functools.partial(torch.add, other=self.number()),
                functools.partial(powered, by=self.number(), more=self.number()),
                functools.partial(powered, by=self.number()),
            ]
        )

    def by_entries(self) -> Term:
        entries = self.own.entries
        return lambda value, _: entries[0] * value + entries[-1]

    def entries_changed(self) -> None:
        self.own.entries = [self.number() for _ in range(self.draw.randint(1, 3))]

    def by_globals(self) -> Term:
        return lambda value, _: NUMBER * value + WHOLE

    def by_table(self) -> Term:
        return lambda value, _: TABLE["by"] * value + TABLE["all"][-1]

    def table_changed(self) -> None:
        TABLE["by"] = self.number()
        TABLE["all"] = [self.number() for _ in range(self.draw.randint(1, 2))]

    def by_tensor(self) -> Term:
        return lambda value, _: value * TENSOR.to(D).sum()  # in float32 a kernel may add in another order

    def tensor_changed(self) -> None:
        globals()["TENSOR"] = torch.rand(self.draw.choice([2, 3]), dtype=self.draw.choice([D, torch.float32]))

    def by_array(self) -> Term:
        array = self.own.array
        return lambda value, _: value * torch.as_tensor(array).sum() + torch.from_numpy(ARRAY).sum()

    def array_changed(self) -> None:
        if self.draw.random() < 0.5:
            self.own.array[0] = ARRAY[-1] = self.number()
        else:
            kind = self.draw.choice([np.float64, np.float32])
            self.own.array = np.full(self.draw.choice([2, 3]), self.number(), kind)

    def by_helper(self) -> Term:
        return lambda value, _: helper(value)

    def helper_changed(self) -> None:
        number = self.number()
        globals()["helper"] = self.draw.choice([lambda x: number * x, lambda x: x + number, torch.sin])

    def by_deciding(self) -> Term:
        whole = self.own.whole
        return lambda value, _: sum((value * k for k in range(whole % 3)), value if whole > 4 else -value)

    TERMS: ClassVar[dict[str, Any]] = {
        "closure": (closure, closure_changed),
        "default": (by_default, closure_changed),
        "partial": (by_partial, partial_changed),
        "entries": (by_entries, entries_changed),
        "globals": (by_globals, lambda own: globals().update(NUMBER=own.number(), WHOLE=own.whole())),
        "table": (by_table, table_changed),
        "tensor": (by_tensor, tensor_changed),
        "array": (by_array, array_changed),
        "helper": (by_helper, helper_changed),
        "deciding": (by_deciding, closure_changed),
    }

    def hook_changed(self) -> None:
        if self.hooks and self.draw.random() < 0.5:
            self.hooks.pop().remove()
            return
        number, part = self.number(), self.draw.choice([self.net, *self.net])
        self.hooks.append(part.register_forward_hook(lambda _module, _given, made: made * number))

    def module_changed(self) -> None:
        part: Any = self.net[1]
        part.by, part.times = self.number(), self.whole()
        part.train(self.draw.random() < 0.5)

    def shape_changed(self) -> None:
        self.rows = self.draw.choice([2, 3])

    def frozen_changed(self) -> None:
        self.net[0].weight.requires_grad_(self.draw.random() < 0.5)

    def optimizer_changed(self) -> None:
        self.rate, self.least = self.number() / 50 + 0.06, self.draw.choice([1, 2, 3])

    def kind_changed(self) -> None:
        self.kind = self.draw.randrange(4)

    OTHERS: ClassVar[dict[str, Any]] = {
        "hook": hook_changed,
        "module": module_changed,
        "shape": shape_changed,
        "frozen": frozen_changed,
        "optimizer": optimizer_changed,
        "kind": kind_changed,
    }

    def optimizer(self) -> Any:
        least, rate = self.least, self.rate

        def mask(tree: Any) -> Any:
            return todist.pytree.map_tensors(lambda p: p.ndim >= least, tree)

        decay = todist.transform.add_decayed_weights(0.1, mask)
        return [
            todist.sgd(lr=rate, momentum=rate),
            todist.adam(lr=rate, eps=0.01),
            todist.chain(decay, todist.sgd(lr=rate)),
            todist.sgd(lr=lambda step: rate * 0.9**step),
        ][self.kind]

    def batches(self) -> list[Any]:
        made = torch.Generator().manual_seed(self.rows)
        return [
            (torch.rand(self.rows, 2, dtype=D, generator=made), torch.tensor(k % 4), self.whole_as(k + 1))
            for k in range(3)
        ]

    def change(self, name: str) -> None:
        """Make one of the things that a call means another."""
        change = self.TERMS[name][1] if name in self.TERMS else self.OTHERS[name]
        change(self)

    def of_loop(self, compile: bool) -> list[Tensor]:
        """What a loop makes, and gradients."""
        adjoint = self.adjoint
        made = todist.inner_loop(
            self.loss(),
            self.optimizer(),
            self.net,
            self.batches(),
            meta=self.weights,
            adjoint=adjoint,
            seed=0,
            compile=compile,
        )
        outer = made.losses.sum() + sum(p.square().sum() for p in made.params.parameters())
        return [made.losses.detach(), *self.gradients(outer)]

    def of_task(self, compile: bool) -> list[Tensor]:
        """What tasks make, and gradients."""
        loss, rate, batches = self.loss(), self.rate, self.batches()

        def task(net: Any, x: Tensor, tensor: Tensor, number: int) -> Tensor:
            net = todist.module_clone(net)
            inner = todist.MetaSGD(net, lr=rate)
            inner.step(loss(net, (x, tensor, number)))
            return loss(net, (x, tensor, number))

        call = todist.parallelize(todist.tasks, todist.stack_reducer, compile=compile)(task)
        x, tensor = (torch.stack([batch[place] for batch in batches]) for place in range(2))
        made = call(self.net, x, tensor, batches[0][2])
        return [made.detach(), *self.gradients(made.sum())]

    def gradients(self, outer: Any) -> list[Tensor]:
        given = [self.weights, *(p for p in self.net.parameters() if p.requires_grad)]
        found = torch.autograd.grad(outer, given, allow_unused=True)
        return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(given, found, strict=True)]

    adjoint: Any = todist.Recorded()


def agree(seed: int, of: str) -> None:
    programs.programs_of.cache_clear()  # all losses have the same code
    drawn, seen = Drawn(seed), ["first"]
    drawn.adjoint = drawn.draw.choice([todist.Recorded(), todist.Replayed()])
    for change in [None, *drawn.changes]:
        if change is not None:
            drawn.change(change)
            seen.append(change)
        expected, found = getattr(drawn, of)(False), getattr(drawn, of)(True)
        torch.testing.assert_close(
            found,
            expected,
            rtol=1e-8,
            atol=1e-10,
            msg=lambda text: f"TODIST_FUZZ_SEED={seed}, {of} of {drawn.terms}, after {seen}: {text}",
        )


@pytest.mark.timeout(max(600, 120 * max(LOSSES.values())))
def test_random_loops_agree_after_each_change(losses: int) -> None:
    print(f"TODIST_FUZZ_SEED={SEED}: {losses} losses")
    for seed in range(SEED, SEED + losses):
        agree(seed, "of_loop")


@pytest.mark.timeout(max(600, 120 * max(LOSSES.values())))
def test_random_tasks_agree_after_each_change(losses: int) -> None:
    print(f"TODIST_FUZZ_SEED={SEED}: {losses} losses")

    def body() -> None:
        for seed in range(SEED, SEED + losses):
            agree(seed, "of_task")

    todist.auto_init_rpc()(body)()
