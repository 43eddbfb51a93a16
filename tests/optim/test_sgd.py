"""SGD by its four routes against ``torch.optim.SGD``, and its derivatives."""

import copy
import inspect
import itertools

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from tests.rows import each_row
from torchopt_dist.optim import SGD, FuncOptimizer, MetaSGD, apply_updates, sgd

OPTIONS = [
    {"momentum": m, "dampening": d, "nesterov": n, "weight_decay": w, "maximize": x}
    for m, d, n, w, x in itertools.product([0.0, 0.9], [0.0, 0.3], [False, True], [0.0, 0.1], [False, True])
    if not n or (m and not d)
]


def make(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def losses(dtype, maximize, count=50):
    generator = torch.Generator().manual_seed(1)
    sign = -1.0 if maximize else 1.0
    for _ in range(count):
        x = torch.randn(5, 3, dtype=dtype, generator=generator)
        yield lambda forward, x=x: sign * (forward(x) - x.sum(1, keepdim=True)).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_thirty_steps_equal_torch(options, dtype):
    lr = 0.05
    twin, ours, meta, functional = (make(dtype) for _ in range(4))
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr, **options)
    optimizer = SGD(ours.parameters(), lr, **options)
    meta_optimizer = MetaSGD(meta, lr, **options)
    params = dict(functional.named_parameters())
    func_optimizer = FuncOptimizer(sgd(lr, **options))
    start = torch.cat([p.detach().flatten() for p in twin.parameters()])
    for loss in losses(dtype, options["maximize"]):
        for net, one in ((twin, twin_optimizer), (ours, optimizer)):
            one.zero_grad()
            loss(net).backward()
            one.step()
        meta_optimizer.step(loss(meta))
        params = func_optimizer.step(
            loss(lambda x, params=params: torch.func.functional_call(functional, params, (x,))), params
        )
    assert not torch.allclose(start, torch.cat([p.detach().flatten() for p in twin.parameters()]))
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    routes = zip(twin.parameters(), ours.parameters(), meta.parameters(), params.values(), strict=True)
    for want, *got in routes:
        for tensor in got:
            assert tensor.dtype == dtype
            torch.testing.assert_close(tensor.detach(), want.detach(), **tolerance)


def loss_of(params, x):
    a, b = params
    return (torch.tanh(x @ a) @ b).square().mean() + a.pow(3).mean()


DIFFERENTIABLE = [
    {},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"maximize": True, "momentum": 0.5},
]


@each_row("options", DIFFERENTIABLE)
def test_derivatives_through_three_functional_steps(options):
    torch.manual_seed(0)
    x = torch.randn(4, 2, dtype=torch.float64)
    a, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 2), (2, 1)))
    lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)

    def unroll(lr, a, b):
        impl, params = sgd(lr, **options), (a, b)
        state = impl.init(params)
        for _ in range(3):
            grads = torch.autograd.grad(loss_of(params, x), params, create_graph=True)
            updates, state = impl.update(grads, state, params=params, inplace=False)
            params = apply_updates(params, updates, inplace=False)
        return params

    assert gradcheck(unroll, (lr, a, b))
    assert gradgradcheck(unroll, (lr, a, b))


class Net(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = nn.Parameter(a.detach().clone()), nn.Parameter(b.detach().clone())
        self._parameters.update(a=a, b=b)  # plain tensors, so that gradcheck's inputs are the parameters

    def forward(self, x):
        return loss_of((self.a, self.b), x)


@each_row("options", DIFFERENTIABLE)
def test_derivatives_through_three_meta_steps(options):
    torch.manual_seed(0)
    x = torch.randn(4, 2, dtype=torch.float64)
    a, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 2), (2, 1)))
    lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)

    def unroll(lr, a, b):
        net = Net(a, b)
        optimizer = MetaSGD(net, lr, **options)
        for _ in range(3):
            optimizer.step(net(x))
        return net.a, net.b

    assert gradcheck(unroll, (lr, a, b))
    assert gradgradcheck(unroll, (lr, a, b))


def test_every_hyper_parameter_as_a_tensor_gets_its_gradient():
    torch.manual_seed(0)
    w = torch.randn(3, dtype=torch.float64)
    hyper = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.1, 0.9, 0.2, 0.3)]

    def unroll(lr, momentum, dampening, weight_decay):
        impl, params = sgd(lr, momentum, dampening, weight_decay), [w]
        state = impl.init(params)
        for _ in range(3):
            updates, state = impl.update([params[0].pow(3)], state, params=params, inplace=False)
            params = apply_updates(params, updates, inplace=False)
        return params[0]

    assert gradcheck(unroll, hyper)
    assert gradgradcheck(unroll, hyper)


def test_vmap_over_learning_rates_and_func_grad():
    w = torch.tensor([1.0, -2.0], dtype=torch.float64)

    def after_two(lr):
        impl, params = sgd(lr, momentum=0.9), {"w": w}
        state = impl.init(params)
        for _ in range(2):
            updates, state = impl.update({"w": 2 * params["w"]}, state, params=params, inplace=False)
            params = apply_updates(params, updates, inplace=False)
        return params["w"].sum()

    lrs = torch.tensor([0.1, 0.2], dtype=torch.float64)
    want = torch.stack([torch.func.grad(after_two)(lr) for lr in lrs])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(after_two))(lrs), want)
    # w2 = w1 - lr (2 w1 + .9 2 w0), w1 = (1 - 2 lr) w0  ->  d/dlr sum = sum(w0) (8 lr - 5.8)
    torch.testing.assert_close(want, w.sum() * (8 * lrs - 5.8))


def test_the_three_faces_share_one_signature():
    function, plain, meta = (inspect.signature(face).parameters for face in (sgd, SGD, MetaSGD))
    assert list(plain) == ["params", *[name for name in function if name != "moment_requires_grad"]]
    assert list(meta) == ["module", *function]
    assert meta["moment_requires_grad"].default is True
    assert function["moment_requires_grad"].default is False
    for face in (SGD, MetaSGD):
        assert "    nesterov: look ahead" in face.__doc__
        assert "\nRaises:\n" in face.__doc__
    assert "moment_requires_grad" not in SGD.__doc__
    assert "    moment_requires_grad: " in MetaSGD.__doc__


@each_row(
    ("kwargs", "message"),
    [
        ({"lr": -1.0}, "`lr` must be at least 0, got -1.0"),
        ({"lr": 0.1, "momentum": -1.0}, "`momentum` must be at least 0, got -1.0"),
        ({"lr": 0.1, "weight_decay": -1.0}, "`weight_decay` must be at least 0, got -1.0"),
        ({"lr": 0.1, "nesterov": True}, "`nesterov` needs a `momentum` above 0"),
    ],
)
def test_all_faces_refuse_bad_numbers(kwargs, message):
    net = make(torch.float32)
    for face in (sgd, lambda **kw: SGD(net.parameters(), **kw), lambda **kw: MetaSGD(net, **kw)):
        with pytest.raises(ValueError, match=message):
            face(**kwargs)


def test_classes_name_themselves_in_argument_errors():
    net = make(torch.float32)
    with pytest.raises(TypeError, match="SGD: got an unexpected keyword argument 'rate'"):
        SGD(net.parameters(), rate=0.1)
    with pytest.raises(TypeError, match="MetaSGD: got an unexpected keyword argument 'betas'"):
        MetaSGD(net, 0.1, betas=1)


def test_deepcopied_transformation_goes_on_alike():
    impl = sgd(0.1, 0.9, weight_decay=0.1)
    params = [torch.ones(2)]
    one, _ = impl.update(params, impl.init(params), params=params)
    two, _ = copy.deepcopy(impl).update(params, impl.init(params), params=params)
    assert torch.equal(one[0], two[0])
