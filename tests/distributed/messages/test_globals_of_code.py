"""Global variables that go with the code of a function are the worker's own: no gradient comes back from them."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import torchopt_dist as todist

model = nn.Linear(2, 1)
tables = {"scale": torch.full((2,), 3.0, requires_grad=True)}
large = torch.ones(1 << 18)
many = np.ones(1 << 18)
text = "x" * (3 << 20)


class Agent:
    def __init__(self):
        self.net = model


agent = Agent()


def by_name(x):
    return model(x).sum()


def second(function, module, x):
    return function(x) + 0 * module.bias.sum()


def told(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = call()
    return value, [str(warning.message) for warning in caught]


LOST = {
    "model": (lambda x: model(x).sum(), "model.weight, model.bias. "),
    "tree": (lambda x: (tables["scale"] * x).sum(), "tables['scale']. "),
    "object": (lambda x: agent.net(x).sum(), "a tensor of shape (1,) in a global variable"),
    "partial": (
        functools.partial(lambda scale, x: model(x).sum() * scale, 1.0),
        "model.weight, model.bias. ",
    ),
}


def scaled():
    class Scaled(nn.Linear):
        def forward(self, x):
            return (super().forward(x) * tables["scale"]).sum()

    return Scaled(2, 2)


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_no_gradient_comes_back_from_global_variables_and_the_first_call_says_so(world, transport):
    def body():
        ones, x = torch.ones(2), torch.ones(2, requires_grad=True)
        for worker in range(todist.get_world_size()):
            value, texts = told(lambda worker=worker: todist.remote_call(by_name, worker, ones))
            assert not value.requires_grad
            assert "`by_name` uses what is not among its arguments: model.weight, model.bias. " in texts[0]

            call = functools.partial(todist.remote_sync_call, partitioner=worker)
            for function, lost in LOST.values():
                value, texts = told(lambda f=function, call=call: call(f, args=(ones,))[0])
                assert not value.requires_grad
                torch.testing.assert_close(value, function(ones).detach())
                assert lost in texts[0]
                assert told(lambda f=function, call=call: call(f, args=(ones,)))[1] == []
                with pytest.raises(RuntimeError, match="is not among its arguments"):
                    call(function, args=(x,), strict=True)
                (value,) = call(function, args=(x,))
                assert value.requires_grad
                (grad,) = torch.autograd.grad(value, x, retain_graph=True)
                torch.testing.assert_close(grad, torch.autograd.grad(function(x), x)[0])
                value.backward()
                assert model.weight.grad is None
                assert tables["scale"].grad is None

            net = scaled()  # its class is sent as code, and so is what its methods use
            (value,), texts = told(lambda call=call, net=net: call(net, args=(ones,)))
            assert "tables['scale']. " in texts[0]
            value.backward()
            assert torch.equal(net.weight.grad, torch.full((2, 2), 3.0))
            assert tables["scale"].grad is None

    world(2).on_zero(body, transport=transport)


def test_what_a_function_has_besides_global_variables_is_connected_however_it_is_met(world):
    def body():
        def uses_both(module, x):
            return model(x).sum() + module(x).sum()

        x, net = torch.ones(2), nn.Linear(2, 1)
        calls = {
            "closure": (lambda x: net(x).sum(), (x,), net, 1),
            "default": (lambda x, net=net: net(x).sum(), (x,), net, 1),
            "partial": (functools.partial(lambda net, x: net(x).sum(), net), (x,), net, 1),
            "argument": (lambda net, x: net(x).sum(), (net, x), net, 1),
            "argument and global": (uses_both, (model, x), model, 2),
            "global before argument": (second, (lambda x: model(x).sum(), model, x), model, 1),
            "global before its part": (second, (lambda x: agent.net(x).sum(), agent.net, x), model, 1),
            "global in a list": (lambda nets, x: model(x).sum(), ([model], x), model, 1),
        }
        for name, (function, args, module, times) in calls.items():
            for options in ({}, {"fan_out": 1}):
                module.zero_grad()
                tasks = [todist.typing.Partition(rank, args, None) for rank in range(todist.get_world_size())]
                value = todist.remote_sync_call(
                    function,
                    partitioner=lambda tasks=tasks: tasks,
                    reducer=todist.sum_reducer,
                    strict=True,
                    **options,
                )
                value.backward()
                assert torch.equal(module.weight.grad, torch.full((1, 2), 3.0 * times)), name

        function = LOST["model"][0]
        for options in ({}, {"fan_out": 1}):
            spread = todist.parallelize(todist.tasks, todist.sum_reducer, **options)
            value, _ = told(lambda spread=spread: spread(function)(torch.ones(3, 2)))
            assert not value.requires_grad
            start = torch.ones(3, 2, requires_grad=True)
            spread(function)(start).backward()
            assert torch.equal(start.grad, model.weight.detach().expand(3, 2))

    world(3).on_zero(body)


def test_a_task_adapts_a_global_module_as_ever(world):
    def body():
        def adapted(x):
            inner = todist.inner_loop(lambda net: net(x).square().sum(), todist.sgd(lr=0.1), model, 2)
            return inner.params(x).sum()

        x = torch.ones(2)
        expected = adapted(x).detach()
        for mode in (torch.no_grad, torch.enable_grad):
            for worker in range(todist.get_world_size()):
                with mode():
                    value, _ = told(lambda worker=worker: todist.remote_call(adapted, worker, x))
                assert not value.requires_grad
                torch.testing.assert_close(value, expected)

    world(2).on_zero(body)


def test_global_variables_of_more_than_a_megabyte_are_warned_of_once_by_name(world):
    def body():
        def both(x):
            return x.sum() + large[0] + many[0] + len(str(model))

        def small(x, large):
            return x.sum() + large[0] + len(str(model))

        def of_both(x, other):
            return x.sum() + large[0]

        x = torch.ones(2, requires_grad=True)
        cases = [
            (both, (x,), "3.1 MB of global variables: `many` (2.1 MB), `large` (1.0 MB). This"),
            (lambda x: x.sum() + len(text), (x,), "3.1 MB of global variables: `text` (3.1 MB). This"),
        ]
        for function, args, expected in cases:
            call = functools.partial(todist.remote_call, function, 1, *args)
            _, (first,) = told(call)
            assert "is sent as code, since the workers do not find it by name" in first
            assert expected in first
            assert "`todist.put`" in first
            assert told(call)[1] == []
            assert told(functools.partial(todist.remote_call, function, 0, *args))[1] == []

        for function in (small, of_both):  # an argument is sent in any case
            assert told(lambda f=function: todist.remote_call(f, 1, x, large))[1] == []

    world(2).on_zero(body)
