"""A module, an optimizer or a tree of tensors → a snapshot, a copy, or itself detached from its history.

``extract_state_dict`` and ``recover_state_dict`` take a snapshot and go back to it, ``module_clone`` makes a second
module, ``stop_gradient`` truncates the graph, so that memory stays flat. In all of them tied
weights stay tied, frozen parameters stay frozen, non-persistent buffers are included, and a shared sub-module counts
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast, overload, runtime_checkable

import optree
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchopt_dist import pytree
from torchopt_dist.core.types import (
    CopyMode,
    Device,
    ModuleTensorContainers,
    OptState,
    TensorContainer,
    TensorTree,
)
from torchopt_dist.core.vmap import detach_, detached, has_history
from torchopt_dist.nn import _tensor_dicts
from torchopt_dist.nn._module_copy import copied
from torchopt_dist.nn._shared_clones import note_clone
from torchopt_dist.nn._tensor_copier import TensorCopier
from torchopt_dist.torch_private import let_graphs_drop

__all__ = [
    "ModuleState",
    "StateHolder",
    "extract_state_dict",
    "module_clone",
    "recover_state_dict",
    "stop_gradient",
]

T = TypeVar("T")


class ModuleState(NamedTuple):
    """A snapshot of a module's tensors."""

    params: ModuleTensorContainers
    """Parameters by name, one dict a sub-module in the order of ``module.modules()``."""
    buffers: ModuleTensorContainers
    """Buffers likewise; ``()`` if they were left out."""
    visual_contents: dict[str, Tensor] | None = None
    """Prefixed full name → parameter, for pictures of the graph."""
    detach_buffers: bool = False
    """The buffers are copies, and a module that recovers them gets copies of its own."""


@runtime_checkable
class StateHolder(Protocol):
    """An optimizer whose state is part of the graph, such as ``MetaOptimizer`` and ``FuncOptimizer``."""

    def get_states(self) -> tuple[OptState, ...]:
        """The states, one for each parameter group."""

    def set_states(self, states: Sequence[OptState]) -> None:
        """Replace the states by these."""

    def clone_with(self, clone: Callable[[Any], Any]) -> Any:
        """Make a second optimizer, with ``clone`` applied to the modules and to the states."""


@overload
def extract_state_dict(
    target: nn.Module,
    *,
    by: CopyMode = ...,
    device: Device | None = ...,
    with_buffers: bool = ...,
    detach_buffers: bool = ...,
    enable_visual: bool = ...,
    visual_prefix: str = ...,
) -> ModuleState: ...
@overload
def extract_state_dict(
    target: StateHolder,
    *,
    by: CopyMode = ...,
    device: Device | None = ...,
    with_buffers: bool = ...,
    detach_buffers: bool = ...,
    enable_visual: bool = ...,
    visual_prefix: str = ...,
) -> tuple[OptState, ...]: ...
def extract_state_dict(
    target: nn.Module | StateHolder,
    *,
    by: CopyMode = "reference",
    device: Device | None = None,
    with_buffers: bool = True,
    detach_buffers: bool = False,
    enable_visual: bool = False,
    visual_prefix: str = "",
) -> ModuleState | tuple[OptState, ...]:
    """Take a snapshot.

    Args:
        target: a module, or a ``MetaOptimizer`` or ``FuncOptimizer``, whose states are then taken.
        by: ``'reference'`` (``'ref'``), the same tensors; ``'copy'`` (``'clone'``), clones through which gradients flow
            back to the module; ``'deepcopy'``, leaves with their own memory.
        device: where to move the tensors; where they are, if not given.
        with_buffers: take buffers too.
        detach_buffers: copy the buffers to their own memory, whatever ``by`` is, so that a layer that writes its
            running statistics does not write into the snapshot.
        enable_visual: keep parameters by name, for a picture of the graph.
        visual_prefix: a prefix of these names.

    Returns:
        A :class:`ModuleState`, or a tuple with one optimizer state for each parameter group.

    Raises:
        TypeError: ``target`` is neither a module nor such an optimizer.
        ValueError: ``by`` is none of these.
    """
    take = TensorCopier(by, device)
    if isinstance(target, nn.Module):
        take_buffer = TensorCopier("deepcopy", device) if detach_buffers else take
        visual = None
        if enable_visual:
            named = target.named_parameters(remove_duplicate=False)
            visual = {f"{visual_prefix}{name}": take(tensor) for name, tensor in named}
        return ModuleState(
            params=_taken(_tensor_dicts.parameter_containers(target.modules()), take),
            buffers=_taken(_tensor_dicts.buffer_containers(target.modules()), take_buffer)
            if with_buffers
            else (),
            visual_contents=visual,
            detach_buffers=detach_buffers,
        )
    if isinstance(target, StateHolder):
        return tuple(pytree.map_tensors(take, state) for state in target.get_states())
    raise TypeError(f"`target` must be a module or a MetaOptimizer, got {type(target).__name__}")


def recover_state_dict(target: nn.Module | StateHolder, state: ModuleState | Sequence[OptState]) -> None:
    """Restore a snapshot; the same one can be restored again.

    Args:
        target: the module or optimizer that the snapshot was taken of, or one of the same structure; changed in
            place. The target then holds the snapshot's tensors themselves, plain tensors with a history among them.
        state: from :func:`extract_state_dict`.

    Raises:
        TypeError: ``state`` is not a snapshot, or is one of another kind of object than ``target``.
        ValueError: ``state`` is of a module of another structure, with parameters of other shapes, or of another
            optimizer.
    """
    if isinstance(target, nn.Module):
        if not isinstance(state, ModuleState):
            raise TypeError(f"`state` must be a ModuleState to recover a module, got {type(state).__name__}")
        params, buffers = (
            _tensor_dicts.parameter_containers(target.modules()),
            _tensor_dicts.buffer_containers(target.modules()),
        )
        _check_names(params, state.params, "params")
        _check_shapes(params, state.params)
        if state.buffers:
            _check_names(buffers, state.buffers, "buffers")
        _put_back(params, state.params)
        if state.buffers:
            own = TensorCopier("deepcopy")
            _put_back(buffers, _taken(state.buffers, own) if state.detach_buffers else state.buffers)
    elif isinstance(target, StateHolder):
        if isinstance(state, ModuleState) or not isinstance(state, Sequence):
            raise TypeError(f"`state` must be a tuple of optimizer states, got {type(state).__name__}")
        target.set_states(state)
    else:
        raise TypeError(f"`target` must be a module or a MetaOptimizer, got {type(target).__name__}")


def module_clone(
    target: T, *, by: CopyMode = "reference", detach_buffers: bool = False, device: Device | None = None
) -> T:
    """Make a second module of the same structure; its hooks, flags and attributes are copied.

    Tensors in attributes, in lists, dicts and objects there too, are copied as parameters are. By reference the clone
    shares the module's parameters until a ``MetaOptimizer`` moves it: a step in place, as those of ``torch.optim`` are,
    would move the module, and a ``RuntimeWarning`` says so.

    Args:
        target: a module; a ``MetaOptimizer``, whose modules and states are then cloned; or a tree of tensors.
        by: how its tensors are copied, as in :func:`extract_state_dict`.
        detach_buffers: the clone gets buffers with their own memory, whatever ``by`` is.
        device: where to move the tensors; where they are, if not given.

    Returns:
        The clone, of the type of ``target``. Setting its parameters leaves the original's in place.

    Raises:
        TypeError: ``target`` is none of these.
        ValueError: ``by`` is none of the modes.
    """
    take = TensorCopier(by, device)
    if isinstance(target, nn.Module):
        clone = copied(target, take, TensorCopier("deepcopy", device) if detach_buffers else take)
        let_graphs_drop([*clone.modules()], [*target.modules()])
        if by in ("reference", "ref") and device is None:
            note_clone(clone, target)
        return cast("T", clone)
    if isinstance(target, StateHolder):
        modes: dict[str, Any] = {"by": by, "detach_buffers": detach_buffers, "device": device}
        return cast("T", target.clone_with(lambda part: module_clone(part, **modes)))
    _check_tree(target)
    return cast("T", pytree.map_tensors(take, target))


def stop_gradient(target: ModuleState | nn.Module | StateHolder | TensorTree) -> None:
    """Detach a target from its history: values and ``requires_grad`` stay, gradients flow no further back.

    A module, an optimizer and a snapshot get new tensors on the same memory, so that graphs and snapshots
    that hold the old ones keep them. The tensors of a plain tree are detached in place
    (``Tensor.detach_``).

    Args:
        target: a module, a ``MetaOptimizer`` or ``FuncOptimizer`` (its states), a :class:`ModuleState`, or
            a tree of tensors, in which there may be some of these, too.

    Raises:
        TypeError: ``target`` is none of these.
    """
    if isinstance(target, nn.Module):
        parts = list(target.modules())
        held = tuple(_tensor_dicts.tensor_containers(parts))
        _tensor_dicts.replace(parts, _detachments(held))
    elif isinstance(target, ModuleState):
        held = (*target.params, *target.buffers)
        new = _detachments(held)
        for container in held:
            container.update({name: new.get(id(t), t) for name, t in container.items()})
        if target.visual_contents is not None:
            seen = target.visual_contents
            seen.update({name: new.get(id(t), t) for name, t in seen.items()})
    elif isinstance(target, StateHolder):
        target.set_states([pytree.map_tensors(detached, state) for state in target.get_states()])
    else:
        _check_tree(target)
        for leaf in optree.tree_leaves(cast("Any", target), is_leaf=_is_whole, none_is_leaf=True):
            if isinstance(leaf, Tensor):
                _detach_in_place(leaf)
            elif _is_whole(leaf):
                stop_gradient(leaf)


def _taken(
    held: Sequence[TensorContainer], take: Callable[[Tensor], Tensor]
) -> tuple[dict[str, Tensor | None], ...]:
    return tuple({name: None if t is None else take(t) for name, t in part.items()} for part in held)


def _check_names(live: list[TensorContainer], saved: ModuleTensorContainers, what: str) -> None:
    if [part.keys() for part in live] != [part.keys() for part in saved]:
        raise ValueError(
            f"`state.{what}` must have the names that the module has, "
            f"{[list(part) for part in live]}, got {[list(part) for part in saved]}"
        )


def _check_shapes(live: list[TensorContainer], saved: ModuleTensorContainers) -> None:
    """Raise unless the parameters have the module's shapes; buffers need not, since a buffer may have grown since."""
    for part, values in zip(live, saved, strict=True):
        for name, tensor in part.items():
            want, got = _shape(tensor), _shape(values[name])
            if want != got and "lazy" not in (want, got):
                raise ValueError(
                    f"`state.params` must have the shapes that the module has: {name!r} must have {want}, got {got}"
                )


def _shape(tensor: Tensor | None) -> tuple[int, ...] | str | None:
    if tensor is None:
        return None
    return "lazy" if is_lazy(tensor) else tuple(tensor.shape)


def _put_back(live: list[TensorContainer], saved: ModuleTensorContainers) -> None:
    for part, values in zip(live, saved, strict=True):
        part.update(values)


def _detachments(held: Sequence[TensorContainer]) -> dict[int, Tensor]:
    tensors = [t for part in held for t in part.values() if t is not None and has_history(t)]
    return {id(t): detached(t) for t in {id(t): t for t in tensors}.values()}


def _detach_in_place(tensor: Tensor) -> None:
    if has_history(tensor):
        detach_(tensor)


def _is_whole(leaf: Any) -> bool:
    return isinstance(leaf, (nn.Module, ModuleState, StateHolder))


def _check_tree(target: Any) -> None:
    if not isinstance(target, Tensor) and pytree.is_leaf(target):
        raise TypeError(
            "`target` must be a module, a ModuleState, a MetaOptimizer, a FuncOptimizer or a tree of "
            f"tensors, got {type(target).__name__}"
        )
