"""Key → this worker's copy of a module and its optimizer, and gradients that are not summed yet.

A call's message mentions the module's tensors by their indices, and a worker puts leaves on its own there. In a
backward pass their gradients stay, by the number of the backward, and are added in the order of these numbers, so that
the last bit of a sum does not depend on threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchopt_dist.collectives.watched_group import WatchedGroup
from torchopt_dist.core.inputs import Seen
from torchopt_dist.distributed.group.kept import HeldLeaf
from torchopt_dist.distributed.messages.requests import Key
from torchopt_dist.distributed.serialization.pickling import pack
from torchopt_dist.errors import ResidentError

__all__ = ["Before", "Held", "HeldLeaves", "Options", "keep_grads", "mirror_missing"]

Options: TypeAlias = Sequence[dict[str, Any]]
"""For each group of an optimizer's parameters, what of its options has changed."""
Before: TypeAlias = Callable[[nn.Module], object]
"""Done with a module before a step."""


class Held:
    """A worker's copy of a module, with its optimizer; on the worker that made the mirror, the original.

    ``tensors`` are all of the module's, in the same order on all workers; ``version`` is how often they have been
    stepped or sent anew.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module = module
        self.optimizer = optimizer
        self.tensors = pack(module, main_by_name=True).tensors
        self.version = 0
        self.group: WatchedGroup | None = None
        self._grads: dict[Key, dict[int, Tensor]] = {}
        self._lock = threading.Lock()
        self.note()

    def gpu(self) -> str | None:
        """The GPU that has all parameters, by a name that no other one has; ``None`` if there is no such one."""
        devices = {parameter.device for parameter in self.module.parameters()}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            return None
        return str(torch.cuda.get_device_properties(devices.pop()).uuid)

    def note(self) -> None:
        """Record the tensors as they are as those of all workers."""
        self._snapshot = Seen(self.tensors, memory=True)

    def changed(self) -> str | None:
        """A description of a tensor that has been changed since, if one has."""
        changed = self._snapshot.changed()
        if not changed:
            return None
        tensor = self.tensors[changed[0]]
        return f"a {'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} of shape {tuple(tensor.shape)}"

    def problem(self, version: int) -> ResidentError | None:
        """The error, if this copy is not that version of the mirror; else ``None``."""
        changed = self.changed()
        if changed is not None:
            return ResidentError(
                f"{changed} of this worker's copy of a mirror was changed in place: let functions work on "
                "`todist.module_clone(module)`, and call `sync()` of the mirror"
            )
        if version != self.version:
            return ResidentError(
                f"this worker's copy of a mirror is of version {self.version}, and a call wants version {version}: "
                "call `sync()` of the mirror"
            )
        return None

    def adopt(self, earlier: Held) -> None:
        """Take the place of an earlier copy of the same mirror."""
        self.version = earlier.version + 1
        self.group = earlier.group

    def accumulate(self, backward: Key, grads: dict[int, Tensor]) -> None:
        """Keep a backward's gradients until the step."""
        with self._lock:
            self._grads[backward] = grads

    def fold(self) -> None:
        """Add up the gradients of earlier backwards. A call begins, so none of them is running in a usual program."""
        with self._lock:
            if len(self._grads) > 1:
                self._grads = {min(self._grads): self._sums()}

    def drop(self) -> None:
        """Forget the gradients."""
        with self._lock:
            self._grads.clear()

    def _sums(self) -> dict[int, Tensor]:
        sums: dict[int, Tensor] = {}
        for backward in sorted(self._grads):
            for place, grad in self._grads[backward].items():
                sums[place] = sums[place] + grad if place in sums else grad
        return sums

    def trained(self) -> list[int]:
        """The indices of the parameters that require grad here."""
        return [
            place
            for place, tensor in enumerate(self.tensors)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        ]

    @torch.no_grad()
    def reduce(self, trained: Sequence[int], *, problem: bool = False) -> None:
        """Sum the gradients over all workers into ``.grad`` of the parameters: one all-reduce for each dtype.

        The indices of the parameters are the same on all workers; if one has a ``problem``, no worker takes the step.
        Raises :class:`ResidentError` if another worker has one, and :class:`ValueError` if a gradient is sparse.
        """
        with self._lock:
            grads, self._grads = self._sums(), {}
        for place in trained:
            own = self.tensors[place].grad
            if own is not None:
                grads[place] = own + grads[place] if place in grads else own
        sparse = any(grad.layout is not torch.strided for grad in grads.values())
        refused = False
        for dtype in sorted({self.tensors[place].dtype for place in trained}, key=str):
            places = [place for place in trained if self.tensors[place].dtype == dtype]
            refused |= self._reduce(places, {} if sparse else grads, problem or sparse)
        if sparse:
            raise ValueError("a mirror takes no sparse gradients: give the embedding sparse=False")
        if refused and not problem:
            raise ResidentError("another worker could not take the step, so no worker has taken it")

    def _reduce(self, places: list[int], grads: dict[int, Tensor], problem: bool) -> bool:
        """Reduce gradients of one dtype, after a flag for a problem and one for each parameter that has a gradient."""
        parameters = [self.tensors[place] for place in places]
        device = parameters[0].device if self.group is not None and self.group.on_gpus else None
        flags = [float(problem), *(float(place in grads) for place in places)]
        parts = [torch.tensor(flags, dtype=parameters[0].dtype)]
        for place, parameter in zip(places, parameters, strict=True):
            grad = grads.get(place)
            if grad is None:
                grad = torch.zeros(parameter.numel(), dtype=parameter.dtype)
            parts.append(grad.reshape(-1))
        flat = torch.cat([part.detach().to(device or "cpu") for part in parts])
        if self.group is not None:
            self.group.run("allreduce", [torch.view_as_real(flat) if flat.is_complex() else flat]).wait()
        sizes = [len(flags), *(parameter.numel() for parameter in parameters)]
        head, *sums = flat.split(sizes)
        problems, *has_grad = head.tolist()
        for parameter, found, total in zip(parameters, has_grad, sums, strict=True):
            if not found:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter, memory_format=torch.preserve_format)
            parameter.grad.copy_(total.view_as(parameter))
        return bool(problems)

    def step(self, options: Options, before: Before | None = None) -> None:
        """Take the step, after :meth:`reduce`, with the options that have changed where the mirror was made."""
        if before is not None:
            before(self.module)
        for group, changed in zip(self.optimizer.param_groups, options, strict=True):
            group.update(changed)
        self.optimizer.step()
        self.version += 1
        self.note()


def mirror_missing() -> ResidentError:
    """The error where a mirror is not kept."""
    return ResidentError("a mirror was used after its end, or where it is not: make a new `todist.mirror`")


class HeldLeaves:
    """The leaves of one request in the places of tensors of mirrors, each once; made while the request is rebuilt."""

    def __init__(self, device: torch.device | None, find: Callable[[Key], Held]) -> None:
        self._device = device
        self._find = find
        self._mirrors: dict[Key, Held] = {}
        self._leaves: dict[tuple[Key, int], tuple[Tensor, Tensor]] = {}

    def leaf(
        self, hook: Tensor, key: Key, version: int, place: int, is_parameter: bool, requires_grad: bool
    ) -> Tensor:
        """A leaf on the memory of a parameter, or on a copy of a buffer, as that of the sender is.

        ``hook`` is the tensor that the sender's graph has in its place. Raises :class:`ResidentError` if a task has
        changed this worker's copy in place, or if the copy is of another version than the sender's.
        """
        if key not in self._mirrors:
            held = self._find(key)
            problem = held.problem(version)
            if problem is not None:
                raise problem
            held.fold()
            self._mirrors[key] = held
        if (key, place) not in self._leaves:
            tensor = self._mirrors[key].tensors[place].detach()
            tensor = (tensor if is_parameter else tensor.clone()).to(self._device)
            leaf = (
                nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
            )
            self._leaves[key, place] = leaf, hook
        return self._leaves[key, place][0]

    def tensors(self) -> list[Tensor]:
        """All leaves."""
        return [leaf for leaf, _ in self._leaves.values()]

    def inputs(self, sent: Sequence[Tensor]) -> tuple[list[Tensor], list[HeldLeaf]]:
        """The inputs of a graph, those that were sent and these leaves behind them, and what these are."""
        indices = {id(tensor): index for index, tensor in enumerate(sent)}
        wanted = {
            at: each for at, each in self._leaves.items() if each[0].requires_grad and id(each[1]) in indices
        }
        leaves = [leaf for leaf, _ in wanted.values()]
        held = [
            HeldLeaf(indices[id(hook)], self._mirrors[key], place)
            for (key, place), (_, hook) in wanted.items()
        ]
        return [*sent, *leaves], held


def keep_grads(backward: Key, staying: Sequence[HeldLeaf], grads: Sequence[Tensor | None]) -> None:
    """Accumulate the gradients that stay, one for each leaf, under the key of their backward."""
    by_mirror: dict[int, tuple[Held, dict[int, Tensor]]] = {}
    for (_, held, place), grad in zip(staying, grads, strict=True):
        if grad is not None:
            by_mirror.setdefault(id(held), (held, {}))[1][place] = grad.detach()
    for held, found in by_mirror.values():
        held.accumulate(backward, found)
