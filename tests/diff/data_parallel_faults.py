"""What goes wrong on one rank of a loop → the errors on all of them."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchopt_dist as todist
from tests.diff.data_parallel_cases import steps_of
from torchopt_dist import pytree
from torchopt_dist.collectives.watched_group import TookTooLongError


def _of_ones(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.fill_(1.0)


RATES = [0.1, 0.2]


def others(rank: int) -> dict[str, Any]:
    """Optimizers with states of one structure, of which each rank has another one."""
    transform = todist.transform
    rate, held = RATES[rank], [0.1 * (rank + 1)]

    class Halved:
        def __init__(self) -> None:
            self.rate = rate

        def __call__(self, step: Any) -> Any:
            return self.rate / (step + 1)

    return {
        "rate": todist.sgd(lr=rate),
        "rate of a tensor": todist.sgd(lr=torch.tensor(rate)),
        "rate of a leaf": todist.chain(transform.masked(todist.sgd(lr=rate), [True])),
        "betas": todist.adam(lr=0.1, betas=(0.9 - 0.3 * rank, 0.99)),
        "momentum": todist.sgd(lr=0.1, momentum=0.5 + 0.4 * rank),
        "nesterov": todist.sgd(lr=0.1, momentum=0.9, nesterov=bool(rank)),
        "kind": todist.sgd(lr=0.1) if rank else todist.chain(transform.centralize(), transform.scale(-0.1)),
        "schedule": todist.sgd(lr=[lambda step: 0.1 + 0 * step, lambda step: 0.1 / (step + 1)][rank]),
        "schedule's number": todist.sgd(lr=lambda step: rate / (step + 1)),
        "schedule's list": todist.sgd(lr=lambda step: held[0] / (step + 1)),
        "schedule's default": todist.sgd(lr=lambda step, rate=rate: rate / (step + 1)),
        "schedule of a class": todist.sgd(lr=Halved()),
        "schedule of ours": todist.sgd(lr=todist.schedule.linear_schedule(rate, 0.0, 10)),
        "decay of some": todist.chain(transform.add_decayed_weights(rate, mask=[True]), todist.sgd(lr=0.1)),
    }


def by_shape(params: Any) -> Any:
    return pytree.map_tensors(lambda p: p.ndim < 2, params)


def halved(updates: Any, state: Any, *, params: Any = None, inplace: bool = False) -> Any:
    return pytree.map_tensors(lambda one: one / 2, updates), state


_IDENTITY = todist.transform.identity()
WHOLE = {
    "drawn": todist.chain(todist.transform.add_noise(1.0, 0.0, seed=0), todist.sgd(lr=1.0)),
    "counted": todist.transform.apply_if_finite(todist.sgd(lr=0.1), 5),
    "clipped by unit": todist.chain(todist.transform.adaptive_grad_clip(0.1), todist.sgd(lr=0.1)),
    "centered": todist.chain(todist.transform.centralize(), todist.sgd(lr=0.1)),
    "of LAMB": todist.lamb(lr=0.1),
    "of Muon": todist.muon(lr=0.1),
    "of Adafactor": todist.adafactor(lr=0.1),
    "chosen by shape": todist.transform.masked(todist.sgd(lr=0.1), by_shape),
    "decayed by shape": todist.chain(
        todist.transform.add_decayed_weights(0.1, mask=by_shape), todist.sgd(0.1)
    ),
    "within another": todist.transform.multi_steps(todist.lamb(lr=0.1), 2),
    "of a rate for each entry": todist.sgd(lr=[torch.ones(2)]),
    "undeclared": todist.chain(todist.transform.GradientTransformation(_IDENTITY.init, halved)),
    "made from numbers": todist.transform.inject_hyperparams(todist.lamb)(lr=0.1),
}


def messages() -> dict[str, str]:
    """What ranks are told that do not agree, or that ask for what cannot be."""
    rank = dist.get_rank()
    w = torch.ones(2, requires_grad=True)
    x = torch.ones(2, requires_grad=True)
    rate = torch.tensor(0.1, requires_grad=True)
    parallel = todist.DataParallel()

    def run(
        start: Tensor = w,
        steps: int = 2,
        loss: Any = None,
        parallel: Any = parallel,
        by: Any = None,
        **options: Any,
    ) -> Any:
        loss = loss or (lambda w: ((w - x) ** 2).sum())
        impl = by or todist.sgd(lr=0.1)
        return todist.inner_loop(loss, impl, start, steps, parallel=parallel, **options)

    def alone(w: Tensor) -> Tensor:
        if rank == 1:
            raise KeyError("no such example")
        return ((w - x) ** 2).sum()

    asked: dict[str, Callable[[], Any]] = {
        "steps": lambda: run(steps=2 + rank),
        "settings": lambda: run(adjoint=todist.Replayed(snapshots=1 + rank)),
        "one alone": lambda: run(loss=alone, meta=x),
        "shapes": lambda: run(torch.ones(2 + rank, requires_grad=True), loss=lambda w: (w**2).sum()),
        "values": lambda: run(torch.ones(2).add(rank).requires_grad_()),
        "values of samples": lambda: torch.vmap(lambda w: run(w, loss=lambda w: (w**2).sum()).params)(
            torch.ones(3, 2).add(rank).requires_grad_()
        ),
        "meta": lambda: run(meta=x.detach().add(rank).requires_grad_()),
        "not in meta": lambda: run(parallel=todist.DataParallel(own=x)),
        "in the optimizer": lambda: todist.inner_loop(
            lambda w: (w**2).sum(),
            todist.sgd(lr=rate),
            w,
            2,
            meta=rate,
            parallel=todist.DataParallel(own=rate),
        ),
        "compiled": lambda: run(compile=True),
        **{
            f"other {what}": lambda impl=impl: todist.inner_loop(
                lambda ws: ((ws[0] - x) ** 2).sum(), impl, [w], 2, parallel=parallel
            )
            for what, impl in others(rank).items()
        },
        "other state": lambda: run(
            state=pytree.map_tensors(lambda one: one + rank, todist.adam(lr=0.1).init(w)),
            by=todist.adam(lr=0.1),
        ),
        **{
            f"parts {what}": lambda impl=impl: todist.inner_loop(
                lambda ws: (ws[0] ** 2).sum(), impl, [w], 2, parallel=todist.DataParallel(shard="state")
            )
            for what, impl in WHOLE.items()
        },
        "parts of a norm": lambda: todist.inner_loop(
            lambda w: (w**2).sum(),
            todist.chain(todist.transform.clip_grad_norm(0.1), todist.sgd(lr=0.1)),
            w,
            2,
            parallel=todist.DataParallel(shard="state"),
        ),
        "parts by block": lambda: run(
            parallel=todist.DataParallel(shard="state"), adjoint=todist.Replayed(blocks="auto")
        ),
        "parameters without blocks": lambda: run(parallel=todist.DataParallel(shard="parameters")),
        "outside of its block": lambda: todist.inner_loop(
            lambda model: model(torch.ones(1, 2)).sum() + (model[0].weight ** 2).sum(),
            todist.sgd(lr=0.1),
            nn.Sequential(*(nn.Linear(2, 2) for _ in range(2))).apply(_of_ones),
            1,
            adjoint=todist.Replayed(blocks="auto"),
            parallel=todist.DataParallel(shard="parameters"),
        ),
        "diagnosed parts": lambda: run(parallel=todist.DataParallel(shard="state"), diagnose=True),
        "parts of products": lambda: run(parallel=todist.DataParallel(shard="state"), adjoint=todist.SAMA()),
        "shard": lambda: todist.DataParallel(shard="all"),
        "group": lambda: todist.DataParallel("gloo"),
        "type": lambda: run(parallel="gloo"),
        "wrapped": lambda: todist.inner_loop(
            lambda model: model(torch.ones(1, 2)).sum(),
            todist.sgd(lr=0.1),
            nn.parallel.DistributedDataParallel(nn.Linear(2, 1)),
            1,
        ),
    }
    found = {}
    for name, ask in asked.items():
        try:
            ask()
        except (TypeError, ValueError, KeyError, todist.errors.CollectiveError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return found


def dies(when: str) -> None:
    """Rank 1 dies in the loop, or in the backward pass."""
    x = torch.ones(2, requires_grad=True)
    calls = [0]

    def loss(w: Tensor) -> Tensor:
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] == (3 if when == "forward" else 7):
            os.kill(os.getpid(), signal.SIGKILL)
        return ((w - x) ** 4).sum()

    made = todist.inner_loop(
        loss,
        todist.sgd(lr=0.01),
        torch.zeros(2, requires_grad=True),
        5,
        meta=x,
        adjoint=todist.Replayed(snapshots=1),
        parallel=todist.DataParallel(),
    )
    torch.autograd.grad(made.params.sum(), x)


def is_told_who_died(rank: int, store: str, when: str, answers: Any) -> None:
    """One of three processes that nobody has launched, so that nobody else tells of rank 1, which dies."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    try:
        dies(when)
    except todist.errors.CollectiveError as error:
        answers.put(str(error))
    os._exit(0)  # without a barrier, which would wait for it


class _OnlyBackward(torch.autograd.Function):
    """The square, with two derivatives by reverse mode alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The square."""
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> Tensor:
        """Twice the number."""
        (x,) = ctx.saved_tensors
        return 2 * x * bar


def alone_in_something() -> dict[str, Any]:
    """One rank alone stops, has no forward mode, or raises an error in the backward pass; and what comes after it."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    x = torch.full((2,), 2.0, dtype=torch.float64, requires_grad=True)
    parallel = todist.DataParallel()
    found: dict[str, Any] = {}

    made = steps_of(
        lambda w: ((w - x) ** 2).sum(), x, parallel=parallel, stop=lambda number, _: number == 1 + 9 * rank
    )
    found["losses"] = made.losses.tolist()

    def by_parts(w: Tensor, first: bool) -> Tensor:
        if first:
            return ((w - x) ** 2).sum() ** 2
        inner = w - x
        square: Any = _OnlyBackward.apply if dist.is_initialized() else torch.square
        return square(inner).sum() * x.sum()

    made = steps_of(
        lambda w: by_parts(w, rank == 0),
        x,
        parallel=parallel,
        adjoint=todist.Replayed(snapshots=1),
    )
    found["no forward mode"] = torch.autograd.grad(made.params.sum(), x)[0].tolist()
    made = steps_of(lambda w: (by_parts(w, True) + by_parts(w, False)) / 2, x, adjoint=todist.Recorded())
    found["both parts"] = torch.autograd.grad(made.params.sum(), x)[0].tolist()

    calls = [0]

    def fails(w: Tensor) -> Tensor:
        calls[0] += 1
        if rank == 1 and calls[0] == 6:
            raise KeyError("in the backward pass")
        return ((w - x) ** 4).sum()

    made = steps_of(fails, x, parallel=parallel)
    try:
        torch.autograd.grad(made.params.sum(), x)
    except (KeyError, todist.errors.CollectiveError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    made = steps_of(lambda w: ((w - x) ** 2).sum(), x, parallel=parallel)
    found["after"] = torch.autograd.grad(made.params.sum(), x)[0].tolist()
    return found


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same values."""
        return x.clone()


class _FailsTwice(_Identity):
    """Its second derivative raises an error on rank 1."""

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> Any:
        """Its transpose."""
        return _Fails.apply(bar)


class _Fails(_Identity):
    """Its derivative raises an error on rank 1."""

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> Tensor:
        """Its transpose, on rank 0."""
        if dist.get_rank() == 1:
            raise KeyError("a node of the caller's")
        return bar


def tells_of(where: str, adjoint: Any, shard: Any) -> str:
    """What a rank raises if rank 1 fails alone in the loss, or in a node of a backward pass; rank 1 lives on."""
    calls = [0]
    twice: Any = _FailsTwice.apply
    x = torch.full((2,), 2.0, dtype=torch.float64, requires_grad=True)

    def loss(w: Tensor) -> Tensor:
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] == {"loss": 2, "again": 5}.get(where, 0):
            raise KeyError("in the loss")
        return ((twice(w) if where == "node" else w) - x).square().sum()

    answer = "no error"
    try:
        made = steps_of(loss, x, adjoint=adjoint, parallel=todist.DataParallel(shard=shard))
        torch.autograd.grad(made.params.sum(), x)
    except (KeyError, todist.errors.CollectiveError) as error:
        answer = f"{type(error).__name__}: {error}"
    dist.barrier()
    return answer


def scattered_sums() -> list[Any]:
    """Sums of rows, of which each rank has its own, of one tensor and of a list; and a wait for a rank that is late."""
    rank, ranks, late = dist.get_rank(), todist.DataParallel().ranks, ""
    group, signs = ranks._group, ranks._signs
    assert group is not None
    assert signs is not None
    one, other = torch.zeros(2), torch.zeros(1 + rank)
    group.run("_reduce_scatter_base", one, torch.arange(4.0) + rank).wait()
    work = group.run("reduce_scatter", [other], [[torch.full((1,), 1.0 + rank), torch.full((2,), 10.0)]])
    while not work.is_completed():
        pass
    if rank == 0:
        work = group.run("_reduce_scatter_base", torch.zeros(2), torch.ones(4))
        try:
            work.wait(timedelta(seconds=0.1))
        except TookTooLongError as error:
            late = str(error)
    dist.barrier()
    ranks._close(None, group, signs)
    return [one.tolist(), other.tolist(), late]


def never_comes(to: str) -> str:
    """Rank 1 does not come to a loop, or to its backward pass; rank 0 is told so, and both go on together."""
    os.environ["TODIST_LIVENESS"] = "interval=0.2,patience=60"
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    impatient = todist.DataParallel(dist.new_group(timeout=timedelta(seconds=2)))
    begun, answer = time.monotonic(), "no error"

    def run() -> Any:
        return steps_of(lambda w: ((w - x) ** 2).sum(), x, parallel=impatient)

    made = None if to == "the first loop" else run()
    if dist.get_rank() == 0:
        try:
            made = made if to == "backward" else run()
            torch.autograd.grad(made.params.sum(), x)
        except todist.errors.CollectiveError as error:
            answer = f"{error} after {time.monotonic() - begun:.0f} s"
    dist.barrier()
    if to == "the first loop" and dist.get_rank() == 1:
        try:
            run()
        except todist.errors.CollectiveError as error:
            answer = str(error)
    dist.barrier()
    return f"{answer}; then {run().losses[0]:.1f}" if to == "the first loop" else answer


def ends_early() -> str:
    """Rank 1 returns before its first loop; rank 0 is told so."""
    if dist.get_rank() == 1:
        return "done"
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    try:
        steps_of(lambda w: ((w - x) ** 2).sum(), x, parallel=todist.DataParallel())
    except todist.errors.CollectiveError as error:
        return str(error)
    return "no error"


def is_stopped() -> str:
    """Rank 1 is stopped in its loss; rank 0 is told so, and lets it go on. Who has started them is more patient."""
    os.environ["TODIST_LIVENESS"] = "interval=0.2,patience=1"
    rank = dist.get_rank()
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    calls = [0]

    def loss(w: Tensor) -> Tensor:
        calls[0] += 1
        if rank == 1 and calls[0] == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return ((w - x) ** 2).sum()

    try:
        steps_of(loss, x, parallel=todist.DataParallel())
    except todist.errors.CollectiveError as error:
        os.kill(pids[1], signal.SIGCONT)
        return str(error)
    return "no error"
