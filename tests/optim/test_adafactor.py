"""Adafactor → torch's steps, the same by every face, and derivatives by finite differences, to order 2.

It is not a row of ``table.py``, whose parameters may be complex.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import torchopt_dist as todist
from tests.optim.programs import DOUBLE, flat, losses, make
from tests.rows import each_row

SETTINGS = {
    "defaults": {"lr": 0.05},
    "all": {
        "lr": 0.3,
        "beta2_decay": -0.6,
        "eps": (1e-3, 1e-2),
        "d": 1.5,
        "weight_decay": 0.1,
        "maximize": True,
    },
}


@each_row("dtype", [torch.float32, DOUBLE, torch.bfloat16])
@each_row("setting", SETTINGS)
def test_many_steps_are_torchs_by_every_face(setting, dtype):
    options = SETTINGS[setting]
    start = make(dtype)
    twin, ours, generic, meta, functional = (copy.deepcopy(start) for _ in range(5))
    optimizers = [
        (twin, torch.optim.Adafactor(twin.parameters(), **options)),
        (ours, todist.Adafactor(ours.parameters(), **options)),
        (generic, todist.Optimizer(generic.parameters(), todist.chain(todist.adafactor(**options)))),
    ]
    differentiable = todist.MetaAdafactor(meta, **options)
    func = todist.FuncOptimizer(todist.adafactor(**options))
    params = dict(functional.named_parameters())
    for loss in losses(dtype, options.get("maximize", False), 20):
        for net, optimizer in optimizers:
            optimizer.zero_grad()
            loss(net).backward()
            optimizer.step()
        differentiable.step(loss(meta))
        params = func.step(loss(lambda x, p=params: torch.func.functional_call(functional, p, (x,))), params)
    tolerance = {DOUBLE: 1e-10, torch.float32: 2e-4, torch.bfloat16: 0.06}[dtype]
    assert (flat(twin.parameters()) - flat(start.parameters())).abs().max() > 0.05
    for found in (ours.parameters(), generic.parameters(), meta.parameters(), params.values()):
        torch.testing.assert_close(
            flat(found).detach(), flat(twin.parameters()).detach(), rtol=tolerance, atol=tolerance
        )


def test_states_are_torchs_and_a_saved_run_goes_on():
    twin, ours = (nn.Conv2d(2, 3, 3).double() for _ in range(2))
    ours.load_state_dict(twin.state_dict())
    optimizers = [torch.optim.Adafactor(twin.parameters()), todist.Adafactor(ours.parameters())]
    x = torch.randn(2, 2, 5, 5, dtype=DOUBLE)
    for _ in range(3):
        for net, optimizer in zip((twin, ours), optimizers, strict=True):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        saved = copy.deepcopy(optimizers[1].state_dict())
        optimizers[1] = todist.Adafactor(ours.parameters())
        optimizers[1].load_state_dict(saved)
    for p, q in zip(twin.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        for name, value in optimizers[0].state[p].items():
            torch.testing.assert_close(optimizers[1].state[q][name], value, check_dtype=False)


def test_a_schedule_and_parameters_without_gradients():
    grads = [torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=DOUBLE) * k for k in (1.0, 0.3, 2.0)]
    ends = []
    for lr in (lambda count: 0.4 * 0.5**count, None):
        p, other = torch.ones(2, 2, dtype=DOUBLE), torch.ones(2, dtype=DOUBLE)
        impl = todist.adafactor(lr=0.1 if lr is None else lr)
        state = impl.init([p, other])
        for step, grad in enumerate(grads):
            if lr is None:
                impl = todist.adafactor(lr=0.4 * 0.5**step)
            updates, state = impl.update([grad, None], state, params=[p, other])
            assert updates[1] is None
            p = p + updates[0]
        assert [int(count) for count in state[-1].step] == [3, 0]
        ends.append(p)
    torch.testing.assert_close(*ends)


@each_row("shape", [(3, 2), (4,)])
def test_derivatives_through_two_steps(shape):
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(*shape, dtype=DOUBLE, generator=generator).requires_grad_()
    target = torch.randn(*shape, dtype=DOUBLE, generator=generator)
    numbers = [torch.tensor(x, dtype=DOUBLE, requires_grad=True) for x in (0.1, 1e-2, 0.7, 0.2)]

    def after(p, lr, least, d, weight_decay):
        impl = todist.adafactor(lr, eps=(1e-4, least), d=d, weight_decay=weight_decay)
        state = impl.init([p])
        for _ in range(2):
            updates, state = impl.update([(p - target) ** 3], state, params=[p], inplace=False)
            p = p + updates[0]
        return p

    assert gradcheck(after, (p, *numbers))
    assert gradgradcheck(after, (p, *numbers), atol=1e-4)


def test_zeros_have_finite_steps_and_derivatives():
    net = nn.Linear(2, 3).double()
    nn.init.zeros_(net.bias)
    first = list(net.parameters())
    todist.MetaAdafactor(net, lr=0.1).step((0 * net(torch.ones(1, 2, dtype=DOUBLE))).sum())
    grads = torch.autograd.grad(sum(p.square().sum() for p in net.parameters()), first)
    for grad, p in zip(grads, first, strict=True):
        torch.testing.assert_close(grad, 2 * p.detach())


@each_row(
    ("options", "kind", "told"),
    [
        ({"beta2_decay": 0.5}, ValueError, "`beta2_decay` must be at most 0, got 0.5"),
        ({"beta2_decay": "x"}, TypeError, "`beta2_decay` must be a number, got str"),
        ({"eps": 1e-3}, TypeError, "`eps` must be a pair of numbers, .*, got 0.001"),
        ({"eps": (0.0, 1e-3)}, ValueError, r"`eps\[0\]` must be above 0, got 0.0"),
        ({"eps": (None, -1)}, ValueError, r"`eps\[1\]` must be at least 0, got -1"),
        ({"d": 0}, ValueError, "`d` must be above 0, got 0"),
        ({"weight_decay": -1}, ValueError, "`weight_decay` must be at least 0, got -1"),
        ({"lr": [0.1]}, TypeError, "`lr` must be a number, a tensor or a schedule for Adafactor, got a list"),
        ({"lr": -0.1}, ValueError, "`lr` must be at least 0, got -0.1"),
    ],
)
def test_what_is_refused(options, kind, told):
    with pytest.raises(kind, match=told):
        todist.adafactor(**options)


def test_complex_parameters_and_missing_ones():
    with pytest.raises(TypeError, match=r"must be real for Adafactor, got torch\.complex64 at leaf 0"):
        todist.adafactor().init([torch.ones(2, dtype=torch.complex64)])
    impl = todist.adafactor()
    with pytest.raises(ValueError, match="`params` must be given to `update`"):
        impl.update([torch.ones(2)], impl.init([torch.ones(2)]))
