"""Torch's compiler: what it may trace, and what its programs may overwrite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor


@contextmanager
def tracing_gradients() -> Iterator[None]:
    """A context in which the compiler traces ``torch.autograd.grad``, for programs that can go backward several times.

    Without the first name the compiler refuses such a function, and it runs as it is; without the second one, a second
    backward pass through a program, with ``retain_graph=True``, is an error of torch's that says so.
    """
    before = []
    for module, name, value in _SETTINGS:
        config = import_module(module)  # it takes a second, and only programs that compile need it
        if hasattr(config, name):  # not by `config.patch`, which makes a class at each call
            before.append((config, name, getattr(config, name)))
            setattr(config, name, value)
    try:
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)


_SETTINGS = (
    ("torch._dynamo.config", "trace_autograd_ops", True),
    ("torch._functorch.config", "donated_buffer", False),
)


def gradients_are_traced() -> bool:
    """Whether the compiler traces the code that asks, in the context of :func:`tracing_gradients`."""
    return torch.compiler.is_compiling() and bool(getattr(torch._dynamo.config, "trace_autograd_ops", False))


class TracedSamples(NamedTuple):
    """The ``vmap`` around code that the compiler traces."""

    level: int
    size: int

    def values(self, tensor: Tensor) -> Tensor:
        """The values of all samples, along dimension 0."""
        return torch._functorch.predispatch._remove_batch_dim(tensor, self.level, self.size, 0)

    def tensor(self, values: Tensor) -> Tensor:
        """The tensor that has one entry of ``values`` for each sample."""
        return torch._functorch.predispatch._add_batch_dim(values, 0, self.level)


def traced_samples() -> TracedSamples | None:
    """The innermost ``vmap``, asked for in words that the compiler can trace; ``None`` outside of ``vmap``.

    Without the names the compiler refuses what it traces, and that runs as it is.
    """
    if not torch._C._are_functorch_transforms_active():
        return None
    interpreter: Any = torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter()
    return TracedSamples(interpreter.level(), interpreter.batch_size())
