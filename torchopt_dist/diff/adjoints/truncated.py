"""A loop → its outcome with the graph of the last steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from torchopt_dist.arguments.numbers import integer
from torchopt_dist.core.vmap import samples_around
from torchopt_dist.diff.adjoints._loop import Carry, Loop, Outcome
from torchopt_dist.diff.adjoints._loop_of_samples import run_outside_of_vmap
from torchopt_dist.diff.adjoints.adjoint import Adjoint
from torchopt_dist.formulas.attention import attention_by_formula

__all__ = ["Truncated"]


@dataclass(frozen=True)
class Truncated(Adjoint):
    """The gradient through the last steps only; the steps before are plain training (Shaban et al., 2019).

    The gradient ignores how earlier steps depend on the meta tensors, and where the loop starts: unless ``steps``
    covers the whole loop, the initial parameters and the initial state get no gradient. Losses of the last steps are
    connected.

    Args:
        steps: the number of last steps that are recorded, at least 0.

    Raises:
        TypeError: ``steps`` is not an integer.
        ValueError: it is negative.
    """

    runs_again: ClassVar[bool] = False

    steps: int

    def __post_init__(self) -> None:
        integer("steps", self.steps, 0)

    @property
    def batches_again(self) -> int:
        """With ``stop``, the last steps are known only after them, and are made again."""
        return self.steps

    def run(self, loop: Loop) -> Outcome:
        """Run the loop; see :meth:`Adjoint.run`."""
        with attention_by_formula():
            return run_outside_of_vmap(self._run, loop, samples_around())

    def _run(self, loop: Loop) -> Outcome:
        if loop.steps <= self.steps:
            return loop.run(loop.recorded_step, loop.first)
        if loop.stop is None:
            start = loop.steps - self.steps
            before = loop.run(loop.training_step, loop.own(loop.first), end=start)
            return _followed(before, loop.run(loop.recorded_step, loop.cut(before.carry), start))
        return self._until_it_stops(loop)

    def _until_it_stops(self, loop: Loop) -> Outcome:
        """Run the loop once to find out which steps are the last ones."""
        starts: deque[Carry] = deque(maxlen=self.steps + 1)

        def step(carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
            starts.append(carry)
            return loop.plain_step(carry, number)

        plain = loop.run(step, loop.cut(loop.first))
        count = len(plain.losses)
        start = max(0, count - self.steps)
        if start == count:
            return plain
        again = loop.first if start == 0 else loop.cut(starts[-(count - start)])
        before = Outcome(again, plain.losses[:start], plain.aux[:start])
        return _followed(before, loop.without_stop().run(loop.recorded_step, again, start, count))


def _followed(before: Outcome, after: Outcome) -> Outcome:
    return Outcome(after.carry, before.losses + after.losses, before.aux + after.aux)
