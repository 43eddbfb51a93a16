"""Every raw op's kernel for CUDA → the numbers of its formula, whatever the lengths, strides, streams and devices.

Without a GPU they are skipped here; ``tests/packaging/test_cuda_build.py`` runs them on an emulation.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops.cases import (
    DTYPES,
    OPS,
    assert_near,
    assert_only_read,
    assert_tied_parameters_are_stepped_in_their_order,
    case,
    kernels,
    moved,
    random_case,
)
from torchopt_dist import ops

DEVICE = torch.device(os.environ.get("EMULATED_CUDA_DEVICE", "cuda"))
EMULATED = DEVICE.type != "cuda"
GPUS = 0 if EMULATED else torch.cuda.device_count()
CHUNK = 2048  # csrc/cuda_kernel.h
NONE = torch.empty(0, dtype=torch.float64)
reason = None if EMULATED else ops.why_not("adam", "cuda")
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no CUDA: {reason}")
needs_gpu = pytest.mark.skipif(EMULATED, reason="needs a GPU, not an emulation")


def back(columns: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.cpu() for tensor in tensors] for tensors in columns]


@contextmanager
def no_sync() -> Iterator[None]:
    """Whatever waits for the device raises."""
    if EMULATED:
        yield
        return
    with warnings.catch_warnings(action="ignore"):  # the mode warns that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def plus(params: list[Tensor], updates: list[Tensor], alpha: float) -> list[Tensor]:
    """Each parameter plus a multiple of its update: a step of plain descent."""
    return kernels.sgd(updates, [], params, NONE, -alpha, 0.0, False, 0.0, False)


def plus_in_place(params: list[Tensor], updates: list[Tensor], alpha: float) -> None:
    """The same in place: RMSprop with an average that is 0 and stays 0, and an ``eps`` of 1."""
    averages = [torch.zeros_like(param) for param in params]
    kernels.rmsprop_(params, updates, averages, [], [], -alpha, 1.0, 1.0, 0.0, False, 0.0, False)


def spoil_free_memory() -> None:
    """What is not written shows: memory that is handed out again holds NaN."""
    for exponent in range(9, 15 if EMULATED else 24):
        torch.full((2**exponent,), float("nan"), device=DEVICE)


@pytest.mark.parametrize("op", OPS)
def test_fuzz_against_the_formula(op):
    rng = random.Random(f"cuda {op}")
    torch.manual_seed(rng.randrange(2**31))
    for _ in range(60):
        call = random_case(op, rng)
        spoil_free_memory()
        there = call.on(DEVICE)
        with no_sync():
            got = there.run()
        assert {tensor.device.type for tensors in got for tensor in tensors} == {DEVICE.type}
        assert_near(back(got), call.expected)
        assert_only_read(there, call)


BORDERS = [
    1,
    2,
    3,
    4,
    127,
    128,
    129,
    1024,
    1025,
    1026,
    1027,
    CHUNK - 1,
    CHUNK,
    CHUNK + 1,
    CHUNK + 2,
    CHUNK + 3,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_every_element_is_written_at_every_length(op, dtype):
    torch.manual_seed(3)
    lengths = [0, *BORDERS, 3 * CHUNK + 1, 7 * CHUNK - 3]
    for seed in range(2):
        call = case(op, random.Random(seed), [[n] for n in lengths], [dtype] * len(lengths))
        spoil_free_memory()
        assert_near(back(call.on(DEVICE).run()), call.expected)


def test_zeros_in_the_averages_leave_no_neighbour_out():
    n = 1027
    grads, avgs, squares = torch.ones(n), torch.zeros(n), torch.zeros(n)
    grads[5::7] = 0
    corrections = torch.full((1, 2), 0.5, dtype=torch.float64)
    spoil_free_memory()
    given = [[tensor.to(DEVICE)] for tensor in (grads, avgs, squares)]
    numbers = (1.0, 1.0, 0.5, 0.5, 0.0, 0.25, 0.0, False)
    moves, new_avgs, new_squares = kernels.adam(*given, [], corrections, *numbers)
    assert torch.equal(new_avgs.cpu(), grads * 0.5)
    assert torch.equal(new_squares.cpu(), grads * 0.5)
    torch.testing.assert_close(moves.cpu(), grads / 1.25**0.5)
    ones = torch.ones(n, device=DEVICE)
    numbers = (1.0, 1.0, 0.5, 0.5, 1.0, 0.0, 0.0, False)
    found = kernels.adam_backward([ones], [], [], *given, [], corrections, *numbers)
    assert all(tensor.isfinite().all() for tensor in found)
    assert torch.equal(found[1].cpu()[5::7], torch.full((n,), 1.0)[5::7])  # 0.5 * (1 / 0.5) / (0 + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_bit_for_bit_as_on_the_cpu(op, dtype):
    torch.manual_seed(4)
    call = case(op, random.Random(6), [[5001], [3, 41], [2]], [dtype] * 3)
    there = call.on(DEVICE).run()
    here = replace(call.on("cpu"), expected=[[]] * len(there)).run()
    for got, expected in zip(there, here, strict=True):
        assert all(torch.equal(*pair) for pair in zip(back([got])[0], expected, strict=True))


@pytest.mark.parametrize("offset", range(1, 5))
def test_memory_that_no_pack_fits(offset):
    params, updates = torch.zeros(5000, device=DEVICE), torch.arange(5000.0, device=DEVICE)
    plus_in_place([params[offset:]], [updates[offset:]], 2.0)
    plus_in_place([params[offset:]], [updates[:-offset]], 1.0)
    expected = 3 * torch.arange(5000.0) - offset
    assert torch.equal(params.cpu(), torch.where(torch.arange(5000) < offset, 0.0, expected))


def test_more_tensors_than_a_launch_carries():
    lengths = [1 + 37 * i % 5000 for i in range(700)]
    params = [torch.full((n,), float(i), device=DEVICE) for i, n in enumerate(lengths)]
    updates = [torch.full((n,), 2.0 * i, device=DEVICE) for i, n in enumerate(lengths)]
    with no_sync():
        plus_in_place(params, updates, 0.5)
    assert all((param == 2 * i).all() for i, param in enumerate(params))


def test_layouts_share_a_launch_and_others_follow_their_strides():
    images = torch.randn(3, 5, 7, 11)
    same = images.to(memory_format=torch.channels_last)
    for params, updates in (
        (same.clone(), same.clone()),
        (same.clone(), images.clone()),
        (images.clone(), torch.randn(()).expand(3, 5, 7, 11)),
        (images.clone()[:, ::2, :, 1:], images.clone()[:, ::2, :, :-1]),
    ):
        expected = params + 0.25 * updates
        there = moved(params, DEVICE)
        assert torch.equal(plus([there], [moved(updates, DEVICE)], 0.25)[0].cpu(), expected)
        plus_in_place([there], [moved(updates, DEVICE)], 0.25)
        assert torch.equal(there.cpu(), expected)


def test_tied_parameters_are_stepped_in_their_order():
    assert_tied_parameters_are_stepped_in_their_order(DEVICE)


def test_nothing_to_do_launches_nothing():
    empty = torch.empty(0, 3, device=DEVICE)
    plus_in_place([empty], [empty.clone()], 1.0)
    assert kernels.rmsprop([empty], [empty], [], [], [], 1.0, 0.9, 1e-8, 0.0, False)[0].shape == (0, 3)


def test_numbers_stay_on_the_cpu():
    one = [torch.ones(2, device=DEVICE)]
    with pytest.raises(RuntimeError, match=r"sgd: `taken` must be float64; got Float"):
        kernels.sgd(one, one, one, torch.ones(1), 1.0, 0.5, False, 0.0, False)
    if not EMULATED:
        taken = torch.ones(1, dtype=torch.float64, device=DEVICE)
        with pytest.raises(RuntimeError, match=r"sgd: `taken` must be on the CPU"):
            kernels.sgd(one, one, one, taken, 1.0, 0.5, False, 0.0, False)
    assert (one[0] == 1).all()


@needs_gpu
def test_a_tensor_on_the_cpu_is_refused_before_anything_is_written():
    params = [torch.ones(3, device=DEVICE), torch.ones(3)]
    with pytest.raises(RuntimeError, match=r"rmsprop_: `params\[1\]` must be on a CUDA device"):
        plus_in_place(params, [param.clone() for param in params], 1.0)
    assert (params[0] == 1).all()


@needs_gpu
def test_the_current_stream_is_used():
    stream, grads = torch.cuda.Stream(), torch.zeros(1 << 20, device=DEVICE)
    params = torch.zeros_like(grads)
    plus_in_place([params], [grads], 1.0)  # loads the kernels, which may wait
    params.sum().item()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        grads.fill_(1)
        plus_in_place([params], [grads], 1.0)
    early = params.sum()  # on the default stream, which does not wait
    stream.synchronize()
    assert early.item() == 0
    assert params.sum().item() == 1 << 20


@needs_gpu
def test_a_graph_replays_the_launches():
    params, updates = torch.zeros(5000, device=DEVICE), torch.ones(5000, device=DEVICE)
    plus_in_place([params], [updates], -1.0)  # loads the kernel
    params.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plus_in_place([params], [updates], 1.0)
    for _ in range(3):
        graph.replay()
    assert (params == 3).all()


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("op", OPS)
def test_the_tensors_device_is_used_and_the_current_one_kept(op):
    call = case(op, random.Random(8), [[3000], [4, 5]], [torch.float32] * 2)
    there = call.on(torch.device("cuda", 1))
    got = there.run()
    assert torch.cuda.current_device() == 0
    assert {tensor.device.index for tensors in got for tensor in tensors} == {1}
    assert_near(back(got), call.expected)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_list_may_span_devices_but_a_pair_may_not():
    params = [torch.zeros(3000, device=f"cuda:{i % 2}") for i in range(6)]
    plus_in_place(params, [torch.ones_like(param) for param in params], 1.0)
    assert all((param == 1).all() for param in params)
    with pytest.raises(RuntimeError, match=r"`grads\[0\]` must be on the device of `params\[0\]`, cuda:0"):
        plus_in_place(params[:1], params[1:2], 1.0)


@needs_gpu
def test_more_elements_than_32_bits_count():
    n = 2**32 + 2051
    if torch.cuda.mem_get_info()[0] < 7 * n:
        pytest.skip("needs 30 GB of free GPU memory")
    params = torch.zeros(n, dtype=torch.float16, device=DEVICE)
    plus_in_place([params], [torch.ones_like(params)], 1.0)
    plus_in_place([params], [params.new_ones(()).expand(n)], 1.0)
    assert (params == 2).all()


@needs_gpu
def test_gradients_on_the_device():
    from torchopt_dist.ops._adam import adam

    def step(g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        (u,), (m,), (v,), _ = adam(
            [g], [m], [v], [torch.tensor(2.0)], b1=0.9, b2=0.99, eps=1e-3, eps_root=0.0, fused=True
        )
        return u, m, v

    given = [torch.rand(3, 4, dtype=torch.float64, device=DEVICE).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradcheck(step, given)
    assert torch.autograd.gradgradcheck(step, given)
