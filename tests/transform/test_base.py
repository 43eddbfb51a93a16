import copy
import pickle

import pytest
import torch

from torchopt_dist.transform.base import (
    ChainedGradientTransformation,
    EmptyState,
    GradientTransformation,
    chain,
    identity,
)
from torchopt_dist.transform.scale import scale
from torchopt_dist.transform.trace import trace


def test_chain_runs_its_links_in_order():
    impl = chain(trace(0.5), scale(-2.0))
    state = impl.init((torch.zeros(2),))
    first, state = impl.update((torch.ones(2),), state)
    second, state = impl.update((torch.ones(2),), state)
    assert torch.equal(first[0], torch.full((2,), -2.0))
    assert torch.equal(second[0], torch.full((2,), -3.0))


def test_a_chain_in_a_chain_becomes_part_of_it():
    inner = chain(scale(2.0), scale(3.0))
    impl = chain(inner, scale(5.0))
    assert isinstance(impl, ChainedGradientTransformation)
    assert len(impl.transformations) == 3
    updates, _ = impl.update([torch.ones(())], impl.init([torch.ones(())]))
    assert updates[0].item() == 30.0


def test_identity_and_the_empty_chain_change_nothing():
    grads = {"a": torch.ones(1), "b": None}
    for impl in (identity(), chain()):
        updates, _ = impl.update(grads, impl.init(grads))
        assert updates["a"] is grads["a"]
        assert updates["b"] is None
    assert identity().init(grads) == EmptyState()


def test_init_and_update_unpack():
    init, update = chain(scale(2.0))
    assert update([torch.ones(())], init([torch.ones(())]))[0][0].item() == 2.0


@pytest.mark.parametrize("again", [copy.deepcopy, lambda impl: pickle.loads(pickle.dumps(impl))])
def test_pickle_and_deepcopy(again):
    impl = again(chain(trace(0.9, dampening=0.1), scale(-0.1)))
    assert isinstance(impl, ChainedGradientTransformation)
    assert isinstance(impl, GradientTransformation)
    grads = [torch.ones(3)]
    updates, _ = impl.update(grads, impl.init(grads))
    assert torch.equal(updates[0], torch.full((3,), -0.1))


def test_a_chain_refuses_what_is_no_transformation():
    with pytest.raises(
        TypeError, match=r"`transformations\[1\]` must be a GradientTransformation, got float"
    ):
        chain(scale(1.0), 0.1)


def test_a_chain_refuses_a_state_of_another_chain():
    impl = chain(scale(1.0), scale(1.0))
    with pytest.raises(ValueError, match="`state` must be a tuple of 2 states"):
        impl.update([torch.ones(1)], (EmptyState(),))
