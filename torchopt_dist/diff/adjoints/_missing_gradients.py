"""A loop → the same, which raises where a tensor that its loss uses would silently get no gradient.

An adjoint differentiates with respect to declared tensors only, so a loss that uses others is refused (`watched`). One
that gives no gradient to the loss's tensors at all cannot know what the outer loss will use (`run_aloud`): the error
waits for a backward pass that is to fill ``.grad`` and does not come to these tensors by another way.
``torch.autograd.grad`` itself refuses a tensor that it does not reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.graphs import (
    depends_on_others,
    edge_of,
    leaves_behind,
    nodes_between,
)
from torchopt_dist.core.random_turns import Turn
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.unconnected import Unconnected, note_unconnected
from torchopt_dist.diff.adjoints._carry import Seen, WatchFn
from torchopt_dist.diff.adjoints._declared import refuse
from torchopt_dist.diff.adjoints._loop import Loop, Outcome
from torchopt_dist.diff.adjoints._randomness import kept_generators
from torchopt_dist.diff.adjoints._samples import Samples
from torchopt_dist.torch_private import (
    engine_needs_node,
    next_sequence_number,
    transforms_are_active,
)

__all__ = ["refusal_as_it_is", "refuse_undeclared", "run_aloud", "watched"]


def watched(loop: Loop, around: Samples) -> Loop:
    """The same loop, whose steps are checked.

    An adjoint that differentiates with respect to declared tensors only needs this check: any other tensor would
    silently get no gradient.

    Args:
        loop: the loop.
        around: the samples of the ``vmap`` around it. Inside ``vmap`` steps have no graph to check, so the first
            step's loss is called once more.

    Raises:
        ValueError: in a step, the loss depends on another leaf that requires grad.
    """
    if around.levels:
        _look_once(loop, around)
        return loop
    exchanged = replace(loop, others=tuple(tensor.detach().requires_grad_() for tensor in loop.declared))

    def watch(seen: Seen) -> None:
        refuse_undeclared(
            [seen.loss],
            [*seen.leaves, *(exchanged.others or ())],
            partial(exchanged.loss_again, seen.carry, seen.number),
        )

    return replace(exchanged, watch=watch)


def refusal_as_it_is(loop: Loop) -> WatchFn:
    """As :func:`watched`, but faster, for a loop that has declared leaves only: they are not replaced by other tensors.

    Returns:
        What checks a step of the loop: if its loss may depend on other tensors, as :func:`watched` does.
    """
    since = next_sequence_number()

    def watch(seen: Seen) -> None:
        if depends_on_others(seen.loss, [*seen.leaves, *loop.declared], since):
            watched(loop, Samples()).gradient(seen.carry, seen.number, record=False)

    return watch


def _look_once(loop: Loop, around: Samples) -> None:
    if loop.steps == 0:
        return
    held = around.values(loop.declared)

    def call() -> list[Tensor]:
        others = tuple(one.tensor(values) for one, values in zip(held, given, strict=True))
        with Turn(exclusive=True):
            return replace(loop, others=others).loss_again(loop.first, 0)

    with around.outside(), torch.enable_grad(), kept_generators():
        given = [one.values.detach().requires_grad_() for one in held]
        refuse_undeclared(around.again(call), given, lambda: around.again(call))


def refuse_undeclared(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], again: Callable[[], Sequence[Tensor]]
) -> None:
    """Check that a step's loss depends on leaves only through the parameters and the declared tensors.

    Args:
        outputs: the loss.
        inputs: the parameters, and the tensors that replaced the declared ones.
        again: evaluates the loss once more.

    Raises:
        ValueError: it depends on another leaf that requires grad.
    """
    found = leaves_behind(outputs, inputs)[1]
    if found:  # unless the loss has made them, which makes others each time
        with torch.enable_grad():
            still = {id(leaf) for leaf in leaves_behind(again(), ())[1]}
        refuse([leaf for leaf in found if id(leaf) in still])


def run_aloud(name: str, run: Callable[[Loop], Outcome], loop: Loop, also: Iterable[Tensor] = ()) -> Outcome:
    """Run a loop, and see to it that no declared tensor silently gets no gradient.

    Args:
        name: the name of the adjoint.
        run: runs the loop, and connects the outcome.
        loop: the loop.
        also: declared tensors that the loop uses elsewhere than in its loss.

    Returns:
        The outcome. A backward pass that fills ``.grad`` raises a ``ValueError`` if it reaches the parameters, but
        none of the tensors on which a declared one depends that the first step has used.
    """
    if not loop.declared or loop.is_substituted or transforms_are_active() or not torch.is_grad_enabled():
        return run(loop)
    used = [tensor for tensor in also if tensor.requires_grad]

    def watch(seen: Seen) -> None:
        if seen.number == 0:
            nodes = set(nodes_between([seen.loss], seen.leaves))
            used.extend(tensor for tensor in loop.declared if edge_of(tensor)[0] in nodes)

    outcome = run(replace(loop, watch=watch))
    places = loop.model.moved_places
    params = list(outcome.carry.params)
    ends = [leaf for leaf in [*params, *pytree.flatten(outcome.carry.state)[0]] if isinstance(leaf, Tensor)]
    reached = set(nodes_between(ends, ()))
    silent = [tensor for tensor in used if edge_of(tensor)[0] not in reached]
    if not silent:
        return outcome
    what = Unconnected(
        silent,
        f"`{name}()` gives no gradient to what only the inner {'loop' if also else 'loss'} uses: take Recorded(), "
        "Replayed(), Truncated(), SAMA(), Implicit(), FiniteDifference() or an evolution strategy, which do; or leave "
        "it out of `meta`, or detach it",
    )
    note_unconnected(what)
    probe = torch.zeros((), requires_grad=True, device="cpu")
    last = [params[place] for place in places]
    aloud = _Aloud.apply(what, [tensor.detach() for tensor in last], probe, *last)
    for place, leaf in zip(places, aloud, strict=True):
        params[place] = leaf
    tied = [params[place] for place in loop.model.first_places]
    return outcome._replace(carry=outcome.carry._replace(params=tied))


class _Aloud(torch.autograd.Function):
    """Parameters → the same; the probe is needed only by a pass that is to fill the ``.grad`` of all leaves."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(
        ctx: Any, what: Unconnected, same: list[Tensor], probe: Tensor, *params: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.what, ctx.probe = what, edge_of(probe)[0]
        ctx.set_materialize_grads(False)
        return tuple(same)

    @staticmethod
    def backward(ctx: Any, *bars: OptionalTensor) -> tuple[OptionalTensor, ...]:
        if engine_needs_node(ctx.probe):
            silent = [
                tensor
                for tensor in ctx.what.tensors
                if not any(map(engine_needs_node, nodes_between([tensor], ())))
            ]
            if silent:
                shapes = " and one of shape ".join(str(tuple(tensor.shape)) for tensor in silent)
                raise ValueError(f"a tensor of shape {shapes} would get no gradient: {ctx.what.why}")
        return None, None, None, *bars
