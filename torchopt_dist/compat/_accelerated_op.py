"""TorchOpt's ``use_accelerated_op=`` → ``fused=``: Adam and AdamW as functions and as classes that take both names."""

from __future__ import annotations

from typing import Any

import torchopt_dist as todist
from torchopt_dist.compat._links import without_identity
from torchopt_dist.transform import GradientTransformation

__all__ = ["Adam", "AdamW", "MetaAdam", "MetaAdamW", "adam", "adamw"]


def _with_fused(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with the option under torchopt_dist's name.

    Raises:
        ValueError: the option is given under both names.
    """
    if "use_accelerated_op" not in options:
        return options
    if options.get("fused") is not None:
        raise ValueError(
            "`use_accelerated_op` is TorchOpt's name for `fused`: give one of them, "
            f"got fused={options['fused']} and use_accelerated_op={options['use_accelerated_op']}"
        )
    return {"fused" if name == "use_accelerated_op" else name: value for name, value in options.items()}


def adam(*args: Any, **options: Any) -> GradientTransformation:
    """:func:`torchopt_dist.adam`."""
    return without_identity(todist.adam(*args, **_with_fused(options)))


def adamw(*args: Any, **options: Any) -> GradientTransformation:
    """:func:`torchopt_dist.adamw`."""
    return without_identity(todist.adamw(*args, **_with_fused(options)))


class Adam(todist.Adam):
    """:class:`torchopt_dist.Adam`."""

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        super().__init__(params, *args, **_with_fused(options))


class AdamW(todist.AdamW):
    """:class:`torchopt_dist.AdamW`."""

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        super().__init__(params, *args, **_with_fused(options))


class MetaAdam(todist.MetaAdam):
    """:class:`torchopt_dist.MetaAdam`."""

    def __init__(self, module: Any, *args: Any, **options: Any) -> None:
        super().__init__(module, *args, **_with_fused(options))


class MetaAdamW(todist.MetaAdamW):
    """:class:`torchopt_dist.MetaAdamW`."""

    def __init__(self, module: Any, *args: Any, **options: Any) -> None:
        super().__init__(module, *args, **_with_fused(options))
