"""Functions that tests call on workers; importable there."""

from __future__ import annotations

import signal
import time

import optree
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import torchopt_dist as todist
from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.serialization.wire import ALIGNMENT


class Net(nn.Module):
    """Two layers whose weights are tied, a frozen one, a BatchNorm and a non-persistent buffer."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, dtype=dtype)
        self.tied = nn.Linear(6, 6, dtype=dtype)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6, dtype=dtype).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6, dtype=dtype)
        self.last = nn.Linear(6, 3, dtype=dtype)
        self.register_buffer("shift", torch.full((6,), 0.5, dtype=dtype), persistent=False)

    def forward(self, x):
        x = torch.tanh(self.first(x)) + self.shift
        x = torch.tanh(self.tied(x))
        x = torch.tanh(self.frozen(x))
        return self.last(self.norm(x) if self.training else x)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def mse(model, x, y):
    return F.mse_loss(model(x), y)


def functional_mse(params, x, y):
    return F.mse_loss(functional_call(mlp(), params, (x,)), y)


def product(a, b):
    return (a * b).sin(), a.exp() * b**2


def cube(x):
    return (x**3).sum()


def chain(depth, x):
    """A call in a call, ``depth`` deep, round and round the workers."""
    if depth == 0:
        return cube(x)
    neighbour = (todist.get_rank() + 1) % todist.get_world_size()
    return 1.1 * todist.remote_sync_call(chain, args=(depth - 1, x), partitioner=neighbour)[0]


def kept():
    return len(current_group().kept_graphs)


def kept_on(worker, limit=5.0):
    """The number of graphs a worker keeps, once it is 0 or the limit has passed."""
    deadline = time.monotonic() + limit
    while (count := todist.remote_sync_call(kept, partitioner=worker)[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return count


def data(rows=10, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 6, dtype=dtype, generator=generator)
    y = torch.randn(rows, 3, dtype=dtype, generator=generator)
    return x, y


def gradients(loss, model):
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


def lie_right(*tensors):
    """Whether all lie where torch's allocator would have put them, so that equal products have equal bits."""
    return not any(tensor.data_ptr() % ALIGNMENT for tensor in tensors)


def where(x):
    return todist.get_rank(), x


def rank_of_worker():
    return todist.get_rank()


def vectors(n=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(2)]


def remote(function, worker=1):
    return lambda *args, **kwargs: todist.remote_sync_call(
        function, args=args, kwargs=kwargs, partitioner=worker
    )[0]


def split(partitioner, *args, **kwargs):
    """``[(worker, args, kwargs)]`` with lists in the tensors' places."""

    def plain(leaf):
        return leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf

    return [
        (part.worker, *optree.tree_map(plain, (part.args, part.kwargs), none_is_leaf=True))
        for part in partitioner(*args, **kwargs)
    ]


class Tagged(torch.Tensor):
    """A class that the workers know."""


def class_names(*tensors):
    return [type(tensor).__name__ for tensor in tensors]


def edges(twigs, parent=0):
    """Parent and child, each, in a tree of workers."""
    for twig in twigs:
        yield parent, twig.worker
        yield from edges(twig.twigs, twig.worker)


# Workers that are lost.


def survive(world, body, *args, transport="auto"):
    """What ``body`` returns on rank 0 of a world of that size, of which it may kill workers; the others end well."""

    def main():
        return body(*args) if todist.get_rank() == 0 else None

    endings = world.endings(main, timeout=100, on_loss="continue", transport=transport)
    if endings[0].error is not None:
        raise endings[0].error
    assert {ending.exitcode for ending in endings} <= {0, -signal.SIGKILL}
    return endings[0].value


def count(folder):
    """Note in the folder that a task runs; any number of processes may do so at a time."""
    with (folder / "runs").open("a") as file:
        file.write(f"{todist.get_rank()}\n")


def runs(folder):
    return [int(line) for line in (folder / "runs").read_text().split()]
