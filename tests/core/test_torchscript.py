"""A function that closes over a TorchScript module, whose parameters cannot be seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")


class Cosine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.2, 0.3], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(self.w * x)


ONES = torch.ones(2, dtype=torch.float64)


def test_a_linear_solve_gives_them_their_gradient() -> None:
    plain = Cosine()
    scripted = torch.jit.script(plain)
    x = todist.linear_solve.solve_cg(rtol=1e-13)(lambda v: v * (2 + scripted(ONES)), ONES)
    found = torch.autograd.grad(x.sum(), scripted.w)
    torch.testing.assert_close(found, torch.autograd.grad((1 / (2 + plain(ONES))).sum(), plain.w))


def test_what_would_have_no_gradient_is_an_error() -> None:
    scripted = torch.jit.script(Cosine())
    with pytest.raises(ValueError, match=r"takes a tensor of shape \(2,\) .* in a way that cannot be seen"):
        todist.nonlinear_solve.fixed_point_iteration()(scripted, ONES)
    with pytest.raises(ValueError, match=r"takes a tensor of shape \(2,\) .* in a way that cannot be seen"):
        todist.remat(lambda x: scripted(x))(ONES)


def test_a_loss_of_an_inner_loop_may_hold_it() -> None:
    scripted = torch.jit.script(Cosine())
    w = ONES.clone().requires_grad_()
    last = todist.inner_loop(lambda w: (w - scripted(ONES).detach()).pow(2).sum(), todist.sgd(lr=0.5), w, 1)
    torch.testing.assert_close(last.params, scripted(ONES))
