"""A call of a program → one node of the graph, whose values and first derivative are programs.

The node is a part that is computed again (:mod:`~torchopt_dist.core.remat`): it keeps what the call was given. Its
gradient is a program of the call and of the gradients of its values. Further derivatives run the function as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core import remat
from torchopt_dist.core.inputs import Seen, check_inputs
from torchopt_dist.core.meaning import Meaning
from torchopt_dist.core.program_inputs import Call
from torchopt_dist.core.programs import Programs
from torchopt_dist.core.substitution import Substitute
from torchopt_dist.core.surroundings import Surroundings
from torchopt_dist.core.tracing import Body
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.vjp import leaf_like
from torchopt_dist.formulas.attention import attention_by_formula

__all__ = ["Recorded", "pulled"]


def _with_graph(
    body: Body, wanted: Sequence[int], outside: Sequence[int], meaning: Meaning, arguments: Any
) -> tuple[Any, list[Tensor]]:
    """What a body makes, with a graph, and the leaves that this begins with.

    Args:
        body: the body.
        wanted: of the leaves of its arguments, those that may have a gradient.
        outside: the indices of tensors that it reaches, and that may have one.
        meaning: what it gets first.
        arguments: and then.
    """
    leaves, spec = pytree.flatten(arguments)
    for place in wanted:
        leaves[place] = leaf_like(leaves[place])
    reached = [meaning.tensors[place] for place in outside]
    others = list(map(leaf_like, reached))
    with torch.enable_grad(), Substitute(reached, others):
        made = body(meaning, *pytree.unflatten(spec, leaves))
    return made, [*(leaves[place] for place in wanted), *others]


def pulled(body: Body, wanted: Sequence[int], outside: Sequence[int] = ()) -> Body:
    """A body → the gradients of what it makes, as a function of its arguments and a list.

    The list has gradients of the first leaves of what the body makes, ``None`` for zero. There is a gradient for each
    leaf that is wanted, then for each tensor from outside; ``None`` if it is not used.
    """

    def gradients(meaning: Meaning, *arguments: Any) -> list[OptionalTensor]:
        *given, bars = arguments
        made, inputs = _with_graph(body, wanted, outside, meaning, given)
        ends = pytree.flatten(made)[0]
        pairs = [(end, bar) for end, bar in zip(ends, bars, strict=False) if bar is not None and _has(end)]
        if not pairs:
            return [None] * len(inputs)
        outputs, weights = zip(*pairs, strict=True)
        return list(torch.autograd.grad(outputs, inputs, weights, allow_unused=True))

    return gradients


class Recorded(remat.Segment):
    """The tensors of a call that may have a gradient → those that it makes and that have one.

    Args:
        programs: the programs.
        call: the call.
        body: what is called.
        kind: of the body.
        wanted: of the leaves of the arguments, those that may have a gradient.
    """

    def __init__(
        self, programs: Programs, call: Call, body: Body, kind: Hashable, wanted: Sequence[int]
    ) -> None:
        self.programs, self.call, self.body, self.wanted = programs, call, body, list(wanted)
        self.outside = [n for n, x in enumerate(call.meaning.tensors) if x.requires_grad]
        self.kind: tuple[Hashable, ...] = ("recorded", kind, tuple(wanted))
        self.likes: dict[int, Tensor] = {}
        """Of the leaves of the values, zeros like those that have a gradient."""
        self.changed: list[tuple[Tensor, Tensor]] = []
        """Tensors that the call changes in place, and what they were."""

    @property
    def given(self) -> list[Tensor]:
        """All tensors that may have a gradient."""
        return [*(self.call.leaves[place] for place in self.wanted), *self.reached]

    @property
    def reached(self) -> list[Tensor]:
        """Those of these that are no arguments."""
        return [self.call.meaning.tensors[place] for place in self.outside]

    def connected(self, otherwise: Callable[[], Any], *, aloud: bool = False, is_step: bool = False) -> Any:
        """What the call makes, connected to the tensors; or what is made otherwise, where there is no program."""
        self.surroundings = Surroundings()
        self.aloud = aloud
        made, flags = self.values(
            lambda: (otherwise(), None), before=self._note, aloud=aloud, is_step=is_step
        )
        self.surroundings.settle()
        if flags is None:
            return made
        leaves, spec = pytree.flatten(made)
        self.likes = {
            place: leaves[place].new_zeros(()).expand(leaves[place].shape)
            for place, has in enumerate(flags)
            if has
        }
        changed = {id(tensor) for tensor, _ in self.changed}
        kept = (*self.call.tensors, *self.call.meaning.tensors)
        self.seen = Seen(tensor for tensor in kept if id(tensor) not in changed)
        if self.likes:
            values = [leaves[place] for place in self.likes]
            for place, value in zip(self.likes, remat.apply(self, *self.given, values=values), strict=True):
                leaves[place] = value
        return pytree.unflatten(spec, leaves)

    def values(self, otherwise: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
        """What the call makes, and which of its leaves have a gradient."""

        def body(meaning: Meaning, *arguments: Any) -> Any:
            made, _ = _with_graph(self.body, self.wanted, self.outside, meaning, list(arguments))
            return pytree.map_tensors(Tensor.detach, made), list(map(_has, pytree.flatten(made)[0]))

        found: tuple[Any, Any] = self.programs.run(self.call, body, otherwise, kind=self.kind, **options)
        return found

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """See :class:`~torchopt_dist.core.remat.Segment`; the body runs as it is.

        Raises:
            RuntimeError: it would not be what it was in the call.
        """
        check_inputs(self.seen)
        now, meaning = self.call.anew(), self.call.meaning
        if now.record.key != self.call.record.key or now.numbers != self.call.numbers:
            raise RuntimeError(
                f"{now.record.differs_at(self.call.record)} has changed between a call with compile=True and the "
                "backward pass, which runs it again"
            )
        leaves, others = list(self.call.leaves), self._others(tensors)
        for place, tensor in zip(self.wanted, tensors, strict=False):
            leaves[place] = tensor
        then = [others.get(id(tensor), tensor) for tensor in meaning.tensors]
        with (
            self.surroundings.again(),
            attention_by_formula(),
            torch.enable_grad(),
            Substitute(now.meaning.tensors, then),
        ):
            made = self.body(now.meaning, *pytree.unflatten(self.call.spec, leaves))
        ends = pytree.flatten(made)[0]
        return [ends[place] for place in self.likes]

    def _others(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """What is in the places of tensors that the call has reached: of the given ones, or what they were before."""
        given = zip(self.reached, tensors[len(self.wanted) :], strict=True)
        return {id(old): new for old, new in [*given, *((x, was.clone()) for x, was in self.changed)]}

    def pull(self, asked: remat.Asked) -> Sequence[OptionalTensor]:
        """See :class:`~torchopt_dist.core.remat.Segment`; it is a program."""
        check_inputs(self.seen)
        weights: list[OptionalTensor] = [None] * (max(self.likes) + 1)
        of_values = dict(zip(asked.given, asked.bars, strict=True))
        for number, (place, like) in enumerate(self.likes.items()):
            weights[place] = of_values.get(number, like).expand_as(like).contiguous()

        def otherwise() -> list[OptionalTensor]:
            points = [tensor.detach().requires_grad_() for tensor in asked.tensors]
            with torch.enable_grad():
                ends = self(*points)
                found = torch.autograd.grad(
                    ends, points, [weights[place] for place in self.likes], allow_unused=True
                )
            return list(found)

        call = self.call.extended(dict(zip(self.wanted, asked.tensors, strict=False)), weights)
        call.instead = self._others(asked.tensors)
        with self.surroundings.again(), torch.no_grad():
            body = pulled(self.body, self.wanted, self.outside)
            made = self.programs.run(call, body, otherwise, kind=("pulled", *self.kind), aloud=self.aloud)
        return [made[place] for place in asked.wanted]

    def _note(self, tensors: Sequence[Tensor]) -> None:
        self.changed = [(tensor, tensor.detach().clone()) for tensor in tensors]


def _has(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
