"""What a caller has, sent by reference → on a worker an object that gives it, connected to the call; handles of values.

The value of an ``RRef`` that the caller owns travels in the message, like any argument, if something in it requires
grad. Of an ``RRef`` that another worker owns, a tensor without elements travels, which requires grad: the *hook*. The
worker fetches the value by a call with the hook among its arguments, and on the owner the value is connected to the
hook. A backward so finds its way to the owner, where the gradients are added to those of the owner's own tensors.

A module whose tensors the workers have, and a handle of any value, are in a message what stands for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor, nn

from torchopt_dist.core.inputs import hold_grad_accumulators
from torchopt_dist.core.random_turns import lent
from torchopt_dist.errors import ResidentError
from torchopt_dist.nn.module_state import extract_state_dict, module_clone, recover_state_dict
from torchopt_dist.torch_private import engine_captures_leaf, transforms_are_active

__all__ = ["ConnectedRRef", "Handle", "Reference", "StayingModule", "carried_by", "hook_of", "requires_grad"]


class Handle:
    """Stands in a message for a value that workers fetch, as long as the handle lives."""

    __slots__ = ()


class StayingModule(nn.Module):
    """Takes the place of its only child in calls; the function gets the child."""

    module: nn.Module

    def staying(self) -> tuple[Tensor, tuple[int, int], int, Sequence[Tensor]]:
        """The hook, the key, the version and the tensors; raises if the workers' are not the same."""
        raise NotImplementedError


def hook_of(parameters: Sequence[Tensor]) -> Tensor:
    """A tensor without elements, in the places of a mirror's parameters in the caller's graph of a call."""
    if transforms_are_active() or not torch.is_grad_enabled():  # a call has no graph there
        return torch.zeros(0, requires_grad=bool(parameters), device="cpu")
    apply: Callable[..., Tensor] = _Hook.apply
    return apply(*parameters)


class _Hook(torch.autograd.Function):
    """Parameters → their hook; they get no gradients from there, since these stay on the workers."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        del parameters
        ctx.set_materialize_grads(False)
        return torch.zeros(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, ...]:
        del grad
        if any(engine_captures_leaf(node) for node, _ in ctx.next_functions):
            raise RuntimeError(
                "torch.autograd.grad was asked for gradients of a mirror's parameters, which stay on the workers: "
                "call backward() of the loss, or pass the module itself instead of its mirror"
            )
        return (None,) * len(ctx.next_functions)


class Reference:
    """A reference to a value that requires grad; ``put(value)`` makes one.

    A function that gets it as an argument, alone, in a tree or in a closure, calls :meth:`to_here` or
    :meth:`local_value`. The value travels with each call, once to each worker, and is a part of the autograd graph like
    every argument: gradients flow back to the tensors that the caller has put.
    """

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value: tuple[Any, ...] = (value,)

    def local_value(self) -> Any:
        """The value itself. On a worker all tasks of a call share it.

        Raises:
            ResidentError: the reference is closed.
        """
        if not self._value:
            raise ResidentError("a reference was used after it had been closed: `put` the value again")
        return self._value[0]

    def to_here(self, timeout: float = -1.0) -> Any:
        """The value, with modules of its own, which hold the same tensors: setting their parameters changes no other.

        Args:
            timeout: for an RRef of another worker, seconds after which fetching the value fails; if negative, there is
                no limit.
        """
        del timeout
        return _with_new_modules(self.local_value())

    @property
    def value(self) -> Any:
        """What :meth:`local_value` returns."""
        return self.local_value()

    def close(self) -> None:
        """Let go of the value."""
        self._value = ()

    def __repr__(self) -> str:
        held = type(self._value[0]).__name__ if self._value else "closed"
        return f"<{type(self).__name__}: {held}>"


class ConnectedRRef(Reference):
    """An ``RRef`` as a task gets it: its value is connected to the call while this runs; all else is the RRef's.

    The tuple ``value`` is empty unless the caller owns it; a value of another worker is to be connected to ``hook``.
    """

    __slots__ = ("_ask", "_lock", "_outlives", "hook", "rref")

    def __init__(self, rref: Any, value: tuple[Any, ...], hook: Tensor | None) -> None:
        self.rref = rref
        self.hook = hook
        self._value = value
        self._ask: Callable[..., Any] | None = None
        self._outlives = False
        self._lock = threading.Lock()

    def begin(self, ask: Callable[..., Any], *, outlives: bool) -> None:
        """The call begins; ``outlives``: more than one worker may run the call, and its backward."""
        self._ask, self._outlives = ask, outlives

    def end(self) -> None:
        """The call has ended: who has kept this gets from now on what the RRef gives."""
        self._value, self.hook, self._ask = (), None, None

    def carried(self) -> tuple[Any, ...]:
        """The value and the hook, as they are sent on; empty if the call has ended."""
        if self.hook is not None:
            return (), self.hook
        return (self._value, None) if self._value else ()

    def local_value(self) -> Any:
        """See :class:`Reference`."""
        return self._here(-1.0) if self._ask else self.rref.local_value()

    def to_here(self, timeout: float = -1.0) -> Any:
        """See :class:`Reference`."""
        if self._ask is None:
            return self.rref.to_here() if timeout < 0 else self.rref.to_here(timeout)
        return _with_new_modules(self._here(timeout))

    def _here(self, timeout: float) -> Any:
        with self._lock:
            hook, ask = self.hook, self._ask
            if not self._value and hook is not None and ask is not None:
                if self.rref.is_owner():
                    self._value = (_connected(self.rref.local_value(), hook),)
                else:
                    owner, seconds = self.rref.owner().id, max(timeout, 0.0)
                    asked = ask(owner, _value_of, self, seconds=seconds, recorded=True)
                    with lent():
                        self._value = tuple(asked.result())
                if self._outlives and requires_grad(self._value):
                    self._value = ()
                    raise ValueError(
                        f"an RRef of {self.rref.owner_name()} refers to what requires grad, whose gradients are added "
                        "up there: leave out retries and hedge_after, with which a backward may run twice"
                    )
            return self._value[0]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """As the RRef, for torch's own RPC and for results."""
        return _itself, (self.rref,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rref, name)

    def __repr__(self) -> str:
        return repr(self.rref)


def carried_by(rref: Any) -> tuple[Any, ...]:
    """The value and the hook that travel with an RRef, or what a task has got for one; empty if it travels alone."""
    if isinstance(rref, ConnectedRRef):
        carried = rref.carried()
        if carried:
            return carried
        rref = rref.rref
    if rref.is_owner():
        try:
            value = rref.local_value()
        except Exception:  # of the function that was to make it, which `to_here` raises
            return ()
        return ((value,), None) if requires_grad(value) else ()
    if torch.is_grad_enabled() and not transforms_are_active():
        return (), torch.zeros(0, requires_grad=True, device="cpu")
    return ()


def requires_grad(value: Any) -> bool:
    """Whether a tensor, a module's or one of a tree of tensors and modules, requires grad."""
    for leaf in optree.tree_leaves(value):
        tensors = leaf.parameters() if isinstance(leaf, nn.Module) else [leaf]
        if any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
            return True
    return False


def _with_new_modules(value: Any) -> Any:
    return _mapped(value, lambda tensor: tensor)


def _mapped(value: Any, take: Callable[[Tensor], Tensor]) -> Any:
    """The tree with new modules, and with other tensors in the places of those that require grad."""
    taken: dict[int, Tensor | None] = {}

    def taking(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.requires_grad:
            return tensor
        if id(tensor) not in taken:
            taken[id(tensor)] = take(tensor)
        return taken[id(tensor)]

    def new(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            clone = module_clone(leaf)
            state = extract_state_dict(clone, with_buffers=False)
            params = tuple({name: taking(tensor) for name, tensor in held.items()} for held in state.params)
            recover_state_dict(clone, state._replace(params=params))
            return clone
        return taking(leaf) if isinstance(leaf, Tensor) else leaf

    return optree.tree_map(new, value)


def _connected(value: Any, hook: Tensor) -> Any:
    apply: Callable[..., Tensor] = _Connected.apply
    with torch.enable_grad():
        return _mapped(value, lambda tensor: apply(hook, [tensor]))


class _Connected(torch.autograd.Function):
    """A tensor of this worker's, as a function of the hook: its gradient stays here."""

    @staticmethod
    def forward(ctx: Any, hook: Tensor, held: list[Tensor]) -> Tensor:
        (tensor,) = held
        ctx.hook = hook.detach()
        ctx.held = [*hold_grad_accumulators(held), tensor][0]
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Other places may have the same gradient, and `.grad` becomes what is given here.
        torch.autograd.backward(ctx.held, grad.detach().clone(), retain_graph=True)
        return torch.zeros_like(ctx.hook), None


def _value_of(reference: Any) -> Any:
    """On the owner."""
    return reference.local_value()


def _itself(rref: Any) -> Any:
    """In a pickle: the RRef."""
    return rref
