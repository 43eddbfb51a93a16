"""Optimizers' steps by the kernels of the device → values and derivatives of orders 1 and 2 of the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import torchopt_dist as todist
from tests.gpu.device import DEVICE, needs_gpu
from torchopt_dist import ops, pytree

STEPS: dict[str, Callable[[bool], Any]] = {
    "adam": lambda fused: todist.adam(lr=0.1, eps=0.05, weight_decay=0.1, fused=fused),
    "adamw": lambda fused: todist.adamw(lr=0.1, eps=0.05, weight_decay=0.1, maximize=True, fused=fused),
    "sgd": lambda fused: todist.sgd(lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1, fused=fused),
    "nesterov": lambda fused: todist.sgd(lr=0.1, momentum=0.9, nesterov=True, fused=fused),
    "rmsprop": lambda fused: todist.rmsprop(
        lr=0.1, alpha=0.9, eps=0.05, centered=True, momentum=0.9, fused=fused
    ),
}
SHAPES = [(1,), (3, 5), (129,), (2, 3, 7)]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
pytestmark = pytest.mark.skipif(
    not ops.is_available("adam", DEVICE), reason=f"no kernel: {ops.why_not('adam', DEVICE)}"
)


def tensors(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, *, contiguous: bool = True, seed: int = 0
) -> list[Tensor]:
    """Random ones; those that are not contiguous have gaps and permuted dimensions."""
    made = []
    for place, shape in enumerate(shapes):
        generator = torch.Generator("cpu").manual_seed(31 * seed + place)
        twice = tuple(2 * size for size in reversed(shape))
        values = torch.randn(twice, generator=generator, dtype=torch.float64, device="cpu")
        values = (values.sign() * (values.abs() + 0.2)).to(DEVICE, dtype)
        part = values[tuple(slice(1, None, 2) for _ in shape)].permute(*reversed(range(len(shape))))
        made.append(part.contiguous() if contiguous else part)
    return made


def moved(name: str, fused: bool, params: list[Tensor], *rounds: list[Tensor]) -> list[Tensor]:
    """The parameters after a step by each round's gradients, and the state, but its counts."""
    optimizer = STEPS[name](fused)
    state = optimizer.init(params)
    for grads in rounds:
        updates, state = optimizer.update(grads, state, params=params, inplace=False)
        params = todist.apply_updates(params, updates, inplace=False)
    kept = [x for x in pytree.flatten(state)[0] if isinstance(x, Tensor) and x.ndim and x.requires_grad]
    return [*params, *kept]


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_values_and_derivatives_are_those_of_the_formula(
    name: str, dtype: torch.dtype, contiguous: bool
) -> None:
    found = []
    for fused in (True, False):
        params, first, second = (
            [x.requires_grad_() for x in tensors(SHAPES, dtype, contiguous=contiguous, seed=seed)]
            for seed in range(3)
        )
        out = moved(name, fused, params, first, second)
        leaves = [*params, *first, *second]
        of_first = torch.autograd.grad(
            sum((x * x).sum() for x in out), leaves, create_graph=True, allow_unused=True
        )
        used = [g for g in of_first if g is not None]
        of_second = torch.autograd.grad(sum((g * g).sum() for g in used), leaves, allow_unused=True)
        found.append([[*out], used, [g for g in of_second if g is not None]])
    for order, (kernel, formula) in enumerate(zip(*found, strict=True)):
        assert len(kernel) == len(formula)
        for one, other in zip(kernel, formula, strict=True):
            assert one.device.type == DEVICE.type
            scale = other.detach().double().abs().max().item()
            worst = (one.detach().double() - other.detach().double()).abs().max().item()
            assert worst <= 10**order * TOLERANCES[dtype] * max(scale, 1.0), f"order {order}"


@pytest.mark.parametrize("name", STEPS)
def test_differences_agree(name: str) -> None:
    shapes = [(2,), (3, 1)]
    params, first, second = (tensors(shapes, torch.float64, seed=seed) for seed in range(3))

    def step(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(moved(name, True, list(leaves[:2]), list(leaves[2:4]), list(leaves[4:])))

    leaves = [x.requires_grad_() for x in (*params, *first, *second)]
    assert gradcheck(step, leaves)
    assert gradgradcheck(step, leaves)


@needs_gpu
def test_several_streams_at_once() -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    expected, found = [], []
    for stream in (None, *streams):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            grads = [x.requires_grad_() for x in tensors([(100_003,), (64, 33)], torch.float32)]
            params = [x.requires_grad_() for x in tensors([(100_003,), (64, 33)], torch.float32)]
            torch.cuda._sleep(1_000_000)
            out = moved("adam", True, params, grads, grads)
            made = torch.autograd.grad(sum((x * x).sum() for x in out), [*params, *grads])
        (found if stream else expected).append([*out, *made])
    torch.cuda.synchronize()
    for each in found:
        for one, other in zip(each, expected[0], strict=True):
            assert torch.equal(one, other)


def test_a_default_choice_takes_the_kernel_and_classes_move_alike() -> None:
    for name in ("Adam", "AdamW", "SGD", "RMSprop"):
        moves = []
        for library in (todist, torch.optim):
            params = [x.requires_grad_() for x in tensors(SHAPES, torch.float64)]
            optimizer = getattr(library, name)(params, lr=0.01)
            for _ in range(3):
                optimizer.zero_grad()
                sum((p**3).sum() for p in params).backward()
                optimizer.step()
            moves.append(params)
        for one, other in zip(*moves, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
