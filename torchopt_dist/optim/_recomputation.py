"""Modules → an error if a backward pass reads their parameters, which a later step replaces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from torch import Tensor, nn

from torchopt_dist.torch_private import parameters_of, set_parameters

__all__ = ["NoRecomputation"]


class NoRecomputation:
    """A context in which a recorded gradient is computed.

    Code that computes a part of the loss again in a backward pass, such as ``torch.utils.checkpoint``, reads the
    modules' parameters again. That is correct in this pass. But it happens again in the pass through the recorded
    gradient, when the modules have other parameters, and the result would be silently wrong.

    Args:
        parts: the modules and all their sub-modules.

    Raises:
        RuntimeError: inside, a parameter is read by way of its module.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._held = [(part, parameters) for part in parts if (parameters := parameters_of(part))]

    def __enter__(self) -> None:
        for part, _ in self._held:
            set_parameters(part, _REFUSING)

    def __exit__(self, *_: object) -> None:
        for part, parameters in self._held:
            set_parameters(part, parameters)


class _Refusing(dict[str, Tensor | None]):
    """Parameters by name that must not be read."""

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError(
            "`loss` must not be computed again in backward, as torch.utils.checkpoint does, where a step is recorded: "
            "the backward pass through the step would compute it with parameters of a later step. Make the steps by "
            "`optimizer.run(loss, batches)` or todist.inner_loop, where each step keeps its own parameters, or by "
            "`adjoint=todist.Replayed()` without a checkpoint; or ask for no second order by "
            "`optimizer.step(loss, first_order=True)`"
        )

    __contains__ = __getitem__ = __iter__ = __len__ = get = items = keys = values = _refuse


_REFUSING = _Refusing()
