import copy
import pickle

import pytest
import torch
from torch.utils import _pytree as torch_pytree
from torch.utils.checkpoint import checkpoint

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist import pytree
from torchopt_dist.optim import FuncOptimizer, Optimizer, adam, sgd
from torchopt_dist.transform.base import (
    ChainedGradientTransformation,
    EmptyState,
    GradientTransformation,
    chain,
    identity,
)
from torchopt_dist.transform.clip import clip_grad_norm
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


@each_row("again", [copy.deepcopy, lambda impl: pickle.loads(pickle.dumps(impl))])
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


def mapped(impl):
    return pytree.tree_map(lambda leaf: leaf, {"impl": impl})["impl"]


def rebuilt_by_torch(impl):
    return torch_pytree.tree_map(lambda leaf: leaf, [impl])[0]


@each_row(
    "again",
    [
        mapped,
        rebuilt_by_torch,
        copy.copy,
        copy.deepcopy,
        lambda impl: impl._replace(init=impl.init),
        lambda impl: type(impl)._make(impl),
        lambda impl: type(impl)(*impl),
    ],
)
def test_fields_make_the_same_chain_again(again):
    impl = adam(0.1, weight_decay=0.5)
    made = again(impl)
    assert type(made) is type(impl)
    assert [type(link) for link in made.transformations] == [type(link) for link in impl.transformations]
    assert made.fused_step.in_place.options == impl.fused_step.in_place.options
    ours, theirs = (torch.ones(2, requires_grad=True) for _ in range(2))
    for w, one in ((ours, made), (theirs, impl)):
        w.grad = torch.full_like(w, 2.0)
        Optimizer([w], one).step()
    assert torch.equal(ours, theirs)


def test_other_fields_are_one_link():
    """A function that somebody put in the place of ``update`` is what steps call, behind no fused step."""
    impl = adam(0.1)
    seen = []

    def watched(updates, state, *, params=None, inplace=True):
        seen.append(updates)
        return impl.update(updates, state, params=params, inplace=inplace)

    replaced = impl._replace(update=watched)
    assert replaced.transformations == (replaced,)
    w = torch.ones(2, requires_grad=True)
    FuncOptimizer(replaced, inplace=True).step(w.sum(), (w,))
    assert len(seen) == 1
    assert torch.equal(w, torch.full((2,), 0.9))
    factor = scale(2.0)._replace(update=watched)
    assert factor.constant_factor is None
    assert torch_pytree.tree_map(lambda leaf: 0, impl) == (0, 0)


def step(impl, w, x):
    moved, _ = impl.update([2 * (w - x)], impl.init([w]), params=[w], inplace=False)
    return (w + moved[0]).square().sum()


def test_an_optimizer_is_an_argument_of_torch_s_functions():
    w, xs = torch.tensor([1.0, -2.0]), torch.tensor([[0.5, 1.0], [2.0, 0.0]])
    for impl in (sgd(0.1, momentum=0.9), chain(clip_grad_norm(1.0), adam(0.1))):
        each = [step(impl, w, x) for x in xs]
        torch.testing.assert_close(
            torch.func.vmap(step, in_dims=(None, None, 0))(impl, w, xs), torch.stack(each)
        )
        leaf = w.clone().requires_grad_()
        (want,) = torch.autograd.grad(step(impl, leaf, xs[0]), leaf)
        torch.testing.assert_close(torch.func.grad(step, argnums=1)(impl, w, xs[0]), want)
        for reentrant in (False, True):
            value = checkpoint(step, impl, leaf, xs[0], use_reentrant=reentrant)
            value.backward()
            torch.testing.assert_close(leaf.grad, want)
            leaf.grad = None


def test_an_optimizer_is_an_argument_of_a_call(world):
    """One that clips and one whose rate is learned, with the gradients of one process."""

    def total(impl, w, xs):
        return sum(step(impl, w, x) for x in xs)

    def body():
        spread = todist.parallelize(todist.dim_partitioner(0), todist.sum_reducer)(total)
        xs = torch.tensor([[0.5, 1.0], [2.0, 0.0]])
        for clip in (False, True):
            w, lr = torch.tensor([1.0, -2.0], requires_grad=True), torch.tensor(0.1, requires_grad=True)
            impl = chain(clip_grad_norm(1.0), adam(lr)) if clip else sgd(lr, momentum=0.9)
            want, got = total(impl, w, xs), spread(impl, todist.replicated(w), xs)
            torch.testing.assert_close(got, want)
            each = [torch.autograd.grad(value, (w, lr)) for value in (want, got)]
            torch.testing.assert_close(each[1], each[0])

    world(2).on_zero(body)
