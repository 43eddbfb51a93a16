"""What a person writes in the first hour that is not meant so → an error that says what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchopt_dist as todist

NET = torch.nn.Linear(2, 1)
MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: todist.parallelize(todist.mean_reducer),
        "partitioner must not be a reducer, got mean_reducer: write `reducer=todist.mean_reducer`",
    ),
    (
        lambda: todist.parallelize(todist.dim_partitioner, todist.sum_reducer),
        "partitioner must be what dim_partitioner returns: write `todist.dim_partitioner(0)`",
    ),
    (
        lambda: todist.MetaSGD(NET, learning_rate=0.1),
        "MetaSGD: got an unexpected keyword argument 'learning_rate'; its arguments are module, lr, momentum, "
        "dampening, weight_decay, nesterov, moment_requires_grad, maximize, fused",
    ),
    (
        lambda: todist.MetaSGD(NET.parameters(), lr=0.1),
        "`module` must be a torch.nn.Module, got generator: give the module itself, not its parameters",
    ),
    (
        lambda: todist.SGD(NET, lr=0.1),
        "`params` must be tensors, got the module Linear: give `module.parameters()`",
    ),
    (
        lambda: todist.FuncOptimizer(todist.MetaAdam),
        "`impl` must be a GradientTransformation, got type MetaAdam: the function `adam(...)` makes one",
    ),
    (
        lambda: todist.MetaOptimizer(NET, torch.optim.SGD),
        "`impl` must be a GradientTransformation, got type SGD",
    ),
    (
        lambda: todist.chain(todist.clip_grad_norm(1.0), todist.adam),
        "`transformations[1]` must be a GradientTransformation, got function adam: call it with its arguments",
    ),
]


@pytest.mark.parametrize(("mistake", "text"), MISTAKES)
def test_the_error_says_what_to_write(mistake: Callable[[], Any], text: str) -> None:
    with pytest.raises(TypeError) as caught:
        mistake()
    assert str(caught.value) == text
