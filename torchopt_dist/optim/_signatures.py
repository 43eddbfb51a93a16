"""The constructor of a transformation → the signature and the documentation of the classes made from it.

An optimizer is defined once, as a function such as ``sgd(lr, ...)``. ``class SGD(Optimizer,
transformation=sgd)`` and ``class MetaSGD(MetaOptimizer, transformation=sgd)`` take their arguments,
defaults and Args text from it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from torchopt_dist.arguments.options import close_to
from torchopt_dist.transform.base import GradientTransformation, no_transformation

__all__ = [
    "WAYS",
    "Constructor",
    "arguments_of",
    "bind",
    "check_group",
    "docstring",
    "only_transformation",
    "signature",
    "take",
]

Constructor = Callable[..., GradientTransformation]
WAYS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Torch's choices between ways to compute the same; a group may have any of them."""
P = ParamSpec("P")
Self = TypeVar("Self")
Target = TypeVar("Target")


def arguments_of(
    constructor: Callable[P, GradientTransformation], base: type
) -> Callable[[Callable[Concatenate[Self, Target, ...], None]], Callable[Concatenate[Self, Target, P], None]]:
    """Tell type checkers and editors that an ``__init__`` takes the arguments of a constructor after its target.

    Args:
        constructor: the function that makes the transformation; the ``transformation=`` of the class.
        base: the class whose ``__init__`` runs.

    Returns:
        A decorator of an ``__init__`` without a body. Statically the target is a positional argument.
    """
    del constructor
    init: Any = vars(base)["__init__"]
    return lambda _: init


def signature(
    constructor: Constructor, target: str, defaults: Mapping[str, Any], without: Collection[str] = ()
) -> inspect.Signature:
    """The signature of a class.

    Args:
        constructor: the function that makes the transformation.
        target: the class's first parameter, which the function has not (``params``, ``module``).
        defaults: defaults of the class that differ from the function's.
        without: parameters of the function that the class has not.
    """
    first = inspect.Parameter(target, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = [
        parameter.replace(default=defaults.get(name, parameter.default))
        for name, parameter in inspect.signature(constructor).parameters.items()
        if name not in without
    ]
    return inspect.Signature([first, *rest])


def bind(
    cls: type,
    signature: inspect.Signature,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """The function's arguments, by name and with defaults, from those that a class was called with.

    Raises:
        TypeError: an argument is missing, unknown or given twice; the message names the class.
    """
    if (found := _bound(signature, args, kwargs)) is not None:
        return found
    known = list(signature.parameters)
    if unknown := [name for name in kwargs if name not in known]:
        raise TypeError(
            f"{cls.__name__}: got an unexpected keyword argument {unknown[0]!r}{close_to(unknown[0], known)}; its "
            f"arguments are {', '.join(known)}"
        )
    try:
        bound = signature.bind(target, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{cls.__name__}: {error}") from None
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[1:])


def _bound(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """What ``signature.bind`` finds for all but the target, sooner; ``None`` where that is to say what is wrong."""
    found: dict[str, Any] = {}
    _, *parameters = signature.parameters.items()
    for place, (name, parameter) in enumerate(parameters):
        by_place = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if not by_place and (place < len(args) or parameter.kind is not parameter.KEYWORD_ONLY):
            return None
        if place < len(args) and name in kwargs:
            return None
        found[name] = args[place] if place < len(args) else kwargs.get(name, parameter.default)
        if found[name] is parameter.empty:
            return None
    if len(args) > len(parameters) or not kwargs.keys() <= found.keys():
        return None
    return found


def only_transformation(
    cls: type,
    signature: inspect.Signature,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> GradientTransformation:
    """The transformation that a class without a function of its own was called with.

    Raises:
        TypeError: as :func:`bind`; or it is not a gradient transformation.
    """
    impl = bind(cls, signature, target, args, kwargs)["impl"]
    if not isinstance(impl, GradientTransformation):
        raise no_transformation("impl", impl)
    return impl


def docstring(cls: type, constructor: Constructor, target_text: str, without: Collection[str] = ()) -> str:
    """The documentation of a class: its own, then Args and Raises of the function.

    Args:
        cls: the class; its docstring has no Args.
        constructor: the function; its docstring is in Google style.
        target_text: the entry of the class's first parameter.
        without: parameters of the function that the class has not.
    """
    sections = dict(
        re.findall(r"^(Args|Raises):\n((?:[ ]+.*\n|\n)+)", _doc(constructor) + "\n", re.MULTILINE)
    )
    entries = re.findall(r"^    \S.*\n(?:     +.*\n)*", sections.get("Args", ""), re.MULTILINE)
    kept = [entry for entry in entries if entry.split(":")[0].strip() not in without]
    text = f"{_doc(cls)}\n\nArgs:\n    {target_text}\n{''.join(kept)}"
    if "Raises" in sections:
        text += f"\nRaises:\n{sections['Raises'].rstrip()}\n"
    return text


def _doc(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "")


def take(
    names: Collection[str], own: Collection[str], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of a constructor → the class's own, and those that only torch's class has.

    Args:
        names: the names of the classes that are ours, the class's own first.
        own: the class's own options.
        kwargs: the arguments.

    Raises:
        ValueError: an option is set that changes what a step does.
    """
    theirs = _options(names) - set(own)
    taken = {name: value for name, value in kwargs.items() if name in theirs}
    if taken.get("differentiable"):
        raise ValueError(
            f"`differentiable` must be off, got {taken['differentiable']!r}: Meta{next(iter(names))} makes steps "
            "that one can differentiate through"
        )
    return {name: value for name, value in kwargs.items() if name not in taken}, taken


def check_group(
    names: Collection[str], own: Collection[str], settled: Mapping[str, bool], group: Mapping[str, Any]
) -> None:
    """Check that a group sets no option that this optimizer does not have.

    Args:
        names: the names of the classes that are ours, the class's own first.
        own: the class's own options.
        settled: options of torch's classes that tell this class from another, and the value that they have here.
        group: the parameter group.

    Raises:
        ValueError: it sets such an option.
    """
    cls = next(iter(names), "Optimizer")
    for name in sorted((_options(names) | set(settled)) - set(own) - WAYS):
        if bool(group.get(name, settled.get(name, False))) != settled.get(name, False):
            state = "on" if settled.get(name) else "off"
            raise ValueError(
                f"`{name}` must be {state}, as this {cls} has no such option, got {group[name]!r}"
            )


def _options(names: Collection[str]) -> set[str]:
    """Arguments of the class of torch that has one of these names; none if there is no such class."""
    twins = [getattr(torch.optim, name) for name in names if hasattr(torch.optim, name)]
    return {name for twin in twins for name in inspect.signature(twin).parameters} - {"params"}
