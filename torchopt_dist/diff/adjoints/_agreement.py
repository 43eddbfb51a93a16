"""A loop on each of several ranks → the seed of the first one, once all are known to run the same loop.

Of a gradient transformation there is a text that is the same on two ranks if the transformations are.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchopt_dist import pytree
from torchopt_dist.core.vmap import visible
from torchopt_dist.diff.adjoints._loop import Loop
from torchopt_dist.diff.adjoints._ranks import Ranks
from torchopt_dist.diff.adjoints._shards import ShardedModel
from torchopt_dist.diff.adjoints.adjoint import Adjoint
from torchopt_dist.transform.base import ChainedGradientTransformation

__all__ = ["agreed", "description_of"]


ITEMS = 10_000
"""Of how many parts a text is at most."""


def description_of(thing: Any) -> str:
    """A text of the functions that a transformation was made of, and of the numbers and tensors that they hold.

    A function of the package or of torch is its name; any other one its code, and what it closes over and reads of
    its module's numbers and tensors. What else a function holds, such as a logger, may differ from rank to rank.
    """
    return _Description().of(thing)


class _Description:
    def __init__(self) -> None:
        self._within: set[int] = set()
        self._parts = 0

    def of(self, thing: Any) -> str:
        if thing is None or isinstance(thing, (bool, int, str, bytes, torch.dtype)):
            return repr(thing)
        if isinstance(thing, (float, complex)):
            return f"{thing:.9g}"
        if isinstance(thing, Tensor):
            return _of_tensor(thing)
        if isinstance(thing, type):
            return thing.__qualname__
        self._parts += 1
        if id(thing) in self._within or self._parts > ITEMS:
            return "..."
        self._within.add(id(thing))
        try:
            return self._of_parts(thing)
        finally:
            self._within.remove(id(thing))

    def _of_parts(self, thing: Any) -> str:
        if isinstance(thing, functools.partial):
            given = [
                *map(self.of, thing.args),
                *(f"{name}={self.of(one)}" for name, one in thing.keywords.items()),
            ]
            return f"{self.of(thing.func)}({', '.join(given)})"
        if isinstance(thing, ChainedGradientTransformation):
            return f"chain({', '.join(map(self.of, thing.transformations))})"
        if isinstance(thing, types.FunctionType):
            return self._of_function(thing)
        if isinstance(thing, types.MethodType):
            return f"{self.of(thing.__func__)} of {self.of(thing.__self__)}"
        if isinstance(thing, (nn.Module, nn.ParameterDict)):
            return f"{type(thing).__name__}({', '.join(map(self.of, thing.state_dict().values()))})"
        if isinstance(thing, Mapping):
            return f"{{{', '.join(f'{name!r}: {self.of(one)}' for name, one in thing.items())}}}"
        if isinstance(thing, (tuple, list)):
            return f"({', '.join(map(self.of, thing))})"
        held = getattr(thing, "__dict__", {}) if callable(thing) else {}
        return f"{type(thing).__qualname__}({', '.join(self._numbers(held))})"

    def _of_function(self, function: types.FunctionType) -> str:
        name = function.__qualname__
        home = str(function.__module__ or "").partition(".")[0]
        if home in ("torchopt_dist", "torch") and not function.__closure__:
            return name
        read = {one: function.__globals__.get(one) for one in function.__code__.co_names}
        cells = {}
        for one, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                cells[one] = cell.cell_contents
            except ValueError:  # not filled yet
                continue
        defaults = {str(place): one for place, one in enumerate(function.__defaults__ or ())}
        held = [*self._numbers({**read, **cells, **defaults, **(function.__kwdefaults__ or {})})]
        return f"{name}#{_digest(function.__code__)}({', '.join(held)})"

    def _numbers(self, held: Mapping[str, Any]) -> list[str]:
        kinds = (bool, int, float, complex, Tensor, tuple, list, dict, functools.partial, types.FunctionType)
        return [f"{name}={self.of(one)}" for name, one in held.items() if isinstance(one, kinds)]


def _of_tensor(tensor: Tensor) -> str:
    shape = f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]}"
    if tensor.requires_grad or tensor.is_meta or (seen := visible(tensor)) is None:
        return shape  # the values of those that may have a gradient are compared by themselves
    values = seen.reshape(-1)
    few = values if len(values) <= 16 else torch.stack([values.sum(), values.float().norm().to(values.dtype)])
    return f"{shape}({', '.join(f'{value:.9g}' for value in few.tolist())})"


def _digest(code: types.CodeType) -> str:
    found = hashlib.sha256(code.co_code)
    for one in code.co_consts:
        found.update((_digest(one) if isinstance(one, types.CodeType) else repr(one)).encode())
    found.update(repr(code.co_names).encode())
    return found.hexdigest()[:8]


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
    """What differs where tensors do; nothing of those whose values a transform hides."""
    sums: list[Tensor] = []
    with torch.no_grad():
        for one in [seen for seen in map(visible, tensors) if seen is not None]:
            part = torch.view_as_real(one.resolve_conj()) if one.is_complex() else one
            part = part if part.is_floating_point() else part.double()
            sums += [part.sum(dtype=torch.float64), torch.linalg.vector_norm(part, dtype=torch.float64)]
        return torch.stack([one.cpu() for one in sums]).tolist() if sums else []
