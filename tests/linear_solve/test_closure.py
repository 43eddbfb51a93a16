"""What a product closes over has the gradients of a dense solve, to order 2, however the product gets it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.diff.adjoint_table import ALL
from tests.rows import each_row
from torchopt_dist import linear_solve

D = {"dtype": torch.float64}
B = torch.tensor([1.0, 2.0, -1.0], **D)
SOLVE = linear_solve.solve_cg(rtol=1e-13)


def potential(h, theta):
    """Its Hessian for ``h`` is not diagonal, and depends on ``h`` and ``theta``."""
    return (h**2).sum() + (h.exp() * theta).sum() / 4 + (h * theta).sum() ** 2 / 4


def hessian_product(h, theta, v):
    gradient = torch.autograd.grad(potential(h, theta), h, create_graph=True)[0]
    return torch.autograd.grad(gradient, h, v, create_graph=True)[0]


class Scaled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(v, h):
        return v * h

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        v, h = ctx.saved_tensors
        return grad * h, grad * v


class Cubes(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, v):
        return v * (1 + self.weight**2)


def direct(h, theta):
    return lambda v: v * (1 + h * h) + theta * (theta @ v)


def twice(h, theta):
    """The same tensor, and what was computed from it before."""
    before = h * h
    return lambda v: v * (1 + before + h) + theta * (theta @ v)


def in_objects(h, theta):
    module = Cubes.__new__(Cubes)
    nn.Module.__init__(module)
    module.__dict__["weight"] = h  # not a parameter: one would be a leaf
    return lambda v: module(v) + theta * (theta @ v)


def by_function(h, theta):
    return lambda v: Scaled.apply(v, 1 + h * h) + Scaled.apply(v, h) + theta * (theta @ v)


def inside(h, theta):
    return lambda v: hessian_product(h, theta, v)


def outside(h, theta):
    gradient = torch.autograd.grad(potential(h, theta), h, create_graph=True)[0]
    return lambda v: torch.autograd.grad(gradient, h, v, create_graph=True, retain_graph=True)[0]


def in_a_partial_too(h, theta):
    gradient = torch.autograd.grad(potential(h, theta), h, create_graph=True)[0]

    def product(scale, v):
        hv = torch.autograd.grad(gradient, h, v, create_graph=True, retain_graph=True)[0]
        return scale * scale * v + hv + h * h * v

    return functools.partial(product, h * theta)


WAYS = [direct, twice, in_objects, by_function, inside, outside, in_a_partial_too]


def of_leaves(m, theta):
    return m, theta


def of_results(m, theta):
    return torch.tanh(m) * theta + m, theta


def solved(matvec):
    return SOLVE(matvec, B)


def dense(matvec):
    return torch.linalg.solve(torch.stack([matvec(row) for row in torch.eye(3, **D)], dim=1), B)


def derivatives(solution, made, way):
    """The solution, its first derivatives, and theirs, for leaves and for what the product closes over."""
    m = torch.tensor([0.3, 0.8, -0.5], **D, requires_grad=True)
    theta = torch.tensor([0.9, 0.4, 0.6], **D, requires_grad=True)
    h, other = made(m, theta)
    x = solution(way(h, other))
    first = torch.autograd.grad(x.sin().sum(), (h, m, theta), create_graph=True)
    second = torch.autograd.grad(sum((one**2).sum() for one in first), (h, m, theta), allow_unused=True)
    return [x, *first, *second]


@each_row("way", WAYS)
@each_row("made", [of_leaves, of_results])
def test_derivatives_to_order_two_are_those_of_a_dense_solve(made, way):
    """For a tensor that is no leaf, and through it for the leaves, each once."""
    for found, true in zip(derivatives(solved, made, way), derivatives(dense, made, way), strict=True):
        torch.testing.assert_close(found, true)


@each_row("way", [direct, twice, in_objects])
def test_a_result_closed_over_inside_torch_func(way):
    """Of the transform's own level, of one around it, and of autograd's graph outside of all."""
    theta = torch.tensor([0.9, 0.4, 0.6], **D)
    ms = torch.tensor([[0.3, 0.8, -0.5], [0.1, -0.2, 0.7]], **D)
    scale = torch.tensor([1.1, 0.9, 1.3], **D, requires_grad=True)

    def value(solution, result, m, theta):
        h, other = of_results(m, theta)
        return solution(way(h * result, other)).sin().sum()

    found = []
    for solution in (solved, dense):
        result = 2 * scale
        of_one = functools.partial(value, solution, result)
        mapped = torch.vmap(torch.func.grad(of_one, argnums=(0, 1)), in_dims=(0, None))(ms, theta)
        twice = torch.func.jacrev(torch.func.grad(of_one))(ms[0], theta)
        values = torch.vmap(of_one, in_dims=(0, None))(ms, theta)
        found.append([*mapped, twice, *torch.autograd.grad(values.sum(), (result, scale))])
    torch.testing.assert_close(found[0], found[1])


def test_parameters_of_a_module_closed_over():
    found = []
    for solution in (solved, dense):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4, **D), nn.Tanh(), nn.Linear(4, 3, **D))
        x = solution(lambda v, net=net: v * (2 + net(B)) + net[2].weight.T[:3, 0] * v * v.new_ones(3) * 0.1)
        first = torch.autograd.grad(x.sin().sum(), list(net.parameters()), create_graph=True)
        norm = sum((one**2).sum() for one in first)
        found.append([x, *first, *torch.autograd.grad(norm, list(net.parameters()))])
    torch.testing.assert_close(found[0], found[1])


def test_a_tensor_closed_over_that_is_changed_in_place_is_an_error():
    m = torch.ones(3, **D, requires_grad=True)
    h = 2 * m
    x = SOLVE(lambda v: v * h, B)
    h.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


def test_a_name_that_is_bound_anew_leaves_earlier_solves_as_they_were():
    m = torch.tensor([1.0, 2.0, 3.0], **D, requires_grad=True)

    def repeated(solution):
        h = m * m
        for _ in range(3):
            h = solution(lambda v: v * (1 + h * h))  # noqa: B023
        return torch.autograd.grad(h.sum(), m)[0]

    torch.testing.assert_close(repeated(solved), repeated(dense))


def test_what_a_solve_counts_is_counted_in_backward_too():
    m = torch.tensor([1.0, 2.0, 3.0], **D, requires_grad=True)
    scale, calls = 1.0, []

    def matvec(v):
        calls.append(v)
        return v * m * scale

    x = SOLVE(matvec, B)
    before = len(calls)
    scale = 2.0
    torch.testing.assert_close(torch.autograd.grad(x.sum(), m)[0], -B / m.detach() ** 2)
    assert len(calls) > before > 0


def test_other_backward_passes_go_on_where_a_solve_ends():
    """A solve whose product differentiates a graph does so only within its own backward pass."""
    m = torch.tensor([0.3, 0.8, -0.5], **D, requires_grad=True)
    h, theta = of_results(m, torch.ones(3, **D))
    x = SOLVE(outside(h, theta), B)
    before = torch.autograd.grad(h.exp().sum(), m, retain_graph=True)
    torch.autograd.grad(x.sum(), m, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(h.exp().sum(), m), before)


@each_row("before", [False, True])
def test_a_tensor_that_a_product_takes_in_backward_only_is_an_error(before):
    """Also where there was none that requires grad before."""
    m = torch.ones(3, **D, requires_grad=True)
    tensors = dict.fromkeys(range(1000), 2 * m if before else 2 * m.detach())  # data, and no names
    x = linear_solve.solve_gmres()(lambda v: v * tensors[0], B.clone().requires_grad_())
    tensors[0] = tensors[0] * m
    with pytest.raises(ValueError, match="must take the same tensors in each call, also in backward"):
        x.sum().backward()


def followed(w, meta):
    energy = (w**2 / 2 + w**4 / 12 + meta * w**2 / 2).sum()
    gradient = torch.autograd.grad(energy, w, create_graph=True)[0]
    return SOLVE(lambda v: torch.autograd.grad(gradient, w, v, create_graph=True, retain_graph=True)[0], B)


INNER = {
    "closed over": lambda w, meta: SOLVE(lambda v: v * (1 + w() * w() + meta), B),
    "followed": lambda w, meta: followed(w(), meta),
    "dense": lambda w, meta: B / (1 + w() * w() + meta),
}


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, 1.0, 2.0], **D))


def of_inner_loss(adjoint, how):
    """A loop whose loss solves a system of its parameters, which are in a module, and of a meta tensor."""
    meta = torch.tensor([0.3, 0.7, 1.1], **D, requires_grad=True)
    torch.manual_seed(0)
    net = One()
    first = net.w

    def loss(net):
        return ((INNER[how](lambda: net.w, meta) - 1) ** 2).sum() + (net.w**2).sum() / 2

    if adjoint == "MetaSGD":
        optimizer = todist.MetaSGD(net, lr=0.3)
        for _ in range(3):
            optimizer.step(loss(net))
        last = net.w
    else:
        last = todist.inner_loop(loss, todist.sgd(lr=0.3), net, 3, meta=meta, adjoint=adjoint).params.w
    return [last, *torch.autograd.grad((last**3).sum(), (meta, first), allow_unused=True)]


@each_row("how", ["closed over", "followed"])
@each_row("name", [name for name in ALL if name != "reptile"] + ["MetaSGD"])
@pytest.mark.filterwarnings("ignore:steps of an inner loop are recorded one by one")
def test_a_solve_in_an_inner_loss(name, how):
    adjoint = ALL.get(name, name)
    for found, true in zip(of_inner_loss(adjoint, how), of_inner_loss(adjoint, "dense"), strict=True):
        torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-8)


def test_a_gradient_for_one_of_several_tensors_is_that_tensor_s():
    m = torch.tensor([0.3, 0.8, -0.5], **D, requires_grad=True)
    theta = torch.tensor([0.9, 0.4, 0.6], **D, requires_grad=True)
    both = torch.autograd.grad(solved(direct(m, theta)).sum(), (m, theta))
    for one, found in zip((m, theta), both, strict=True):
        (alone,) = torch.autograd.grad(solved(direct(m, theta)).sum(), one)
        torch.testing.assert_close(alone, found)
