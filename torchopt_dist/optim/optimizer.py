"""``p.grad`` of each parameter → the parameters moved in place, by a ``torch.optim.Optimizer``.

Each group's options are read at each step, so schedulers and users may set them; ``lr`` is a number or a tensor there,
also where a schedule was given (``_learning_rate.py``). A parameter's state is in
``optimizer.state[p]`` under the names of the transformation's state, which are torch's. ``p.grad`` is only
read.
"""

from __future__ import annotations

import copy
import inspect
import numbers
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch.nn.parameter import is_lazy

from torchopt_dist.core.types import OptState
from torchopt_dist.core.uncompiled import uncompiled
from torchopt_dist.nn._tensor_copier import TensorCopier, deepcopy_memo
from torchopt_dist.ops import _bias_correction as bias_correction
from torchopt_dist.optim import _learning_rate as learning_rate
from torchopt_dist.optim import _signatures as signatures
from torchopt_dist.optim._state import (
    COUNT,
    SHARED,
    Layout,
    begin,
    counts,
    dtypes_of,
    gather,
    kinds_of,
    layout_of,
    scatter,
)
from torchopt_dist.transform.apply_updates import step_in_place
from torchopt_dist.transform.base import GradientTransformation

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Optimizer"]

_WITHOUT = ("moment_requires_grad",)
_NO_OPTIONS = {"params", "param_names", SHARED, *signatures.WAYS}
"""What may be in a group and does not change the numbers."""
_PARAMS_TEXT = "params: tensors, named tensors, or dicts of parameter groups with options of their own."


class Optimizer(torch.optim.Optimizer):
    """A gradient transformation as a ``torch.optim.Optimizer``.

    Args:
        params: tensors, named tensors, or dicts of parameter groups.
        impl: the gradient transformation. Subclasses that are made with ``transformation=`` take that function's
            arguments here, and each group may set its own values of them. With a chain as ``impl`` groups may set
            ``lr``, if one link has it.

    Raises:
        TypeError: ``params`` is a tensor, or holds something else than tensors; an argument is unknown.
        ValueError: there are no parameters, one is not a leaf, or an option is out of its range; a group has an option
            that this optimizer does not have: see :meth:`add_param_group`.

    Example:
        >>> import torch
        >>> from torchopt_dist.optim.sgd import sgd
        >>> w = torch.ones(2, requires_grad=True)
        >>> optimizer = Optimizer([w], sgd(lr=0.5))
        >>> w.sum().backward()
        >>> optimizer.step()
        >>> w
        tensor([0.5000, 0.5000], requires_grad=True)
    """

    transformation: ClassVar[signatures.Constructor | None] = None
    __signature__: ClassVar[inspect.Signature]
    _signature: ClassVar[inspect.Signature] = inspect.signature(lambda params, impl: ...)
    _decouples: ClassVar[bool | None] = None
    """What groups have as ``decoupled_weight_decay``, by which torch's saved states tell Adam from AdamW."""
    _counts_for_torch: ClassVar[bool] = False
    """Torch's class counts the steps of each parameter, although no formula needs that."""
    _shares_memory = False
    """Other processes may look at the tensors of the state, so these are overwritten and not replaced."""

    def __init_subclass__(
        cls, *, transformation: signatures.Constructor | None = None, **defaults: Any
    ) -> None:
        """Make a class from a function: ``class SGD(Optimizer, transformation=sgd)``.

        Args:
            transformation: constructor of a gradient transformation; its parameters become the class's.
            defaults: defaults that differ from the function's.
        """
        super().__init_subclass__()
        if transformation is not None:
            cls.transformation = staticmethod(transformation)
            cls._signature = signatures.signature(transformation, "params", defaults, _WITHOUT)
            cls.__signature__ = cls._signature
            cls.__doc__ = signatures.docstring(cls, transformation, _PARAMS_TEXT, _WITHOUT)

    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        self._schedules = learning_rate.Schedules()
        self._layouts: dict[int, tuple[Any, Layout]] = {}
        self._built: dict[int, tuple[list[Any], GradientTransformation]] = {}
        self._impl: GradientTransformation | None = None
        options: dict[str, Any] = {}
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                f"`params` must be tensors, got the module {type(params).__name__}: give `module.parameters()`"
            )
        if self.transformation is None:
            self._impl = signatures.only_transformation(type(self), self._signature, params, args, kwargs)
            lr = learning_rate.found(self._impl)
            options = {} if lr is None else {"lr": lr}
        else:
            kwargs, theirs = signatures.take(self._names(), self._signature.parameters, kwargs)
            options = signatures.bind(type(self), self._signature, params, args, kwargs)
            options.update({**self._settled(), **theirs})
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; options that it does not set are the optimizer's.

        Args:
            param_group: ``{'params': ..., option: value, ...}``.

        Raises:
            TypeError: it is not a dict, or holds something else than tensors.
            ValueError: an option is out of its range, a parameter is not a leaf or is in another group; an option is
                set that only the class of the same name in ``torch.optim`` has; or the optimizer was made from a
                transformation, whose options are fixed, and the group sets one. A text, such as a name, is no option.
        """
        if isinstance(param_group, dict):
            self._refuse_options_of_a_group(param_group)
            final = {**self.defaults, **param_group}
            signatures.check_group(self._names(), self._signature.parameters, self._settled(), final)
            self._transformation_of(final)  # checks the options
        super().add_param_group(param_group)
        index, group = len(self.param_groups) - 1, self.param_groups[-1]
        self._schedules.settle(index, group)
        if self._impl is not None and not any(map(is_lazy, group["params"])):
            state = self._transformation_of(group).init(group["params"])
            layout, leaves = layout_of(state)
            if shared := layout.shared(leaves):
                group[SHARED] = shared  # from the start, or a checkpoint would have no place for it

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move each parameter that has a gradient; one whose ``grad`` is ``None`` stays, its state too.

        Args:
            closure: a function that computes the loss again and calls ``backward``.

        Returns:
            What the closure returned, if there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling() and any(group.get("fused") for group in self.param_groups):
            self._step_groups_by_kernel()
        else:
            self._step_groups()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state and the options, as torch's; a schedule is left out, as it is code and not data."""
        packed = super().state_dict()
        for group in packed["param_groups"]:
            for name in [name for name, value in group.items() if callable(value)]:
                del group[name]
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, of this class or of the one of the same name in ``torch.optim``.

        Args:
            state_dict: the state; its tensors are taken over, not copied, as torch does. If it has no learning rate,
                or one that came from a schedule, this optimizer's own schedule continues at the saved count.

        Raises:
            ValueError: the numbers of groups or of parameters differ, or an option is set that only torch's class has,
                such as RAdam's ``decoupled_weight_decay``; nothing has been loaded then.
        """
        groups = [dict(group) for group in state_dict["param_groups"]]
        for index, (mine, theirs) in enumerate(zip(self.param_groups, groups, strict=False)):
            theirs.update({k: v for k, v in mine.items() if callable(v) and k not in theirs})
            self._schedules.fill_in(index, mine, theirs)
        taken: dict[str, Any] = {}

        def check(_: Any, final: dict[str, Any]) -> None:
            for group in final["param_groups"]:
                signatures.check_group(self._names(), self._signature.parameters, self._settled(), group)
            taken.update(final)

        def restore_counts(_: Any) -> None:
            for index, group in enumerate(self.param_groups):
                self._schedules.restore(index, group)
            ids = chain.from_iterable(group["params"] for group in taken["param_groups"])
            params = chain.from_iterable(group["params"] for group in self.param_groups)
            for index, p in zip(ids, params, strict=True):
                if index in taken["state"]:
                    self.state[p].update(counts(taken["state"][index]))

        # Behind what users' hooks make of the state, and before they see it loaded.
        last = self.register_load_state_dict_pre_hook(check)
        first = self.register_load_state_dict_post_hook(restore_counts, prepend=True)
        try:
            super().load_state_dict({**state_dict, "param_groups": groups})
        finally:
            last.remove()
            first.remove()

    def share_memory(self) -> None:
        """Move the parameters' states to shared memory, for processes that share the parameters, too.

        As ``torch.optim.Adagrad.share_memory``, for every optimizer: processes that are forked or spawned then may
        train one model without locks [Niu et al. 2011, Hogwild!]. State of a whole group, such as the count of a
        schedule, stays separate in each process, and what :meth:`load_state_dict` loads is not shared until this is
        called again.
        """
        for index, group in enumerate(self.param_groups):
            self._gathered(index, group, self._built_transformation(index, group))
        for p in chain.from_iterable(group["params"] for group in self.param_groups):
            for tensor in filter(torch.is_tensor, self.state[p].values()):
                tensor.share_memory_()
        self._shares_memory = True

    def __getstate__(self) -> dict[str, Any]:
        own = {
            "_impl": self._impl,
            "_schedules": self._schedules,
            "_shares_memory": self._shares_memory,
        }
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = set(state.get("defaults") or getattr(self, "defaults", {}))
        super().__setstate__(state)
        for name in set(self.defaults) - names:  # torch adds its own: `differentiable`
            del self.defaults[name]
        self._layouts = {}
        self._built = {}
        for index, group in enumerate(self.param_groups):
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            self._schedules.settle(index, group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy everything, tensors with a history, such as a computed ``lr``, as leaves."""
        state = self.__getstate__()
        memo.update(deepcopy_memo(state, TensorCopier("deepcopy")))
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__setstate__(copy.deepcopy(state, memo))
        return other

    @torch.no_grad()
    def _step_groups(self) -> None:
        for index, group in enumerate(self.param_groups):
            self._step_group(index, group)

    @uncompiled
    def _step_groups_by_kernel(self) -> None:
        """The step where a group demands the kernel, and a compiler would make one of the formula."""
        self._step_groups()

    def _step_group(self, index: int, group: dict[str, Any]) -> None:
        params = group["params"]
        grads = [p.grad for p in params]
        if all(grad is None for grad in grads):
            return
        self._schedules.settle(index, group)
        impl = self._built_transformation(index, group)
        layout, before = self._gathered(index, group, impl)
        state = step_in_place(impl, params, grads, before)
        if state is not None:
            scatter(self, group, layout, state, overwrite=self._shares_memory)
        if self._counts_for_torch:
            # as torch's class does and wants to find it in a state
            moved = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
            bias_correction.count_up_([self.state[p][COUNT] for p in moved])
        if self._schedules.rules(index, group):
            self._schedules.advance(index, group)

    def _built_transformation(self, index: int, group: dict[str, Any]) -> GradientTransformation:
        """The transformation of a group, made again only if an option has changed since the last step.

        Under a compiler it is made in the graph: to compare options there would be one more reason to compile again.
        """
        if torch.compiler.is_compiling():
            return self._transformation_of(group)
        options = [group[name] for name in self.defaults]
        known = self._built.get(index)
        if known is None or not all(map(_is_same_option, known[0], options)):
            known = options, self._transformation_of(group)
            self._built[index] = known
        return known[1]

    def _transformation_of(self, group: dict[str, Any]) -> GradientTransformation:
        if self.transformation is None:
            assert self._impl is not None
            lr = self.defaults.get("lr")
            return (
                self._impl
                if group.get("lr") is lr
                else learning_rate.with_learning_rate(self._impl, group["lr"])
            )
        return self.transformation(**{name: group[name] for name in list(self._signature.parameters)[1:]})

    def _refuse_options_of_a_group(self, group: dict[str, Any]) -> None:
        if self.transformation is not None:
            return
        for name in sorted(set(group) - _NO_OPTIONS - set(self.defaults)):
            if not isinstance(group[name], str):  # a label
                raise ValueError(
                    f"`{name}` must not be set for a group, as `impl` has its options already, got {group[name]!r}"
                )

    @classmethod
    def _settled(cls) -> dict[str, bool]:
        return {} if cls._decouples is None else {"decoupled_weight_decay": cls._decouples}

    @classmethod
    def _names(cls) -> list[str]:
        """The names of this class and of those of ours that it descends from."""
        return [one.__name__ for one in cls.__mro__ if issubclass(one, Optimizer) and one is not Optimizer]

    def _gathered(
        self, index: int, group: dict[str, Any], impl: GradientTransformation
    ) -> tuple[Layout, OptState]:
        """The layout of a group's state, which may depend on which options are 0, not on their values; and the state.

        A compiler makes the layout in the graph: a remembered one would be one more reason to compile again.
        """
        if torch.compiler.is_compiling():
            layout = begin(self, group, impl, counts=self._counts_for_torch)
            return layout, gather(self, group, layout)
        kinds = [*kinds_of(group[name] for name in self.defaults), *dtypes_of(group["params"])]
        if (known := self._layouts.get(index)) is not None and known[0] == kinds:
            with suppress(KeyError):  # where a part of the state is gone
                return known[1], gather(self, group, known[1])
        layout = begin(self, group, impl, counts=self._counts_for_torch)
        self._layouts[index] = kinds, layout
        return layout, gather(self, group, layout)


def _is_same_option(before: Any, now: Any) -> bool:
    """Whether a transformation made with one value also fits the other; a tensor may have been overwritten."""
    return before is now or (isinstance(now, numbers.Real) and type(before) is type(now) and before == now)
