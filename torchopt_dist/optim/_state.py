"""An optimizer's state, a tree ⇄ what is saved of it, and what torch keeps of each parameter and of a group.

The key of a tensor is its path in the state: ``'0/momentum_buffer/0.weight'`` is the parameter ``0.weight`` in the
field ``momentum_buffer`` of the chain's first link. In a name, ``~`` and ``/`` are written ``~0`` and ``~1``, as in a
JSON pointer [RFC 6901], so that no two places have one key. For torch a parameter has a tensor under the name of its
field alone, if no other field has that name.

Converting a module, by ``module.double()`` for example, does not convert the state of its optimizer; that gets the
dtypes of a new state before the next step.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor, nn

from torchopt_dist import pytree
from torchopt_dist.core.types import OptionalTensor, OptState
from torchopt_dist.transform.base import GradientTransformation

__all__ = [
    "COUNT",
    "SHARED",
    "Dtypes",
    "Layout",
    "begin",
    "counts",
    "dtypes_of",
    "fitted",
    "flatten_state",
    "flatten_with_keys",
    "gather",
    "have_same_dtypes",
    "is_of_an_optimizer",
    "kinds_of",
    "layout_of",
    "restore_state",
    "scatter",
    "trained_states",
]

COUNT = "step"
SHARED = "shared_state"
"""Where a group has what belongs to none of its parameters."""
Dtypes: TypeAlias = tuple[torch.dtype | None, ...]


def flatten_with_keys(
    state: OptState, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, ...]], list[Any], pytree.PyTreeSpec]:
    """The path to each leaf of a state, the leaves, and the structure."""
    accessors, leaves, spec = optree.tree_flatten_with_accessor(state, is_leaf, none_is_leaf=True)
    paths = [tuple(str(getattr(entry, "field", entry.entry)) for entry in path) for path in accessors]
    return paths, leaves, spec


def flatten_state(state: OptState) -> dict[str, Any]:
    """Turn a state into a flat dict, which ``torch.load(weights_only=True)`` reads; the tensors are the same."""
    paths, leaves, _ = flatten_with_keys(state)
    return {_key_of(path): leaf for path, leaf in zip(paths, leaves, strict=True)}


def restore_state(like: OptState, saved: dict[str, Any]) -> OptState:
    """Turn a flat dict into a state.

    Args:
        like: a state of the optimizer that continues.
        saved: from :func:`flatten_state`; its tensors are taken as they are, moved to the device and the
            dtype of their places and requiring grad where these do.

    Raises:
        ValueError: the keys or a shape differ: it is the state of another optimizer.
    """
    paths, leaves, spec = flatten_with_keys(like)
    keys = [_key_of(path) for path in paths]
    if saved.keys() != set(keys):
        missing, extra = sorted(set(keys) - saved.keys()), sorted(saved.keys() - set(keys))
        raise ValueError(
            f"`state_dict` must be of an optimizer like this one; it lacks {missing}, has too much {extra}"
        )
    return optree.tree_unflatten(
        spec, [_placed(key, leaf, saved[key]) for key, leaf in zip(keys, leaves, strict=True)]
    )


def _key_of(path: tuple[str, ...]) -> str:
    return "/".join(name.replace("~", "~0").replace("/", "~1") for name in path)


def _placed(key: str, like: Any, saved: Any) -> Any:
    if not isinstance(like, Tensor):
        return saved
    if not isinstance(saved, Tensor) or saved.shape != like.shape:
        got = tuple(saved.shape) if isinstance(saved, Tensor) else type(saved).__name__
        raise ValueError(f"`state_dict` must have shape {tuple(like.shape)} at {key!r}, got {got}")
    placed = saved.to(device=like.device, dtype=like.dtype)
    if placed.grad_fn is None and placed.requires_grad != like.requires_grad:
        placed = placed.detach().requires_grad_(like.requires_grad)
    return placed


def dtypes_of(params: Iterable[OptionalTensor]) -> Dtypes:
    """The dtypes of parameters, in their order."""
    return tuple([None if p is None else p.dtype for p in params])


def have_same_dtypes(state: OptState | None, other: OptState | None) -> bool:
    """Whether two states of one structure have the same dtypes; not if one is missing."""
    if state is None or other is None:
        return False
    return dtypes_of(pytree.flatten(state)[0]) == dtypes_of(pytree.flatten(other)[0])


def fitted(state: OptState, begin: Callable[[], OptState], before: Dtypes | None, now: Dtypes) -> OptState:
    """The state itself, or, where the parameters' dtypes have changed, one of converted tensors, connected to it.

    Args:
        state: the state.
        begin: makes a new state of the parameters, of which only the dtypes are used.
        before: the parameters' dtypes for which the state was made; ``None`` if they are unknown.
        now: their dtypes now.

    Raises:
        ValueError: a real parameter has become a complex one, or the other way round.
    """
    if before == now:
        return state
    likes = dict(zip(*flatten_with_keys(begin())[:2], strict=True))
    paths, leaves, spec = flatten_with_keys(state)
    pairs = zip(paths, leaves, strict=True)
    return optree.tree_unflatten(spec, [_converted(x, likes.get(path), _key_of(path)) for path, x in pairs])


def _converted(leaf: Any, like: object, where: str) -> Any:
    if not isinstance(leaf, Tensor) or not isinstance(like, Tensor) or leaf.dtype == like.dtype:
        return leaf
    if leaf.is_complex() != like.is_complex():
        raise ValueError(
            f"`params` must stay real or complex: {where} has {leaf.dtype}, and the parameter needs {like.dtype} now; "
            "make a new optimizer"
        )
    return leaf.to(like.dtype)


class Layout(NamedTuple):
    """The places of the leaves of a group's state; a list of a tensor for each parameter is a leaf."""

    spec: pytree.PyTreeSpec
    keys: list[str | None]
    """A leaf's key in ``state[p]``; ``None`` for a leaf of the whole group, which is in ``group['shared_state']``."""
    paths: list[str]
    """A leaf's place in the state, which is its key there."""
    holders: dict[str, list[bool]]
    """For each key whether each parameter, in the group's order, has it; Adafactor's depend on the dimensions."""

    def shared(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Those of the state's leaves that are the whole group's, by their keys."""
        return {path: x for key, path, x in zip(self.keys, self.paths, leaves, strict=True) if key is None}


def layout_of(state: OptState) -> tuple[Layout, list[Any]]:
    """Of a group's first state the places of its leaves, and the leaves."""
    paths, leaves, spec = flatten_with_keys(state, _is_list)
    own = [path if _is_list(leaf) else None for path, leaf in zip(paths, leaves, strict=True)]
    names = [path[-1] for path in own if path]  # a count of the whole group takes no name away
    keys = [None if path is None else _name(path, names) for path in own]
    holders = {key: [x is not None for x in leaf] for key, leaf in zip(keys, leaves, strict=True) if key}
    return Layout(spec, keys, [_key_of(path) or "state" for path in paths], holders), leaves


def _name(path: tuple[str, ...], names: list[str]) -> str:
    return path[-1] if path and names.count(path[-1]) == 1 else _key_of(path) or "state"


def _is_list(part: Any) -> bool:
    return type(part) is list


def begin(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], impl: GradientTransformation, *, counts: bool
) -> Layout:
    """Make what parameters and the group lack of their state as at the first step; fit the rest to their dtypes.

    Args:
        optimizer: the optimizer with the parameters' states.
        group: one of its groups.
        impl: the group's transformation, on which the layout depends.
        counts: whether the optimizer counts the steps of each parameter beside its transformation.

    Raises:
        ValueError: a parameter has only a part of its state, or has become a complex one or a real one.
    """
    layout, first = layout_of(impl.init(group["params"]))
    for place, p in enumerate(group["params"]) if layout.holders else ():
        held = optimizer.state[p]
        if COUNT in layout.holders:
            _check_whole(
                type(optimizer).__name__, held, {k for k, own in layout.holders.items() if own[place]}
            )
        elif counts:
            held.setdefault(COUNT, torch.zeros((), dtype=torch.float32, device="cpu"))
        else:  # a count of other options stands still from now on, unlike the rest
            held.pop(COUNT, None)
        for key, leaf in zip(layout.keys, first, strict=True):
            if key is not None and (like := leaf[place]) is not None:
                held[key] = _converted(
                    held.get(key, like), like, f"{key!r} of parameter {place} of its group"
                )
    if not (shared := layout.shared(first)).keys() <= group.get(SHARED, {}).keys():
        group[SHARED] = {**shared, **group.get(SHARED, {})}  # a fused step overwrites them
    return layout


def _check_whole(name: str, held: dict[str, Any], own: set[str]) -> None:
    found = sorted(key for key, value in held.items() if key in own or isinstance(value, Tensor))
    lacking = sorted(own - set(held) - {COUNT})
    if found and lacking:
        raise ValueError(
            f"`state` of a parameter must have all that this {name} keeps, or nothing: it lacks {lacking}, got {found}"
        )
    if found:  # torch's SGD does not count
        held.setdefault(COUNT, torch.ones((), dtype=torch.float32, device="cpu"))


def gather(optimizer: torch.optim.Optimizer, group: dict[str, Any], layout: Layout) -> OptState:
    """Assemble a group's state.

    Raises:
        KeyError: a parameter or the group lacks a part of it, which :func:`begin` makes.
    """
    states = [optimizer.state[p] for p in group["params"]] if layout.holders else []
    shared = group.get(SHARED, {})
    columns = {
        key: [state[key] if holds else None for state, holds in zip(states, own, strict=True)]
        for key, own in layout.holders.items()
    }
    pairs = zip(layout.keys, layout.paths, strict=True)
    leaves = [shared[path] if key is None else columns[key] for key, path in pairs]
    return pytree.unflatten(layout.spec, leaves)


def scatter(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    layout: Layout,
    state: OptState,
    *,
    overwrite: bool,
) -> None:
    """Distribute a state to the parameters and the group.

    Args:
        optimizer: the optimizer with the parameters' states.
        group: one of its groups.
        layout: the layout of the group's state.
        state: the transformation's state.
        overwrite: whether the parameters' tensors are written to, as other processes see them, or replaced.
    """
    _, leaves, _ = flatten_with_keys(state, _is_list)
    for key, leaf in zip(layout.keys, leaves, strict=True):
        for p, value in zip(group["params"], leaf, strict=True) if key is not None else ():
            if value is None:
                continue
            if overwrite and value is not optimizer.state[p][key]:
                optimizer.state[p][key].copy_(value)
            else:
                optimizer.state[p][key] = value
    if shared := layout.shared(leaves):
        group[SHARED] = shared


def kinds_of(options: Iterable[Any]) -> list[tuple[type, str]]:
    """The types of options and whether they are on, on which a layout may depend.

    It is a text, as ``torch.compile`` cannot keep a symbolic bool in a list.
    """
    return [(type(x), "on" if not isinstance(x, numbers.Real) or x != 0 else "off") for x in options]


def counts(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The counts of a saved state as tensors, with their keys; torch before 1.12 saved numbers.

    They are on the CPU, so that reading them waits for no GPU.

    Torch takes only a key that is ``'step'`` for one; it casts others to the parameter's dtype, and in half
    precision a count then stands still at 256 or 2048.
    """
    for key, value in state.items():
        if str(key).rpartition("/")[2] != COUNT:
            continue
        if isinstance(value, Tensor) and not value.is_meta:
            yield key, value.cpu()
        elif isinstance(value, (int, float)) and type(value) is not bool:
            yield key, torch.tensor(float(value), dtype=torch.float32, device="cpu")


def is_of_an_optimizer(state_dict: Mapping[str, Any]) -> bool:
    """Whether it is the ``state_dict`` of a ``torch.optim.Optimizer``, torch's or ours."""
    return "param_groups" in state_dict


def trained_states(
    impls: Sequence[GradientTransformation], modules: Sequence[nn.Module], state_dict: Mapping[str, Any]
) -> list[OptState]:
    """Make the states of transformations from a trained optimizer's.

    Args:
        impls: a transformation for each group.
        modules: the modules whose parameters they move, in the order in which the optimizer was given them.
        state_dict: the optimizer's ``state_dict()``; its options are ignored.

    Raises:
        ValueError: the optimizer had another number of parameters, other shapes, or another kind of state.
    """
    groups: list[dict[str, Tensor]] = [dict(module.named_parameters()) for module in modules]
    saved = state_dict["param_groups"]
    ids = [index for group in saved for index in group["params"]]
    if len(ids) != sum(map(len, groups)):
        raise ValueError(
            f"`state_dict` must be of an optimizer of the modules' {sum(map(len, groups))} parameters, got one of "
            f"{len(ids)}"
        )
    held = iter([state_dict["state"].get(index, {}) for index in ids])
    made = next((float(group["lr_step"]) for group in saved if "lr_step" in group), None)
    return [
        _trained_state(impl.init(params), {name: next(held) for name in params}, made)
        for impl, params in zip(impls, groups, strict=True)
    ]


def _trained_state(like: OptState, held: Mapping[str, Mapping[str, Any]], made: float | None) -> OptState:
    paths, leaves, _ = flatten_with_keys(like)
    if made is None:  # steps made so far; torch says so of each parameter
        made = max((float(one[COUNT]) for one in held.values() if COUNT in one), default=None)
    fields = [path[-2:] for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, Tensor)]
    flat: dict[str, Any] = {}
    for path, first in zip(paths, leaves, strict=True):
        own = held.get(path[-1]) if len(path) > 1 else None
        field = path[-2] if fields.count(path[-2:]) == 1 else _key_of(path[:-1])
        found: Any = first
        if not isinstance(first, Tensor):
            pass
        elif own is None:
            if path[-1] == COUNT and made is not None:
                found = first.new_tensor(made)
        elif own and field in own:
            if own[field] is not None:
                found = first.new_tensor(float(own[field])) if field == COUNT else own[field]
        elif own and field == COUNT:  # torch's SGD does not count
            found = first.new_tensor(1)
        elif own:
            raise ValueError(
                f"`state_dict` must have {field!r} of each parameter, or be of an optimizer like this one; of "
                f"{path[-1]!r} it has {sorted(own)}"
            )
        flat[_key_of(path)] = found
    return restore_state(like, flat)
