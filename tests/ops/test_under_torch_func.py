"""The kernels' node under ``torch.func``: what it gives is what the formula gives, operation by operation."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tests.ops.cases import needs_kernels
from tests.rows import each_row
from torchopt_dist import ops
from torchopt_dist.ops._adam import adam, adam_
from torchopt_dist.ops._rmsprop import rmsprop
from torchopt_dist.ops._sgd import sgd

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
DOUBLE = torch.float64


def steps():
    return [torch.tensor(3.0), torch.tensor(5.0)]


def way(fused, eps):
    """``None``: the formula, recorded operation by operation, as a hyper-parameter that is a tensor makes it."""
    return {"fused": fused, "eps": eps} if fused is not None else {"eps": torch.tensor(eps, dtype=DOUBLE)}


def adams(x, y, fused):
    numbers = {"b1": 0.9, "b2": 0.99, "eps_root": 1e-3, "lr": 0.3, "maximize": True, **way(fused, 1e-2)}
    columns = [x, x[0]], [x * y, y[1]], [y * y, y[0] ** 2], steps(), [x + y, y[2]]
    return adam(*columns, weight_decay=0.1, **numbers)[:3]


def adamws(x, y, fused):
    numbers = {"b1": 0.9, "b2": 0.99, "eps_root": 0.0, "lr": 0.3, "decoupled": True, **way(fused, 1e-2)}
    columns = [x, x[0]], [x * y, y[1]], [y * y, y[0] ** 2], steps(), [x + y, y[2]]
    return adam(*columns, weight_decay=0.1, **numbers)[:3]


def directions(x, y, fused):
    numbers = {"b1": 0.9, "b2": 0.99, "eps_root": 0.0, **way(fused, 1e-2)}
    return adam([x, y], [x * 0.3, x], [y * y, y * y], steps(), **numbers)[:3]


def rmsprops(x, y, fused):
    columns = ([x, x[0]], [y * y + 2, y[0] ** 2 + 1], [x * 0.1, y[0] * 0.1], [y, x[1]], [x + y, y[2]])
    return rmsprop(*columns, alpha=0.9, momentum=0.8, nesterov=True, lr=0.2, **way(fused, 0.01))


def sgds(x, y, fused):
    options = {"momentum": 0.9, "dampening": 0.2, "nesterov": True, "weight_decay": 0.1, "maximize": True}
    return sgd([x * y, x[0]], [y, y[1]], steps(), [x, x[1]], lr=0.3, **options, fused=fused or False)[:2]


STEPS = [adams, adamws, directions, rmsprops, sgds]
every_step = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
each_way = pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_kernels)])


def total(step, fused, first_only=False):
    """A number that needs every result, or only the first column: then nothing flows into the others."""

    def function(x, y):
        made = step(x, y, fused)[:1] if first_only else step(x, y, fused)
        return sum((z * (i + 1)).sin().sum() for i, column in enumerate(made) for z in column)

    return function


def pulled_outside(f):
    def function(x, y):
        _, pull = vjp(f, x, y)
        return pull(torch.ones((), dtype=DOUBLE))

    return function


WAYS = {
    "grad": lambda f: grad(f, argnums=(0, 1)),
    "vjp": pulled_outside,
    "grad of grad": lambda f: grad(lambda x, y: grad(f)(x, y).sin().sum(), argnums=(0, 1)),
    "third": lambda f: grad(lambda x, y: grad(lambda x, y: grad(f)(x, y).sum())(x, y).sum(), argnums=(0, 1)),
    "jacrev": lambda f: jacrev(lambda x, y: f(x, y) * x, argnums=(0, 1)),
    "jacfwd": lambda f: jacfwd(lambda x, y: f(x, y) * x, argnums=(0, 1)),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f)),
    "hessian": lambda f: hessian(f, argnums=(0, 1)),
    "jvp": lambda f: lambda x, y: jvp(f, (x, y), (y, x)),
    "jvp of grad": lambda f: lambda x, y: jvp(grad(f), (x, y), (y, x)),
}


@pytest.fixture
def given():
    torch.manual_seed(0)
    return torch.randn(3, dtype=DOUBLE), torch.rand(3, dtype=DOUBLE) + 0.5


FORWARD = ("jacfwd", "hessian", "jvp", "jvp of grad")
"""In forward mode no node is recorded."""


@every_step
@each_way
@pytest.mark.parametrize("first_only", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_every_transformation(step, fused, first_only, name, given):
    got = WAYS[name](total(step, fused and name not in FORWARD, first_only))(*given)
    torch.testing.assert_close(got, WAYS[name](total(step, None, first_only))(*given))


@every_step
@each_way
@pytest.mark.parametrize("name", [name for name in WAYS if name not in FORWARD])
@pytest.mark.parametrize("dims", [(0, 0), (1, 0), (0, None), (None, 1)])
def test_each_of_them_under_vmap(step, fused, name, dims, given):
    x, y = (
        z if dim is None else torch.stack([z, z * 0.5, z + 0.1, z * z], dim)
        for z, dim in zip(given, dims, strict=True)
    )
    found = vmap(WAYS[name](total(step, fused)), in_dims=dims)(x, y)
    for i in range(4):
        one = [z if dim is None else z.select(dim, i) for z, dim in zip((x, y), dims, strict=True)]
        alone = WAYS[name](total(step, None))(*one)
        torch.testing.assert_close(torch.utils._pytree.tree_map(lambda z, i=i: z[i], found), alone)


@every_step
@each_way
def test_vmap_inside_grad_and_vmap_inside_vmap(step, fused, given):
    x, y = (torch.stack([z, z * 0.5]) for z in given)
    found = []
    for way in (fused, None):
        f = total(step, way)
        each = vmap(f, in_dims=(0, None))
        twice = vmap(vmap(grad(f), in_dims=(0, None)), in_dims=(None, 0))
        found.append([grad(lambda x, y, each=each: each(x, y).prod(), (0, 1))(x, y[0]), twice(x, y)])
    torch.testing.assert_close(*found)


@every_step
@each_way
def test_a_graph_outside_of_the_transformation(step, fused, given):
    found = []
    for way in (fused, None):
        x, y = (z.clone().requires_grad_() for z in given)
        inner = vmap(grad(total(step, way)), in_dims=(0, None))(torch.stack([x, y]), x)
        found.append([inner, *torch.autograd.grad(inner.sin().sum(), (x, y))])
    torch.testing.assert_close(*found)


COLUMNS = {
    "adam": lambda g, m, v, p, fused: adam(
        g, m, v, steps(), p, b1=0.9, b2=0.99, eps=0.01, eps_root=0.0, lr=0.1, fused=fused
    )[:3],
    "rmsprop": lambda g, b, v, p, fused: rmsprop(
        g, v, None, b, p, alpha=0.9, eps=0.01, momentum=0.8, fused=fused
    ),
    "sgd": lambda g, b, _, p, fused: sgd(g, b, None, p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=fused),
}


@needs_kernels
@each_row("name", COLUMNS)
def test_what_no_gradient_flows_into_gets_none(name, given):
    """The second place's results are used for nothing."""
    columns = [[z.abs().requires_grad_() for z in given] for _ in range(4)]
    inputs = [z for column in columns for z in column]
    found = []
    for fused in (True, False):
        used = sum(column[0].sum() for column in COLUMNS[name](*columns, fused))
        found.append(torch.autograd.grad(used, inputs, allow_unused=True))
    assert all(g is None for g in found[0][1::2])
    for got, want in zip(*found, strict=True):
        assert got is None if want is None else torch.allclose(got, want)
    assert sum(g is not None for g in found[0]) >= 3


@needs_kernels
def test_batched_counts_are_for_the_formula():
    x, counts = torch.rand(3, 4), torch.tensor([1.0, 2.0, 5.0])

    def step(x, count, fused=None):
        return adam([x], [x], [x], [count], b1=0.9, b2=0.99, eps=0.1, eps_root=0.0, fused=fused)[0][0]

    want = torch.stack([step(row, count, False) for row, count in zip(x, counts, strict=True)])
    torch.testing.assert_close(vmap(step)(x, counts), want)
    message = r"`fused=True` cannot be used: the kernel must read `steps`, which `vmap` batches"
    with pytest.raises(RuntimeError, match=message):
        vmap(lambda x, count: step(x, count, True))(x, counts)

    def damped(x, count, fused=None):
        return sgd([x], [x], [count], lr=0.1, momentum=0.9, dampening=0.5, fused=fused)[0][0]

    want = torch.stack([damped(row, count, False) for row, count in zip(x, counts - 1, strict=True)])
    torch.testing.assert_close(vmap(damped)(x, counts - 1), want)
    with pytest.raises(RuntimeError, match=message):
        vmap(lambda x, count: damped(x, count, True))(x, counts)


@needs_kernels
def test_what_has_no_rule_is_for_the_formula(given):
    torch.testing.assert_close(
        functionalize(grad(total(adams, False)))(*given), grad(total(adams, None))(*given)
    )
    with pytest.raises(RuntimeError, match=r"a transformation of `torch.func` is active"):
        functionalize(total(adams, True))(*given)
    with pytest.raises(RuntimeError, match=r"forward-mode differentiation is active"):
        jvp(total(adams, True), given, given)


def test_a_step_in_place_under_vmap_is_that_of_each_row():
    def in_place(p, g):
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        adam_([p], [g], [m], [v], [torch.zeros(())], lr=0.1, b1=0.9, b2=0.99, eps=0.1)
        return p, m, v

    p, g = torch.rand(2, 3), torch.rand(2, 3)
    want = [torch.stack(column) for column in zip(*map(in_place, p.clone(), g), strict=True)]
    torch.testing.assert_close(list(vmap(in_place)(p.clone(), g)), want)


@needs_kernels
def test_a_network_s_inner_loop_runs_by_the_kernels(monkeypatch):
    """Two steps on each of four tasks, and the gradient through them."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
    names, params = zip(*net.named_parameters(), strict=True)
    tasks = torch.randn(4, 6, 5, dtype=torch.float64)

    def loss(params, x):
        return functional_call(net, dict(zip(names, params, strict=True)), x).square().mean()

    def outer(fused):
        def adapted(params, x):
            params, first = list(params), [torch.zeros_like(p) for p in params]
            second, counts = first, [torch.tensor(0.0) for _ in params]
            for _ in range(2):
                grads = list(grad(lambda p: loss(p, x))(params))
                params, first, second, counts = adam(
                    grads,
                    first,
                    second,
                    counts,
                    params,
                    b1=0.9,
                    b2=0.999,
                    eps=1e-3,
                    eps_root=0.0,
                    lr=0.1,
                    fused=fused,
                )
            return loss(params, x)

        return grad(lambda params: vmap(adapted, in_dims=(None, 0))(params, tasks).sum())(params)

    want = outer(False)
    for got, right in zip(outer(None), want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-12)
    called = []
    monkeypatch.setattr(
        ops._adam._Adam,
        "kernel",
        lambda self, columns: called.append(len(columns[0])) or self.formula(columns),
    )
    outer(None)
    assert called == [4, 4]
