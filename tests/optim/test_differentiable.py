import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

from tests.optim.graph import count_nodes
from torchopt_dist.nn import extract_state_dict, module_clone, recover_state_dict, stop_gradient
from torchopt_dist.optim import MetaOptimizer, MetaSGD
from torchopt_dist.optim.differentiable import DifferentiableOptimizer, differentiable

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(3))


def takes(cls, option):
    return option in inspect.signature(cls).parameters


CLASSES = sorted(
    (
        cls
        for cls in vars(torch.optim).values()
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and takes(cls, "differentiable")
    ),
    key=lambda cls: cls.__name__,
)
SMOOTH = [cls for cls in CLASSES if cls is not torch.optim.Rprop]
FORMS = [
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
    (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    *((cls, {"weight_decay": 0.1}) for cls in CLASSES if takes(cls, "weight_decay")),
    *((cls, {"maximize": True}) for cls in CLASSES),
    *((cls, {}) for cls in CLASSES),
]
# What an option is worth in the check of its gradient: so that it tells on the outcome within a few steps.
VALUES = {
    "lr": 0.05,
    "eps": 0.1,
    "weight_decay": 0.1,
    "initial_accumulator_value": 0.3,
    "betas": (0.7, 0.9),
    "rho": 0.8,
    "alpha": 0.7,
    "lambd": 0.1,
    "momentum": 0.5,
    "dampening": 0.3,
    "lr_decay": 0.2,
    "momentum_decay": 0.1,
    "etas": (0.5, 1.2),
}


@pytest.fixture
def doubles():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # torch keeps its counters and rates in the default dtype
    yield
    torch.set_default_dtype(before)


def make(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def loss_of(net):
    return net(X.to(net[0].weight.dtype)).square().mean()


def run(net, optimizer, steps):
    for _ in range(steps):
        optimizer.step(loss_of(net))


def values(net):
    return [p.detach().clone() for p in net.parameters()]


def same(one, two):
    return all(torch.equal(p, q) for p, q in zip(values(one), values(two), strict=True))


class One(nn.Module):
    """A module with one parameter, which may have a history."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(torch.zeros_like(w))
        self._parameters["w"] = w


def trajectory(cls, w, steps, **options):
    module = One(w.clone())
    optimizer = differentiable(cls, module, **options)
    scale = torch.arange(1.0, w.numel() + 1, dtype=w.dtype)
    for k in range(steps):
        optimizer.step((scale * (module.w * (k + 1)).sin() + module.w**4).sum())
    return module.w


W = [0.3, -0.7, 1.1]


def test_the_classes_are_found():
    assert {"Adam", "NAdam", "RAdam", "SGD", "Rprop"} <= {cls.__name__ for cls in CLASSES}


@pytest.mark.parametrize(("cls", "options"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_values_are_the_plain_optimizers_bit_for_bit(cls, options, dtype):
    net, twin = make(dtype), make(dtype)
    optimizer = differentiable(cls, net, lr=0.01, **options)
    plain = cls(twin.parameters(), lr=0.01, foreach=False, **options)
    for _ in range(20):
        optimizer.step(loss_of(net))
        plain.zero_grad()
        loss_of(twin).backward()
        plain.step()
    assert same(net, twin)
    assert not same(net, make(dtype))


@pytest.mark.parametrize(("cls", "options"), FORMS)
def test_gradients_through_three_steps_to_order_two(doubles, cls, options):
    w = torch.tensor(W, requires_grad=True)

    def moved(w):
        return trajectory(cls, w, 3, lr=0.05, **options)

    assert torch.autograd.gradcheck(moved, w)
    assert torch.autograd.gradgradcheck(moved, w)


def test_rprop_moves_by_signs_so_that_only_the_identity_is_left():
    w = torch.tensor(W, requires_grad=True)
    moved = trajectory(torch.optim.Rprop, w, 3, lr=0.05)
    jacobian = torch.stack([torch.autograd.grad(moved[i], w, retain_graph=True)[0] for i in range(3)])
    assert torch.equal(jacobian, torch.eye(3))


@pytest.mark.parametrize("cls", CLASSES)
def test_options_given_as_tensors_get_their_gradients(doubles, cls):
    names = [name for name in inspect.signature(cls).parameters if name in VALUES]
    flat = [v for name in names for v in (VALUES[name] if name in ("betas", "etas") else (VALUES[name],))]
    tensors = [torch.tensor(v, requires_grad=True) for v in flat]
    w = torch.tensor(W, requires_grad=True)

    def moved(w, *tensors):
        rest = iter(tensors)
        options = {
            name: (next(rest), next(rest)) if name in ("betas", "etas") else next(rest) for name in names
        }
        return trajectory(cls, w, 7, **options)

    assert "lr" in names
    assert torch.autograd.gradcheck(moved, (w, *tensors))
    assert torch.autograd.gradgradcheck(moved, (w, *tensors))
    gradients = torch.autograd.grad(moved(w, *tensors).sum(), tensors)
    still = {"alpha"} if cls is torch.optim.ASGD else set()  # its decay of lr is second order in lambd
    assert all(g != 0 for g, name in zip(gradients, names, strict=False) if name not in still)
    plain = iter(flat)
    numbers = {n: (next(plain), next(plain)) if n in ("betas", "etas") else next(plain) for n in names}
    torch.testing.assert_close(moved(w, *tensors), trajectory(cls, w, 7, **numbers))


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (cls, name)
        for cls in CLASSES
        for name in ("lr", "weight_decay", "momentum")
        if takes(cls, name)
        and (cls, name) != (torch.optim.Rprop, "lr")  # it clamps its first step size from below
    ],
)
def test_an_option_may_be_zero_and_is_not_left_out(doubles, cls, name):
    w, option = torch.tensor(W, requires_grad=True), torch.tensor(0.0, requires_grad=True)
    options = {"lr": 0.05, name: option}
    assert torch.autograd.gradcheck(lambda o: trajectory(cls, w, 3, **{**options, name: o}), (option,))
    (gradient,) = torch.autograd.grad(trajectory(cls, w, 3, **options).sum(), option)
    assert gradient != 0


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("cls", CLASSES)
def test_a_tensor_of_another_dtype_and_shape_will_do(cls, shape):
    w, lr = torch.tensor(W, dtype=torch.float64), torch.full(shape, 0.05, requires_grad=True)
    moved = trajectory(cls, w.requires_grad_(), 3, lr=lr)
    assert moved.dtype == torch.float64
    assert torch.autograd.grad(moved.sum(), lr)[0].shape == shape
    torch.testing.assert_close(moved, trajectory(cls, w, 3, lr=0.05), rtol=1e-6, atol=1e-6)


def test_making_an_optimizer_leaves_the_graph_behind_a_rate_alone():
    log = torch.tensor(-3.0, requires_grad=True)
    lr = log.exp()
    moved = trajectory(torch.optim.Adam, torch.tensor(W, requires_grad=True), 2, lr=lr)
    (gradient,) = torch.autograd.grad(moved.sum(), log)
    assert gradient != 0


@pytest.mark.parametrize("cls", SMOOTH)
def test_where_a_gradient_is_zero_the_derivative_is_the_limit(doubles, cls):
    def slope(at):
        w = torch.full((1,), at, requires_grad=True)
        module = One(w.clone())
        optimizer = differentiable(cls, module, lr=0.05, **({"eps": 0.1} if takes(cls, "eps") else {}))
        for _ in range(3):
            optimizer.step((module.w**2).sum() / 2)
        (first,) = torch.autograd.grad(module.w, w, create_graph=True)
        # SGD's slope is a constant: then there is nothing to differentiate
        second = torch.autograd.grad(first, w)[0] if first.requires_grad else torch.zeros(1)
        return first.detach(), second

    (at_zero, curvature), (left, _), (right, _) = slope(0.0), slope(-1e-7), slope(1e-7)
    torch.testing.assert_close(at_zero, left, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(at_zero, right, rtol=1e-5, atol=1e-5)
    assert curvature.isfinite().all()


def test_torchs_own_differentiable_adam_gives_nan_there():
    w = torch.zeros(1, requires_grad=True)
    p = w.clone()
    p.grad = w * 1
    torch.optim.Adam([p], differentiable=True).step()
    assert torch.autograd.grad(p, w)[0].isnan()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
    ],
)
def test_sgd_equals_metasgd_in_values_and_gradients(options):
    results = []
    for make_optimizer in (
        lambda net, lr: differentiable(torch.optim.SGD, net, lr=lr, **options),
        lambda net, lr: MetaSGD(net, lr, **options),
    ):
        net, lr = make(torch.float64), torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        first = list(net.parameters())
        run(net, make_optimizer(net, lr), 4)
        loss = loss_of(net)
        results.append([loss.detach(), *torch.autograd.grad(loss, [lr, *first])])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.Adamax, torch.optim.SGD])
def test_complex_parameters(cls):
    start = torch.tensor([0.3 + 1j, -0.7 + 0.2j], dtype=torch.complex128)
    one, two = One(start.clone().requires_grad_()), nn.Parameter(start.clone())
    first = one.w
    optimizer, plain = differentiable(cls, one, lr=0.1), cls([two], lr=0.1, foreach=False)
    for _ in range(3):
        optimizer.step((one.w.abs() ** 4).sum())
        plain.zero_grad()
        (two.abs() ** 4).sum().backward()
        plain.step()
    assert torch.equal(one.w.detach(), two.detach())
    assert torch.autograd.grad(one.w.abs().sum(), first)[0].isfinite().all()


@pytest.mark.parametrize("cls", CLASSES)
def test_frozen_tied_and_unused_parameters(cls):
    net = make()
    net[0].weight.requires_grad_(False)
    frozen = net[0].weight
    net.extra = nn.Linear(3, 3, bias=False)
    net[0].also = net[0].bias
    optimizer = differentiable(cls, net, lr=0.01)

    def loss():
        return net[2](net[1](net[0](X))).square().mean()

    optimizer.step(loss() + net.extra.weight.square().sum())
    extra, state = net.extra.weight, optimizer.get_states()[0]
    optimizer.step(loss())
    assert net[0].weight is frozen
    assert net[0].also is net[0].bias
    assert net[0].bias.grad_fn is not None
    assert net.extra.weight is extra
    now = optimizer.get_states()[0]
    assert now["extra.weight"] is state["extra.weight"]
    assert now["0.weight"] == {}
    assert now["0.bias"] is not state["0.bias"]


def test_a_step_is_recorded_under_no_grad_and_writes_nothing():
    net = make()
    first, before, loss = list(net.parameters()), values(net), loss_of(net)
    with torch.no_grad():
        optimizer = differentiable(torch.optim.Adam, net, lr=0.1)
        optimizer.step(loss)
    state = optimizer.get_states()[0]["0.weight"]
    held = {key: value.detach().clone() for key, value in state.items()}
    run(net, optimizer, 1)
    assert all(torch.equal(state[key], held[key]) for key in held)
    assert all(torch.equal(p, old) for p, old in zip(first, before, strict=True))
    assert all(p.grad is None for p in first)
    net[0].weight.retain_grad()  # reading .grad of a tensor with a history warns without
    assert net[0].weight.grad is None
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(loss_of(net), first))


def test_two_modules_share_a_step():
    one, two, twin = make(), make(), make()
    optimizer = differentiable(torch.optim.NAdam, one)
    optimizer.add_param_group(two)
    for _ in range(3):
        optimizer.step(loss_of(one) + loss_of(two))
    run(twin, differentiable(torch.optim.NAdam, twin), 3)
    assert same(one, twin)
    assert same(two, twin)
    optimizer.step(loss_of(two))
    assert same(one, twin)
    assert len(optimizer.get_states()) == 2


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("way", ["stop_gradient", "recover"])
def test_the_graph_stays_flat_over_300_cut_steps(cls, way):
    net, lr = make(), torch.tensor(0.01, requires_grad=True)
    optimizer = differentiable(cls, net, lr=lr)
    start = extract_state_dict(net), extract_state_dict(optimizer)
    sizes = []
    for step in range(300):
        optimizer.step(loss_of(net))
        if step in (10, 299):
            held = [t for entry in optimizer.get_states()[0].values() for t in entry.values()]
            sizes.append(count_nodes(loss_of(net), *held))
        if way == "stop_gradient":
            stop_gradient(net)
            stop_gradient(optimizer)
        else:
            recover_state_dict(net, start[0])
            recover_state_dict(optimizer, start[1])
    assert sizes[0] == sizes[1]
    assert all(p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("cls", CLASSES)
def test_a_recovered_optimizer_repeats_itself(cls):
    net = make()
    optimizer = differentiable(cls, net)
    run(net, optimizer, 2)
    snapshot = extract_state_dict(net), extract_state_dict(optimizer, by="copy")
    run(net, optimizer, 2)
    want = values(net)
    recover_state_dict(net, snapshot[0])
    recover_state_dict(optimizer, snapshot[1])
    run(net, optimizer, 2)
    assert all(torch.equal(p, q) for p, q in zip(values(net), want, strict=True))


@pytest.mark.parametrize("half", [0, 3])
@pytest.mark.parametrize("cls", CLASSES)
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(cls, half):
    unbroken, begun, fresh = make(), make(), make()
    run(unbroken, differentiable(cls, unbroken), half + 3)
    optimizer = differentiable(cls, begun)
    run(begun, optimizer, half)
    file = io.BytesIO()
    torch.save((begun.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    net_state, state = torch.load(file, weights_only=True)
    fresh.load_state_dict(net_state)
    optimizer = differentiable(cls, fresh)
    optimizer.load_state_dict(state)
    run(fresh, optimizer, 3)
    assert same(unbroken, fresh)


@pytest.mark.parametrize(
    "again",
    [
        copy.deepcopy,
        lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
        lambda optimizer: module_clone(optimizer, by="reference"),
        lambda optimizer: module_clone(optimizer, by="copy"),
        lambda optimizer: module_clone(optimizer, by="deepcopy"),
    ],
)
@pytest.mark.parametrize("cls", CLASSES)
def test_copies_go_on_alike_and_apart(cls, again):
    net = make()
    optimizer = differentiable(cls, net, lr=torch.tensor(0.01, requires_grad=True))
    run(net, optimizer, 2)
    other = again(optimizer)
    assert isinstance(other, DifferentiableOptimizer)
    (other_net,) = other.modules
    before = values(net)
    run(other_net, other, 2)
    assert all(torch.equal(p, q) for p, q in zip(values(net), before, strict=True))
    run(net, optimizer, 2)
    assert same(net, other_net)


class Warmed(torch.optim.Adam):
    """A subclass that hands its options on."""

    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)


class Unrecorded(torch.optim.Adam):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad)


class Leaky(torch.optim.SGD):
    def __init__(self, params, lr=0.1, ignored=0.0, *, differentiable=False):
        super().__init__(params, lr, differentiable=differentiable)


def test_a_subclass_works():
    net, twin = make(), make()
    optimizer = differentiable(Warmed, net, lr=0.1)
    assert isinstance(optimizer, MetaOptimizer)
    run(net, optimizer, 2)
    run(twin, differentiable(torch.optim.Adam, twin, lr=0.1), 2)
    assert same(net, twin)


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Optimizer])
def test_a_class_that_is_not_differentiable_is_refused(cls):
    with pytest.raises(TypeError, match=f"take `differentiable=`, got {cls.__name__}; .* Adam,.* SGD$"):
        differentiable(cls, make())


def test_bad_input_is_refused():
    net, adam = make(), torch.optim.Adam
    with pytest.raises(TypeError, match="`optimizer_class` must be a class, got an object of Adam"):
        differentiable(adam(net.parameters()), net)
    with pytest.raises(TypeError, match=r"must be a subclass of torch.optim.Optimizer, got Linear"):
        differentiable(nn.Linear, net)
    with pytest.raises(TypeError, match=r"`module` must be a torch.nn.Module, got list"):
        differentiable(adam, list(net.parameters()))
    with pytest.raises(ValueError, match="`module` must have parameters, got Tanh with none"):
        differentiable(adam, nn.Tanh())
    for option in ("differentiable", "foreach", "fused", "capturable"):
        with pytest.raises(TypeError, match=f"`{option}` must be left out"):
            differentiable(adam, net, **{option: True})
    with pytest.raises(TypeError, match="Adam: got an unexpected keyword argument 'momentum'"):
        differentiable(adam, net, momentum=0.9)
    with pytest.raises(TypeError, match="Adam: multiple values for argument 'params'"):
        differentiable(adam, net, params=[])
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        differentiable(adam, net, lr=-1.0)
    with pytest.raises(ValueError, match=r"`betas` as a tensor must have one element, got shape \(2,\)"):
        differentiable(adam, net, betas=(torch.ones(2), 0.9))
    with pytest.raises(TypeError, match="must record its step, got Unrecorded"):
        differentiable(Unrecorded, net)
    with pytest.raises(ValueError, match=r"Leaky finds no gradient for \['ignored'\]"):
        differentiable(Leaky, net, ignored=torch.tensor(0.1, requires_grad=True))
    optimizer = differentiable(adam, net)
    stale = loss_of(net)
    optimizer.step(loss_of(net))
    with pytest.raises(ValueError, match="was it computed before the last step"):
        optimizer.step(stale)
    with pytest.raises(ValueError, match=r"`loss` must have one element, got shape \(6, 1\)"):
        optimizer.step(net(X))


def test_a_state_of_another_optimizer_is_refused():
    net, other = make(), make()
    optimizer, adagrad = differentiable(torch.optim.Adam, net), differentiable(torch.optim.Adagrad, other)
    run(other, adagrad, 1)
    with pytest.raises(ValueError, match="must be of an optimizer like this one; it lacks"):
        optimizer.load_state_dict(adagrad.state_dict())
    with pytest.raises(ValueError, match=r"`states` must have \['exp_avg', 'exp_avg_sq', 'step'\] for each"):
        recover_state_dict(optimizer, extract_state_dict(adagrad))
    with pytest.raises(ValueError, match="must have 1 groups, got 0"):
        optimizer.load_state_dict({"state": []})
    with pytest.raises(ValueError, match="`states` must be 1, one a group, got 0"):
        optimizer.set_states(())
    with pytest.raises(ValueError, match="`states` must have the parameters"):
        optimizer.set_states(({"w": {}},))
