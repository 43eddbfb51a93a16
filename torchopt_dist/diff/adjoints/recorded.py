"""A loop → its outcome with the graph of all steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchopt_dist.core.vmap import samples_around
from torchopt_dist.diff.adjoints._loop import Loop, Outcome
from torchopt_dist.diff.adjoints._loop_of_samples import run_outside_of_vmap
from torchopt_dist.diff.adjoints.adjoint import Adjoint
from torchopt_dist.formulas.attention import attention_by_formula

__all__ = ["Recorded"]


@dataclass(frozen=True)
class Recorded(Adjoint):
    """The exact gradient, to any order, by the graph of all steps.

    Memory grows with the number of steps: each keeps the activations of its loss and of its gradient. Losses and what
    else the loss returns are connected, too.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> w = torch.tensor(1.0, requires_grad=True)
        >>> adapted = todist.inner_loop(
        ...     lambda w: w**2, todist.sgd(lr=0.25), w, 2, adjoint=Recorded()
        ... )
        >>> torch.autograd.grad(adapted.params, w)
        (tensor(0.2500),)
    """

    runs_again: ClassVar[bool] = False

    @property
    def batches_again(self) -> int:
        """Each batch is read once."""
        return 0

    def run(self, loop: Loop) -> Outcome:
        """Run the loop; see :meth:`Adjoint.run`."""
        return run_outside_of_vmap(record, loop, samples_around())


def record(loop: Loop) -> Outcome:
    """Run a loop with the graph of all steps."""
    with attention_by_formula():
        return loop.run(loop.recorded_step, loop.first)
