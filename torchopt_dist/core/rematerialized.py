"""A user's function → the same function, whose derivatives of every order compute it again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchopt_dist import pytree
from torchopt_dist.core.binding import Bindings
from torchopt_dist.core.graphs import leaves_behind
from torchopt_dist.core.inputs import Seen
from torchopt_dist.core.remat import apply
from torchopt_dist.core.substitution import Finding, Substitute, finding
from torchopt_dist.core.surroundings import Surroundings
from torchopt_dist.core.uncompiled import uncompiled
from torchopt_dist.core.vmap import same_values
from torchopt_dist.torch_private import buffers_of, forward_mode_is_active, transforms_are_active

__all__ = ["remat"]

P = ParamSpec("P")
R = TypeVar("R")

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
"""Of results: what has no tensors in it."""


def remat(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function whose derivatives, of every order, compute it again and keep only its arguments.

    The values are those of ``function``. While gradients are recorded, a call is one node of the graph: it keeps the
    tensors that the function takes, and none of those that it makes. A backward pass runs the function again. If it is
    recorded itself (``create_graph=True``), what it records is again one such node. So a second derivative needs no
    more memory than that of the part itself, at the cost of running it again for each backward pass through it.
    ``torch.utils.checkpoint`` saves memory in a first derivative only.

    It is the rematerialization of Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse
    automatic differentiation", 1992, for one part of a computation.

    Run again, the function finds everything as in the call: names that it closes over, modules, random numbers,
    autocast, the default dtype and device. Buffers of modules change once, in the call. Tensors that it closes over,
    and that require grad, get gradients as its arguments do.

    Args:
        function: any function of tensors. Its arguments and results may be trees, and may have integers, ``None`` and
            strings in them; modules and other objects may be arguments. It must compute the same when it is called
            again with the same: it must not read from an iterator or a file, for example.

    Returns:
        A function with the same arguments and results. Where gradients are not recorded, it only calls ``function``.
        It works with ``torch.autograd``, in ``torch.func`` and with ``torch.autograd.forward_ad``.

    Raises:
        TypeError: ``function`` is not a function; or, in a call, it returns an object that is no tree of tensors,
            numbers and strings, whose tensors would have no gradient.
        ValueError: in a call, it takes a tensor that requires grad in a way that cannot be seen, such as by a gradient
            of a graph that was made before.
        RuntimeError: in a call, it changes a tensor in place that is not a buffer of a module, or calls ``backward()``;
            in a backward pass, a tensor that it takes has been changed in place since the call, or it returns something
            else than in the call.
        NotImplementedError: in a call, it closes over a tensor that has a tangent of ``torch.autograd.forward_ad``.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> x = torch.linspace(0.0, 1.0, 3, requires_grad=True)
        >>> y = todist.remat(lambda x: (x**2).exp().sin())(x)
        >>> (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        >>> torch.autograd.grad(first.sum(), x)[0]
        tensor([  1.0806,  -0.4918, -27.0112])
    """
    if not callable(function):
        raise TypeError(f"`function` must be a function of tensors, got {type(function).__name__}")

    @functools.wraps(function)
    def rematerialized(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        result: R = _run(function, args, kwargs)
        return result

    return rematerialized


@uncompiled
def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _Call(function, args, kwargs).connected()


class _Call:
    """One call of a function, which can be run again with other tensors in the places of those that it takes."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        everything: Any = [list(args), kwargs]
        leaves, self.spec = pytree.flatten(everything)
        self.function = function
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors = [leaves[place] for place in self.places]
        self.rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        """The other leaves of the arguments."""
        self.bindings = Bindings(function, *self.rest)
        self.found: list[Tensor] = []
        """Tensors that are no arguments, and get gradients all the same."""
        self.buffers = [
            (buffer, buffer.detach().clone())
            for module in self.bindings.modules
            for buffer in buffers_of(module).values()
            if buffer is not None
        ]
        """Buffers, and what they were before the call; at last of those only that the call has changed."""
        self.results: list[int] = []
        """Which leaves of what the function returns get gradients."""
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []
        self.surroundings = Surroundings()

    def connected(self) -> Any:
        """Call the function, and record one node for it.

        Outside of ``torch.func`` this call has stand-ins for all tensors that require grad, and the node has its
        values. Inside, the call only shows what the function takes from outside, and the node makes another one.
        """
        is_inside = transforms_are_active()
        points = self.tensors
        if not is_inside:
            points = [x.detach().requires_grad_() if x.requires_grad else x for x in points]
        before = Seen(points)
        trial = finding(points, self.bindings.tensors, self.name)
        with trial, nullcontext() if is_inside else _without_autocasts_cache():
            returned = self._call(self.function, points, self.rest)
        leaves, spec = pytree.flatten(returned)
        leaves = [trial.stand_in_of(leaf) for leaf in leaves]
        self._settle(before, leaves, trial.entered)
        given, values = self.tensors, None
        if is_inside:
            self.found = trial.found
            self.results = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        else:
            given = self._checked(trial, points, leaves)
            values = [leaves[place].detach() for place in self.results]
            if not values:
                return pytree.unflatten(spec, leaves)
        self.shapes = [(leaves[place].shape, leaves[place].dtype) for place in self.results]
        self.tensors = []  # it is the node that keeps them
        made = apply(self.again, *given, *self.found, values=values)
        for place, value in zip(self.results, made, strict=True):
            leaves[place] = value
        return pytree.unflatten(spec, leaves)

    def _checked(self, trial: Finding, points: Sequence[Tensor], leaves: list[Any]) -> list[Tensor]:
        """Find what gets gradients, and put the caller's own tensors in the places of stand-ins that were returned.

        Returns:
            The arguments, without the graphs of those on which no result depends.
        """
        if trial.follows_graph:
            raise ValueError(
                f"`{self.name}` differentiates a graph that was made before it was called, and would have no gradient "
                "for what that graph depends on: compute the gradient outside and pass it as an argument"
            )
        stand_ins = trial.stand_ins
        if any(x.grad is not None for x in [*points, *stand_ins] if x.is_leaf and x.requires_grad):
            raise RuntimeError(
                f"`{self.name}` calls `backward()`, whose gradients are lost when it runs again: return gradients by "
                "`torch.autograd.grad` instead"
            )
        own = {id(point): x for point, x in zip(points, self.tensors, strict=True)}
        own |= {id(one): x for one, x in zip(stand_ins, trial.found, strict=True)}
        reached = self._check_leaves(leaves, [*points, *stand_ins])
        self.found = [x for x, one in zip(trial.found, stand_ins, strict=True) if id(one) in reached]
        has_tangents = forward_mode_is_active() and self._has_tangents()
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if id(leaf) in own:
                    leaves[place] = own[id(leaf)]
                elif leaf.requires_grad or (has_tangents and leaf.is_floating_point()):
                    self.results.append(place)
        return [
            x if has_tangents or id(point) in reached else x.detach()
            for x, point in zip(self.tensors, points, strict=True)
        ]

    def again(self, *tensors: Tensor) -> list[Tensor]:
        """Run the function again, with tensors in the places of its arguments and of those that it has taken.

        Returns:
            Of its results those that get gradients.
        """
        given = tensors[: len(self.places)]
        with self.surroundings.again(), torch.enable_grad():
            function, *rest = self.bindings.anew(self.function, *self.rest)
            changed = [buffer for buffer, _ in self.buffers]
            others = [*tensors[len(given) :], *[before.clone() for _, before in self.buffers]]
            inside = Substitute([*self.found, *changed], others)
            with inside:
                returned = self._call(function, given, rest)
            leaves = [inside.stand_in_of(leaf) for leaf in pytree.flatten(returned)[0]]
        values = [leaves[place] if place < len(leaves) else None for place in self.results]
        if [(x.shape, x.dtype) if isinstance(x, Tensor) else None for x in values] != self.shapes:
            raise RuntimeError(
                f"`{self.name}` returns something else when it runs again for its gradient than it did when it was "
                "called: it must compute the same from the same arguments"
            )
        if torch.is_grad_enabled() and not transforms_are_active():
            self._check_leaves(values, tensors)
        return cast("list[Tensor]", values)

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    def _call(self, function: Callable[..., Any], tensors: Sequence[Tensor], rest: Sequence[Any]) -> Any:
        leaves = list(rest)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.unflatten(self.spec, leaves)
        return function(*args, **kwargs)

    def _settle(self, before: Seen, leaves: Sequence[Any], used: set[int]) -> None:
        """The function has run: check what it has done, and let go of what it has not used."""
        self.surroundings.settle()
        changed = self.bindings.settle_tensors(used)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                raise TypeError(
                    f"`{self.name}` must return tensors, numbers, strings and `None`, or tuples, lists and "
                    f"dictionaries of these: got an object of type {type(leaf).__name__}, in which a tensor would have "
                    "no gradient. Return its tensors"
                )
        self.buffers = [
            (buffer, was)
            for buffer, was in self.buffers
            if _is_in(buffer, changed) or not same_values(buffer, was)
        ]
        buffers = [buffer for buffer, _ in self.buffers]
        others = [x for x in changed if not _is_in(x, buffers)]
        others += [before.tensors[place] for place in before.changed()]
        if others:
            raise RuntimeError(
                f"`{self.name}` changes a tensor of shape {tuple(others[0].shape)} in place, and would do so again for "
                "each gradient: return what it is to become, or make it a buffer of a module"
            )

    def _check_leaves(self, leaves: Sequence[Any], inputs: Sequence[Tensor]) -> set[int]:
        """The ids of the inputs on which results depend.

        Raises:
            ValueError: they depend on other tensors, too.
        """
        reached, others = leaves_behind([x for x in leaves if isinstance(x, Tensor)], inputs)
        for leaf in others:
            raise ValueError(
                f"`{self.name}` takes a tensor of shape {tuple(leaf.shape)} that requires grad in a way that "
                "cannot be seen, or another one than when it was called, so there would be no gradient for it: "
                "pass it as an argument"
            )
        return reached

    def _has_tangents(self) -> bool:
        """Whether an argument has one; one of a tensor that the function closes over is refused."""
        for x in self.bindings.tensors:
            if forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(
                    f"`{self.name}` closes over a tensor of shape {tuple(x.shape)} that has a tangent: pass it as an "
                    "argument"
                )
        return any(forward_ad.unpack_dual(x).tangent is not None for x in self.tensors)


def _is_in(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    return any(tensor is one for one in tensors)


def _without_autocasts_cache() -> AbstractContextManager[object]:
    """The autocast of here, if any; what is cast is not kept, since it would belong to stand-ins."""
    device = next((name for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)), None)
    if device is None:
        return nullcontext()
    return torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=False)
