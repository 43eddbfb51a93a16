"""Tasks, stand-ins for their arguments → their values, and gradients of these, as functions that are traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchopt_dist import pytree
from torchopt_dist.core.meaning import Meaning
from torchopt_dist.core.substitution import Substitute
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.vjp import leaf_like
from torchopt_dist.formulas import formulas_in_transforms
from torchopt_dist.formulas.attention import without_fast_path
from torchopt_dist.nn._module_copy import copied

__all__ = ["Tasks"]


class Tasks(NamedTuple):
    """A function, and the arguments of one task, or of several in one ``vmap``."""

    function: Callable[..., Any]
    leaves: list[Any]
    mapped: tuple[int, ...]
    """The places of leaves that hold a tensor of each task, along dimension 0; none for one task."""
    rebuild: Callable[[Iterator[Any]], Any]
    """Leaves → the arguments."""

    @property
    def number(self) -> int | None:
        """Of the tasks in one ``vmap``."""
        return self.leaves[self.mapped[0]].shape[0] if self.mapped else None

    @property
    def own(self) -> list[int]:
        """The places of leaves that are tensors which want a gradient."""
        return [n for n, x in enumerate(self.leaves) if isinstance(x, Tensor) and x.requires_grad]

    def have_all(self, tensors: Sequence[Tensor]) -> bool:
        """Whether modules among the leaves have all these tensors as parameters."""
        modules = [x for x in self.leaves if isinstance(x, nn.Module)]
        known = {id(parameter) for module in modules for parameter in module.parameters()}
        return all(id(tensor) in known for tensor in tensors)

    def body(self, meaning: Meaning, leaves: list[Any]) -> Any:
        """What the function, which is the first of the things, returns of leaves."""
        return self._mapped(lambda *own: self._called(meaning.things[0], leaves, own), leaves)

    def values(self, meaning: Meaning, leaves: list[Any]) -> Any:
        """As :meth:`body`, without a graph."""
        filled = list(leaves)
        for place in self.own:
            filled[place] = leaf_like(leaves[place])
        return pytree.map_tensors(Tensor.detach, self.body(meaning, filled))

    def losses(
        self, meaning: Meaning, leaves: list[Any], outside: list[Tensor]
    ) -> tuple[Any, list[bool], list[OptionalTensor] | None]:
        """The values, which of their leaves have a gradient, and, if that is one number a task, each task's gradients.

        Args:
            meaning: of the function.
            leaves: the stand-ins.
            outside: the tensors that want a gradient and are no leaves; several tasks have them in modules.
        """
        number, own = self.number, self.own
        with torch.enable_grad():
            shared = [place not in self.mapped for place in own] + [True] * len(outside)
            wanted = [
                leaf_like(x.expand(number, *x.shape) if number is not None and alike else x)
                for x, alike in zip(
                    [*(leaves[n] for n in own), *map(Tensor.detach, outside)], shared, strict=True
                )
            ]
            made = self._of_each(meaning.things[0], leaves, outside, wanted)
            found = pytree.flatten(made)[0]
            flags = [isinstance(x, Tensor) and x.requires_grad for x in found]
            losses = [x for x, has in zip(found, flags, strict=True) if has]
            grads: list[OptionalTensor] | None = None
            if len(losses) == 1 and losses[0].numel() == (number or 1) and losses[0].is_floating_point():
                grads = list(torch.autograd.grad(losses[0].sum(), wanted, allow_unused=True))
        return pytree.map_tensors(Tensor.detach, made), flags, grads

    def _of_each(
        self, function: Callable[..., Any], leaves: list[Any], outside: list[Tensor], wanted: list[Tensor]
    ) -> Any:
        """What a function returns, where each of the wanted tensors is one of each task, if there are several."""
        own, count = self.own, len(self.own)
        if not self.mapped:
            filled = list(leaves)
            for place, tensor in zip(own, wanted, strict=False):
                filled[place] = tensor
            with Substitute(outside, wanted[count:]):
                return self._called(function, filled, ())

        def one_task(*tensors: Tensor) -> Any:
            given, new = list(leaves), tensors[len(self.mapped) :]
            for place, tensor in [*zip(self.mapped, tensors, strict=False), *zip(own, new, strict=False)]:
                given[place] = tensor
            table = {id(old): one for old, one in zip(outside, new[count:], strict=True)}

            def take(tensor: Tensor) -> Tensor:
                return table.get(id(tensor), tensor)

            copies = {id(x): copied(x, take, take) for x in given if isinstance(x, nn.Module)}
            args, kwargs = self.rebuild(iter([copies.get(id(x), x) for x in given]))
            return function(*args, **kwargs)

        return self._mapped(one_task, leaves, wanted)

    def _mapped(self, one_task: Callable[..., Any], leaves: list[Any], more: Sequence[Tensor] = ()) -> Any:
        """What one task returns of the tensors that are its own, and of more; of all tasks, if there are several."""
        if not self.mapped:
            return one_task()
        tensors = [leaves[place] for place in self.mapped]
        with formulas_in_transforms(), without_fast_path():
            return torch.func.vmap(one_task, randomness="different")(*tensors, *more)

    def _called(self, function: Callable[..., Any], leaves: list[Any], own: Sequence[Tensor]) -> Any:
        given = list(leaves)
        for place, tensor in zip(self.mapped, own, strict=True):
            given[place] = tensor
        args, kwargs = self.rebuild(iter(given))
        return function(*args, **kwargs)
