import pickle

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from torchopt_dist.transform.add_decayed_weights import add_decayed_weights
from torchopt_dist.transform.base import EmptyState


def only_matrices(params):
    return {name: tensor.ndim > 1 for name, tensor in params.items()}


PARAMS = {"w": torch.full((1, 2), 4.0), "b": torch.full((2,), 4.0)}
GRADS = {"w": torch.ones(1, 2), "b": torch.ones(2)}


@pytest.mark.parametrize("mask", [{"w": True, "b": False}, only_matrices])
def test_a_mask_chooses_what_decays(mask):
    impl = pickle.loads(pickle.dumps(add_decayed_weights(0.5, mask)))
    updates, _ = impl.update(GRADS, impl.init(PARAMS), params=PARAMS)
    assert torch.equal(updates["w"], torch.full((1, 2), 3.0))
    assert updates["b"] is GRADS["b"]


def test_none_stays_none():
    updates, _ = add_decayed_weights(0.5).update({"w": None, "b": GRADS["b"]}, EmptyState(), params=PARAMS)
    assert updates["w"] is None
    assert torch.equal(updates["b"], torch.full((2,), 3.0))


def test_the_gradients_are_not_overwritten():
    with torch.no_grad():
        add_decayed_weights(0.5).update(GRADS, EmptyState(), params=PARAMS, inplace=True)
    assert torch.equal(GRADS["b"], torch.ones(2))


def test_derivatives():
    torch.manual_seed(0)
    args = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((), (3,), (3,))]

    def decayed(weight_decay, grad, param):
        return add_decayed_weights(weight_decay).update([grad], EmptyState(), params=[param])[0][0]

    assert gradcheck(decayed, args)
    assert gradgradcheck(decayed, args)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="`weight_decay` must be at least 0, got -1"):
        add_decayed_weights(-1)
    impl = add_decayed_weights(0.5)
    with pytest.raises(ValueError, match="`params` must be given"):
        impl.update(GRADS, EmptyState())
    with pytest.raises(ValueError, match="`params` must have the structure of `updates`"):
        impl.update(GRADS, EmptyState(), params=[torch.ones(2)])
    with pytest.raises(ValueError, match="`mask` must have the structure of `params`"):
        add_decayed_weights(0.5, {"w": True}).update(GRADS, EmptyState(), params=PARAMS)
    with pytest.raises(TypeError, match="`mask` must have bools for leaves, got int"):
        add_decayed_weights(0.5, {"w": 1, "b": 0}).update(GRADS, EmptyState(), params=PARAMS)
