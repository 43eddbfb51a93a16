"""A partitioner, names of arguments → a partitioner that splits these alone; every worker gets the others whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchopt_dist.arguments.options import close_to
from torchopt_dist.distributed.partition import (
    Partition,
    Partitioner,
    dim_partitioner,
    replicated,
    unwrap,
)

__all__ = ["check_split", "split_only"]


def check_split(split: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless it is a list of names, or ``None``."""
    if split is None:
        return
    if isinstance(split, str) or not isinstance(split, Sequence):
        remedy = f": write [{split!r}]" if isinstance(split, str) else ""
        raise TypeError(f"`split` must be a list of names of arguments, got {split!r:.80}{remedy}")
    if not split:
        raise ValueError("`split` must name at least one argument, got none")
    for name in split:
        if not isinstance(name, str):
            raise TypeError(f"`split` must hold names of arguments, got {type(name).__name__} {name!r:.80}")


def split_only(func: Callable[..., Any], names: Sequence[str], partitioner: Partitioner | None) -> _SplitOnly:
    """Let a partitioner split some arguments of a function only.

    Args:
        func: the function of the call.
        names: names of its arguments.
        partitioner: what splits them; ``None`` stands for ``batch_partitioner``.

    Raises:
        TypeError: the partitioner is a worker's rank or name; or the function's arguments have no names.
        ValueError: the function has no argument of one of the names.
    """
    if partitioner is not None and not callable(partitioner):
        raise TypeError(
            f"`split` needs a partitioner that splits, such as todist.tasks, got the worker {partitioner!r}"
        )
    try:  # a module's own signature is that of any call
        signature = inspect.signature(func.forward if isinstance(func, nn.Module) else func)
    except (TypeError, ValueError):
        raise TypeError(f"`split` needs a function whose arguments have names, got {func!r:.80}") from None
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    if inspect.Parameter.VAR_KEYWORD not in kinds.values():
        for name in names:
            if name not in kinds:
                remedy = close_to(name, kinds) or f"; they are {', '.join(kinds) or 'none'}"
                raise ValueError(f"`split` must hold names of the function's arguments, got {name!r}{remedy}")
    return _SplitOnly(partitioner or dim_partitioner(), frozenset(names), signature)


@dataclass(frozen=True)
class _SplitOnly:
    partitioner: Callable[..., Any]
    names: frozenset[str]
    signature: inspect.Signature

    @property
    def balance(self) -> Any:
        """What the call tells how fast workers are."""
        return getattr(self.partitioner, "balance", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[Partition]:
        """Split the arguments; those that are not named are marked as ``replicated`` first."""
        bound = self.signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if name in self.names:
                continue
            kind = self.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(map(_whole, value))
            elif kind is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {
                    key: part if key in self.names else _whole(part) for key, part in value.items()
                }
            else:
                bound.arguments[name] = _whole(value)
        parts: Sequence[Partition] = self.partitioner(*bound.args, **bound.kwargs)
        return parts


def _whole(value: Any) -> Any:
    """The value marked, without the marks inside it."""
    return replicated(unwrap((value,))[0])
