"""A tree of values ⇄ a tree of futures or of remote references."""

from __future__ import annotations

from concurrent.futures import Future as ThreadFuture
from typing import Any

import optree
from torch.distributed import rpc
from torch.futures import Future

from torchopt_dist.core.types import PyTree, RRef, TensorTree
from torchopt_dist.errors import NotInitializedError

__all__ = ["tree_as_rref", "tree_to_here", "tree_wait"]


_TORCHS: Any = Future.__bases__[:1]
"""torch's own class of futures, which those made by ``.then()`` are of, and ``torch.futures.Future`` as well."""


def tree_wait(future_tree: PyTree[Any]) -> Any:
    """Wait for all futures of a tree.

    Args:
        future_tree: a tree of futures, torch's or those of ``concurrent.futures``.

    Returns:
        The tree of their values.

    Raises:
        TypeError: a leaf is not a future.
        Exception: that of the first future that has failed, raised when all are done.

    Example:
        >>> import torch
        >>> future = torch.futures.Future()
        >>> future.set_result(3)
        >>> tree_wait({"a": future})
        {'a': 3}
    """
    futures, spec = optree.tree_flatten(future_tree)
    for future in futures:
        if not isinstance(future, (*_TORCHS, ThreadFuture)):
            raise TypeError(f"`future_tree` must be a tree of futures, got {type(future).__name__}")
    values, failures = [], []
    for future in futures:
        try:
            values.append(future.wait() if isinstance(future, _TORCHS) else future.result())
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return optree.tree_unflatten(spec, values)


def tree_as_rref(tree: TensorTree) -> Any:
    """Make a remote reference to each leaf, so that other workers can fetch it.

    Args:
        tree: a tree with any leaves.

    Returns:
        The tree of ``torch.distributed.rpc.RRef``; this process owns the values.

    Raises:
        NotInitializedError: there is no RPC group, or its transport is not torch's RPC.
    """
    leaves, spec = optree.tree_flatten(tree)
    if not rpc.is_available():
        raise NotInitializedError("`tree_as_rref` needs RPC, which this build of torch does not have")
    try:
        rpc.get_worker_info()  # a reference can be made when a group has ended, but not fetched
        references: list[Any] = [RRef(leaf) for leaf in leaves]
    except RuntimeError as error:
        raise NotInitializedError(
            "`tree_as_rref` needs an RPC group: call it inside a function decorated with `auto_init_rpc`, whose "
            "transport is 'rpc'"
        ) from error
    return optree.tree_unflatten(spec, references)


def tree_to_here(rref_tree: PyTree[Any], timeout: float = -1.0) -> Any:
    """Fetch the values of a tree of remote references.

    Args:
        rref_tree: a tree of ``torch.distributed.rpc.RRef``.
        timeout: seconds for each value; 0 means no limit, and a negative number RPC's own time-out.

    Returns:
        The tree of values.

    Raises:
        TypeError: a leaf is not a remote reference.
    """
    references, spec = optree.tree_flatten(rref_tree)
    for reference in references:
        if not hasattr(reference, "to_here"):  # a reference from another worker is of RRef's base class
            raise TypeError(f"`rref_tree` must be a tree of RRefs, got {type(reference).__name__}")
    return optree.tree_unflatten(spec, [reference.to_here(timeout) for reference in references])
