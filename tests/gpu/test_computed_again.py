"""What is computed again for its derivatives, on the device → the values of the CPU in float64, in little memory.

A part by ``remat``, attention in tiles, micro-batches, layers that are fixed points, and scores of training examples.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchopt_dist as todist
from tests.gpu.device import DEVICE, assert_near, needs_gpu, on_device, peak
from torchopt_dist.attribution import Training
from torchopt_dist.formulas import attention as tiled
from torchopt_dist.formulas.attention import attention_by_formula

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Numbers in float64, on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orders(value: Tensor, inputs: list[Tensor], count: int = 2) -> list[Tensor]:
    """A value and its derivatives of some orders."""
    found = [value.detach()]
    for _ in range(count):
        grads = torch.autograd.grad(value, inputs, torch.ones_like(value), create_graph=True)
        found += [x.detach() for x in grads]
        value = torch.stack([x.sin().sum() for x in grads]).sum()
    return found


# remat


def layered(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(x @ weight).sin()
    return x.square().mean(0)


@dtypes
def test_a_part_that_is_run_again_has_the_derivatives_of_the_cpu(dtype: torch.dtype) -> None:
    def of(function: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in given]
        return orders(function(*leaves), leaves, 3)

    inputs = drawn(5, 4), drawn(4, 4, seed=1)
    expected = of(layered, *(x.clone() for x in inputs))
    found = of(todist.remat(layered), *on_device(inputs, dtype))
    assert {x.device.type for x in found} == {DEVICE.type}
    assert_near(found, expected, TOLERANCES[dtype])


def test_a_part_that_is_run_again_draws_the_devices_numbers_again() -> None:
    x = on_device(drawn(6, 4)).requires_grad_()

    def noisy(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5).square() * torch.rand_like(x)

    found, after = [], []
    for function in (noisy, todist.remat(noisy)):
        torch.manual_seed(3)
        value = function(x)
        found.append([value, *torch.autograd.grad(value.sum(), x)])
        after.append(torch.rand(2, device=DEVICE))
    assert_near(found[1], found[0], 1e-12)
    assert torch.equal(*after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_part_that_is_run_again_has_the_calls_autocast(dtype: torch.dtype) -> None:
    x, weight = on_device((drawn(5, 4), drawn(4, 4, seed=1)), torch.float32)
    weight.requires_grad_()
    found = []
    for function in (layered, todist.remat(layered)):
        with torch.autocast(DEVICE.type, dtype=dtype):
            value = function(x, weight)
        found.append([value, *torch.autograd.grad(value.float().sum(), weight)])
    assert found[0][0].dtype == found[1][0].dtype
    assert torch.equal(found[0][0], found[1][0])
    assert_near(found[1], found[0], 1e-2)  # the weight's copy in that dtype is made once, or for each product


@needs_gpu
def test_a_second_derivative_through_parts_needs_the_memory_of_one() -> None:
    weights = [torch.randn(512, 512, device=DEVICE) / 23 for _ in range(8)]
    x = torch.randn(4096, 512, device=DEVICE, requires_grad=True)

    def second(part: Callable[..., Tensor]) -> None:
        value = x
        for weight in weights:
            value = part(value, weight)
        (first,) = torch.autograd.grad(value.square().mean(), x, create_graph=True)
        torch.autograd.grad(first.square().sum(), x)

    def part(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(x @ weight).sin()
        return x

    second(part)
    assert peak(functools.partial(second, todist.remat(part))) < 0.5 * peak(functools.partial(second, part))


# attention


def in_tiles(*args: Any, **named: Any) -> Tensor:
    with attention_by_formula():
        return F.scaled_dot_product_attention(*args, **named)


def by_formula(*args: Any, **named: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **named)


@pytest.fixture
def short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of two rows, from the first score on."""
    for name, value in (("LONG", 1), ("TILE", 1), ("ROWS", 2)):
        monkeypatch.setattr(tiled, name, value)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "a mask": {"attn_mask": drawn(5, 5, seed=7) > -0.5},
    "a scale": {"scale": 0.3},
}


@dtypes
@pytest.mark.usefixtures("short_tiles")
def test_attention_in_tiles_has_the_derivatives_of_the_cpu(dtype: torch.dtype) -> None:
    for name, named in CASES.items():
        inputs = [drawn(2, 3, 5, 4, seed=seed).requires_grad_() for seed in range(3)]
        expected = orders(by_formula(*inputs, **named), inputs)
        there = on_device(inputs, dtype)
        value = in_tiles(*there, **on_device(named))
        assert "Cat" in type(value.grad_fn).__name__, f"{name}: not in tiles"
        assert_near(orders(value, there), expected, 5 * TOLERANCES[dtype])


@pytest.mark.usefixtures("short_tiles")
def test_attention_in_tiles_draws_its_dropout_on_the_device_again() -> None:
    query, key, value = on_device([drawn(2, 6, 4, seed=seed).requires_grad_() for seed in range(3)])

    def drop() -> Tensor:
        torch.manual_seed(0)
        return in_tiles(query, key, value, dropout_p=0.5)

    made = drop()
    assert torch.equal(made, drop())
    # Linear in the values, so the gradient is by the same numbers.
    (grad,) = torch.autograd.grad(made.sum(), value)
    assert_near([(grad * value).sum()], [made.sum()], 1e-9)


@needs_gpu
def test_tiles_keep_no_scores_of_all_queries() -> None:
    inputs = [torch.randn(1, 8, 4096, 64, device=DEVICE, requires_grad=True) for _ in range(3)]

    def second(attend: Callable[..., Tensor]) -> None:
        value = attend(*inputs, is_causal=True)
        grads = torch.autograd.grad(value.square().sum(), inputs, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)

    second(in_tiles)
    assert peak(functools.partial(second, in_tiles)) < 0.3 * peak(functools.partial(second, by_formula))


# Loops of micro-batches


@pytest.mark.parametrize(
    "adjoint", [todist.Recorded(), todist.Replayed(), todist.Replayed(blocks="auto")], ids=repr
)
def test_micro_batches_give_the_gradient_of_the_whole_batch_on_the_cpu(adjoint: Any) -> None:
    net = network()
    x, weights = drawn(12, 4), torch.linspace(0.5, 1.5, 12, dtype=torch.float64).requires_grad_()

    def found(net: nn.Module, x: Tensor, weights: Tensor, **options: Any) -> list[Tensor]:
        made = todist.inner_loop(
            lambda net, batch: (batch[1] * (net(batch[0])[:, 0] - batch[0].sum(1)) ** 2).mean(),
            todist.adam(lr=0.05, eps=1e-3),
            net,
            [(x, weights)] * 4,
            meta=weights,
            **options,
        )
        outer = made.params(x).square().mean()
        return [made.losses, *torch.autograd.grad(outer, weights)]

    expected = found(net, x, weights, adjoint=todist.Recorded())
    given = on_device(net), *on_device((x, weights))
    assert_near(found(*given, adjoint=adjoint, accumulate=3), expected, 1e-9)


def network() -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


# Equilibrium layers


class Cell(nn.Module):
    """A contraction."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inject = nn.Parameter(0.3 * drawn(3, 3)), nn.Parameter(drawn(3, 2, seed=1))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.weight.T + x @ self.inject.T)


@pytest.mark.parametrize("solver", ["anderson", "fixed_point_iteration", "newton", "broyden"])
def test_an_equilibrium_layer_has_the_derivatives_of_the_cpu(solver: str) -> None:
    make = getattr(todist.nonlinear_solve, solver)
    layer = todist.nn.Equilibrium(
        Cell(),
        make(rtol=1e-13, atol=1e-13, maxiter=500),
        todist.linear_solve.solve_gmres(rtol=1e-13),
        init=lambda x: x.new_zeros(len(x), 3),
    )

    def found(layer: nn.Module, x: Tensor) -> list[Tensor]:
        z, info = layer.with_info(x)
        assert info.converged
        grads = orders(z, [x, *layer.parameters()])
        assert all(one.converged for one in info.backward)
        assert_near([layer(x, start=z.detach())], [z], 1e-10)
        return grads

    x = drawn(4, 2).requires_grad_()
    made = found(on_device(layer), on_device(x))
    assert {one.device.type for one in made} == {DEVICE.type}
    assert_near(made, found(layer, x), 1e-8)


@needs_gpu
def test_an_equilibrium_layer_keeps_no_iterations() -> None:
    torch.manual_seed(0)
    cell = nn.Linear(256, 256, device=DEVICE)
    nn.init.normal_(cell.weight, std=0.02)
    x = torch.randn(8192, 256, device=DEVICE)

    def gradient(iterations: int, *, unroll: bool) -> None:
        solver = todist.nonlinear_solve.fixed_point_iteration(
            rtol=0.0, atol=0.0, maxiter=iterations, unroll=unroll, not_converged="ignore"
        )
        backward = None if unroll else todist.linear_solve.solve_neumann(maxiter=5, not_converged="ignore")
        layer = todist.nn.Equilibrium(lambda z, x: torch.tanh(cell(z) + x), solver, backward)
        torch.autograd.grad(layer(x).square().mean(), list(cell.parameters()))

    gradient(5, unroll=False)
    few, many = (peak(functools.partial(gradient, count, unroll=False)) for count in (10, 100))
    assert many < 1.2 * few
    assert few < 0.5 * peak(functools.partial(gradient, 100, unroll=True))


# Scores of training examples


class Asked:
    """A training and its queries, on a device."""

    def __init__(self, device: torch.device) -> None:
        self.x, self.y, self.new = (
            x.to(device) for x in (drawn(12, 3, 4), drawn(12, 3, seed=1), drawn(5, 4, seed=2))
        )
        self.mask = (drawn(12, 3, seed=3) > -0.5).to(device)
        self.mask[:, 0] = True
        self.model, self.steps = copy.deepcopy(network()).to(device), 0

    def training(self, **options: Any) -> Training:
        generator = torch.Generator().manual_seed(2)
        batches = [torch.randperm(12, generator=generator)[:6].to(self.x.device) for _ in range(5)]
        return Training(self.loss, todist.adamw(lr=0.05, eps=1e-3), self.model, batches, **options)

    def loss(self, model: nn.Module, index: Tensor) -> Tensor:
        self.steps += 1
        return (model(self.x[index])[..., 0] - self.y[index]) ** 2

    def queries(self, model: nn.Module) -> Tensor:
        return (model(self.new)[:, 0] - 0.5) ** 2


@pytest.mark.parametrize("method", ["exact", "checkpoint", "checkpoints"])
def test_scores_of_examples_are_those_on_the_cpu(method: Any) -> None:
    cpu, there = Asked(torch.device("cpu")), Asked(DEVICE)
    for options, tokens in (({}, False), ({}, True), ({"accumulate": 3}, False)):
        expected = todist.attribute(
            cpu.training(mask=cpu.mask, **options), cpu.queries, method=method, tokens=tokens
        )
        for together in (1, 5):
            found = todist.attribute(
                there.training(mask=there.mask, **options),
                there.queries,
                method=method,
                tokens=tokens,
                together=together,
            )
            assert_near([found.scores, found.query_losses], [expected.scores, expected.query_losses], 1e-9)


def test_a_kept_history_of_the_device_answers_later_queries(tmp_path: Path) -> None:
    asked = Asked(DEVICE)
    training = asked.training(mask=asked.mask)
    expected = todist.attribute(training, asked.queries).scores
    kept = todist.Replayed(store=tmp_path, keep=True)
    first = todist.attribute(training, asked.queries, adjoint=kept).scores
    trained, asked.steps = asked.steps, 0
    again = todist.attribute(training, asked.queries, adjoint=kept).scores
    assert 0 < asked.steps < trained  # the way back alone
    assert_near([first, again], [expected, expected], 1e-9)
    checked = todist.attribution.validate(training, asked.queries, expected, retrains=3, left_out=3)
    assert torch.isfinite(checked.losses).all()


@needs_gpu
def test_an_estimate_of_memory_is_what_the_gpu_then_gives_out() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6))).to(DEVICE)
    x, weights = torch.randn(2048, 512, device=DEVICE), torch.ones(2048, 1, device=DEVICE, requires_grad=True)

    def loss(net: nn.Module) -> Tensor:
        return (weights * (net(x) - x) ** 2).mean()

    adjoints = [todist.Recorded(), todist.Replayed(snapshots=2), todist.Truncated(4)]
    told = todist.estimate(loss, todist.adam(lr=1e-3), net, 16, meta=weights, adjoints=adjoints)
    for one in told:

        def run(adjoint: Any = one.adjoint) -> None:
            made = todist.inner_loop(loss, todist.adam(lr=1e-3), net, 16, meta=weights, adjoint=adjoint)
            torch.autograd.grad(loss(made.params), weights)

        run()
        assert one.memory is not None
        assert peak(run) == pytest.approx(one.memory / 2**20, rel=0.2), one.name
