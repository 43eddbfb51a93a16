"""A module, other tensors by name → the module with these tensors in it, for a while or until they are swapped back.

To only call a module with other tensors, use ``torch.func.functional_call``. Here a whole block of code, or an
objective that is a method, uses them.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from torchopt_dist.core.types import TensorContainer
from torchopt_dist.nn import _tensor_dicts

__all__ = ["reparametrize", "swap_state"]


@contextlib.contextmanager
def reparametrize(
    module: nn.Module,
    named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    allow_missing: bool = False,
) -> Iterator[nn.Module]:
    """Put other tensors into a module while a block runs, and put the old ones back afterwards, also after an error.

    Other threads that reparametrize the same module wait for the end of the block.

    Args:
        module: the module; tied weights are replaced in all places.
        named_tensors: full names of parameters or buffers → tensors, which may have a history.
        allow_missing: whether names that the module does not have are ignored.

    Yields:
        The module.

    Raises:
        KeyError: the module has no tensor of a name, and ``allow_missing`` is false.
        TypeError: a value is not a tensor.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> with reparametrize(layer, {"weight": torch.full((1, 1), 3.0)}):
        ...     print(layer(torch.ones(1)).item())
        3.0
    """
    new = dict(named_tensors)
    with lock_of(module):
        old = _by_id(module, new, allow_missing)
        with swapped(_containers(module), {id(tensor): new[name] for name, tensor in old.items()}):
            yield module


def swap_state(
    module: nn.Module,
    named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    allow_missing: bool = False,
) -> dict[str, Tensor]:
    """Put other tensors into a module, and return the old ones; a second call with those swaps back.

    Args:
        module: as in :func:`reparametrize`.
        named_tensors: as in :func:`reparametrize`.
        allow_missing: as in :func:`reparametrize`.

    Returns:
        The tensors that were there, by name.

    Raises:
        KeyError: as in :func:`reparametrize`; the module is then as it was.
        TypeError: as in :func:`reparametrize`; the module is then as it was.
    """
    new = dict(named_tensors)
    with lock_of(module):
        old = _by_id(module, new, allow_missing)
        _put(_containers(module), {id(tensor): new[name] for name, tensor in old.items()})
    return old


_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_guard = threading.Lock()


def lock_of(module: nn.Module) -> threading.RLock:
    """The lock that a thread holds while a module has other tensors."""
    with _guard:
        return _locks.setdefault(module, threading.RLock())


@contextlib.contextmanager
def swapped(containers: list[TensorContainer], new: Mapping[int, Tensor]) -> Iterator[None]:
    """Replace tensors in containers, by ``id``, while a block runs."""
    places = _put(containers, new)
    try:
        yield
    finally:
        for container, name, tensor in places:
            container[name] = tensor


def _put(
    containers: list[TensorContainer], new: Mapping[int, Tensor]
) -> list[tuple[TensorContainer, str, Tensor]]:
    places = [
        (container, name, tensor)
        for container in containers
        for name, tensor in container.items()
        if tensor is not None and id(tensor) in new
    ]
    for container, name, tensor in places:
        container[name] = new[id(tensor)]
    return places


def _containers(module: nn.Module) -> list[TensorContainer]:
    return _tensor_dicts.tensor_containers(list(module.modules()))


def _by_id(module: nn.Module, new: Mapping[str, Tensor], allow_missing: bool) -> dict[str, Tensor]:
    """The module's tensors of these names."""
    for name, tensor in new.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"`named_tensors` must have tensors as values, got {type(tensor).__name__} for {name!r}"
            )
    there = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    missing = sorted(new.keys() - there.keys())
    if missing and not allow_missing:
        raise KeyError(f"the module has no parameter or buffer of the name {', '.join(missing)}")
    return {name: there[name] for name in new if name in there}
