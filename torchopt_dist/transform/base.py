"""Gradients and a state → updates and the next state: the shape of every optimizer here.

A transformation is two functions. ``init(params)`` makes the first state, and ``update(updates, state,
params=...)`` turns gradients into what is to be added to the parameters. All memory is in the state, and with
``inplace=False`` the functions are pure. They are ``functools.partial`` of module-level functions, so that a
transformation can be pickled, copied, batched by ``vmap`` and compiled.

To write one: a ``NamedTuple`` for its state whose fields are trees of the parameters' structure or single
tensors (torch's names for them, such as ``momentum_buffer``; a counter is called ``step``), a function for
``init``, one for ``update``, and the constructor that checks its arguments and binds both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, Updates
from torchopt_dist.transform._fused_step import FusedStep
from torchopt_dist.transform._gradients import mend_recorded
from torchopt_dist.transform._hyperparameters import is_per_leaf, is_schedule, plain_rates

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "ChainedGradientTransformation",
    "EmptyState",
    "GradientTransformation",
    "InitFn",
    "UpdateFn",
    "chain",
    "identity",
    "is_of_elements",
    "link_of_whole",
    "of_elements",
    "stateless",
]


class InitFn(Protocol):
    """Parameters → the first state."""

    def __call__(self, params: Params, /) -> OptState:
        """Make the state; it shares no memory with ``params``."""


class UpdateFn(Protocol):
    """Gradients, state → updates, next state."""

    def __call__(
        self, updates: Updates, state: OptState, *, params: Params | None = None, inplace: bool = False
    ) -> tuple[Updates, OptState]:
        """Transform once.

        Args:
            updates: gradients, or what another transformation made of them; a tree of the parameters'
                structure. A leaf that is ``None`` stays ``None`` and its state stays as it is. Never
                overwritten.
            state: from ``init`` or from the last ``update``.
            params: the parameters, for transformations that look at them.
            inplace: if True, may overwrite the tensors of ``state`` where no graph is recorded
                (``torch.no_grad``); the returned updates may then share memory with the state. Without it, the
                function is pure.

        Returns:
            The updates, to be added to the parameters, and the next state.
        """


class EmptyState(NamedTuple):
    """The state of a transformation without state."""


class GradientTransformation(NamedTuple):
    """A gradient transformation: a pair of functions, pure with ``inplace=False``.

    Example:
        >>> import torch
        >>> from torchopt_dist.optim.sgd import sgd
        >>> init, update = sgd(lr=0.5)
        >>> updates, state = update({"w": torch.ones(2)}, init({"w": torch.zeros(2)}))
        >>> updates["w"]
        tensor([-0.5000, -0.5000])
    """

    init: InitFn
    """Parameters → state."""
    update: UpdateFn
    """Gradients, state, ``params=``, ``inplace=`` → updates, next state."""

    @property
    def constant_factor(self) -> float | None:
        """The number that updates are multiplied by, if that is all that the transformation does."""
        return None


F = TypeVar("F", bound=Callable[..., Any])


class _Elements(NamedTuple):
    """What is declared of an update by :func:`of_elements`."""

    masks: bool
    norms: bool
    inner: Callable[..., GradientTransformation] | None


def of_elements(
    *,
    masks: bool = False,
    norms: bool = False,
    inner: Callable[..., GradientTransformation] | None = None,
) -> Callable[[F], F]:
    """Declare that an update does to each element of a tensor what it does to a tensor of that element alone.

    Then an optimizer can work on parts of parameters (``shard=`` of :class:`~torchopt_dist.DataParallel`) and on one
    vector of all of them (``compile=True`` of :func:`~torchopt_dist.inner_loop`), the latter where its arguments are
    ``None``, numbers, tensors of one element and functions. Links of which this is not declared are refused there, or
    run as they are. Transformations among the arguments of an update, which it calls, have to be declared themselves.

    Args:
        masks: whether an argument that is a function is one of the parameters, as a mask is, and not of the step.
        norms: whether it also goes by the norm of all tensors, which that of a part is not.
        inner: the update's arguments → a transformation that it makes of them and calls.

    Returns:
        A decorator of the function that is the ``update`` of a :class:`GradientTransformation`, or of which the update
        is a ``functools.partial``.

    Example:
        >>> import torch
        >>> from torchopt_dist import pytree
        >>> @of_elements()
        ... def signs(updates, state, *, params=None, inplace=False):
        ...     return pytree.map_tensors(torch.sign, updates), state
        >>> is_of_elements(chain(GradientTransformation(stateless, signs)))
        True
    """

    def marked(update: F) -> F:
        vars(update)["of_elements"] = _Elements(masks, norms, inner)
        return update

    return marked


def is_of_elements(impl: GradientTransformation) -> bool:
    """Whether a transformation does the same to one vector of all parameters as to each of them."""
    if isinstance(impl, ChainedGradientTransformation):
        return all(map(is_of_elements, impl.transformations))
    declared, given = _declared(impl)
    if declared is None or declared.inner is not None:
        return False
    return all(_is_of_all(value) or (_is_function(value) and not declared.masks) for value in given)


def link_of_whole(impl: GradientTransformation) -> str | None:
    """The name of a link that needs whole parameters, or is not declared to do without; ``None`` if there is none."""
    if isinstance(impl, ChainedGradientTransformation):
        return next(filter(None, map(link_of_whole, impl.transformations)), None)
    declared, given = _declared(impl)
    if declared is None or declared.norms:
        return _name_of(impl)
    if declared.inner is not None:
        return link_of_whole(declared.inner(*given))
    for value in given:
        if (declared.masks and _is_function(value)) or any(
            isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in _values_in(value)
        ):
            return _name_of(impl)
        for one in (value, *_values_in(value)):
            if isinstance(one, GradientTransformation) and (found := link_of_whole(one)):
                return found
    return None


def _declared(impl: GradientTransformation) -> tuple[_Elements | None, list[Any]]:
    update: Any = impl.update
    given: list[Any] = []
    if isinstance(update, partial):
        update, given = update.func, [*update.args, *update.keywords.values()]
    return getattr(update, "of_elements", None), given


def _is_of_all(value: Any) -> bool:
    """Whether an argument is known to mean the same for every parameter."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.ndim < 2
    return value is None or isinstance(value, (bool, int, float))


def _is_function(value: Any) -> bool:
    return is_schedule(value) and not is_per_leaf(value)


def _values_in(value: Any) -> list[Any]:
    if isinstance(value, GradientTransformation):
        return []
    value = plain_rates(value)
    if isinstance(value, Mapping):
        return [leaf for one in value.values() for leaf in _values_in(one)]
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in _values_in(one)]
    return [value]


_LINKS = {
    "clip": "clip_grad_norm",
    "hook": "register_hook",
    "lamb": "scale_by_trust_ratio",
    "muon": "orthogonalize",
}
"""Of files that are not named after the link whose ``update`` is theirs."""


def _name_of(impl: GradientTransformation) -> str:
    update: Any = impl.update
    function = update.func if isinstance(update, partial) else update
    home = str(getattr(function, "__module__", "")).split(".")
    if home[0] == "torchopt_dist":
        return _LINKS.get(home[-1], home[-1])
    return getattr(function, "__qualname__", type(function).__name__)


class ChainedGradientTransformation(GradientTransformation):
    """Transformations run one after another; a chain in a chain becomes part of it.

    Its state is a tuple, one state a link.
    """

    def __new__(
        cls,
        *transformations: GradientTransformation,
        fused_step: FusedStep | None = None,
    ) -> Self:
        """Chain the transformations; none at all is the identity.

        The two fields, ``init`` and ``update``, also make the chain again; libraries that take trees apart need that.

        Args:
            transformations: the links.
            fused_step: whole steps with the same values as the links and less memory traffic; if not given, those of
                the last transformation, after the links before it.

        Raises:
            TypeError: one of them is not a gradient transformation.
        """
        if len(transformations) == 2 and not any(
            isinstance(one, GradientTransformation) for one in transformations
        ):
            init, update = cast("tuple[InitFn, UpdateFn]", transformations)
            return super().__new__(cls, init, update)
        links = _links(transformations)
        if fused_step is None and transformations:
            last = transformations[-1]
            if isinstance(last, ChainedGradientTransformation):
                fused_step = last.fused_step.after(len(links) - len(last.transformations))
        return super().__new__(
            cls, partial(_chain_init, links), partial(_chain_update, links, fused_step or FusedStep())
        )

    @property
    def transformations(self) -> tuple[GradientTransformation, ...]:
        """The links; if a field has been replaced by another function, the chain itself is the only link."""
        own = _own_arguments(self)
        return (GradientTransformation(self.init, self.update),) if own is None else own[0]

    @property
    def fused_step(self) -> FusedStep:
        """Whole steps from gradients to moved parameters, if the chain has any."""
        own = _own_arguments(self)
        return FusedStep() if own is None else own[1]

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.transformations!r}"


def no_transformation(argument: str, got: object) -> TypeError:
    """The error for an argument that must be a transformation; for a class of ours it names the function to call."""
    text = f"`{argument}` must be a GradientTransformation, got {type(got).__name__}"
    if isinstance(got, type):
        text = f"{text} {got.__name__}"
        constructor = getattr(got, "transformation", None)
        if constructor is not None:
            text = f"{text}: the function `{constructor.__name__}(...)` makes one"
    elif callable(got):
        name = getattr(got, "__qualname__", type(got).__name__)
        text = f"{text} {name}: call it with its arguments"
    return TypeError(text)


def _links(transformations: Sequence[Any]) -> tuple[GradientTransformation, ...]:
    links: list[GradientTransformation] = []
    for place, link in enumerate(transformations):
        if isinstance(link, ChainedGradientTransformation):
            links.extend(link.transformations)
        elif isinstance(link, GradientTransformation):
            links.append(link)
        else:
            raise no_transformation(f"transformations[{place}]", link)
    return tuple(links)


def _own_arguments(
    impl: GradientTransformation,
) -> tuple[tuple[GradientTransformation, ...], FusedStep] | None:
    """The arguments of a chain's two functions; ``None`` if they do not belong to one chain."""
    init, update = impl
    if not isinstance(init, partial) or not isinstance(update, partial):
        return None
    if init.func is not _chain_init or update.func is not _chain_update or len(init.args) != 1:
        return None
    links, fused_step = update.args
    return (links, fused_step) if init.args[0] is links or init.args[0] == links else None


def _chain_init(links: tuple[GradientTransformation, ...], params: Params) -> OptState:
    return tuple(link.init(params) for link in links)


def _chain_update(
    links: tuple[GradientTransformation, ...],
    fused_step: FusedStep,
    updates: Updates,
    state: OptState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    if not isinstance(state, tuple) or len(state) != len(links):
        raise ValueError(
            f"`state` must be a tuple of {len(links)} states, one for each link of the chain, got {state!r}"
        )
    if params is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        mend_recorded(pytree.flatten(updates)[0], pytree.flatten(params)[0])
    states = []
    for link, link_state in zip(links, state, strict=True):
        updates, link_state = link.update(updates, link_state, params=params, inplace=inplace)
        states.append(link_state)
    return updates, tuple(states)


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Run transformations one after another, each on what the one before made.

    Args:
        transformations: any number of transformations; none is the identity.

    Returns:
        One transformation; its state is the tuple of theirs.

    Raises:
        TypeError: one of them is not a gradient transformation.
    """
    _links(transformations)  # two that are no transformations are not taken for the fields of a chain
    return ChainedGradientTransformation(*transformations)


def stateless(params: Params, /) -> EmptyState:
    """The ``init`` of a transformation without state."""
    return EmptyState()


@of_elements()
def _identity_update(
    updates: Updates, state: OptState, *, params: Params | None = None, inplace: bool = False
) -> tuple[Updates, OptState]:
    return updates, state


def identity() -> GradientTransformation:
    """The transformation that leaves gradients as they are."""
    return GradientTransformation(stateless, _identity_update)
