"""A function that goes backward itself leaves gradients on its worker: its caller is told, unless they are of use."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import torchopt_dist as todist


def goes_backward(net, x):
    loss = net(x).square().mean()
    loss.backward()
    return loss.detach()


def goes_backward_and_returns_the_loss(net, x):
    loss = net(x).square().mean()
    loss.backward()
    return {"loss": loss}


def goes_backward_and_returns_a_number(net, x):
    return goes_backward(net, x).item()


def returns_its_gradients(net, x):
    goes_backward(net, x)
    return [(weight.grad * 0.5).numpy() for weight in net.parameters()]


def returns_its_gradients_as_one(net, x):
    goes_backward(net, x)
    return torch.cat([weight.grad.flatten() for weight in net.parameters()])


def trains_what_it_has_received(net, x):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        goes_backward(net, x)
        optimizer.step()
    return net(x).square().mean().item()


def attacks(net, x):
    x = x.clone().requires_grad_()
    goes_backward(net, x)
    return net(x + x.grad.sign()).square().mean()


def penalizes(net, x):
    net(x).square().mean().backward(create_graph=True)
    return sum(weight.grad.square().sum() for weight in net.parameters())


def trains_a_clone(net, x):
    goes_backward(todist.module_clone(net, by="deepcopy"), x)
    net.zero_grad(set_to_none=False)
    (slope, *_) = torch.autograd.grad(net(x).square().mean(), [*net.parameters()])
    return slope.norm().detach()


def scales_by_a_slope(w, x):
    (w * x.sum()).backward()
    return w.grad


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_gradients_that_a_function_leaves_on_the_worker_are_told_and_are_errors_if_strict(world):
    def body():
        net, x = nn.Linear(3, 2), torch.ones(4, 3)
        text = r"`goes_backward\w*` calls `backward\(\)` .*: args\[0\]\.weight, args\[0\]\.bias\. The.*return"
        for worker in range(todist.get_world_size()):
            on = {"partitioner": worker, "args": (net, x)}
            for function in (
                goes_backward,
                goes_backward_and_returns_the_loss,
                goes_backward_and_returns_a_number,
            ):
                with pytest.warns(UserWarning, match=text):
                    todist.remote_sync_call(function, **on)
                assert net.weight.grad is None
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    todist.remote_sync_call(function, **on)  # once
                    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
                        todist.remote_sync_call(function, **on)
                with pytest.raises(RuntimeError, match=text):
                    todist.remote_sync_call(function, strict=True, **on)
            for function in (
                returns_its_gradients,
                returns_its_gradients_as_one,
                trains_what_it_has_received,
                attacks,
                penalizes,
                trains_a_clone,
            ):
                todist.remote_sync_call(function, strict=True, **on)
            w = torch.tensor(2.0, requires_grad=True)
            todist.remote_sync_call(scales_by_a_slope, args=(w, x), partitioner=worker, strict=True)

    todist.auto_init_rpc()(body)()
    world(2).on_zero(body)


def trains_and_returns_the_loss(net, x):
    optimizer = torch.optim.SGD(todist.module_clone(net).parameters(), lr=0.1)
    net(x).square().mean().backward()
    optimizer.step()
    return net(x).square().mean()


def trains_a_deep_copy(net, x):
    return trains_and_returns_the_loss(todist.module_clone(net, by="deepcopy"), x)


def test_optimizers_of_torch_that_step_on_what_a_task_has_received_are_told():
    def body():
        net, x = nn.Linear(3, 2), torch.ones(2, 4, 3)
        text = r"`trains_and\w*` has changed .*: args\[0\]\.weight, args\[0\]\.bias\. But {}no gradient .*MetaSGD"
        all_tasks = todist.parallelize(todist.tasks, todist.mean_reducer)
        with pytest.warns(UserWarning, match=text.format("each task .* left, and ")):
            all_tasks(trains_and_returns_the_loss)(net, x)
        with pytest.warns(
            UserWarning, match=r"But each task on a worker begins with what the one before has left: "
        ):
            all_tasks(trains_what_it_has_received)(net, x)
        one = {"partitioner": 0, "args": (net, x[0]), "strict": True}
        with pytest.raises(RuntimeError, match=text.format("")):
            todist.remote_sync_call(trains_and_returns_the_loss, **one)
        all_tasks(trains_a_deep_copy)(net, x)

    todist.auto_init_rpc()(body)()


def test_a_share_that_is_not_isolated_leaves_gradients_at_the_caller():
    def body():
        net, x = nn.Linear(3, 2), torch.ones(4, 3)
        call = todist.parallelize(0, strict=True, isolate_own_share=False)(goes_backward)
        call(net, x)
        assert net.weight.grad.shape == (2, 3)

    todist.auto_init_rpc()(body)()
