"""Attention and layer normalization of a sweep are torch's, with all derivatives, and only in the sweep's thread."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchopt_dist._formulas import short_formulas

D = torch.float64
CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()
SOME = torch.tensor([[0.0, 0.5, -torch.inf], [-torch.inf] * 3, [0.0, -0.3, 0.2]], dtype=D)


def random(*shape: int) -> Any:
    return torch.randn(shape, dtype=D, requires_grad=True)


def attention(mask: Any = None, **options: Any) -> Any:
    return lambda *qkv: F.scaled_dot_product_attention(*qkv, attn_mask=mask, **options)


CASES = {
    "attention": (attention(), [(2, 2, 2), (2, 3, 2), (2, 3, 1)]),
    "attention with a scale": (attention(scale=0.3), [(2, 2), (3, 2), (3, 2)]),
    "attention with a mask": (attention(CAUSAL), [(3, 2), (3, 2), (3, 2)]),
    "attention with weights, and nothing to attend to": (attention(SOME), [(3, 2), (3, 2), (3, 2)]),
    "layer norm": (lambda *args: F.layer_norm(args[0], (3,), *args[1:]), [(4, 3), (3,), (3,)]),
    "layer norm over two dimensions": (lambda x: F.layer_norm(x, [2, 2], eps=0.1), [(2, 2, 2)]),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_torchs_and_derivatives_those_of_differences(name):
    torch.manual_seed(0)
    function, shapes = CASES[name]
    inputs = tuple(random(*shape) for shape in shapes)
    expected = function(*inputs)
    with short_formulas():
        found = function(*inputs)
        torch.testing.assert_close(found, expected)
        assert gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)
        assert gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)

        def penalty(*inputs: Any) -> Any:
            (slope,) = torch.autograd.grad(function(*inputs).square().sum(), inputs[0], create_graph=True)
            return slope.square().sum()

        assert gradgradcheck(penalty, inputs, check_fwd_over_rev=True, fast_mode=True)


def test_what_a_formula_does_not_take_is_torchs():
    q, norm = torch.randn(2, 3, 2, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    many = torch.randn(4, 3, 2)

    def names(*, dtype: Any = torch.float32, autocast: bool = False, **options: Any) -> set[str]:
        x = q.to(dtype)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            attended = F.scaled_dot_product_attention(x, x, x, **options)
            return {attended.grad_fn.name(), F.layer_norm(norm.to(dtype), (3,)).grad_fn.name()}

    own = {"_AttentionBackward", "_NormalizedBackward"}
    with short_formulas(), sdpa_kernel(SDPBackend.MATH):
        assert names() == own
        for options in ({"dropout_p": 0.5}, {"is_causal": True}):
            assert "_AttentionBackward" not in names(**options)
        for options in ({"dtype": torch.bfloat16}, {"autocast": True}):
            assert own.isdisjoint(names(**options))
        assert F.scaled_dot_product_attention(many, q[:1], q[:1], enable_gqa=False).shape == (4, 3, 2)
        there: list[set[str]] = []
        other = threading.Thread(target=lambda: there.append(names()))
        other.start()
        other.join(60)
        assert own.isdisjoint(there[0])
        torch.vmap(lambda x: F.layer_norm(x, (3,)))(norm)
    assert own.isdisjoint(names())
    assert F.layer_norm.__module__ == "torch.nn.functional"
