"""Arguments and gradients that no formula can take are refused by name, before one meets them."""

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.optim.table import ROWS
from tests.rows import each_row
from torchopt_dist import transform

DENSE_ONLY = ["Adagrad", "Adadelta", "Adan", "Adamax", "RAdam", "Adam", "AdamW", "Lion", "LAMB"]


DENSE_CASES = [
    (name, weight_decay, face)
    for name in DENSE_ONLY
    for weight_decay in (0.0, 0.1)
    for face in ("", "Meta")
    if (name, weight_decay, face) != ("Adagrad", 0.0, "")
]


@each_row(("name", "weight_decay", "face"), DENSE_CASES)
def test_sparse_gradients_are_refused(name, weight_decay, face):
    table = nn.Embedding(3, 2, sparse=True)
    before = table.weight.clone()
    loss = table(torch.tensor([1, 1])).sum()
    loss.backward(retain_graph=True)
    optimizer = getattr(todist, face + name)(
        table if face else table.parameters(), lr=0.1, weight_decay=weight_decay
    )
    message = (
        r"`grads\[0\]` must be a dense tensor; got layout torch.sparse_coo: make it one by .* `sparse=False`"
    )
    with pytest.raises(TypeError, match=message):
        optimizer.step(*([loss] if face else []))
    assert torch.equal(table.weight, before)


@each_row(
    "link",
    [
        transform.clip_grad_norm(1.0),
        transform.clip_grad_value(1.0),
        transform.add_decayed_weights(0.1),
        transform.scale_by_rss(),
        transform.scale_by_adadelta(),
        transform.scale_by_adan(),
    ],
)
def test_sparse_gradients_are_refused_by_links(link):
    params = [torch.ones(2), torch.ones(2)]
    with pytest.raises(TypeError, match=r"`grads\[1\]` must be a dense tensor; got layout torch.sparse_coo"):
        link.update([torch.ones(2), torch.ones(2).to_sparse()], link.init(params), params=params)


def test_momentum_takes_sparse_gradients():
    link = transform.trace(0.9)
    state = link.init([torch.ones(2)])
    updates, _ = link.update([torch.ones(2).to_sparse()], state)
    assert updates[0].tolist() == [1, 1]


ARGUMENTS = [
    (name, argument) for name, row in ROWS.items() for argument, value in row.tensors.items() if value
]


@each_row(("name", "argument"), ARGUMENTS)
def test_complex_hyperparameters_are_refused(name, argument):
    value = ROWS[name].tensors[argument]
    bad = torch.tensor(1j)
    given = tuple(bad for _ in value) if isinstance(value, tuple) else bad
    with pytest.raises(
        TypeError, match=rf"`{argument}(\[0\])?` must be real, got a tensor of torch.complex64"
    ):
        ROWS[name].function(**{"lr": 0.1, argument: given})


def test_complex_options_of_a_torch_optimizer_are_refused():
    with pytest.raises(TypeError, match=r"`lr` must be real, got a tensor of torch.complex64"):
        todist.differentiable(torch.optim.SGD, nn.Linear(1, 1), lr=torch.tensor(1j))


@each_row("value", [0.0, 1.0, 3.0, 1e6])
def test_a_learned_t0_is_refused_whatever_its_value(value):
    with pytest.raises(ValueError, match=r"ASGD finds no gradient for \['t0'\]"):
        todist.differentiable(torch.optim.ASGD, nn.Linear(1, 1), t0=torch.tensor(value, requires_grad=True))


def test_asgd_averages_from_the_start_and_its_average_has_a_derivative():
    lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)

    def average(lr):
        torch.manual_seed(0)
        net = nn.Linear(2, 1, dtype=torch.float64)
        inner = todist.differentiable(torch.optim.ASGD, net, lr=lr, t0=1.0)
        for _ in range(5):
            inner.step(net(torch.ones(1, 2, dtype=torch.float64)).pow(2).sum())
        return inner.get_states()[0]["weight"]["ax"].sum()

    (grad,) = torch.autograd.grad(average(lr), lr)
    slope = ((average(lr + 1e-3) - average(lr - 1e-3)) / 2e-3).detach()
    assert abs(grad) > 0.01
    torch.testing.assert_close(grad, slope, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize(
    ("name", "argument"), [("Adagrad", "initial_accumulator_value"), ("RMSprop", "initial_scale")]
)
def test_the_value_of_a_first_state_is_a_number(name, argument):
    """A tensor's gradient would be lost without a word."""
    value = torch.tensor(0.5, requires_grad=True)
    for make in (ROWS[name].function, lambda **options: ROWS[name].meta(nn.Linear(1, 1), **options)):
        with pytest.raises(
            TypeError, match=f"`{argument}` must be a number, as the first state is no part of a"
        ):
            make(**{argument: value})
