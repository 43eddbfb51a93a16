"""Torch's graphs and their tensors: versions, hooks, memory, forward mode, and functions that become nodes."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import ModuleType
from typing import Any

import optree
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction, once_differentiable

from torchopt_dist.torch_private.lookup import find
from torchopt_dist.torch_private.transforms import transforms_are_active

_ONCE = once_differentiable(lambda _: None).__code__
"""The code of every backward that is so marked."""


def tensor_version(tensor: Tensor) -> int | None:
    """How often a tensor has been changed in place.

    It is the tensor's own, whatever stands for it in an active mode of ``torch.overrides``.

    Without the name the answer is ``None``: changes in place between forward and backward go unnoticed.
    """
    own = getattr(torch._C, "DisableTorchFunction", None)
    with nullcontext() if own is None else own():
        return getattr(tensor, "_version", None)


def without_modes() -> AbstractContextManager[object]:
    """A context in which tensors are asked themselves, not those that a mode puts in their places.

    Without the name modes are asked: where a loop has replaced tensors, one that is closed over may seem to have been
    changed in place, which is an error.
    """
    disable = find("_C.DisableTorchFunction")
    return nullcontext() if disable is None else disable()


def has_hooks(tensor: Tensor) -> bool:
    """Whether a hook is called with each gradient of a tensor.

    Without the name the answer is always yes: differences of gradients are taken at copies of meta tensors, which takes
    longer.
    """
    return bool(getattr(tensor, "_backward_hooks", True))


def bytes_of_results(node: Any) -> int:
    """How many bytes the results of a node of the graph take; views count as well.

    Without the name the answer is 0: a replayed step may then keep the graph of a gradient that is large.
    """
    found = getattr(node, "_input_metadata", ())
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in found)


@contextmanager
def tensors_entering() -> Iterator[dict[tuple[Any, int], Tensor]]:
    """A context in which each tensor that a node has made is kept when it enters an operation, also in a backward pass.

    Without the name none is: a linear solver then refuses a product that differentiates a graph from outside, unless
    only leaves enter it.

    Yields:
        The tensors; the key is the node, and which of its results a tensor is.
    """
    kept: dict[tuple[Any, int], Tensor] = {}
    mode = find("utils._python_dispatch.TorchDispatchMode")
    if mode is None:
        yield kept
        return

    def enter(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments: Any = [args, kwargs]
        for tensor in optree.tree_leaves(arguments):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                kept.setdefault((tensor.grad_fn, tensor.output_nr), tensor)
        return func(*args, **(kwargs or {}))

    with (
        torch.autograd.set_multithreading_enabled(False),
        type("_Entering", (mode,), {"__torch_dispatch__": enter})(),
    ):
        yield kept


@contextmanager
def memory_of_results(device: torch.device) -> Iterator[Callable[[], int] | None]:
    """A context in which the bytes that operations make on a device are counted as they come and go.

    A backward pass counts as well. A view of what entered an operation is nothing new.

    Without the name nothing is counted: `estimate` says so.

    Yields:
        A function that says how many bytes there were at most at a time; ``None`` where nothing is counted.
    """
    mode = find("utils._python_dispatch.TorchDispatchMode")
    if mode is None:
        yield None
        return
    held, most = dict[int, int](), 0

    def memory(tensors: Any) -> dict[int, torch.UntypedStorage]:
        found = {}
        for tensor in optree.tree_leaves(tensors):
            if isinstance(tensor, Tensor) and tensor.device == device:
                # Neither zeros without memory, which forward mode makes, nor sparse tensors have a place.
                with suppress(RuntimeError, NotImplementedError):
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage
        found.pop(0, None)
        return found

    def count(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal most
        result = func(*args, **(kwargs or {}))
        made = memory(result)
        for place in made.keys() - held.keys() - memory([args, kwargs]).keys():
            held[place] = made[place].nbytes()
            weakref.finalize(made[place], held.pop, place)
        most = max(most, sum(held.values()))
        return result

    with type("_Counting", (mode,), {"__torch_dispatch__": count})():
        yield lambda: most


def is_used_up(node: Any) -> bool:
    """Whether a backward has freed what the graph of a node has saved; looks down to the first node that saves tensors.

    Without the names the answer is always no: a task that returns a loss whose gradients it has left on its worker is
    not told so.
    """
    while node is not None:
        for name in dir(node):
            if name.startswith("_saved_"):
                try:
                    saved = getattr(node, name)
                except RuntimeError:
                    return True
                if isinstance(saved, Tensor):
                    return False
        below = getattr(node, "next_functions", ())
        node = next((one for one, _ in below if one is not None), None)
    return False


def memory_is_shared(tensor: Tensor) -> bool:
    """Whether anything else holds a tensor's memory: a view or an alias of it, a graph that has saved one, an array.

    Without the name the answer is always yes: steps of an inner loop that could be made in place make new tensors.
    """
    holders = find("_C._storage_Use_Count")
    if holders is None:
        return True
    try:
        mine = holders(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse tensor has no memory of this kind
        return True
    return mine > _holders_of_a_new_one(holders)


@functools.cache
def _holders_of_a_new_one(holders: Callable[[int], int]) -> int:
    """How many holders torch counts for memory that a single tensor uses, the object that is asked included."""
    one = torch.empty(1)
    return holders(one.untyped_storage()._cdata)


def forward_mode_is_active() -> bool:
    """Whether a level of forward-mode differentiation is open.

    Without the name the answer is always yes: tensors are asked for their tangents one by one, and formulas run where
    kernels could.
    """
    return getattr(forward_ad, "_current_level", 0) >= 0


def is_batched_gradient(tensor: Tensor) -> bool:
    """Whether a tensor stands for many gradients at a time, as ``is_grads_batched=True`` makes them.

    Without the name the answer is always no: such a gradient of an optimizer's step fails with an error of torch's.
    """
    is_batched = getattr(getattr(torch._C, "_functorch", None), "is_legacy_batchedtensor", None)
    return False if is_batched is None else bool(is_batched(tensor))


@contextmanager
def outside_of_batched_gradients() -> Iterator[int | None]:
    """A context in which what does not depend on batched gradients is computed as without them, and may be random.

    Returns:
        The number that the innermost of such gradients have, for :func:`rows_of_gradient`. Without the names ``None``,
        and random operations in a backward pass fail with torch's error about ``vmap``.
    """
    more, less = find("_C._vmapmode_increment_nesting"), find("_C._vmapmode_decrement_nesting")
    if more is None or less is None:
        yield None
        return
    nesting = more() - 1
    for _ in range(nesting + 1):
        less()
    try:
        yield max(nesting, 1)  # a GPU's thread of the engine knows nothing of the one level that there is
    finally:
        for _ in range(nesting):
            more()


def rows_of_gradient(tensor: Tensor, level: int) -> Tensor:
    """The gradients of which a batched one consists, along dimension 0."""
    rows: Tensor = torch._remove_batch_dim(tensor, level, 1, 0)
    return rows


def batched_gradient(rows: Tensor, level: int) -> Tensor:
    """The reverse of :func:`rows_of_gradient`."""
    made: Tensor = torch._add_batch_dim(rows, 0, level)
    return made


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)`` for an autograd function with ``setup_context``, without binding the arguments.

    Outside ``torch.func`` torch's ``apply`` takes 50 µs to bind the arguments to ``forward``'s signature, which
    positional arguments do not need. Without the names that time is spent.
    """
    unwrap = getattr(getattr(torch, "_functorch", None), "utils", None)
    unwrap = getattr(unwrap, "unwrap_dead_wrappers", None)
    if unwrap is None or transforms_are_active():
        return super(function, function).apply(*args)  # type: ignore[misc]
    return super(torch.autograd.Function, function).apply(*unwrap(args))  # type: ignore[misc]


def once_differentiable_name(kind: type) -> str | None:
    """The name of the autograd function whose nodes are of a class, if its backward is marked as differentiable once.

    Inside ``torch.func`` torch makes another class of it, whose backward closes over the function.

    Without the name of the function's class there is none: a second derivative that torch refuses may then be left out
    of a gradient without an error.
    """
    functions = [getattr(kind, "_forward_cls", None)] if issubclass(kind, BackwardCFunction) else []
    for function in functions:  # which grows
        for way in ("backward", "vjp"):
            backward = getattr(function, way, None)
            while backward is not None:
                if getattr(backward, "__code__", None) is _ONCE:
                    return str(getattr(function, "__qualname__", function))
                held = [cell.cell_contents for cell in getattr(backward, "__closure__", None) or ()]
                functions += [one for one in held if _is_function(one) and one not in functions]
                backward = getattr(backward, "__wrapped__", None)
    return None


def _is_function(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, torch.autograd.Function)


def is_refusal(kind: type) -> bool:
    """Whether nodes of a class are those that torch puts behind what must not be differentiated again; they raise.

    Without its name the answer is always no, with the same consequence.
    """
    return kind.__name__ == "Error"


def ends_gradients_graph(node: Any, gradients: Sequence[Any]) -> bool:
    """Whether a node of ``DTensor.from_local`` redistributes the gradient that it is given, which ends its graph.

    Torch moves the local values of a DTensor there without recording it. Without the names the answer is always no, and
    a second derivative through such a node may be wrong without an error.
    """
    given = getattr(gradients[0], "placements", None) if gradients else None
    wanted = getattr(node, "grad_placements", None) or getattr(node, "forward_input_placements", None)
    if given is None or wanted is None:
        return False
    whole = [placement.is_partial() for placement in wanted]  # of these the gradient is replicated
    return any(
        not one.is_replicate() if partial else one != other
        for one, other, partial in zip(given, wanted, whole, strict=True)
    )


def recomputing_checkpoint() -> tuple[ModuleType, str] | None:
    """The module and the name of what ``torch.utils.checkpoint`` gives the function to that it will call again.

    Without the name there is none: a checkpoint around attention, in a step that is recorded, fails in backward with an
    error of torch's about what was computed again.
    """
    module, name = torch.utils.checkpoint, "_checkpoint_without_reentrant_generator"
    return (module, name) if hasattr(module, name) else None
