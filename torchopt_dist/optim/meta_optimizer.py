"""A loss → the module's parameters moved differentiably: each is replaced by a tensor with a history.

After ``optimizer.step(loss)`` the module computes with parameters through which gradients flow back to the
first ones, to hyper-parameters given as tensors, and to whatever else the loss was made of.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from torchopt_dist import pytree
from torchopt_dist.core.evaluation import NormalTensors, is_evaluating, need_gradients, with_gradients
from torchopt_dist.core.types import OptionalTensor, OptState
from torchopt_dist.core.unconnected import Unconnected, is_noted, note_unconnected
from torchopt_dist.core.vmap import for_each_sample, has_history, leaf, values_of
from torchopt_dist.diff.adjoints import Adjoint, Recorded
from torchopt_dist.diff.inner_loop import InnerLoopResult, inner_loop
from torchopt_dist.formulas.attention import attention_by_formula, without_fast_path
from torchopt_dist.formulas.embedding import let_padding_rest
from torchopt_dist.nn import _tensor_dicts
from torchopt_dist.nn._tensor_copier import TensorCopier, deepcopy_memo
from torchopt_dist.optim import _signatures as signatures
from torchopt_dist.optim._recomputation import NoRecomputation
from torchopt_dist.optim._state import (
    Dtypes,
    dtypes_of,
    fitted,
    flatten_state,
    have_same_dtypes,
    is_of_an_optimizer,
    restore_state,
    trained_states,
)
from torchopt_dist.torch_private import transforms_are_active, vmaps
from torchopt_dist.transform._gradients import gradients
from torchopt_dist.transform.apply_updates import differentiable_step, with_gradients_added
from torchopt_dist.transform.base import GradientTransformation

if TYPE_CHECKING:
    from typing import Self

__all__ = ["MetaOptimizer"]

_MODULE_TEXT = "module: its parameters are moved; frozen ones (``requires_grad=False``) stay as they are."


class MetaOptimizer:
    """A gradient transformation that moves a module's parameters differentiably.

    The state and the parameters keep the graph of all steps. Cut it between tasks with
    ``stop_gradient(module)`` and ``stop_gradient(optimizer)``, or go back to a snapshot with
    ``extract_state_dict`` and ``recover_state_dict``; memory then stays flat.

    Args:
        module: its parameters are moved; frozen ones (``requires_grad=False``) stay as they are.
        impl: the gradient transformation. Subclasses that are made with ``transformation=`` take that
            function's arguments here.

    Raises:
        TypeError: ``module`` is not a module; ``impl`` is not a gradient transformation; an argument is unknown.
        ValueError: the module has no parameters, or an argument is out of its range.

    Example:
        >>> import torch
        >>> from torchopt_dist.optim.sgd import sgd
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> first = net.weight
        >>> MetaOptimizer(net, sgd(lr=0.25)).step((net.weight**2).sum())
        >>> torch.autograd.grad(net.weight.sum(), first)
        (tensor([[0.5000]]),)
    """

    transformation: ClassVar[signatures.Constructor | None] = None
    __signature__: ClassVar[inspect.Signature]
    _signature: ClassVar[inspect.Signature] = inspect.signature(lambda module, impl: ...)

    def __init_subclass__(
        cls, *, transformation: signatures.Constructor | None = None, **defaults: Any
    ) -> None:
        """Make a class from a function: ``class MetaSGD(MetaOptimizer, transformation=sgd)``.

        Args:
            transformation: constructor of a gradient transformation; its parameters become the class's.
            defaults: defaults that differ from the function's.
        """
        super().__init_subclass__()
        if transformation is not None:
            cls.transformation = staticmethod(transformation)
            cls._signature = signatures.signature(transformation, "module", defaults)
            cls.__signature__ = cls._signature
            cls.__doc__ = signatures.docstring(cls, transformation, _MODULE_TEXT)

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        cls = type(self)
        self._options: dict[str, Any] | None = None
        if self.transformation is None:
            self.impl = signatures.only_transformation(cls, self._signature, module, args, kwargs)
        else:
            self._options = signatures.bind(cls, self._signature, module, args, kwargs)
            self.impl = self.transformation(**self._options)
        self._impls: list[Any] = []
        self.modules: list[nn.Module] = []
        self._states: list[OptState] = []
        # Of a group's parameters, which its state fits; None: not known.
        self._dtypes: list[Dtypes | None] = []
        self.add_param_group(module)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say for what people write first, out of habit, what is written here."""
            if name == "zero_grad":
                raise AttributeError(
                    f"{type(self).__name__} has no `zero_grad`: `step(loss)` takes the gradient of this loss alone, "
                    "and leaves every `.grad` as it is; drop the line"
                )
            if name == "param_groups":  # which torch's schedulers ask for
                raise AttributeError(
                    f"{type(self).__name__} has no `param_groups`, so torch's schedulers refuse it: give a schedule, "
                    f"`{type(self).__name__}(module, lr=todist.schedule.linear_schedule(...))`. They take an outer "
                    "optimizer: one of torch.optim, or such as `todist.SGD(module.parameters(), ...)`"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def add_param_group(self, module: nn.Module, **options: Any) -> None:
        """Move another module's parameters too, with a state and, if wanted, options of their own.

        Args:
            module: the module, which may be a part of another one.
            options: arguments of the class, such as ``lr``, with values for this group.

        Raises:
            TypeError: it is not a module; an option is unknown, or the optimizer was made from a transformation.
            ValueError: it has no parameters, or one that another group has; an option is out of its range.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"`module` must be a torch.nn.Module, got {type(module).__name__}: "
                "give the module itself, not its parameters"
            )
        _, params = _tensor_dicts.parts_and_parameters(module)
        if not params:
            raise ValueError(f"`module` must have parameters, got {type(module).__name__} with none")
        known = {id(parameter) for other in self.modules for parameter in other.parameters()}
        if twice := [name for name, parameter in params.items() if id(parameter) in known]:
            raise ValueError(f"`module` must not share parameters with another group, got {twice}")
        impl = self._transformation_with(module, options) if options else self.impl
        need_gradients()
        if transforms_are_active() and vmaps():
            moving = {name: p for name, p in params.items() if values_of(p).values.requires_grad}
            with with_gradients():
                params |= {name: for_each_sample(p) for name, p in moving.items()}
            _tensor_dicts.replace(module.modules(), {id(p): params[name] for name, p in moving.items()})
            let_padding_rest(module)
        self.modules.append(module)
        self._impls.append(impl)
        self._states.append(impl.init(params))
        self._dtypes.append(dtypes_of(params.values()))

    def _transformation_with(self, module: nn.Module, options: dict[str, Any]) -> Any:
        """The transformation of a group with options of its own."""
        if self.transformation is None or self._options is None:
            raise TypeError(
                f"`{next(iter(options))}` must not be set for a group, as `impl` has its options already: give each "
                "group's parameters a transformation of their own by todist.transform.partition"
            )
        given = {**self._options, **options}
        return self.transformation(**signatures.bind(type(self), self._signature, module, (), given))

    def step(self, loss: Tensor | Callable[[], Tensor], *, first_order: bool = False) -> None:
        """Replace each parameter by the moved one, connected to the graph.

        A parameter that the loss does not depend on stays, and so does its state. Inside ``vmap`` each sample has
        parameters of its own from the optimizer's construction on.

        Args:
            loss: a tensor of one element, computed with the modules' parameters as they are now; the step is then
                recorded even under ``torch.no_grad``. Or a function that computes the tensor: it is called with
                gradients enabled, and attention in it computes by its formula, which has a second derivative; under
                ``torch.no_grad`` and ``torch.inference_mode`` nothing of the step is then recorded, and the moved
                parameters are leaves.
            first_order: treat the gradients as constants: the moved parameters stay connected to the ones before, and
                no derivative of a derivative is recorded, as in first-order MAML [Finn et al. 2017, section 5.2].

        Raises:
            TypeError: ``loss`` is not a tensor.
            ValueError: it has more than one element, or depends on none of the parameters; inside ``vmap``, the
                optimizer was made outside, or the loss was computed before it was made.
            RuntimeError: the step is recorded, and a backward pass would compute a part of the loss again, as with
                ``torch.utils.checkpoint``, but with the parameters of a later step. Use :meth:`run` for such a loss.
        """
        recorded = not is_evaluating()
        if not isinstance(loss, Tensor) and callable(loss):
            recorded = recorded and torch.is_grad_enabled()
            with self._computing(second_order=recorded and not first_order):
                loss = loss()
        else:
            need_gradients()
        parts, groups = zip(*map(_tensor_dicts.parts_and_parameters, self.modules), strict=True)
        create_graph = recorded and not first_order
        usual = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        recording = NoRecomputation(chain(*parts)) if create_graph else nullcontext()
        with nullcontext() if usual else with_gradients(), recording:
            leaves = [p for params in groups for p in params.values()]
            found = gradients(loss, leaves, create_graph=create_graph, retain_graph=True)
        with nullcontext() if usual and recorded else with_gradients(recorded):
            for index, params in enumerate(groups):
                own, found = found[: len(params)], found[len(params) :]
                moved, state = self._move(index, params, own)
                if not recorded:
                    pairs = zip(moved, params.values(), strict=True)
                    moved = [new if new is old else leaf(new) for new, old in pairs]
                    state = pytree.map_tensors(torch.detach, state)
                self._states[index] = state
                _tensor_dicts.replace(parts[index], dict(zip(map(id, params.values()), moved, strict=True)))
                if recorded and is_noted():
                    note_unconnected(Unconnected([values_of(new).values for new in moved], moved=True))

    def run(
        self,
        loss: Callable[..., Any],
        batches: Sequence[Any] | Iterable[Any] | Callable[[int], Any] | int,
        *,
        adjoint: Adjoint = Recorded(),
        meta: Any = None,
        **options: Any,
    ) -> InnerLoopResult:
        """Make all steps of an inner loop; the adjoint decides how its gradient is taken.

        This is :func:`torchopt_dist.inner_loop` on the optimizer's module, from the optimizer's state on. Afterwards
        the module has the adapted parameters and the buffers of the last step, and the optimizer the last state.

        Args:
            loss: ``loss(module, batch)``, or ``loss(module)`` if ``batches`` is a number, called with copies of the
                module.
            batches: a sequence, a ``DataLoader`` or another iterable, a function of the step's number (with
                ``steps=``), or a number of steps.
            adjoint: how the gradient is taken.
            meta: the tensors, trees and modules that the loss uses from outside.
            options: ``has_aux``, ``seed``, ``steps``, ``stop``, ``compile``, ``parallel``, ``diagnose``,
                ``accumulate``, ``progress`` and ``callback`` of :func:`torchopt_dist.inner_loop`.

        Returns:
            The result of the inner loop; its ``params`` is the optimizer's module.

        Raises:
            ValueError: the optimizer has several modules; and as :func:`torchopt_dist.inner_loop`.
            TypeError: the optimizer was made by :func:`differentiable`; and as :func:`torchopt_dist.inner_loop`.
        """
        if len(self.modules) != 1:
            raise ValueError(
                f"`run` needs an optimizer of one module, got {len(self.modules)}: make one of a torch.nn.ModuleList"
            )
        if not isinstance(self._impls[0], GradientTransformation):
            raise TypeError(
                "`run` needs a gradient transformation, which an optimizer of todist.differentiable does not have: "
                "make the steps one by one, or use one of todist's optimizers"
            )
        (module,) = self.modules
        state = self._state_for(0, list(module.parameters()))
        made = inner_loop(
            loss, self._impls[0], module, batches, meta=meta, adjoint=adjoint, state=state, **options
        )
        for part in (_tensor_dicts.parameter_containers, _tensor_dicts.buffer_containers):
            for old, new in zip(part(module.modules()), part(made.params.modules()), strict=True):
                old.update(new)
        self._states = [made.state]
        return made._replace(params=module)

    def _state_for(self, index: int, params: Sequence[Tensor]) -> OptState:
        """A group's state, in the dtypes of the parameters as they are now."""
        before, now = self._dtypes[index], dtypes_of(params)
        if before != now:
            self._states[index] = fitted(self._states[index], lambda: self._first_state(index), before, now)
            self._dtypes[index] = now
        return self._states[index]

    def _first_state(self, index: int) -> OptState:
        """What a group's state would be if it began now, in the place of the one that it has."""
        return cast("OptState", self._impls[index].init(dict(self.modules[index].named_parameters())))

    @contextmanager
    def _computing(self, *, second_order: bool) -> Iterator[None]:
        """A context to compute a loss in, so that it has a graph of that order."""
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                stack.enter_context(NormalTensors())
            if second_order:
                stack.enter_context(attention_by_formula())
            stack.enter_context(with_gradients())
            stack.enter_context(without_fast_path())
            yield

    def _move(
        self, index: int, params: dict[str, Tensor], grads: list[OptionalTensor]
    ) -> tuple[list[Tensor], OptState]:
        """Parameters of a group by name, a gradient each → moved ones, and the group's next state."""
        leaves = list(params.values())
        impl, state = self._impls[index], self._state_for(index, leaves)
        if (added := with_gradients_added(impl, leaves, grads)) is not None:
            return added, state
        moved: Any
        moved, state = differentiable_step(impl, params, dict(zip(params, grads, strict=True)), state)
        return [moved[name] for name in params], state

    def state_dict(self) -> dict[str, Any]:
        """The states as ``{'state': [{where: tensor}, ...]}``, a dict for each group, for ``torch.save``.

        The tensors are those of the state, history included.
        """
        return {"state": [flatten_state(state) for state in self._states]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, or from that of a trained ``torch.optim.Optimizer``, torch's or ours.

        Args:
            state_dict: the states; their tensors are taken over, not copied. That of a torch optimizer must hold all of
                the parameters in their order; its options are ignored, and a schedule continues at its number of steps.

        Raises:
            ValueError: it is of another optimizer or of a module with other parameters.
        """
        if is_of_an_optimizer(state_dict):
            self._take_over(trained_states(self._impls, self.modules, state_dict))
            return
        saved = state_dict["state"]
        if len(saved) != len(self._states):
            raise ValueError(f"`state_dict` must have {len(self._states)} groups, got {len(saved)}")
        self._states = [restore_state(like, flat) for like, flat in zip(self._states, saved, strict=True)]

    def get_states(self) -> tuple[OptState, ...]:
        """The states, one for each parameter group; the tensors are the same."""
        return tuple(self._states)

    def set_states(self, states: Sequence[OptState]) -> None:
        """Continue from these states.

        Raises:
            ValueError: their number or the structure of one differs.
        """
        if len(states) != len(self._states):
            raise ValueError(f"`states` must be {len(self._states)}, one for each group, got {len(states)}")
        for state, mine in zip(states, self._states, strict=True):
            pytree.flatten_like(pytree.flatten(mine)[1], state, "states", "the optimizer's state")
        self._take_over(states)

    def _take_over(self, states: Sequence[OptState]) -> None:
        """Continue from states, whose dtypes may be others."""
        for index, pair in enumerate(zip(states, self._states, strict=True)):
            if not have_same_dtypes(*pair):
                self._dtypes[index] = None
        self._states = list(states)

    def clone_with(self, clone: Callable[[Any], Any]) -> Self:
        """Make a second optimizer, ``clone`` applied to its modules and states; it shares ``impl``."""
        other = copy.copy(self)
        other.modules = [clone(module) for module in self.modules]
        other._dtypes = list(self._dtypes)
        other._states = [clone(state) for state in self._states]
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy everything, tensors with a history as leaves."""
        take = TensorCopier("deepcopy")
        for module in self.modules:
            for tensor in (*module.parameters(), *module.buffers()):
                if has_history(tensor):
                    memo.setdefault(id(tensor), take(tensor))
        other = copy.copy(self)
        memo[id(self)] = other
        memo.update(deepcopy_memo([self.impl, self._impls, self._options], take))
        other.impl = copy.deepcopy(self.impl, memo)
        other._impls = copy.deepcopy(self._impls, memo)
        other._options = copy.deepcopy(self._options, memo)
        other.modules = copy.deepcopy(self.modules, memo)
        other._dtypes = list(self._dtypes)
        other._states = [pytree.map_tensors(take, state) for state in self._states]
        return other
