"""A module, its optimizer → a module of which every worker has a copy, and whose optimizer steps each worker takes.

What a call sends the workers no longer grows with the module, nor does what comes back: the gradients of its parameters
stay where they are computed, and one all-reduce sums them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchopt_dist.collectives.watched_group import watched_group
from torchopt_dist.distributed._process_groups import beside, check_of, meet
from torchopt_dist.distributed.calls.futures import GRACE_SECONDS, gather
from torchopt_dist.distributed.group.group import Group, answering_group, current_group, find_group
from torchopt_dist.distributed.group.mirrors import Before, Held, Options
from torchopt_dist.distributed.messages.references import StayingModule, hook_of
from torchopt_dist.distributed.messages.requests import Key
from torchopt_dist.errors import ResidentError
from torchopt_dist.process.future import Future, as_completed

__all__ = ["MirroredModule", "mirror"]


def mirror(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    backend: str | None = None,
    timeout: float = 300.0,
) -> MirroredModule:
    """Keep a module and its optimizer on all workers, so that calls send neither its parameters nor their gradients.

    Pass the mirror to calls in the module's place: the function gets its worker's copy of the module. The gradients of
    its parameters stay on the workers that compute them. :meth:`MirroredModule.step` sums them, and those that the
    parameters have in this process, by one all-reduce; then every worker takes the optimizer's step.

    Args:
        module: the module to copy. In each call its hooks, its training mode and its frozen parameters are those that
            it has in this process at that time.
        optimizer: an optimizer from ``torch.optim`` or of this package, for parameters of ``module`` and no others.
            Options of its groups that change here, such as a scheduled learning rate, are sent with the next step.
        backend: the backend of torch's process group: ``"gloo"``, ``"nccl"``, or ``None`` for NCCL if all parameters
            are on GPUs and no two workers share one, which NCCL refuses.
        timeout: seconds that a worker waits for the others in the all-reduce. The loss of a worker ends the wait here.

    Returns:
        The mirror, a module whose ``forward`` is the module's.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: the optimizer has a parameter that is not the module's, ``backend`` or ``timeout`` is wrong, or
            ``backend`` is ``"nccl"`` and two workers have their copies on one GPU, or one of them not on a GPU.
        SerializationError: the module or the optimizer cannot be sent.
        NotInitializedError: there is no RPC group.
        InitializationError: the workers cannot reach each other.

    Example::

        meta = todist.mirror(net, torch.optim.Adam(net.parameters()))
        for tasks in batches:
            loss = task_loss(meta, tasks)  # @todist.parallelize; the workers use their copies
            meta.zero_grad()
            loss.backward()
            meta.step()
    """
    if not isinstance(module, nn.Module) or isinstance(module, StayingModule):
        raise TypeError(f"mirror takes a module, got {type(module).__name__} {module!r:.80}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"mirror takes the module's optimizer, a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    own = {id(parameter) for parameter in module.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise ValueError(
                    f"param_groups[{index}] of the optimizer has a tensor of shape {tuple(parameter.shape)} that is no "
                    "parameter of the module, so workers have no gradient of it: make it one, as in an "
                    "nn.ParameterDict, or give it an optimizer of its own"
                )
    if backend not in ("gloo", "nccl", None):
        raise ValueError(f'backend must be "gloo", "nccl" or None, got {backend!r}')
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= 1e6:
        raise ValueError(f"timeout must be a positive number of seconds, up to a million, got {timeout!r}")
    made = MirroredModule(module, optimizer)
    made._start(backend, float(timeout))
    return made


class MirroredModule(StayingModule):
    """A module that all workers hold, with its optimizer; made by :func:`mirror`.

    Gradients of its parameters stay on the workers: ``loss.backward()`` computes them, and ``torch.autograd.grad``
    cannot return them. Inside a function that a call runs, the module behaves as any other, to any order.

    After a change in place other than by :meth:`step`, such as a ``load_state_dict``, call :meth:`sync`.

    Attributes:
        module: the module, as this process holds it; it has taken all steps, too.
        optimizer: its optimizer. ``module`` and ``optimizer`` are what a checkpoint saves.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self._group: Group = current_group()
        self._key: Key = (self._group.rank, next(self._group.numbers))
        self._held = Held(module, optimizer)
        self._others = [
            rank
            for rank in range(len(self._group.names))
            if rank != self._group.rank and rank not in self._group.lost
        ]
        self._incarnations = [member.incarnation for member in self._group.members]
        self._failed: str | None = None
        self._called = False
        self._options: list[dict[str, Any]] = []
        self._changed_options()
        self._release = weakref.finalize(self, _let_go, self._group, self._key, self._others)
        self._release.atexit = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns, computed here."""
        return self.module(*args, **kwargs)

    def step(self, before: Before | None = None) -> None:
        """Sum the gradients over all workers, and let every worker take the optimizer's step.

        Afterwards ``.grad`` of the parameters is the sum in this process, until it is zeroed, and ``None`` on the
        others.

        Args:
            before: called with the module on every worker after the gradients have been summed and before the step, to
                clip them, for instance. It must do the same on all workers.

        Raises:
            ResidentError: the module was changed in place; the mirror has ended, or a step of it has failed.
            WorkerLostError: a worker was lost.
            Exception: what ``before`` or the optimizer raises.
        """
        if before is not None and not callable(before):
            raise TypeError(f"before must be a function of the module, got {type(before).__name__}")
        self._check()
        trained, options = self._held.trained(), self._changed_options()
        self._failed = "the module here has not taken it"
        replies = self._ask(_step, self._key, self._held.version, trained, options, before)
        own = beside(self._group, lambda: self._held.reduce(trained))
        _wait(own, replies)
        if own.done() and isinstance(own.exception(), (ResidentError, ValueError)):
            self._failed, self._options = None, []  # all workers know of it, and none has taken the step
        if not own.done() or own.exception() is not None:
            gather({**replies, self._group.rank: own}, self._group.names)
        self._held.step([{} for _ in options], before)
        self._failed = "the module here has taken it"
        gather(replies, self._group.names)
        self._failed, self._called = None, False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients here and on all workers."""
        self.module.zero_grad(set_to_none)
        if self._called and self._end() is None:
            gather(self._ask(_drop, self._key), self._group.names)
            self._held.drop()
            self._called = False

    def sync(self) -> None:
        """Send the module and the optimizer again, as they are in this process; gradients on the workers are dropped.

        Raises:
            ResidentError: the mirror has ended, or a step of it has failed.
            WorkerLostError: a worker was lost.
            SerializationError: the module or the optimizer cannot be sent.
        """
        self._check(unchanged=False)
        held = Held(self.module, self.optimizer)
        held.adopt(self._held)
        self._changed_options()
        gather(self._ask(_hold, self._key, self.module, self.optimizer, held.version), self._group.names)
        self._held = held
        self._group.mirrors.keep(self._key, held)
        self._called = False

    def close(self) -> None:
        """Free the copies on all workers. The module and the optimizer in this process stay as they are."""
        self._release()

    def staying(self) -> tuple[Tensor, Key, int, Sequence[Tensor]]:
        """The tensors that a call does not send, and how a worker finds its own.

        Raises :class:`ResidentError` if the workers do not have them as they are here.
        """
        self._check()
        self._called |= torch.is_grad_enabled()
        tensors = self._held.tensors
        hook = hook_of([tensor for tensor in tensors if tensor.requires_grad])
        return hook, self._key, self._held.version, tensors

    def _start(self, backend: str | None, seconds: float) -> None:
        """Send the module to the other workers, and connect all of them."""
        group = self._group
        copies = gather(self._ask(_hold, self._key, self.module, self.optimizer, 0), group.names)
        group.mirrors.keep(self._key, self._held)
        if not self._others:
            return
        gpus = {group.names[group.rank]: self._held.gpu()}
        gpus.update({group.names[rank]: gpu for rank, (gpu,) in copies.items()})
        backend = _chosen(backend, gpus)
        ranks = sorted([group.rank, *self._others])
        meet(group, ranks, _enter, self._key, backend == "nccl", seconds, seconds=seconds)

    def _ask(self, function: Callable[..., object], *args: Any) -> dict[int, Future[list[Any]]]:
        return {rank: self._group.ask(rank, function, *args) for rank in self._others}

    def _end(self) -> Exception | None:
        """Why the mirror cannot be used any more, if so."""
        if find_group() is not self._group or not self._release.alive:
            return ResidentError("a mirror was used after its end: make a new `todist.mirror`")
        for rank in self._others:
            is_new = self._group.members[rank].incarnation != self._incarnations[rank]
            if is_new or rank in self._group.lost:
                return self._group.membership.loss_of(rank)
        if self._failed is not None:
            return ResidentError(
                f"a step of this mirror has failed: {self._failed}. Make a new `todist.mirror`"
            )
        return None

    def _check(self, *, unchanged: bool = True) -> None:
        end = self._end()
        if end is not None:
            raise end
        changed = self._held.changed() if unchanged else None
        if changed is not None:
            raise ResidentError(
                f"the module of a mirror, {changed}, was changed in place here, so workers have what it was before: "
                "call `sync()` of the mirror after a change, such as loading a checkpoint"
            )

    def _changed_options(self) -> list[dict[str, Any]]:
        """What has changed in the options of the optimizer's groups."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        before, self._options = self._options or [{} for _ in groups], groups
        return [
            {k: v for k, v in now.items() if k not in old or not _same(v, old[k])}
            for now, old in zip(groups, before, strict=True)
        ]


def _wait(own: Future[list[Any]], replies: dict[int, Future[list[Any]]]) -> None:
    """Until this worker's part is done, or another one has failed and this one's does not end as soon."""
    for future in as_completed([own, *replies.values()]):
        if own.done() or future.exception() is not None:
            deque(as_completed([own], GRACE_SECONDS), maxlen=0)
            return


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return not isinstance(one, Tensor)  # which may have been changed in place
    try:
        return type(one) is type(other) and bool(one == other)
    except (ValueError, RuntimeError):  # arrays, which have no one truth value
        return False


def _chosen(backend: str | None, gpus: dict[str, str | None]) -> str:
    """The backend for workers whose copies are on these GPUs: NCCL, if it takes them and no other is asked for.

    Raises:
        ValueError: NCCL is asked for, and does not take them.
    """
    workers: dict[str | None, list[str]] = {}
    for worker, gpu in gpus.items():
        workers.setdefault(gpu, []).append(worker)
    crowded = next((several for several in workers.values() if len(several) > 1), None)
    if backend is None:
        return "gloo" if crowded or None in workers or not dist.is_nccl_available() else "nccl"
    if backend == "nccl" and (crowded or None in workers):
        where = "on one GPU" if None not in workers else "not on a GPU"
        named = ", ".join(workers.get(None) or crowded or [])
        raise ValueError(
            f'backend must be "gloo" or None where workers have their copies {where}, got "nccl" for {named}'
        )
    return backend


def _let_go(group: Group, key: Key, others: list[int]) -> None:
    group.mirrors.release(key)
    for worker in others:
        group.releaser.release(group.transport, worker, key)


# What the other workers do.


def _hold(key: Key, module: nn.Module, optimizer: torch.optim.Optimizer, version: int) -> str | None:
    mirrors, held = answering_group().mirrors, Held(module, optimizer)
    if version:
        held.adopt(mirrors.find(key))
    mirrors.keep(key, held)
    return held.gpu()


def _enter(
    group: Group, store: dist.Store, ranks: list[int], key: Key, on_gpus: bool, seconds: float
) -> None:
    """On each worker: enter the process group of those that hold the mirror."""
    rank, limit = ranks.index(group.rank), timedelta(seconds=seconds)
    check = check_of(group, ranks)
    held = group.mirrors.find(key)
    held.group = watched_group(rank, len(ranks), key[1], store, check, limit, on_gpus=on_gpus)


def _drop(key: Key) -> None:
    answering_group().mirrors.find(key).drop()


def _step(key: Key, version: int, trained: list[int], options: Options, before: Before | None) -> None:
    held = answering_group().mirrors.find(key)
    problem = held.problem(version)
    held.reduce(trained, problem=problem is not None)
    if problem is not None:
        raise problem
    held.step(options, before)
    for tensor in held.tensors:
        tensor.grad = None
