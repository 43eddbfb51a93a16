"""A loop with blocks → a context in which a call of a block is one node, which calls it again for each derivative.

The block's parameters are arguments of the node, since by then the model has others, and so is every declared tensor
that it uses. Buffers and random numbers are those of the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from torchopt_dist import pytree
from torchopt_dist.core import remat
from torchopt_dist.core.generators import restore, states
from torchopt_dist.core.graphs import edge_of, edges_behind, edges_of, leaf_of, nodes_between
from torchopt_dist.core.random_turns import change_generators, kept_generators
from torchopt_dist.core.surroundings import modes
from torchopt_dist.core.types import TensorContainer
from torchopt_dist.core.vmap import Samples, Values, samples_around
from torchopt_dist.diff.adjoints._declared import refuse
from torchopt_dist.diff.adjoints._model import Model
from torchopt_dist.diff.adjoints._shards import ShardedModel
from torchopt_dist.nn import _tensor_dicts
from torchopt_dist.torch_private import (
    next_sequence_number,
    sequence_numbers,
    tensor_version,
)

__all__ = ["Declared", "nodes_of_blocks"]

Held = list[tuple[TensorContainer, str, Any]]
"""Dictionaries of a module, a name in each, and what stands there."""


class Declared(NamedTuple):
    """The tensors beside parameters that there is a gradient for."""

    given: Sequence[Tensor]
    """As the caller has them."""
    tensors: Sequence[Tensor]
    """What stands in their places, these or others."""
    replaced: Callable[[Sequence[Tensor]], AbstractContextManager[None]]
    """Makes a context in which others stand there."""


@contextmanager
def nodes_of_blocks(
    names: Sequence[str], model: Model, declared: Declared
) -> Iterator[Callable[[Any], None]]:
    """A context in which the blocks of a loop's model are nodes, where gradients are recorded.

    Args:
        names: of the blocks.
        model: of the loop, filled.
        declared: what there is a gradient for beside the parameters.

    Returns:
        What checks the loss that was computed.

    Raises:
        TypeError: a block returns something else than a tree of tensors and numbers.
        ValueError: a block uses what depends on parameters and is neither an argument nor its own, hands on a tensor
            by another way than by returning it, or changes what it is given.
    """
    blocks = {id(block): (name, block) for name in names for block in [model.part(name)]}
    own = [(block, vars(block).get("forward")) for _, block in blocks.values()]
    calls = _Calls(model, declared)
    for name, block in blocks.values():
        forward = model.block_forward(block, block.forward)
        vars(block)["forward"] = partial(calls.call, name, block, forward)
    try:
        yield calls.check
    finally:
        for block, before in own:
            if before is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = before


class _Calls:
    """The calls of blocks in one evaluation of a loss."""

    def __init__(self, model: Model, declared: Declared) -> None:
        self.model, self.declared = model, declared
        pairs = zip(declared.given, declared.tensors, strict=True)
        self.standing = {id(one): other for one, other in pairs if one is not other}
        """What stands for a tensor that the caller has declared."""
        self.points: dict[int, tuple[Tensor, str]] = {}
        """Leaves that a block was called with at first, and its name: what is made of them is not connected."""
        self.overwritten: dict[Any, tuple[int, str]] = {}
        """Edges of the graph: what a call has changed in place → the number of the next node, the block's name."""

    def call(
        self, name: str, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a block; its usual forward, if there is to be no gradient."""
        around = samples_around() if torch.is_grad_enabled() else None
        if around is None:  # there is no gradient, or it is taken in another transformation than `vmap`
            return forward(*args, **kwargs)
        return _Call(self, name, block, forward, (args, kwargs), around).connected()

    def check(self, loss: Any) -> None:
        """Check that what was made in blocks came here as their results, and that what they overwrote is not used."""
        around = samples_around()
        if not isinstance(loss, Tensor) or around is None:
            return
        [(loss, _)] = around.values([loss])
        if not loss.requires_grad:
            return
        used = [(edge_of(loss), next_sequence_number())]
        nodes = nodes_between([loss], [])
        if isinstance(self.model, ShardedModel):
            self.model.refuse_outside(nodes)
        for node in nodes:
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


class _Place(NamedTuple):
    """Stands for a tensor that the call depends on."""

    number: int
    dims: tuple[int | None, ...]
    """Which dimensions count samples, as in :class:`Values`."""


class _Call:
    """One call of a block; the values of the tensors that it is made of → those of the tensors that it returns."""

    def __init__(
        self,
        calls: _Calls,
        name: str,
        block: nn.Module,
        forward: Callable[..., Any],
        arguments: Any,
        around: Samples,
    ) -> None:
        self.calls, self.name, self.forward = calls, name, forward
        self.around = around
        self.tensors: list[Tensor] = []
        """The values of what the call depends on, until it is connected."""
        self.numbers: dict[int, int] = {}
        given, self.spec = pytree.flatten(arguments)
        self.given = list(map(self._placed, given))
        arguments_count = len(self.tensors)
        self.params = [
            (container, key, self._placed(x))
            for container, key, x in _held(_tensor_dicts.parameter_containers(block.modules()))
        ]
        held = {x.number for _, _, x in self.params if isinstance(x, _Place)}
        self.copied = {
            place
            for place, x in enumerate(self.tensors[:arguments_count])
            if x.requires_grad and place not in held
        }
        """Of which the block is given copies, which it may change."""
        self.buffers = [
            (container, key, x.clone())
            for container, key, x in _held(_tensor_dicts.buffer_containers(block.modules()))
            if x is not None
        ]
        self.before, self.modes = states(), modes()
        self.own_count = len(self.tensors)
        self.others = around.values(calls.declared.tensors)
        self.declared: list[int] = []
        """Which of the declared tensors come after the others."""
        self.overwritten: set[int] = set()
        """Places of the arguments that the block changes in place."""
        self.made: list[Any] = []
        self.made_spec = self.spec

    def _placed(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = self.calls.standing.get(id(x), x)
        [(values, dims)] = self.around.values([x])
        number = self.numbers.setdefault(id(values), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(values)
        return _Place(number, dims)

    def connected(self) -> Any:
        """Call the block, and connect what it returns."""
        tensors, self.tensors = self.tensors, []
        with self.around.outside():
            points = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        self.calls.points |= {id(x): (x, self.name) for x in points if x.requires_grad}
        since = next_sequence_number()
        values = self._run(points)
        found, unknown = self._outside(values, points, since)
        if unknown:  # unless the block has made them, which makes others each time
            again = {id(x) for x in self._outside(self._again(points), points, since)[1]}
            refuse([leaf for leaf in unknown if id(leaf) in again])
        self.declared = sorted(found)
        tensors += [self.others[place].values for place in self.declared]
        edges = [edge_of(tensors[place]) for place in self.overwritten]
        with self.around.outside():
            made = remat.apply(self, *tensors, values=[x.detach() for x in values])
        self.calls.overwritten |= dict.fromkeys(edges, (next_sequence_number(), self.name))
        leaves = [Values(made[x.number], x.dims).tensor() if isinstance(x, _Place) else x for x in self.made]
        return pytree.unflatten(self.made_spec, leaves)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        return self.around.call(lambda: self._again(tensors))

    def _again(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the block with the buffers and the random numbers that it had at first, which then are as before."""
        now = [(container, key, container[key]) for container, key, _ in self.buffers]
        for container, key, x in self.buffers:
            container[key] = x.clone()
        others = [x.tensor() for x in self.others]
        for place, x in zip(self.declared, tensors[self.own_count :], strict=True):
            others[place] = self.others[place].tensor(x)
        is_replaced = self.declared or self.calls.standing
        try:
            with (
                kept_generators(),
                self.modes.again(),
                self.calls.declared.replaced(others) if is_replaced else nullcontext(),
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
        with self.around.outside():
            values = [x.clone() if place in self.copied else x for place, x in enumerate(tensors)]

        def put(x: Any) -> Any:
            return Values(values[x.number], x.dims).tensor() if isinstance(x, _Place) else x

        arguments: Any = pytree.unflatten(self.spec, list(map(put, self.given)))
        leaves = pytree.flatten(arguments)[0]
        versions = list(map(_version, values))
        before = [(container, key, container[key]) for container, key, _ in self.params]
        for container, key, x in self.params:
            container[key] = put(x)
        try:
            made, spec = pytree.flatten(self.forward(*arguments[0], **arguments[1]))
        finally:
            for container, key, x in before:
                container[key] = x
        after, now = pytree.flatten(arguments)
        if now != self.spec or any(x is not y for x, y in zip(after, leaves, strict=True)):
            self._refuse_change("a list or a dictionary")
        changed = {n for n, x in enumerate(values) if versions[n] is not None and _version(x) != versions[n]}
        if changed - self.copied:
            self._refuse_change("a tensor")
        self.overwritten |= changed
        return self._values_of(made, spec)

    def _values_of(self, made: list[Any], spec: Any) -> list[Tensor]:
        found: list[Tensor] = []
        kept: list[Any] = []
        for leaf in made:
            if isinstance(leaf, Tensor):
                [(values, dims)] = self.around.values([leaf])
                kept.append(_Place(len(found), dims))
                found.append(values)
            elif leaf is None or isinstance(leaf, (bool, int, float, str)):
                kept.append(leaf)
            else:
                raise TypeError(
                    f"`blocks` must return trees of tensors and numbers, got a {type(leaf).__name__} from block "
                    f"{self.name!r}"
                )
        if not self.made:
            self.made, self.made_spec = kept, spec
        return found

    def _outside(
        self, values: Sequence[Tensor], points: Sequence[Tensor], since: int
    ) -> tuple[set[int], list[Tensor]]:
        """Which declared tensors values depend on other than through the arguments, and which other leaves."""
        places = {edge_of(x.values): place for place, x in enumerate(self.others) if x.values.requires_grad}
        parameters = {id(x.values) for x in self.around.values([*self.calls.model.part("").parameters()])}
        arguments = set(edges_of(points))
        found: set[int] = set()
        unknown = []
        for edge, is_end in edges_behind(edges_of(values), arguments | places.keys(), since):
            if edge in arguments:
                continue
            if edge in places:
                found.add(places[edge])
            elif (leaf := leaf_of(edge[0])) is not None:
                if id(leaf) in parameters or id(leaf) in self.calls.points:
                    self._refuse()
                unknown.append(leaf)
            elif is_end:
                self._refuse()
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
