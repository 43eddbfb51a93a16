"""Key → this worker's copy of a module and its optimizer, and gradients that are not summed yet.

A call's message mentions the module's tensors by their indices, and a worker puts its own there. In a backward pass
their gradients stay, by the number of the backward, and are added in the order of these numbers, so that the last bit
of a sum does not depend on threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchopt_dist.distributed._kept import Home, Kept
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._protocol import Key
from torchopt_dist.distributed._serialization import pack
from torchopt_dist.distributed._versions import Seen
from torchopt_dist.errors import ResidentError

__all__ = ["Before", "Held", "Options", "Replicas", "keep_grads"]

Options: TypeAlias = Sequence[dict[str, Any]]
"""For each group of an optimizer's parameters, what of its options has changed."""
Before: TypeAlias = Callable[[nn.Module], object]
"""Done with a module before a step."""


class Held:
    """A worker's copy of a replica; on the worker that made the replica, the original.

    Args:
        module: the module.
        optimizer: an optimizer of some of the module's parameters.

    Attributes:
        tensors: all tensors of the module, in the same order on all workers.
        version: how often they have been stepped or sent anew.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module = module
        self.optimizer = optimizer
        self.tensors = pack(module, main_by_name=True).tensors
        self.version = 0
        self.group: dist.ProcessGroup | None = None
        self._backend = "gloo"
        self._grads: dict[Key, dict[int, Tensor]] = {}
        self._lock = threading.Lock()
        self.note()

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
        """The error, if this copy is not that version of the replica; else ``None``."""
        changed = self.changed()
        if changed is not None:
            return ResidentError(
                f"{changed} of this worker's copy of a replica was changed in place: let functions work on "
                "`todist.module_clone(module)`, and call `sync()` of the replica"
            )
        if version != self.version:
            return ResidentError(
                f"this worker's copy of a replica is of version {self.version}, and a call wants version {version}: "
                "call `sync()` of the replica"
            )
        return None

    def connect(self, store: dist.Store, rank: int, size: int, backend: str, seconds: float) -> None:
        """Enter a process group of all that hold the replica."""
        made: Any  # torch's stubs do not say that the two are process groups
        if backend == "nccl":
            made = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
        else:
            made = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))
        self.group, self._backend = made, backend
        self._store = store  # NCCL meets there in the first all-reduce

    def adopt(self, earlier: Held) -> None:
        """Take the place of an earlier copy of the same replica."""
        self.version = earlier.version + 1
        if earlier.group is not None:
            self.group, self._backend, self._store = earlier.group, earlier._backend, earlier._store

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

        Args:
            trained: the indices of these parameters, the same on all workers.
            problem: this worker cannot take the step, so that no worker does.

        Raises:
            ResidentError: another worker has a problem.
            ValueError: a gradient is sparse.
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
            raise ValueError("a replica takes no sparse gradients: give the embedding sparse=False")
        if refused and not problem:
            raise ResidentError("another worker could not take the step, so no worker has taken it")

    def _reduce(self, places: list[int], grads: dict[int, Tensor], problem: bool) -> bool:
        """Reduce gradients of one dtype, after a flag for a problem and one for each parameter that has a gradient."""
        parameters = [self.tensors[place] for place in places]
        device = parameters[0].device if self.group is not None and self._backend == "nccl" else None
        flags = [float(problem), *(float(place in grads) for place in places)]
        parts = [torch.tensor(flags, dtype=parameters[0].dtype)]
        for place, parameter in zip(places, parameters, strict=True):
            grad = grads.get(place)
            if grad is None:
                grad = torch.zeros(parameter.numel(), dtype=parameter.dtype)
            parts.append(grad.reshape(-1))
        flat = torch.cat([part.detach().to(device or "cpu") for part in parts])
        if self.group is not None:
            self.group.allreduce([torch.view_as_real(flat) if flat.is_complex() else flat]).wait()
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
        """Take the step, after :meth:`reduce`.

        Args:
            options: the options of the optimizer that have changed on the worker that made the replica.
            before: called with the module before the step.
        """
        if before is not None:
            before(self.module)
        for group, changed in zip(self.optimizer.param_groups, options, strict=True):
            group.update(changed)
        self.optimizer.step()
        self.version += 1
        self.note()


class Replicas(Kept[Held]):
    """The replicas of a worker."""

    def __init__(self) -> None:
        super().__init__(_missing)

    def fill(self, message: Message) -> Message:
        """Put this worker's tensors in the place of those that were not sent.

        Parameters use the replica's memory; buffers are copies, as those of a call are.

        Raises:
            ResidentError: a task has changed this worker's copy in place.
        """
        tensors = [*message.tensors]
        for key, version, places in message.staying:
            held = self.find(key)
            problem = held.problem(version)
            if problem is not None:
                raise problem
            held.fold()
            for number, place in places.items():
                kept = held.tensors[place].detach()
                tensors[number] = kept if message.is_parameter[number] else kept.clone()
        return message.with_tensors(tensors)

    def homes(self, message: Message) -> dict[int, Home]:
        """For inputs of a request whose gradients stay, by their indices: the replica and the index there."""
        return {number: (self.find(key), place) for number, (key, place) in message.staying_inputs().items()}


def _missing() -> ResidentError:
    return ResidentError("a replica was used after its end, or where it is not: make a new `todist.replica`")


def keep_grads(
    backward: Key, homes: Mapping[int, Home], grads: Iterable[Tensor | None]
) -> list[Tensor | None]:
    """Accumulate the gradients that stay; returns the others.

    Args:
        backward: the key of the backward.
        homes: for the index of a gradient, the replica and the index there.
        grads: the gradients of all inputs.
    """
    sent: list[Tensor | None] = [*grads]
    staying: dict[int, tuple[Held, dict[int, Tensor]]] = {}
    for number, (held, place) in homes.items():
        grad = sent[number]
        if grad is not None:
            staying.setdefault(id(held), (held, {}))[1][place] = grad.detach()
            sent[number] = None
    for held, found in staying.values():
        held.accumulate(backward, found)
    return sent
