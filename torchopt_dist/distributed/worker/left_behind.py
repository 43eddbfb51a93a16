"""A call's payload, while it runs → what its tasks leave on this worker that the caller does not get, as a warning.

Four things stay on a worker. Gradients of its own parameters: a function that is sent by its name uses the worker's
global variables, those that go with a function's code are the worker's, too, and the graph of a call ends at the
tensors of its message. Gradients in ``.grad``: tasks work on copies, and a ``backward()`` inside of one writes there.
Steps of an optimizer of torch's, which change the copies in place. And buffers that a task has changed. This takes
time, so it is looked at once a function, unless the call is strict.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor, nn

from torchopt_dist.core.code_names import reads
from torchopt_dist.core.functional import replaced
from torchopt_dist.core.graphs import leaves_behind
from torchopt_dist.core.inputs import Seen
from torchopt_dist.core.reached import name_of
from torchopt_dist.core.unconnected import Unconnected, unconnected
from torchopt_dist.core.vmap import same_values
from torchopt_dist.distributed.messages.payload import Payload
from torchopt_dist.distributed.serialization.names import code_of
from torchopt_dist.distributed.worker.buffers import Place, buffers_in
from torchopt_dist.torch_private import buffers_of, is_used_up

__all__ = ["LeftBehind"]


class LeftBehind:
    """What the tasks of a call, which get these tensors, leave on this worker.

    ``apart`` are tensors that only global variables hold that came with the code of functions.
    """

    def __init__(self, payload: Payload, tensors: Sequence[Tensor], apart: Sequence[Tensor]) -> None:
        self._payload = payload
        self._tensors = tensors
        self._apart = apart
        self._inputs = Seen(tensor for tensor in tensors if tensor.requires_grad)
        self._before = _buffers_of(payload)
        self._unconnected: Sequence[Unconnected] = ()
        self._made: set[int] = set()  # the ids of the parameters that were made, as long as they live

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context in which this thread runs the tasks."""

        def note(torchs: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            parameter = torchs(*args, **kwargs)
            self._made.add(id(parameter))
            return parameter

        parameters = replaced(nn.Parameter, {"__new__": note})
        lazy = replaced(nn.UninitializedParameter, {"__new__": note})
        with parameters, lazy, unconnected() as self._unconnected:
            yield

    def warning(self, values: list[Any], known: set[object]) -> str | None:
        """The warning for the caller, if there is one; it is raised as :class:`RuntimeError` if the call is strict.

        The function is added to the known ones. One that uses a parameter that it has made is looked at once more: the
        next call may find that parameter in a cache.
        """
        function = self._payload.function
        tree: Any = values
        returned: list[Any] = optree.tree_leaves(tree)
        lost, uses_made = self._lost_gradients(returned)
        told = (lost, self._changed_buffers(), self._changed_inputs(returned), self._left_gradients(returned))
        found = [text for text in told if text]
        once_more = ("once more", code_of(function))
        known.add(once_more if uses_made and not found and once_more not in known else code_of(function))
        text = ". ".join(found)
        if text and self._payload.options.strict:
            raise RuntimeError(f"{text}, or drop strict=True")
        return text or None

    def _lost_gradients(self, returned: list[Any]) -> tuple[str | None, bool]:
        """About leaves below the results that are not the caller's; and whether the function has made one of them."""
        name, inputs = f"`{name_of(self._payload.function)}`", self._tensors
        outputs = [leaf for leaf in returned if isinstance(leaf, Tensor)]
        parts = [tensor for leaf in returned if isinstance(leaf, nn.Module) for tensor in leaf.parameters()]
        leaves = leaves_behind([output for output in outputs if not output.is_leaf])[1]
        silent = _silent(name, self._unconnected, [*leaves, *outputs], inputs) if leaves else None
        mine = {id(tensor) for tensor in (*inputs, *outputs, *parts)}
        leaves = [leaf for leaf in leaves if id(leaf) not in mine]
        names: dict[int, str] = {}
        for path, tensor in _globals_of(self._payload.function, set()) if leaves else ():
            names.setdefault(id(tensor), path)
        brought = {id(leaf) for leaf in self._apart}
        lost: list[str] = []
        uses_made = False
        for leaf in leaves:
            if id(leaf) in names:
                lost.append(names[id(leaf)])
            elif id(leaf) in brought:
                lost.append(f"a tensor of shape {tuple(leaf.shape)} in a global variable")
            elif id(leaf) in self._made:
                uses_made = True
            elif isinstance(leaf, nn.Parameter):  # which was there before
                lost.append(f"a parameter of shape {tuple(leaf.shape)} that the worker holds")
        if not lost:
            return silent, uses_made
        return (
            f"{name} uses what is not among its arguments: {_listed(lost)}. The gradients of these do not come back "
            "from a worker: pass the module or the tensors as arguments"
        ), uses_made

    def _left_gradients(self, returned: list[Any]) -> str | None:
        """About inputs in whose ``.grad`` the function has left a gradient that nobody gets.

        A gradient is of use if the function has changed its tensor in place, as an optimizer's step does, if it returns
        what has the gradient's shape, or if the caller can still differentiate what it returns.
        """
        changed = self._inputs.changed()
        grads = {id(leaf): leaf.grad for n, leaf in enumerate(self._inputs.tensors) if n not in changed}
        left = {key: grad for key, grad in grads.items() if grad is not None and not grad.requires_grad}
        left = {key: grad for key, grad in left.items() if grad.is_sparse or grad.any()}
        if not left:
            return None
        arrays = [leaf for leaf in returned if isinstance(leaf, (Tensor, np.ndarray))]
        for found in arrays:
            if isinstance(found, Tensor) and found.grad_fn is not None and not is_used_up(found.grad_fn):
                return None
            if any(_may_be_of(grad, found) for grad in left.values()):
                return None
        sizes = {math.prod(found.shape) for found in arrays if found.ndim}
        if sum(grad.numel() for grad in left.values()) in sizes:
            return None
        names: dict[int, str] = {}
        for where, tensor in (place for places in self._places() for place in places):
            names.setdefault(id(tensor), where)
        lost = [names.get(key, f"a tensor of shape {tuple(grad.shape)}") for key, grad in left.items()]
        return (
            f"`{name_of(self._payload.function)}` calls `backward()` on a worker, where the gradients of what it has "
            f"received stay: {_listed(lost)}. The caller does not get them: return the loss and call `backward()` "
            "outside of the function, or return the gradients"
        )

    def _places(self) -> Iterator[list[tuple[str, Tensor]]]:
        """The tensors that each task has got, with their places."""
        for args, kwargs in self._payload.tasks:
            yield [*_tensors_in("args", args), *_tensors_in("kwargs", kwargs)]

    def _changed_inputs(self, returned: list[Any]) -> str | None:
        """About inputs changed in place that several tasks share, or from which results with a gradient come."""
        changed = {id(self._inputs.tensors[number]) for number in self._inputs.changed()}
        if not changed:
            return None
        names: dict[int, str] = {}
        shared = False
        for found in self._places():
            own = {id(tensor): where for where, tensor in found if id(tensor) in changed}
            shared |= not own.keys().isdisjoint(names)
            names = {**own, **names}
        connected = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in returned)
        if not names or not (shared or connected):
            return None
        why = ["each task on a worker begins with what the one before has left"] if shared else []
        why += ["no gradient goes back through such a step"] if connected else []
        return (
            f"`{name_of(self._payload.function)}` has changed in place what it has received, as an optimizer of "
            f"torch's does: {_listed([*names.values()])}. But {', and '.join(why)}: adapt a copy by "
            "`todist.module_clone` and `todist.MetaSGD`, or train a `copy.deepcopy`"
        )

    def _changed_buffers(self) -> str | None:
        """About buffers that have changed since, which the caller does not get."""
        changed = [
            f"`{_buffer_name(self._payload.function, place)}`"
            for place, before in self._before
            if (now := buffers_of(place.owner).get(place.name)) is not None and not same_values(before, now)
        ]
        if not changed:
            return None
        return (
            f"`{name_of(self._payload.function)}` has changed buffers of its arguments, which do not come back from a "
            f"worker: {_listed(changed)}. Write "
            '`parallelize(..., buffers="mean")`, or "first", to set the caller\'s; or let the function leave them '
            "alone, as `eval()` or `track_running_stats=False` does"
        )


def _listed(found: Sequence[str]) -> str:
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def _silent(
    name: str, noted: Sequence[Unconnected], reached: Sequence[Tensor], inputs: Sequence[Tensor]
) -> str | None:
    """A sentence about inner steps, or an input that an inner loop uses, on which no result with a graph depends."""
    moved = [tensor for note in noted if note.moved for tensor in note.tensors if tensor.grad_fn is not None]
    if moved and not leaves_behind(reached, moved)[0]:
        return (
            f"{name} makes inner steps, and nothing that it returns depends on them: take the query loss of the module "
            "that was stepped, not of the one that it was cloned from"
        )
    for tensors, why, of_step in noted:
        for tensor in () if of_step else tensors:
            behind = set(map(id, leaves_behind([tensor])[1]))
            if not behind.isdisjoint(map(id, inputs)) and behind.isdisjoint(map(id, reached)):
                return f"{name} returns what has no path to a tensor of shape {tuple(tensor.shape)}: {why}"
    return None


def _globals_of(function: Any, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with their names, in global variables that a function and the functions that it calls mention."""
    if isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        function = type(function).forward
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or id(function) in seen or _is_torchs(function):
        return
    seen.add(id(function))
    for name in sorted(reads(function.__code__).variables):
        if name in function.__globals__:
            value = function.__globals__[name]
            yield from _tensors_in(name, value)
            yield from _globals_of(value, seen)


def _is_torchs(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in ("torch", "torchopt_dist")


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a module, or the tensors in a tree, each with its expression."""
    if isinstance(value, nn.Module):
        yield from ((f"{name}.{inner}", parameter) for inner, parameter in value.named_parameters())
    elif isinstance(value, (Tensor, dict, list, tuple)):
        tree: Any = value
        accessors, leaves, _ = optree.tree_flatten_with_accessor(tree)
        for accessor, leaf in zip(accessors, leaves, strict=True):
            if isinstance(leaf, Tensor):
                yield accessor.codify(name), leaf
            elif isinstance(leaf, nn.Module):
                yield from _tensors_in(accessor.codify(name), leaf)


def _may_be_of(grad: Tensor, returned: Tensor | np.ndarray[Any, Any]) -> bool:
    if grad.shape != tuple(returned.shape):
        return False
    return grad.numel() > 1 or bool(torch.as_tensor(returned).detach().to(grad) == grad)


def _buffers_of(payload: Payload) -> list[tuple[Place, Tensor]]:
    """The buffers of the modules among the arguments of a payload's tasks, each once, and a copy of each."""
    found: dict[int, tuple[Place, Tensor]] = {}
    for args, kwargs in payload.tasks:
        for place in buffers_in(payload.function, args, kwargs):
            if id(place.tensor) not in found:
                found[id(place.tensor)] = place, place.tensor.clone()
    return [*found.values()]


def _buffer_name(function: Any, place: Place) -> str:
    """A buffer's name, after that of the argument that it is in."""
    path, name = place.key
    match = re.match(r"\[0\]\[(\d+)\](.*)|\[1\]\['(\w+)'\](.*)", path)
    if match is None:
        return name
    number, rest, keyword, more = match.groups()
    if number is None:
        return f"{keyword}{more}.{name}"
    try:
        parameters = [
            p.name for p in inspect.signature(function).parameters.values() if p.kind < p.VAR_POSITIONAL
        ]
    except (TypeError, ValueError):
        parameters = []
    return f"{parameters[int(number)] if int(number) < len(parameters) else f'args[{number}]'}{rest}.{name}"
