"""A loop → the same, which raises where a gradient would silently be missing, or be that of other steps.

An adjoint differentiates with respect to declared tensors only, so a loss that uses others is refused (`watched`). One
that gives no gradient to the loss's tensors at all cannot know what the outer loss will use (`run_aloud`): the error
waits for a backward pass that is to fill ``.grad`` and does not come to these tensors by another way.
``torch.autograd.grad`` itself refuses a tensor that it does not reach.

Buffers go from step to step, and a step that runs again has those that it had. An attribute does not: a step that runs
again finds what the last one has left. Whether that matters is only asked of a module whose attributes have changed, as
those of one that keeps its last activations, by the loss of the first step, once more.
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
    edge_of,
    graph_is_recorded,
    leaves_behind,
    looks_for_others,
    nodes_between,
    pass_needs,
)
from torchopt_dist.core.random_turns import Turn, kept_generators
from torchopt_dist.core.surroundings import modes
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.unconnected import Unconnected, note_unconnected
from torchopt_dist.core.vmap import Samples
from torchopt_dist.diff.adjoints._carry import Seen, WatchFn
from torchopt_dist.diff.adjoints._declared import refuse
from torchopt_dist.diff.adjoints._loop import Loop, Outcome
from torchopt_dist.diff.adjoints._stream import Stream

__all__ = ["refusal_as_it_is", "refuse_state_in_attributes", "refuse_undeclared", "run_aloud", "watched"]


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
    depends_on_others = looks_for_others()

    def watch(seen: Seen) -> None:
        if depends_on_others(seen.loss, [*seen.leaves, *loop.declared]):
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
    if not loop.declared or loop.is_substituted or not graph_is_recorded():
        return run(loop)
    used = [tensor for tensor in also if tensor.requires_grad]

    def watch(seen: Seen) -> None:
        if seen.number == 0:
            nodes = set(nodes_between([seen.loss], seen.leaves))
            used.extend(tensor for tensor in loop.declared if edge_of(tensor)[0] in nodes)

    outcome = run(replace(loop, watch=watch))
    params = outcome.carry.params
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
    last = [params[place] for place in loop.model.moved_places]
    aloud = _Aloud.apply(what, [tensor.detach() for tensor in last], probe, *last)
    return outcome.with_moved(loop.model, aloud)


class _Aloud(torch.autograd.Function):
    """Parameters → the same; the probe is needed only by a pass that is to fill the ``.grad`` of all leaves."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(
        ctx: Any, what: Unconnected, same: list[Tensor], probe: Tensor, *params: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.what, ctx.probe = what, probe
        ctx.set_materialize_grads(False)
        return tuple(same)

    @staticmethod
    def backward(ctx: Any, *bars: OptionalTensor) -> tuple[OptionalTensor, ...]:
        if pass_needs(ctx.probe):
            silent = [tensor for tensor in ctx.what.tensors if not pass_needs(tensor)]
            if silent:
                shapes = " and one of shape ".join(str(tuple(tensor.shape)) for tensor in silent)
                raise ValueError(f"a tensor of shape {shapes} would get no gradient: {ctx.what.why}")
        return None, None, None, *bars


def refuse_state_in_attributes(
    loop: Loop, losses: Sequence[Tensor], held: Sequence[tuple[str, Any]], name: str
) -> None:
    """Check that the steps of a loop can run again.

    Args:
        loop: the loop.
        losses: what its steps had.
        held: what the parts of its module held in attributes before, as ``loop.model.held()`` tells.
        name: what runs them.

    Raises:
        ValueError: the loss of the first step is another one now.
    """
    changed = _changed(held, loop.model.held())
    if not (changed and losses) or loop.ranks is not None or not graph_is_recorded():
        return
    if isinstance(loop.batches, Stream):  # whose first batch is gone
        return
    first, then = loop.cut(loop.first), losses[0].detach()
    with kept_generators(), torch.enable_grad(), Turn(exclusive=True):
        again = loop.evaluate(first.params, first.buffers, 0)[0].detach().reshape(then.shape)
    is_coarse = then.dtype not in (torch.float32, torch.float64) or any(
        is_on for _, is_on, _ in modes().autocast
    )
    if not torch.allclose(again, then, rtol=2e-2 if is_coarse else 1e-5, atol=1e-7, equal_nan=True):
        raise ValueError(
            f"the module must not keep state in attributes with {name}, which runs steps again: the loss of "
            f"step 0 was {then.item():.6g}, and is {again.item():.6g} after the last step has set "
            f"{', '.join(changed)}. Make it a buffer, by `register_buffer`, which goes from step to step, or take "
            "todist.Recorded()"
        )


def _changed(before: Sequence[tuple[str, Any]], after: Sequence[tuple[str, Any]]) -> list[str]:
    """The names of the attributes that hold something else."""
    if len(before) != len(after):
        return sorted({name for name, _ in after} ^ {name for name, _ in before})
    pairs = zip(before, after, strict=True)
    return [
        f"`{name}`" for (_, one), (name, other) in pairs if one is not other and not _are_equal(one, other)
    ]


def _are_equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, (bool, int, float, str, tuple)) and one == other
