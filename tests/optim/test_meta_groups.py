"""Groups of a MetaOptimizer with options of their own, and a start from what a trained optimizer has saved."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.optim.table import CASES, ROWS
from tests.rows import each_row

D = torch.float64
X = torch.linspace(-1, 1, 10, dtype=D).reshape(5, 2)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(D)


def loss_of(net: nn.Module) -> Tensor:
    return (net(X) - X.sum(1, keepdim=True)).square().mean()


def rates() -> list[Tensor]:
    return [torch.tensor(rate, dtype=D, requires_grad=True) for rate in (0.1, 0.03)]


def test_groups_with_options_of_their_own_have_the_gradients_of_the_loop_by_hand():
    """Each group is a transformation of its own there."""
    net, lr = make(), rates()
    optimizer = todist.MetaAdam(net[0], lr=lr[0], eps=1e-3)
    optimizer.add_param_group(net[2], lr=lr[1], betas=(0.5, 0.9))
    first = list(net.parameters())
    for _ in range(3):
        optimizer.step(loss_of(net))
    found = torch.autograd.grad(loss_of(net), [*lr, *first])

    like, twin = rates(), make()
    impls = [todist.adam(lr=like[0], eps=1e-3), todist.adam(lr=like[1], eps=1e-3, betas=(0.5, 0.9))]
    names = [name for name, _ in twin.named_parameters()]
    params = start = list(twin.parameters())
    states = [impl.init(part) for impl, part in zip(impls, (params[:2], params[2:]), strict=True)]

    def loss(params):
        call = torch.func.functional_call(twin, dict(zip(names, params, strict=True)), (X,))
        return (call - X.sum(1, keepdim=True)).square().mean()

    for _ in range(3):
        grads = list(torch.autograd.grad(loss(params), params, create_graph=True))
        moved = []
        for place, part in enumerate((slice(0, 2), slice(2, 4))):
            updates, states[place] = impls[place].update(
                grads[part], states[place], params=params[part], inplace=False
            )
            moved += [p + u for p, u in zip(params[part], updates, strict=True)]
        params = moved
    expected = torch.autograd.grad(loss(params), [*like, *start])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["ours", "differentiable"])
def test_groups_go_on_in_copies_and_from_a_state_dict(kind):
    def begun():
        net = make()
        if kind == "ours":
            optimizer = todist.MetaAdam(net[0], lr=0.1)
        else:
            optimizer = todist.differentiable(torch.optim.Adam, net[0], lr=0.1)
        optimizer.add_param_group(net[2], lr=0.03, betas=(0.5, 0.9))
        return net, optimizer

    net, optimizer = begun()
    twin = make()
    groups = [
        {"params": twin[0].parameters()},
        {"params": twin[2].parameters(), "lr": 0.03, "betas": (0.5, 0.9)},
    ]
    theirs = torch.optim.Adam(groups, lr=0.1)

    def step(net, optimizer):
        optimizer.step(loss_of(net))

    for _ in range(3):
        step(net, optimizer)
        theirs.zero_grad()
        loss_of(twin).backward()
        theirs.step()
    torch.testing.assert_close(list(net.parameters()), list(twin.parameters()), rtol=1e-7, atol=1e-9)

    again, (other, restored) = copy.deepcopy((optimizer, net))[::-1], begun()
    other.load_state_dict({name: value.detach().clone() for name, value in net.state_dict().items()})
    restored.load_state_dict(optimizer.state_dict())
    for one in ((net, optimizer), again, (other, restored)):
        step(*one)
    for one in (again[0], other):
        torch.testing.assert_close(list(one.parameters()), list(net.parameters()), rtol=0, atol=1e-15)


@each_row(
    ("make_optimizer", "options", "kind", "text"),
    [
        (
            lambda net: todist.MetaSGD(net, lr=0.1),
            {"rate": 1},
            TypeError,
            "unexpected keyword argument 'rate'",
        ),
        (lambda net: todist.MetaSGD(net, lr=0.1), {"lr": -1.0}, ValueError, "`lr`"),
        (
            lambda net: todist.MetaOptimizer(net, todist.sgd(lr=0.1)),
            {"lr": 1.0},
            TypeError,
            "`lr` must not be set for a group, .* todist.transform.partition",
        ),
        (
            lambda net: todist.differentiable(torch.optim.SGD, net, lr=0.1),
            {"rate": 1.0},
            TypeError,
            "'rate'",
        ),
    ],
)
def test_bad_options_of_a_group(make_optimizer, options, kind, text):
    net = make()
    optimizer = make_optimizer(net[0])
    with pytest.raises(kind, match=text):
        optimizer.add_param_group(net[2], **options)
    assert optimizer.modules == [net[0]]
    assert len(optimizer.get_states()) == 1


TRAINED = [
    (name, setting, face)
    for name, setting in CASES
    for face in ("twin", "plain")
    if face == "plain"
    or (ROWS[name].twin.__module__.startswith("torch.") and "fused" not in ROWS[name].options[setting])
]


@each_row(("name", "setting", "face"), TRAINED)
def test_a_start_from_a_trained_optimizer_goes_on_as_it_would(name, setting, face):
    row = ROWS[name]
    net, options = make(), row.options[setting]
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
    trained = getattr(row, face)(groups, **options)

    def train():
        trained.zero_grad()
        loss_of(net).backward()
        trained.step()

    for _ in range(3):
        train()
    file = io.BytesIO()
    torch.save(trained.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(net)
    optimizer = row.meta(other[0], **options)
    optimizer.add_param_group(other[2])
    optimizer.load_state_dict(torch.load(file))
    whole = copy.deepcopy(net)
    adapted = row.meta(whole, **options)
    adapted.load_state_dict(copy.deepcopy(trained.state_dict()))
    for _ in range(3):
        train()
        optimizer.step(loss_of(other))
        adapted.step(loss_of(whole))
    for one in (other, whole):
        torch.testing.assert_close(list(one.parameters()), list(net.parameters()), rtol=1e-9, atol=1e-11)


def test_a_schedule_goes_on_where_the_trained_one_was():
    def schedule(step):
        return 0.1 * 0.5**step

    net = make()
    trained = todist.SGD(net.parameters(), lr=schedule)
    for _ in range(3):
        trained.zero_grad()
        loss_of(net).backward()
        trained.step()
    other = copy.deepcopy(net)
    optimizer = todist.MetaSGD(other, lr=schedule)
    optimizer.load_state_dict(trained.state_dict())
    grads = torch.autograd.grad(loss_of(net), list(net.parameters()))
    optimizer.step(loss_of(other))
    expected = [p - 0.1 * 0.5**3 * g for p, g in zip(net.parameters(), grads, strict=True)]
    torch.testing.assert_close(list(other.parameters()), expected)


def test_a_trained_optimizer_of_other_parameters_or_of_another_kind_is_refused():
    net = make()

    def trained(make_optimizer, module):
        optimizer = make_optimizer(module.parameters())
        module(torch.ones(1, module[0].in_features, dtype=D)).sum().backward()
        optimizer.step()
        return optimizer.state_dict()

    adam = todist.MetaAdam(net, lr=0.1)
    with pytest.raises(ValueError, match="of the modules' 4 parameters, got one of 2"):
        adam.load_state_dict(trained(torch.optim.Adam, net[:1]))
    wider = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)).to(D)
    with pytest.raises(ValueError, match=r"`state_dict` must have shape \(3, 2\) at '1/exp_avg/0.weight'"):
        adam.load_state_dict(trained(torch.optim.Adam, wider))
    with pytest.raises(
        ValueError, match=r"`state_dict` must have 'exp_avg' of each parameter.*'0.bias' it has"
    ):
        adam.load_state_dict(trained(torch.optim.Adagrad, net))
    with pytest.raises(ValueError, match=r"made by todist\.differentiable"):
        todist.differentiable(torch.optim.Adam, make(), lr=0.1).load_state_dict(
            trained(torch.optim.Adam, net)
        )
