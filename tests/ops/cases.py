"""An op's name and random numbers → a call of its kernel, on any device, and what its formula makes of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import formulas
from torchopt_dist import ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OPS = [
    "adam",
    "adam_backward",
    "sgd",
    "sgd_backward",
    "rmsprop_",
    "rmsprop",
    "rmsprop_backward",
]
kernels: Any = torch.ops.todist
needs_kernels = pytest.mark.skipif(not ops.is_available("adam"), reason=f"no kernel: {ops.why_not('adam')}")


@dataclass
class Case:
    """A call of a raw op, and what is to come of it."""

    op: str
    lists: dict[str, list[Tensor]]
    args: tuple[Any, ...]
    expected: list[list[Tensor]]
    written: list[str] = field(default_factory=list)

    def run(self) -> list[list[Tensor]]:
        flat = getattr(kernels, self.op)(*self.lists.values(), *self.args)
        if self.written:
            assert flat is None
            return [self.lists[name] for name in self.written]
        n = len(next(iter(self.lists.values())))
        return [flat[i * n : (i + 1) * n] for i in range(len(self.expected))]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Case:
        """The same call of other tensors, each made from one of these."""
        lists = {name: [function(tensor) for tensor in tensors] for name, tensors in self.lists.items()}
        return replace(self, lists=lists)

    def on(self, device: torch.device | str) -> Case:
        """The same call of copies on a device, with the strides, the offsets and the gaps."""
        return self.mapped(partial(moved, device=device))


def whole(tensor: Tensor) -> Tensor:
    """All the memory under a tensor, gaps included."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy on a device, with the strides, the offset and the gaps."""
    copy = whole(tensor).to(device, copy=True)
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def strided(
    rng: random.Random, shape: list[int], dtype: torch.dtype, *, positive: bool = False, expand: bool = False
) -> Tensor:
    """A tensor of this shape with an offset, permuted dimensions, steps and, if asked, expanded ones."""
    order = rng.sample(range(len(shape)), len(shape)) if rng.random() < 0.5 else list(range(len(shape)))
    gaps = rng.random() < 0.3
    steps = [rng.choice([1, 2, 3]) if gaps else 1 for _ in shape]
    flat = [expand and rng.random() < 0.2 for _ in shape]
    offset = rng.randrange(3)
    sizes = [1 if flat[d] else shape[d] * steps[d] for d in order]
    numbers = torch.randn(offset + math.prod(sizes))
    tensor = (numbers.abs() + 1 if positive else numbers).to(dtype)[offset:].view(sizes)
    tensor = tensor.permute([order.index(d) for d in range(len(shape))])
    stepped = tensor[tuple(slice(None, None, 1 if flat[d] else steps[d]) for d in range(len(shape)))]
    return stepped.expand(shape)


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


def rows(formula: Callable[..., tuple], *columns: Any) -> list[list[Tensor]]:
    """A formula over lists, entry by entry → a list of each of its results; those that are None left out."""
    n = next(len(column) for column in columns if column)
    results = [formula(*(column[i] if column else None for column in columns)) for i in range(n)]
    return [list(result) for result in zip(*results, strict=True) if result[0] is not None]


def case(op: str, rng: random.Random, shapes: list[list[int]], dtypes: list[torch.dtype]) -> Case:
    """Random arguments for an op, and what its formula makes of them."""

    def make(positive: bool = False, expand: bool = False) -> list[Tensor]:
        return [
            strided(rng, shape, dtype, positive=positive, expand=expand)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]

    n = len(shapes)
    b1, b2, eps = rng.choice([0.0, 0.5, 0.9]), rng.choice([0.5, 0.9, 0.99]), rng.choice([1e-8, 1e-2])
    lr, momentum, nesterov = rng.uniform(-1, 1), rng.choice([0.0, 0.9]), rng.random() < 0.5
    weight_decay, maximize = rng.choice([0.0, 0.1]), rng.random() < 0.5
    corrections = torch.rand(2, n, dtype=torch.float64).t() * 0.9 + 0.1
    g = make(expand=True)
    if op == "adam":
        settings = (lr, rng.choice([1.0, 0.9]), b1, b2, eps, rng.choice([0.0, 1e-3]), weight_decay, maximize)
        lists = {
            "grads": g,
            "exp_avgs": make(),
            "exp_avg_sqs": make(positive=True),
            "params": make() if weight_decay else rng.choice([[], make(expand=True)]),
        }
        expected = rows(
            lambda *x: formulas.adam(*x, *settings), *map(wide, lists.values()), list(corrections)
        )
        return Case(op, lists, (corrections, *settings), expected)
    if op == "adam_backward":
        settings = (lr, rng.choice([1.0, 0.9]), b1, b2, eps, rng.choice([0.0, 1e-3]), weight_decay, maximize)
        lists = {
            "moved_grads": make(expand=True),
            "exp_avg_grads": rng.choice([[], make(expand=True)]),
            "exp_avg_sq_grads": rng.choice([[], make(expand=True)]),
            "grads": g,
            "exp_avgs": make(),
            "exp_avg_sqs": make(positive=True),
            "params": make(expand=True) if weight_decay else [],
        }
        expected = rows(
            lambda *x: formulas.adam_gradients(*x, *settings), *map(wide, lists.values()), list(corrections)
        )
        return Case(op, lists, (corrections, *settings), expected)
    if op.startswith("sgd"):
        sums = make() if momentum else []
        taken = torch.rand(n if momentum else 0, 2, dtype=torch.float64)[:, 0]
        numbers = (lr, momentum, nesterov, weight_decay, maximize)
        if op == "sgd":
            params = make() if weight_decay else rng.choice([[], make(expand=True)])
            lists = {"grads": g, "momentum_buffers": sums, "params": params}
            expected = rows(lambda *x: formulas.sgd(*x, *numbers), *map(wide, lists.values()), list(taken))
            return Case(op, lists, (taken, *numbers), expected)
        lists = {"moved_grads": g, "momentum_buffer_grads": rng.choice([[], sums])}
        expected = rows(
            lambda *x: formulas.sgd_gradients(*x, *numbers), *map(wide, lists.values()), list(taken)
        )
        return Case(op, lists, (taken, *numbers), expected)
    centered = rng.random() < 0.5
    squares = [square + 30 for square in make(positive=True)] if centered else make(positive=True)
    if op == "rmsprop_":
        lists = {
            "params": make(),
            "grads": g,
            "square_avgs": squares,
            "grad_avgs": make() if centered else [],
            "momentum_buffers": make() if momentum else [],
        }
        numbers = (lr, b2, eps, momentum, nesterov, weight_decay, maximize)
        expected = rows(lambda *x: formulas.rmsprop_(*x, *numbers), *map(wide, lists.values()))
        written = [name for name, tensors in lists.items() if tensors and name != "grads"]
        return Case(op, lists, numbers, expected, written)
    settings = (lr, b2, eps, momentum, nesterov)
    if op == "rmsprop":
        lists = {
            "grads": g,
            "square_avgs": squares,
            "grad_avgs": make() if centered else [],
            "momentum_buffers": make() if momentum else [],
            "params": rng.choice([[], make(expand=True)]),
        }
        expected = rows(lambda *x: formulas.rmsprop(*x, *settings), *map(wide, lists.values()))
        return Case(op, lists, settings, expected)
    lists = {
        "moved_grads": make(expand=True),
        "square_avg_grads": rng.choice([[], make(expand=True)]),
        "grad_avg_grads": rng.choice([[], make(expand=True)]) if centered else [],
        "momentum_buffer_grads": rng.choice([[], make(expand=True)]) if momentum else [],
        "grads": g,
        "square_avgs": squares,
        "grad_avgs": make() if centered else [],
    }
    expected = rows(lambda *x: formulas.rmsprop_gradients(*x, *settings), *map(wide, lists.values()))
    return Case("rmsprop_backward", lists, settings, expected)


def random_case(op: str, rng: random.Random) -> Case:
    """A call on tensors of random shapes and dtypes, now and then with one that is shared out."""
    shapes = [
        [rng.choice([0, 1, 2, 3, 7, 16, 33]) for _ in range(rng.randrange(4))]
        for _ in range(rng.randrange(1, 5))
    ]
    if rng.random() < 0.05:
        shapes.append([rng.randrange(30_000, 90_000), rng.randrange(1, 4)])
    return case(op, rng, shapes, [rng.choice(DTYPES) for _ in shapes])


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_near(got: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for tensors, values in zip(got, expected, strict=True):
        for tensor, value in zip(tensors, values, strict=True):
            arithmetic = torch.finfo(torch.promote_types(tensor.dtype, torch.float32)).eps
            scale = 1 + float(value.abs().max()) if value.numel() else 1
            torch.testing.assert_close(
                tensor.double(), value, rtol=torch.finfo(tensor.dtype).eps, atol=32 * arithmetic * scale
            )


def assert_only_read(there: Case, before: Case) -> None:
    """What a call that was run does not write is as it was in the call it is a copy of."""
    for name, tensors in there.lists.items():
        if name not in there.written:
            pairs = zip(tensors, before.lists[name], strict=True)
            assert all(torch.equal(tensor.cpu(), old) for tensor, old in pairs), name


def assert_tied_parameters_are_stepped_in_their_order(device: torch.device | str) -> None:
    """With ``alpha`` 1 and ``eps`` 1, averages that are 0 stay 0, and a step is that of plain descent."""
    tied = torch.ones(150_000, device=device)
    grads, averages = ([x(150_000, device=device) for _ in range(2)] for x in (torch.ones, torch.zeros))
    kernels.rmsprop_([tied, tied], grads, averages, [], [], 0.5, 1.0, 1.0, 0.0, False, 0.5, False)
    assert (tied == 1 - 0.5 * 1.5 - 0.5 * (1 + 0.5 * 0.25)).all()
