"""Layouts of tensors, gaps among them → new tensors, and fakes, laid out as by ``torch.empty_like``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.ops.cases import OPS, case, kernels, needs_kernels
from tests.rows import each_row

pytestmark = needs_kernels
SHAPE = (2, 3, 4, 5)
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.rand(4, 6),
    "transposed": lambda: torch.rand(6, 4).t(),
    "gaps": lambda: torch.rand(8, 12)[::2, ::2],
    "gaps, transposed": lambda: torch.rand(12, 8)[::2, ::2].t(),
    "gaps, permuted": lambda: torch.rand(2, 3, 8)[:, :, ::2].permute(2, 0, 1),
    "expanded rows": lambda: torch.rand(1, 6).expand(4, 6),
    "expanded columns": lambda: torch.rand(4, 1).expand(4, 6),
    "expanded in the middle": lambda: torch.rand(5, 1, 2).expand(5, 3, 2).permute(2, 1, 0),
    "expanded altogether": lambda: torch.rand(()).expand(3, 4),
    "channels last": lambda: torch.rand(SHAPE).to(memory_format=torch.channels_last),
    "channels last, gaps": lambda: torch.rand(SHAPE).to(memory_format=torch.channels_last)[:, :2, ::2],
    "a dimension of one": lambda: torch.rand(4, 1, 6).transpose(0, 2),
    "a dimension of one, gaps": lambda: torch.rand(4, 3, 12)[:, 1:2, ::3],
    "no dimension": lambda: torch.rand(()),
    "one element of many": lambda: torch.rand(7)[3],
    "a row with gaps": lambda: torch.rand(9)[::2],
    "a row of one": lambda: torch.rand(9)[4:5],
    "empty": lambda: torch.rand(0),
    "empty, transposed": lambda: torch.rand(0, 3).t(),
    "empty, gaps": lambda: torch.rand(4, 0, 6)[::2, :, ::3].permute(2, 0, 1),
    "windows": lambda: torch.rand(9).unfold(0, 4, 2),
}
MAKING = [op for op in OPS if not op.endswith("_")]
"""The ops that make tensors."""
CORRECTIONS = torch.tensor([[0.1, 0.01]], dtype=torch.float64)
TAKEN, NONE = torch.ones(1, dtype=torch.float64), torch.empty(0, dtype=torch.float64)


def arguments(op: str, seed: int, x: Tensor) -> tuple[Any, ...]:
    """One tensor for each list that a random call has."""
    call = case(op, random.Random(seed), [list(x.shape)], [x.dtype])
    return (*([x] if tensors else [] for tensors in call.lists.values()), *call.args)


@each_row("layout", LAYOUTS)
@each_row("op", MAKING)
def test_a_fake_is_laid_out_as_what_is_made(op, layout):
    x = LAYOUTS[layout]()
    wanted, kernel = torch.empty_like(x), getattr(kernels, op)
    for seed in range(3):
        given = arguments(op, seed, x)
        torch.library.opcheck(kernel.default, given, test_utils=("test_schema", "test_faketensor"))
        made = kernel(*given)
        assert {tensor.stride() for tensor in made} == {wanted.stride()}
        assert {tensor.shape for tensor in made} == {wanted.shape}


def test_any_strides_are_taken_as_torch_takes_them():
    rng = random.Random(0)
    for _ in range(2000):
        shape = [rng.choice([0, 1, 2, 3, 5]) for _ in range(rng.randrange(5))]
        strides = [rng.choice([0, 1, 2, 3, 4, 6, 12, 30]) for _ in shape]
        if rng.random() < 0.5:  # without gaps, in some order
            order, step = rng.sample(range(len(shape)), len(shape)), 1
            for dim in order:
                strides[dim], step = step, step * max(shape[dim], 1)
        x = torch.zeros(1000).as_strided(shape, strides)
        moved, new = kernels.sgd([x], [x], [x], TAKEN, 0.1, 0.9, True, 0.1, True)
        back = kernels.sgd_backward([x], [x], TAKEN, 0.1, 0.9, True, 0.1, True)
        numbers = (0.1, 1.0, 0.9, 0.9, 1e-8, 0.0, 0.1, True)
        averages = kernels.adam([x], [x], [x], [x], CORRECTIONS, *numbers)
        back += kernels.adam_backward([x], [x], [x], [x], [x], [x], [x], CORRECTIONS, *numbers)
        for tensor in (moved, new, *back, *averages):
            assert tensor.stride() == torch.empty_like(x).stride(), (shape, strides)


@each_row("momentum", [0.0, 0.9])
def test_each_tensor_takes_its_own_layout(momentum):
    """A moved parameter that of the parameter, if it is there, and a new sum that of the sum."""
    kinds = [LAYOUTS["channels last"](), torch.rand(SHAPE), torch.rand(1, 1, 1, 5).expand(SHAPE)]
    taken = TAKEN if momentum else NONE
    for g, b, p in itertools.permutations(kinds):
        for params in ([p], []):
            sums = [b] if momentum else []
            made = kernels.sgd([g], sums, params, taken, 0.1, momentum, False, 0.0, False)
            fake = [params[0] if params else g, *sums]
            assert [x.stride() for x in made] == [torch.empty_like(x).stride() for x in fake]
            arguments = ([g], sums, params, taken, 0.1, momentum, False, 0.0, False)
            torch.library.opcheck(kernels.sgd.default, arguments, test_utils=("test_faketensor",))
