"""``inject_hyperparams`` → updates of loops that set the hyper-parameters by hand."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import torchopt_dist as todist
from tests.optim.table import ROWS
from tests.rows import each_row
from torchopt_dist.transform import inject_hyperparams

DOUBLE = torch.float64
W = torch.tensor([1.0, -2.0], dtype=DOUBLE)


def falling(count):
    return 0.5 / (1 + count)


def run(impl, steps, state=None, w=W):
    state = impl.init(w) if state is None else state
    for step in range(steps):
        updates, state = impl.update(w.sin() + step, state, params=w, inplace=False)
        w = w + updates
    return w, state


NUMBERS = [
    (name, argument)
    for name, row in ROWS.items()
    for argument, value in row.tensors.items()
    if isinstance(value, float)
]


@each_row(("name", "argument"), NUMBERS)
def test_any_number_may_be_a_schedule(name, argument):
    """Each update is that of a transformation made with this number."""
    row = ROWS[name]
    numbers = {key: value for key, value in row.tensors.items() if isinstance(value, float)}
    impl = inject_hyperparams(row.function)(**{**numbers, argument: falling})
    got, state = run(impl, 4)
    w, inner = W, None
    for step in range(4):
        made = row.function(**{**numbers, argument: falling(step)})
        inner = made.init(w) if inner is None else inner
        updates, inner = made.update(w.sin() + step, inner, params=w, inplace=False)
        w = w + updates
    torch.testing.assert_close(got, w, rtol=1e-10, atol=1e-12)
    assert {key: value.item() for key, value in state.hyperparams.items()} == {**numbers, argument: 0.1}


def test_a_number_in_the_state_is_what_goes():
    impl = inject_hyperparams(todist.sgd)(0.5, momentum=falling)
    w, state = run(impl, 1)
    state.hyperparams["lr"] = torch.tensor(0.25, dtype=DOUBLE)
    state.hyperparams["momentum"] = torch.tensor(0.0, dtype=DOUBLE)
    moved, after = run(impl, 1, state, w)
    torch.testing.assert_close(moved, w - 0.25 * w.sin())
    assert after.hyperparams["lr"].item() == 0.25
    assert after.hyperparams["momentum"].item() == falling(2)
    assert after.step.item() == 2


def test_what_is_static_is_passed_on():
    def mask(params):
        return [True, False]

    impl = inject_hyperparams(todist.adamw, static_args=["mask"])(0.1, weight_decay=0.5, mask=mask)
    params = [W, W]
    state = impl.init(params)
    assert sorted(state.hyperparams) == ["lr", "weight_decay"]
    updates, _ = impl.update([torch.zeros_like(W)] * 2, state, params=params, inplace=False)
    torch.testing.assert_close(updates, [-0.05 * W, torch.zeros_like(W)])
    impl = inject_hyperparams(todist.rmsprop, static_args=["initial_scale"])(0.1, initial_scale=1.0)
    assert impl.init(W).hyperparams.keys() == {"lr"}


@each_row("again", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_it_is_copied_and_resumed_with_its_state(again):
    impl = inject_hyperparams(todist.adam)(lr=falling)
    _, state = run(impl, 2)
    other, held = again((impl, state))
    torch.testing.assert_close(run(other, 2, held)[0], run(impl, 2, state)[0])
    saved, w = {}, W.clone().requires_grad_()
    for part in range(2):
        optimizer = todist.Optimizer([w], impl)
        if part:
            optimizer.load_state_dict(saved)
        for step in range(2):
            w.grad = w.detach().sin() + 2 * part + step
            optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    torch.testing.assert_close(w.detach(), run(impl, 4)[0])


def test_a_learned_schedule_gets_its_gradient():
    peak = torch.tensor(0.5, dtype=DOUBLE, requires_grad=True)

    def moved(peak):
        return run(inject_hyperparams(todist.sgd)(lr=lambda count: peak / (1 + count), momentum=0.5), 3)[0]

    assert torch.autograd.gradcheck(moved, peak)
    peaks = torch.tensor([0.5, 0.25], dtype=DOUBLE)
    torch.testing.assert_close(torch.func.vmap(moved)(peaks), torch.stack([moved(one) for one in peaks]))


@each_row(
    ("make", "error", "message"),
    [
        (lambda: inject_hyperparams(0.1), TypeError, "`constructor` must be callable, got float"),
        (
            lambda: inject_hyperparams(todist.sgd, ["rho"]),
            TypeError,
            r"`static_args` must be .* got \['rho'\]",
        ),
        (lambda: inject_hyperparams(todist.sgd)(-0.1), ValueError, r"`lr` must be at least 0, got -0\.1"),
        (lambda: inject_hyperparams(todist.sgd)(rho=0.1), TypeError, "rho|lr"),
        (lambda: inject_hyperparams(todist.sgd)(lambda count: -1.0), ValueError, "`lr` must be at least 0"),
        (
            lambda: inject_hyperparams(todist.sgd)(0.1).update(W, todist.sgd(0.1).init(W)),
            TypeError,
            "`state` must be an InjectHyperparamsState, got tuple",
        ),
    ],
)
def test_what_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
