"""A loop that has run, what its module held in attributes before → an error, if its steps go by what is there now.

Buffers go from step to step, and a step that runs again has those that it had. An attribute does not: a step that runs
again finds what the last one has left. Whether that matters is only asked of a module whose attributes have changed, as
those of one that keeps its last activations, by the loss of the first step, once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.core.random_turns import Turn
from torchopt_dist.diff.adjoints._loop import Loop
from torchopt_dist.diff.adjoints._randomness import kept_generators
from torchopt_dist.diff.adjoints._stream import Stream
from torchopt_dist.torch_private import autocast_is_on, transforms_are_active

__all__ = ["refuse_state_in_attributes"]


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
    if not (changed and losses) or loop.ranks is not None or transforms_are_active():
        return
    if isinstance(loop.batches, Stream):  # whose first batch is gone
        return
    first, then = loop.cut(loop.first), losses[0].detach()
    with kept_generators(), torch.enable_grad(), Turn(exclusive=True):
        again = loop.evaluate(first.params, first.buffers, 0)[0].detach().reshape(then.shape)
    is_coarse = then.dtype not in (torch.float32, torch.float64) or autocast_is_on()
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
