"""The parameters of an inner loop, a tree or a module → lists of tensors for the optimizer, and the loss's argument.

A module is copied, and the copy is filled with other parameters and buffers before each call of the loss. So the
caller's module stays as it is, and may be changed before the loop is run again for its gradient.

A checkpoint, or a hook of a tensor, that calls the module in a backward pass holds on to the module, to a sub-module,
or to a dictionary of either. CPython counts such references, so looking takes microseconds.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_dist import pytree
from torchopt_dist.core.types import OptionalTensor, Params, TensorContainer
from torchopt_dist.core.vmap import differentiable
from torchopt_dist.nn._module_copy import ModuleCopy
from torchopt_dist.nn._tensor_dicts import (
    all_containers,
    has_buffers,
    parameter_containers,
    parts_and_parameters,
    parts_of,
    tensor_containers,
)

__all__ = ["Model", "ModuleModel", "Places", "TreeModel", "holders", "model_of", "references"]


Places = list[tuple[TensorContainer, str, int]]
"""Dictionaries of a module, a name in each, and the number of the leaf there."""

_AVERAGING = {"DistributedDataParallel": "DistributedDataParallel", "FSDPModule": "`fully_shard`"}
"""Classes of torch that average or gather in hooks of a backward pass, by their names."""


class Model(ABC):
    """Parameters as lists of leaves."""

    leaves: list[Tensor]
    """The first parameters; a tied one stands at each of its places."""
    buffers: list[Tensor]
    """The first buffers."""
    _spec: pytree.PyTreeSpec | None
    """The structure of the tree; ``None``: it is one tensor."""

    def __init__(self, tree: Params) -> None:
        self.leaves, self._spec = [tree], None
        if not isinstance(tree, Tensor):
            self.leaves, self._spec = pytree.flatten(tree)
        for leaf in self.leaves:
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"`params` must be a module or a tree of tensors, got a {type(leaf).__name__}"
                )
        self.buffers = []
        seen: dict[int, int] = {}
        self.first_places = list(map(seen.setdefault, map(id, self.leaves), count()))
        moved = set(map(id, differentiable(self.leaves)))
        self.moved_places = [
            place
            for place, leaf in enumerate(self.leaves)
            if self.first_places[place] == place and id(leaf) in moved
        ]
        if not self.moved_places:
            raise ValueError(
                f"`params` must have a tensor that requires grad, got {len(self.leaves)} tensors, none of which does"
            )

    def tree(self, leaves: Sequence[OptionalTensor]) -> Params:
        """Leaves → the tree that the optimizer takes."""
        return leaves[0] if self._spec is None else pytree.unflatten(self._spec, list(leaves))

    def tied(self, tree: Params) -> list[Tensor]:
        """A tree from the optimizer → leaves; a tied parameter is the same tensor at each of its places."""
        if self._spec is None:
            return [tree]
        leaves = pytree.flatten(tree)[0]
        return [leaves[place] for place in self.first_places]

    @abstractmethod
    def filled(self, leaves: Sequence[Tensor], buffers: Sequence[Tensor]) -> Any:
        """The loss's argument, with these leaves. The loss may overwrite the buffers."""

    def part(self, name: str) -> nn.Module:
        """A sub-module of the last filled module, by its name."""
        raise LookupError(name)  # a tree has none

    def in_blocks(self, names: Sequence[str]) -> Model:
        """The model whose sub-modules of these names are called one by one, by :meth:`block_forward`."""
        return self

    def block_forward(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward function of a sub-module that is called by itself."""
        return forward

    @abstractmethod
    def leave(self) -> None:
        """Leave the last filled module to a graph, if the graph may use it; the next one is then a new copy.

        ``torch.utils.checkpoint`` in a module, or a hook, calls the module again in backward, which must then have the
        parameters of the step.
        """

    def fresh(self) -> Model:
        """A model like this one, which nothing else fills."""
        return self  # each tree is a new one

    def key(self) -> nn.Module | None:
        """The module that is filled, of which all decides what a step is; none where the loss takes a tree."""
        return None

    @abstractmethod
    def let_go(self) -> None:
        """Drop the leaves that were filled in last."""

    @abstractmethod
    def buffers_now(self) -> list[Tensor]:
        """The buffers as the loss has left them."""

    def held(self) -> list[tuple[str, Any]]:
        """What the parts of the last filled module hold in attributes: the names, and what is there."""
        return []  # of a tree, and of a module in one vector or in parts

    @abstractmethod
    def result(self, leaves: Sequence[Tensor], buffers: Sequence[Tensor], *, last: bool = False) -> Any:
        """The value for the caller; if ``last``, the model is not used any more."""


class TreeModel(Model):
    """A tree of tensors: the loss takes such a tree."""

    def leave(self) -> None:
        """Do nothing: each tree is a new one."""

    def let_go(self) -> None:
        """Do nothing: a tree belongs to the loss."""

    def filled(self, leaves: Sequence[Tensor], buffers: Sequence[Tensor]) -> Any:
        return leaves[0] if self._spec is None else pytree.unflatten(self._spec, list(leaves))

    def buffers_now(self) -> list[Tensor]:
        return []

    def result(self, leaves: Sequence[Tensor], buffers: Sequence[Tensor], *, last: bool = False) -> Any:
        return self.tree(leaves)


class ModuleModel(Model):
    """A module: the loss takes a copy, and the optimizer a dictionary of the parameters by name."""

    def __init__(self, module: nn.Module) -> None:
        parts, named = parts_and_parameters(module)
        _refuse_averaging({*map(type, parts)})
        _refuse_scripted(parts)
        if not named:
            raise ValueError(f"`params` must have parameters, got {type(module).__name__} with none")
        super().__init__(named)
        places = dict(zip(map(id, self.leaves), count(), strict=False))
        self._place_of = {name: places[id(leaf)] for name, leaf in named.items()}
        self._names = sorted(named, key=self._place_of.__getitem__)
        self.module = module
        self.buffers = list(module.buffers()) if has_buffers(parts) else []
        self._leaves = self.leaves
        self._copy_anew(module, self.leaves, self.buffers)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the copy and the places in it, since another worker makes its own."""
        module = self.result(self.leaves, self.buffers)
        return {
            **{key: value for key, value in vars(self).items() if key not in _OF_THE_COPY},
            "module": module,
            "_copy": module,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._leaves = self.leaves
        self._copy_anew(self._copy, self.leaves, self.buffers)

    def _copy_anew(self, module: nn.Module, leaves: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        copy, parts, self._places = _copied(module, leaves, buffers)
        self._copy = copy.module
        self._holders = holders(parts) if copy.is_plain else []
        del copy, parts  # which count as references
        self._references = references(self._holders)

    def tree(self, leaves: Sequence[OptionalTensor]) -> Params:
        return {name: leaves[place] for name, place in self._place_of.items()}

    def tied(self, tree: Params) -> list[Tensor]:
        assert isinstance(tree, dict)
        return [tree[name] for name in self._names]  # each parameter has one name here

    def filled(self, leaves: Sequence[Tensor], buffers: Sequence[Tensor]) -> nn.Module:
        self._leaves = list(leaves)
        _fill(self._places, [*leaves, *buffers])
        return self._copy

    def fresh(self) -> Model:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        made._copy_anew(self._copy, self._leaves, self.buffers_now())
        return made

    def key(self) -> nn.Module:
        return self._copy

    def part(self, name: str) -> nn.Module:
        return self._copy.get_submodule(name)

    def held(self) -> list[tuple[str, Any]]:
        own = [part for part in parts_of(self._copy) if not type(part).__module__.startswith("torch.nn.")]
        return [
            (f"{type(part).__name__}.{name}", value)
            for part in own
            for name, value in vars(part).items()
            if name not in _OF_ALL
        ]

    def places_in(self, block: nn.Module) -> Places:
        """Where a sub-module of the last filled module has which leaf."""
        containers = set(map(id, parameter_containers(parts_of(block))))
        return [place for place in self._places if id(place[0]) in containers]

    def leave(self) -> None:
        if not self._holders or references(self._holders) != self._references:
            self._copy_anew(self._copy, self._leaves, self.buffers_now())

    def let_go(self) -> None:
        self._leaves = self.leaves
        _fill(self._places, self.leaves)

    def buffers_now(self) -> list[Tensor]:
        there: dict[int, Tensor] = {}
        for container, name, index in self._places:
            if index >= len(self.leaves) and (tensor := container[name]) is not None:
                there[index] = tensor
        return [there[index] for index in sorted(there)]

    def result(self, leaves: Sequence[Tensor], buffers: Sequence[Tensor], *, last: bool = False) -> nn.Module:
        if last:
            return self.filled(leaves, buffers)
        _fill(self._places, [*self.leaves, *self.buffers])
        copy, _, places = _copied(self._copy, self.leaves, self.buffers)
        _fill(places, [*leaves, *buffers])
        return copy.module


_OF_THE_COPY = frozenset({"_holders", "_leaves", "_places", "_references"})
"""What another process makes anew."""
_OF_ALL = frozenset(vars(nn.Module())) - {"training"}
"""The attributes that every module has."""


def _copied(
    module: nn.Module, leaves: Sequence[Tensor], buffers: Sequence[Tensor]
) -> tuple[ModuleCopy, list[nn.Module], Places]:
    """A copy with the same tensors, its parts, and the places of each of the tensors in it."""
    copy = ModuleCopy(module, _itself, _itself)
    index = dict(zip(map(id, [*leaves, *buffers]), count(), strict=False))
    parts = parts_of(copy.module)
    places = [
        (container, name, index[id(tensor)])
        for container in tensor_containers(parts)
        for name, tensor in container.items()
        if tensor is not None and id(tensor) in index
    ]
    return copy, parts, places


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _fill(places: Places, tensors: Sequence[Tensor]) -> None:
    """Put tensors in their places; further places stay as they are."""
    count = len(tensors)
    for container, name, index in places:
        if index < count:
            container[name] = tensors[index]


def model_of(params: Params | nn.Module) -> Model:
    """Make a model from the caller's parameters.

    Raises:
        TypeError: a leaf of the tree is no tensor, or the module is under DistributedDataParallel or ``fully_shard``.
        ValueError: there are no parameters, or none requires grad.
    """
    if not isinstance(params, nn.Module):
        return TreeModel(params)
    return ModuleModel(params)


def _refuse_scripted(parts: Iterable[nn.Module]) -> None:
    for part in parts:
        if isinstance(part, torch.jit.ScriptModule) and any(p.requires_grad for p in part.parameters()):
            raise TypeError(
                f"`params` must not have parameters in TorchScript, got {type(part).__name__}, whose code does not "
                "see those of a step: give the module that was scripted or traced, or freeze it by "
                "`requires_grad_(False)`; `compile=True` makes steps faster"
            )


def _refuse_averaging(classes: set[type]) -> None:
    for wrapper in [
        kind.__name__ for each in classes for kind in each.__mro__ if kind.__name__ in _AVERAGING
    ]:
        raise TypeError(
            f"`params` must not be under {_AVERAGING[wrapper]}, whose gradients cannot be differentiated again: "
            "give the module itself, and `parallel=todist.DataParallel()`, which averages them"
        )


def holders(parts: Sequence[nn.Module]) -> list[Any]:
    """The objects by which one can hold on to a module: all its parts and their dictionaries."""
    # There is no way from an empty one.
    return [*parts, *map(vars, parts), *filter(None, all_containers(parts))]


def references(objects: Sequence[Any]) -> list[int]:
    """How many references there are to each object, and weak ones to each module."""
    weak = [weakref.getweakrefcount(one) for one in objects if isinstance(one, nn.Module)]
    return [*map(sys.getrefcount, objects), *weak]
