"""Gradients of some steps, where they lead → snapshots by which one goes back through them, without making them again.

The derivative of an update needs the optimizer's averages, not the parameters, and it finds the change of the
parameters on its way, so that it can take that back. So of a run of steps only averages are made again, and those of
every fourth step are enough. Parameters that are found by going back differ from those that were passed by rounding, as
do those of a step that is made again by another kernel; at each whole snapshot they are those that were passed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchopt_dist._torch_private import memory_is_shared
from torchopt_dist.diff.adjoints._loop import Carry, Loop
from torchopt_dist.diff.replay._pool import Pool
from torchopt_dist.diff.replay._snapshots import Snapshot
from torchopt_dist.diff.replay._step import StepGradient
from torchopt_dist.ops._adam_backward import AHEAD
from torchopt_dist.transform.apply_updates import states_ahead

__all__ = ["Retrace"]


class Retrace:
    """The parameters of one backward pass, as far as they are known.

    Args:
        loop: the loop.
        gradient: the backward of its steps.
        pool: gives memory.
    """

    def __init__(self, loop: Loop, gradient: StepGradient, pool: Pool) -> None:
        self._loop, self._gradient, self._pool = loop, gradient, pool
        self._number = 0
        self._params: list[Tensor] = []

    @property
    def _can(self) -> bool:
        return self._loop.trains_in_place and self._gradient.retraces

    def note(self, start: Snapshot) -> None:
        """Copy the parameters that a step starts from, which the step before it has led to."""
        self._params = []
        if start.number and self._can:
            own = self._loop.own(Carry(start.carry.params, None, []), self._pool.copied)
            self._number, self._params = start.number, own.params

    def snapshots(self, steps: Sequence[Snapshot]) -> list[Snapshot] | None:
        """Snapshots for :meth:`start_of`.

        Args:
            steps: one after another, all with gradients, the first one whole.

        Returns:
            All but the first, with a state; ``None`` if the steps are to be made again.
        """
        grads = [step.grads for step in steps if step.grads is not None]
        if (
            not self._params
            or self._number != steps[-1].number + 1
            or len(grads) < len(steps)
            or not self._can
        ):
            return None
        with self._loop.substituted():
            states = states_ahead(self._loop.optimizer, steps[0].carry.state, grads, self._pool.memory_for)
        if states is None:
            return None
        return [
            step._replace(
                carry=step.carry._replace(state=states[place]),
                earlier=grads[place - place % AHEAD : place],
            )
            for place, step in enumerate(steps)
            if place
        ]

    def start_of(self, found: Snapshot) -> Snapshot:
        """The snapshot of a step with the parameters after it; going back overwrites these by those before it."""
        self._loop.model.let_go()
        for place in self._loop.model.moved_places:
            if memory_is_shared(self._params[place]):  # with something that the loss has kept
                self._params[place] = self._pool.copied(self._params[place])
        params = [self._params[place] for place in self._loop.model.first_places]
        return found._replace(carry=found.carry._replace(params=params))
