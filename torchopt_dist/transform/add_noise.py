"""Gradients → gradients plus noise whose variance falls with the steps."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.arguments.numbers import integer
from torchopt_dist.core.types import OptState, Params, Updates
from torchopt_dist.ops._columns import pick, present, put
from torchopt_dist.transform._elementwise import check_dense
from torchopt_dist.transform._hyperparameters import HyperParameter, check_at_least_zero
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["AddNoiseState", "add_noise"]


class AddNoiseState(NamedTuple):
    """The state of :func:`add_noise`."""

    step: Tensor
    """How many updates there have been: 0-d, int64, on the CPU."""


def add_noise(eta: HyperParameter, gamma: HyperParameter, seed: int) -> GradientTransformation:
    """Add normal noise of variance ``eta / t ** gamma`` to all entries, in step ``t``, counted from 1.

    The noise is made from the seed, the step and the leaf's place, so it is the same on every device and in every
    process, and a step that runs again has the same; torch's generator is not used. All tasks of a ``vmap`` get the
    same noise. It reads the step, so it does not work under ``torch.compile(fullgraph=True)``. [Neelakantan et al.
    2015, Adding Gradient Noise Improves Learning for Very Deep Networks, section 3.]

    Args:
        eta: the variance of the first step, at least 0; a number, or a tensor of one element, which may require grad.
        gamma: the exponent of the decay, at least 0; the same.
        seed: an integer that is at least 0.

    Raises:
        TypeError: an argument has the wrong type; from ``update``: a gradient is sparse.
        ValueError: an argument is out of its range.

    Example:
        >>> import torch
        >>> init, update = add_noise(eta=0.01, gamma=0.55, seed=0)
        >>> update(torch.zeros(2), init(torch.zeros(2)))[0].shape
        torch.Size([2])
    """
    check_at_least_zero("eta", eta)
    check_at_least_zero("gamma", gamma)
    return GradientTransformation(_init, partial(_update, eta, gamma, integer("seed", seed, 0)))


def _init(params: Params, /) -> AddNoiseState:
    return AddNoiseState(torch.zeros((), dtype=torch.int64, device="cpu"))


def _update(
    eta: HyperParameter,
    gamma: HyperParameter,
    seed: int,
    updates: Updates,
    state: AddNoiseState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    if not isinstance(state, AddNoiseState):
        raise TypeError(f"`state` must be an AddNoiseState, got {type(state).__name__}")
    leaves, spec = pytree.flatten(updates)
    places = present(leaves)
    given = pick(leaves, places)
    check_dense(given)
    step = int(state.step) + 1
    deviation = (_scalar(eta) / step ** _scalar(gamma)) ** 0.5
    made = [
        _noisy(x, deviation, np.random.default_rng((seed, step, place)))
        for place, x in zip(places, given, strict=True)
    ]
    return pytree.unflatten(spec, put(leaves, places, made)), AddNoiseState(state.step + 1)


def _scalar(value: HyperParameter) -> HyperParameter:
    return value.reshape(()) if isinstance(value, Tensor) else value


def _noisy(x: Tensor, deviation: HyperParameter, generator: np.random.Generator) -> Tensor:
    pairs = (2,) if x.is_complex() else ()
    noise = torch.from_numpy(np.asarray(generator.standard_normal((*x.shape, *pairs))))
    if isinstance(deviation, Tensor):
        deviation = deviation.to(x.device)
    noise = (torch.view_as_complex(noise) if pairs else noise).to(x.device, x.dtype)
    return (x + deviation * noise).to(x.dtype)
