"""Attention in tiles: the values and derivatives of torch's formula, of which no graph is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist.formulas import attention as tiled
from torchopt_dist.formulas.attention import Attention, attention_by_formula

Tensors = list[Tensor]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of two rows, from the first score on."""
    monkeypatch.setattr(tiled, "LONG", 1)
    monkeypatch.setattr(tiled, "TILE", 1)
    monkeypatch.setattr(tiled, "ROWS", 2)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    made = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).requires_grad_()


def by_formula(*args: Any, **kwargs: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def in_tiles(*args: Any, **kwargs: Any) -> Tensor:
    with attention_by_formula():
        return F.scaled_dot_product_attention(*args, **kwargs)


def is_tiled(value: Tensor) -> bool:
    """Whether a value comes from tiles that were put together."""
    assert value.grad_fn is not None
    return "Cat" in type(value.grad_fn).__name__


def orders(value: Tensor, inputs: Tensors) -> Tensors:
    """A value and its derivatives of three orders."""
    found = [value.detach()]
    for _ in range(3):
        grads = torch.autograd.grad(value, inputs, torch.ones_like(value), create_graph=True)
        found += [x.detach() for x in grads]
        value = torch.stack([x.to(grads[0].dtype).sin().sum() for x in grads]).sum()
    return found


QKV: list[tuple[int, ...]] = [(2, 3, 5, 4)] * 3
BOOL = torch.rand(5, 5, generator=torch.Generator().manual_seed(1)) > 0.4
ROW_OF_NOTHING = BOOL.clone().index_fill_(0, torch.tensor([1]), value=False)

CASES: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "plain": (QKV, {}),
    "two dimensions": ([(5, 4)] * 3, {}),
    "causal": (QKV, {"is_causal": True}),
    "causal, fewer queries": ([(2, 3, 4), (2, 7, 4), (2, 7, 4)], {"is_causal": True}),
    "causal, more queries": ([(2, 7, 4), (2, 3, 4), (2, 3, 4)], {"is_causal": True}),
    "scale": (QKV, {"scale": 0.3}),
    "lengths and widths": ([(2, 5, 4), (2, 7, 4), (2, 7, 3)], {}),
    "bool mask": (QKV, {"attn_mask": BOOL}),
    "a row that attends to nothing": (QKV, {"attn_mask": ROW_OF_NOTHING}),
    "a mask a key": (QKV, {"attn_mask": BOOL[:1]}),
    "minus infinity": (
        QKV,
        {"attn_mask": torch.zeros(5, 5).double().masked_fill(~ROW_OF_NOTHING, -torch.inf)},
    ),
    "grouped queries": ([(2, 4, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)], {"enable_gqa": True}),
    "broadcast": ([(2, 3, 5, 4), (1, 3, 5, 4), (3, 5, 4)], {}),
}


@each_row("case", CASES)
def test_three_orders_are_those_of_the_formula(case: str) -> None:
    shapes, named = CASES[case]
    inputs = [random(*shape, seed=n) for n, shape in enumerate(shapes)]
    made = in_tiles(*inputs, **named)
    assert is_tiled(made)
    torch.testing.assert_close(orders(made, inputs), orders(by_formula(*inputs, **named), inputs))


@each_row("shape", [(5, 5), (3, 5, 5), (2, 1, 5, 5), (1, 5)])
def test_a_mask_that_is_added_has_a_gradient(shape: tuple[int, ...]) -> None:
    inputs = [*(random(2, 3, 5, 4, seed=n) for n in range(3)), random(*shape, seed=5)]
    made = in_tiles(*inputs)
    assert is_tiled(made)
    torch.testing.assert_close(orders(made, inputs), orders(by_formula(*inputs), inputs))


@each_row("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    inputs = [random(2, 5, 4, seed=n, dtype=dtype) for n in range(3)]
    made = in_tiles(*inputs)
    assert (is_tiled(made), made.dtype) == (True, dtype)
    far = 0.05 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(orders(made, inputs), orders(by_formula(*inputs), inputs), rtol=far, atol=far)


def test_autocast_computes_in_its_dtype() -> None:
    inputs = [random(2, 5, 4, seed=n, dtype=torch.float32) for n in range(3)]
    results = []
    for attend in (in_tiles, by_formula):
        with torch.autocast("cpu", torch.bfloat16):
            made = attend(*inputs)
        assert made.dtype == torch.bfloat16
        results.append(torch.autograd.grad(made.float().pow(2).sum(), inputs))
    torch.testing.assert_close(*results, rtol=0.05, atol=0.05)


def test_dropout_is_the_same_whenever_it_is_computed() -> None:
    query, key = random(2, 6, 4), random(2, 6, 4, seed=1)
    value = random(2, 6, 4, seed=2)
    torch.manual_seed(0)
    made = in_tiles(query, key, value, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(made, in_tiles(query, key, value, dropout_p=0.5))
    assert not torch.equal(made, in_tiles(query, key, value, dropout_p=0.5))
    # Linear in the values: so the gradient is with the same numbers.
    (grad,) = torch.autograd.grad(made.sum(), value, create_graph=True)
    torch.testing.assert_close((grad * value).sum(), made.sum())
    (second,) = torch.autograd.grad((grad * value).sum(), query)
    torch.testing.assert_close(second, torch.autograd.grad(in_tiles_again(query, key, value).sum(), query)[0])
    kept = in_tiles(
        torch.zeros(1, 400, 4, dtype=torch.float64),
        *[torch.ones(1, 400, 4, dtype=torch.float64)] * 2,
        dropout_p=0.25,
    )
    assert kept.mean().item() == pytest.approx(1, abs=0.02)


def in_tiles_again(*inputs: Tensor) -> Tensor:
    torch.manual_seed(0)
    return in_tiles(*inputs, dropout_p=0.5)


@each_row("named", [{}, {"is_causal": True}])
def test_in_vmap_and_under_torch_func(named: dict[str, bool]) -> None:
    inputs = [random(3, 2, 5, 4, seed=n).detach() for n in range(3)]

    def twice(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        first = torch.func.grad(lambda q, k, v: attend(q, k, v, **named).sin().sum(), 1)
        return torch.func.grad(lambda q, k, v: first(q, k, v).pow(3).sum())

    torch.testing.assert_close(torch.vmap(twice(in_tiles))(*inputs), torch.vmap(twice(by_formula))(*inputs))


def test_what_torch_refuses_is_refused() -> None:
    q = random(2, 5, 4)
    with pytest.raises(RuntimeError):
        in_tiles(q, q, random(2, 6, 4))
    with pytest.raises(RuntimeError):
        in_tiles(q, q, q, attn_mask=BOOL, is_causal=True)
    with torch.no_grad():
        assert in_tiles(q, q, q).grad_fn is None


class Net(nn.Module):
    """Attention, in a checkpoint or not; as function, or in a layer of torch."""

    def __init__(self, *, checkpoints: bool, layer: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True) if layer else None
        self.q, self.o = nn.Linear(4, 12), nn.Linear(4, 2)

    def block(self, x: Tensor) -> Tensor:
        if self.layer is not None:
            made: Tensor = self.layer(x)
            return made
        q, k, v = self.q(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        run: Callable[[Tensor], Any] = self.block
        if self.checkpoints:
            run = functools.partial(checkpoint, self.block, use_reentrant=False)
        hidden: Tensor = run(x)
        made: Tensor = self.o(hidden)
        return made


def metagradient(adjoint: Any, *, checkpoints: bool, layer: bool) -> Tensor:
    torch.manual_seed(0)
    net = Net(checkpoints=checkpoints, layer=layer).double()
    x, y = random(3, 5, 4).detach(), random(3, 5, 2, seed=1).detach()
    weights = torch.ones(3, 1, 1, dtype=torch.float64, requires_grad=True)

    def loss(net: Any) -> Tensor:
        made: Tensor = (weights * (net(x) - y) ** 2).mean() + sum(p.pow(2).sum() for p in net.parameters())
        return made

    own = todist.inner_loop(loss, todist.sgd(lr=0.1), net, 2, meta=weights, adjoint=adjoint).params
    return torch.autograd.grad(F.mse_loss(own(x), y), weights)[0]


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize(
    "adjoint",
    [
        todist.Recorded(),
        todist.Truncated(2),
        todist.Replayed(),
        todist.Implicit(not_converged="ignore"),
    ],
    ids=str,
)
@pytest.mark.parametrize("tile", [2, 100])
def test_steps_with_a_checkpoint_around_attention(
    adjoint: Any, layer: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "ROWS", tile)
    ours = metagradient(adjoint, checkpoints=True, layer=layer)
    monkeypatch.setattr(tiled, "LONG", 1000)
    torch.testing.assert_close(ours, metagradient(adjoint, checkpoints=False, layer=layer))


def test_tiles_of_an_accelerator_have_more_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LONG", 64), ("TILE", 32), ("ROWS", 1)):
        monkeypatch.setattr(tiled, name, value)
    rows = {}
    for device in ("cpu", "meta"):
        for length in (8, 32, 64):
            tensor = torch.empty(1, length, 4, device=device)
            rows[device, length] = tiled._rows_of_a_tile(Attention(tensor, tensor, tensor))
    assert rows == {
        ("cpu", 8): 4,  # of 8 scores
        ("cpu", 32): 1,
        ("cpu", 64): 1,
        ("meta", 8): 0,
        ("meta", 32): 16,
        ("meta", 64): 8,
    }
