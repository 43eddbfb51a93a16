"""Loops with and without ``compile=True``, whose results are compared; their graphs run as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

MARKS = [
    pytest.mark.compiles,
    pytest.mark.usefixtures("graphs_as_they_are"),
    # torch hides these two by itself, where warnings are not errors
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
X = torch.tensor([[2.0]])
made: list[Any] = []
"""The graphs of the programs that were made."""


def layer(*more: nn.Module) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(1, 1, bias=False), *more)
    nn.init.ones_(next(net.parameters()))
    return net


def both(run: Callable[[bool], Any]) -> Any:
    expected, found = run(False), run(True)
    torch.testing.assert_close(found, expected)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    return found
