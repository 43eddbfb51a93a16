"""A loss, perhaps with tangents, the blocks of its model → its gradients, with the graph of one block at a time.

The loss is called once. The results of each block are detached and its graph is dropped, so only the values between
blocks are kept. The backward pass starts with the graph after the last block; then each block is called again with the
same inputs. The graph before the first block is made again at its turn, by a call of the loss that ends there.

With tangents, duals go forward, ``(x, ẋ)``, and duals come back, ``(λ, λ̇)``, by forward over reverse mode. Each part
has its own level of forward mode, since torch frees the tensors of a level only when it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_dist._formulas import short_formulas
from torchopt_dist._free_memory import give_back
from torchopt_dist._torch_private import next_sequence_number, sequence_numbers
from torchopt_dist._types import OptionalTensor
from torchopt_dist._vjp import plus, pulled_back
from torchopt_dist._vmap import Values
from torchopt_dist.diff.adjoints._carry import Evaluation, LookFn
from torchopt_dist.diff.adjoints._declared import edge_of, leaf_of, nodes_between
from torchopt_dist.diff.adjoints._loop import Loop
from torchopt_dist.diff.adjoints._shards import ShardedModel
from torchopt_dist.diff.replay._block_call import BlockCall, block_of, inputs_of
from torchopt_dist.diff.replay._duals import Pair, dual, dual_level, pair_of, plus_pair

__all__ = ["Tangents", "sweep"]

CallFn = Callable[..., Any]
"""Name of a block, the block, its forward, its arguments → what it hands on."""


@dataclass(frozen=True)
class Tangents:
    """A direction in which a gradient is differentiated."""

    of: dict[int, Tensor]
    """``id`` of a parameter → its tangent."""
    loss_bar: OptionalTensor
    """How many times the gradient itself is added, of the shape of the loss."""


def sweep(
    loop: Loop,
    blocks: Sequence[str],
    params: Sequence[Tensor],
    buffers: Sequence[Tensor],
    number: int,
    wanted: Sequence[Tensor],
    look: LookFn,
    tangents: Tangents | None = None,
) -> Evaluation:
    """As :meth:`Loop.swept`, but block by block; with ``tangents``, the derivative of the gradient along them.

    Args:
        loop: the loop.
        blocks: the names of the blocks in the model, in the order of their calls.
        params: as :meth:`Loop.swept`.
        buffers: as :meth:`Loop.swept`.
        number: as :meth:`Loop.swept`.
        wanted: as :meth:`Loop.swept`.
        look: called with each part of the graph.
        tangents: the direction.

    Raises:
        ValueError: the blocks of the loop are not called one after another, or hold what depends on parameters.
        NoForwardModeError: torch has forward mode switched off.
    """
    with short_formulas() if tangents else nullcontext():
        return _Sweep(loop, blocks, params, buffers, number, wanted, look, tangents).run()


class _EnoughError(BaseException):
    """Ends a call of the loss when the rest of it is not needed."""


class _Sweep:
    """One evaluation of a loss, and its backward pass; see :func:`sweep` for the arguments."""

    def __init__(
        self,
        loop: Loop,
        blocks: Sequence[str],
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        number: int,
        wanted: Sequence[Tensor],
        look: LookFn,
        tangents: Tangents | None,
    ) -> None:
        self._loop = replace(loop, model=loop.model.in_blocks(blocks))
        self._first_buffers, self._number, self._look = buffers, number, look
        self._params, self._wanted, self._tangents = params, wanted, tangents
        self._blocks = [(name, loop.model.part(name)) for name in blocks]
        self._calls: list[BlockCall] = []
        self._sources: list[list[tuple[int, int] | None]] = []
        """Of each input of each call: which output of which call it is; ``None`` for what is none."""
        self._bars: dict[tuple[int, int], Pair] = {}
        """Gradients of the outputs of calls."""
        self._handed: list[list[Tensor]] = []
        """What each call has handed on and requires grad, where there are no tangents."""
        self._overwritten: dict[Any, tuple[int, str]] = {}
        """Edges of the graph: what a call has changed in place → the number of the next node, the block's name."""
        self._runs: list[tuple[int, int, str]] = []
        """Of each call the numbers of the first node of its run and of the first one after it, the block's name."""
        self._since = next_sequence_number()
        self._totals: list[OptionalTensor] = [None] * len(wanted)

    def run(self) -> Evaluation:
        """Evaluate the loss, and differentiate it."""
        give_back()
        with self._level() as now:
            handed: dict[int, tuple[tuple[int, int], Tensor]] = {}
            with self._intercepted(partial(self._first_call, now, handed)):
                loss, aux, after = self._evaluated(now)
            self._after = after
            if self._number == 0:
                self._check_complete()
            if self._tangents is None:  # every step is made so once, before any is gone back through
                self._check_ways([loss], now)
            self._outside([(loss, self._seed(loss))], now, list(handed.values()))
            loss, _ = pair_of(loss)
            del handed
        while self._calls:
            give_back()
            self._last_call()
        give_back()
        return Evaluation(loss, aux, self._totals, after)

    def _seed(self, loss: Tensor) -> Tensor:
        """The gradient of the loss: ones, and as their tangents how many times the gradient itself is added."""
        ones = torch.ones_like(pair_of(loss)[0])
        bar = None if self._tangents is None else self._tangents.loss_bar
        return dual((ones, None if bar is None else bar.to(ones).reshape(ones.shape)))

    @contextmanager
    def _level(self) -> Iterator[list[Tensor]]:
        """A level of forward mode, if there are tangents; gives what stands for what is wanted in it."""
        if self._tangents is None:
            yield list(self._wanted)
            return
        with dual_level():
            of = self._tangents.of
            yield [dual((tensor, of.get(id(tensor)))) for tensor in self._wanted]

    def _evaluated(self, now: Sequence[Tensor]) -> tuple[Tensor, Any, list[Tensor]]:
        stand_in = {id(tensor): other for tensor, other in zip(self._wanted, now, strict=True)}
        params = [stand_in.get(id(p), p) for p in self._params]
        return self._loop.evaluate(params, self._first_buffers, self._number)

    @contextmanager
    def _intercepted(self, call: CallFn) -> Iterator[None]:
        """A context in which a function is called in the place of each block."""
        blocks = list({id(block): (name, block) for name, block in self._blocks}.values())
        own = [vars(block).get("forward") for _, block in blocks]
        for name, block in blocks:
            whole = self._loop.model.block_forward(block, block.forward)
            vars(block)["forward"] = partial(_with_graph, call, name, block, whole)
        try:
            yield
        finally:
            for (_, block), forward in zip(blocks, own, strict=True):
                if forward is None:
                    del vars(block)["forward"]
                else:
                    vars(block)["forward"] = forward

    def _first_call(
        self,
        now: Sequence[Tensor],
        handed: dict[int, tuple[tuple[int, int], Tensor]],
        name: str,
        block: nn.Module,
        forward: Callable[..., Any],
        arguments: Any,
    ) -> Any:
        own = self._places(now)
        inputs = inputs_of(block, arguments, own)
        sources = [handed[id(x.values)][0] if id(x.values) in handed else None for x in inputs]
        if self._number == 0:
            self._check_order(name, block, sources)
        if self._tangents is None:
            self._check_ways([x.values for x in inputs], now)
        give_back()
        call = BlockCall(name, block, forward, arguments, own, with_tangents=self._tangents is not None)
        began = next_sequence_number()
        made, outputs = call.first(now)
        number = next_sequence_number()
        self._runs.append((began, number, name))
        self._overwritten |= {edge_of(inputs[place].values): (number, name) for place in call.overwritten}
        at = len(self._calls)
        handed |= {id(x): ((at, place), x) for place, x in enumerate(outputs) if x is not None}
        self._calls.append(call)
        self._sources.append(sources)
        if self._tangents is None:
            self._handed.append([x for x in outputs if x is not None])
        return made

    def _places(self, now: Sequence[Tensor]) -> dict[int, int]:
        """``id`` → place among what is wanted, also of what the caller has, where others replace it in a step."""
        places = {id(tensor): place for place, tensor in enumerate(now)}
        replaced = zip(self._loop.declared, self._loop.others or (), strict=False)
        return places | {id(old): places[id(new)] for old, new in replaced if id(new) in places}

    def _check_order(self, name: str, block: nn.Module, sources: Sequence[tuple[int, int] | None]) -> None:
        place = len(self._calls) % len(self._blocks)
        expected, module = self._blocks[place]
        if block is not module:
            raise ValueError(
                f"`blocks` must be called one after another in the model's forward: block {expected!r} was to come "
                f"next, and {name!r} was called"
            )
        last = len(self._calls) - 1
        if place and any(self._calls[last].outputs) and all(s is None or s[0] != last for s in sources):
            raise ValueError(
                f"`blocks` must compose to the model's forward: block {name!r} was not given what block "
                f"{self._calls[last].name!r} returned; put what comes between into a block"
            )

    def _check_complete(self) -> None:
        if self._blocks and (not self._calls or len(self._calls) % len(self._blocks)):
            rest, _ = self._blocks[len(self._calls) % len(self._blocks)]
            raise ValueError(
                f"`blocks` must be called one after another in the model's forward: block {rest!r} was to come next, "
                "and the loss ended"
            )

    def _last_call(self) -> None:
        at, call, sources = len(self._calls) - 1, self._calls.pop(), self._sources.pop()
        del self._handed[at:]
        bars = [self._bars.pop((at, place), None) for place in range(len(call.outputs))]
        call.outputs.clear()  # the blocks after it have been gone back through
        if all(bar is None for bar in bars):
            return
        with (
            self._level() as now,
            self._loop.substituted(),
            call.again(now, self._loop.inside_again) as (
                leaves,
                made,
            ),
        ):
            ends = [(x, dual(bar)) for x, bar in zip(made, bars, strict=True) if bar is not None]
            if self._tangents is None:
                self._check_closed(call, [x for x, _ in ends if x.requires_grad], leaves, now)
            found = self._part(ends, now, leaves, [])
            del leaves, made, ends
        between: list[Pair | None] = []
        for source, bar in zip(sources, found, strict=True):
            between.append(bar if source is None else None)
            if source is not None and bar is not None:
                self._bars[source] = plus_pair(self._bars.get(source), bar)
        if any(bar is not None for bar in between):
            self._before_call(between)

    def _before_call(self, bars: Sequence[Pair | None]) -> None:
        """Differentiate what precedes a call and is no block, given the gradients of the call's inputs."""
        with self._level() as now:
            calls = iter(enumerate(self._calls))
            handed: list[tuple[tuple[int, int], Tensor]] = []
            inputs: list[Values] = []

            def call(name: str, block: nn.Module, forward: Callable[..., Any], arguments: Any) -> Any:
                at, known = next(calls, (0, None))
                if known is None:
                    inputs.extend(inputs_of(block, arguments, self._places(now)))
                    raise _EnoughError
                made, outputs = known.handed_on()
                handed.extend(((at, place), x) for place, x in enumerate(outputs) if x is not None)
                return made

            with suppress(_EnoughError), self._intercepted(call):
                self._evaluated(now)
            ends = [(x.values, dual(bar)) for x, bar in zip(inputs, bars, strict=True) if bar]
            self._outside(ends, now, handed)

    def _outside(
        self,
        ends: Sequence[tuple[Tensor, OptionalTensor]],
        now: Sequence[Tensor],
        handed: Sequence[tuple[tuple[int, int], Tensor]],
    ) -> None:
        """As :meth:`_part`, of what is in no block."""
        before = list(self._totals)
        self._part(ends, now, [], handed)
        model = self._loop.model
        if isinstance(model, ShardedModel):
            moved = zip(before, self._totals[: len(model.moved_places)], strict=False)
            model.refuse_outside([number for number, (one, other) in enumerate(moved) if one is not other])

    def _part(
        self,
        ends: Sequence[tuple[Tensor, OptionalTensor]],
        now: Sequence[Tensor],
        leaves: Sequence[Tensor],
        handed: Sequence[tuple[tuple[int, int], Tensor]],
    ) -> list[Pair | None]:
        """Differentiate a part of the graph.

        Args:
            ends: of the part, with their gradients.
            now: what stands for what is wanted; its gradients are added up.
            leaves: tensors whose gradients are returned.
            handed: outputs of calls, which are also added up.
        """
        ends = [(x, bar) for x, bar in ends if x.requires_grad]
        if not ends:
            return [None] * len(leaves)
        outputs, bars = zip(*ends, strict=True)
        inputs = [*leaves, *now, *(x for _, x in handed)]
        self._look(outputs, inputs, self._after)
        found = pulled_back(outputs, bars, inputs)
        pairs: list[Pair | None] = [None if grad is None else pair_of(grad) for grad in found]
        count, more = len(leaves), len(leaves) + len(now)
        for place, pair in enumerate(pairs[count:more]):
            if pair is not None:
                one = pair[self._tangents is not None]
                self._totals[place] = plus(self._totals[place], one)
        for (source, _), pair in zip(handed, pairs[more:], strict=True):
            if pair is not None:
                self._bars[source] = plus_pair(self._bars.get(source), pair)
        return pairs[:count]

    def _check_ways(self, ends: Sequence[Tensor], now: Sequence[Tensor]) -> None:
        """Check that what was made in blocks came here by their outputs, and that what they overwrote is not used.

        What else came is a constant where a block is called without a graph, and has no gradient of the block's inputs.
        """
        nodes = nodes_between(ends, [*now, *(x for handed in self._handed for x in handed)], self._since)
        for name in filter(None, map(self._made_in, nodes)):
            raise ValueError(
                "`blocks` must hand on what depends on inputs, parameters or `meta` by what they return: a tensor that "
                f"was computed in block {name!r} came to the loss or to another block by an attribute, a list, a hook "
                "or the like; return it from the block's forward, too"
            )
        if not self._overwritten:
            return
        used = [(edge_of(x), next_sequence_number()) for x in ends if x.requires_grad]
        for node in nodes:
            number = sequence_numbers(node)(node)
            used += [(edge, number) for edge in node.next_functions]
        for edge, number in used:
            then, name = self._overwritten.get(edge, (0, ""))
            if then and number >= then:
                raise ValueError(
                    f"`blocks` must not change in place what is used after them: block {name!r} changes an input, and "
                    "the loss or another block uses this input later; let the block change a copy"
                )

    def _made_in(self, node: Any) -> str | None:
        """The block in whose first run a node was made: at the beginning of its graph, or of ``meta`` tensors alone."""
        number = sequence_numbers(node)(node)
        return block_of(node) or next(
            (name for began, end, name in self._runs if began <= number < end), None
        )

    def _check_closed(
        self, call: BlockCall, outputs: Sequence[Tensor], leaves: Sequence[Tensor], now: Sequence[Tensor]
    ) -> None:
        """Check that a block uses only its own parameters, and activations only through its arguments."""
        others = {id(x) for x in [*self._params, *(x for handed in self._handed for x in handed)]}
        nodes = nodes_between(outputs, [*leaves, *call.parameters(now)])
        if any(id(leaf_of(node)) in others or self._made_in(node) for node in nodes):
            raise ValueError(
                f"`blocks` must get what depends on parameters of the model by their arguments: block {call.name!r} "
                "uses a parameter that is not its own, or a tensor that was computed before and that it holds"
            )


def _with_graph(
    call: CallFn, name: str, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """A call of a block: the usual one, if there is to be no gradient."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return call(name, block, forward, (args, kwargs))
