"""``partition`` → each parameter moved as by the optimizer of its label alone."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.optim.programs import DOUBLE, losses, make
from torchopt_dist.transform import clip_grad_norm, partition

PARTS = {"matrix": todist.muon(lr=0.1), "other": todist.chain(clip_grad_norm(0.1), todist.adam(lr=0.05))}


def by_shape(params):
    return todist.pytree.map_tensors(lambda p: "matrix" if p.ndim == 2 else "other", params)


def test_each_parameter_is_moved_by_its_own_optimizer():
    ours, twin, meta = (make(DOUBLE) for _ in range(3))
    one = todist.Optimizer(ours.parameters(), partition(PARTS, by_shape))
    matrices = [p for p in twin.parameters() if p.ndim == 2]
    others = [p for p in twin.parameters() if p.ndim != 2]
    two = [todist.Muon(matrices, lr=0.1), torch.optim.Adam(others, lr=0.05)]
    recorded = todist.MetaOptimizer(meta, partition(PARTS, by_shape))
    first = list(meta.parameters())
    for loss in losses(DOUBLE, count=6):
        one.zero_grad()
        loss(ours).backward()
        one.step()
        for optimizer in two:
            optimizer.zero_grad()
        loss(twin).backward()
        nn.utils.clip_grad_norm_(others, 0.1)
        for optimizer in two:
            optimizer.step()
        recorded.step(loss(meta))
    for net in (ours, meta):
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-9, atol=1e-11)
    end = sum(p.square().sum() for p in meta.parameters())
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(end, first))


def test_derivatives_are_those_of_each_optimizer_alone():
    """Descent on ``w^3`` has the derivative ``1 - 6 lr w``, and the other leaf a rate of its own."""
    w, rate = torch.tensor([2.0], dtype=DOUBLE, requires_grad=True), torch.tensor(0.3, requires_grad=True)
    b = torch.tensor([1.0], dtype=DOUBLE, requires_grad=True)
    impl = partition({"slow": todist.sgd(lr=0.1), "fast": todist.sgd(lr=rate)}, {"w": "slow", "b": "fast"})
    moved = todist.FuncOptimizer(impl).step((w**3).sum() + (b**2).sum(), {"w": w, "b": b})
    grads = torch.autograd.grad(moved["w"].sum() + moved["b"].sum(), (w, b, rate))
    torch.testing.assert_close([g.item() for g in grads], [1 - 0.1 * 12, 1 - 0.3 * 2, -2.0])


def test_states_are_saved_and_copied_with_their_labels():
    impl = pickle.loads(pickle.dumps(partition(PARTS, by_shape)))
    nets = [make(DOUBLE), make(DOUBLE)]
    optimizers = [todist.MetaOptimizer(net, impl) for net in nets]
    stream = list(losses(DOUBLE, count=4))
    for loss in stream[:2]:
        optimizers[0].step(loss(nets[0]))
    todist.recover_state_dict(nets[1], todist.extract_state_dict(nets[0], by="deepcopy"))
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for loss in stream[2:]:
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.step(loss(net))
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_what_cannot_be_partitioned_is_refused():
    grads = {"w": torch.ones(1), "b": torch.ones(1)}
    parts = {"slow": todist.sgd(0.1)}
    with pytest.raises(ValueError, match=r"`labels` must be among \['slow'\], got 'fast'"):
        partition(parts, {"w": "slow", "b": "fast"}).init(grads)
    with pytest.raises(ValueError, match="`labels` must have the structure of `params`"):
        partition(parts, ["slow"]).init(grads)
    with pytest.raises(ValueError, match="must have an entry"):
        partition({}, {})
    with pytest.raises(TypeError, match="must map texts to GradientTransformations, got str 'slow' → float"):
        partition({"slow": 0.1}, {})
    with pytest.raises(TypeError, match="must be a mapping, got list"):
        partition([todist.sgd(0.1)], {})
    impl = partition(parts, by_shape)
    with pytest.raises(ValueError, match="the labels are a function of them"):
        partition(parts, lambda params: {"w": "slow", "b": "slow"}).update(
            grads, partition(parts, {"w": "slow", "b": "slow"}).init(grads)
        )
    with pytest.raises(TypeError, match="`state` must be a PartitionState"):
        impl.update(grads, (), params=grads)
