"""A function that uses a worker's own parameters gets no gradient for them: it is told so, once, by name."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.distributed.programs import mlp, mse

model = nn.Linear(2, 1)
tables = {"scale": torch.ones(2, requires_grad=True)}


def uses_a_global_model(x):
    return model(x).sum()


def uses_it_further_down(x):
    return [{"loss": uses_a_global_model(x) * 2}]


def uses_a_dictionary(x):
    return (tables["scale"] * x).sum()


class Holder:
    model = nn.Linear(3, 1)


def uses_what_it_cannot_be_named_by(x):
    return Holder.model.weight.sum() * x.sum()


def makes_its_own(x):
    own = nn.Linear(2, 1)
    start = (x.detach() * 1).requires_grad_()
    (slope,) = torch.autograd.grad(own(start).sum(), start, create_graph=True)
    return slope.sum() * x.sum() + own(x).sum()


def adapts_its_own(x):
    """The graph of a replay holds the network, and the buffers and the closures of its loop."""
    own, scale = nn.Sequential(nn.LazyLinear(2), nn.BatchNorm1d(2)), nn.Parameter(torch.ones(2))
    own.scale, batch = scale, torch.randn(4, 2)
    own(batch)
    adapted = todist.inner_loop(
        lambda net: (net(batch) * scale * x).square().sum(),
        todist.sgd(lr=0.1),
        own,
        2,
        meta=(x, scale),
        adjoint=todist.Replayed(),
    )
    return adapted.params(batch).square().sum()


@functools.cache
def kept():
    return nn.Linear(2, 1)


def uses_what_it_keeps(x):
    return kept()(x).sum()


def returns_what_it_makes(x):
    own = nn.Linear(2, 1)
    return own, own(x).sum()


def told(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def gives_none(x, adjoint):
    adapted = todist.inner_loop(
        lambda w: (w - x).square().sum(),
        todist.sgd(lr=0.1),
        torch.ones(2).requires_grad_(),
        2,
        meta=x,
        adjoint=adjoint,
    )
    return adapted.params.sum()


def gives_some(x, adjoint):
    return gives_none(x, adjoint) + x.sum()


LOSSES = {
    "model": (uses_a_global_model, "`uses_a_global_model` uses.*: model.weight, model.bias. The gradients"),
    "helper": (functools.partial(uses_it_further_down), ": model.weight, model.bias. "),
    "dictionary": (uses_a_dictionary, r": tables\['scale'\]\. "),
    "unnamed": (uses_what_it_cannot_be_named_by, r": a parameter of shape \(1, 3\) that the worker holds\. "),
}


def test_lost_gradients_are_told_once_by_name_and_are_errors_if_strict(world):
    def body():
        x, plain = torch.ones(2, requires_grad=True), torch.ones(2)
        for worker in range(todist.get_world_size()):
            for function, text in LOSSES.values():
                for argument in (x, plain):
                    call = functools.partial(
                        todist.remote_sync_call, function, args=(argument,), partitioner=worker
                    )
                    if argument is x:
                        with pytest.warns(UserWarning, match=text):
                            call()
                    with warnings.catch_warnings():
                        warnings.simplefilter("error")
                        call()  # once
                        with torch.no_grad():
                            call(strict=True)
                    with pytest.raises(RuntimeError, match=text):
                        call(strict=True)

            by_none = functools.partial(
                todist.remote_sync_call, gives_none, args=(x, todist.FirstOrder()), partitioner=worker
            )
            text = r"`gives_none` returns what has no path to a tensor of shape \(2,\): `FirstOrder\(\)`.* Recorded"
            with pytest.warns(UserWarning, match=text):
                by_none()
            with pytest.raises(RuntimeError, match=text):
                by_none(strict=True)
            for function, adjoint in ((gives_some, todist.FirstOrder()), (gives_none, todist.Recorded())):
                todist.remote_sync_call(function, args=(x, adjoint), partitioner=worker, strict=True)

    todist.auto_init_rpc()(body)()
    world(2).on_zero(body)


def query_loss_of(which, net, x):
    clone = todist.module_clone(net)
    inner = todist.MetaSGD(clone, lr=0.1)
    for _ in range(2):
        inner.step(clone(x).square().mean())
    found = {
        "model": net(x).square().mean(),
        "clone": clone(x).square().mean(),
        "parameters": [*clone.parameters()],
    }
    return {"both": [found["model"], found["clone"]], "values": found["model"].detach()}.get(
        which, found.get(which)
    )


def query_loss_of_the_model(net, x):
    return query_loss_of("model", net, x)


@pytest.mark.parametrize("vectorize", [False, True])
def test_steps_on_which_nothing_depends_are_told(world, vectorize):
    def body():
        net, x = nn.Linear(2, 1), torch.ones(4, 3, 2)
        spread = todist.parallelize(todist.tasks, todist.mean_reducer, vectorize=vectorize)
        text = "`query_loss_of_the_model` makes inner steps, and nothing that it returns depends on them"
        with pytest.warns(UserWarning, match=text):
            spread(query_loss_of_the_model)(net, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for which in ("clone", "parameters", "both", "values"):
                partial = functools.partial(query_loss_of, which)
                todist.parallelize(todist.tasks, vectorize=vectorize, strict=True)(partial)(net, x)

    world(2).on_zero(body)


def test_leaves_of_the_function_s_own_and_arguments_are_not_told():
    def body():
        x, net, (a, b) = torch.ones(2, requires_grad=True), mlp(), (torch.ones(4, 6), torch.ones(4, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for function in (makes_its_own, returns_what_it_makes, adapts_its_own):
                for strict in (False, True):
                    todist.remote_sync_call(function, args=(x,), partitioner=0, strict=strict)
            todist.remote_sync_call(mse, args=(net, a.double(), b.double()), partitioner=0, strict=True)
            todist.remote_sync_call(model, args=(x,), partitioner=0, strict=True)
            frozen = nn.Linear(2, 1).requires_grad_(False)
            todist.remote_sync_call(_thaws, args=(frozen, x), partitioner=0, strict=True)

    todist.auto_init_rpc()(body)()


def _thaws(module, x):
    return module.requires_grad_()(x).sum()


def test_what_a_function_makes_and_keeps_is_told_when_it_is_used_again():
    def body():
        x = torch.ones(2, requires_grad=True)
        calls = [functools.partial(todist.remote_sync_call, uses_what_it_keeps, args=(x,), partitioner=0)] * 3
        (first, second, third) = (told(call) for call in calls)
        assert first == third == []
        assert "`uses_what_it_keeps` uses what is not among its arguments: a parameter of shape" in second[0]

    todist.auto_init_rpc()(body)()
    assert nn.Parameter.__new__.__qualname__ == "Parameter.__new__"  # which was watched only meanwhile
