"""A loop → its outcome with the exact gradient, for which segments of steps are run again, or blocks of its model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from torchopt_dist import pytree
from torchopt_dist.arguments.options import unless
from torchopt_dist.core.vmap import samples_around
from torchopt_dist.diff.adjoints._history import History
from torchopt_dist.diff.adjoints._loop import Loop, Outcome
from torchopt_dist.diff.adjoints._loop_of_samples import run_outside_of_vmap
from torchopt_dist.diff.adjoints._model import ModuleModel
from torchopt_dist.diff.adjoints._shards import ShardedModel
from torchopt_dist.diff.adjoints._store import Store, bytes_of, number_of_bytes
from torchopt_dist.diff.adjoints.adjoint import Adjoint
from torchopt_dist.diff.adjoints.recorded import record
from torchopt_dist.diff.replay import replayed

__all__ = ["Replayed", "by_blocks"]


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
    found = [f"{within}.{name}" if within else name for name, part in blocks.named_children() if part]
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


def _with_sweep(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if "sweep" not in kwargs:
        return None
    return (
        "Replayed got `sweep`, which is no longer an option, since there is one way back through a step: leave it out; "
        "for less memory give `blocks` or `snapshots`"
    )


@unless(_with_sweep)
@dataclass(frozen=True)
class Replayed(Adjoint):
    """The exact gradient without the graph of all steps: segments of steps are run again.

    What a segment starts from is kept: parameters, the optimizer's state and buffers, a *snapshot*. When the gradient
    comes back to a segment, it is run again, in smaller segments, down to single steps, whose graph is recorded and
    gone through: a tree of :func:`~torchopt_dist.remat`. With fewer snapshots than steps they are placed so that the
    fewest steps are run again (Griewank and Walther, 2000). Steps whose graphs are small are recorded several at a
    time. The gradient can be differentiated itself, to any order, each time with the graph of so few steps. ``meta``
    must list every tensor that the loss uses from outside and that requires grad. A step that is run again must have
    the loss that it had, or an error says which has not. Inside of ``vmap`` the loops of all samples are replayed as
    one; inside of other transforms of ``torch.func`` all steps are recorded, and a warning says so.

    Args:
        memory: for the snapshots together: a number of bytes, or a string such as ``'2GiB'``.
        snapshots: their number, that of the start among them, or ``'all'``: one a step, so that each step is run again
            once. That is the default if neither is given.
        store: where snapshots are kept: ``'cpu'``, or a folder; on the tensors' own device, if not given.
        blocks: an ``nn.Sequential`` or ``nn.ModuleList`` in the module that is adapted; or ``"auto"``, the one with the
            most modules that has at least half of the parameters. Each of its modules is a
            :func:`~torchopt_dist.remat`: of a step's graph there are the inputs of all blocks, and what one block
            makes.
        sharded: with ``inner_loop(..., parallel=...)``: each rank keeps its part of snapshots, and gathers them when
            they are needed; ``memory`` is that of one rank.
        check: evaluate the first step twice, and raise an error unless loss and gradient are the same.
        keep: with a folder as ``store``: the snapshots stay there when the process ends. The same loop with the same
            folder then runs no step that is in the history, also in another process: it gives the same result, and
            gradients by it. A loop that was killed goes on from its last snapshot. Functions that ``inner_loop`` calls
            at each step are not called for steps that are not run.

    Raises:
        TypeError: an argument has the wrong type; from ``inner_loop``: a block returns something else than a tree of
            tensors and numbers.
        CheckpointError: from ``inner_loop`` or a backward pass: a history that is kept cannot be read.
        OSError: from ``inner_loop``: the folder has no room; what it has stays.
        ValueError: ``memory`` and ``snapshots`` are both given, or one is below 1; ``keep`` without a folder; from
            ``inner_loop``: the folder has the history of another loop, ``keep`` with ``parallel`` or ``has_aux``,
            ``memory`` is less than a snapshot takes, a tensor that the loss uses is not in ``meta``, ``blocks`` are not
            in the module or hand on tensors by other ways than their arguments and results, or ``check`` finds a
            difference.
        RuntimeError: from a backward pass: a step that is run again has another loss than it had.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> w = torch.tensor(1.0, requires_grad=True)
        >>> adapted = todist.inner_loop(
        ...     lambda w: w**2, todist.sgd(lr=0.25), w, 4, adjoint=Replayed(snapshots=2)
        ... )
        >>> torch.autograd.grad(adapted.params, w)
        (tensor(0.0625),)
    """

    memory: int | str | None = None
    snapshots: int | Literal["all"] | None = None
    store: str | Path | None = None
    blocks: nn.Module | Literal["auto"] | None = None
    sharded: bool = False
    check: bool = False
    keep: bool = False

    def __post_init__(self) -> None:
        if self.memory is not None:
            number_of_bytes(self.memory)
            if self.snapshots is not None:
                raise ValueError("`memory` and `snapshots` say the same: give one of them")
        if self.snapshots not in (None, "all"):
            if isinstance(self.snapshots, bool) or not isinstance(self.snapshots, int):
                raise TypeError(f"`snapshots` must be a number or 'all', got {self.snapshots!r}")
            if self.snapshots < 1:
                raise ValueError(f"`snapshots` must be at least 1, got {self.snapshots}")
        if not isinstance(self.check, bool):
            raise TypeError(f"`check` must be True or False, got {type(self.check).__name__} {self.check!r}")
        if not isinstance(self.sharded, bool):
            raise TypeError(
                f"`sharded` must be True or False, got {type(self.sharded).__name__} {self.sharded!r}"
            )
        if self.store is not None and not isinstance(self.store, (str, Path)):
            raise TypeError(f"`store` must be 'cpu' or a folder, got {type(self.store).__name__}")
        if not isinstance(self.keep, bool):
            raise TypeError(f"`keep` must be True or False, got {type(self.keep).__name__} {self.keep!r}")
        if self.keep and self.store in (None, "cpu"):
            raise ValueError(f"`store` must be a folder with `keep`, got {self.store!r}")
        if self.blocks not in (None, "auto") and not isinstance(self.blocks, (nn.Sequential, nn.ModuleList)):
            raise TypeError(
                f"`blocks` must be an nn.Sequential, an nn.ModuleList or 'auto', got {type(self.blocks).__name__}"
            )

    def run(self, loop: Loop) -> Outcome:
        """Run the loop; see :meth:`Adjoint.run`."""
        if self.sharded and loop.ranks is None:
            raise ValueError("`sharded` must be False without `parallel`: no other ranks keep a part")
        around = samples_around()
        if around is None:
            warnings.warn(
                "todist.Replayed() records all steps inside of torch.func's transforms other than vmap, such as grad: "
                "the gradient is the same, memory is that of todist.Recorded()",
                stacklevel=5,
            )
            return record(loop)
        return run_outside_of_vmap(self._replayed, self._in_blocks(loop), around)

    def _in_blocks(self, loop: Loop) -> Loop:
        if self.blocks is None:
            return loop
        if loop.is_compiled:
            raise ValueError("`compile` must be False with `blocks`, which are differentiated one by one")
        return by_blocks(loop, self.blocks)

    def _replayed(self, loop: Loop) -> Outcome:
        store = Store(self.store, loop.ranks if self.sharded else None)
        history = None
        if self.keep and self.store is not None:
            if loop.ranks is not None or loop.has_aux:
                raise ValueError(
                    f"`keep` must be False with `{'has_aux' if loop.has_aux else 'parallel'}`: the history has neither "
                    "what else losses return nor the parts of other ranks"
                )
            history = History(Path(self.store), loop)
        return replayed(loop, self._slots(loop), store, self.check, history)

    def _slots(self, loop: Loop) -> int | None:
        """How many starts there is room for; ``None`` for all."""
        if self.memory is None:
            return None if self.snapshots in (None, "all") else int(self.snapshots or 1)
        moved = [loop.first.params[place] for place in loop.model.moved_places]
        size = max(1, bytes_of([*moved, *pytree.flatten(loop.first.state)[0], *loop.first.buffers]))
        budget = number_of_bytes(self.memory)
        if self.sharded and loop.ranks is not None:
            budget *= loop.ranks.size
        if budget < size:
            raise ValueError(
                f"`memory` must have room for one snapshot, which takes {size:,} bytes, got {self.memory!r}"
            )
        return budget // size
