"""`FuncOptimizer`: a state loaded before the first step, complex parameters, parameters of another shape."""

import copy
import pickle

import pytest
import torch

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist import transform
from torchopt_dist.nn import extract_state_dict, module_clone, recover_state_dict, stop_gradient


def fresh():
    return todist.FuncOptimizer(todist.sgd(1.0, momentum=0.9))


def step(optimizer):
    params = (torch.ones(2, requires_grad=True),)
    return optimizer.step(params[0].sum(), params)[0]


@pytest.fixture
def saved():
    """A momentum of 2 that hangs on `w`."""
    w = torch.ones(2, requires_grad=True)
    first = fresh()
    first.step((w**2).sum(), (w,))
    return w, first.state_dict()


LOADED = [-1.8, -1.8]  # 1 - (0.9 * 2 + 1)
NOT_LOADED = [0.0, 0.0]


def test_a_snapshot_taken_between_loading_and_the_first_step_is_of_what_was_loaded(saved):
    optimizer = fresh()
    optimizer.load_state_dict(saved[1])
    snapshot = extract_state_dict(optimizer)
    for _ in range(2):
        assert step(optimizer).tolist() == pytest.approx(LOADED)
        recover_state_dict(optimizer, snapshot)
    assert step(optimizer).tolist() == pytest.approx(LOADED)


def test_going_back_to_before_the_loading_forgets_what_was_loaded(saved):
    optimizer = fresh()
    snapshot = extract_state_dict(optimizer)
    optimizer.load_state_dict(saved[1])
    recover_state_dict(optimizer, snapshot)
    assert step(optimizer).tolist() == NOT_LOADED


def test_a_state_takes_the_place_of_what_was_loaded(saved):
    other = fresh()
    step(other)
    optimizer = fresh()
    optimizer.load_state_dict(saved[1])
    optimizer.set_states(other.get_states())
    assert step(optimizer).tolist() == pytest.approx([-0.9, -0.9])
    optimizer.set_states(())
    assert step(optimizer).tolist() == NOT_LOADED


def test_stop_gradient_cuts_what_was_loaded(saved):
    w, state = saved
    optimizer = fresh()
    optimizer.load_state_dict(state)
    stop_gradient(optimizer)
    moved = step(optimizer)
    assert moved.tolist() == pytest.approx(LOADED)
    assert torch.autograd.grad(moved.sum(), w, allow_unused=True) == (None,)


@pytest.mark.parametrize("clone", [lambda o: module_clone(o, by="deepcopy"), copy.deepcopy])
def test_a_deep_copy_copies_what_was_loaded(saved, clone):
    w, state = saved
    optimizer = fresh()
    optimizer.load_state_dict(state)
    other = clone(optimizer)
    with torch.no_grad():
        state["state"]["1/momentum_buffer/0"].zero_()
    moved = step(other)
    assert moved.tolist() == pytest.approx(LOADED)
    assert torch.autograd.grad(moved.sum(), w, allow_unused=True) == (None,)


def test_a_clone_hangs_on_what_was_loaded(saved):
    w, state = saved
    optimizer = fresh()
    optimizer.load_state_dict(state)
    (grad,) = torch.autograd.grad(step(module_clone(optimizer, by="copy")).sum(), w)
    assert grad.tolist() == pytest.approx([-1.8, -1.8])  # d/dw of -0.9 * 2 w


def test_what_was_loaded_goes_through_pickle(saved):
    stop_gradient(saved[1]["state"])
    optimizer = fresh()
    optimizer.load_state_dict(saved[1])
    assert step(pickle.loads(pickle.dumps(optimizer))).tolist() == pytest.approx(LOADED)
    snapshot = pickle.loads(pickle.dumps(extract_state_dict(optimizer, by="deepcopy")))
    other = fresh()
    recover_state_dict(other, snapshot)
    assert step(other).tolist() == pytest.approx(LOADED)


def test_what_was_loaded_of_another_optimizer_is_refused(saved):
    optimizer = fresh()
    optimizer.load_state_dict(saved[1])
    snapshot = extract_state_dict(optimizer)
    other = todist.FuncOptimizer(todist.adam())
    step(other)
    with pytest.raises(
        ValueError, match=r"`states` must have the places of the optimizer's state, \['1/exp_avg/0'"
    ):
        recover_state_dict(other, snapshot)


@each_row("impl", [todist.sgd(0.1), todist.adam(0.1), todist.adamw(0.1), todist.rmsprop(0.1)])
def test_complex_parameters_are_cut(impl):
    w = torch.ones(2, dtype=torch.complex128, requires_grad=True)
    optimizer = todist.FuncOptimizer(impl)
    params = optimizer.step((w.abs() ** 2).sum(), [w])
    moved, before = params[0], params[0].tolist()
    stop_gradient(params)
    assert params[0] is moved
    assert moved.is_leaf
    assert moved.requires_grad
    assert moved.tolist() == before
    stop_gradient(optimizer)
    (again,) = optimizer.step((moved.abs() ** 2).sum(), params)
    grads = torch.autograd.grad(again.abs().sum(), [moved, w], allow_unused=True)
    assert grads[0] is not None
    assert grads[1] is None


def test_a_complex_parameter_that_stays_is_itself():
    base = torch.ones(2, 2, dtype=torch.complex64)
    frozen, w = base[0], torch.ones(2, dtype=torch.complex64, requires_grad=True)
    assert todist.FuncOptimizer(todist.adam()).step((w.abs() ** 2).sum(), [w, frozen])[1] is frozen


@each_row(
    "impl",
    [
        todist.adagrad(),
        todist.adadelta(),
        todist.adan(),
        todist.adamax(),
        todist.radam(),
        transform.trace(0.9),
    ],
)
@each_row("inplace", [False, True])
def test_parameters_of_another_shape_than_the_state_are_refused(impl, inplace):
    optimizer = todist.FuncOptimizer(impl, inplace=inplace)
    one, three = torch.ones(1, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer.step(one.sum(), (one,))
    message = r"`state\.\w+` must have the shapes of `updates`: leaf 0 must have \(3,\), got \(1,\)"
    with pytest.raises(ValueError, match=message):
        optimizer.step(three.sum(), (three,))


def test_the_place_of_the_leaf_of_another_shape_is_named():
    impl = transform.trace(0.9)
    state = impl.init([torch.ones(2), torch.ones(2), torch.ones(2)])
    with pytest.raises(ValueError, match=r"leaf 2 must have \(1,\), got \(2,\)"):
        impl.update([None, torch.ones(2), torch.ones(1)], state)


@each_row("way", ["states", "state_dict", "recovered", "loaded", "cloned"])
def test_steps_in_place_do_not_overwrite_a_snapshot(way):
    w = torch.ones(2, requires_grad=True)
    optimizer = todist.FuncOptimizer(todist.sgd(0.1, momentum=0.5), inplace=True)

    def step(one=optimizer):
        one.step((w * 2).sum(), (w,))

    step()
    if way in ("states", "recovered"):
        snapshot = todist.extract_state_dict(optimizer)
        held = snapshot[0][-2].momentum_buffer[0]
    elif way == "cloned":
        held = todist.extract_state_dict(todist.module_clone(optimizer))[0][-2].momentum_buffer[0]
    else:
        snapshot = optimizer.state_dict()
        (held,) = snapshot["state"].values()
    assert held.tolist() == [2, 2]
    step()
    step()
    if way == "recovered":
        todist.recover_state_dict(optimizer, snapshot)
        step()
    elif way == "loaded":
        other = todist.FuncOptimizer(todist.sgd(0.1, momentum=0.5), inplace=True)
        other.load_state_dict(snapshot)
        step(other)
    assert held.tolist() == [2, 2]


def test_names_with_a_slash_have_keys_of_their_own():
    def params():
        leaves = [torch.ones(1, requires_grad=True) for _ in range(4)]
        return {"a/b": leaves[0], "a": {"b": leaves[1]}, "a~1b": leaves[2], "a~b": leaves[3]}

    def loss(tree):
        return tree["a/b"] + 2 * tree["a"]["b"] + 3 * tree["a~1b"] + 4 * tree["a~b"]

    optimizer, first = todist.FuncOptimizer(todist.sgd(0.1, momentum=0.5)), params()
    moved = optimizer.step(loss(first), first)
    other = todist.FuncOptimizer(todist.sgd(0.1, momentum=0.5))
    saved = optimizer.state_dict()
    assert len(saved["state"]) == 4
    other.load_state_dict(saved)
    for one in (optimizer, other):
        again = one.step(loss(moved), moved)
        got = [again["a/b"], again["a"]["b"], again["a~1b"], again["a~b"]]
        torch.testing.assert_close(torch.cat(got), 1 - 0.25 * torch.tensor([1.0, 2.0, 3.0, 4.0]))
