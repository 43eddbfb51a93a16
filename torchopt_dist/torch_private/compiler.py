"""Torch's compiler: what it may trace, and what its programs may overwrite."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor


def compiler_overlooks() -> bool:
    """Whether none of the compiler's guards sees other defaults of a function, nor a ``forward`` of an instance."""
    return not torch.__version__ >= "2.13"  # by numbers: a `TorchVersion`; 2.11 overlooks them


@contextmanager
def tracing_gradients(limit: int = 8, inputs: Iterable[str] = ()) -> Iterator[None]:
    """A context in which the compiler traces ``torch.autograd.grad``, for programs that can go backward several times.

    A function may have ``limit`` programs there. Whole numbers whose names in the compiler's words match one of
    ``inputs``, which it would take for constants for good, are inputs.

    Tensors from outside may have a history, which the gradient must not go into: it is taken with respect to tensors
    that the function itself has made.

    Without the first name the compiler refuses such a function, and it runs as it is; without the second one, a second
    backward pass through a program, with ``retain_graph=True``, is an error of torch's that says so. Without that of
    the third function, what uses a tensor with a history is refused.
    """
    before = []
    _let_inputs_have_a_history()
    ours = _ours.set(True)
    own = (
        ("torch._dynamo.config", "recompile_limit", limit),
        ("torch.compiler.config", "dynamic_sources", ",".join(inputs)),
    )
    for module, name, value in (*_SETTINGS, *own):
        config = _imported(module)  # it takes a second, and only programs that compile need it
        if hasattr(config, name):  # not by `config.patch`, which makes a class at each call
            before.append((config, name, getattr(config, name)))
            setattr(config, name, value)
    try:
        yield
    finally:
        _ours.reset(ours)
        for config, name, value in before:
            setattr(config, name, value)


def _let_inputs_have_a_history() -> None:
    """Have the compiler find no history of inputs while it traces in :func:`tracing_gradients`, once for all."""
    module: Any = import_module("torch._dynamo.variables.torch")
    torchs = getattr(module, "_collect_all_grad_fns", None)
    if torchs is not None and not isinstance(torchs, _Histories):
        module._collect_all_grad_fns = _Histories(torchs)
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_is_logged)  # once, however often it is added


def _is_logged(record: logging.LogRecord) -> bool:
    """Not what torch says at length where there is one program too many: a warning says it."""
    return not (_ours.get() and "recompile_limit" in record.getMessage())


def is_one_program_too_many(error: Exception) -> bool:
    """Whether an error says that there are as many programs already as there may be.

    Without the name every such error is a refusal for good.
    """
    return type(error).__name__ == "FailOnRecompileLimitHit"


def as_input(number: int) -> int:
    """A whole number that is an input of each program; without the name it is a constant of the first one."""
    made: type[int] = getattr(import_module("torch.fx.experimental.sym_node"), "DynamicInt", int)
    return made(number)


def source_of_arrays() -> type | None:
    """The class of where an input of a graph is from that is an array of numpy; without the name arrays are refused."""
    made: type | None = getattr(_imported("torch._dynamo.source"), "NumpyTensorSource", None)
    return made


def users_of_arrays(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Of a graph's inputs those that are arrays of numpy, each with each node that it goes into."""
    kind = source_of_arrays()
    for node in graph.graph.find_nodes(op="placeholder"):
        if kind is not None and isinstance(getattr(node, "_dynamo_source", None), kind):
            yield from ((node, user) for user in node.users)


class _Histories:
    """The nodes of the graph that a tensor is from, or none where they are not asked for."""

    def __init__(self, torchs: Callable[[Tensor], set[Any]]) -> None:
        self._torchs = torchs

    def __call__(self, tensor: Tensor) -> set[Any]:
        """Find them."""
        return set() if _ours.get() else self._torchs(tensor)


_imported = cache(import_module)
_ours: ContextVar[bool] = ContextVar("ours", default=False)
_SETTINGS = (
    ("torch._dynamo.config", "trace_autograd_ops", True),
    # A hook that a module gets after the first call makes another program.
    ("torch._dynamo.config", "skip_nnmodule_hook_guards", False),
    # A whole number of a module that changes becomes an input, as others do.
    ("torch._dynamo.config", "allow_unspec_int_on_nn_module", True),
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


def original_of(function: Any) -> Any:
    """The function that a compiled one was made of; ``None`` for one that is not.

    Without the name the answer is always ``None``: where a name that a compiled loss reads was bound anew before the
    backward pass, a copy of what the compiler has put around it may find the new meaning.
    """
    return vars(function).get("_torchdynamo_orig_callable")
