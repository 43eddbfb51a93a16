"""Torch's own optimizers, made differentiable → their states, cut, taken back, saved and copied."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.optim.programs import (
    AGAIN,
    assert_a_resumed_run_equals_an_unbroken_one,
    assert_copies_go_on_alike_and_apart,
    assert_the_graph_stays_flat,
    make,
    run,
    values,
)
from tests.optim.torch_classes import CLASSES
from tests.rows import each_row
from torchopt_dist.nn import extract_state_dict, recover_state_dict
from torchopt_dist.optim.differentiable import differentiable


@each_row("cls", CLASSES)
@each_row("way", ["stop_gradient", "recover"])
def test_the_graph_stays_flat_over_cut_steps(cls, way):
    net, lr = make(), torch.tensor(0.01, requires_grad=True)

    def held(state):
        return [t for entry in state.values() for t in entry.values()]

    assert_the_graph_stays_flat(net, differentiable(cls, net, lr=lr), way, held, 30)


@each_row("cls", CLASSES)
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


@each_row("half", [0, 3])
@each_row("cls", CLASSES)
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(cls, half):
    assert_a_resumed_run_equals_an_unbroken_one(partial(differentiable, cls), half)


@each_row("again", AGAIN)
@each_row("cls", CLASSES)
def test_copies_go_on_alike_and_apart(cls, again):
    lr = torch.tensor(0.01, requires_grad=True)
    assert_copies_go_on_alike_and_apart(partial(differentiable, cls, lr=lr), again)


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
    with pytest.raises(ValueError, match="`states` must be 1, one for each group, got 0"):
        optimizer.set_states(())
    with pytest.raises(ValueError, match="`states` must have the parameters"):
        optimizer.set_states(({"w": {}},))
