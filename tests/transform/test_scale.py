import copy
import pickle

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.rows import each_row
from torchopt_dist.transform.base import chain
from torchopt_dist.transform.scale import scale, scale_by_learning_rate, scale_by_schedule
from torchopt_dist.transform.trace import trace


def test_scale_leaves_the_gradients_untouched_and_skips_none():
    grads = {"a": torch.ones(2), "b": None}
    updates, _ = scale(3.0).update(grads, scale(3.0).init(grads), inplace=True)
    assert torch.equal(updates["a"], torch.full((2,), 3.0))
    assert torch.equal(grads["a"], torch.ones(2))
    assert updates["b"] is None


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_factor_gets_its_exact_gradient(shape):
    torch.manual_seed(0)
    lr = torch.full(shape, 0.3, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def scaled(lr, grad):
        impl = scale_by_learning_rate(lr)
        return impl.update((grad, grad.sum()), impl.init((grad, grad)))[0]

    assert scaled(lr, grad)[1].shape == ()
    assert gradcheck(scaled, (lr, grad))
    assert gradgradcheck(scaled, (lr, grad))


def test_a_factor_of_another_precision_keeps_the_dtype():
    factor = torch.tensor(0.5, dtype=torch.float64)
    grads = [torch.ones((), dtype=torch.float32), torch.ones(2, dtype=torch.bfloat16)]
    updates, _ = scale(factor).update(grads, scale(factor).init(grads))
    assert [u.dtype for u in updates] == [torch.float32, torch.bfloat16]


def test_a_schedule_counts_from_zero_in_full_precision():
    impl = scale_by_schedule(lambda count: 0.1 * 0.9**count)
    grads = [torch.ones((), dtype=torch.float64)]
    state = impl.init(grads)
    for count in range(5):
        updates, state = impl.update(grads, state)
        assert updates[0].item() == pytest.approx(0.1 * 0.9**count, rel=1e-15)


def test_a_schedule_may_look_at_the_count():
    impl = scale_by_learning_rate(lambda count: 1.0 if count < 1 else [10.0, 20.0, 30.0][int(count)])
    grads, factors = [torch.ones(())], []
    state = impl.init(grads)
    for _ in range(3):
        updates, state = impl.update(grads, state)
        factors.append(updates[0].item())
    assert factors == [-1.0, -20.0, -30.0]


def test_a_learned_schedule_gets_its_gradient():
    rates = torch.tensor([0.1, 0.2], requires_grad=True)
    impl = scale_by_schedule(lambda count: rates[int(count)])
    state = impl.init([torch.ones(())])
    _, state = impl.update([torch.ones(())], state)
    updates, _ = impl.update([torch.tensor(3.0)], state)
    assert torch.autograd.grad(updates[0], rates)[0].tolist() == [0.0, 3.0]


def test_pickle_and_deepcopy_keep_a_tensor_factor():
    impl = scale_by_learning_rate(torch.tensor(0.5, requires_grad=True))
    for again in (pickle.loads(pickle.dumps(impl)), copy.deepcopy(impl)):
        updates, _ = again.update([torch.ones(())], again.init([]))
        assert updates[0].item() == -0.5
        assert updates[0].requires_grad


def test_only_a_multiplication_by_a_number_has_a_constant_factor():
    assert scale_by_learning_rate(0.25).constant_factor == -0.25
    assert pickle.loads(pickle.dumps(scale(2.0))).constant_factor == 2.0
    for impl in (scale(torch.tensor(2.0)), scale_by_schedule(float), trace(0.9), chain(scale(2.0)), chain()):
        assert impl.constant_factor is None


@each_row(
    ("lr", "error", "message"),
    [
        (-0.1, ValueError, "`lr` must be at least 0, got -0.1"),
        (float("nan"), ValueError, "`lr` must be at least 0, got nan"),
        (torch.ones(2), ValueError, r"`lr` as a tensor must have one element, got shape \(2,\)"),
        ("0.1", TypeError, "`lr` must be a number, a tensor or a schedule, got str"),
    ],
)
def test_a_bad_learning_rate_is_refused(lr, error, message):
    with pytest.raises(error, match=message):
        scale_by_learning_rate(lr)


def test_a_schedule_must_be_callable():
    with pytest.raises(TypeError, match="`step_size_fn` must be callable, got float"):
        scale_by_schedule(0.1)
