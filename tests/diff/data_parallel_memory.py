"""What a rank of one loop keeps and sends, on each of several ranks."""

from __future__ import annotations

import gc
import time
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import torchopt_dist as todist
from torchopt_dist.diff.adjoints._rank_group import RankGroup


def _held() -> int:
    """Bytes of all tensors that there are, once that stays the same: Gloo's threads let go of messages a bit later."""
    found = [-1, -2]
    while len({*found[-3:]}) > 1:
        time.sleep(0.02)
        gc.collect()
        tensors = [one for one in gc.get_objects() if isinstance(one, Tensor)]
        sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        found.append(sum(sizes.values()))
    return found[-1]


def _count(name: str, times: float, sent: list[float]) -> None:
    """Count what calls of a method of the ranks' group send from now on."""
    method = getattr(RankGroup, name)

    def counted(group: Any, first: Any, *rest: Any) -> Any:
        tensors = first if isinstance(first, list) else [first]
        sent[0] += times * sum(one.numel() * one.element_size() for one in tensors)
        return method(group, first, *rest)

    setattr(RankGroup, name, counted)


def history() -> dict[str, tuple[int, float, float]]:
    """Bytes that a rank keeps of a loop beside its result; of the parameters', those that it sends a step."""
    model = nn.Sequential(nn.Linear(60, 500), nn.Tanh(), nn.Linear(500, 1))
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    of_parameters = sum(one.numel() * one.element_size() for one in model.parameters())
    x = torch.ones(4, 60)
    scale = torch.ones((), requires_grad=True)
    sent, size = [0.0], dist.get_world_size()
    share = (size - 1) / size  # of a ring
    for name, times in (("all_reduce", 2 * share), ("all_gather", share), ("reduce_scatter", size * share)):
        _count(name, times, sent)
    found = {}
    for name, shard, adjoint in (
        ("whole", None, todist.Replayed()),
        ("sharded", None, todist.Replayed(sharded=True)),
        ("state", "state", todist.Replayed()),
        ("parameters", "parameters", todist.Replayed(blocks="auto")),
    ):

        def adapted(adjoint: Any = adjoint, shard: Any = shard) -> Any:
            return todist.inner_loop(
                lambda m: (m(x * scale) ** 2).mean(),
                todist.adam(lr=0.01),
                model,
                16,
                meta=scale,
                adjoint=adjoint,
                parallel=todist.DataParallel(shard=shard),
            )

        begin = sent[0]
        made = adapted()
        forward = sent[0]
        torch.autograd.grad((made.params(x) ** 2).mean(), scale)
        backward = sent[0]
        made = adapted()
        results = [*made.params.parameters(), *todist.pytree.flatten(made.state)[0]]
        of_results = sum(one.numel() * one.element_size() for one in results if isinstance(one, Tensor))
        before = _held()
        del made, results
        steps = 16 * of_parameters
        found[name] = (before - _held() - of_results, (forward - begin) / steps, (backward - forward) / steps)
    return found


class _Live(TorchDispatchMode):
    """The most bytes that the results of operations have had at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._held = 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._held = {name: one for name, one in self._held.items() if not one[0].expired()}
        for leaf in todist.pytree.flatten(made)[0]:
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._held.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, sum(size for _, size in self._held.values()))
        return made


def peaks() -> dict[str, tuple[float, float]]:
    """The most that a rank has at a time in a loop, and in its backward pass, in parameters of sixteen blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)))
    of_parameters = sum(one.numel() * one.element_size() for one in model.parameters())
    scale = torch.ones((), requires_grad=True)
    x = torch.ones(2, 64)
    found = {}
    shards: dict[str, Literal["parameters"] | None] = {"whole": None, "parameters": "parameters"}
    for name, shard in shards.items():
        with _Live() as forward:
            made = todist.inner_loop(
                lambda m: (m(x * scale) ** 2).mean(),
                todist.adam(lr=0.01),
                model,
                2,
                meta=scale,
                adjoint=todist.Replayed(blocks="auto", snapshots=1),
                parallel=todist.DataParallel(shard=shard),
            )
        value = (made.params(x) ** 2).mean()
        with _Live() as backward:
            torch.autograd.grad(value, scale)
        found[name] = (forward.most / of_parameters, backward.most / of_parameters)
        del made, value
    return found


def history_and_peaks() -> tuple[Any, Any]:
    """Both."""
    return peaks(), history()
