"""How much faster is a MAML step on two workers? Against one process, torch.distributed.autograd, and TorchOpt.

The tasks of one process are in a loop, and in torch's ``vmap`` beside ours with ``vectorize=True``.

MLP 784-64-64-5, 32 tasks of 25 + 75 images, 5 inner steps, 2 workers of one thread. Run it by ``python``; TorchOpt is
timed if it is installed (``pip install --no-deps torchopt``). Every way's gradient is compared with one process's.
The line "half the tasks" is the floor: no two workers can end before one of them has done its half.
"""

from __future__ import annotations

import torch
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from page import ratio, table
from torch import Tensor, nn
from torch.distributed import rpc
from torch.func import functional_call
from workers import interleaved, start_workers

import torchopt_dist as todist

try:
    import torchopt
    import torchopt.distributed as torchopt_distributed
except ImportError:
    torchopt = None

TASKS, STEPS, LR = 32, 5, 0.1
OURS = ("ours", "ours, vectorize=True")
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))


with torch.device("meta"):
    SHAPE = build_model()  # what `functional_call` calls with the parameters it is given


def task(model: nn.Module, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor) -> Tensor:
    adapted = todist.module_clone(model, by="reference", detach_buffers=True)
    optimizer = todist.MetaSGD(adapted, lr=LR)
    for _ in range(STEPS):
        optimizer.step(F.cross_entropy(adapted(sx), sy))
    return F.cross_entropy(adapted(qx), qy)


def tasks_in_a_loop(model: nn.Module, *batch: Tensor) -> Tensor:
    return torch.stack([task(model, *tensors) for tensors in zip(*batch, strict=True)]).sum()


def torchopt_task(model: nn.Module, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor) -> Tensor:
    adapted = torchopt.module_clone(model, by="reference", detach_buffers=True)
    optimizer = torchopt.MetaSGD(adapted, lr=LR)
    for _ in range(STEPS):
        optimizer.step(F.cross_entropy(adapted(sx), sy))
    return F.cross_entropy(adapted(qx), qy)


def functional_task(params: dict[str, Tensor], sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor) -> Tensor:
    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(SHAPE, params, (x,)), y)

    for _ in range(STEPS):
        grads = torch.func.grad(loss)(params, sx, sy)
        params = {name: p - LR * grads[name] for name, p in params.items()}
    return loss(params, qx, qy)


each_task = todist.dim_partitioner(0, exclusive=True, keepdim=False)
ours = todist.parallelize(each_task, todist.mean_reducer)(task)
if torchopt is not None:  # at the module's top, where both workers find the name that it gives the function
    torchopts = torchopt_distributed.parallelize(
        partitioner=torchopt_distributed.dim_partitioner(0, exclusive=True, keepdim=False),
        reducer=torchopt_distributed.mean_reducer,
    )(torchopt_task)
ours_vectorized = todist.parallelize(each_task, todist.mean_reducer, vectorize=True)(functional_task)


def step_ours(model: nn.Module, batch: Batch) -> None:
    ours(model, *batch).backward()


def step_vectorized(model: nn.Module, batch: Batch) -> None:
    ours_vectorized(todist.replicated(dict(model.named_parameters())), *batch).backward()


def step_one_process(model: nn.Module, batch: Batch) -> None:
    (tasks_in_a_loop(model, *batch) / TASKS).backward()


def step_vmap(model: nn.Module, batch: Batch) -> None:
    in_dims = (None, 0, 0, 0, 0)
    torch.func.vmap(functional_task, in_dims)(dict(model.named_parameters()), *batch).mean().backward()


def step_torch(model: nn.Module, batch: Batch) -> None:
    half = TASKS // 2
    with dist_autograd.context() as context_id:
        clone = todist.module_clone(model, by="clone")
        theirs = [tensor[half:].clone() for tensor in batch]
        future = rpc.rpc_async("worker1", tasks_in_a_loop, args=(clone, *theirs))
        mine = tasks_in_a_loop(clone, *(tensor[:half] for tensor in batch))
        dist_autograd.backward(context_id, [(mine + future.wait()) / TASKS])
        grads = dist_autograd.get_gradients(context_id)
        for parameter in model.parameters():
            parameter.grad = grads[parameter]


def step_torchopt(model: nn.Module, batch: Batch) -> None:
    with torchopt_distributed.autograd.context() as context_id:
        loss = torchopts(torchopt.module_clone(model, by="clone"), *batch)
        torchopt_distributed.autograd.backward(context_id, loss)


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
def main() -> None:
    if todist.get_rank() != 0:
        return
    torch.manual_seed(0)
    model = build_model()
    batch = (
        torch.rand(TASKS, 25, 784),
        torch.randint(5, (TASKS, 25)),
        torch.rand(TASKS, 75, 784),
        torch.randint(5, (TASKS, 75)),
    )
    steps = {
        "one process": step_one_process,
        "one process, vmap": step_vmap,
        "torch.distributed.autograd": step_torch,
        "ours": step_ours,
        "ours, vectorize=True": step_vectorized,
    }
    if torchopt is not None:
        steps["TorchOpt"] = step_torchopt
    reference: list[Tensor] = []
    for name, step in steps.items():
        model.zero_grad()
        step(model, batch)
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        reference = reference or grads
        error = max(
            ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(grads, reference, strict=True)
        )
        assert error < 1e-5, f"the gradient of {name} is off by {error:.1e} of the largest one"
    half: Batch = tuple(tensor[: TASKS // 2] for tensor in batch)
    timed = {name: lambda s=step: s(model, batch) for name, step in steps.items()}
    timed["half the tasks, one process"] = lambda: step_one_process(model, half)
    timed["half the tasks, one process, vmap"] = lambda: step_vmap(model, half)
    seconds = interleaved(timed, rounds=15)
    part = {way: {name: f"{seconds[way] / value:.2f}" for name, value in seconds.items()} for way in OURS}
    table(
        ["", "ms a step", *(f"{way}, of its time" for way in OURS)],
        [[name, f"{value * 1e3:.1f}", *(part[way][name] for way in OURS)] for name, value in seconds.items()],
    )
    for way, question in zip(OURS, ("tasks in a loop", "`vectorize=True`"), strict=True):
        for peer in steps:
            if peer not in OURS:
                ratio(f"a MAML step on two workers, {question}", peer, part[way][peer])


if __name__ == "__main__":
    start_workers(2)
    main()
