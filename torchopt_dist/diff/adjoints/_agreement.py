"""A loop on each of several ranks → the seed of the first one, once all are known to run the same loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.diff.adjoints._described import description_of
from torchopt_dist.diff.adjoints._loop import Loop
from torchopt_dist.diff.adjoints._ranks import Ranks
from torchopt_dist.diff.adjoints._shards import ShardedModel
from torchopt_dist.diff.adjoints.adjoint import Adjoint
from torchopt_dist.torch_private import transforms_are_active

__all__ = ["agreed"]


def agreed(ranks: Ranks, loop: Loop, adjoint: Adjoint) -> int:
    """Check that all ranks run the same loop; the seed of the first one.

    Raises:
        ValueError: on all ranks: they have other parameters, meta tensors, steps, optimizers or adjoints.
        CollectiveError: a rank has died, or has raised an error.
    """
    replicated = [tensor for place, tensor in enumerate(loop.declared) if place not in ranks.own]
    facts = {
        "the adjoints": _settings_of(adjoint),
        "the numbers of steps": loop.steps,
        "the optimizers": description_of(loop.optimizer),
        "the structures of the optimizers' states": str(pytree.flatten(loop.first.state)[1]),
        "the shapes of parameters": [(tuple(one.shape), str(one.dtype)) for one in ranks.moved],
        "the shapes of replicated meta tensors": [(tuple(one.shape), str(one.dtype)) for one in replicated],
        "the numbers of own meta tensors": len(ranks.own),
        "whether parameters are in parts": ranks.shards,
        "whether there is a `stop`": loop.stop is not None,
        "whether gradients are recorded": torch.is_grad_enabled(),
    }
    model = loop.model.whole if isinstance(loop.model, ShardedModel) else loop.model
    whole = [model.leaves[place] for place in model.moved_places]
    state = [leaf for leaf in pytree.flatten(loop.first.state)[0] if isinstance(leaf, Tensor)]
    sums = {
        "parameters": _sums(whole),
        "replicated meta tensors": _sums(replicated),
        "first state of the optimizers": [] if ranks.shards else _sums(state),
    }
    others = ranks.group.agreed((facts, sums, loop.seed))
    error = _difference(others)
    if error is not None:
        ranks.group.is_agreed = True
        raise ValueError(error)
    return int(others[0][2])


def _difference(others: Sequence[Any]) -> str | None:
    """What differs among the ranks, if something does."""
    for rank, (other, other_sums, _) in enumerate(others):
        for name, value in others[0][0].items():
            if other[name] != value:
                one, two = _where_they_differ(str(value), str(other[name]))
                return (
                    f"all ranks must run the same loop with `parallel`: {name} differ: {one} on rank 0, {two} on rank "
                    f"{rank}"
                )
        for name, value in others[0][1].items():
            if not torch.allclose(
                torch.tensor(value), torch.tensor(other_sums[name]), rtol=1e-9, atol=0, equal_nan=True
            ):
                return (
                    f"the {name} must be the same on all ranks with `parallel`, got others on rank {rank} than on "
                    "rank 0: seed all ranks alike, or send those of rank 0 by torch.distributed.broadcast; meta "
                    "tensors of one rank alone belong into `own`"
                )
    return None


def _where_they_differ(one: str, other: str) -> tuple[str, str]:
    """Two texts, or, if they are long, what is around the first place in which they differ."""
    if max(len(one), len(other)) <= 200:
        return one, other
    pairs = zip(one, other, strict=False)
    first = next((place for place, (a, b) in enumerate(pairs) if a != b), 0)
    begin = max(0, first - 60)
    before = "..." if begin else ""
    return before + one[begin : first + 60], before + other[begin : first + 60]


def _settings_of(adjoint: Adjoint) -> str:
    """Its name and its settings that can be compared; a folder may differ."""
    names: list[str] = [one.name for one in fields(cast("Any", adjoint))] if is_dataclass(adjoint) else []
    held = {name: getattr(adjoint, name) for name in names if name != "store"}
    plain = [
        f"{name}={value!r}" for name, value in held.items() if isinstance(value, (bool, int, float, str))
    ]
    return f"{type(adjoint).__name__}({', '.join(plain)})"


def _sums(tensors: Sequence[Tensor]) -> list[float]:
    """What differs where tensors do; nothing inside of transforms, which hide the values."""
    if transforms_are_active() or not tensors:
        return []
    with torch.no_grad():
        parts = [
            torch.view_as_real(one.resolve_conj())
            if one.is_complex()
            else one
            if one.is_floating_point()
            else one.double()
            for one in tensors
        ]
        sums = [
            (part.sum(dtype=torch.float64), torch.linalg.vector_norm(part, dtype=torch.float64))
            for part in parts
        ]
        return torch.stack([one.cpu() for pair in sums for one in pair]).tolist()
