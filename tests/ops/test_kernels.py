"""Every raw op of the kernel library → the numbers of its formula, written with torch's ops in float64."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import torch

from tests.ops.cases import (
    DTYPES,
    OPS,
    Case,
    assert_near,
    assert_only_read,
    assert_tied_parameters_are_stepped_in_their_order,
    case,
    kernels,
    needs_kernels,
    random_case,
    threads,
)
from tests.rows import each_row

pytestmark = needs_kernels


@each_row("op", OPS)
def test_fuzz_against_the_formula(op):
    rng = random.Random(op)
    torch.manual_seed(rng.randrange(2**31))
    for _ in range(150):
        call = random_case(op, rng)
        there = call.on("cpu")
        assert_near(there.run(), call.expected)
        assert_only_read(there, call)


@each_row("dtype", DTYPES)
@each_row("op", OPS)
def test_each_dtype_in_long_rows(op, dtype):
    torch.manual_seed(1)
    for seed in range(4):
        call = case(op, random.Random(seed), [[1003], [64, 65]], [dtype] * 2)
        got = call.run()
        assert {tensor.dtype for tensors in got for tensor in tensors} == {dtype}
        assert_near(got, call.expected)


FEW = [[70_001], [3], [9, 20_000]], [torch.float32, torch.float64, torch.float32]
MANY = [[65_536 + i] for i in range(36)], DTYPES * 9
"""Results of over 8 MiB, which go past the cache, in tensors too small to have just come from the system."""


@each_row(("shapes", "dtypes"), [FEW, MANY], ids=["few", "many"])
@each_row("op", OPS)
def test_threads_and_strides_make_no_difference(op, shapes, dtypes):
    """Bit for bit: no element's numbers depend on where it lies, on who works on it or on how it is written."""
    torch.manual_seed(2)
    call = case(op, random.Random(3), shapes, dtypes)
    outs = []
    for count, spread in ((1, False), (2, False), (2, True)):
        copies = call.mapped(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
        if spread:
            copies = copies.mapped(lambda tensor: torch.stack([tensor, tensor], -1)[..., 1])
        with threads(count):
            outs.append(copies.run())
    for other in outs[1:]:
        for tensors, values in zip(outs[0], other, strict=True):
            assert all(torch.equal(*pair) for pair in zip(tensors, values, strict=True))


@each_row("op", OPS)
def test_no_tensors(op):
    empty = case(op, random.Random(0), [[0], [2, 0]], [torch.float32] * 2)
    assert all(tensor.numel() == 0 for tensors in empty.run() for tensor in tensors)
    if isinstance(empty.args[0], torch.Tensor):  # without a tensor, torch has no device to choose a kernel by
        numbers = torch.empty((0,) if op.startswith("sgd") else (0, 2), dtype=torch.float64)
        call = Case(op, {name: [] for name in empty.lists}, (numbers, *empty.args[1:]), [[]], empty.written)
        assert call.run() == [[]] * max(len(empty.written), 1)


def test_new_tensors_keep_the_strides_that_leave_no_gaps():
    matrix, gaps = torch.randn(3, 4).t(), torch.randn(4, 6)[:, ::2]
    flat = torch.randn(1, 3).expand(4, 3)
    out = kernels.adam(
        [flat, matrix],
        [matrix, gaps],
        [flat, flat],
        [],
        torch.ones(2, 2).double(),
        1.0,
        1.0,
        0.9,
        0.9,
        0.1,
        0.0,
        0.0,
        False,
    )
    assert [tensor.stride() for tensor in out] == [(1, 4), (3, 1), (1, 4), (3, 1), (3, 1), (3, 1)]


@each_row("seed", range(5, 11))
def test_a_gradient_may_be_the_tensor_that_is_written(seed):
    call = case("rmsprop_", random.Random(seed), [[40]], [torch.float64])
    own = replace(call, lists={**call.lists, "grads": call.lists["params"]})
    apart = own.mapped(torch.clone)
    for tensors, values in zip(own.run(), apart.run(), strict=True):
        assert torch.equal(tensors[0], values[0])


def test_tied_parameters_are_stepped_in_their_order():
    with threads(2):
        assert_tied_parameters_are_stepped_in_their_order("cpu")


def test_an_infinite_parameter_does_not_reach_the_averages():
    """A decay of 0 is no decay, not 0 times infinity."""
    param, square = torch.full((20,), math.inf), torch.zeros(20)
    kernels.rmsprop_([param], [torch.ones(20)], [square], [], [], 0.1, 0.9, 1e-8, 0.0, False, 0.0, False)
    assert square.isfinite().all()
    assert param.isposinf().all()


@each_row("op", OPS)
def test_schemas_name_what_is_written(op):
    call = case(op, random.Random(9), [[3], [2, 2]], [torch.float32] * 2)
    torch.library.opcheck(
        getattr(kernels, op).default,
        (*call.lists.values(), *call.args),
        test_utils=("test_schema", "test_faketensor"),
    )
