from typing import get_args

import optree
import pytest
import torch
from torch import Tensor
from torch.distributed import rpc

from torchopt_dist import typing


def test_types_of_others_are_theirs():
    assert typing.RRef is rpc.RRef
    assert typing.PyTree is optree.PyTree


@pytest.mark.parametrize(
    "distribution", [torch.distributions.Normal(0.0, 1.0), torch.distributions.Categorical(torch.ones(3))]
)
def test_distributions_can_be_sampled_from(distribution):
    assert isinstance(distribution, typing.Samplable)
    assert distribution.sample(torch.Size([4])).shape == (4,)


def test_anything_with_a_sample_method_can_be_sampled_from():
    class Coin:
        def sample(self, sample_shape=()):
            return torch.ones(sample_shape)

    assert isinstance(Coin(), typing.Samplable)
    assert not isinstance(torch.ones(1), typing.Samplable)
    assert not isinstance(lambda shape: shape, typing.Samplable)


def test_aliases_can_be_used_in_isinstance_and_annotations():
    assert isinstance(1.0, typing.Numeric)
    assert isinstance(None, typing.OptionalTensor)
    assert not isinstance("1", typing.Numeric)
    (matvec, b), x = get_args(typing.LinearSolver)
    assert get_args(matvec) == ([typing.TensorTree], typing.TensorTree)
    assert b is x is typing.TensorTree
    assert get_args(typing.SampleFunc)[0] == [torch.Size]
    assert Tensor in get_args(get_args(typing.SampleFunc)[1])


def test_every_name_is_there_and_sorted():
    assert [name for name in typing.__all__ if not hasattr(typing, name)] == []
    assert typing.__all__ == sorted(typing.__all__)
