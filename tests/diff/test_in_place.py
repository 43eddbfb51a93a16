"""Steps that leave no graph are made in place, and nobody can tell: what others hold of a loop's tensors stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.diff.adjoint_table import ALL
from tests.rows import each_row
from torchopt_dist.transform import add_decayed_weights

# Memory is looked at here, and no gradient, so most loops have no `meta`.
pytestmark = pytest.mark.filterwarnings("ignore:nothing gets a gradient from this loop")
D = torch.float64

OPTIMIZERS = {
    "sgd": lambda: todist.sgd(lr=0.1),
    "momentum": lambda: todist.sgd(lr=0.1, momentum=0.9),
    "weight decay": lambda: todist.sgd(lr=0.1, weight_decay=0.5),
    "adam": lambda: todist.adam(lr=0.1),
    "adamw": lambda: todist.adamw(lr=0.1, weight_decay=0.5),
    "rmsprop": lambda: todist.rmsprop(lr=0.1, weight_decay=0.5),
    "clipped": lambda: todist.chain(todist.transform.clip_grad_norm(0.5), todist.sgd(lr=0.1)),
    "decayed before": lambda: todist.chain(add_decayed_weights(0.5), todist.sgd(lr=0.1)),
    "schedule": lambda: todist.sgd(lr=lambda step: 0.1 * 0.5**step),
    "no whole step": lambda: todist.lion(lr=0.1, weight_decay=0.5),
}


@each_row("optimizer", ["sgd", "adam", "no whole step"])
@each_row("name", ALL)
def test_what_the_loss_keeps_of_its_parameters_stays(name, optimizer):
    kept: list[dict[str, Tensor]] = []

    def loss(params):
        w = params["w"]
        kept.append(
            {"tree": w, "alias": w.detach(), "view": w[:2], "array": w.detach().numpy(), "graph": w * w}
        )
        return (w - 1).square().sum(), w.detach()

    def run(adjoint):
        kept.clear()
        given = {"w": torch.arange(3, dtype=D).requires_grad_()}
        made = todist.inner_loop(
            loss, OPTIMIZERS[optimizer](), given, 4, has_aux=True, adjoint=adjoint, seed=0
        )
        return made.aux, [{key: torch.as_tensor(x).tolist() for key, x in one.items()} for one in kept[-4:]]

    aux, values = run(ALL[name])
    expected_aux, expected = run(todist.Recorded())
    torch.testing.assert_close(aux, expected_aux, rtol=1e-12, atol=1e-12)
    for found, like in zip(values, expected, strict=True):
        torch.testing.assert_close(found, like, rtol=1e-12, atol=1e-12)


@each_row("name", ["first order", "truncated", "SAMA"])
def test_what_the_loss_keeps_of_a_module_stays(name):
    net = nn.Linear(2, 1).to(D)
    kept: list[dict[str, Tensor]] = []

    def loss(net):
        kept.append(dict(net.named_parameters()))
        return net(torch.ones(2, dtype=D)).square().sum()

    def run(adjoint):
        kept.clear()
        todist.inner_loop(loss, todist.sgd(lr=0.1), net, 4, adjoint=adjoint)
        return [{key: p.tolist() for key, p in one.items()} for one in kept[-4:]]

    torch.testing.assert_close(run(ALL[name]), run(todist.Recorded()))


@each_row("name", ALL)
def test_what_the_caller_gives_and_gets_is_not_overwritten(name):
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).to(D)
    x = torch.randn(4, 2, dtype=D)
    optimizer = todist.adam(lr=0.1)

    def run(start: Any, state: Any) -> Any:
        return todist.inner_loop(
            lambda net: net(x).square().mean(), optimizer, start, 3, state=state, adjoint=ALL[name], seed=0
        )

    def values(made: Any, module: nn.Module) -> list[Tensor]:
        tensors = [*module.parameters(), *module.buffers(), *todist.pytree.flatten(made)[0]]
        return [tensor.detach().clone() for tensor in tensors]

    first_state = optimizer.init(dict(net.named_parameters()))
    before = values(first_state, net)
    first = run(net, first_state)
    torch.testing.assert_close(values(first_state, net), before, rtol=0, atol=0)
    after = values(first.state, first.params)
    for p in first.params.parameters():
        p.requires_grad_()
    run(first.params, first.state)
    torch.testing.assert_close(values(first.state, first.params), after, rtol=0, atol=0)


class _GivesItsBatch(torch.autograd.Function):
    """``w · x``, whose gradient is the batch itself and no copy of it."""

    @staticmethod
    def forward(ctx, w, x):
        ctx.x = x
        return (w * x).sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.x, None


@each_row("optimizer", OPTIMIZERS)
def test_gradients_that_are_somebody_elses_or_of_one_number_stay(optimizer):
    x = torch.randn(3, dtype=D)
    batch = x.clone()

    def trained(loss, adjoint):
        w = torch.ones(3, dtype=D, requires_grad=True)
        return todist.inner_loop(loss, OPTIMIZERS[optimizer](), w, 3, adjoint=adjoint).params

    for loss in (lambda w: _GivesItsBatch.apply(w, batch), lambda w: w.sum()):
        found = trained(loss, todist.Truncated(0))
        assert torch.equal(batch, x)
        torch.testing.assert_close(found, trained(loss, todist.Recorded()).detach())


@each_row("kind", ["tree", "module"])
@each_row("optimizer", OPTIMIZERS)
def test_first_order_of_numbers_alone_has_the_gradient_of_the_loop_by_hand(optimizer, kind):
    """From a first state without history; whatever the optimizer makes of the parameters themselves counts."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2)).to(D)
    net[2].weight = net[0].weight
    net[3].bias.requires_grad_(False)
    x = torch.randn(5, 3, dtype=D)
    scale = torch.tensor(2.0, dtype=D, requires_grad=True)
    named = dict(net.named_parameters())
    moved = [name for name, p in named.items() if p.requires_grad]

    def loss(params):
        call = (
            params
            if isinstance(params, nn.Module)
            else lambda x: torch.func.functional_call(net, params, (x,))
        )
        return call(x).square().mean()

    if kind == "tree":  # first parameters that are computed
        first = {name: p * scale if p.requires_grad else p for name, p in named.items()}
    else:
        first, scale = net, next(net.parameters())
    made = todist.inner_loop(loss, OPTIMIZERS[optimizer](), first, 3, adjoint=todist.FirstOrder()).params
    made = dict(made.named_parameters()) if kind == "module" else made

    impl = OPTIMIZERS[optimizer]()
    params = dict(first) if kind == "tree" else named
    state = impl.init([params[name] for name in moved])
    for _ in range(3):
        leaves = {name: params[name].detach().requires_grad_(name in moved) for name in params}
        grads = torch.autograd.grad(loss(leaves), [leaves[name] for name in moved])
        old = [params[name] for name in moved]
        updates, state = impl.update(list(grads), state, params=old, inplace=False)
        params = {**params, **{n: p + u for n, p, u in zip(moved, old, updates, strict=True)}}
    for name in moved:
        torch.testing.assert_close(made[name], params[name], rtol=1e-10, atol=1e-12)
    pairs = [sum((p[name] ** 3).sum() for name in moved) for p in (made, params)]
    found, expected = (torch.autograd.grad(one, scale, create_graph=True)[0] for one in pairs)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    if kind == "tree":
        again = [torch.autograd.grad(one, scale, retain_graph=True)[0] for one in (found, expected)]
        torch.testing.assert_close(*again, rtol=1e-9, atol=1e-11)


def test_steps_in_place_take_no_memory_of_their_own():
    """A parameter that nobody holds stays where it is from step to step."""
    places = []

    def loss(w):
        places.append(w.data_ptr())
        return w.square().sum()

    w = torch.ones(1000, requires_grad=True)
    todist.inner_loop(loss, todist.sgd(lr=0.1), w, 5, adjoint=todist.FirstOrder())
    assert len(set(places)) == 1
    assert places[0] != w.data_ptr()
