"""A snapshot of parameters of other shapes is refused, and the module stays as it was."""

import pytest
import torch
from torch import nn

from tests.rows import each_row
from torchopt_dist.nn import extract_state_dict, recover_state_dict


@each_row(
    ("net", "other", "message"),
    [
        (nn.Linear(1, 1), nn.Linear(2, 2), r"'weight' must have \(1, 1\), got \(2, 2\)"),
        (nn.Linear(1, 1), nn.Linear(1, 1, bias=False), r"'bias' must have \(1,\), got None"),
        (nn.Linear(1, 1, bias=False), nn.Linear(1, 1), r"'bias' must have None, got \(1,\)"),
        (
            nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)),
            nn.Sequential(nn.Linear(1, 1), nn.Linear(2, 1)),
            r"'weight' must have \(1, 1\), got \(1, 2\)",
        ),
    ],
)
def test_other_shapes_are_refused(net, other, message):
    before = dict(net.named_parameters())
    with pytest.raises(
        ValueError, match=r"`state.params` must have the shapes that the module has: " + message
    ):
        recover_state_dict(net, extract_state_dict(other))
    after = dict(net.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_other_buffers_are_refused_before_the_parameters_are_put_back():
    net, other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    other.register_buffer("more", torch.ones(1))
    weight = net.weight
    with pytest.raises(ValueError, match=r"`state.buffers` must have the names"):
        recover_state_dict(net, extract_state_dict(other))
    assert net.weight is weight


def test_a_buffer_that_has_grown_goes_back():
    net = nn.Linear(1, 1)
    net.register_buffer("seen", torch.zeros(1))
    snapshot = extract_state_dict(net)
    net.seen = torch.zeros(4)
    recover_state_dict(net, snapshot)
    assert net.seen.shape == (1,)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_goes_back():
    net = nn.LazyLinear(2)
    snapshot = extract_state_dict(net)
    recover_state_dict(net, snapshot)
    net(torch.ones(1, 3))
    recover_state_dict(net, snapshot)
    assert net.weight.shape == (2, 3)
