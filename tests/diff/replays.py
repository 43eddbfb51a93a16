"""A replayed loop and a recorded one → their gradients, and whether they agree; the fewest steps run again."""

from __future__ import annotations

import functools

import torch
from torch import nn

import torchopt_dist as todist

D = torch.float64


def both(loss, params, batches, *, ins, optimizer=None, replayed=None, **options):
    """The gradients of a replayed and of a recorded loop."""
    made = []
    for one in (replayed or todist.Replayed(snapshots=2), todist.Recorded()):
        result = todist.inner_loop(
            loss, optimizer or todist.adam(lr=0.05, eps=1e-3), params, batches, adjoint=one, seed=1, **options
        )
        leaves = list(result.params.parameters()) if isinstance(params, nn.Module) else [result.params]
        outer = (
            sum((leaf**3).sum() for leaf in leaves)
            + (result.losses * torch.arange(1, len(result.losses) + 1)).sum()
        )
        made.append(torch.autograd.grad(outer, ins, allow_unused=True))
    return made


def agree(made, atol=1e-10):
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=atol)


@functools.cache
def fewest_advances(steps: int, snapshots: int) -> int:
    """By trying all places of the next snapshot; the sweep that comes to the last step counts."""
    if steps <= 1:
        return 0
    if snapshots == 1:
        return steps * (steps - 1) // 2
    return min(
        ahead + fewest_advances(steps - ahead, snapshots - 1) + fewest_advances(ahead, snapshots)
        for ahead in range(1, steps)
    )
