"""A loop → its outcome with the graph of its updates, in which the inner gradients are constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchopt_dist.diff.adjoints._loop import Loop, Outcome
from torchopt_dist.diff.adjoints.adjoint import Adjoint

__all__ = ["FirstOrder"]


@dataclass(frozen=True)
class FirstOrder(Adjoint):
    """The inner gradients are taken as constants: first-order MAML (Finn et al., 2017), ANIL with masked parameters.

    There is no second-order graph. The first parameters, the first state and hyper-parameters get the gradient of what
    the optimizer makes of constant gradients; meta tensors inside the loss get none. With hyper-parameters that are
    numbers, no weight decay and a first state without history, nothing is kept beside plain training. Losses are not
    connected.
    """

    runs_again: ClassVar[bool] = False

    def run(self, loop: Loop) -> Outcome:
        """Run the loop; see :meth:`Adjoint.run`."""
        return loop.run(loop.first_order_step, loop.first)
