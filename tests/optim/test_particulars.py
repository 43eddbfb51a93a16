"""What a single optimizer has besides: Adam's precision, AdamW's mask, RMSprop's options beyond torch's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import torchopt_dist as todist
from tests.optim import torch_classes
from tests.optim.programs import DOUBLE, flat, losses, make, unroll
from tests.rows import each_row


def test_double_precision_is_exact_in_the_first_step():
    """Adam's first step is ``lr * g / (|g| + eps)``: corrections in single precision are 7e-6 off."""
    w = torch.tensor([2.0], dtype=DOUBLE, requires_grad=True)
    (0.3 * w).sum().backward()
    todist.Adam([w], lr=0.1).step()
    assert w.item() == pytest.approx(2.0 - 0.1 * 0.3 / (0.3 + 1e-8), rel=1e-15)


def test_adamw_mask_and_groups():
    net = make()
    mask = [p.ndim > 1 for p in net.parameters()]
    ours = todist.AdamW(net.parameters(), 0.01, weight_decay=0.5, mask=mask)
    twin_net = make()
    matrices, biases = [], []
    for p in twin_net.parameters():
        (matrices if p.ndim > 1 else biases).append(p)
    twin = torch.optim.AdamW(
        [{"params": matrices}, {"params": biases, "weight_decay": 0.0}], 0.01, weight_decay=0.5
    )
    grouped_net = make()
    matrices = [p for p in grouped_net.parameters() if p.ndim > 1]
    biases = [p for p in grouped_net.parameters() if p.ndim == 1]
    grouped = todist.AdamW(
        [{"params": matrices}, {"params": biases, "weight_decay": 0.0}], 0.01, weight_decay=0.5
    )
    for loss in losses(torch.float32, count=10):
        for each, optimizer in ((net, ours), (twin_net, twin), (grouped_net, grouped)):
            optimizer.zero_grad()
            loss(each).backward()
            optimizer.step()
    for each in (net, grouped_net):
        torch.testing.assert_close(flat(each.parameters()), flat(twin_net.parameters()), rtol=1e-4, atol=1e-6)


@each_row("fused", [None, False])
@each_row("centered", [False, True])
def test_what_rmsprop_has_beyond_torch(centered, fused):
    w = torch.tensor([1.0, -2.0], dtype=DOUBLE, requires_grad=True)
    options = {
        "lr": 0.1,
        "alpha": 0.9,
        "eps": 1e-3,
        "momentum": 0.8,
        "centered": centered,
        "initial_scale": 0.5,
    }
    optimizer = todist.RMSprop([w], **options, nesterov=True, fused=fused)
    (meta,) = unroll(
        SimpleNamespace(function=todist.rmsprop),
        (w.detach(),),
        {**options, "nesterov": True},
        lambda p: (p[0] ** 3,),
    )
    x, v, a, b = w.detach().clone(), 0.5, 0.0, 0.0
    for _ in range(3):
        w.grad = w.detach() ** 3
        optimizer.step()
        g = x**3
        v, a = 0.9 * v + 0.1 * g**2, 0.9 * a + 0.1 * g
        step = g / ((v - a**2 if centered else v) ** 0.5 + 1e-3)
        b = 0.8 * b + step
        x = x - 0.1 * (step + 0.8 * b)
    torch.testing.assert_close(w.detach(), x, rtol=1e-12, atol=0)
    torch.testing.assert_close(meta, x, rtol=1e-12, atol=0)


@each_row("name", ["adam", "adamw", "adamax", "radam", "adagrad", "sgd"])
def test_an_option_of_shape_1_is_a_number_where_steps_differ(name):
    """Its corrections are then one for each parameter, and must not give a 0-d parameter a shape."""
    pairs = {"adagrad": {"lr_decay": 0.1}, "sgd": {"momentum": 0.9, "dampening": 0.5}}
    plain = pairs.get(name, {"betas": (0.9, 0.99)})

    def as_tensors(value):
        return tuple(map(as_tensors, value)) if isinstance(value, tuple) else torch.tensor([value])

    moved = []
    for options in (plain, {key: as_tensors(value) for key, value in plain.items()}):
        impl = getattr(todist, name)(lr=0.1, **options)
        params = [torch.tensor(1.0), torch.ones(2)]
        state = impl.init(params)
        _, state = impl.update([torch.tensor(1.0), None], state, params=params)
        updates, state = impl.update([torch.tensor(1.0), torch.ones(2)], state, params=params)
        moved.append(todist.apply_updates(params, updates, inplace=False))
    for one, other in zip(*moved, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_amsgrad_has_the_derivatives_of_torch_s_own_steps(name):
    """Of two orders, with slopes that fall, so that the greatest average is an old one."""
    found = []
    for ours in (True, False):
        w = torch.tensor(torch_classes.W, dtype=DOUBLE, requires_grad=True)
        module = torch_classes.One(w.clone())
        options = {"lr": 0.1, "betas": (0.5, 0.6), "eps": 0.01, "weight_decay": 0.1, "amsgrad": True}
        if ours:
            optimizer = getattr(todist, f"Meta{name}")(module, **options)
        else:
            optimizer = todist.differentiable(getattr(torch.optim, name), module, **options)
        for slope in (3.0, 0.5, 0.1, 2.0):
            optimizer.step((slope * module.w.sin() + slope**2 * module.w**3).sum())
        (slopes,) = torch.autograd.grad(module.w.exp().sum(), w, create_graph=True)
        (bends,) = torch.autograd.grad(slopes.square().sum(), w)
        found.append((module.w, slopes, bends))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_amsgrad_has_no_kernel(name):
    for make_one in (getattr(todist, name), getattr(todist, f"Meta{name}")):
        net = torch.nn.Linear(1, 1)
        target = net if "Meta" in make_one.__name__ else net.parameters()
        with pytest.raises(
            RuntimeError, match="`fused=True` cannot be used: there is no kernel for `amsgrad`"
        ):
            make_one(target, amsgrad=True, fused=True)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's own class
@pytest.mark.parametrize(
    "options", [{}, {"lr_decay": 0.1, "maximize": True, "initial_accumulator_value": 0.1}], ids=str
)
def test_adagrad_takes_sparse_gradients_beside_dense_ones(options):
    """As torch's, where a row that is there twice counts once; and rows without a gradient are left alone."""
    found = []
    for home in (torch.optim, todist):
        torch.manual_seed(0)
        table, head = torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 1)
        first = table.weight.detach().clone()
        optimizer = home.Adagrad([*table.parameters(), *head.parameters()], lr=0.1, **options)
        for rows in ([1, 1, 3], [0, 1, 3], [1, 1, 1]):
            optimizer.zero_grad()
            head(table(torch.tensor(rows))).square().sum().backward()
            assert table.weight.grad.is_sparse
            optimizer.step()
        assert torch.equal((table.weight == first).all(1), torch.tensor([False, False, True, False, True]))
        found.append((table.weight, head.weight, optimizer.state[table.weight]["sum"]))
    torch.testing.assert_close(found[1], found[0])
