"""A loop → its outcome, with a gradient estimated from loops run again with new noise every few steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchopt_dist.arguments.integers import integer
from torchopt_dist.diff.adjoints._antithetic import run_with_pairs
from torchopt_dist.diff.adjoints._loop import Loop, Outcome
from torchopt_dist.diff.adjoints._samples import samples_for
from torchopt_dist.diff.adjoints.evolution_strategies import EvolutionStrategies

__all__ = ["PersistentEvolutionStrategies"]


@dataclass(frozen=True)
class PersistentEvolutionStrategies(EvolutionStrategies):
    """As :class:`EvolutionStrategies`, with new noise for every ``unroll`` steps (PES, Vicol et al., 2021).

    In its ``u``-th unroll each pair of loops continues from its own parameters and state, with new noise ``z_u``. The
    value of that unroll, ``f_u``, is multiplied by the sum of the pair's noise so far:

        mean over pairs of Σ_u (f_u⁺ - f_u⁻) (z_1 + … + z_u) / (2 sigma).

    So a loss is correlated with the noise up to its own unroll only. See https://arxiv.org/abs/2112.13835; here the
    whole loop is one estimate, which is unbiased for the loop smoothed by noise that changes with the unrolls. It is
    meant for outer losses that are computed from ``InnerLoopResult.losses``; for one of the last parameters only,
    :class:`EvolutionStrategies` varies less. Two numbers come back from a worker for each pair and unroll.

    Args:
        samples: the number of pairs.
        sigma: the standard deviation of the noise, for all tensors.
        parallel: as in :class:`EvolutionStrategies`.
        unroll: the number of steps after which a pair gets new noise.

    Raises:
        TypeError: as in :class:`EvolutionStrategies`; ``unroll`` is not an integer.
        ValueError: as in :class:`EvolutionStrategies`; ``unroll`` is below 1.
        NotImplementedError: from ``inner_loop``, inside another transform of ``torch.func`` than ``vmap``, or inside
            that with ``parallel``.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> _ = torch.manual_seed(0)
        >>> w, x = torch.tensor(1.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
        >>> adjoint = PersistentEvolutionStrategies(samples=200, sigma=0.1, unroll=1)
        >>> result = todist.inner_loop(
        ...     lambda w: (w - x) ** 2, todist.sgd(lr=0.25), w, 2, meta=x, adjoint=adjoint
        ... )
        >>> round(torch.autograd.grad(result.losses.sum(), x)[0].item())  # 2·2 + 2·(1 - 2)·(0.5 - 1) = 5
        5
    """

    first_has_gradient: ClassVar[bool] = False

    unroll: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("unroll", self.unroll, 1)

    def run(self, loop: Loop) -> Outcome:
        """Run the loop; see :meth:`Adjoint.run`."""
        return run_with_pairs(loop, self.samples, self.sigma, self.unroll, self.parallel, samples_for(self))
