"""Gradients, the links of a chain before its optimizer's step → what the step gets, and back; clipping, say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist._types import OptionalTensor
from torchopt_dist._vjp import pulled_back
from torchopt_dist.diff.adjoints._declared import leaf_like, leaves_at
from torchopt_dist.diff.adjoints._loop import Carry, Loop
from torchopt_dist.transform._recorded_gradients import update_by_own
from torchopt_dist.transform.base import ChainedGradientTransformation

__all__ = ["ThroughLinks", "through_links"]


class ThroughLinks(NamedTuple):
    """What links have made of gradients, with its graph."""

    params: list[Tensor]
    """Leaves: the moved parameters."""
    given: list[OptionalTensor]
    """Leaves: the gradients of these."""
    made: list[OptionalTensor]
    """What the links have made of them."""
    grads: list[OptionalTensor]
    """The same without its history, one a parameter."""

    @property
    def inputs(self) -> list[Tensor]:
        """All the leaves that are there."""
        return [*self.params, *(leaf for leaf in self.given if leaf is not None)]

    @property
    def outputs(self) -> list[Tensor]:
        """What was made, where there is something."""
        return [x for x in self.made if x is not None]

    def pull(
        self, bars: Sequence[OptionalTensor], declared: Sequence[Tensor]
    ) -> tuple[list[OptionalTensor], list[OptionalTensor], list[OptionalTensor]]:
        """Gradients of what was made, one a parameter → of what was given, the parameters, and what is declared."""
        found = pulled_back(self.made, bars, [*self.inputs, *declared])
        count, more = len(self.params), len(self.inputs)
        rest = iter(found[count:more])
        of_given = [None if leaf is None else next(rest) for leaf in self.given]
        return of_given, found[:count], found[more:]


def through_links(
    loop: Loop, links: ChainedGradientTransformation, carry: Carry, grads: Sequence[OptionalTensor]
) -> ThroughLinks | None:
    """Call the links before an optimizer's step with the gradients of a step.

    Args:
        loop: the loop.
        links: the first links of its chain.
        carry: what the step starts from.
        grads: one a parameter.

    Returns:
        What they make; ``None`` if they have a state, which would have gradients, too.
    """
    model, places = loop.model, loop.model.moved_places
    state = carry.state[: len(links.transformations)]
    if pytree.flatten(state)[0]:
        return None
    params = leaves_at(carry.params, places)
    leaves = [None if grad is None else leaf_like(grad) for grad in grads]
    tree = model.tree([params[place] for place in model.first_places])
    with torch.enable_grad(), loop.substituted():
        updates, _state = update_by_own(links, model.tree(leaves), state, params=tree, inplace=False)
    made = pytree.flatten_like(pytree.flatten(tree)[1], updates, "updates", "params")
    return ThroughLinks(
        [params[place] for place in places],
        [leaves[place] for place in places],
        [made[place] for place in places],
        [None if x is None else x.detach() for x in made],
    )
