"""Transformations of ``torch.func``: which are active, and what their tensors wrap."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch
from torch import Tensor

from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.torch_private.engine import grad_of_loss
from torchopt_dist.torch_private.lookup import find

LossAndOthersFn = Callable[[list[Tensor]], tuple[Tensor, list[Tensor]]]


def entrances_for_tensors() -> list[tuple[ModuleType, str]]:
    """Functions of torch that take a user's tensors, and that modes of ``__torch_function__`` do not see.

    They are given by their module and name, and called with positional arguments: a tuple with the arguments of an
    autograd function, and each tensor that a function is mapped over or differentiated with respect to. Without a name
    a loop whose loss uses a tensor in this way is refused by adjoints that replace the tensor.
    """
    names = [
        ("torch._functorch.utils", "unwrap_dead_wrappers"),
        ("torch._functorch.eager_transforms", "_wrap_for_grad"),
        ("torch._functorch.vmap", "_add_batch_dim"),
    ]
    found = [(sys.modules.get(module), name) for module, name in names]
    return [(module, name) for module, name in found if module is not None and hasattr(module, name)]


def is_functorch_tensor(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a transformation of ``torch.func``, so that it has no values of its own.

    Without the name the answer is always no: an attempt to send such a tensor fails with an error of torch's.
    """
    is_wrapped = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None)
    return False if is_wrapped is None else bool(is_wrapped(tensor))


def transforms_are_only(*kinds: str) -> bool:
    """Whether each active transformation of ``torch.func`` is of these kinds: ``"Grad"``, ``"Vmap"``, ``"Jvp"``.

    Without the names the answer is always no: formulas run where kernels could.
    """
    functorch = getattr(torch._C, "_functorch", None)
    stack, types = (getattr(functorch, name, None) for name in ("get_interpreter_stack", "TransformType"))
    if stack is None or types is None:
        return False
    allowed = [getattr(types, kind, None) for kind in kinds]
    return all(interpreter.key() in allowed for interpreter in stack() or ())


def outside_of_transforms() -> AbstractContextManager[object]:
    """A context in which no transformation of ``torch.func`` is active, so that ``vmap`` lets random numbers be drawn.

    Without the name it changes nothing: a remote call inside ``vmap`` fails with torch's error about random numbers.
    """
    clear = find("_functorch.pyfunctorch.temporarily_clear_interpreter_stack")
    return nullcontext() if clear is None else clear()


def transforms_are_active() -> bool:
    """Whether a transformation of ``torch.func`` is active, such as ``vmap`` or ``grad``.

    Without the name the answer is always no: linear solvers, implicit gradients and optimizers' steps then work outside
    of them only.
    """
    are_active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return False if are_active is None else bool(are_active())


def transform_level() -> int:
    """How many transformations of ``torch.func`` are nested here; without the name 0."""
    current_level = find("_C._functorch.maybe_current_level")
    return 0 if current_level is None else current_level() or 0


def tensor_at_level(tensor: Tensor, level: int) -> Tensor:
    """The tensor at the outer ``level`` that a tensor of an inner transformation wraps.

    Without the names it is the tensor itself: a linear solver then does not notice that a product applies a
    transformation to a tensor that it closes over.
    """
    level_of, unwrapped = find("_C._functorch.maybe_get_level"), find("_C._functorch.get_unwrapped")
    if level_of is None or unwrapped is None:
        return tensor
    while level_of(tensor) > level:
        tensor = unwrapped(tensor)
    return tensor


def vmaps() -> list[tuple[int, int]]:
    """Level and size of each active ``vmap``, the outermost first; only those inside all other transformations.

    Without the names there are none: a ``MetaOptimizer`` inside ``vmap`` then says that it finds no gradient.
    """
    functorch = find("_C._functorch")
    names = ("get_interpreter_stack", "TransformType", "CVmapInterpreterPtr")
    stack, types, as_vmap = (getattr(functorch, name, None) for name in names)
    if stack is None or types is None or as_vmap is None:
        return []
    found: list[tuple[int, int]] = []
    for interpreter in reversed(stack() or ()):
        if interpreter.key() != types.Vmap:
            break
        found.append((interpreter.level(), as_vmap(interpreter).batchSize()))
    return found[::-1]


def vmap_randomness() -> list[str] | None:
    """The argument ``randomness`` of each ``vmap`` of :func:`vmaps`.

    The answer is ``None`` without the name, or without that of :func:`outside_of_transforms`: inner loops inside
    ``vmap`` then record all steps instead of replaying them.
    """
    functorch, clear = (
        find("_C._functorch"),
        find("_functorch.pyfunctorch.temporarily_clear_interpreter_stack"),
    )
    as_vmap = getattr(functorch, "CVmapInterpreterPtr", None)
    found = vmaps()
    if clear is None or as_vmap is None or not hasattr(as_vmap, "randomness"):
        return None
    inside = functorch.get_interpreter_stack()[-len(found) :] if found else ()
    return [as_vmap(interpreter).randomness().name.lower() for interpreter in inside]


def batch_of(tensor: Tensor, level: int) -> tuple[Tensor, int] | None:
    """The values of all samples of the ``vmap`` at ``level``, and which of their dimensions counts the samples.

    ``None`` if the tensor is the same for all samples. It is asked only where :func:`vmaps` has found a ``vmap``.
    """
    functorch = torch._C._functorch
    if not functorch.is_batchedtensor(tensor) or functorch.maybe_get_level(tensor) != level:
        return None
    return functorch.get_unwrapped(tensor), functorch.maybe_get_bdim(tensor)


def batched(values: Tensor, dim: int, level: int) -> Tensor:
    """The tensor that has one entry of ``values`` along ``dim`` for each sample: the inverse of :func:`batch_of`."""
    return torch._C._functorch._add_batch_dim(values, dim, level)


def grads_inside_transforms(
    function: LossAndOthersFn, tensors: Sequence[Tensor]
) -> tuple[list[OptionalTensor], Tensor, list[Tensor]]:
    """As ``torch.func.grad_and_value``, but a gradient is ``None`` where the loss does not depend on a tensor.

    Without the names this takes longer: torch gives zeros in such a place, and a hook of each tensor tells which.

    Args:
        function: tensors → a loss, 0-d, and other tensors.
        tensors: the tensors to differentiate with respect to.

    Returns:
        A gradient a tensor, the loss, the other tensors; all may be differentiated by the transformations around.
    """
    functorch = find("_C._functorch")
    begin, end, wrap, unwrap, allow, allowed = (getattr(functorch, name, None) for name in _NAMES_OF_GRAD)
    if begin is None or end is None or wrap is None or unwrap is None or allow is None or allowed is None:
        return _grads_and_hooks(function, tensors)
    level = begin()
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(_NO_HOOKS), torch.enable_grad():
            leaves = [wrap(tensor, level) for tensor in tensors]
            before = allowed()
            allow(True)
            try:
                for leaf in leaves:
                    leaf.requires_grad_()
            finally:
                allow(before)
            loss, others = function(leaves)
            grads: Sequence[OptionalTensor] = [None] * len(leaves)
            if loss.requires_grad:
                with _without_compiled_autograd():
                    grads = grad_of_loss(loss, leaves, create_graph=True)
        found = [None if grad is None else unwrap(grad, level) for grad in grads]
        return found, unwrap(loss, level), [unwrap(tensor, level) for tensor in others]
    finally:
        end()


_NAMES_OF_GRAD = (
    "_grad_increment_nesting",
    "_grad_decrement_nesting",
    "_wrap_for_grad",
    "_unwrap_for_grad",
    "set_inplace_requires_grad_allowed",
    "get_inplace_requires_grad_allowed",
)
_NO_HOOKS = (
    "torch.func's transforms do not support hooks of saved tensors, such as those of torch.utils.checkpoint"
)


def _without_compiled_autograd() -> AbstractContextManager[object]:
    """As in ``torch.func.grad``, which imports the compiler for it; nothing else can have put it on."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    disabled = getattr(module, "_disable", None)
    return nullcontext() if disabled is None else disabled()


def _grads_and_hooks(
    function: LossAndOthersFn, tensors: Sequence[Tensor]
) -> tuple[list[OptionalTensor], Tensor, list[Tensor]]:
    reached: set[int] = set()

    def watched(leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        for place, leaf in enumerate(leaves):
            leaf.register_hook(lambda _, place=place: reached.add(place))
        return function(leaves)

    found, (loss, others) = torch.func.grad_and_value(watched, has_aux=True)(list(tensors))
    return [grad if place in reached else None for place, grad in enumerate(found)], loss, others
