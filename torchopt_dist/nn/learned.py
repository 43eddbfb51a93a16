"""A model, first values → learning rates and weight decays by parameter that an outer optimizer learns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torchopt_dist.pytree._name_patterns import check_patterns, first_match, listed

__all__ = ["LearnedHyperparameters", "learned"]


class LearnedHyperparameters(nn.Module):
    """Hyper-parameters as a module whose parameters are their logarithms; :func:`learned` makes it.

    ``parameters()`` are what an outer optimizer moves, ``state_dict()`` is what a checkpoint saves, and ``to`` moves
    them to a GPU. The names of the state are those of the model's parameters with ``/`` in place of the dots, for
    example ``"lr:0/weight"``, or those of the patterns.
    """

    def __init__(self, names: dict[str, dict[str, str]], logarithms: dict[str, Tensor]) -> None:
        super().__init__()
        self._names = names
        for key, logarithm in logarithms.items():
            self.register_parameter(key, nn.Parameter(logarithm))

    def forward(self, *given: Any) -> dict[str, dict[str, Tensor]]:
        """The values, to be passed on to an optimizer as ``**hyperparameters()``.

        Raises:
            TypeError: it is called with arguments, as by an optimizer that takes it for a schedule.

        Returns:
            ``"lr"`` and ``"weight_decay"``, those that are learned → the name of each trainable parameter of the model
            → its value, above 0 and connected to ``parameters()``.
        """
        if given:
            raise TypeError(
                "learned hyper-parameters are called without arguments, and give an optimizer all its values at once: "
                "write `todist.sgd(**hyperparameters())`"
            )
        values = {key: logarithm.exp() for key, logarithm in self.named_parameters()}
        return {
            hyperparameter: {name: values[key] for name, key in keys.items()}
            for hyperparameter, keys in self._names.items()
        }

    def keys(self) -> NoReturn:
        """Raise ``TypeError``: who writes ``**hyperparameters`` means ``**hyperparameters()``."""
        raise TypeError(
            "learned hyper-parameters must be called for their values: write `**hyperparameters()`"
        )

    def extra_repr(self) -> str:
        """The values, for ``print``."""
        return "\n".join(
            f"{key.replace('/', '.')}: {value:.4g}"
            if logarithm.ndim == 0
            else f"{key.replace('/', '.')}: about {value:.4g} in each of {logarithm.numel()} entries"
            for key, logarithm in self.named_parameters()
            for value in [logarithm.detach().mean().exp().item()]
        )


def learned(
    model: nn.Module | Mapping[str, Tensor],
    *,
    lr: float | Mapping[str, float] | None = None,
    weight_decay: float | Mapping[str, float] | None = None,
    entries: bool = False,
) -> LearnedHyperparameters:
    """Make hyper-parameters of inner steps that an outer optimizer learns, in log space, so that they stay positive.

    Args:
        model: the module that the inner steps train, or a dictionary of its parameters by name. Parameters that do not
            require grad get no values.
        lr: the learning rate at the start, a number above 0: each trainable parameter learns its own rate from there.
            Or a dictionary from patterns of names to such numbers, for example ``{"head.*": 0.1, "*": 0.01}``: all
            parameters that a pattern matches share one rate, and the first pattern that matches counts. In a pattern
            ``*`` stands for any characters, ``?`` for one, and ``[ab]`` for one of these.
        weight_decay: the same for the weight decay.
        entries: learn a value for each entry of each parameter, as the method Meta-SGD does.

    Returns:
        A module without arguments: ``hyperparameters()`` are the values by name, which every optimizer of this package
        takes: ``todist.adam(**hyperparameters())``, ``todist.MetaSGD(net, **hyperparameters())``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value is not above 0; a pattern matches no trainable parameter, or none matches one of them;
            ``entries`` with patterns; the model has no trainable parameter; nothing is to be learned.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> net = torch.nn.Linear(2, 1)
        >>> rates = learned(net, lr=0.1)
        >>> adapted = todist.inner_loop(
        ...     lambda net: net(torch.ones(2)).pow(2).sum(), todist.sgd(**rates()), net, 3
        ... ).params
        >>> adapted(torch.ones(2)).sum().backward()
        >>> [rate.grad is not None for rate in rates.parameters()]
        [True, True]
    """
    trainable = _trainable(model)
    if not isinstance(entries, bool):
        raise TypeError(f"`entries` must be True or False, got {type(entries).__name__} {entries!r:.200}")
    given = {name: value for name, value in (("lr", lr), ("weight_decay", weight_decay)) if value is not None}
    if not given:
        raise ValueError("`lr` or `weight_decay` must be given, else nothing is to be learned")
    names: dict[str, dict[str, str]] = {}
    logarithms: dict[str, Tensor] = {}
    for hyperparameter, value in given.items():
        if isinstance(value, Mapping):
            if entries:
                raise ValueError(f"`{hyperparameter}` must be a number with entries=True, got patterns")
            first = _of_patterns(hyperparameter, value, trainable)
        else:
            first = {name: (name, value) for name in trainable}
        names[hyperparameter] = {}
        for name, (group, number) in first.items():
            _check_positive(hyperparameter, number)
            key = f"{hyperparameter}:{group.replace('.', '/')}"
            names[hyperparameter][name] = key
            if key not in logarithms:
                logarithms[key] = _logarithm(number, trainable[name], entries)
    return LearnedHyperparameters(names, logarithms)


def _trainable(model: Any) -> dict[str, Tensor]:
    if isinstance(model, nn.Module):
        named: dict[str, Tensor] = dict(model.named_parameters())
    elif isinstance(model, Mapping) and all(isinstance(leaf, Tensor) for leaf in model.values()):
        named = dict(model)
    else:
        raise TypeError(
            f"`model` must be a module or a dictionary of tensors, got {type(model).__name__} {model!r:.200}"
        )
    trainable = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if not trainable:
        raise ValueError(f"`model` must have a trainable parameter, got {len(named)} parameters, all frozen")
    return trainable


def _of_patterns(
    argument: str, patterns: Mapping[str, Any], trainable: Mapping[str, Tensor]
) -> dict[str, tuple[str, Any]]:
    """The name of each parameter → its pattern, and the number of that."""
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"`{argument}` must have patterns of names for keys, got {pattern!r:.200}")
    check_patterns(argument, patterns, list(trainable))
    matched = {name: first_match(name, patterns) for name in trainable}
    if left := [name for name, pattern in matched.items() if pattern is None]:
        raise ValueError(
            f"`{argument}` must have a pattern for each trainable parameter, and none matches {listed(left)}: "
            'let the last one be "*"'
        )
    return {name: (pattern, patterns[pattern]) for name, pattern in matched.items() if pattern is not None}


def _check_positive(argument: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{argument}` must be a number, or map patterns to numbers, got {value!r:.200}")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"`{argument}` must be above 0, since its logarithm is learned, got {value}")


def _logarithm(value: float, like: Tensor, entries: bool) -> Tensor:
    """The first logarithm, at least in float32: a half has too few digits for small steps."""
    dtype = torch.promote_types(like.real.dtype if like.is_complex() else like.dtype, torch.float32)
    shape = like.shape if entries else ()
    return torch.full(shape, math.log(value), dtype=dtype, device=like.device)
