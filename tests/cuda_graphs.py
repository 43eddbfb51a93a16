"""CUDA graphs without a GPU: programs that have their inputs and results in the same memory at each run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from torchopt_dist.core import programs

KERNELS = programs.kernels


def emulate_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let programs be traced only, and run as CUDA graphs where they ask for it; the graphs that do."""
    made: list[Any] = []

    def compile(
        graph: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> Callable[..., Any]:
        del inputs
        if not options["triton.cudagraphs"]:
            return graph
        made.append(graph)
        return _Captured(graph)

    monkeypatch.setattr(programs, "kernels", KERNELS)
    monkeypatch.setattr("torch._inductor.compile", compile)
    return made


class _Captured:
    """A graph in memory of its own."""

    def __init__(self, graph: Callable[..., Any]) -> None:
        self._graph = graph
        self._inputs: list[Any] = []
        self._results: list[Any] = []

    def __call__(self, *inputs: Any) -> list[Any]:
        self._inputs = _written(self._inputs, inputs)
        self._results = _written(self._results, self._graph(*self._inputs))
        return self._results


def _written(memory: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The memory with these values in it; copies of the values where there is none yet."""
    if not memory:
        return [
            x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in values
        ]
    with torch.no_grad():
        for own, value in zip(memory, values, strict=True):
            if isinstance(own, Tensor):
                own.copy_(value)
    return list(memory)
