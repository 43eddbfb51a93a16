"""A value, perhaps a partitioner → a handle that calls take in the value's place; the value stays on the workers.

Of what requires grad, the handle is a reference, and the value travels with each call.
"""

from __future__ import annotations

from typing import Any

from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.group.resident import Resident, Shards, keep_here
from torchopt_dist.distributed.messages.references import Reference, requires_grad
from torchopt_dist.distributed.partition import PartitionFunction, TensorDimensionPartitioner

__all__ = ["put"]


def put(value: Any, partitioner: PartitionFunction | None = None, *, check: bool = False) -> Any:
    """Keep a constant on the workers: it is sent once to each worker that uses it, instead of with every call.

    Pass the handle in the value's place, as an argument of a call, alone or inside a tree; the function gets the value.
    A worker fetches the value when it first gets the handle, and frees it when the handle is closed or
    garbage-collected. In the caller's own share the function gets the caller's own value.

    A module, a tensor, or a tree of these in which something requires grad is no constant. ``put`` then returns a
    :class:`Reference`, for programs that send a module as an ``RRef``: the function gets the reference, and
    ``reference.to_here()`` is the module, connected to the call.

    Args:
        value: a tensor, a module, a tree or any other object that can be sent.
        partitioner: what ``dim_partitioner`` returns, ``batch_partitioner`` or ``tasks``: ``value`` is split, each part
            has a handle of its own, and calls with the same partitioner use the parts. A call splits its other
            arguments as usual.
        check: compare all bytes of the value at each call with those at ``put``, so that a change in place is an error
            also where torch does not count changes, as in numpy arrays.

    Returns:
        A :class:`Resident`; with a partitioner :class:`Shards`; for what requires grad a :class:`Reference`. The static
        type is ``Any``, since it takes the place of ``value``.

    Raises:
        ValueError: something requires grad in a value that is split, or in an object other than modules, tensors and
            trees; or the value cannot be split, or the partitioner has a ``balance`` and is not exclusive.
        TypeError: ``partitioner`` is anything else, such as a subclass of :class:`TensorDimensionPartitioner`.
        SerializationError: ``value`` cannot be sent.
        NotInitializedError: there is no RPC group.
        ResidentError: in a call: the value has been changed in place, or the handle is closed.

    Example::

        images, labels = todist.put((images, labels), todist.batch_partitioner), ...
        for step in range(1000):
            loss_fn(model, images).backward()  # only the model travels
    """
    if not isinstance(check, bool):
        raise TypeError(f"check must be True or False, got {check!r}")
    if partitioner is None:
        if requires_grad(value):
            current_group()
            return Reference(value)
        return keep_here(value, check=check)
    if type(partitioner) is not TensorDimensionPartitioner:  # a subclass may take other indices than the call
        raise TypeError(
            "put needs what `dim_partitioner` returns, `batch_partitioner`, `tasks` or None as its partitioner, since "
            f"calls find parts by their first and last index, got {type(partitioner).__name__} {partitioner!r:.80}: "
            "`put` each part by itself, and let a partitioner of yours give the workers these handles"
        )
    if partitioner.balance is not None and not partitioner.exclusive:
        raise ValueError(
            "put keeps parts whose boundaries stay, and a balance moves them: give put and the calls a partitioner "
            "with exclusive=True, or leave balance out"
        )
    parts: dict[tuple[int, int], Resident] = {}
    start = 0
    for part in partitioner(value):
        parts[start, start + part.size] = keep_here(part[1][0], check=check)
        start += part.size
    return Shards(parts, start, partitioner.dim, partitioner.exclusive and not partitioner.keepdim)
