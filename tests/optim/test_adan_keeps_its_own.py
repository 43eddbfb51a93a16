"""Adan's last gradient is its own: what the caller does to `p.grad` later does not change it."""

import torch

import torchopt_dist as todist
from torchopt_dist import transform


def test_the_usual_loop_may_zero_the_gradient():
    def run(keep):
        w = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
        impl = todist.adan(lr=0.1)
        state = impl.init([w])
        for _ in range(4):
            (w**4).sum().backward()
            updates, state = impl.update([w.grad if keep else w.grad.clone()], state, params=[w])
            todist.apply_updates([w], updates)
            w.grad.zero_()
        return w.detach()

    assert torch.equal(run(True), run(False))


def test_a_recorded_gradient_is_not_copied():
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    (grad,) = torch.autograd.grad((w**4).sum(), w, create_graph=True)
    impl = transform.scale_by_adan()
    _, state = impl.update([grad], impl.init([w]), params=[w])
    assert state.last_grad[0] is grad
