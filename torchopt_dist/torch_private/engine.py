"""Torch's autograd engine: gradients, its runs, what a backward pass needs, the order of its nodes, who asked.

Torch calls a run's callbacks where it ends well, and only frees them where it fails.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from operator import methodcaller
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import has_torch_function

from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.torch_private.lookup import find


def grad_of_loss(
    loss: Tensor,
    inputs: Sequence[Tensor],
    bar: Tensor | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    in_modes: bool = False,
) -> tuple[OptionalTensor, ...]:
    """``torch.autograd.grad`` of a loss, with ``allow_unused=True``, but without looking at its arguments.

    Torch looks at them in Python, which takes longer than the gradient of a small loss. Without the name, and where a
    compiler or ``__torch_function__`` is to see the call, it is torch's own.

    Args:
        loss: a tensor.
        inputs: the tensors to differentiate with respect to, at least one.
        bar: the gradient of the loss, of its shape and dtype; 1, for a loss of one element, if not given.
        retain_graph: as torch's.
        create_graph: likewise.
        in_modes: what the pass calls, such as a part of the loss under a checkpoint, is seen by the modes of
            ``__torch_function__`` that are active; so it runs in this thread.
    """
    run = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None)
    is_plain = (loss.is_cpu or in_modes) and (bar is not None or loss.is_floating_point())
    is_seen = not in_modes and has_torch_function((loss, *inputs))
    if run is None or not is_plain or is_seen or torch.compiler.is_compiling():
        return torch.autograd.grad(
            loss, inputs, bar, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True
        )
    bars = (torch.ones_like(loss, memory_format=torch.preserve_format) if bar is None else bar,)
    keep = create_graph if retain_graph is None else retain_graph
    threads = torch.autograd.set_multithreading_enabled(False) if in_modes else nullcontext()
    with threads:
        found: tuple[OptionalTensor, ...] = run(
            (loss,), bars, keep, create_graph, tuple(inputs), allow_unreachable=True, accumulate_grad=False
        )
    return found


def grad_of_edges(
    edges: Sequence[GradientEdge],
    inputs: Sequence[Tensor],
    bars: Sequence[Tensor],
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> tuple[OptionalTensor, ...]:
    """As :func:`grad_of_loss`, for edges of the graph and their gradients, in a time that grows with their number.

    Torch asks the node of each edge for all its results, so of a node that has made all parameters it takes the square
    of their number: 0.2 s for 500. Without the name it is torch's own.
    """
    run = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None)
    if run is None or torch.compiler.is_compiling():
        return torch.autograd.grad(
            edges, inputs, bars, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True
        )
    keep = create_graph if retain_graph is None else retain_graph
    found: tuple[OptionalTensor, ...] = run(
        tuple(edges),
        tuple(bars),
        keep,
        create_graph,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def engine_run() -> int:
    """A number of the backward that runs in this thread, which no other backward has; -1 outside of any.

    Without the name the answer is always -1: an error of a share's backward may come after ``.grad`` has been written,
    and workers send their gradients when the backward is done.
    """
    run = find("_C._current_graph_task_id")
    return -1 if run is None else int(run())


def engine_keeps_graph() -> bool:
    """Whether the backward that runs in this thread was asked for with ``retain_graph=True``.

    Without the name the answer is always yes: a worker then keeps a graph until the caller's part of it is gone.
    """
    keeps_graph = find("_C._autograd._get_current_graph_task_keep_graph")
    return True if keeps_graph is None else bool(keeps_graph())


def engine_needs_node(node: Any) -> bool:
    """Whether the backward that runs in this thread goes on to a node, or was asked for a gradient there.

    Without the name the answer is always yes: workers then compute gradients that are not needed.
    """
    executes = getattr(torch._C, "_will_engine_execute_node", None)
    if executes is None or node is None:
        return executes is None
    try:
        return bool(executes(node))
    except RuntimeError:  # torch does not say it of a leaf that was asked for
        return True


def engine_captures_leaf(node: Any) -> bool:
    """Whether the backward that runs in this thread is a ``torch.autograd.grad`` that was asked for this leaf.

    Without the name the answer is always no: such a gradient is then missing instead of an error.
    """
    executes = find("_C._will_engine_execute_node")
    if executes is None or node is None:
        return False
    try:
        executes(node)
    except RuntimeError:
        return True
    return False


def evaluating_node() -> Any:
    """The node of the graph that torch's engine evaluates in this thread, for its hooks.

    Without the name there is none: the third derivative of a normalization is then torch's.
    """
    node = find("_C._current_autograd_node")
    return None if node is None else node()


def set_sequence_number(tensor: Tensor, number: int) -> None:
    """Set the priority of the node that made ``tensor``: the engine runs the ready node with the highest number first.

    Without the name nodes run in torch's own order: gradients stay the same, and workers overlap less in backward.
    """
    set_number = getattr(tensor.grad_fn, "_set_sequence_nr", None)
    if set_number is not None:
        set_number(number)


def next_sequence_number() -> int:
    """The number that this thread's next node gets; each thread counts for itself.

    Without the name the answer is always 0.
    """
    peek = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return 0 if peek is None else int(peek())


def sequence_numbers(node: Any) -> Callable[[Any], int]:
    """A function of a node like this one → its number, in the order in which its thread made its nodes.

    A leaf has the highest number. Without the name each node has that number: an inner loop by finite differences then
    counts what was computed from a meta tensor before the loop as a part of its loss.
    """
    if not hasattr(node, "_sequence_nr"):
        return lambda _: 2**64 - 1
    return methodcaller("_sequence_nr")


def advance_sequence_numbers(number: int) -> None:
    """Let this thread's next node have at least that number, as if the thread had made all nodes before, too.

    Where two nodes are ready, the engine runs the one with the higher number, and adds up gradients in that order. So
    if several threads make a graph, the last bit of a gradient depends on how many nodes each thread made before.
    Without the name it depends on that here, too.
    """
    if next_sequence_number() < number and find("_C._autograd._get_sequence_nr") is not None:
        leaf = torch.zeros((), requires_grad=True, device="cpu")
        with torch.enable_grad():
            for _ in range(number - next_sequence_number()):
                leaf.view(())


_THREAD = threading.local()


def asking_thread() -> object:
    """An object for this thread; in a thread of the engine, that of the thread that asked for the backward pass.

    Without the names each thread has its own: a loss that differentiates an inner loop on a GPU, where the engine uses
    another thread, then waits for its own turn to draw random numbers for as long as there is patience.
    """
    token: object = getattr(_THREAD, "token", None)
    if token is None:
        token = _THREAD.token = object()
    if not torch.cuda.is_initialized():
        # Without a GPU the engine uses the asking thread itself, if no more than 60 backward passes are nested.
        # What torch keeps for a thread is freed by C++ code at the thread's end, which aborts the process if the
        # interpreter is ending, too.
        return token
    core = torch._C
    try:
        if not core._is_key_in_tls("torchopt_dist"):
            # Torch 2.11 gives back a reference at the thread's end that it has not taken.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(token))
            core._stash_obj_in_tls("torchopt_dist", token)
        return core._get_obj_in_tls("torchopt_dist")
    except AttributeError:
        return token


T = TypeVar("T")


class _Held(Generic[T]):
    """Is called by a run of the engine at its end; by one that fails it is freed only."""

    def __init__(self) -> None:
        self.thing: T | None = None
        self._thread: int | None = threading.get_ident()

    def __call__(self) -> None:
        self.thing = self._thread = None

    def __del__(self) -> None:
        if self._thread == threading.get_ident():
            forget_failed_runs()

    def take(self) -> T | None:
        thing, self.thing = self.thing, None
        return thing


def held_by_run(make: Callable[[], T]) -> Callable[[], T | None]:
    """Let the backward that runs in this thread hold an object until it ends, in whatever way.

    If it fails, what else it has left is freed, too; see :func:`forget_failed_runs`. Without the name, what is returned
    holds the object.

    Args:
        make: makes the object.

    Returns:
        What takes the object back; ``None`` if it has been taken, or the backward has ended.
    """
    held, runs = _Held[T](), False
    call_at_end = find("autograd.Variable._execution_engine.queue_callback")
    if call_at_end is not None:
        with suppress(RuntimeError):  # there is no backward: somebody has called a node
            call_at_end(held)
            runs = True
    if not runs:
        held()
    held.thing = make()
    return partial(_take, weakref.ref(held)) if runs else held.take


def _take(held: weakref.ref[_Held[T]]) -> T | None:
    found = held()
    return None if found is None else found.take()


class _Told:
    """Is called by a run of the engine at its end; by one that fails it is freed only, and calls a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function

    def __call__(self) -> None:
        self._function = None

    def __del__(self) -> None:
        if self._function is not None:
            self._function()


def when_run_fails(function: Callable[[], object]) -> None:
    """Let a function be called if the backward that runs in this thread fails, wherever it does.

    Without the name it is not called: other ranks then wait for this one, as for one that is late.
    """
    call_at_end = find("autograd.Variable._execution_engine.queue_callback")
    told = _Told(function)
    if call_at_end is not None:
        with suppress(RuntimeError):  # there is no backward: somebody has called a node
            call_at_end(told)
            return
    told()


def forget_failed_runs() -> None:
    """Free what backward passes of this thread that have failed left in the engine's queue.

    These are nodes that were ready to run, with their gradients and all of the graph behind them. Torch keeps them for
    the next backward pass of the thread, which drops them first; here that is one of a single leaf.
    """
    with suppress(Exception):  # such as a lack of memory
        leaf = torch.zeros((), requires_grad=True, device="cpu")
        grad_of_loss(leaf, [leaf], leaf.detach())
