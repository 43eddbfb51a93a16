import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap

from tests.rows import each_row
from torchopt_dist.transform.trace import TraceState, trace


def run(impl, grads, state=None, **kwargs):
    state = impl.init(grads[0]) if state is None else state
    out = []
    for grad in grads:
        updates, state = impl.update(grad, state, **kwargs)
        out.append(updates)
    return out, state


def test_the_first_buffer_is_the_gradient_without_dampening():
    out, _ = run(trace(0.5, dampening=0.25), [[torch.tensor(8.0)]] * 2)
    assert [u[0].item() for u in out] == [8.0, 0.5 * 8 + 0.75 * 8]


def test_dampening_begins_at_the_second_gradient_of_each_leaf():
    late = [[torch.tensor(1.0), None], [torch.tensor(1.0), torch.tensor(8.0)]]
    state = trace(0.5, 0.25).init([torch.zeros(()), torch.zeros(())])
    out, _ = run(trace(0.5, dampening=0.25), late, state)
    assert out[1][1].item() == 8.0
    assert out[1][0].item() == 1.25


@each_row("dampening", [0.0, 0.25])
def test_none_skips_a_leaf_and_keeps_its_momentum(dampening):
    impl = trace(0.5, dampening)
    grads = {"a": torch.tensor(2.0), "b": torch.tensor(2.0)}
    _, state = impl.update(grads, impl.init(grads))
    updates, after = impl.update({"a": torch.tensor(2.0), "b": None}, state)
    assert updates["b"] is None
    assert after.momentum_buffer["b"] is state.momentum_buffer["b"]
    assert after.momentum_buffer["a"].item() == 1.0 + (1 - dampening) * 2.0


def test_all_memory_is_in_the_state():
    impl = trace(0.9, dampening=0.5)
    grads = [[torch.tensor(1.0)]] * 3
    once, _ = run(impl, grads)
    again, _ = run(impl, grads)  # a transformation that remembered the first run would dampen at once
    assert [u[0].item() for u in once] == [u[0].item() for u in again]


def test_update_is_pure_where_a_graph_is_recorded_or_not_in_place():
    impl = trace(0.9)
    state = TraceState([torch.ones(2)], ())
    impl.update([torch.ones(2)], state, inplace=True)
    with torch.no_grad():
        impl.update([torch.ones(2)], state, inplace=False)
    assert torch.equal(state.momentum_buffer[0], torch.ones(2))


@each_row("nesterov", [False, True])
def test_in_place_overwrites_the_state_and_never_the_gradient(nesterov):
    impl = trace(0.5, nesterov=nesterov)
    buffer, grad = torch.ones(2), torch.ones(2)
    with torch.no_grad():
        _, state = impl.update([grad], TraceState([buffer], ()), inplace=True)
    assert state.momentum_buffer[0] is buffer
    assert torch.equal(buffer, torch.full((2,), 1.5))
    assert torch.equal(grad, torch.ones(2))


@each_row(("dampening", "nesterov"), [(0.0, False), (0.3, False), (0.0, True)])
def test_derivatives_with_respect_to_gradients_momentum_and_first_moment(dampening, nesterov):
    torch.manual_seed(0)
    grads = [torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    momentum = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    moment = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def last(momentum, moment, *grads):
        impl = trace(momentum, dampening, nesterov)
        state = impl.init([moment])._replace(momentum_buffer=[moment])
        out, _ = run(impl, [[grad] for grad in grads], state)
        return out[-1][0]

    assert gradcheck(last, (momentum, moment, *grads))
    assert gradgradcheck(last, (momentum, moment, *grads))


def test_moment_requires_grad_makes_leaves():
    params = [torch.ones(2), torch.ones(2, dtype=torch.int64)]
    state = trace(0.9, moment_requires_grad=True).init(params)
    assert state.momentum_buffer[0].requires_grad
    assert not state.momentum_buffer[1].requires_grad
    assert not trace(0.9).init(params).momentum_buffer[0].requires_grad


@each_row(("dampening", "nesterov"), [(0.0, False), (0.3, False), (0.0, True)])
def test_vmap_equals_a_loop(dampening, nesterov):
    torch.manual_seed(0)
    impl = trace(0.9, dampening, nesterov)
    grads = torch.randn(3, 4)

    def two_steps(grad):
        out, _ = run(impl, [[grad], [2 * grad]])
        return out[1][0]

    assert torch.equal(vmap(two_steps)(grads), torch.stack([two_steps(grad) for grad in grads]))


@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_compiles_into_one_graph(dampening):
    impl = trace(0.9, dampening)
    grads = {"a": torch.ones(3), "b": None}
    state = impl.init({"a": torch.ones(3), "b": torch.ones(2)})
    compiled = torch.compile(impl.update, fullgraph=True, backend="aot_eager")
    got, _ = compiled(grads, compiled(grads, state)[1])
    want, _ = impl.update(grads, impl.update(grads, state)[1])
    assert torch.equal(got["a"], want["a"])


@each_row(
    ("kwargs", "message"),
    [
        ({"momentum": -0.1}, "`momentum` must be at least 0, got -0.1"),
        ({"dampening": -1.0}, "`dampening` must be at least 0, got -1.0"),
        ({"momentum": 0.0, "nesterov": True}, "`nesterov` needs a `momentum` above 0"),
        ({"dampening": 0.1, "nesterov": True}, "`nesterov` needs .* a `dampening` of 0, got 0.9 and 0.1"),
    ],
)
def test_bad_arguments_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        trace(**kwargs)


def test_updates_of_another_structure_are_refused():
    impl = trace(0.9)
    with pytest.raises(ValueError, match=r"`state.momentum_buffer` must have the structure of `updates`"):
        impl.update([torch.ones(1)], impl.init({"a": torch.ones(1)}))
