"""A task's function → the same function as a program of torch's compiler, kept for the process.

A task whose only value with a gradient is a number, such as a loss, is one program with its gradient, which a backward
pass then only multiplies: forward and backward in one share what they compute. Others have a program of their values
and one of their gradients. In the graph a call is one node, whose further derivatives run the task as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial, update_wrapper
from typing import Any

import optree
import torch

from torchopt_dist.core import remat
from torchopt_dist.core.evaluation import is_evaluating
from torchopt_dist.core.meaning import RefusedError
from torchopt_dist.core.program_inputs import Call
from torchopt_dist.core.programs import CompileMode, Programs, code_of, programs_of
from torchopt_dist.core.reached import name_of
from torchopt_dist.core.recorded_program import Recorded
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.uncompiled import is_traced
from torchopt_dist.distributed.messages.stacked import taken_apart
from torchopt_dist.distributed.worker._traced_tasks import Tasks
from torchopt_dist.distributed.worker.buffers import Returning

__all__ = ["LARGE", "CompiledTask"]

LARGE = 256 << 20
"""Bytes of all tasks' gradients from which on their sum is made without them."""


class CompiledTask:
    """A task's function, called through its programs."""

    def __init__(self, function: Callable[..., Any], mode: CompileMode) -> None:
        self._returns_buffers = isinstance(function, Returning)
        self._function = function.func if isinstance(function, Returning) else function
        self._mode = mode
        self._programs = programs_of(code_of(function), f"the task {name_of(self._function)!r}", mode)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one task."""
        function = self._function
        if self._returns_buffers:
            while isinstance(function, partial):
                args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
                function = function.func
            inside: Any = update_wrapper(CompiledTask(function, self._mode), function, updated=())
            inside.__self__ = getattr(function, "__self__", function)  # whose buffers are meant, too
            return Returning(inside)(*args, **kwargs)
        leaves, _, rebuild = taken_apart((args, kwargs))
        return self._called(Tasks(function, leaves, (), rebuild), lambda: function(*args, **kwargs))

    def run(
        self,
        leaves: list[Any],
        mapped: Sequence[int],
        rebuild: Callable[[Any], Any],
        otherwise: Callable[[], Any],
    ) -> Any:
        """Run all tasks at once.

        Args:
            leaves: those of the tasks' arguments.
            mapped: the places of those that hold a tensor of each task, along dimension 0.
            rebuild: leaves → arguments.
            otherwise: does the same without the compiler.
        """
        if not self._returns_buffers:
            return self._called(Tasks(self._function, leaves, tuple(mapped), rebuild), otherwise)
        self._programs.tell("`buffers` is given and the tasks are one `vmap`: leave vectorize=True out")
        return otherwise()

    def _called(self, tasks: Tasks, otherwise: Callable[[], Any]) -> Any:
        places = tasks.rebuild(iter(range(len(tasks.leaves))))
        if is_traced() or optree.tree_leaves(places, none_is_leaf=True) != list(range(len(tasks.leaves))):
            return otherwise()  # in another program; or with a container that only we know
        programs, spec = self._programs, optree.tree_structure(places, none_is_leaf=True)
        try:
            call = Call(
                programs.meaning, [("the function", tasks.function)], [tasks.leaves], partial(_name, spec)
            )
        except RefusedError as reason:
            made = otherwise()
            programs.tell(str(reason))
            return made
        losses = _Losses(programs, call, tasks, spec)
        if torch.is_grad_enabled() and not is_evaluating():
            if losses.given:
                return losses.connected(otherwise)
        elif programs.has(call, losses.kind):  # which makes the same values, and gradients
            return losses.values(lambda: (otherwise(), None))[0]
        kind = ("values", torch.is_grad_enabled(), is_evaluating(), spec, tasks.mapped, tuple(tasks.own))
        return programs.run(call, tasks.values, otherwise, kind=kind)


class _Losses(Recorded):
    """Tasks whose gradients are made with their values, where they are losses."""

    def __init__(self, programs: Programs, call: Call, tasks: Tasks, spec: Any) -> None:
        super().__init__(programs, call, tasks.body, (spec, tasks.mapped), tasks.own)
        self.tasks = tasks
        self.grads: list[OptionalTensor] | None = None
        """Of each task's loss with respect to each tensor, if that is all."""
        own = [tasks.leaves[place] for place in tasks.own if place in tasks.mapped]
        alike = sum(x.nbytes for x in self.given) - sum(x.nbytes for x in own)
        size = alike * (tasks.number or 1) + sum(x.nbytes for x in own)
        self.are_alone = size > LARGE or not (tasks.number is None or tasks.have_all(self.reached))
        self.kind = (*self.kind, self.are_alone)

    def values(self, otherwise: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
        if self.are_alone:
            return super().values(otherwise, **options)
        made: tuple[Any, ...] = self.programs.run(
            self.call,
            lambda meaning, leaves: self.tasks.losses(
                meaning, leaves, [meaning.tensors[place] for place in self.outside]
            ),
            otherwise,
            kind=self.kind,
            **options,
        )
        value, flags, *grads = made
        self.grads = grads[0] if grads else None
        return value, flags

    def pull(self, asked: remat.Asked) -> Sequence[OptionalTensor]:
        if self.grads is None:
            return super().pull(asked)
        found: list[OptionalTensor] = []
        own = [place in self.tasks.mapped for place in self.tasks.own]
        for place in asked.wanted:
            grad, bar = self.grads[place], asked.bars[0]
            if grad is not None:  # the sum over the tasks, but for a tensor that has one for each
                bar = bar.to(grad.dtype).reshape(-1)
                by_task = grad.reshape(bar.shape[0], -1)
                is_own = place < len(own) and own[place]
                grad = bar[:, None] * by_task if is_own else by_task.t().mv(bar)
                grad = grad.reshape(asked.tensors[place].shape)
            found.append(grad)
        return found


@lru_cache(maxsize=64)
def _names(spec: Any) -> list[str]:
    found = (accessor.codify("") for accessor in spec.accessors())
    return [f"{'kwargs' if name.startswith('[1]') else 'args'}{name[3:]}" for name in found]


def _name(spec: Any, place: int) -> str:
    """What messages call an argument, of those of a structure."""
    names = _names(spec)
    return names[place] if place < len(names) else "a gradient"
