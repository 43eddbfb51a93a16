"""Values of schedules in an optimizer's state: against a loop in plain torch, also where an adjoint cuts the state."""

from __future__ import annotations

import torch

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist import pytree
from torchopt_dist.transform import inject_hyperparams

D = torch.float64
STEPS = 5
ADJOINTS = {
    "recorded": (todist.Recorded(), 0),
    "replayed": (todist.Replayed(), 0),
    "replayed from snapshots": (todist.Replayed(snapshots=2), 0),
    "truncated": (todist.Truncated(2), STEPS - 2),
    "truncated to the last": (todist.Truncated(1), STEPS - 1),
    "finite difference": (todist.FiniteDifference(), STEPS - 1),
    "SAMA": (todist.SAMA(), STEPS - 1),
}
"""Name → the adjoint, and the step before which the loop by hand is cut."""


class Problem:
    """SGD with momentum, both hyper-parameters by schedules of tensors that require grad."""

    def __init__(self):
        self.peak = torch.tensor(0.2, dtype=D, requires_grad=True)
        self.heavy = torch.tensor(0.9, dtype=D, requires_grad=True)
        self.first = torch.tensor([0.5, -1.0], dtype=D, requires_grad=True)
        self.xs = torch.linspace(-1, 1, 6, dtype=D).reshape(3, 2)

    def lr(self, count):
        return self.peak * 0.7**count

    def momentum(self, count):
        return self.heavy / (1 + count)

    def loss(self, w, x):
        return ((w - x) ** 4).sum() + (w * x).sin().sum()

    def gradient(self, w, x):
        return 4 * (w - x) ** 3 + x * (w * x).cos()

    def by_hand(self, x, cut):
        w, velocity = self.first, torch.zeros_like(x)
        for number in range(STEPS):
            if number == cut:
                w, velocity = w.detach(), velocity.detach()
            velocity = self.momentum(number) * velocity + self.gradient(w, x)
            w = w - self.lr(number) * velocity
        return w

    def run(self, x, adjoint, **options):
        optimizer = inject_hyperparams(todist.sgd)(lr=self.lr, momentum=self.momentum)
        given = {"meta": (self.peak, self.heavy), "adjoint": adjoint, **options}
        return todist.inner_loop(lambda w: self.loss(w, x), optimizer, self.first, STEPS, **given)

    def gradients(self, adapted):
        return torch.autograd.grad((adapted**3).sum(), (self.peak, self.heavy))


@each_row("stop", [None, lambda number, loss: number == STEPS - 1])
@each_row("name", ADJOINTS)
def test_the_first_step_after_a_cut_is_connected_with_its_schedules(name, stop):
    problem, (adjoint, cut) = Problem(), ADJOINTS[name]
    x = problem.xs[0]
    expected = problem.by_hand(x, cut)
    adapted = problem.run(x, adjoint, stop=stop).params
    torch.testing.assert_close(adapted, expected)
    torch.testing.assert_close(problem.gradients(adapted), problem.gradients(expected), rtol=1e-9, atol=1e-12)


@each_row("name", ADJOINTS)
def test_and_in_vmap(name):
    problem, (adjoint, cut) = Problem(), ADJOINTS[name]
    expected = torch.stack([problem.by_hand(x, cut) for x in problem.xs])
    adapted = torch.vmap(lambda x: problem.run(x, adjoint, seed=0).params)(problem.xs)
    torch.testing.assert_close(adapted, expected)
    torch.testing.assert_close(problem.gradients(adapted), problem.gradients(expected), rtol=1e-9, atol=1e-12)


def test_first_order_steps_are_connected_with_their_schedules():
    """Each update is, while the gradients are constants."""
    problem = Problem()
    x = problem.xs[0]
    w, velocity = problem.first, torch.zeros_like(x)
    for number in range(STEPS):
        velocity = problem.momentum(number) * velocity + problem.gradient(w, x).detach()
        w = w - problem.lr(number) * velocity
    adapted = problem.run(x, todist.FirstOrder()).params
    torch.testing.assert_close(problem.gradients(adapted), problem.gradients(w))


def test_a_loop_that_goes_on_from_a_state_without_history_is_connected_from_its_first_step():
    problem = Problem()
    x = problem.xs[0]
    with torch.no_grad():
        before = problem.run(x, todist.Recorded())
    w = before.params
    velocity = sum(leaf for leaf in pytree.flatten(before.state)[0] if leaf.shape == x.shape)  # the only one
    made = todist.inner_loop(
        lambda w: problem.loss(w, x),
        inject_hyperparams(todist.sgd)(lr=problem.lr, momentum=problem.momentum),
        w.requires_grad_(),
        1,
        state=before.state,
    )
    velocity = problem.momentum(STEPS) * velocity + problem.gradient(w, x)
    expected = w - problem.lr(STEPS) * velocity
    torch.testing.assert_close(problem.gradients(made.params), problem.gradients(expected))


def test_a_value_that_was_put_into_the_state_stays_and_has_its_own_gradient():
    problem = Problem()
    x, w = problem.xs[0], problem.first
    optimizer = inject_hyperparams(todist.sgd)(lr=problem.lr)
    state, own = optimizer.init(w), torch.tensor(0.05, dtype=D, requires_grad=True)
    for value in (own, own.detach()):
        state.hyperparams["lr"] = value
        made = todist.inner_loop(lambda w: problem.loss(w, x), optimizer, w, 1, state=state).params
        torch.testing.assert_close(made, w - 0.05 * problem.gradient(w, x))
        found = torch.autograd.grad(made.sum(), (own, problem.peak), allow_unused=True)
        assert found[1] is None
        assert (found[0] is None) == (value is not own)
