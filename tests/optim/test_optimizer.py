import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from tests.rows import each_row
from torchopt_dist.optim import SGD, FuncOptimizer, MetaSGD, Optimizer, sgd
from torchopt_dist.transform.add_decayed_weights import add_decayed_weights
from torchopt_dist.transform.base import chain
from torchopt_dist.transform.scale import scale, scale_by_learning_rate
from torchopt_dist.transform.trace import trace


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def train(net, optimizer, steps, seed=1, scheduler=None):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(5, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def same(one, two):
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_it_is_a_torch_optimizer():
    assert isinstance(SGD([torch.ones(1, requires_grad=True)], 0.1), torch.optim.Optimizer)


@each_row("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
@each_row("maximize", [False, True])
def test_step_leaves_the_gradients_alone(options, maximize):
    net = make()
    optimizer = SGD(net.parameters(), 0.1, weight_decay=0.1, maximize=maximize, **options)
    for _ in range(3):
        train(net, optimizer, 1)
        held = [p.grad for p in net.parameters()]
        before = [grad.clone() for grad in held]
        optimizer.step()
        assert all(p.grad is grad for p, grad in zip(net.parameters(), held, strict=True))
        assert all(torch.equal(grad, old) for grad, old in zip(held, before, strict=True))


@each_row("dampening", [0.0, 0.3])
def test_a_parameter_without_gradient_stays_and_keeps_its_momentum(dampening):
    torch.manual_seed(0)
    grads = torch.randn(6, 2, 3)
    ours, twin = ([torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)] for _ in range(2))
    optimizers = [
        kind(params, 0.1, momentum=0.9, dampening=dampening, weight_decay=0.1, fused=False)
        for kind, params in ((SGD, ours), (torch.optim.SGD, twin))
    ]
    for step, pair in enumerate(grads):
        for params, optimizer in zip((ours, twin), optimizers, strict=True):
            params[0].grad = pair[0].clone()
            params[1].grad = pair[1].clone() if step in (1, 4) else None
            optimizer.step()
        assert torch.equal(ours[0], twin[0])
        assert torch.equal(ours[1], twin[1])


def test_groups_have_options_of_their_own_as_in_torch():
    ours, twin = make(), make()
    for net, kind in ((ours, SGD), (twin, torch.optim.SGD)):
        groups = [{"params": net[0].parameters(), "lr": 0.2, "momentum": 0.9}, {"params": [net[2].weight]}]
        optimizer = kind(groups, lr=0.05, weight_decay=0.1, fused=False)
        train(net, optimizer, 5)
        optimizer.add_param_group({"params": net[2].bias, "maximize": True})
        train(net, optimizer, 5)
        optimizer.param_groups[1]["momentum"] = 0.5
        train(net, optimizer, 5)
    assert same(ours, twin)


def test_lr_scheduler_is_obeyed_as_in_torch():
    ours, twin = make(), make()
    for net, kind in ((ours, SGD), (twin, torch.optim.SGD)):
        optimizer = kind(net.parameters(), lr=0.1, momentum=0.9, fused=False)
        train(net, optimizer, 10, scheduler=CosineAnnealingLR(optimizer, 10))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)
    assert same(ours, twin)


@each_row("lr", [0.1, lambda count: 0.1 * 0.9**count, torch.tensor(0.1)], ids=["float", "schedule", "tensor"])
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(lr):
    options = {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}
    unbroken, resumed = make(), make()
    train(unbroken, optimizer := SGD(unbroken.parameters(), lr, **options), 5)
    train(unbroken, optimizer, 5, seed=2)
    train(resumed, optimizer := SGD(resumed.parameters(), lr, **options), 5)
    saved = through_file({"net": resumed.state_dict(), "optimizer": optimizer.state_dict()})
    fresh = make()
    optimizer = SGD(fresh.parameters(), lr, **options)
    fresh.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    train(fresh, optimizer, 5, seed=2)
    assert same(unbroken, fresh)


def test_half_precision_does_not_lose_the_count_of_a_schedule():
    w = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    optimizer = SGD([w], lr=lambda count: 0.0 * count)
    w.grad = torch.ones_like(w)
    for _ in range(301):
        optimizer.step()
    fresh = SGD([w], lr=lambda count: 0.0 * count)
    fresh.load_state_dict(through_file(optimizer.state_dict()))
    fresh.step()
    assert fresh.param_groups[0]["lr_step"].item() == 302


def test_states_go_back_and_forth_with_torch():
    ours, twin = make(), make()
    optimizer = SGD(ours.parameters(), 0.1, momentum=0.9, fused=False)
    train(ours, optimizer, 3)
    twin.load_state_dict(ours.state_dict())
    twin_optimizer = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9, fused=False)
    state = through_file(optimizer.state_dict())
    for group in state["param_groups"]:
        group.update(foreach=None, differentiable=False)
    twin_optimizer.load_state_dict(state)
    train(twin, twin_optimizer, 3)
    again = make()
    again.load_state_dict(twin.state_dict())
    again_optimizer = SGD(again.parameters(), 0.5)
    again_optimizer.load_state_dict(through_file(twin_optimizer.state_dict()))
    train(ours, optimizer, 3)
    assert same(ours, twin)
    train(ours, optimizer, 3)
    train(again, again_optimizer, 3)
    assert same(ours, again)


@each_row("again", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@each_row("generic", [False, True])
def test_pickle_and_deepcopy(again, generic):
    net = make()
    optimizer = (
        Optimizer(net.parameters(), sgd(0.1, 0.9)) if generic else SGD(net.parameters(), 0.1, momentum=0.9)
    )
    train(net, optimizer, 3)
    other_net, other = again((net, optimizer))
    assert type(other) is type(optimizer)
    train(net, optimizer, 3)
    train(other_net, other, 3)
    assert same(net, other_net)
    assert other_net[0].weight is not net[0].weight


def test_any_transformation_makes_an_optimizer():
    ours, twin = make(), make()
    impl = chain(add_decayed_weights(0.1), trace(0.9), scale(2.0), scale_by_learning_rate(0.05))
    train(ours, Optimizer(ours.parameters(), impl), 5)
    train(twin, SGD(twin.parameters(), 0.1, 0.9, weight_decay=0.1), 5)
    for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_two_links_with_a_state_of_one_name_do_not_mix():
    impl = chain(trace(0.5), trace(0.25), scale(-1.0))
    w, v = torch.zeros(1, requires_grad=True), [torch.zeros(1)]
    optimizer, state = Optimizer([w], impl), impl.init([torch.zeros(1)])
    for _ in range(3):
        w.grad = torch.ones(1)
        optimizer.step()
        updates, state = impl.update([torch.ones(1)], state)
        v = [v[0] + updates[0]]
    assert torch.equal(w, v[0])
    assert sorted(optimizer.state[w]) == ["0/momentum_buffer", "1/momentum_buffer"]


def test_plain_sgd_keeps_no_state():
    net = make()
    optimizer = SGD(net.parameters(), 0.1)
    train(net, optimizer, 2)
    assert optimizer.state_dict()["state"] == {}


def test_closure_and_hooks():
    w = torch.ones(1, requires_grad=True)
    optimizer, called = SGD([w], 0.5), []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))

    def closure():
        optimizer.zero_grad()
        loss = (3 * w).sum()
        loss.backward()
        called.append("closure")
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 3.0
    assert called == ["pre", "closure", "post"]
    assert w.item() == 1 - 0.5 * 3


def test_named_parameters_and_complex_ones():
    w = nn.Parameter(torch.tensor([1 + 1j]))
    optimizer = SGD([("w", w)], 0.5, momentum=0.9)
    w.grad = torch.tensor([2j])
    optimizer.step()
    assert w.tolist() == [1 + 0j]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["w"]


@pytest.mark.filterwarnings("ignore")  # torch's own, from compiling a hooked step
def test_step_compiles():
    ours, twin = make(), make()
    optimizer, twin_optimizer = (SGD(net.parameters(), 0.1, momentum=0.9) for net in (ours, twin))
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(3):
        for net, one in ((ours, step), (twin, twin_optimizer.step)):
            net.zero_grad()
            net(torch.ones(2, 3)).square().mean().backward()
            one()
    for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)  # some processors round the compiled formula otherwise


def test_a_schedule_and_a_scheduler_of_torch_agree():
    ours, twin = make(), make()
    train(ours, SGD(ours.parameters(), lr=lambda count: 0.1 * 0.9**count), 5)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    train(twin, optimizer, 5, scheduler=LambdaLR(optimizer, lambda epoch: 0.9**epoch))
    for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_memory_holds_no_graph():
    w = torch.ones(2, requires_grad=True)
    optimizer = SGD([w], 0.1, momentum=0.9)
    loss = (w**3).sum()
    (w.grad,) = torch.autograd.grad(loss, w, create_graph=True)
    optimizer.step()
    assert w.is_leaf
    assert not optimizer.state[w]["momentum_buffer"].requires_grad


def test_bad_parameters_are_refused_as_in_torch():
    leaf = torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match="empty parameter list"):
        SGD([], 0.1)
    with pytest.raises(TypeError, match="should be an iterable of Tensors"):
        SGD(leaf, 0.1)
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        SGD([1.0], 0.1)
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        SGD([leaf * 2], 0.1)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        SGD([leaf, leaf], 0.1)
    with pytest.raises(ValueError, match="more than one parameter group"):
        SGD([{"params": [leaf]}, {"params": [leaf]}], 0.1)


def test_bad_options_are_refused_wherever_they_come_from():
    leaf, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match="`lr` must be at least 0, got -1"):
        SGD([{"params": [leaf], "lr": -1}], 0.1)
    optimizer = SGD([leaf], 0.1)
    with pytest.raises(ValueError, match="`momentum` must be at least 0, got -1"):
        optimizer.add_param_group({"params": [other], "momentum": -1})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError, match="param_group must be a dict"):
        optimizer.add_param_group([other])
    with pytest.raises(TypeError, match="`impl` must be a GradientTransformation, got float"):
        Optimizer([leaf], 0.1)


def test_a_state_of_another_size_is_refused():
    a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        SGD([a], 0.1).load_state_dict(SGD([a, b], 0.1).state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        SGD([a], 0.1).load_state_dict(SGD([{"params": a}, {"params": b}], 0.1).state_dict())


def test_the_transformation_is_made_once_for_the_same_options():
    made = []

    def counted(lr, momentum=0.0):
        made.append((lr, momentum))
        return sgd(lr, momentum)

    class Counted(Optimizer, transformation=counted):
        """SGD that counts."""

    params = [torch.ones(2, requires_grad=True) for _ in range(2)]
    optimizer = Counted([{"params": params[:1]}, {"params": params[1:], "lr": 0.25}], lr=0.5)
    del made[:]  # the options were tried

    def step():
        for p in params:
            p.grad = torch.ones(2)
        optimizer.step()

    step(), step()
    assert made == [(0.5, 0.0), (0.25, 0.0)]
    optimizer.param_groups[1]["lr"] = 0.125
    step(), step()
    assert made[2:] == [(0.125, 0.0)]
    optimizer.param_groups[0]["momentum"] = True  # equal to 1, and not the same
    optimizer.param_groups[0]["momentum"] = 1
    step()
    learned = torch.tensor(0.5)
    optimizer.param_groups[0]["lr"] = learned
    step(), step()
    learned.mul_(0)
    before = params[0].clone()
    step()
    assert made[3:] == [(0.5, 1), (learned, 1)]
    assert torch.equal(params[0], before)
    assert params[1].tolist() == [1 - 2 * 0.25 - 6 * 0.125] * 2


@each_row("face", ["class", "groups", "generic", "meta", "functional"])
def test_deepcopy_where_a_rate_has_a_history(face):
    """The copies' rates are leaves that all of a copy shares."""
    rate = torch.tensor(0.25, requires_grad=True) * 2
    net = make()
    makers = {
        "class": lambda: SGD(net.parameters(), rate),
        "groups": lambda: SGD([{"params": [p], "lr": rate} for p in net.parameters()], 0.1),
        "generic": lambda: Optimizer(net.parameters(), chain(scale(rate), scale(-1.0))),
        "meta": lambda: MetaSGD(net, rate),
        "functional": lambda: FuncOptimizer(sgd(rate)),
    }
    other_net, other = copy.deepcopy((net, makers[face]()))
    x = torch.ones(2, 3)
    want = [p.detach() - 0.5 * g for p, g in zip(net.parameters(), grads_of(net, x), strict=True)]
    if face == "functional":
        params = other.step(other_net(x).sum(), tuple(other_net.parameters()))
    elif face == "meta":
        other.step(other_net(x).sum())
        params = other_net.parameters()
    else:
        other_net(x).sum().backward()
        other.step()
        params = other_net.parameters()
    torch.testing.assert_close([p.detach() for p in params], want)
    if face == "groups":
        rates = {id(group["lr"]) for group in other.param_groups}
        assert len(rates) == 1
        assert other.param_groups[0]["lr"].is_leaf


def grads_of(net, x):
    return torch.autograd.grad(net(x).sum(), tuple(net.parameters()))
