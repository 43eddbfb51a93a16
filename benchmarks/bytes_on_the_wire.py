"""How many bytes does a call send for T tasks on W workers with a model of M bytes? Ours against TorchOpt's.

Counted is what goes into ``rpc_async``, as torch's own pickler makes it: the pickle and the tensors' storages. TorchOpt
is counted if it is installed (``pip install --no-deps torchopt``).
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from page import ratio, table
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.rpc.internal import PythonUDF, serialize
from workers import start_workers

import torchopt_dist as todist

try:
    import torchopt.distributed as torchopt_distributed
except ImportError:
    torchopt_distributed = None

WIDTH, ROWS = 512, 16


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def their_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


if (
    torchopt_distributed is not None
):  # at the module's top, where all workers find the name that it gives the function
    torchopts = torchopt_distributed.parallelize(
        torchopt_distributed.dim_partitioner(0, exclusive=True, keepdim=False),
        torchopt_distributed.mean_reducer,
    )(their_loss)


def bytes_sent(function: Any, *args: Any) -> int:
    total = 0
    send = rpc.rpc_async

    def counting(to: Any, func: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        nonlocal total
        data, tensors = serialize(PythonUDF(func, args or (), kwargs or {}))
        total += len(data) + sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        return send(to, func, args, kwargs, **options)

    with patch.object(rpc, "rpc_async", counting), torch.no_grad():
        function(*args)
    return total


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
def main() -> None:
    if todist.get_rank() != 0:
        return
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    others = todist.get_world_size() - 1
    spread = todist.parallelize(
        todist.dim_partitioner(0, exclusive=True, keepdim=False), todist.mean_reducer
    )(loss)
    spread(
        model, torch.zeros(todist.get_world_size(), ROWS, WIDTH)
    )  # the structure travels the first time only
    print(f"{todist.get_world_size()} workers, one of them the caller; a model of {model_bytes:,} bytes.")
    rows, over, of_theirs = [], [], []
    for tasks in (3, 12, 48, 192):
        x = torch.zeros(tasks, ROWS, WIDTH)
        ours = bytes_sent(spread, model, x)
        floor = others * model_bytes + x.numel() * x.element_size() * others // (others + 1)
        row = [f"{tasks}", f"{ours:,}", f"{floor:,}"]
        over.append(ours / floor)
        if torchopt_distributed is not None:
            theirs = bytes_sent(torchopts, model, x)
            row.append(f"{theirs:,}")
            of_theirs.append(ours / theirs)
        rows.append(row)
    table(["tasks", "ours", "W·M + shards", *(["TorchOpt"] if of_theirs else [])], rows)
    question = "bytes sent, 3 to 192 tasks on 3 workers"
    ratio(question, "a model a worker, and the shards", f"{max(over):.4f}")
    if of_theirs:
        ratio(question, "TorchOpt", f"{min(of_theirs):.3f} to {max(of_theirs):.2f}")


if __name__ == "__main__":
    start_workers(3)
    main()
