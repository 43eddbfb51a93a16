"""A loop, an ``nn.Sequential`` or ``nn.ModuleList`` of its model → the loop, with the names of its blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import nn

from torchopt_dist.diff.adjoints._loop import Loop
from torchopt_dist.diff.adjoints._model import ModuleModel
from torchopt_dist.diff.adjoints._shards import ShardedModel
from torchopt_dist.torch_private import children_of

__all__ = ["by_blocks"]


def by_blocks(loop: Loop, blocks: nn.Module | Literal["auto"]) -> Loop:
    """The same loop, with the names of its blocks.

    Args:
        loop: the loop.
        blocks: an ``nn.Sequential`` or ``nn.ModuleList`` in the model, or the model itself; or ``"auto"``: that with
            the most modules in it, of those with at least half of the model's parameters.

    Raises:
        ValueError: the loop's parameters are no module; ``blocks`` is not a part of it, or has no modules; or, for
            ``"auto"``, there is none.
    """
    model = loop.model.whole if isinstance(loop.model, ShardedModel) else loop.model
    if not isinstance(model, ModuleModel):
        raise ValueError("`blocks` need `params` to be a module, of which they are a part; got a tree")
    module = model.module
    names = {id(part): name for name, part in module.named_modules()}
    if blocks == "auto":
        blocks = _widest(module)
    if id(blocks) not in names:
        raise ValueError(
            f"`blocks` must be a part of the module that is given as `params`, a {type(module).__name__}; got a "
            f"{type(blocks).__name__} that is not in it"
        )
    within = names[id(blocks)]
    found = [f"{within}.{name}" if within else name for name, part in children_of(blocks).items() if part]
    if not found:
        raise ValueError(f"`blocks` must have modules in it, got an empty {type(blocks).__name__}")
    return replace(loop, model=loop.model.in_blocks(found), blocks=tuple(found))


def _widest(module: nn.Module) -> nn.Module:
    def size(part: nn.Module) -> int:
        return sum(p.numel() for p in part.parameters())

    candidates = [
        part
        for part in module.modules()
        if isinstance(part, (nn.Sequential, nn.ModuleList))
        and 2 * size(part) >= size(module)
        and len(part) > 1
    ]
    if not candidates:
        raise ValueError(
            f"`blocks='auto'` needs an nn.Sequential or nn.ModuleList with at least half of the parameters, and a "
            f"{type(module).__name__} has none: give its blocks"
        )
    return max(candidates, key=len)
