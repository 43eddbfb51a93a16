"""A loop whose adjoint gives no gradient to what the loss uses → the same, which says so in a backward pass.

The loop cannot know what the outer loss will use, so the error waits for a backward pass that is to fill ``.grad`` and
does not come to these tensors by another way. ``torch.autograd.grad`` itself refuses a tensor that it does not reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.graphs import edge_of, nodes_between
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.unconnected import Unconnected, note_unconnected
from torchopt_dist.diff.adjoints._carry import Seen
from torchopt_dist.diff.adjoints._loop import Loop, Outcome
from torchopt_dist.torch_private import engine_needs_node, transforms_are_active

__all__ = ["run_aloud"]


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
