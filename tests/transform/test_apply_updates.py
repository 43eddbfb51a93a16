"""Parameters, updates → the parameters moved: in place for lists of every dtype and stride, or differentiably."""

import pytest
import torch
from torch.autograd import gradcheck

from torchopt_dist.transform.apply_updates import apply_updates


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
        apply_updates([torch.ones(2)], {"a": torch.ones(2)}, inplace=inplace)
    moved = apply_updates([torch.ones(2)], (torch.ones(2),), inplace=inplace)
    assert type(moved) is list, "a list and a tuple are the same, and parameters keep their kind"
    assert moved[0].tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match=r"leaf 0 must have \(2, 2\), got \(2,\)"):
        apply_updates([torch.ones(2, 2)], [torch.ones(2)], inplace=inplace)


@pytest.mark.parametrize("inplace", [False, True])
def test_every_dtype_in_one_list(inplace):
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
    params = [torch.ones(5, dtype=dtype) for dtype in dtypes]
    moved = apply_updates(params, [2 * param for param in params], inplace=inplace)
    assert [x.dtype for x in moved] == list(dtypes)
    assert all(x.tolist() == [3.0] * 5 for x in moved)


@pytest.mark.parametrize("inplace", [False, True])
def test_many_tensors_empty_ones_among_them(inplace):
    params = [torch.full((i % 7, 3), float(i)) for i in range(500)]
    moved = apply_updates(params, [-torch.ones_like(param) for param in params], inplace=inplace)
    assert all((x == i - 1).all() for i, x in enumerate(moved))
    assert apply_updates([], [], inplace=inplace) == []


def test_strides_and_updates_that_are_other_parameters():
    matrix = torch.arange(20.0).view(-1, 2)
    expected = matrix[:, 0] + matrix[:, 1]
    apply_updates([matrix[:, 0]], [matrix[:, 1]])
    assert torch.equal(matrix[:, 0], expected)
    first, second = torch.ones(3), torch.ones(3)
    apply_updates([first, second], [second, first])  # in the order of the list
    assert (first.tolist(), second.tolist()) == ([2.0] * 3, [3.0] * 3)
    apply_updates([first], [torch.ones(()).expand(3)])
    assert first.tolist() == [3.0] * 3
    with pytest.raises(RuntimeError, match="memory"):
        apply_updates([torch.ones(1).expand(3)], [torch.ones(3)])


def test_a_change_of_a_saved_tensor_is_noticed():
    weight = torch.ones(3, requires_grad=True)
    loss = (weight**2).sum()
    apply_updates([weight], [torch.ones(3)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_under_torch_func_and_compiled():
    def loss(weight):
        moved = apply_updates([weight * 1.0, weight * 1.0], [weight * weight * 2, weight * 2], inplace=False)
        return moved[0].sum()

    weight = torch.tensor([1.0, 2.0])
    assert torch.func.grad(loss)(weight).tolist() == [5.0, 9.0]
    assert torch.func.vmap(loss)(weight[:, None]).tolist() == [3.0, 10.0]
    step = torch.compile(torch.func.vmap(torch.func.grad(loss)), fullgraph=True, backend="eager")
    assert step(weight[:, None]).flatten().tolist() == [5.0, 9.0]
    torch.compiler.reset()
