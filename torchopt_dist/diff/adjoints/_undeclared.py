"""A loop → the same, which raises if its loss uses tensors that require grad and are not declared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchopt_dist.core.graphs import leaves_behind
from torchopt_dist.core.random_turns import Turn
from torchopt_dist.diff.adjoints._carry import Seen, WatchFn
from torchopt_dist.diff.adjoints._declared import depends_on_others, refuse
from torchopt_dist.diff.adjoints._loop import Loop
from torchopt_dist.diff.adjoints._randomness import kept_generators
from torchopt_dist.diff.adjoints._samples import Samples
from torchopt_dist.torch_private import next_sequence_number

__all__ = ["refusal_as_it_is", "refuse_undeclared", "watched"]


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
            lambda: [exchanged.evaluate(seen.carry.params, seen.carry.buffers, seen.number)[0]],
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
        cut = loop.cut(loop.first)
        with Turn(exclusive=True):
            return [replace(loop, others=others).evaluate(cut.params, cut.buffers, 0)[0]]

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
