"""A gradient transformation → a text that is the same on two ranks if the transformations are."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_dist.torch_private import transforms_are_active
from torchopt_dist.transform.base import ChainedGradientTransformation

__all__ = ["description_of"]

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
    if tensor.requires_grad or tensor.is_meta or transforms_are_active():
        return shape  # the values of those that may have a gradient are compared by themselves
    values = tensor.detach().reshape(-1)
    few = values if len(values) <= 16 else torch.stack([values.sum(), values.float().norm().to(values.dtype)])
    return f"{shape}({', '.join(f'{value:.9g}' for value in few.tolist())})"


def _digest(code: types.CodeType) -> str:
    found = hashlib.sha256(code.co_code)
    for one in code.co_consts:
        found.update((_digest(one) if isinstance(one, types.CodeType) else repr(one)).encode())
    found.update(repr(code.co_names).encode())
    return found.hexdigest()[:8]
