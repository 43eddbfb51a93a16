import pytest
import torch
from torch.autograd import gradcheck

from torchopt_dist.optim.apply_updates import apply_updates


def test_in_place_returns_the_same_tensors_and_records_nothing():
    params = {"a": torch.ones(2, requires_grad=True), "b": torch.ones(1, requires_grad=True)}
    moved = apply_updates(params, {"a": torch.ones(2, requires_grad=True) * 2, "b": None})
    assert moved["a"] is params["a"]
    assert moved["a"].is_leaf
    assert params["a"].tolist() == [3.0, 3.0]
    assert params["b"].tolist() == [1.0]


def test_out_of_place_leaves_the_parameters_and_is_differentiable():
    params = [torch.ones(2, dtype=torch.float64, requires_grad=True)]
    updates = [torch.ones(2, dtype=torch.float64, requires_grad=True)]
    assert gradcheck(lambda p, u: apply_updates([p], [u * u], inplace=False)[0], (*params, *updates))
    assert params[0].tolist() == [1.0, 1.0]


def test_a_parameter_keeps_its_dtype():
    moved = apply_updates([torch.ones(2)], [torch.ones(2, dtype=torch.float64)], inplace=False)
    assert moved[0].dtype == torch.float32


@pytest.mark.parametrize("inplace", [False, True])
def test_a_wrong_structure_or_shape_is_refused(inplace):
    with pytest.raises(ValueError, match="`updates` must have the structure of `params`"):
        apply_updates([torch.ones(2)], (torch.ones(2),), inplace=inplace)
    with pytest.raises(ValueError, match=r"leaf 0 must have \(2, 2\), got \(2,\)"):
        apply_updates([torch.ones(2, 2)], [torch.ones(2)], inplace=inplace)
