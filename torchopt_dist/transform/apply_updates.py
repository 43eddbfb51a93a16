"""Parameters, updates → the parameters moved by the updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptionalTensor, OptState, Params, Updates
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops._columns import PLAIN, are_alike, pick, present, put
from torchopt_dist.transform._gradients import update_by_own
from torchopt_dist.transform.base import ChainedGradientTransformation, GradientTransformation

__all__ = [
    "apply_updates",
    "differentiable_step",
    "move_",
    "step_in_place",
    "training_step",
    "with_gradients_added",
]

_PLAIN_OR_NONE = PLAIN | {type(None)}


def apply_updates(params: Params, updates: Updates, *, inplace: bool = True) -> Params:
    """Add updates to parameters.

    Args:
        params: a tree of tensors.
        updates: a tree of the same structure; each leaf has the shape of its parameter, or is ``None``: that
            parameter stays.
        inplace: if True, overwrites the parameters and records nothing. Otherwise the results are new tensors through
            which gradients flow back to ``params`` and to ``updates``.

    Returns:
        The parameters moved, in their own dtypes: ``params`` itself if ``inplace``.

    Raises:
        ValueError: the structures differ, or two shapes do; with ``inplace``, one tensor is at two leaves that both
            have an update.

    Example:
        >>> import torch
        >>> apply_updates((torch.zeros(2),), (torch.ones(2),), inplace=False)
        (tensor([1., 1.]),)
    """
    leaves, spec = pytree.flatten(params)
    steps = pytree.flatten_like(spec, updates, "updates", "params")
    if inplace:
        _check_apart(leaves, steps)
        move_(leaves, steps)
        return params
    places = present(steps)
    old, step = _pairs(leaves, steps, places)
    return pytree.unflatten(spec, put(leaves, places, foreach.add(old, step)))


def move_(params: list[OptionalTensor], updates: list[OptionalTensor], factor: float = 1.0) -> None:
    """Add ``factor`` times the updates to the parameters in place, in one pass over the memory."""
    old, step = _pairs(params, updates, present(updates))
    with torch.no_grad():
        foreach.add(old, step, factor, inplace=True)


def step_in_place(
    impl: GradientTransformation,
    params: list[OptionalTensor],
    grads: list[OptionalTensor],
    state: OptState,
) -> OptState | None:
    """Move parameters in place, with as few passes over the memory as possible.

    Returns:
        The next state; ``None`` if the given state has been overwritten.
    """
    with torch.no_grad():
        if not isinstance(impl, ChainedGradientTransformation):
            updates, state = impl.update(grads, state, params=params, inplace=True)
            move_(params, updates)
            return state
        step = impl.fused_step.in_place
        if step is not None and not foreach.runs_in_a_loop(pick(params, present(grads))):
            updates, before, rest = _before_fused_step(impl, params, grads, state, inplace=True)
            step(params, updates, rest)
            unchanged = all(new is old for new, old in zip(before, state, strict=False))
            return None if unchanged else (*before, *rest)
        links = impl.transformations
        factor = links[-1].constant_factor if links else None
        if factor is None:
            updates, state = impl.update(grads, state, params=params, inplace=True)
            move_(params, updates)
            return state
        # `p + factor * update` is one pass over the memory, not two
        updates, kept = ChainedGradientTransformation(*links[:-1]).update(
            grads, state[:-1], params=params, inplace=True
        )
        move_(params, updates, factor)
        return (*kept, state[-1])


def differentiable_step(
    impl: GradientTransformation, params: Params, grads: Updates, state: OptState
) -> tuple[Params, OptState]:
    """Gradients → new parameters, connected to the graph, and the next state."""
    fused_step = impl.fused_step if isinstance(impl, ChainedGradientTransformation) else None
    if fused_step is not None and fused_step.differentiable is not None:
        assert isinstance(impl, ChainedGradientTransformation)
        updates, before, rest = _before_fused_step(impl, params, grads, state, inplace=False)
        made = fused_step.differentiable(params, updates, rest)
        if made is not None:
            return made[0], (*before, *made[1])
        links = ChainedGradientTransformation(*impl.transformations[len(before) :])
        updates, rest = update_by_own(links, updates, rest, params=params, inplace=False)
        return apply_updates(params, updates, inplace=False), (*before, *rest)
    updates, state = update_by_own(impl, grads, state, params=params, inplace=False)
    return apply_updates(params, updates, inplace=False), state


def with_gradients_added(
    impl: GradientTransformation, params: list[Tensor], grads: list[OptionalTensor]
) -> list[Tensor] | None:
    """The parameters that :func:`differentiable_step` makes, by one call of torch; ``None`` where that is not enough.

    Beside a small module's backward the time of a step is that of looking at trees, which this does without. The state
    stays as it is.

    Args:
        impl: the transformation.
        params: the leaves of the parameters.
        grads: as many gradients, as a backward pass gives them: of their parameters' shapes and dtypes. The parameter
            of one that is ``None`` stays.
    """
    step = impl.fused_step if isinstance(impl, ChainedGradientTransformation) else None
    if step is None or step.gradient_factor is None or step.first_link:
        return None
    kinds = {*map(type, params), *map(type, grads)}
    if not kinds <= _PLAIN_OR_NONE or foreach.runs_in_a_loop(params):
        return None
    whole: Any = grads
    if len(params) == 1 and whole[0] is not None:
        # This keeps no tensor for the backward pass, as `_foreach_add` does.
        return [params[0].add(whole[0], alpha=step.gradient_factor)]
    if type(None) not in kinds:
        return list(torch._foreach_add(params, whole, alpha=step.gradient_factor))
    places = present(grads)
    moved = torch._foreach_add(pick(params, places), pick(grads, places), alpha=step.gradient_factor)
    made: list[Any] = put(params, places, moved)
    return made


def training_step(
    impl: GradientTransformation,
    params: list[Tensor],
    grads: list[OptionalTensor],
    state: OptState,
    tree: Callable[[Sequence[OptionalTensor]], Params],
) -> OptState:
    """Move parameters in place; the gradients stay as they are, and the state may be overwritten.

    Args:
        impl: the transformation.
        params: the leaves of the parameters.
        grads: as many gradients.
        state: of the tree of the parameters.
        tree: makes a tree of leaves.

    Returns:
        The next state.
    """
    fused_step = impl.fused_step if isinstance(impl, ChainedGradientTransformation) else None
    with torch.no_grad():
        if fused_step is None or fused_step.in_place is None:
            updates, state = update_by_own(impl, tree(grads), state, params=tree(params), inplace=False)
            move_(list(params), _leaves(tree(params), updates))
            return state
        if fused_step.first_link == 0:
            if fused_step.gradient_factor is None or not _add_gradients_(
                params, grads, fused_step.gradient_factor
            ):
                fused_step.in_place(params, grads, state)
            return state
        assert isinstance(impl, ChainedGradientTransformation)
        updates, before, rest = _before_fused_step(impl, tree(params), tree(grads), state, inplace=False)
        fused_step.in_place(params, _leaves(tree(params), updates), rest)
        return (*before, *rest)


def _add_gradients_(params: list[Tensor], grads: list[OptionalTensor], factor: float) -> bool:
    """Add ``factor`` times gradients to parameters in place by one call of torch; false: it was not made.

    On the CPU and in wide dtypes that gives what torch's fused step gives, sooner for small tensors.
    """
    pairs = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
    old, step = [p for p, _ in pairs], [g for _, g in pairs]
    dtypes = {tensor.dtype for pair in pairs for tensor in pair}
    if not dtypes or not dtypes <= {torch.float32, torch.float64} or len(dtypes) > 1:
        return False
    if not old[0].is_cpu or not are_alike([old, step]) or foreach.runs_in_a_loop(old):
        return False
    torch._foreach_add_(old, step, alpha=factor)
    return True


def _leaves(params: Params, updates: Updates) -> list[OptionalTensor]:
    return pytree.flatten_like(pytree.flatten(params)[1], updates, "updates", "params")


def _before_fused_step(
    impl: ChainedGradientTransformation, params: Params, grads: Updates, state: OptState, *, inplace: bool
) -> tuple[Updates, OptState, OptState]:
    """The gradients for the fused step, the next states of the links before it, and the states of the others."""
    first = impl.fused_step.first_link
    if first == 0:
        return grads, (), state
    links = ChainedGradientTransformation(*impl.transformations[:first])
    updates, before = update_by_own(links, grads, state[:first], params=params, inplace=inplace)
    return updates, before, state[first:]


def _check_apart(params: list[OptionalTensor], updates: list[OptionalTensor]) -> None:
    if torch.compiler.is_compiling():
        return
    seen: dict[int, int] = {}
    for place in present(updates):
        first = seen.setdefault(id(params[place]), place)
        if first != place and params[place] is not None:
            raise ValueError(
                f"`params` must be different tensors to be moved in place, got one at leaves {first} and {place}: "
                "give its update at one of them, and None at the other"
            )


def _pairs(
    params: list[OptionalTensor], updates: list[OptionalTensor], places: list[int]
) -> tuple[list[Tensor], list[Tensor]]:
    old, step = pick(params, places), pick(updates, places)
    for place, p, u in zip(places, old, step, strict=True):
        if p.shape != u.shape:
            raise ValueError(
                f"`updates` must have the shapes of `params`: leaf {place} must have {tuple(p.shape)}, "
                f"got {tuple(u.shape)}"
            )
    return old, step
