"""Dropout by a formula: the numbers of torch's kernel for GPUs, which the CPU has too, and derivatives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from torchopt_dist._formulas import ForwardModeFormulas
from torchopt_dist._formulas.dropout import dropout, kept


def test_the_formula_is_the_kernel_with_a_forward_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)
    expected = torch.native_dropout(x, 0.3, True)[0]
    torch.manual_seed(3)
    with ForwardModeFormulas():
        found = F.dropout(x, 0.3)
        assert torch.equal(F.dropout(x, 0.3, training=False), x)
        assert not F.dropout(x, 1.0).any()
    torch.testing.assert_close(found, expected)

    def seeded(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        with ForwardModeFormulas():
            return F.dropout(x**2, 0.3)

    assert torch.autograd.gradcheck(seeded, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(seeded, x, check_fwd_over_rev=True)


def test_in_place_and_on_the_cpu_it_is_torchs() -> None:
    x = torch.ones(50)
    torch.manual_seed(3)
    expected = F.dropout(x, 0.3)
    torch.manual_seed(3)
    assert torch.equal(dropout(x, 0.3), expected)
    assert set(kept(x, 0.3).tolist()) == {True, False}
