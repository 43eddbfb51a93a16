"""A loop with blocks → a context in which a call of a block is one node, which calls it again for each derivative.

The block's parameters are arguments of the node, since by then the model has others, and so is every declared tensor
that it uses. Buffers and random numbers are those of the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torchopt_dist import pytree
from torchopt_dist._generators import restore, states
from torchopt_dist._random_turns import change_generators
from torchopt_dist._torch_private import (
    next_sequence_number,
    sequence_numbers,
    tensor_version,
    transforms_are_active,
)
from torchopt_dist._types import TensorContainer
from torchopt_dist.core import remat
from torchopt_dist.diff.adjoints._autocast import current_autocast
from torchopt_dist.diff.adjoints._declared import edge_of, leaf_of, nodes_between, refuse
from torchopt_dist.diff.adjoints._randomness import kept_generators
from torchopt_dist.nn import _tensor_dicts

__all__ = ["nodes_of_blocks"]

Held = list[tuple[TensorContainer, str, Any]]
"""Dictionaries of a module, a name in each, and what stands there."""


@contextmanager
def nodes_of_blocks(loop: Any) -> Iterator[Callable[[Any], None]]:
    """A context in which the blocks of a loop's model are nodes, where gradients are recorded.

    Returns:
        What checks the loss that was computed.

    Raises:
        TypeError: a block returns something else than a tree of tensors and numbers.
        ValueError: a block uses what depends on parameters and is neither an argument nor its own, hands on a tensor
            by another way than by returning it, or changes what it is given.
    """
    blocks = {id(block): (name, block) for name in loop.blocks for block in [loop.model.part(name)]}
    own = [(block, vars(block).get("forward")) for _, block in blocks.values()]
    calls = _Calls(loop)
    for name, block in blocks.values():
        forward = loop.model.block_forward(block, block.forward)
        vars(block)["forward"] = partial(calls.call, name, block, forward)
    try:
        yield calls.check
    finally:
        for block, forward in own:
            if forward is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = forward


class _Calls:
    """The calls of blocks in one evaluation of a loss."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop
        self.points: dict[int, tuple[Tensor, str]] = {}
        """Leaves that a block was called with at first, and its name: what is made of them is not connected."""
        self.overwritten: dict[Any, tuple[int, str]] = {}
        """Edges of the graph: what a call has changed in place → the number of the next node, the block's name."""

    def call(
        self, name: str, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a block; its usual forward, if there is to be no gradient."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return _Call(self, name, block, forward, (args, kwargs)).connected()

    def check(self, loss: Any) -> None:
        """Check that what was made in blocks came here as their results, and that what they overwrote is not used."""
        if not isinstance(loss, Tensor) or not loss.requires_grad or transforms_are_active():
            return
        used = [(edge_of(loss), next_sequence_number())]
        for node in nodes_between([loss], []):
            self.refuse_unless_returned(leaf_of(node))
            number = sequence_numbers(node)(node)
            used += [(edge, number) for edge in node.next_functions]
        for edge, number in used if self.overwritten else ():
            then, name = self.overwritten.get(edge, (0, ""))
            if then and number >= then:
                raise ValueError(
                    f"`blocks` must not change in place what is used after them: block {name!r} changes an input, and "
                    "the loss or another block uses this input later; let the block change a copy"
                )

    def refuse_unless_returned(self, leaf: Tensor | None) -> None:
        """Raise if a leaf is one that a block was called with at first."""
        if leaf is not None and id(leaf) in self.points:
            name = self.points[id(leaf)][1]
            raise ValueError(
                "`blocks` must hand on what depends on inputs, parameters or `meta` by what they return: a tensor that "
                f"was computed in block {name!r} came to the loss or to another block by an attribute, a list, a hook "
                "or the like; return it from the block's forward, too"
            )


class _Call:
    """One call of a block; the tensors that it is made of → those that it returns."""

    def __init__(
        self, calls: _Calls, name: str, block: nn.Module, forward: Callable[..., Any], arguments: Any
    ) -> None:
        self.calls, self.loop, self.name, self.forward = calls, calls.loop, name, forward
        self.given, self.spec = pytree.flatten(arguments)
        self.params = _held(_tensor_dicts.parameter_containers(block))
        self.buffers = [
            (container, key, x.clone())
            for container, key, x in _held(_tensor_dicts.buffer_containers(block))
            if x is not None
        ]
        self.before, self.autocast = states(), current_autocast()
        tensors = [x for x in [*self.given, *(x for _, _, x in self.params)] if isinstance(x, Tensor)]
        self.tensors = list({id(x): x for x in tensors}.values())
        self.own_count = len(self.tensors)
        self.others = list(self.loop.others or self.loop.declared)
        self.declared: list[int] = []
        """Which of the declared tensors come after the others."""
        self.overwritten: set[int] = set()
        """Places of the arguments that the block changes in place."""
        self.made: list[Any] = []
        self.made_spec = self.spec
        self.is_first = True

    def connected(self) -> Any:
        """Call the block, and connect what it returns."""
        values = None if transforms_are_active() else self._looked_at()
        edges = [edge_of(self.tensors[place]) for place in self.overwritten]
        made = iter(remat.apply(self, *self.tensors, values=values))
        number = next_sequence_number()
        self.calls.overwritten |= dict.fromkeys(edges, (number, self.name))
        leaves = [next(made) if isinstance(x, Tensor) else x for x in self.made]
        self.made = [None if isinstance(x, Tensor) else x for x in self.made]
        return pytree.unflatten(self.made_spec, leaves)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        if self.is_first:  # within the loss: its buffers are changed, and its random numbers are drawn
            self.is_first = False
            return self._run(tensors)
        now = [(container, key, container[key]) for container, key, _ in self.buffers]
        for container, key, x in self.buffers:
            container[key] = x.clone()
        others = list(self.others)
        for place, x in zip(self.declared, tensors[self.own_count :], strict=True):
            others[place] = x
        is_replaced = self.declared or self.loop.others is not None
        try:
            with (
                kept_generators(),
                self.autocast.again(),
                self.loop.instead_of_declared(others) if is_replaced else nullcontext(),
            ):
                change_generators(restore, self.before)
                return self._run(tensors)
        except Exception as error:
            error.add_note(
                f"`blocks` calls block {self.name!r} again with the arguments that it had, and this call failed: a "
                "block must not change what it is given, such as a cache; call a model of Hugging Face with "
                "`use_cache=False`"
            )
            raise
        finally:
            for container, key, x in now:
                container[key] = x

    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the block with tensors in the places of those that it had."""
        of = {id(old): new for old, new in zip(self.tensors, tensors, strict=True)}
        held = {id(x) for _, _, x in self.params}
        copies: dict[int, Tensor] = {}

        def put(x: Any) -> Any:
            return of.get(id(x), x) if isinstance(x, Tensor) else x

        def given(x: Any) -> Any:
            """What may have a gradient is given as a copy, which the block may change."""
            if not isinstance(x, Tensor) or id(x) in held or not of[id(x)].requires_grad:
                return put(x)
            if id(x) not in copies:
                copies[id(x)] = of[id(x)].clone()
            return copies[id(x)]

        arguments: Any = pytree.unflatten(self.spec, [given(x) for x in self.given])
        leaves = pytree.flatten(arguments)[0]
        versions = [_version(x) for x in leaves]
        before = [(container, key, container[key]) for container, key, _ in self.params]
        for container, key, x in self.params:
            container[key] = put(x)
        try:
            made, spec = pytree.flatten(self.forward(*arguments[0], **arguments[1]))
        finally:
            for container, key, x in before:
                container[key] = x
        self._check_given(arguments, leaves, versions, copies)
        for leaf in made:
            if leaf is not None and not isinstance(leaf, (Tensor, bool, int, float, str)):
                raise TypeError(
                    f"`blocks` must return trees of tensors and numbers, got a {type(leaf).__name__} from block "
                    f"{self.name!r}"
                )
        if not self.made:
            self.made, self.made_spec = made, spec
        return [x for x in made if isinstance(x, Tensor)]

    def _check_given(
        self,
        arguments: Any,
        leaves: Sequence[Any],
        versions: Sequence[int | None],
        copies: dict[int, Tensor],
    ) -> None:
        """Check that arguments are as they were, but for what the block has copies of."""
        after, now = pytree.flatten(arguments)
        if now != self.spec or any(x is not y for x, y in zip(after, leaves, strict=True)):
            self._refuse_change("a list or a dictionary")
        places = {id(copies[id(x)]): place for place, x in enumerate(self.tensors) if id(x) in copies}
        for x, version in zip(leaves, versions, strict=True):
            if _version(x) != version:
                if id(x) not in places:
                    self._refuse_change("a tensor")
                self.overwritten.add(places[id(x)])

    def _looked_at(self) -> list[Tensor]:
        """The values of the first call, whose graph shows what else the block depends on."""
        points = [x.detach().requires_grad_(x.requires_grad) for x in self.tensors]
        self.calls.points |= {id(x): (x, self.name) for x in points if x.requires_grad}
        since = next_sequence_number()
        values = self(*points)
        found, unknown = self._outside(values, points, since)
        if unknown:  # unless the block has made them, which makes others each time
            again = {id(x) for x in self._outside(self(*points), points, since)[1]}
            refuse([leaf for leaf in unknown if id(leaf) in again])
        self.declared = sorted(found)
        self.tensors += [self.others[place] for place in self.declared]
        return [x.detach() for x in values]

    def _outside(
        self, values: Sequence[Tensor], points: Sequence[Tensor], since: int
    ) -> tuple[set[int], list[Tensor]]:
        """Which declared tensors values depend on other than through the arguments, and which other leaves."""
        places = {edge_of(x): place for place, x in enumerate(self.others) if x.requires_grad}
        parameters = {id(x) for x in self.loop.model.part("").parameters()}
        visited = {edge_of(x) for x in points if x.requires_grad}
        waiting = [edge_of(x) for x in values if x.requires_grad]
        found: set[int] = set()
        unknown = []
        while waiting:
            edge = waiting.pop()
            if edge in visited or edge[0] is None:
                continue
            visited.add(edge)
            if edge in places:
                found.add(places[edge])
            elif (leaf := leaf_of(edge[0])) is not None:
                if id(leaf) in parameters or id(leaf) in self.calls.points:
                    self._refuse()
                unknown.append(leaf)
            elif sequence_numbers(edge[0])(edge[0]) < since:
                self._refuse()
            else:
                waiting += edge[0].next_functions
        return found, unknown

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"`blocks` must get what depends on parameters of the model by their arguments: block {self.name!r} uses a "
            "parameter that is not its own, or a tensor that was computed before and that it holds"
        )

    def _refuse_change(self, what: str) -> NoReturn:
        raise ValueError(
            f"`blocks` must return what they make: block {self.name!r} changes {what} that it is given; return the "
            "changed one from its forward"
        )


def _held(containers: list[TensorContainer]) -> Held:
    return [(container, key, x) for container in containers for key, x in container.items()]


def _version(x: Any) -> int | None:
    return tensor_version(x) if isinstance(x, Tensor) and not x.is_inference() else None
