"""A loop → its outcome, connected to the tensors of the loop by the gradient that an adjoint defines.

To add one, write a file with a dataclass that is an :class:`Adjoint`; its fields are its settings, which
``__post_init__`` checks. ``run`` gets a ``Loop`` (``_loop.py``) and runs its steps:

- ``loop.run(loop.recorded_step, loop.first)`` is the exact gradient by recording;
  ``loop.run(loop.training_step, loop.own(loop.first))`` is training without a graph, in place; where what a step
  starts from is kept, ``loop.run(loop.plain_step, loop.cut(loop.first))``, which overwrites nothing;
- an adjoint with a gradient of its own trains without a graph and connects the outcome by a
  ``torch.autograd.Function`` that takes ``loop.tensors``, all tensors for which there may be a gradient; as
  ``tensor.view_as(tensor)`` where ``loop.is_substituted``, since a loop around this one has put others in their places.
  In its backward ``loop.gradient(carry, number, record=True)`` evaluates a loss and its gradient at any parameters, and
  ``loop.with_tensors(others)`` is the same loop with other tensors in the places of ``loop.tensors``.

Then export the class in ``adjoints/__init__.py`` and ``torchopt_dist/__init__.py``, and give it a row in
``tests/diff/adjoint_table.py`` and in ``docs/which_adjoint.md``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torchopt_dist.diff.adjoints._loop import Loop, Outcome

__all__ = ["Adjoint"]


class Adjoint(ABC):
    """How the gradient of an inner loop is taken; an argument of :func:`torchopt_dist.inner_loop`."""

    runs_again: ClassVar[bool] = True
    """Whether steps may be run after ``run`` has returned, as a backward pass may do."""

    first_has_gradient: ClassVar[bool] = True
    """Whether the initial parameters get a gradient, also if ``meta`` does not list them."""

    @property
    def batches_again(self) -> int | None:
        """How many of the last batches are read again; ``None``: any, so that ``batches`` may not be an iterator."""
        return None

    @abstractmethod
    def run(self, loop: Loop) -> Outcome:
        """Run the loop.

        Args:
            loop: the loop to run. Grad mode is on, unless nothing is to be connected.

        Returns:
            The last parameters and state, with the history that the adjoint gives them, and the losses.
        """
