"""Modules with meta-parameters: what counts as one, implicit gradients, and gradients of order zero."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.distributions import Normal

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist import linear_solve
from torchopt_dist.nn import ImplicitMetaGradientModule, MetaGradientModule, ZeroOrderGradientModule


class Plain(MetaGradientModule):
    def __init__(self, net, scale, number=3):
        super().__init__()
        self.net, self.scale, self.number = net, scale, number
        self.own = nn.Linear(2, 1)
        self.mine = nn.Parameter(torch.zeros(1))
        self.inner = nn.Sequential(nn.Linear(1, 1))


def plain():
    return Plain(nn.Linear(2, 2), torch.ones(1, requires_grad=True))


def test_what_was_given_is_meta_and_the_rest_is_not():
    module = plain()
    own = {"mine", "own.weight", "own.bias", "inner.0.weight", "inner.0.bias"}
    assert dict(module.named_parameters()).keys() == own == module.state_dict().keys()
    assert dict(module.named_meta_parameters()).keys() == {"scale", "net.weight", "net.bias"}
    assert len(list(module.meta_parameters())) == 3
    assert list(module.meta_children()) == list(module.meta_modules()) == [module.net]
    assert dict(module.named_meta_modules()) == dict(module.named_meta_children()) == {"net": module.net}
    assert module.net not in set(module.modules())
    assert {"net", "scale", "own"} <= set(dir(module))
    assert [*module.meta_parameters(recurse=False)] == [module.scale]


def test_nested_modules_and_prefixes():
    holder = nn.Sequential(plain())

    class Outer(MetaGradientModule):
        def __init__(self):
            super().__init__()
            self.holder = holder

    names = dict(Outer().named_meta_parameters(prefix="p"))
    assert names.keys() == {"p.holder.0.scale", "p.holder.0.net.weight", "p.holder.0.net.bias"}


def test_names_can_be_reassigned_registered_and_deleted():
    module = plain()
    net, scale = module.net, module.scale
    module.net = nn.Linear(3, 3)  # not given: an own one now
    assert module.net in set(module.modules())
    assert not list(module.meta_children())
    module.net = net
    assert list(module.meta_children()) == [net]
    assert net not in set(module.modules())
    del module.net, module.scale
    assert not list(module.named_meta_parameters())
    with pytest.raises(AttributeError, match="net"):
        _ = module.net
    module.register_meta_parameter("again", scale)
    module.register_meta_module("other", net)
    module.add_meta_module("nothing", None)
    assert dict(module.named_meta_parameters()).keys() == {"again", "other.weight", "other.bias"}
    for register in (module.register_meta_parameter, module.register_meta_module):
        with pytest.raises(KeyError, match="there is an attribute 'own' already"):
            register("own", None)
        with pytest.raises(KeyError, match="must not be empty, nor have a dot"):
            register("a.b", None)
    with pytest.raises(TypeError, match="'x' must be a tensor that requires grad"):
        module.register_meta_parameter("x", torch.ones(1))
    with pytest.raises(TypeError, match="'x' must be a module, got int"):
        module.register_meta_module("x", 3)


@each_row(
    "assign",
    [
        lambda self, scale, net: setattr(self, "scale", scale),
        lambda self, scale, net: setattr(self, "net", net),
        lambda self, scale, net: self.register_meta_parameter("scale", scale),
        lambda self, scale, net: self.register_meta_module("net", net),
        lambda self, scale, net: self.add_meta_module("net", net),
        lambda self, scale, net: setattr(self, "own", nn.Linear(1, 1)),
    ],
)
def test_what_is_assigned_before_init_is_an_error_as_torch_s_is(assign):
    class Early(MetaGradientModule):
        def __init__(self, scale, net):
            assign(self, scale, net)
            super().__init__()

    with pytest.raises(AttributeError, match=r"cannot assign [\w-]+ before Module.__init__\(\) call"):
        Early(torch.ones(1, requires_grad=True), nn.Linear(1, 1))


def test_a_module_that_is_half_given_is_refused():
    net = nn.Linear(2, 2)

    class Half(MetaGradientModule):
        def __init__(self, weight):
            super().__init__()
            self.net = net

    with pytest.raises(ValueError, match="given to the constructor, or none; 1 of 2 were"):
        Half(net.weight)


def test_copies_and_pickles():
    for twin in (copy.deepcopy(plain()), pickle.loads(pickle.dumps(plain())), todist.module_clone(plain())):
        assert dict(twin.named_meta_parameters()).keys() == {"scale", "net.weight", "net.bias"}
        assert len(list(twin.parameters())) == 5


class Proximal(ImplicitMetaGradientModule, linear_solve=linear_solve.solve_cg(rtol=1e-13)):
    """Ridge regression towards the meta-module's weights: iMAML's inner problem, in closed form."""

    def __init__(self, meta_net, strength):
        super().__init__()
        self.meta_net, self.strength = meta_net, strength
        self.net = todist.module_clone(meta_net, by="deepcopy")

    def forward(self, x):
        return self.net(x)

    def objective(self, x, y):
        pairs = zip(self.parameters(), self.meta_net.parameters(), strict=True)
        distance = sum((p - q).square().sum() for p, q in pairs)
        return 0.5 * (self(x) - y).square().sum() + 0.5 * self.strength.exp() * distance

    def solve(self, x, y):
        for _ in range(60):
            self.newton_step(x, y)
        return self

    def newton_step(self, x, y):
        """Exact for a quadratic function of one vector; the Hessian is XᵀX + strength."""
        (parameter,) = self.parameters()
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(self.objective(x, y), parameter)
        hessian = x.T @ x + self.strength.exp().detach() * torch.eye(x.shape[1], dtype=x.dtype)
        with torch.no_grad():
            parameter.copy_(parameter - 0.5 * torch.linalg.solve(hessian, grad.T).T)


class ByOptimality(Proximal):
    def optimality(self, x, y):
        (p,), (q,) = self.parameters(), self.meta_net.parameters()
        return [(self(x) - y).T @ x + self.strength.exp() * (p - q)]

    def solve(self, x, y):
        return super().solve(x, y)


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(4, n, dtype=torch.float64, generator=generator) for n in (3, 1))


def meta(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, 1, bias=False).double(), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)


def closed_form(weight, strength, x, y):
    identity = torch.eye(3, dtype=x.dtype)
    return torch.linalg.solve(x.T @ x + strength.exp() * identity, x.T @ y + strength.exp() * weight.T).T


@pytest.mark.parametrize("kind", [Proximal, ByOptimality])
def test_implicit_gradients_to_order_two(kind):
    (x, y), (net, strength) = data(), meta()
    inputs = (net.weight, strength)
    inner = kind(net, strength)
    assert inner.solve(x, y) is inner
    true = closed_form(*inputs, x, y)
    torch.testing.assert_close(inner.net.weight, true)
    loss, exact = inner(x).pow(2).sum(), (x @ true.T).pow(2).sum()
    ours = torch.autograd.grad(loss, inputs, create_graph=True)
    theirs = torch.autograd.grad(exact, inputs, create_graph=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    again = [torch.autograd.grad(sum(g.sum() for g in grads), inputs) for grads in (ours, theirs)]
    for a, b in zip(*again, strict=True):
        torch.testing.assert_close(a, b)


def test_one_module_solves_again_and_again_and_each_loss_has_its_gradient():
    (net, strength), inner = meta(), None
    inner, losses, exact = Proximal(net, strength), [], []
    for seed in range(3):
        x, y = data(seed)
        inner.solve(x, y)
        losses.append(inner(x).pow(2).sum())
        exact.append((x @ closed_form(net.weight, strength, x, y).T).pow(2).sum())
    sum(losses).backward()
    (expected,) = torch.autograd.grad(sum(exact), net.weight)
    torch.testing.assert_close(net.weight.grad, expected)
    inner.solve(*data())
    with torch.no_grad():
        inner.solve(*data())
    assert inner.net.weight.grad_fn is None


def test_solves_in_threads():
    (net, strength), errors = meta(), []
    inner = Proximal(net, strength)
    x, y = data()
    expected = closed_form(net.weight, strength, x, y)

    def work():
        for _ in range(5):
            inner.solve(x, y)
            if not torch.allclose(inner(x), x @ expected.T):
                errors.append("wrong")
            inner.optimality(x, y)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors


def test_bad_implicit_modules():
    with pytest.raises(
        TypeError, match="Without must have a method `objective` or `optimality` beside `solve`"
    ):

        class Without(ImplicitMetaGradientModule):
            def solve(self): ...

    class Short(Proximal):
        def optimality(self, x, y):
            return []

        def solve(self, x, y): ...

    inner = Short(*meta())
    inner.solve(*data())
    with pytest.raises(
        ValueError, match="`optimality` must return a sequence of 1 tensors, one for each parameter, got 0"
    ):
        inner(data()[0]).sum().backward()
    weight = inner.net.weight
    assert inner.net.weight is weight  # restored after the error
    with pytest.raises(NotImplementedError, match="must have a method `solve`"):
        ImplicitMetaGradientModule().solve()
    with pytest.raises(TypeError, match="`solve` must be a solver"):

        class Unsolvable(ImplicitMetaGradientModule, linear_solve=3): ...


class Quadratic(ZeroOrderGradientModule, method="antithetic", num_samples=3000, sigma=0.1):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x, *, scale=1.0):
        return float((x * self.weight.square() * self.frozen).sum()) * scale

    def sample(self, sample_shape=()):
        return torch.randn(sample_shape)


def test_zero_order_modules_take_keyword_arguments():
    torch.manual_seed(0)
    module = Quadratic()
    weight = module.weight
    module(torch.ones(3), scale=0.5).backward()
    assert module.weight is weight
    torch.testing.assert_close(weight.grad, weight.detach(), rtol=0.2, atol=0.3)
    with torch.no_grad():
        assert module(torch.ones(3)) == 14.0


def test_zero_order_modules_with_a_distribution_and_bad_ones():
    class Given(Quadratic, distribution=Normal(0.0, 1.0), method="forward", num_samples=2000): ...

    torch.manual_seed(0)
    module = Given()
    module(torch.ones(3)).backward()
    torch.testing.assert_close(module.weight.grad, 2 * module.weight.detach(), rtol=0.3, atol=0.6)
    for options, kind, message in (
        ({"method": "none"}, ValueError, "`method` must be"),
        ({"num_samples": 0}, ValueError, "`num_samples` must be at least 1"),
        ({"sigma": -1.0}, ValueError, "`sigma` must be finite and above 0"),
        ({"distribution": 3}, TypeError, "`distribution` must have a method `sample`"),
    ):
        with pytest.raises(kind, match=message):
            type("Bad", (Quadratic,), {}, **options)
    with pytest.raises(TypeError, match="NoNoise must have a `distribution` or a method `sample`"):

        class NoNoise(ZeroOrderGradientModule):
            def forward(self):
                return 0.0


class Held(Proximal):
    """The same with its data in attributes, which are bound anew for each task."""

    def objective(self):
        return super().objective(self.x, self.y)

    def solve(self):
        for _ in range(60):
            self.newton_step()
        return self

    def newton_step(self):
        (parameter,) = self.parameters()
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(self.objective(), parameter)
        hessian = self.x.T @ self.x + self.strength.exp().detach() * torch.eye(3, dtype=self.x.dtype)
        with torch.no_grad():
            parameter.copy_(parameter - 0.5 * torch.linalg.solve(hessian, grad.T).T)


def test_attributes_of_a_module_mean_what_they_meant_in_the_solve():
    def gradients(late):
        net, strength = meta()
        module, found = Held(net, strength), []
        for seed in range(3):
            module.x, module.y = data(seed)
            module.solve()
            found.append(module.net.weight.sin().sum())
            if not late:
                found[-1] = torch.autograd.grad(found[-1], (net.weight, strength))
        return [torch.autograd.grad(one, (net.weight, strength)) for one in found] if late else found

    torch.testing.assert_close(gradients(True), gradients(False))
