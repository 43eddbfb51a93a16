"""A function on lists of tensors → the ``init`` and the ``update`` of a transformation that works leaf by leaf.

All such transformations share what is here: leaves that are ``None`` are left out and keep their state, complex
leaves are treated as pairs of real ones, and the state is overwritten only where no graph is recorded. Each
transformation adds a ``NamedTuple`` for the state and a formula. Each field of the state is a tree with a
tensor a parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, TensorTree, Updates
from torchopt_dist.core.uncompiled import is_traced
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops._columns import as_complex, as_real, check_tensors, pick, present, put
from torchopt_dist.transform.base import GradientTransformation, of_elements

__all__ = ["Formula", "check_dense", "counts", "elementwise", "filled", "on_leaves"]

UpdateOfLeaves: TypeAlias = Callable[..., tuple[Updates, OptState]]


class Formula(Protocol):
    """Gradients, the state's fields → updates, the next state's fields."""

    def __call__(self, grads: list[Tensor], *fields: list[Tensor], inplace: bool) -> tuple[list[Tensor], ...]:
        """Work on lists of real tensors, one for each leaf that has a gradient."""


def elementwise(
    state_type: type[tuple[Any, ...]],
    formula: Formula,
    requires_grad: bool = False,
    *,
    first: Callable[[Params], OptState] | None = None,
    sparse: bool = False,
    **start: float,
) -> GradientTransformation:
    """Make a transformation.

    Args:
        state_type: the ``NamedTuple`` of the state.
        formula: the :class:`Formula`, a module-level function or a ``partial`` of one; it may overwrite the fields if
            it is called with ``inplace=True``.
        requires_grad: whether the tensors of the first state are leaves that require grad.
        first: parameters → the first state, also a module-level function or a ``partial``; if not given, the fields are
            :func:`filled`, and ``step`` is a count.
        sparse: the formula takes sparse gradients too.
        start: by the names of fields, what they are filled with, if that is not 0.
    """
    first = first or partial(_first_state, state_type, requires_grad, **start)
    return GradientTransformation(first, partial(_update, state_type, formula, sparse))


def on_leaves(*, params: str | None = None) -> Callable[[Callable[..., list[Tensor]]], UpdateOfLeaves]:
    """Make the ``update`` of a link without state of a function: the gradients that are there → as many updates.

    Args:
        params: why the update needs the parameters: the function then gets those of the gradients, too.

    Returns:
        A decorator. What the function takes before the gradients is bound by ``functools.partial``.
    """
    why = params

    def decorator(function: Callable[..., list[Tensor]]) -> UpdateOfLeaves:
        @functools.wraps(function)
        def update(
            *given: Any, params: Any = None, inplace: bool = False, **named: Any
        ) -> tuple[Updates, OptState]:
            *own, updates, state = (*given, *(named[name] for name in ("updates", "state") if name in named))
            if why is not None and params is None:
                raise ValueError(f"`params` must be given to `update`: {why}, got None")
            leaves, spec = pytree.flatten(updates)
            places = present(leaves)
            grads = pick(leaves, places)
            check_dense(grads)
            if why is not None:
                own = [*own, pick(pytree.flatten_like(spec, params, "params", "updates"), places)]
            return pytree.unflatten(spec, put(leaves, places, function(*own, grads))), state

        return update

    return decorator


def filled(params: Params, value: float = 0.0, *, requires_grad: bool = False) -> TensorTree:
    """A tree of the parameters' structure whose tensors are filled with a value, as leaves that may require grad."""

    def like(leaf: Tensor) -> Tensor:
        differentiable = leaf.is_floating_point() or leaf.is_complex()
        fill = (
            complex(value, value) if leaf.is_complex() else value
        )  # a pair of real numbers, to the formulas
        return torch.full_like(leaf, fill, requires_grad=requires_grad and differentiable)

    return pytree.map_tensors(like, params)


def counts(params: Params) -> TensorTree:
    """A tree of the parameters' structure with a count of 0 each: 0-d, float32, on the CPU, as torch's ``step``."""
    return pytree.map_tensors(lambda _: torch.zeros((), dtype=torch.float32, device="cpu"), params)


def _first_state(state_type: type[Any], requires_grad: bool, params: Params, /, **start: float) -> OptState:
    return state_type(
        *(
            counts(params)
            if name == "step"
            else filled(params, start.get(name, 0.0), requires_grad=requires_grad)
            for name in state_type._fields
        )
    )


def check_dense(grads: list[Tensor]) -> None:
    """Check that gradients are dense.

    Raises:
        TypeError: a gradient is sparse.
    """
    if any(grad.layout is not torch.strided for grad in grads):
        check_tensors({"grads": grads})


@of_elements()
def _update(
    state_type: type[tuple[Any, ...]],
    formula: Formula,
    sparse: bool,
    updates: Updates,
    state: Any,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    _check_state(state, state_type)
    leaves, spec = pytree.flatten(updates)
    places = present(leaves)
    grads = pick(leaves, places)
    if not sparse:
        check_dense(grads)
    fields = {
        name: pytree.flatten_like(spec, tree, f"state.{name}", "updates")
        for name, tree in zip(state._fields, state, strict=True)
        if not _is_left_out(tree, spec)
    }
    old = [pick(field, places) for field in fields.values()]
    _check_shapes(places, grads, dict(zip(fields, old, strict=True)))
    is_compiling = is_traced()
    inplace = inplace and not torch.is_grad_enabled() and (is_compiling or not foreach.are_batched(grads))
    moved, *new = formula(as_real(grads), *(as_real(field) for field in old), inplace=inplace)
    for (name, field), before, after in zip(fields.items(), old, new, strict=True):
        after = as_complex(after, before)
        if inplace and not is_compiling:  # all of the state, also where a kernel has made new tensors
            after = [x if x is y else y.copy_(x) for x, y in zip(after, before, strict=True)]
        fields[name] = put(field, places, after)
    changed = {name: pytree.unflatten(spec, field) for name, field in fields.items()}
    return (
        pytree.unflatten(spec, put(leaves, places, as_complex(moved, grads))),
        # not `_replace`, which gives an empty tuple where torch 2.11 compiles it
        state_type(**{**state._asdict(), **changed}),
    )


def _check_state(state: Any, state_type: type) -> None:
    if type(state) is not state_type:
        raise TypeError(f"`state` must be a {state_type.__name__}, got {type(state).__name__}")


def _check_shapes(places: list[int], grads: list[Tensor], fields: dict[str, list[Tensor]]) -> None:
    """Check that the state has the parameters' shapes; a count, called ``step``, has none."""
    shapes = [grad.shape for grad in grads]
    for name, field in fields.items():
        if name == "step" or (got := [x.shape for x in field]) == shapes:
            continue
        index = next(i for i, (x, y) in enumerate(zip(got, shapes, strict=True)) if x != y)
        raise ValueError(
            f"`state.{name}` must have the shapes of `updates`: leaf {places[index]} must have "
            f"{tuple(shapes[index])}, got {tuple(got[index])}"
        )


def _is_left_out(tree: Any, spec: pytree.PyTreeSpec) -> bool:
    """Whether a field is ``()`` because these options have no use for it, and not since there are no parameters."""
    return isinstance(tree, tuple) and not tree and spec.num_leaves > 0
