"""What still works, and what is lost, where torch's ops and its compiler lack a private name: each is hidden here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from torchopt_dist import torch_private as private
from torchopt_dist.formulas import formulas_in_transforms


@pytest.mark.parametrize("hide", [False, True])
def test_autocast_is_found_to_be_on_even_where_it_is_asked_device_by_device(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    if hide:
        monkeypatch.delattr(torch._C, "_is_any_autocast_enabled")
    assert not private.autocast_is_on()
    with torch.autocast("cpu", torch.bfloat16):
        assert private.autocast_is_on()
        with torch.autocast("cpu", enabled=False):
            assert not private.autocast_is_on()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_step_in_place_goes_on_without_torchs_fused_one(
    monkeypatch: pytest.MonkeyPatch, kind: type[torch.optim.Optimizer]
) -> None:
    name = kind.__name__
    step = private.fused_step(name.lower())
    assert step is getattr(torch, f"_fused_{name.lower()}_")
    monkeypatch.delattr(torch, f"_fused_{name.lower()}_")
    assert private.fused_step(name.lower()) is None
    ends = []
    for optimizer_class in (kind, getattr(todist, name)):
        p = nn.Parameter(torch.ones(3))
        optimizer = optimizer_class([p], lr=0.1)
        for factor in (1.0, 2.0):
            p.grad = torch.full((3,), factor)
            optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends)


def test_no_op_has_a_kernel_where_the_dispatcher_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert private.has_kernel("aten::add.Tensor", "cpu")
    assert not private.has_kernel("todist::no_such_op", "cpu")
    monkeypatch.delattr(torch._C, "_dispatch_has_kernel_for_dispatch_key")
    assert not private.has_kernel("aten::add.Tensor", "cpu")


def test_gradients_without_memory_are_known_unless_the_name_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(2, requires_grad=True)
    (zero,) = torch.autograd.grad(torch.sgn(x).sum(), x)
    assert private.is_zero_tensor(zero)
    assert not private.is_zero_tensor(torch.zeros(2))
    monkeypatch.delattr(torch, "_is_zerotensor")
    assert not private.is_zero_tensor(zero)


def test_without_the_names_of_weight_normalization_it_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [name for _, name in private.places_of_weight_norm()] == ["_weight_norm"] * 2
    for module, name in private.places_of_weight_norm():
        monkeypatch.delattr(module, name)
    assert private.places_of_weight_norm() == []
    with formulas_in_transforms():
        assert not hasattr(torch, "_weight_norm")
