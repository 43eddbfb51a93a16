"""A torch optimizer class, a module → an optimizer that moves the module's parameters differentiably.

The formula is torch's own: a step makes an instance of the class over clones of the parameters, gives it the
gradients and clones of the state, and runs its ``step``; ``_recording_mode.py`` keeps the graph whole in that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_dist import pytree
from torchopt_dist.core.types import OptionalTensor, OptState
from torchopt_dist.ops._columns import pick, present, put
from torchopt_dist.optim import _recording_mode
from torchopt_dist.optim._state import flatten_with_keys, is_of_an_optimizer, restore_state
from torchopt_dist.optim.meta_optimizer import MetaOptimizer

__all__ = ["DifferentiableOptimizer", "differentiable"]

_OURS = ("differentiable", "foreach", "fused", "capturable")
"""Options of torch's classes that choose between implementations of one formula."""
_DRY_STEPS = 8
"""Steps after which every option has had an effect on the parameters: RAdam's ``eps`` has one at the sixth."""


def differentiable(
    optimizer_class: type[torch.optim.Optimizer], module: nn.Module, **options: Any
) -> DifferentiableOptimizer:
    """Make one of torch's differentiable optimizers a :class:`MetaOptimizer`.

    The values are those of the plain optimizer. Gradients flow back through all steps to the first parameters and to
    options given as tensors. Where an operation has no derivative, 0 is used (as for the root in Adam's denominator
    where all gradients have been 0), so that meta-gradients are finite.

    Args:
        optimizer_class: a class whose ``__init__`` takes ``differentiable=``: Adadelta, Adagrad, Adam,
            AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD, or a subclass of one.
        module: its parameters are moved; frozen ones (``requires_grad=False``) stay as they are.
        options: the options of the class: ``lr``, ``betas``, ... Numbers may be tensors of one element, which then get
            gradients; the class takes a tensor to be above 0, whatever its value.

    Raises:
        TypeError: ``optimizer_class`` is not such a class, ``module`` is not a module, or an option is unknown.
        ValueError: the module has no parameters, an option is out of its range, or a tensor that requires
            grad would get no gradient.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> first = net.weight
        >>> differentiable(torch.optim.SGD, net, lr=0.25).step((net.weight**2).sum())
        >>> torch.autograd.grad(net.weight.sum(), first)
        (tensor([[0.5000]]),)
    """
    return DifferentiableOptimizer(module, optimizer_class, options)


class DifferentiableOptimizer(MetaOptimizer):
    """The optimizer of :func:`differentiable`: a torch optimizer's formula, used as a :class:`MetaOptimizer`.

    The state of a group is a dict, parameter name → torch's state of it, which is empty before the
    parameter's first gradient.

    Args:
        module: its parameters are moved.
        optimizer_class: the torch optimizer.
        options: its options, without ``params``.

    Raises:
        TypeError: as :func:`differentiable`.
        ValueError: as :func:`differentiable`.
    """

    impl: Any

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
    ) -> None:
        _check(optimizer_class, options)
        self.impl = _Formula(optimizer_class, options)
        self._options = None
        self._impls = []
        self.modules = []
        self._states = []
        self._dtypes = []
        self.add_param_group(module)
        self.impl.try_out(_like(module))

    def _transformation_with(self, module: nn.Module, options: dict[str, Any]) -> _Formula:
        _check(self.impl.optimizer_class, options)
        made = _Formula(self.impl.optimizer_class, {**self.impl.options, **options})
        made.try_out(_like(module))
        return made

    def _move(
        self, index: int, params: dict[str, Tensor], grads: list[OptionalTensor]
    ) -> tuple[list[Tensor], OptState]:
        leaves = list(params.values())
        state: Any = self._state_for(index, leaves)
        places = present(grads)
        if not places:
            return leaves, state
        names = list(params)
        own = [names[place] for place in places]
        given = [pick(leaves, places), pick(grads, places), [state[name] for name in own]]
        moved, states = self._impls[index].move(*given)
        after: list[Any] = put(leaves, places, moved)
        return after, {**state, **dict(zip(own, states, strict=True))}

    def _first_state(self, index: int) -> OptState:
        impl, state = self._impls[index], self._states[index]
        params = self.modules[index].named_parameters()
        return {name: impl.first_state(p) if state[name] else {} for name, p in params}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, as :meth:`MetaOptimizer.load_state_dict`."""
        if is_of_an_optimizer(state_dict):
            raise ValueError(
                "`state_dict` must be of an optimizer made by todist.differentiable; a todist.MetaOptimizer goes on "
                "from that of a torch optimizer"
            )
        saved = state_dict["state"]
        if len(saved) != len(self._states):
            raise ValueError(f"`state_dict` must have {len(self._states)} groups, got {len(saved)}")
        restored = []
        for impl, module, flat in zip(self._impls, self.modules, saved, strict=True):
            begun = {key.rpartition("/")[0] for key in flat}
            params = dict(module.named_parameters())
            like = {name: impl.first_state(p) if name in begun else {} for name, p in params.items()}
            restored.append(restore_state(like, flat))
        self._states = restored

    def set_states(self, states: Sequence[OptState]) -> None:
        """Continue from these states, as :meth:`MetaOptimizer.set_states`."""
        if len(states) != len(self._states):
            raise ValueError(f"`states` must be {len(self._states)}, one for each group, got {len(states)}")
        for impl, state, mine in zip(self._impls, states, self._states, strict=True):
            if not isinstance(state, dict) or state.keys() != mine.keys():
                got = list(state) if isinstance(state, dict) else type(state).__name__
                raise ValueError(f"`states` must have the parameters {list(mine)}, got {got}")
            for name, entry in state.items():
                if entry and entry.keys() != impl.entries:
                    raise ValueError(
                        f"`states` must have {sorted(impl.entries)} for each parameter, or nothing, got "
                        f"{sorted(entry)} for {name!r}"
                    )
        self._take_over(states)


class _Formula:
    """Parameters, gradients, states → moved parameters and next states, by a torch optimizer."""

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
        self.optimizer_class = optimizer_class
        self.options = dict(options)
        self.entries: set[str] = set()
        """The names in a parameter's state, once :meth:`try_out` has found them."""

    def init(self, params: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        return {name: {} for name in params}

    def move(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[dict[str, Any]]
    ) -> tuple[list[Tensor], list[dict[str, Any]]]:
        """Make one step, recorded even under ``torch.no_grad``; nothing given is written."""
        with torch.enable_grad():
            moved = [p.clone() for p in params]
            for tensor, grad in zip(moved, grads, strict=True):
                tensor.grad = grad.clone()
            options = pytree.map_tensors(_recording_mode.option, self.options)
            plain = {name: False for name in ("foreach", "fused") if _takes(self.optimizer_class, name)}
            with _recording_mode.RecordingMode():
                make: Callable[..., torch.optim.Optimizer] = self.optimizer_class
                engine = make(moved, differentiable=True, **plain, **options)
                for group in engine.param_groups:
                    # `differentiable=True` has switched recording on. Its second form of the formula divides
                    # by `lr`, which may be 0; the first form is the plain optimizer's, rounding included.
                    group["differentiable"] = False
                for tensor, state in zip(moved, states, strict=True):
                    if state:
                        engine.state[tensor] = pytree.map_tensors(torch.clone, state)
                engine.step()
            for tensor in moved:
                tensor.grad = None
            return moved, [dict(engine.state.get(tensor, {})) for tensor in moved]

    def first_state(self, param: Tensor) -> dict[str, Any]:
        """The shapes and dtypes of a parameter's state."""
        leaf = param.detach().clone().requires_grad_()
        _, (state,) = self.move([leaf], [torch.ones_like(leaf)], [{}])
        return {name: pytree.map_tensors(torch.detach, value) for name, value in state.items()}

    def try_out(self, like: Tensor) -> None:
        """Make trial steps on one number, and find the names in its state.

        Raises:
            TypeError: the optimizer's step does not record.
            ValueError: an option that requires grad has not been recorded.
        """
        paths, leaves, _ = flatten_with_keys(self.options)
        learned = {
            "".join([path[0], *(f"[{part}]" for part in path[1:])]): leaf
            for path, leaf in zip(paths, leaves, strict=True)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        }
        first = torch.ones(1, dtype=like.dtype, device=like.device, requires_grad=True)
        param: Tensor = first
        state: Any = {}
        for step in range(_DRY_STEPS if learned else 1):
            (moved,), (state,) = self.move([param], [param * (1 + step % 2)], [state])
            if not torch.equal(moved, param) and type(moved.grad_fn).__name__ == "CloneBackward0":
                raise TypeError(
                    f"`optimizer_class` must record its step, got {self.optimizer_class.__name__}, whose step "
                    "runs under torch.no_grad"
                )
            param = moved
        # Of the parameter alone: ASGD's average, which `t0` tells on in some steps, moves none.
        one = torch.ones_like(param)
        found = torch.autograd.grad(param, list(learned.values()), one, allow_unused=True) if learned else ()
        if lost := [name for name, grad in zip(learned, found, strict=True) if grad is None]:
            raise ValueError(
                f"{self.optimizer_class.__name__} finds no gradient for {lost}: give a number, or a tensor "
                "that does not require grad"
            )
        self.entries = set(state)


def _like(module: nn.Module) -> Tensor:
    """A parameter to take the dtype and the device of a trial from."""
    params = list(module.parameters())
    return next((p for p in params if p.is_floating_point() or p.is_complex()), params[0])


def _takes(optimizer_class: type, option: str) -> bool:
    """Whether ``__init__`` has this option, by itself or by passing ``**kwargs`` on."""
    for cls in optimizer_class.__mro__:
        if "__init__" in vars(cls):
            parameters = inspect.signature(vars(cls)["__init__"]).parameters
            if option in parameters:
                return True
            if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
                return False
    return False


def _check(optimizer_class: Any, options: Mapping[str, Any]) -> None:
    if not isinstance(optimizer_class, type):
        raise TypeError(
            f"`optimizer_class` must be a class, got an object of {type(optimizer_class).__name__}"
        )
    name = optimizer_class.__name__
    if not issubclass(optimizer_class, torch.optim.Optimizer):
        raise TypeError(f"`optimizer_class` must be a subclass of torch.optim.Optimizer, got {name}")
    if not _takes(optimizer_class, "differentiable"):
        offered = [c for c in vars(torch.optim).values() if inspect.isclass(c)]
        work = sorted(
            c.__name__
            for c in offered
            if issubclass(c, torch.optim.Optimizer) and _takes(c, "differentiable")
        )
        raise TypeError(
            f"`optimizer_class` must take `differentiable=`, got {name}; those of torch.optim that do are "
            f"{', '.join(work)}"
        )
    if given := [option for option in _OURS if option in options]:
        raise TypeError(f"`{given[0]}` must be left out: a step here is always recorded, tensor by tensor")
    try:
        inspect.signature(optimizer_class).bind(None, **options)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    for path, leaf in zip(*flatten_with_keys(dict(options))[:2], strict=True):
        if isinstance(leaf, Tensor) and leaf.numel() != 1:
            raise ValueError(f"`{path[0]}` as a tensor must have one element, got shape {tuple(leaf.shape)}")
        if isinstance(leaf, Tensor) and leaf.is_complex():
            raise TypeError(f"`{path[0]}` must be real, got a tensor of {leaf.dtype}")
