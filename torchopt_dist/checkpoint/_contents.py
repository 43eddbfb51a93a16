"""Objects by name → plain values and tensors, which ``torch.load(weights_only=True)`` reads, and back into objects.

An entry is taken apart as a tree; each leaf is an object with a state, a generator, a tensor or a plain value, and is
kept with the path at which it stands. An entry of plain values only is kept as it is, as its structure may change.
"""

from __future__ import annotations

import random
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import optree
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torchopt_dist.pytree import PyTreeSpec

__all__ = ["Leaf", "Packer", "check", "pack", "restore", "unpack_value"]

_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(torch.dtype, torch.device, torch.Size),
)
_DICTS = (dict, OrderedDict, Counter, defaultdict)
_SEQUENCES = (list, tuple, set)
_ARRAY = "todist: numpy array"
"""The only key of the dict that stands for an array of numpy, which torch would not load."""


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> object: ...


class Leaf(NamedTuple):
    """A part of an entry, as it is saved."""

    kind: str
    value: Any


class _Generator(NamedTuple):
    """How a kind of generator gives its state and takes it."""

    get: Callable[[Any], Any]
    set: Callable[[Any, Any], object]


def _set_bit_generator(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_GENERATORS: dict[type, _Generator] = {
    torch.Generator: _Generator(lambda g: g.get_state(), lambda g, s: g.set_state(s)),
    np.random.Generator: _Generator(lambda g: g.bit_generator.state, _set_bit_generator),
    np.random.RandomState: _Generator(lambda g: g.get_state(legacy=False), lambda g, s: g.set_state(s)),
    random.Random: _Generator(lambda g: g.getstate(), lambda g, s: g.setstate(s)),
}


def check(objects: Mapping[str, Any]) -> None:
    """Raise unless every part of every object has a state.

    Raises:
        TypeError: a part has no state.
    """
    for name, entry in objects.items():
        _take_apart(name, entry)


def pack(objects: Mapping[str, Any], packer: Packer) -> dict[str, dict[str, tuple[str, Any]]]:
    """Take the states of objects.

    Args:
        objects: the objects by name.
        packer: packs the states.

    Returns:
        For each name path → kind and state.

    Raises:
        TypeError: an object has no state, or something is in its state that cannot be kept.
    """
    packed = {}
    for name, entry in objects.items():
        paths, leaves, _ = _take_apart(name, entry)
        states = [_state_of(leaf) for leaf in leaves]
        packed[name] = {
            path: (kind, packer.pack(value, f"`{name}`{path}"))
            for path, (kind, value) in zip(paths, states, strict=True)
        }
    return packed


def restore(
    objects: Mapping[str, Any], saved: Mapping[str, Mapping[str, tuple[str, Any]]], *, partial: bool = False
) -> dict[str, Any]:
    """Bring objects to saved states.

    Args:
        objects: the objects by name. Those with a state, and leaf tensors that require grad, are changed, and so is a
            module whose ``state_dict()`` is given.
        saved: what :func:`pack` returned.
        partial: whether there may be more in ``saved`` than ``objects``.

    Returns:
        The objects by name, with the saved ones in the place of plain values and of other tensors.

    Raises:
        TypeError: an object has no state, or is of another kind than was saved.
        ValueError: names, paths or shapes differ, or an object refuses its state. Nothing has been changed, unless
            it was an object that refused.
    """
    if not partial:
        remedy = "; `partial=True` restores a part of what was saved"
        _check_names("`objects` must have the names that were saved", objects, saved, remedy)
    elif unknown := [name for name in objects if name not in saved]:
        raise ValueError(
            f"`objects` must have names that were saved, which are {', '.join(saved)}, got {', '.join(unknown)}"
        )
    parts = {name: _take_apart(name, entry) for name, entry in objects.items()}
    for name, (paths, leaves, _) in parts.items():
        if _is_whole(saved[name]) and not _is_plain(objects[name]):
            raise TypeError(f"`{name}` was saved as plain values, got {type(objects[name]).__name__}")
        _check_names(f"`{name}` must have the parts that were saved", paths, saved[name])
        for path, leaf in zip(paths, leaves, strict=True):
            _check_leaf(f"`{name}`{path}", leaf, Leaf(*saved[name][path]))
    restored = {}
    for name, (paths, leaves, spec) in parts.items():
        fill = _Filler(leaves, [saved[name][path][1] for path in paths], _is_of_module(objects[name]))
        new = [fill.leaf(f"`{name}`{path}", *pair) for path, pair in zip(paths, fill.pairs, strict=True)]
        restored[name] = new[0] if spec is None else optree.tree_unflatten(spec, new)
    return restored


def unpack_value(value: Any) -> Any:
    """Turn a packed state into the state."""
    kind = type(value)
    if kind is dict and value.keys() == {_ARRAY}:
        return value[_ARRAY].numpy()
    if kind is dict or kind is OrderedDict:
        return kind((key, unpack_value(part)) for key, part in value.items())
    if kind in (list, tuple):
        return kind(unpack_value(part) for part in value)
    return value


class Packer:
    """States → plain values and tensors; a tensor that occurs several times is saved once.

    Args:
        copy: copy all tensors, so that the objects may change while the file is written.
    """

    def __init__(self, copy: bool) -> None:
        self._copy = copy
        self._known: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def pack(self, value: Any, where: str) -> Any:
        """Pack a state.

        Args:
            value: the state.
            where: a name of the object, for the error.

        Raises:
            TypeError: something is in it that cannot be kept.
        """
        kind = type(value)
        if kind in _ATOMS:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, np.generic) and type(value.item()) in _ATOMS:
            return value.item()
        if isinstance(value, np.ndarray):
            return {_ARRAY: self._tensor(_from_numpy(value, where), where)}
        if kind in _SEQUENCES:
            return kind(self.pack(part, f"{where}[{index}]") for index, part in enumerate(value))
        if kind in _DICTS:
            if _ARRAY in value:
                raise TypeError(f"{where} has the key {_ARRAY!r}, which is this module's own")
            packed = {
                self.pack(key, where): self.pack(part, f"{where}[{key!r}]") for key, part in value.items()
            }
            return kind(packed) if kind is OrderedDict or kind is Counter else packed
        raise TypeError(
            f"{where} must be numbers, texts, tensors or lists, tuples, sets and dicts of these, got "
            f"{kind.__name__} {value!r:.80}"
        )

    def _tensor(self, tensor: Tensor, where: str) -> Tensor:
        if is_lazy(tensor):
            raise TypeError(f"{where} has no shape yet: run its module once before it is saved")
        plain = tensor.detach()
        if type(plain) is not Tensor or plain.is_meta:
            name = "meta tensor" if plain.is_meta else type(plain).__name__
            raise TypeError(f"{where} must be a plain tensor, whose values are in this process, got a {name}")
        if plain.layout is not torch.strided or plain.is_quantized:
            return plain.to("cpu", copy=self._copy)
        key = (
            *(plain.data_ptr(), plain.device, plain.dtype, plain.shape, plain.stride()),
            *(plain.is_conj(), plain.is_neg()),
        )
        if key not in self._known or not plain.numel():
            self._known[key] = (
                plain,
                self._taken(plain),
            )  # the first holds the memory, so that the key stays its own
        return self._known[key][1]

    def _taken(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor.to("cpu")
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if (
            self._copy or not whole or tensor.is_conj() or tensor.is_neg()
        ):  # a view would be kept with all of its base
            return tensor.resolve_conj().resolve_neg().clone()
        return tensor


class _Filler:
    """Leaves and saved values → the leaves to continue with."""

    def __init__(self, leaves: list[Any], saved: list[Any], of_module: bool) -> None:
        self._of_module = of_module
        self.pairs = list(zip(leaves, saved, strict=True))
        self._same: dict[int, set[int]] = {}
        for leaf, value in self.pairs:
            self._same.setdefault(id(leaf), set()).add(id(value))

    def leaf(self, where: str, leaf: Any, saved: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._tensor(leaf, saved)
        state = unpack_value(saved)
        generator = _generator_kind(leaf)
        if generator is None and not _has_state(leaf):
            return state
        try:
            if generator is None:
                leaf.load_state_dict(state)
            else:
                _GENERATORS[generator].set(leaf, state)
        except Exception as error:
            raise ValueError(f"{where}, a {type(leaf).__name__}, refuses the saved state: {error}") from error
        return leaf

    def _tensor(self, leaf: Tensor, saved: Tensor) -> Tensor:
        # Two places that had one tensor when they were saved, or have none in common, can be written in place.
        is_own = self._of_module or (leaf.requires_grad and leaf.is_leaf)
        if is_own and len(self._same[id(leaf)]) == 1:
            with torch.no_grad():
                return leaf.copy_(saved)
        return saved.to(leaf.device, leaf.dtype, copy=True).requires_grad_(leaf.requires_grad)


def _is_of_module(entry: Any) -> bool:
    """Whether it is a ``state_dict()`` of a module: its tensors are the module's own, detached."""
    return isinstance(entry, OrderedDict) and hasattr(entry, "_metadata")


def _take_apart(name: str, entry: Any) -> tuple[list[str], list[Any], PyTreeSpec | None]:
    """The paths of an entry's leaves, the leaves, and the structure; ``None`` if it is one leaf as it is."""
    if _is_plain(entry):
        return [""], [entry], None
    accessors, leaves, spec = optree.tree_flatten_with_accessor(entry, _has_state, none_is_leaf=True)
    paths = [accessor.codify("") for accessor in accessors]
    for path, leaf in zip(paths, leaves, strict=True):
        if _kind(leaf) == "":
            raise TypeError(
                f"`{name}`{path} has no state: it must have `state_dict` and `load_state_dict`, or be a random "
                f"generator, a tensor or a plain value, got {type(leaf).__name__} {leaf!r:.80}"
            )
    return paths, leaves, spec


def _is_plain(value: Any) -> bool:
    """Whether a value has no tensors and no objects in it."""
    kind = type(value)
    if kind in _SEQUENCES:
        return all(map(_is_plain, value))
    if kind in _DICTS:
        return all(map(_is_plain, value.values()))
    return kind in _ATOMS or isinstance(value, np.generic | np.ndarray)


def _is_whole(saved: Mapping[str, tuple[str, Any]]) -> bool:
    return saved.keys() == {""} and saved[""][0] == "plain"


def _has_state(value: Any) -> bool:
    return isinstance(value, _Stateful) and not isinstance(value, type)


def _generator_kind(value: Any) -> type | None:
    return next((kind for kind in _GENERATORS if isinstance(value, kind)), None)


def _kind(leaf: Any) -> str:
    """The kind as which a leaf is saved; ``""`` if it has no state."""
    if isinstance(leaf, Tensor):
        return "tensor"
    if _has_state(leaf):
        return "state_dict"
    generator = _generator_kind(leaf)
    if generator is not None:
        return f"{generator.__module__.partition('.')[0]} {generator.__name__}"
    return "plain" if _is_plain(leaf) else ""


def _state_of(leaf: Any) -> Leaf:
    generator = _generator_kind(leaf)
    if not isinstance(leaf, Tensor):
        if _has_state(leaf):
            return Leaf(_kind(leaf), leaf.state_dict())
        if generator is not None:
            return Leaf(_kind(leaf), _GENERATORS[generator].get(leaf))
    return Leaf(_kind(leaf), leaf)


def _check_leaf(where: str, leaf: Any, saved: Leaf) -> None:
    if _kind(leaf) != saved.kind:
        raise TypeError(
            f"{where} must be of the kind that was saved, {saved.kind}, got {type(leaf).__name__}"
        )
    if isinstance(leaf, Tensor) and leaf.shape != saved.value.shape:
        raise ValueError(
            f"{where} must have the shape that was saved, {tuple(saved.value.shape)}, got {tuple(leaf.shape)}"
        )


def _check_names(
    rule: str, own: Mapping[str, Any] | list[str], saved: Mapping[str, Any], if_missing: str = ""
) -> None:
    missing, additional = sorted(saved.keys() - set(own)), sorted(set(own) - saved.keys())
    if missing or additional:
        listed = [
            f"{what} {', '.join(f'`{_bare(name)}`' for name in names)}"
            for what, names in (("missing", missing), ("additional", additional))
            if names
        ]
        remedy = if_missing if missing and not additional else ""
        if missing and additional == [""]:
            remedy = (
                "; what was saved is a dict of these, such as a `state_dict()`: give one, or save the object"
            )
        raise ValueError(f"{rule}: {', '.join(listed)}{remedy}")


_KEY = re.compile(r"\['([^']*)'\]")


def _bare(path: str) -> str:
    """``['weight']``, the path of a leaf in an entry, as ``weight``; nothing is the entry itself."""
    only = _KEY.fullmatch(path)
    return only[1] if only else path or "the object itself"


def _from_numpy(array: np.ndarray[Any, Any], where: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except TypeError as error:
        raise TypeError(f"{where} must be an array of numbers, got one of {array.dtype}") from error
