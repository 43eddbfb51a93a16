"""What ``gpus.md``, ``compile.md``, ``one_loop.md`` and ``put.md`` say of devices.

The other tests of this folder show the rest; the table on ``gpus.md`` says which.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import torchopt_dist as todist
from tests.docs.test_examples import check_output, programs
from tests.gpu.device import DEVICE, GPU, assert_near, needs_gpu, on_device
from tests.gpu.test_calls import adapted_loss, data, network
from tests.processes import World, python, torchrun

DOCS = Path(__file__).resolve().parents[2] / "docs"
KIND = DEVICE.type
GPUS = max(1, torch.cuda.device_count())


@pytest.mark.parametrize("page", ["gpus"])
def test_programs_of_the_pages_run_there(page: str, tmp_path: Path) -> None:
    """As they are printed; those of one process, and by torchrun on two workers."""
    text = (DOCS / f"{page}.md").read_text("utf-8")
    (program,) = programs(text).values()
    on_the_gpu = re.sub(r'autocast\("cpu"', f'autocast("{KIND}"', program.code)
    path = tmp_path / f"{page}.py"
    path.write_text(f"import torch\ntorch.set_default_device('{KIND}')\n" * (page != "gpus") + on_the_gpu)
    done = python(path, timeout=100)
    assert done.returncode == 0, done.stderr
    check_output(program, done.stdout)
    size = GPUS if GPU and page == "gpus" else 2  # that page has a worker for each GPU
    workers = ["--standalone", f"--nproc_per_node={size}", path]
    # Unbuffered, a line and its end are two writes, and those of two workers mix.
    whole_lines = {"PYTHONUNBUFFERED": ""}
    check_output(program, torchrun(*workers, warm=False, timeout=100, **whole_lines))


def use_own_gpu() -> None:
    torch.set_default_device(f"cuda:{todist.get_local_rank() % GPUS}" if GPU else "cpu")


def device_of_a_new_tensor() -> str:
    return torch.ones(1).device.type


def test_worker_init_fn_sets_the_device_of_the_threads_that_answer() -> None:
    def body() -> list[str]:
        return [todist.remote_call(device_of_a_new_tensor, rank) for rank in range(2)]

    assert World(2).on_zero(body, worker_init_fn=use_own_gpu) == [KIND, KIND]


def rank_and_size() -> tuple[int, int]:
    return todist.get_rank(), todist.get_world_size()


@pytest.mark.parametrize("number", ["gpu", "gpu:2", "auto"])
def test_a_launch_starts_a_worker_for_each_gpu(number: str) -> None:
    if number != "auto" and torch.cuda.device_count() < (2 if number == "gpu:2" else 1):
        with pytest.raises(ValueError, match="must not ask for more GPUs than there are"):
            todist.launch(rank_and_size, nproc_per_host=number)
        return
    made = todist.launch(rank_and_size, nproc_per_host=number, rpc=True)
    size = made.rank(0)[1]
    assert size == (2 if number == "gpu:2" else GPUS) if GPU else size >= 1


def half_precision() -> None:
    """``torch.autocast`` around a call holds in its tasks, here and on the other worker."""
    model, (x, y) = on_device(network()), on_device(data())

    def task(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, float]]:
        output = model(x)
        return F.mse_loss(output.float(), y), {"half": float(output.dtype == torch.bfloat16)}

    spread = todist.parallelize(todist.tasks, todist.mean_reducer)
    with torch.autocast(KIND, dtype=torch.bfloat16):
        loss, seen = spread(task)(model, x, y)
        adapted = spread(adapted_loss)(model, x, y)
    assert seen["half"].item() == 1
    grads = torch.autograd.grad(loss + adapted, list(model.parameters()))
    assert {grad.dtype for grad in grads} == {torch.float32}
    assert_near([adapted], [spread(adapted_loss)(model, x, y)], 0.1)


def test_autocast_goes_with_a_call() -> None:
    World(2).on_zero(half_precision)


@needs_gpu
def test_a_grad_scaler_works_with_our_optimizers_and_a_checkpointer_saves_it(tmp_path: Path) -> None:
    losses = []
    for make in (todist.Adam, torch.optim.Adam):
        model, (x, y) = on_device(network()), on_device(data())
        optimizer, scaler = make(model.parameters(), lr=0.01), torch.amp.GradScaler("cuda", init_scale=2.0**8)
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.mse_loss(model(x[0]).float(), y[0])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    scaler.update(64.0)
    todist.Checkpointer(tmp_path).save(1, {"scaler": scaler})
    other = torch.amp.GradScaler("cuda")
    todist.Checkpointer(tmp_path).restore({"scaler": other})
    assert other.get_scale() == 64.0


def test_a_kernel_that_is_demanded_is_there_or_an_error_says_why() -> None:
    params = [torch.ones(3, device=DEVICE)]
    optimizer = todist.adam(lr=0.1, fused=True)
    why = todist.ops.why_not("adam", DEVICE)
    if why is None:
        optimizer.update(params, optimizer.init(params), params=params)
    else:
        with pytest.raises(RuntimeError, match=re.escape(why)):
            optimizer.update(params, optimizer.init(params), params=params)
    printed = python("-m", "torchopt_dist", timeout=100).stdout
    assert ("GPU 0" in printed) == GPU


def of_the_default_group() -> tuple[float, str]:
    tensor = torch.full((3,), float(dist.get_rank() + 1), device=DEVICE)
    dist.all_reduce(tensor)
    return tensor[0].item(), str(dist.get_backend_config())


def test_a_process_group_beside_calls_is_nccl_for_tensors_on_gpus() -> None:
    def body() -> tuple[float, str]:
        return of_the_default_group()

    ((total, backend),) = World(1).run(body, process_group="auto")
    assert total == 1
    assert ("nccl" in backend) == GPU
    if GPU:
        made = todist.launch(of_the_default_group, nproc_per_host=1, backend="nccl")
        assert made.rank(0)[0] == 1
    two = World(2).run(body, process_group="gloo")
    assert [total for total, _ in two] == [3, 3]


def test_numbers_of_a_gpu_generator_do_not_depend_on_who_computes() -> None:
    """In ``gradients.md``: a GPU's generator in a task."""

    def drawn(index: Tensor) -> Tensor:
        return torch.rand(4, device=DEVICE) + 0 * index.to(DEVICE)

    def body() -> Any:
        torch.manual_seed(3)
        return todist.parallelize(todist.tasks, todist.stack_reducer)(drawn)(torch.arange(4.0)).tolist()

    one, two = (World(size).on_zero(body) for size in (1, 2))
    assert one == two
    assert len({tuple(row) for row in one}) == 4
