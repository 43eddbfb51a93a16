"""Lists of tensors, ``fused=`` → whether a kernel, ``torch.optim``'s fused step or the formula runs; or an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchopt_dist import torch_private
from torchopt_dist.ops import library
from torchopt_dist.ops._columns import PLAIN, lie_alike
from torchopt_dist.ops._foreach import Factors

__all__ = ["are_concrete", "check_choice", "obstacle", "torch_fused_step", "transforms_allow", "use_kernel"]

_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def use_kernel(op: str, first: Sequence[Tensor], rest: Sequence[Tensor], fused: bool | None) -> bool:
    """Whether an op's kernel is to be used.

    Args:
        op: name of the op.
        first: tensors with the shapes, dtypes and devices that the op's other tensors must have.
        rest: the op's other tensors, column by column, of as many tensors each.
        fused: None uses the kernel where it can be used (not under ``torch.compile``, which fuses the reference formula
            itself), False never uses it, True raises an error where it cannot be used.

    Raises:
        TypeError: ``fused`` is none of these.
        RuntimeError: ``fused=True`` where the kernel cannot be used; the message says why.
    """
    check_choice(fused)
    if fused is False or (fused is None and (torch.compiler.is_compiling() or not first)):
        return False
    reason = (
        "`torch.compile` compiles the formula itself"
        if torch.compiler.is_compiling()
        else obstacle(op, first, rest)
    )
    if reason is not None and fused:
        raise RuntimeError(f"`fused=True` cannot be used: {reason}")
    return reason is None


def check_choice(fused: bool | None) -> None:
    """Raise ``TypeError`` unless ``fused`` is True, False or None."""
    if fused is not None and not isinstance(fused, bool):
        raise TypeError(f"`fused` must be True, False or None; got {fused!r}")


def torch_fused_step(
    name: str, columns: Sequence[Sequence[Tensor]], fused: bool | None
) -> Callable[..., None] | None:
    """The op of a ``torch.optim`` optimizer's fused step, if it takes these tensors.

    Args:
        name: the optimizer: ``"adam"``, ``"adamw"``, ``"sgd"``, ``"adagrad"``.
        columns: parameters, gradients and the lists of the state, of one length.
        fused: False never uses the op; True and None use it where it can be used.

    Returns:
        The op, or ``None``: then a kernel of this package or a formula is to make the step.

    Raises:
        TypeError: ``fused`` is neither a bool nor None.
    """
    check_choice(fused)
    step = torch_private.fused_step(name)
    if step is None or fused is False or not columns[0] or torch.compiler.is_compiling():
        return None
    tensors = [x for column in columns for x in column]
    if {*map(type, tensors)} - PLAIN or {x.layout for x in tensors} != {torch.strided}:
        return None
    if torch_private.forward_mode_is_active() or torch_private.transforms_are_active():
        return None
    if any(
        map(torch_private.is_zero_tensor, columns[1])
    ):  # torch's op counts gradients among what it overwrites
        return None
    devices = {x.device for x in tensors}
    if len(devices) > 1 or devices.pop().type not in library.DEVICES:
        return None
    dtypes = {x.dtype for x in columns[0]}
    return step if dtypes <= _DTYPES and len(dtypes) == 1 and lie_alike(columns) else None


def obstacle(op: str, tensors: Sequence[Tensor], rest: Sequence[Tensor] = ()) -> str | None:
    """The reason for which an op's kernel cannot be used for these tensors; ``None`` if it can."""
    if not torch.compiler.is_compiling():
        for kind in {*map(type, tensors), *map(type, rest)} - PLAIN:
            return f"the kernel takes plain tensors; got a {kind.__name__}"
        if torch_private.forward_mode_is_active():
            return "forward-mode differentiation is active, and the kernel carries no tangents"
        if torch_private.transforms_are_active() and (op.endswith("_") or not transforms_allow()):
            return "a transformation of `torch.func` is active, and the kernel has no rule for it"
    devices = {tensor.device for tensor in tensors} or {torch.device("cpu")}
    if len(devices) > 1:
        return f"the kernel takes tensors of one device; got {', '.join(sorted(map(str, devices)))}"
    for device in devices:
        reason = library.why_not(op, device)
        if reason is not None:
            return reason
    dtypes = [tensor.dtype for tensor in tensors]
    for dtype in {*dtypes} - _DTYPES:
        return f"the kernel has no {dtype}"
    if [tensor.dtype for tensor in rest] != dtypes * (len(rest) // max(len(dtypes), 1)):
        return "the kernel takes tensors of one dtype, and some that belong together differ"
    for layout in {tensor.layout for tensor in (*tensors, *rest)} - {torch.strided}:
        return f"the kernel takes dense tensors; got layout {layout}"
    return None


def are_concrete(values: Factors, fused: bool | None) -> bool:
    """Whether a kernel can read the numbers made from the step counts; it cannot where ``vmap`` batches these.

    Args:
        values: the numbers, from ``bias_correction.values``.
        fused: as in :func:`use_kernel`.

    Raises:
        RuntimeError: ``fused=True`` where the kernel cannot.
    """
    batched = isinstance(values, list) and any(isinstance(value, Tensor) for value in values)
    if not batched or not torch_private.transforms_are_active():
        return True
    if fused:
        raise RuntimeError("`fused=True` cannot be used: the kernel must read `steps`, which `vmap` batches")
    return False


def transforms_allow() -> bool:
    """Whether no transformation is active but those that a kernel's node has rules for: ``grad``, ``vjp``, ``vmap``."""
    if torch.compiler.is_compiling() or torch_private.forward_mode_is_active():
        return False
    return torch_private.transforms_are_only("Grad", "Vmap")
