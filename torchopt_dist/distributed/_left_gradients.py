"""A call's results and inputs → the inputs in whose ``.grad`` its function has left gradients that nobody gets.

A task works on copies of what the caller passes. A ``backward()`` inside of it writes the ``.grad`` of these copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from torchopt_dist._torch_private import is_used_up
from torchopt_dist.distributed._lost_gradients import tensors_in
from torchopt_dist.distributed._versions import Seen

__all__ = ["description_of_left_gradients"]


def description_of_left_gradients(
    function: Callable[..., Any], tasks: Any, results: list[Any], inputs: Seen
) -> str | None:
    """Describe the tensors of the caller's in whose ``.grad`` the function has left a gradient that nobody gets.

    A gradient is of use if the function has changed its tensor in place, as an optimizer's step does, if it returns
    what has the gradient's shape, or if the caller can still differentiate what it returns.

    Args:
        function: the function that was called.
        tasks: its arguments, ``(args, kwargs)`` for each task.
        results: what it has returned.
        inputs: the tensors that require grad at the caller, as they were before.

    Returns:
        A sentence with what is lost and the remedy; ``None`` if nothing is lost.
    """
    changed = inputs.changed()
    grads = {id(leaf): leaf.grad for index, leaf in enumerate(inputs.tensors) if index not in changed}
    left = {key: grad for key, grad in grads.items() if grad is not None and not grad.requires_grad}
    left = {key: grad for key, grad in left.items() if grad.is_sparse or grad.any()}
    if not left:
        return None
    tree: Any = results
    returned = [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, (Tensor, np.ndarray))]
    for found in returned:
        if isinstance(found, Tensor) and found.grad_fn is not None and not is_used_up(found.grad_fn):
            return None
        if any(_may_be_of(grad, found) for grad in left.values()):
            return None
    if sum(grad.numel() for grad in left.values()) in {
        math.prod(found.shape) for found in returned if found.ndim
    }:
        return None
    names: dict[int, str] = {}
    for args, kwargs in tasks:
        for where, tensor in (*tensors_in("args", args), *tensors_in("kwargs", kwargs)):
            names.setdefault(id(tensor), where)
    lost = [names.get(key, f"a tensor of shape {tuple(grad.shape)}") for key, grad in left.items()]
    listed = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return (
        f"`{name}` calls `backward()` on a worker, where the gradients of what it has received stay: {listed}. The "
        "caller does not get them: return the loss and call `backward()` outside of the function, or return the "
        "gradients"
    )


def _may_be_of(grad: Tensor, returned: Tensor | np.ndarray[Any, Any]) -> bool:
    if grad.shape != tuple(returned.shape):
        return False
    return grad.numel() > 1 or bool(torch.as_tensor(returned).detach().to(grad) == grad)
