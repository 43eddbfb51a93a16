"""A loop → its outcome, with a gradient estimated from loops run again with noise, whole or a few steps each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchopt_dist.arguments.numbers import integer
from torchopt_dist.diff.adjoints._antithetic import Parallel, run_with_pairs
from torchopt_dist.diff.adjoints._estimates import check_above_zero
from torchopt_dist.diff.adjoints._loop import Loop, Outcome
from torchopt_dist.diff.adjoints._loop_of_samples import samples_for
from torchopt_dist.diff.adjoints.adjoint import Adjoint

__all__ = ["EvolutionStrategies", "PersistentEvolutionStrategies"]


@dataclass(frozen=True)
class EvolutionStrategies(Adjoint):
    """The gradient of the loop smoothed by noise, estimated by antithetic pairs of loops (Salimans et al., 2017).

    What ``meta`` lists, tensor hyper-parameters and tensors of batches, together ``λ``, get

        mean over pairs of (f(λ + sigma·z) - f(λ - sigma·z)) z / (2 sigma),    z ~ N(0, 1),

    where ``f`` is the inner product of the last parameters with their outer gradient, plus that of the losses with
    theirs. That is an unbiased estimate of the product of the outer gradient with the Jacobian of ``E f(λ + sigma·z)``.
    Its variance grows with the number of elements in ``λ``, so it suits a small ``λ``. The inner loop need be neither
    smooth nor twice differentiable. See https://arxiv.org/abs/1703.03864.

    No graph is kept; a backward pass runs the loop ``2·samples`` times. Both loops of a pair draw the same random
    numbers as the loop itself. The initial parameters and the initial state get no gradient, unless ``meta`` lists
    them. There are no second derivatives. Inside ``vmap`` each task has pairs of its own; their seeds are drawn from
    torch's generator in the order of the tasks, as by a loop over the tasks with ``seed`` given.

    Args:
        samples: the number of pairs.
        sigma: the standard deviation of the noise, for all tensors.
        parallel: how to spread the pairs over workers: a decorator for a function of a tensor of seeds, such as
            ``todist.parallelize(todist.batch_partitioner, todist.concatenate_reducer)``. Two numbers come back for each
            pair, and the estimate is the same on any number of workers.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: ``samples`` is below 1, or ``sigma`` not finite and above 0; or, from ``inner_loop``, the loss
            depends on a leaf that ``meta`` does not list.
        NotImplementedError: from ``inner_loop``, inside another transform of ``torch.func`` than ``vmap``, or inside
            that with ``parallel``.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> _ = torch.manual_seed(0)
        >>> w, x = torch.tensor(1.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
        >>> adjoint = EvolutionStrategies(samples=400, sigma=0.1)
        >>> adapted = todist.inner_loop(
        ...     lambda w: (w - x) ** 2, todist.sgd(lr=0.25), w, 2, meta=x, adjoint=adjoint
        ... )
        >>> round(torch.autograd.grad(adapted.params, x)[0].item(), 1)  # 1 - 0.5**2
        0.8
    """

    first_has_gradient: ClassVar[bool] = False

    samples: int
    sigma: float
    parallel: Parallel | None = None

    def __post_init__(self) -> None:
        integer("samples", self.samples, 1)
        check_above_zero("sigma", self.sigma)
        if self.parallel is not None and not callable(self.parallel):
            raise TypeError(f"`parallel` must be a decorator, got {self.parallel!r:.80}")

    def run(self, loop: Loop) -> Outcome:
        """Run the loop; see :meth:`Adjoint.run`."""
        return run_with_pairs(loop, self.samples, self.sigma, None, self.parallel, samples_for(self))


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
