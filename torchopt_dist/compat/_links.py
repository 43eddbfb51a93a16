"""TorchOpt's ways to build and to read optimizers → torchopt_dist's: ``chain.flat``, ``alias.utils``, fields of states.

``chain.flat`` there hands flat lists to its links. Links of torchopt_dist take any tree, so only foreign ones are given
lists here, and only ``flat`` of a foreign link has to be written. States stay what they are, with TorchOpt's names of
their fields as properties.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchopt_dist as todist
from torchopt_dist import pytree, transform
from torchopt_dist.compat import _orders
from torchopt_dist.transform.adam import ScaleByAdamState, ScaleByAmsgradState
from torchopt_dist.transform.adamax import ScaleByAdamaxState
from torchopt_dist.transform.add_decayed_weights import penalized
from torchopt_dist.transform.radam import ScaleByRAdamState
from torchopt_dist.transform.rmsprop import ScaleByRmsState, ScaleByStddevState
from torchopt_dist.transform.scale import ScaleByScheduleState
from torchopt_dist.transform.trace import TraceState

__all__ = ["ALIAS_UTILS", "TRANSFORM_UTILS", "chain", "chain_flat", "sgd", "without_identity"]

_ADAM = {"mu": "exp_avg", "nu": "exp_avg_sq", "count": "step"}
_FIELDS: dict[type, dict[str, str]] = {
    ScaleByAdamState: _ADAM,
    ScaleByAmsgradState: _ADAM,
    ScaleByAdamaxState: {"mu": "exp_avg", "nu": "exp_inf", "count": "step"},
    ScaleByRAdamState: _ADAM,
    ScaleByRmsState: {"nu": "square_avg"},
    ScaleByStddevState: {"mu": "grad_avg", "nu": "square_avg"},
    ScaleByScheduleState: {"count": "step"},
    TraceState: {"trace": "momentum_buffer"},
}
"""A state → TorchOpt's names of its fields, and what they are called here."""


def _flat_field(field: str, state: Any) -> list[Any]:
    """The tensors of a field, in the order of sorted keys; counts as integers."""
    leaves = pytree.flatten(getattr(state, field))[0]
    return [x.to(torch.int64) for x in leaves] if field == "step" else leaves


def chain(*transformations: transform.GradientTransformation) -> transform.GradientTransformation:
    """:func:`torchopt_dist.chain`; ``chain.flat`` is :func:`chain_flat`."""
    return todist.chain(*transformations)


def chain_flat(*transformations: transform.GradientTransformation) -> transform.GradientTransformation:
    """:func:`torchopt_dist.chain`, whose foreign links get flat lists of tensors."""
    chained = todist.chain(*transformations)
    links = getattr(chained, "transformations", ())
    if all(map(_takes_trees, links)):
        return chained
    return todist.chain(*(link if _takes_trees(link) else _flattening(link) for link in links))


def _takes_trees(link: transform.GradientTransformation) -> bool:
    update: Any = link.update
    function = update.func if isinstance(update, partial) else update
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torchopt_dist"


def _flattening(link: transform.GradientTransformation) -> transform.GradientTransformation:
    return transform.GradientTransformation(partial(_flat_init, link), partial(_flat_update, link))


def _flat_init(link: transform.GradientTransformation, params: Any, /) -> Any:
    return link.init(pytree.flatten(params)[0])


def _flat_update(
    link: transform.GradientTransformation,
    updates: Any,
    state: Any,
    *,
    params: Any = None,
    inplace: bool = True,
) -> Any:
    leaves, spec = pytree.flatten(updates)
    if params is not None:
        params = pytree.flatten_like(spec, params, "params", "updates")
    moved, state = link.update(leaves, state, params=params, inplace=inplace)
    return pytree.unflatten(spec, list(moved)), state


def without_identity(impl: transform.GradientTransformation) -> transform.GradientTransformation:
    """The same optimizer without a first link that does nothing, so that the state begins with what it remembers."""
    if not isinstance(impl, transform.ChainedGradientTransformation) or impl.fused_step.first_link:
        return impl
    first, *rest = impl.transformations
    if first != transform.identity():
        return impl
    return transform.ChainedGradientTransformation(*rest, fused_step=impl.fused_step)


def sgd(*args: Any, **options: Any) -> transform.GradientTransformation:
    """:func:`torchopt_dist.sgd`."""
    return without_identity(todist.sgd(*args, **options))


def scale_by_neg_lr(lr: Any) -> transform.GradientTransformation:
    """:func:`torchopt_dist.transform.scale_by_learning_rate`."""
    return transform.scale_by_learning_rate(lr)


def flip_sign_and_add_weight_decay(
    weight_decay: Any = 0.0, maximize: bool = False
) -> transform.GradientTransformation:
    """The links before an optimizer of torchopt_dist: the gradient of what is maximized, negated, and an L2 penalty."""
    return todist.chain(*penalized(weight_decay, maximize))


_uses_flat_chains = True


def _get_use_chain_flat() -> bool:
    """Whether programs that ask should build optimizers by ``chain.flat``."""
    return _uses_flat_chains


def _set_use_chain_flat(flag: bool) -> None:
    """Say what :func:`_get_use_chain_flat` answers; torchopt_dist's own optimizers are the same either way."""
    global _uses_flat_chains
    _uses_flat_chains = bool(flag)


def tree_map_flat(function: Callable[..., Any], flat_arg: Any, *flat_args: Any) -> Any:
    """Apply a function to the elements of flat lists; where the first list has ``None``, so has the result.

    Example:
        >>> tree_map_flat(lambda x, y: x + y, (1, None), (2, 3))
        (3, None)
    """
    mapped = (
        None if x is None else function(x, *rest) for x, *rest in zip(flat_arg, *flat_args, strict=True)
    )
    return tuple(mapped) if isinstance(flat_arg, tuple) else list(mapped)


def tree_map_flat_(function: Callable[..., Any], flat_arg: Any, *flat_args: Any) -> Any:
    """Call a function, which overwrites its first argument, as :func:`tree_map_flat` does; return the first list."""
    tree_map_flat(function, flat_arg, *flat_args)
    return flat_arg


def inc_count(updates: Any, count: Any) -> Any:
    """Add 1 to the counts whose update is not ``None``."""
    return pytree.tree_map(lambda c, g: c if g is None else c + 1, count, updates)


def update_moment(updates: Any, moments: Any, decay: Any, *, order: int, inplace: bool = True) -> Any:
    """``decay * moment + (1 - decay) * update**order`` for each update that is not ``None``."""

    def one(moment: Any, g: Any) -> Any:
        if g is None:
            return moment
        added = g if order == 1 else g.square() if order == 2 else g**order
        if inplace and isinstance(moment, Tensor):
            return moment.mul_(decay).add_((1 - decay) * added)
        return decay * moment + (1 - decay) * added

    return pytree.tree_map(one, moments, updates)


ALIAS_UTILS: dict[str, Any] = {
    "_get_use_chain_flat": _get_use_chain_flat,
    "_set_use_chain_flat": _set_use_chain_flat,
    "flip_sign_and_add_weight_decay": flip_sign_and_add_weight_decay,
    "scale_by_neg_lr": scale_by_neg_lr,
}
TRANSFORM_UTILS: dict[str, Any] = {
    "inc_count": inc_count,
    "tree_map_flat": tree_map_flat,
    "tree_map_flat_": tree_map_flat_,
    "update_moment": update_moment,
}

# Second names on the objects that there are, so that states and links that a program pickles stay these.
for state_type, fields in _FIELDS.items():
    for name, field in fields.items():
        setattr(state_type, name, property(partial(_flat_field, field)))
vars(chain)["flat"] = chain_flat
for link in (
    *(flip_sign_and_add_weight_decay, scale_by_neg_lr, transform.add_decayed_weights, transform.masked),
    *(_orders.nan_to_num, transform.scale, transform.scale_by_adadelta, transform.scale_by_adam),
    *(transform.scale_by_adamax, transform.scale_by_radam, transform.scale_by_rms, transform.scale_by_rss),
    *(transform.scale_by_schedule, transform.scale_by_stddev, transform.trace),
):
    vars(link)["flat"] = link
