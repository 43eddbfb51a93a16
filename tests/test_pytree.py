import pytest
import torch

from torchopt_dist import pytree


def test_none_is_a_leaf():
    leaves, spec = pytree.flatten({"a": None, "b": (1, 2)})
    assert leaves == [None, 1, 2]
    assert pytree.unflatten(spec, [7, 8, 9]) == {"a": 7, "b": (8, 9)}
    assert pytree.flatten_like(spec, {"a": 1, "b": (None, 2)}, "updates", "params") == [1, None, 2]
    assert pytree.tree_map(lambda x, y: (x, y), [None], [1]) == [(None, 1)]


def test_map_tensors_leaves_the_rest():
    assert pytree.map_tensors(lambda t: t.item(), [torch.tensor(2.0), None, 3]) == [2.0, None, 3]


def test_is_leaf():
    assert pytree.is_leaf(None)
    assert pytree.is_leaf(torch.ones(1))
    assert not pytree.is_leaf([])


def test_another_structure_is_refused_by_name():
    spec = pytree.flatten([1])[1]
    with pytest.raises(ValueError, match=r"`updates` must have the structure of `params`, .*, got"):
        pytree.flatten_like(spec, (1,), "updates", "params")
