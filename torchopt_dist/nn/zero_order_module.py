"""A module whose ``forward`` is a loss → the same, with gradients of its parameters estimated from values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Size, Tensor, nn

from torchopt_dist.core.types import Numeric, Samplable, SampleFunc
from torchopt_dist.diff.zero_order import Method, Parallel, zero_order
from torchopt_dist.nn.stateless import reparametrize

__all__ = ["ZeroOrderGradientModule"]


class ZeroOrderGradientModule(nn.Module):
    """A module whose ``forward`` returns a number, with a gradient by :func:`torchopt_dist.diff.zero_order.zero_order`.

    The settings are arguments of the class statement. The noise comes from ``distribution`` or, if that is not given,
    from a method ``sample``::

        class Policy(ZeroOrderGradientModule, method="antithetic", num_samples=100, sigma=0.1):
            def forward(self, environment): ...  # a number, which need not be differentiable

            def sample(self, sample_shape=torch.Size()):
                return torch.randn(sample_shape)

    Args:
        distribution: the distribution of the noise. This and the others are arguments of the class statement, with the
            meaning that they have in :func:`torchopt_dist.diff.zero_order.zero_order`.
        method: as in ``zero_order``.
        num_samples: as in ``zero_order``.
        sigma: as in ``zero_order``.
        parallel: as in ``zero_order``.
        vectorize: as in ``zero_order``.
        chunk_size: as in ``zero_order``.
    """

    _settings: ClassVar[dict[str, Any]] = {"distribution": None}

    def __init_subclass__(
        cls,
        distribution: SampleFunc | Samplable | None = None,
        method: Method | None = None,
        num_samples: int | None = None,
        sigma: float | None = None,
        parallel: Parallel | None = None,
        vectorize: bool | None = None,
        chunk_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Check and keep the settings; those that are not given are the base class's.

        Raises:
            ValueError: as :func:`torchopt_dist.diff.zero_order.zero_order`.
            TypeError: as :func:`torchopt_dist.diff.zero_order.zero_order`; or the class has neither a ``distribution``
                nor a method ``sample``.
        """
        super().__init_subclass__(**kwargs)
        new = {
            "distribution": distribution,
            "method": method,
            "num_samples": num_samples,
            "sigma": sigma,
            "parallel": parallel,
            "vectorize": vectorize,
            "chunk_size": chunk_size,
        }
        cls._settings = {**cls._settings, **{name: value for name, value in new.items() if value is not None}}
        zero_order(**{**cls._settings, "distribution": cls._settings["distribution"] or torch.randn})
        has_noise = cls._settings["distribution"] or cls.sample is not ZeroOrderGradientModule.sample
        if "forward" in vars(cls) and not has_noise:
            raise TypeError(f"{cls.__name__} must have a `distribution` or a method `sample`")

    def sample(self, sample_shape: Size = Size()) -> Tensor | list[Numeric]:  # noqa: B008 - torch's own signature
        """Draw noise of a shape, unless the class has a ``distribution``."""
        raise NotImplementedError(f"{type(self).__name__} must have a `distribution` or a method `sample`")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call :meth:`forward` at several points, and return the mean; arguments are passed on as they are."""
        named: dict[str, Tensor] = {
            name: tensor for name, tensor in self.named_parameters() if tensor.requires_grad
        }
        if not torch.is_grad_enabled() or not named:
            return super().__call__(*args, **kwargs)
        settings = {**self._settings, "distribution": self._settings["distribution"] or self.sample}
        return zero_order(**settings)(_Forward(self))(named, args, kwargs)


class _Forward:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, named: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with reparametrize(self.module, named):
            return nn.Module.__call__(self.module, *args, **kwargs)
