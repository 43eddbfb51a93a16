"""``reparametrize`` and ``swap_state``: other tensors for a while, back after errors, one thread at a time."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from torchopt_dist.nn import reparametrize, swap_state


def tied():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    net[2].weight = net[0].weight
    return net


def test_tensors_with_a_history_in_every_place_and_back():
    net = tied()
    before = {name: id(t) for name, t in net.state_dict(keep_vars=True).items()}
    source = torch.ones(2, 2, requires_grad=True)
    with reparametrize(net, {"2.weight": 2 * source, "1.running_mean": torch.full((2,), 9.0)}) as inside:
        assert inside is net
        assert net[0].weight is net[2].weight
        assert net[1].running_mean[0] == 9
        net.eval()(torch.ones(1, 2)).sum().backward()
    assert source.grad is not None
    assert {name: id(t) for name, t in net.state_dict(keep_vars=True).items()} == before


def test_the_old_ones_are_back_after_an_error():
    net = tied()
    weight = net[0].weight
    with pytest.raises(ZeroDivisionError), reparametrize(net, [("0.weight", torch.ones(2, 2))]):
        raise ZeroDivisionError
    assert net[0].weight is weight is net[2].weight


def test_swap_twice_is_nothing():
    net = tied()
    weight = net[0].weight
    old = swap_state(net, {"0.weight": torch.zeros(2, 2)})
    assert old["0.weight"] is weight
    assert not net[2].weight.any()
    swap_state(net, old)
    assert net[0].weight is weight is net[2].weight


@pytest.mark.parametrize("put", [swap_state, lambda *args: reparametrize(*args).__enter__()])
def test_bad_names_and_values_change_nothing(put):
    net = tied()
    weight = net[0].weight
    with pytest.raises(KeyError, match=r"no parameter or buffer of the name 7\.weight"):
        put(net, {"0.weight": torch.ones(2, 2), "7.weight": torch.ones(2)})
    with pytest.raises(TypeError, match=r"tensors as values, got int for '0\.weight'"):
        put(net, {"0.weight": 3})
    assert net[0].weight is weight
    swap_state(net, {"7.weight": torch.ones(2)}, True)
    with reparametrize(net, {"7.weight": torch.ones(2)}, allow_missing=True):
        assert net[0].weight is weight


def test_threads_take_turns():
    net, wrong = nn.Linear(1, 1, bias=False), []

    def work(value):
        for _ in range(200):
            with reparametrize(net, {"weight": torch.full((1, 1), value)}):
                if net(torch.ones(1)).item() != value:
                    wrong.append(value)

    weight = net.weight
    threads = [threading.Thread(target=work, args=(float(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert net.weight is weight
