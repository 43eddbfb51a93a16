import copy
import io
import pickle

import pytest
import torch

from tests.optim.graph import count_nodes
from tests.rows import each_row
from torchopt_dist.nn import module_clone, stop_gradient
from torchopt_dist.optim import FuncOptimizer, sgd


def loss_of(params):
    return params["w"].pow(2).sum() + params["b"].pow(3).sum()


def start(requires_grad=True):
    return {name: torch.full((2,), 0.5, requires_grad=requires_grad) for name in ("w", "b")}


def run(optimizer, params, steps):
    for _ in range(steps):
        params = optimizer.step(loss_of(params), params)
    return params


def test_steps_are_connected_to_the_first_parameters():
    params = start()
    moved = run(FuncOptimizer(sgd(0.25)), params, 2)
    (grad,) = torch.autograd.grad(moved["w"].sum(), params["w"])
    torch.testing.assert_close(grad, torch.full((2,), 0.25))  # (1 - 2 * .25)^2
    assert params["w"].tolist() == [0.5, 0.5]


@each_row("by_step", [False, True])
def test_in_place_overwrites_and_records_nothing(by_step):
    params, free = start(), start()
    optimizer = FuncOptimizer(sgd(0.25, momentum=0.9), inplace=not by_step)
    for _ in range(3):
        moved = optimizer.step(loss_of(params), params, inplace=True if by_step else None)
        assert moved["w"] is params["w"]
    loss = loss_of(params)
    optimizer.step(loss, params, inplace=True if by_step else None)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    want = run(FuncOptimizer(sgd(0.25, momentum=0.9)), free, 4)
    assert params["w"].is_leaf
    assert params["w"].requires_grad
    assert torch.equal(params["w"], want["w"])
    assert not optimizer.get_states()[0][1].momentum_buffer["w"].requires_grad


def test_frozen_and_unused_parameters_stay():
    params = {**start(), "unused": torch.ones(1, requires_grad=True)}
    params["b"].requires_grad_(False)
    moved = FuncOptimizer(sgd(0.25, momentum=0.9)).step(loss_of(params), params)
    assert moved["b"] is params["b"]
    assert moved["unused"] is params["unused"]
    assert not torch.equal(moved["w"], params["w"])


def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit():
    impl = sgd(0.1, momentum=0.9, dampening=0.3)
    unbroken = run(FuncOptimizer(impl), start(), 6)
    first = FuncOptimizer(impl)
    half = run(first, start(), 3)
    file = io.BytesIO()
    torch.save((first.state_dict(), half), file)
    file.seek(0)
    state, params = torch.load(file, weights_only=True)
    second = FuncOptimizer(impl)
    second.load_state_dict(state)
    assert second.state_dict() == state
    resumed = run(second, params, 3)
    third = FuncOptimizer(impl)
    run(third, start(), 1)
    third.load_state_dict(state)  # into one that has made a step
    for again in (resumed, run(third, params, 3)):
        assert all(torch.equal(unbroken[name], again[name]) for name in unbroken)


@each_row(
    "again", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o)), lambda o: module_clone(o, by="copy")]
)
def test_copies_go_on_alike_and_apart(again):
    optimizer = FuncOptimizer(sgd(0.1, momentum=0.9), inplace=False)
    params = run(optimizer, start(), 2)
    other = again(optimizer)
    one, two = run(optimizer, params, 2), run(other, params, 2)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_graph_stays_flat_over_a_thousand_detached_steps():
    optimizer, params, sizes = FuncOptimizer(sgd(0.01, momentum=0.9)), start(), []
    for step in range(1000):
        params = optimizer.step(loss_of(params), params)
        if step in (10, 999):
            moment = optimizer.get_states()[0][1].momentum_buffer["w"]
            sizes.append(count_nodes(params["w"], moment))
        stop_gradient(params)
        stop_gradient(optimizer)
    assert sizes[0] == sizes[1]
    assert params["w"].requires_grad


def test_bad_input_is_refused():
    params, optimizer = start(), FuncOptimizer(sgd(0.1, momentum=0.9))
    with pytest.raises(TypeError, match="`impl` must be a GradientTransformation, got float"):
        FuncOptimizer(0.1)
    with pytest.raises(TypeError, match="`loss` must be a tensor, got float"):
        optimizer.step(1.0, params)
    with pytest.raises(ValueError, match=r"`loss` must have one element, got shape \(2,\)"):
        optimizer.step(params["w"] * 2, params)
    with pytest.raises(ValueError, match="`params` must have a tensor in it"):
        optimizer.step(loss_of(params), {})
    with pytest.raises(ValueError, match="it depends on none of these"):
        optimizer.step(loss_of(start()), params)
    with torch.no_grad():
        constant = loss_of(params)
    with pytest.raises(ValueError, match="it depends on none of these"):
        optimizer.step(constant, params)
    optimizer.step(loss_of(params), params)
    with pytest.raises(ValueError, match="must have the structure of"):
        optimizer.step(loss_of(params), tuple(params.values()))


def test_a_state_of_another_precision_is_taken_over():
    optimizer = FuncOptimizer(sgd(0.1, momentum=0.9))
    run(optimizer, start(), 1)
    state = {name: tensor.double() for name, tensor in optimizer.state_dict()["state"].items()}
    optimizer.load_state_dict({"state": state})
    assert optimizer.get_states()[0][1].momentum_buffer["w"].dtype == torch.float32


def test_a_state_of_another_optimizer_is_refused():
    optimizer = FuncOptimizer(sgd(0.1, momentum=0.9))
    run(optimizer, start(), 1)
    plain = FuncOptimizer(sgd(0.1))
    run(plain, start(), 1)
    with pytest.raises(ValueError, match=r"it lacks \['1/momentum_buffer/b', '1/momentum_buffer/w'\]"):
        optimizer.load_state_dict(plain.state_dict())
    state = optimizer.state_dict()["state"]
    bad = {"state": {**state, "1/momentum_buffer/w": torch.ones(3)}}
    with pytest.raises(ValueError, match=r"shape \(2,\) at '1/momentum_buffer/w', got \(3,\)"):
        optimizer.load_state_dict(bad)
