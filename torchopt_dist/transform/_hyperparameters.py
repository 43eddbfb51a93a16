"""A hyper-parameter as the user gave it → the same, or an error that names it.

A hyper-parameter is a number or a tensor of one element. A tensor's value is not read: that would fail in ``vmap`` and
``torch.compile``, synchronize with a GPU, and end a meta-training whose learned rate falls below zero for a time.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from torchopt_dist import pytree
from torchopt_dist.core.types import OptionalTensor, PerLeaf, Schedule

if TYPE_CHECKING:
    from typing_extensions import TypeIs

__all__ = [
    "HyperParameter",
    "check_at_least_zero",
    "check_decay",
    "check_decays",
    "check_learning_rate",
    "check_per_leaf",
    "check_said",
    "check_start",
    "is_number",
    "is_per_leaf",
    "is_schedule",
    "is_zero",
    "plain_rates",
    "times_per_leaf",
]

HyperParameter: TypeAlias = float | Tensor
"""A number, or a tensor of one element (which may require grad and then gets its exact gradient)."""


def check_at_least_zero(name: str, value: Any) -> None:
    """Check that a value is a number of at least 0, or a tensor of one element.

    Raises:
        TypeError: it is neither a number nor a tensor, or a complex one.
        ValueError: it is negative, not a number (nan), or a tensor of another size.
    """
    if type(value) in (float, int) and value >= 0:
        return  # sooner than an abstract class says that it is a number
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"`{name}` as a tensor must have one element, got shape {tuple(value.shape)}")
        if value.is_complex():
            raise TypeError(f"`{name}` must be real, got a tensor of {value.dtype}")
    elif isinstance(value, numbers.Real):
        if not float(value) >= 0:
            raise ValueError(f"`{name}` must be at least 0, got {value}")
    else:
        raise TypeError(f"`{name}` must be a number or a tensor of one element, got {type(value).__name__}")


def check_start(name: str, value: Any) -> None:
    """Check that a value is a number of at least 0: a value of the initial state, which is not part of a graph.

    Raises:
        TypeError: it is not a number.
        ValueError: it is negative or not a number (nan).
    """
    if isinstance(value, Tensor):
        raise TypeError(
            f"`{name}` must be a number, as the first state is no part of a graph, got a tensor: put tensors into "
            "the state that `init` makes to differentiate with respect to them"
        )
    check_at_least_zero(name, value)


def check_decay(name: str, value: Any) -> None:
    """As :func:`check_at_least_zero`; a number must also be below 1, as the decay of a running average."""
    check_at_least_zero(name, value)
    if not isinstance(value, Tensor) and not float(value) < 1:
        raise ValueError(f"`{name}` must be at least 0 and below 1, got {value}")


def check_decays(name: str, values: Any, count: int) -> None:
    """Check a tuple or a list of so many decays, each as :func:`check_decay`."""
    if not isinstance(values, (tuple, list)) or len(values) != count:
        raise TypeError(f"`{name}` must be a tuple of {count} decays, got {values!r:.80}")
    for place, value in enumerate(values):
        check_decay(f"{name}[{place}]", value)


def check_learning_rate(name: str, value: Any) -> None:
    """As :func:`check_per_leaf`; a schedule is allowed, too."""
    if type(value) in (float, int):
        check_at_least_zero(name, value)
        return
    if not isinstance(value, (Tensor, numbers.Real)) and not is_per_leaf(value) and not callable(value):
        raise TypeError(
            f"`{name}` must be a number, a tensor or a schedule, got {type(value).__name__}; a tree has a number or a "
            "tensor for each parameter"
        )
    if not is_schedule(value):
        check_per_leaf(name, value)


def check_said(name: str, value: Any) -> Any:
    """The value that a schedule returned for a step; ``TypeError``, if it is ``None``."""
    if value is None:
        raise TypeError(f"`{name}` as a schedule must return a number or a tensor for each step, got None")
    return value


def check_per_leaf(name: str, value: Any) -> None:
    """As :func:`check_at_least_zero`; or a tree of numbers and tensors of any shape, one for each parameter."""
    if type(value) in (float, int) or not is_per_leaf(value):
        check_at_least_zero(name, value)
        return
    tree: Any = plain_rates(value)
    for place, leaf in enumerate(pytree.flatten(tree)[0]):
        if isinstance(leaf, Tensor):
            if leaf.is_complex():
                raise TypeError(f"`{name}` must be real, got a tensor of {leaf.dtype} at leaf {place}")
        elif leaf is not None:  # that parameter gets no update
            check_at_least_zero(f"{name}[leaf {place}]", leaf)


def is_per_leaf(value: object) -> TypeIs[PerLeaf]:
    """Whether it is a tree with a value for each parameter."""
    return isinstance(value, (Mapping, list, tuple, nn.ParameterDict))


def is_schedule(value: object) -> TypeIs[Schedule]:
    """Whether it is a function of the step; a ``ParameterDict`` is callable, as modules are, and is none."""
    return callable(value) and not isinstance(value, nn.ParameterDict)


def plain_rates(value: Any) -> Any:
    """A ``ParameterDict`` as a dictionary; everything else as it is."""
    return dict(value.items()) if isinstance(value, nn.ParameterDict) else value


def times_per_leaf(
    tensors: Sequence[OptionalTensor], factors: Any, spec: pytree.PyTreeSpec, name: str, sign: float = 1.0
) -> list[OptionalTensor]:
    """Each tensor times the factor of its leaf; ``None`` stays.

    Factors by name need none for a tensor that is ``None``, such as the gradient of a frozen parameter.

    Raises:
        ValueError: the tree of factors has another structure, or a factor does not broadcast to its tensor's shape.
    """
    out: list[OptionalTensor] = []
    for place, (x, factor) in enumerate(
        zip(tensors, _factors_of_leaves(tensors, factors, spec, name), strict=True)
    ):
        if x is None or factor is None:
            if x is not None:
                raise ValueError(f"`{name}` must have a value for each parameter, got None at leaf {place}")
            out.append(None)
            continue
        if isinstance(factor, Tensor) and factor.numel() == 1:
            factor = factor.reshape(())
        if isinstance(factor, Tensor) and not _has_room(x.shape, factor.shape):
            raise ValueError(
                f"`{name}` must have one element or fit its parameter: leaf {place} must fit {tuple(x.shape)}, got "
                f"{tuple(factor.shape)}"
            )
        out.append((x * (sign * factor)).to(x.dtype))
    return out


def _factors_of_leaves(
    tensors: Sequence[OptionalTensor], factors: Any, spec: pytree.PyTreeSpec, name: str
) -> list[Any]:
    names = spec.entries() if spec.type is dict and type(factors) is dict else []
    if len(names) != len(tensors) or factors.keys() == set(names):  # not by name, a tree in a tree, or all
        return pytree.flatten_like(spec, factors, name, "params")
    missing = [key for key, x in zip(names, tensors, strict=True) if x is not None and key not in factors]
    unknown = [key for key in factors if key not in names]
    if name in unknown and isinstance(factors[name], Mapping):
        raise ValueError(
            f"`{name}` must be the values by name of the parameters, got a dictionary of hyper-parameters: write "
            f"`**rates()` in the place of `{name}=rates()`"
        )
    if missing or unknown:
        listed = [
            f"{what}: {_listed(keys)}" for what, keys in (("missing", missing), ("unknown", unknown)) if keys
        ]
        raise ValueError(
            f"`{name}` by name must have a value for each trainable parameter, and no other: {'; '.join(listed)}"
        )
    return [factors.get(key) for key in names]


def _listed(names: Sequence[Any], most: int = 5) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def _has_room(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether a tensor of the other shape broadcasts to the shape."""
    if len(other) > len(shape):
        return False
    tail = shape[len(shape) - len(other) :]
    return all(own in (1, whole) for own, whole in zip(other, tail, strict=True))


def is_number(*values: Any) -> bool:
    """Whether all values are numbers, and neither tensors nor schedules."""
    # To ask an abstract class takes five times as long.
    return all(type(value) in (float, int) or isinstance(value, numbers.Real) for value in values)


def is_zero(value: HyperParameter | PerLeaf) -> bool:
    """Whether it is the number 0, so that its term can be left out; a tensor never is."""
    return not isinstance(value, Tensor) and value == 0
