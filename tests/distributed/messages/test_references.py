"""An RRef, or ``put`` of what requires grad → in a task its value, connected to the call: one process's gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import torchopt_dist as todist
from torchopt_dist.distributed.serialization.pickling import pack, unpack

kept = {}  # on a worker, from one call to the next


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def tasks(number=4):
    return torch.randn(number, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def adapted_loss(net, x):
    optimizer = todist.MetaSGD(net, lr=0.3)  # exchanges the parameters of the module that it is given
    optimizer.step((net(x) ** 2).mean())
    return (net(x) ** 2).mean()


def loss_of(reference, x):
    return adapted_loss(reference.to_here(), x)


def loss_of_local_value(reference, x):
    return adapted_loss(todist.module_clone(reference.local_value(), by="reference"), x)


def loss_by_another_worker(reference, x):
    return todist.remote_call(loss_of, (todist.get_rank() + 1) % 2, reference, x)


def expected(order=1):
    """The loss, and its gradient or that of the gradient's squares, in this process."""
    net = network()
    params = list(net.parameters())
    loss = torch.stack([adapted_loss(todist.module_clone(net), x) for x in tasks()]).mean()
    return loss, gradient(loss, params, order)


def gradient(loss, params, order):
    if order == 1:
        return torch.autograd.grad(loss, params)
    grads = torch.autograd.grad(loss, params, create_graph=True)
    return torch.autograd.grad(sum((grad**2).sum() for grad in grads), params)


def same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def spread(function=loss_of, **options):
    return todist.parallelize(todist.tasks, todist.mean_reducer, **options)(function)


def of_all_kinds(refer):
    net, wanted = network(), expected()
    params = list(net.parameters())
    ways = [
        spread(),
        spread(loss_of_local_value),
        spread(loss_by_another_worker),
        spread(loss_of_local_value, isolate_own_share=False),
        lambda reference, x: spread(lambda x: loss_of(reference, x))(x),
        lambda reference, x: spread(lambda held, x: loss_of(held["net"][0], x))({"net": (reference,)}, x),
    ]
    for way in ways:
        loss = way(refer(todist.module_clone(net, by="copy")), tasks())
        same((loss, gradient(loss, params, 1)), wanted)
    reference = refer(net)
    loss = spread()(reference, tasks())
    same(gradient(loss, params, 2), expected(order=2)[1])
    loss = spread()(reference, tasks())
    loss.backward()
    same([param.grad for param in params], list(wanted[1]))
    with torch.no_grad():
        same(spread(lambda held, x: held.to_here()(x).mean())(reference, tasks()), net(tasks()).mean())
    return reference, params, wanted


def _own_rrefs():
    reference, params, wanted = of_all_kinds(rpc.RRef)
    for inside in (loss_of, loss_of_local_value):
        for param in params:
            param.grad = None
        with todist.autograd.context() as context_id:
            loss = spread(inside)(reference, tasks())
            todist.autograd.backward(context_id, loss)
        same([param.grad for param in params], list(wanted[1]))
    assert todist.remote_call(_about, 1, reference) == (False, 0, "worker0", True)
    with torch.no_grad():
        params[-1].fill_(7.0)
    assert todist.remote_call(_last_of_kept, 1) == 7.0, "after its call, a reference is the RRef"
    todist.remote_call(kept.clear, 1)


def _about(reference):
    kept["reference"] = reference
    reference.to_here()
    return (
        reference.is_owner(),
        reference.owner().id,
        reference.owner_name(),
        rpc.rpc_sync(reference.owner(), _refers_to_a_module, (reference,)),
    )


def _refers_to_a_module(reference):
    return isinstance(reference.local_value(), nn.Module)


def _last_of_kept():
    return float([*kept["reference"].to_here().parameters()][-1])


def _put():
    reference, _, _ = of_all_kinds(todist.put)
    assert todist.remote_call(lambda same: same.to_here()[0].in_features, 1, reference) == 2
    reference.close()
    with pytest.raises(todist.errors.ResidentError, match="after it had been closed"):
        reference.to_here()
    constant = todist.put(torch.arange(3.0))
    assert todist.remote_call(lambda: constant.to_here() + constant.local_value(), 1).tolist() == [0, 2, 4]


@pytest.mark.torch_rpc
def test_an_rref_of_the_caller_is_connected_to_the_call(world):
    world(2).on_zero(_own_rrefs)


def test_what_is_put_and_requires_grad_is_connected_to_the_call(world):
    world(2).on_zero(_put, transport="zmq")


def _own_network():
    kept["network"] = network()
    return rpc.RRef(kept["network"])


def _own_gradients():
    grads = [param.grad for param in kept["network"].parameters()]
    kept["network"].zero_grad()
    return grads


def _far_rrefs():
    far = todist.remote_call(_own_network, 1)
    loss, wanted = expected()
    for function in (loss_of, loss_of_local_value, loss_by_another_worker):
        found = spread(function)(far, tasks())
        assert todist.remote_call(_own_gradients, 1) == [None] * 4
        found.backward()
        same((found, todist.remote_call(_own_gradients, 1)), (loss, list(wanted)))
    with todist.autograd.context() as context_id:
        todist.autograd.backward(context_id, spread()(far, tasks()))
    same(todist.remote_call(_own_gradients, 1), list(wanted))

    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    scaled = spread(lambda held, x, scale: scale**2 * loss_of(held, x))(far, tasks(), scale)
    (slope,) = torch.autograd.grad(scaled, scale, create_graph=True)
    same(slope, 4 * loss)
    assert todist.remote_call(_own_gradients, 1) == [None] * 4, "they were not asked for"
    slope.backward()
    same((scale.grad, todist.remote_call(_own_gradients, 1)), (2 * loss, [4 * grad for grad in wanted]))

    with torch.no_grad():
        same(spread(lambda held, x: held.to_here()(x).mean())(far, tasks()), network()(tasks()).mean())
    with pytest.raises(
        ValueError, match=r"an RRef of worker1 refers to what requires grad.*leave out retries"
    ):
        todist.remote_sync_call(loss_of, args=(far, tasks(1)[0]), partitioner=0, hedge_after=100)
    todist.remote_call(kept.clear, 1)


@pytest.mark.torch_rpc
def test_an_rref_of_another_worker_gives_that_worker_s_tensors_their_gradient(world):
    world(2).on_zero(_far_rrefs)


def test_the_value_is_in_a_message_once_and_its_modules_are_new_each_time():
    net = network()
    reference = todist.typing.Reference(net)
    message = pack([reference, {"net": net}, lambda: reference], main_by_name=True)
    assert len(message.tensors) == 4
    arrived, others, inside = unpack(message.detached().received())
    assert inside() is arrived
    assert arrived.local_value() is others["net"]
    assert arrived.to_here() is not arrived.to_here()
    for one, other in zip(arrived.to_here().parameters(), arrived.to_here().parameters(), strict=True):
        assert one is other
