"""Lists that do not go together → an error of the kernel that names the argument, and nothing written."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cases import kernels, needs_kernels
from tests.rows import each_row

pytestmark = needs_kernels


NAMES = ("params", "grads", "square_avgs", "grad_avgs", "momentum_buffers")


def rmsprop_call(**changes: Any) -> tuple[tuple[Any, ...], dict[str, list[Tensor]]]:
    lists = {name: [torch.ones(2, 3), torch.ones(4)] for name in NAMES} | changes
    return (*lists.values(), 0.1, 0.9, 1e-8, 0.5, False, 0.0, False), lists


ones, four = torch.ones(2, 3), torch.ones(4)
BAD = {
    "length": ({"grads": [ones]}, r"`grads` must have the length of `params`, 2; got 1"),
    "shape": (
        {"square_avgs": [ones, ones]},
        r"`square_avgs\[1\]` must have the shape of `params\[1\]`, \(4\); got \(2, 3",
    ),
    "dtype": (
        {"grads": [ones, four.double()]},
        r"`grads\[1\]` must have the dtype of `params\[1\]`, Float; got Do",
    ),
    "integers": (
        {name: [torch.ones(2, 3), torch.ones(4).long()] for name in NAMES},
        r"`params\[1\]` must be float64, float32, float16 or bfloat16; got Long",
    ),
    "complex": (
        {name: [torch.ones(2, 3), torch.ones(4).cfloat()] for name in NAMES},
        r"`params\[1\]` must be float64, float32, float16 or bfloat16; got ComplexFloat",
    ),
    "expanded": (
        {"grad_avgs": [ones, four[:1].expand(4)]},
        r"`grad_avgs\[1\]` must not overlap itself in mem",
    ),
    "sparse": ({"grads": [ones, four.to_sparse()]}, r"SparseCPU"),
}


@each_row("name", BAD)
def test_bad_lists_are_named_and_nothing_is_written(name):
    changes, message = BAD[name]
    args, lists = rmsprop_call(**changes)
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        kernels.rmsprop_(*args)
    for tensors in lists.values():
        assert all((tensor.to_dense() == 1).all() for tensor in tensors)


def test_memory_shared_by_two_that_are_written():
    base = torch.ones(9)
    shifted, same = [base[:4], base[3:7]], [base[:4], base[:4]]
    strips = torch.ones(4, 2)
    for one, other in (shifted, same, [strips[:, 0], strips[:, 0]]):
        args, _ = rmsprop_call(params=[ones, one], square_avgs=[torch.ones(2, 3), other])
        with pytest.raises(
            RuntimeError, match=r"rmsprop_: `square_avgs\[1\]` must not share memory with `params\[1\]`$"
        ):
            kernels.rmsprop_(*args)
    args, _ = rmsprop_call(params=[ones.clone(), shifted[0]], grads=[ones, shifted[1]])
    with pytest.raises(
        RuntimeError, match=r"`grads\[1\]` must not share memory with `params\[1\]` unless it is the"
    ):
        kernels.rmsprop_(*args)
    assert (base == 1).all()
    assert (ones == 1).all()
    args, _ = rmsprop_call(params=[ones.clone(), strips[:, 0]], square_avgs=[torch.ones(2, 3), strips[:, 1]])
    kernels.rmsprop_(*args)
    assert (strips[:, 1] == 1).all()
    assert (strips[:, 0] < 1).all()


def test_another_device_changes_nothing_on_this_one():
    args, lists = rmsprop_call(grads=[torch.ones(2, 3), torch.ones(4, device="meta")])
    with suppress(RuntimeError, NotImplementedError):  # torch's refusal; a fake kernel does nothing
        kernels.rmsprop_(*args)
    assert (lists["params"][0] == 1).all()


@each_row(
    ("corrections", "message"),
    [
        (torch.ones(2).double(), r"adam: `corrections` must have the shape \(1, 2\); got \(2\)"),
        (torch.ones(1, 2), r"adam: `corrections` must be float64; got Float"),
    ],
)
def test_corrections_of_another_shape_or_dtype(corrections, message):
    with pytest.raises(RuntimeError, match=message):
        kernels.adam([four], [four], [four], [], corrections, 1.0, 1.0, 0.9, 0.9, 1e-8, 0.0, 0.0, False)


def test_lists_that_must_not_be_there():
    empty = torch.empty(0, dtype=torch.float64)
    with pytest.raises(
        RuntimeError, match=r"sgd: `momentum_buffers` must be empty where `momentum` is 0; got 1 te"
    ):
        kernels.sgd([four], [four], [], empty, 0.1, 0.0, False, 0.0, False)
    with pytest.raises(
        RuntimeError, match=r"sgd: `momentum_buffers` must have the length of `grads`, 1; got 0"
    ):
        kernels.sgd([four], [], [], empty.new_ones(1), 0.1, 0.9, False, 0.0, False)
    with pytest.raises(RuntimeError, match=r"sgd: `taken` must have the shape \(1\); got \(0\)"):
        kernels.sgd([four], [four], [], empty, 0.1, 0.9, False, 0.0, False)
    with pytest.raises(
        RuntimeError, match=r"rmsprop_: `momentum_buffers` must be empty where `momentum` is 0"
    ):
        kernels.rmsprop_([four], [four], [four.clone()], [], [four], 0.1, 0.9, 0.1, 0.0, False, 0.0, False)
    numbers = (1.0, 0.9, 0.1, 0.0, False)
    with pytest.raises(RuntimeError, match=r"`grad_avg_grads` must be empty where `grad_avgs` is; got 1"):
        kernels.rmsprop_backward([four], [], [four], [], [four], [four], [], *numbers)
    with pytest.raises(RuntimeError, match=r"rmsprop_backward: `momentum_buffer_grads` must be empty wher"):
        kernels.rmsprop_backward([four], [], [], [four], [four], [four], [], *numbers)
    with pytest.raises(RuntimeError, match=r"rmsprop: `momentum_buffers` must be empty where `momentum` is"):
        kernels.rmsprop([four], [four], [], [four], [], *numbers)
    with pytest.raises(RuntimeError, match=r"`momentum_buffers` must have the length of `grads`, 1; got 0"):
        kernels.rmsprop([four], [four], [], [], [], 1.0, 0.9, 0.1, 0.5, False)
    with pytest.raises(RuntimeError, match=r"`grad_avgs` must have the length of `grads`, 1; got 2"):
        kernels.rmsprop([four], [four], [four, four], [], [], *numbers)
    assert (four == 1).all()
