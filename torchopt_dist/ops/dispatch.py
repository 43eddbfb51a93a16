"""Lists of tensors, ``fused=`` → whether the kernel runs, or the reference formula; or why it cannot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchopt_dist.ops import library
from torchopt_dist.ops.foreach import Factors

__all__ = ["obstacle", "sees", "transforms_allow", "use_kernel"]

_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def use_kernel(op: str, first: Sequence[Tensor], rest: Sequence[Tensor], fused: bool | None) -> bool:
    """Whether an op's kernel is to be used.

    Args:
        op: name of the op.
        first: the tensors that its others must be like.
        rest: the others, column by column, of as many tensors each.
        fused: None uses the kernel where it can be used (not under ``torch.compile``, which fuses the reference
            formula itself), False never, True demands it.

    Raises:
        TypeError: ``fused`` is none of these.
        RuntimeError: ``fused=True`` where it cannot be used; the message says why.
    """
    if fused is not None and not isinstance(fused, bool):
        raise TypeError(f"`fused` must be True, False or None; got {fused!r}")
    if fused is False or (fused is None and (torch.compiler.is_compiling() or not first)):
        return False
    reason = (
        "`torch.compile` compiles the formula itself"
        if torch.compiler.is_compiling()
        else obstacle(op, first, rest)
    )
    if reason is not None and fused:
        raise RuntimeError(f"`fused=True` cannot be kept: {reason}")
    return reason is None


def obstacle(op: str, tensors: Sequence[Tensor], rest: Sequence[Tensor] = ()) -> str | None:
    """Say what keeps an op's kernel from being used for these tensors, if anything does."""
    if not torch.compiler.is_compiling():
        for kind in {*map(type, tensors), *map(type, rest)} - _PLAIN:
            return f"the kernel takes plain tensors; got a {kind.__name__}"
        if forward_ad._current_level >= 0:
            return "forward-mode differentiation is active, and the kernel carries no tangents"
        if torch._C._are_functorch_transforms_active() and (op.endswith("_") or not transforms_allow()):
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


def sees(values: Factors, fused: bool | None) -> bool:
    """Whether a kernel can look at what was made of the steps' counts: not where ``vmap`` runs over them.

    Args:
        values: as ``counting.values`` gives them.
        fused: as in :func:`use_kernel`.

    Raises:
        RuntimeError: ``fused=True`` where it cannot.
    """
    batched = isinstance(values, list) and any(isinstance(value, Tensor) for value in values)
    if not batched or not torch._C._are_functorch_transforms_active():
        return True
    if fused:
        raise RuntimeError(
            "`fused=True` cannot be kept: the kernel must look at `steps`, which `vmap` runs over"
        )
    return False


def transforms_allow() -> bool:
    """Whether no transformation is active but those that a kernel's node has rules for: ``grad``, ``vjp``, ``vmap``."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    functorch = torch._C._functorch
    kinds = {interpreter.key() for interpreter in functorch.get_interpreter_stack() or ()}
    return kinds <= {functorch.TransformType.Grad, functorch.TransformType.Vmap}
