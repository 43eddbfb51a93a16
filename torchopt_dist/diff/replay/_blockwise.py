"""A loop, an ``nn.Sequential`` or ``nn.ModuleList`` of its model → the loop, its gradients taken block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor, nn

from torchopt_dist._torch_private import children_of
from torchopt_dist.diff.adjoints._carry import LookFn
from torchopt_dist.diff.adjoints._loop import Evaluation, Loop
from torchopt_dist.diff.adjoints._model import ModuleModel
from torchopt_dist.diff.adjoints._samples import VmappedLoop
from torchopt_dist.diff.adjoints._shards import ShardedModel
from torchopt_dist.diff.replay._blocks import sweep

__all__ = ["BlockwiseLoop", "by_blocks"]


@dataclass(frozen=True)
class BlockwiseLoop(Loop):
    """A loop whose gradients are taken block by block, but where they are recorded."""

    blocks: tuple[str, ...] = ()
    """The names of the blocks in the model, in their order."""

    def swept(
        self,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        number: int,
        wanted: Sequence[Tensor],
        look: LookFn,
    ) -> Evaluation:
        """As :meth:`Loop.swept`; ``look`` is shown each part of the graph."""
        return sweep(self, self.blocks, params, buffers, number, wanted, look)


@dataclass(frozen=True, kw_only=True)
class VmappedBlockwiseLoop(VmappedLoop, BlockwiseLoop):
    """Such a loop for many samples at a time."""


def by_blocks(loop: Loop, blocks: nn.Module | Literal["auto"]) -> Loop:
    """The same loop, whose gradients are taken block by block.

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
    settings: dict[str, Any] = {field.name: getattr(loop, field.name) for field in fields(loop)}
    kind = VmappedBlockwiseLoop if isinstance(loop, VmappedLoop) else BlockwiseLoop
    return kind(**settings, blocks=tuple(found))


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
