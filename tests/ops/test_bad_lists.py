"""Lists that do not go together → an error of the kernel that names the argument, and nothing written."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cases import kernels, needs_kernels

pytestmark = needs_kernels


def adam_call(**changes: Any) -> tuple[tuple[Any, ...], dict[str, list[Tensor]]]:
    lists = {
        name: [torch.ones(2, 3), torch.ones(4)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")
    }
    numbers: dict[str, Any] = {"corrections": torch.ones(2, 2, dtype=torch.float64)}
    for name, value in changes.items():
        (numbers if name in numbers else lists)[name] = value
    return (*lists.values(), *numbers.values(), 0.1, 0.9, 0.9, 1e-8, 0.0, 0.0, False, False), lists


ones, four = torch.ones(2, 3), torch.ones(4)
BAD = {
    "length": ({"grads": [ones]}, r"`grads` must have the length of `params`, 2; got 1"),
    "shape": (
        {"exp_avgs": [ones, ones]},
        r"`exp_avgs\[1\]` must have the shape of `params\[1\]`, \(4\); got \(2, 3",
    ),
    "dtype": (
        {"grads": [ones, four.double()]},
        r"`grads\[1\]` must have the dtype of `params\[1\]`, Float; got Do",
    ),
    "integers": (
        {
            name: [torch.ones(2, 3), torch.ones(4).long()]
            for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")
        },
        r"`params\[1\]` must be float64, float32, float16 or bfloat16; got Long",
    ),
    "complex": (
        {
            name: [torch.ones(2, 3), torch.ones(4).cfloat()]
            for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")
        },
        r"`params\[1\]` must be float64, float32, float16 or bfloat16; got ComplexFloat",
    ),
    "expanded": (
        {"exp_avg_sqs": [ones, four[:1].expand(4)]},
        r"`exp_avg_sqs\[1\]` must not overlap itself in mem",
    ),
    "corrections' shape": (
        {"corrections": torch.ones(2).double()},
        r"`corrections` must have the shape \(2, 2\); g",
    ),
    "corrections' dtype": ({"corrections": torch.ones(2, 2)}, r"`corrections` must be float64; got Float"),
    "sparse": ({"grads": [ones, four.to_sparse()]}, r"SparseCPU"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lists_are_named_and_nothing_is_written(name):
    changes, message = BAD[name]
    args, lists = adam_call(**changes)
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        kernels.adam_(*args)
    for tensors in lists.values():
        assert all((tensor.to_dense() == 1).all() for tensor in tensors)


def test_memory_shared_by_two_that_are_written():
    base = torch.ones(9)
    shifted, same = [base[:4], base[3:7]], [base[:4], base[:4]]
    strips = torch.ones(4, 2)
    for one, other in (shifted, same, [strips[:, 0], strips[:, 0]]):
        args, _ = adam_call(params=[ones, one], exp_avgs=[torch.ones(2, 3), other])
        with pytest.raises(
            RuntimeError, match=r"adam_: `exp_avgs\[1\]` must not share memory with `params\[1\]`$"
        ):
            kernels.adam_(*args)
    args, _ = adam_call(params=[ones.clone(), shifted[0]], grads=[ones, shifted[1]])
    with pytest.raises(
        RuntimeError, match=r"`grads\[1\]` must not share memory with `params\[1\]` unless it is the"
    ):
        kernels.adam_(*args)
    assert (base == 1).all()
    assert (ones == 1).all()
    args, _ = adam_call(params=[ones.clone(), strips[:, 0]], exp_avgs=[torch.ones(2, 3), strips[:, 1]])
    kernels.adam_(*args)
    assert (strips[:, 1] == 1).all()
    assert (strips[:, 0] < 1).all()


def test_another_device_changes_nothing_on_this_one():
    args, lists = adam_call(grads=[torch.ones(2, 3), torch.ones(4, device="meta")])
    with suppress(RuntimeError, NotImplementedError):  # torch's refusal; a fake kernel does nothing
        kernels.adam_(*args)
    assert (lists["params"][0] == 1).all()


def test_lists_that_must_not_be_there():
    empty = torch.empty(0, dtype=torch.float64)
    with pytest.raises(
        RuntimeError, match=r"sgd_: `momentum_buffers` must be empty where `momentum` is 0; got 1 te"
    ):
        kernels.sgd_([four], [four], [four], empty, 0.1, 0.0, False, 0.0, False)
    with pytest.raises(
        RuntimeError, match=r"sgd_: `momentum_buffers` must have the length of `params`, 1; got 0"
    ):
        kernels.sgd_([four], [four], [], empty.new_ones(1), 0.1, 0.9, False, 0.0, False)
    with pytest.raises(RuntimeError, match=r"sgd_: `taken` must have the shape \(1\); got \(0\)"):
        kernels.sgd_([four], [four], [four.clone()], empty, 0.1, 0.9, False, 0.0, False)
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
