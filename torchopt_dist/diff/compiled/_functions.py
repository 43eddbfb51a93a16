"""A loss, an optimizer, one step's tensors → what the step makes, in a form that torch's compiler can trace.

What a loop does by a copied module, views, caches and checks is written here once more without them: each function
takes all its tensors as arguments, and makes no other. The compiler makes a program of each where nothing is recorded,
and one with its backward where grad mode is on. Both call the loss, and take its gradient by ``torch.autograd.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchopt_dist.core.programs import detached
from torchopt_dist.core.types import OptionalTensor, OptState
from torchopt_dist.core.vjp import leaf_like
from torchopt_dist.diff.adjoints._loop import Carry, Loop
from torchopt_dist.diff.adjoints._model import Model, ModuleModel
from torchopt_dist.diff.compiled._flat import FlatModel, Pieces
from torchopt_dist.formulas.traced import TracedFormulas
from torchopt_dist.nn.module_state import module_clone
from torchopt_dist.transform.apply_updates import apply_updates
from torchopt_dist.transform.base import GradientTransformation

__all__ = [
    "Outside",
    "Parts",
    "constants_of_loop",
    "gradient",
    "parts_of_loop",
    "pulled_step",
    "step",
]


class Parts(NamedTuple):
    """What a step is made of, beside its tensors."""

    call: Callable[..., Any]
    """A module that has the loss and the adapted module, or the loss of a tree."""
    optimizer: GradientTransformation
    template: Any
    """The tree of the parameters as the optimizer takes them, with the place of each leaf instead of it."""
    moved: tuple[int, ...]
    """The places of the leaves that are moved."""
    first: tuple[int, ...]
    """For each leaf the place where it stands first: a tied one stands at several."""
    argument: Any
    """The tree of the parameters as the loss takes them, with the place of each leaf instead of it."""
    argument_first: tuple[int, ...]
    """As ``first``, of the leaves for the loss."""
    pieces: Pieces | None
    """Which parts of the only leaf are leaves for the loss; ``None``: they are the same leaves."""
    buffers: tuple[str, ...]
    """The names of the module's buffers."""
    has_aux: bool

    @property
    def kind(self) -> tuple[Any, ...]:
        """All but the functions, to be compared."""
        trees = [optree.tree_structure(tree) for tree in (self.template, self.argument)]
        return (*trees, *self[3:5], *self[6:])


class Outside(NamedTuple):
    """Tensors that are the same in all steps of a loop."""

    constants: list[OptionalTensor]
    """See :func:`constants_of_loop`."""
    declared: list[Tensor]
    """Those that the loss or the optimizer uses and that others stand for; empty, unless some do."""
    others: list[Tensor]
    """What stands for each of ``declared``."""

    def substituted(self) -> AbstractContextManager[Any]:
        """A context in which the others are in the places of ``declared``."""
        return _Substitute(self.declared, self.others) if self.declared else nullcontext()


class _Substitute(TorchFunctionMode):
    """As :class:`torchopt_dist.core.substitution.Substitute`, in words that the compiler can trace."""

    def __init__(self, found: list[Tensor], others: list[Tensor]) -> None:
        super().__init__()
        self.found, self.others = found, others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: self._other(arg) for name, arg in (kwargs or {}).items()}
        return func(*[self._other(arg) for arg in args], **named)

    def _other(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            for found, other in zip(self.found, self.others, strict=True):
                if arg is found:
                    return other
        if type(arg) in (tuple, list):
            return type(arg)([self._other(part) for part in arg])
        return arg


class _LossOfModule(nn.Module):
    """The loss as a module around the adapted one, so that all tensors of the latter can be given by name."""

    def __init__(self, adapted: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.adapted = adapted
        self._loss = loss

    def forward(self, *batch: Any) -> Any:
        """Call the loss."""
        return self._loss(self.adapted, *batch)


def parts_of_loop(loop: Loop) -> Parts:
    """Take from a loop what its steps are made of."""
    model = loop.model
    of_loss, pieces = (model.model, model.pieces) if isinstance(model, FlatModel) else (model, None)
    call: Callable[..., Any] = loop.loss
    names: tuple[str, ...] = ()
    if isinstance(of_loss, ModuleModel):
        call = _LossOfModule(module_clone(of_loss.module), loop.loss)
        names = tuple(name for name, _ in of_loss.module.named_buffers())
    return Parts(
        call,
        loop.optimizer,
        _places(model),
        tuple(model.moved_places),
        tuple(model.first_places),
        _places(of_loss),
        tuple(of_loss.first_places),
        pieces,
        names,
        loop.has_aux,
    )


def constants_of_loop(loop: Loop) -> list[OptionalTensor]:
    """The leaves for the loss where the loop moves a vector, ``None`` for those that are in it."""
    if not isinstance(loop.model, FlatModel):
        return []
    in_vector = {place for place, *_ in loop.model.pieces}
    return [None if place in in_vector else leaf for place, leaf in enumerate(loop.model.model.leaves)]


def _places(model: Model) -> Any:
    places: Any = list(range(len(model.leaves)))
    return model.tree(places)


def gradient(
    parts: Parts,
    carry: Carry,
    outside: Outside,
    batch: tuple[Any, ...],
    record: bool,
) -> tuple[Tensor, Any, list[OptionalTensor], list[Tensor]]:
    """As :meth:`Loop.gradient`: the loss, what else it returned, a gradient for each leaf, and the buffers after it."""
    with torch.enable_grad():
        leaves = list(carry.params)
        for place in parts.moved:
            leaf = leaves[place]
            leaves[place] = leaf.view_as(leaf) if record else leaf_like(leaf)
        wanted = [leaves[place] for place in parts.moved]
        value, buffers = _called(parts, _for_loss(parts, leaves, outside), carry.buffers, batch, outside)
        aux = None
        if parts.has_aux:
            value, aux = value
        loss = value.reshape(())
        found = torch.autograd.grad(loss, wanted, create_graph=record, allow_unused=True)
    grads: list[OptionalTensor] = [None] * len(leaves)
    for place, grad in zip(parts.moved, found, strict=True):
        grads[place] = grad
    if not record:
        loss, buffers = loss.detach(), [buffer.detach() for buffer in buffers]
        aux = detached(aux)
    return loss, aux, grads, buffers


def step(
    parts: Parts,
    carry: Carry,
    outside: Outside,
    batch: tuple[Any, ...],
    record: bool,
) -> tuple[list[Tensor], OptState, list[Tensor], Tensor, Any]:
    """As :meth:`Loop.recorded_step`: the parameters, the state and the buffers after a step, its loss, what else."""
    loss, aux, grads, buffers = gradient(parts, carry, outside, batch, record)
    template = parts.template
    params = _filled(template, carry.params)
    with outside.substituted():
        updates, state = parts.optimizer.update(
            _filled(template, grads), carry.state, params=params, inplace=False
        )
    leaves = _leaves(template, apply_updates(params, updates, inplace=False))
    return [leaves[place] for place in parts.first], state, buffers, loss, aux


def pulled_step(
    parts: Parts,
    carry: Carry,
    places: list[int],
    declared: list[Tensor],
    outside: Outside,
    batch: tuple[Any, ...],
    bars: list[Tensor],
    loss_bar: OptionalTensor,
) -> list[OptionalTensor]:
    """As :meth:`Loop.pulled_step`, where ``bars`` are of the parameters, then of the state, and none is missing."""
    with torch.enable_grad():
        params, (state, spec) = list(carry.params), optree.tree_flatten(carry.state, none_is_leaf=True)
        for place in parts.moved:
            params[place] = leaf_like(params[place])
        for place in places:
            state[place] = leaf_like(state[place])
        inputs = [*(params[place] for place in parts.moved), *(state[place] for place in places), *declared]
        given = Carry(
            [params[place] for place in parts.first], optree.tree_unflatten(spec, state), carry.buffers
        )
        moved, state_after, _, loss, _ = step(parts, given, outside, batch, True)
        after = optree.tree_leaves(state_after, none_is_leaf=True)
        outputs = [*(moved[place] for place in parts.moved), *(after[place] for place in places)]
        pairs = [*zip(outputs, bars, strict=True), *([] if loss_bar is None else [(loss, loss_bar)])]
        pairs = [(output, bar) for output, bar in pairs if output.requires_grad]
        return list(
            torch.autograd.grad(
                [output for output, _ in pairs], inputs, [bar for _, bar in pairs], allow_unused=True
            )
        )


def _for_loss(parts: Parts, leaves: list[Tensor], outside: Outside) -> list[Tensor]:
    """The leaves that the loss takes."""
    if parts.pieces is not None:
        vectors = leaves[0].split([size for _, size, _ in parts.pieces])  # whose gradient is one `cat`
        found: list[Any] = list(outside.constants)
        for (place, _, shape), vector in zip(parts.pieces, vectors, strict=True):
            found[place] = vector.view(shape)
        return [found[place] for place in parts.argument_first]
    return [leaves[place] for place in parts.argument_first]


def _called(
    parts: Parts,
    leaves: Sequence[Tensor],
    buffers: Sequence[Tensor],
    batch: tuple[Any, ...],
    outside: Outside,
) -> tuple[Any, list[Tensor]]:
    given = _filled(parts.argument, leaves)
    if not isinstance(parts.call, _LossOfModule):
        with outside.substituted(), TracedFormulas():
            return parts.call(given, *batch), []
    tensors = {f"adapted.{name}": leaf for name, leaf in given.items()}
    for name, buffer in zip(parts.buffers, buffers, strict=True):
        tensors[f"adapted.{name}"] = buffer.clone()
    with outside.substituted(), TracedFormulas():
        value = torch.func.functional_call(parts.call, tensors, batch)
    return value, [tensors[f"adapted.{name}"] for name in parts.buffers]


def _filled(template: Any, leaves: Sequence[Any]) -> Any:
    """The tree of these leaves."""
    return optree.tree_map(lambda place: leaves[place], template)


def _leaves(template: Any, tree: Any) -> list[Any]:
    """The leaves of a tree, each at its place."""
    found: dict[int, Any] = {}
    optree.tree_map(lambda place, leaf: found.setdefault(place, leaf), template, tree)
    return [found[place] for place in range(len(found))]
