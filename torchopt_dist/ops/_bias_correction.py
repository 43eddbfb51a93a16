"""The number of steps that each parameter has made → that number plus 1, and the bias corrections after it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torchopt_dist.core.uncompiled import is_traced
from torchopt_dist.ops._foreach import Factor, Factors, combine, runs_in_a_loop

__all__ = ["bias_corrections", "count_up", "count_up_", "counts", "on_device", "values"]


def counts(steps: Sequence[Tensor | float]) -> list[Tensor]:
    """Counts as 0-d tensors: a number becomes a float32 tensor on the CPU."""
    return [
        step if isinstance(step, Tensor) else torch.tensor(step, dtype=torch.float32, device="cpu")
        for step in steps
    ]


def count_up_(steps: Sequence[Tensor]) -> None:
    """Add 1 to each of these 0-d tensors, in place."""
    if runs_in_a_loop(steps) or not steps[0].is_floating_point():
        for step in steps:
            step.add_(1)
    elif steps[0].is_cpu:  # torch would make a tensor of a number again for each count
        torch._foreach_add_(list(steps), torch.ones((), device="cpu"), alpha=1.0)
    else:
        torch._foreach_add_(list(steps), 1)


def count_up(steps: list[Tensor], *, inplace: bool = False) -> list[Tensor]:
    """Add 1 to each of these 0-d tensors; if ``inplace``, overwrites them."""
    if inplace:
        count_up_(steps)
        return steps
    if runs_in_a_loop(steps) or not steps[0].is_cpu or {step.dtype for step in steps} - {torch.float32}:
        return [step + 1 for step in steps]
    one = torch.ones((), dtype=torch.float32, device="cpu")
    return list(torch._foreach_add(steps, one, alpha=1.0))


def on_device(counts: list[Tensor], device: torch.device) -> list[Tensor]:
    """The counts for an op that reads float32 on a device: themselves, or copies made by one transfer."""
    if all(count.device == device and count.dtype == torch.float32 for count in counts):
        return counts
    numbers = values(counts)
    if isinstance(numbers, (int, float)):
        return [torch.full((), numbers, dtype=torch.float32, device=device)] * len(
            counts
        )  # waits for no copy
    return list(torch.tensor(numbers, dtype=torch.float32).to(device).unbind())


def values(counts: Sequence[Tensor]) -> Factors:
    """The values of 0-d tensors: one number if all are equal, else a list of numbers.

    Tensors whose values cannot be read, such as those that ``vmap`` batches, are returned in float64.
    """
    if counts and not is_traced():
        with contextlib.suppress(RuntimeError):
            numbers = [t.item() for t in counts]
            return numbers[0] if numbers.count(numbers[0]) == len(numbers) else numbers
    return [t.to(torch.float64) for t in counts]


def bias_corrections(decays: Sequence[Factor], steps: Sequence[Tensor], ahead: int = 0) -> list[Factors]:
    """``1 - decay**t``, in float64: what a running average that began at 0 is divided by after ``t`` steps.

    Args:
        decays: the decays of averages.
        steps: ``t`` for each tensor, less ``ahead``: 0-d tensors on the CPU, which are read only once.
        ahead: so many steps later.

    Returns:
        For each decay one value for all tensors, if all have made the same number of steps; else one for each.
    """
    t = values(steps)
    if ahead:
        t = combine(lambda made: made + ahead, t)
    return [
        combine(partial(_bias_correction, decay.to(torch.float64) if isinstance(decay, Tensor) else decay), t)
        for decay in decays
    ]


def _bias_correction(decay: Factor, t: Factor) -> Factor:
    return 1 - decay**t
