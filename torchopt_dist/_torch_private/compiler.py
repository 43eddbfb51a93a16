"""Torch's compiler: what it may trace, and what its programs may overwrite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module


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
