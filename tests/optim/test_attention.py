"""Inner steps through attention: by its formula, which has a second derivative, or an error that says what to do."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchopt_dist as todist
from torchopt_dist.formulas.attention import attention_by_formula

X = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def make():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()


def loss_of(net):
    return net(X).square().mean()


def end(net, step):
    first = list(net.parameters())
    optimizer = todist.MetaSGD(net, 0.1)
    for _ in range(2):
        step(optimizer, net)
    return torch.autograd.grad(loss_of(net), first)


def by_formula(optimizer, net):
    with sdpa_kernel(SDPBackend.MATH):
        loss = loss_of(net)
    optimizer.step(loss)


def test_a_function_s_attention_is_computed_by_the_formula():
    got = end(make(), lambda optimizer, net: optimizer.step(lambda: loss_of(net)))
    torch.testing.assert_close(got, end(make(), by_formula), rtol=1e-12, atol=1e-14)


def test_a_second_derivative_of_a_kernel_is_an_error_that_names_the_remedies():
    with pytest.raises(
        RuntimeError, match=r"`optimizer.step\(lambda: loss\)`.*SDPBackend.MATH.*first_order=True"
    ):
        end(make(), lambda optimizer, net: optimizer.step(loss_of(net)))


@pytest.mark.parametrize("as_function", [False, True])
def test_first_order_takes_the_kernel(as_function):
    def step(optimizer, net):
        optimizer.step((lambda: loss_of(net)) if as_function else loss_of(net), first_order=True)

    assert all(grad.isfinite().all() for grad in end(make(), step))


def test_torch_s_choice_is_restored_when_the_last_thread_leaves():
    def other():
        with attention_by_formula():
            entered.set()
            assert left.wait(60)

    entered, left = threading.Event(), threading.Event()
    thread = threading.Thread(target=other)
    before = torch.backends.cuda.flash_sdp_enabled()
    with attention_by_formula():
        thread.start()
        assert entered.wait(60)
    assert not torch.backends.cuda.flash_sdp_enabled()
    left.set()
    thread.join(60)
    assert torch.backends.cuda.flash_sdp_enabled() is before is True
