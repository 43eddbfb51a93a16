"""What can be read of a tensor inside of transforms: the values of all samples of a ``vmap``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchopt_dist.core.vmap import differentiable, same_values, samples_around, visible


def test_the_values_of_all_samples_are_read_inside_vmap_and_none_inside_another_transform() -> None:
    seen: list[list[float] | None] = []
    plain = torch.tensor([5.0])

    def look(x: Tensor) -> Tensor:
        for tensor in (x, plain):
            found = visible(tensor)
            seen.append(None if found is None else found.tolist())
        return x.sum()

    torch.vmap(look)(torch.tensor([1.0, 2.0]))
    assert seen == [[1.0, 2.0], [5.0]]
    seen.clear()
    torch.func.grad(look)(torch.tensor([1.0, 2.0]))
    assert seen == [None, [5.0]]
    seen.clear()
    torch.vmap(torch.func.grad(look))(torch.ones(2, 1))
    assert seen[0] is None
    x = torch.tensor([3.0], requires_grad=True)
    found = visible(x)
    assert found is not None
    assert not found.requires_grad


def test_a_tensor_has_the_same_values_if_that_is_known() -> None:
    one = torch.tensor([1.0, float("nan")])
    assert same_values(one, one.clone())
    assert not same_values(one, one + 1)
    assert not same_values(one, one.double())
    assert not same_values(one, one[:1])
    same, other, answers = one.clone(), 2 * one, []

    def ask(x: Tensor) -> Tensor:
        answers.append((same_values(x, x), same_values(one, same), same_values(one, other)))
        return x

    torch.vmap(ask)(torch.ones(2))
    torch.func.grad(lambda x: ask(x).sum())(torch.ones(2))
    assert answers == [(False, True, False)] * 2


def test_a_transform_hides_which_of_its_tensors_require_grad_so_all_real_ones_may() -> None:
    x, y, number = torch.ones(2, requires_grad=True), torch.ones(2), torch.arange(2)
    assert differentiable([x, y, number, x, None]) == [x]
    counts = []

    def ask(y: Tensor, number: Tensor) -> Tensor:
        counts.append(len(differentiable([x, y, number, torch.ones(2)])))
        return y

    torch.vmap(ask)(y, number)
    assert counts == [2]


def test_samples_are_entered_again_only_where_no_other_transform_is_active() -> None:
    held = []

    def keep(x: Tensor) -> Tensor:
        held.append((samples_around(), x))
        return x

    torch.vmap(keep)(torch.tensor([1.0, 2.0]))
    ((samples, x),) = held
    assert samples is not None
    assert samples.sizes == (2,)
    (doubled,) = samples.again(lambda: [2 * x])
    assert doubled.tolist() == [2.0, 4.0]
    with pytest.raises(NotImplementedError, match="cannot be inside another transformation"):
        torch.func.grad(lambda y: (samples.call(lambda: None), y)[1])(torch.tensor(1.0))
    torch.func.grad(lambda y: keep(y))(torch.tensor(1.0))
    assert held[1][0] is None
    assert samples_around() is not None
