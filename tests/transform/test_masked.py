import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist import pytree
from torchopt_dist.optim import (
    FuncOptimizer,
    MetaOptimizer,
    Optimizer,
    adadelta,
    adagrad,
    adam,
    adamax,
    adamw,
    adan,
    radam,
    rmsprop,
    sgd,
)
from torchopt_dist.transform.add_decayed_weights import add_decayed_weights
from torchopt_dist.transform.base import chain
from torchopt_dist.transform.clip import clip_grad_norm
from torchopt_dist.transform.masked import MaskedState, masked
from torchopt_dist.transform.scale import scale, scale_by_schedule
from torchopt_dist.transform.trace import trace

PARAMS = {"w": torch.full((1, 2), 4.0), "b": torch.full((2,), 4.0)}
GRADS = {"w": torch.ones(1, 2), "b": torch.ones(2)}


def matrices(params):
    return pytree.tree_map(lambda leaf: leaf.ndim > 1, params)


def halved(step):
    return 0.5**step


IMPL = chain(masked(trace(0.9), matrices), scale(-0.1))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def by_torch(net):
    """The same in torch: momentum for matrices only."""
    sets = [[p for p in net.parameters() if (p.ndim > 1) is wide] for wide in (True, False)]
    return torch.optim.SGD(
        [{"params": sets[0], "momentum": 0.9}, {"params": sets[1], "momentum": 0.0}], lr=0.1
    )


def loss_of(net, seed):
    data = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    return net(data).square().mean()


def train(net, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        loss_of(net, seed).backward()
        optimizer.step()


def assert_same(one, two):
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q)


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@each_row("mask", [{"w": True, "b": False}, matrices], ids=["tree", "function"])
def test_leaves_that_are_not_chosen_pass_through_and_have_no_state(mask):
    impl = masked(trace(0.5), mask)
    state = impl.init(PARAMS)
    assert isinstance(state, MaskedState)
    assert state.inner_state.momentum_buffer["b"] is None
    for expected in (1.0, 1.5):
        updates, state = impl.update(GRADS, state, params=PARAMS)
        assert updates["b"] is GRADS["b"]
        assert torch.equal(updates["w"], torch.full((1, 2), expected))
    assert state.inner_state.momentum_buffer["b"] is None


@each_row("choice", [True, False])
def test_one_answer_for_all(choice):
    impl = masked(sgd(0.5, momentum=0.9, weight_decay=0.1), {"w": choice, "b": choice})
    updates, _ = impl.update(GRADS, impl.init(PARAMS), params=PARAMS)
    expected = -0.5 * 1.4 if choice else 1.0
    torch.testing.assert_close(updates["w"], torch.full((1, 2), expected))


def test_no_mask_is_the_transformation_itself():
    inner = trace(0.5)
    assert masked(inner) is inner


@each_row(
    ("inner", "expected"),
    [
        (scale(3.0), 3.0),
        (scale_by_schedule(halved), 1.0),
        (add_decayed_weights(0.5), 3.0),
        (add_decayed_weights(0.5, matrices), 3.0),
        (clip_grad_norm(0.5), 0.5 / 2**0.5),  # the norm of `w` alone
        (trace(0.9, dampening=0.5), 1.0),
        (chain(trace(0.9), scale(2.0)), 2.0),
        (masked(scale(3.0), {"w": True, "b": True}), 3.0),
    ],
    ids=["scale", "schedule", "decay", "masked decay", "clip", "trace", "chain", "masked"],
)
def test_every_link_copes_with_leaves_it_does_not_see(inner, expected):
    impl = masked(inner, matrices)
    updates, _ = impl.update(GRADS, impl.init(PARAMS), params=PARAMS)
    torch.testing.assert_close(updates["w"], torch.full((1, 2), expected))
    assert updates["b"] is GRADS["b"]


def test_none_stays_none_and_keeps_its_state():
    impl = masked(trace(0.5), matrices)
    _, state = impl.update(GRADS, impl.init(PARAMS), params=PARAMS)
    updates, after = impl.update({"w": None, "b": None}, state, params=PARAMS)
    assert updates == {"w": None, "b": None}
    assert after.inner_state.momentum_buffer["w"] is state.inner_state.momentum_buffer["w"]


def test_in_place_reaches_the_inner_state():
    impl = masked(trace(0.5), matrices)
    state = impl.init(PARAMS)
    with torch.no_grad():
        impl.update(GRADS, state, params=PARAMS, inplace=False)
        assert torch.equal(state.inner_state.momentum_buffer["w"], torch.zeros(1, 2))
        impl.update(GRADS, state, params=PARAMS, inplace=True)
    assert torch.equal(state.inner_state.momentum_buffer["w"], torch.ones(1, 2))
    assert torch.equal(GRADS["w"], torch.ones(1, 2))


def test_in_optimizer_as_torch_with_two_groups_also_resumed():
    net, twin = make(), make()
    optimizer, theirs = Optimizer(net.parameters(), IMPL), by_torch(twin)
    train(net, optimizer, range(3))
    saved = through_file({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
    kept = ["momentum_buffer" in optimizer.state[p] for p in net.parameters()]
    assert kept == [p.ndim > 1 for p in net.parameters()]

    resumed = make()
    resumed.load_state_dict(saved["net"])
    optimizer = Optimizer(resumed.parameters(), IMPL)
    optimizer.load_state_dict(saved["optimizer"])
    train(resumed, optimizer, range(3, 6))
    train(twin, theirs, range(6))
    assert_same(resumed.parameters(), twin.parameters())


@each_row(
    "constructor",
    [sgd, adam, adamw, adamax, radam, rmsprop, adagrad, adadelta, adan],
)
def test_a_masked_optimizer_is_one_that_has_only_those_parameters(constructor):
    torch.manual_seed(0)
    net, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(net.state_dict())
    ours = Optimizer(net.parameters(), masked(constructor(0.1), matrices))
    theirs = Optimizer([twin.weight], constructor(0.1))
    for _ in range(3):
        bias = net.bias.detach().clone()
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            p.grad = q.grad = torch.sin(torch.arange(p.numel()) + p.detach().flatten()).reshape(p.shape)
        ours.step()
        theirs.step()
        assert torch.equal(net.bias, bias + net.bias.grad)
    torch.testing.assert_close(net.weight, twin.weight)
    assert set(map(type, ours.state[net.bias].values())) <= {type(None)}


def test_in_optimizer_a_tree_of_bools_is_a_list():
    params = [torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)]
    optimizer = Optimizer(params, chain(masked(scale(0.0), [True, False]), scale(-0.25)))
    for p in params:
        p.grad = torch.ones(1)
    optimizer.step()
    assert [p.item() for p in params] == [1.0, 0.75]


def test_in_meta_optimizer_also_resumed():
    net, twin = make(), make()
    optimizer = MetaOptimizer(net, IMPL)
    for seed in range(4):
        if seed == 2:
            saved = through_file(optimizer.state_dict())
            optimizer = MetaOptimizer(net, IMPL)
            optimizer.load_state_dict(saved)
        optimizer.step(loss_of(net, seed))
    train(twin, by_torch(twin), range(4))
    assert_same([p for _, p in net.named_parameters()], twin.parameters())


def test_in_functional_optimizer_also_resumed():
    twin = make()
    params = dict(make().named_parameters())
    optimizer = FuncOptimizer(IMPL)
    for seed in range(4):
        if seed == 2:
            saved = through_file(optimizer.state_dict())
            optimizer = FuncOptimizer(IMPL)
            optimizer.load_state_dict(saved)
        loss = loss_of(lambda x, p=params: torch.func.functional_call(twin, p, (x,)), seed)
        params = optimizer.step(loss, params)
    train(twin, by_torch(twin), range(4))
    assert_same(params.values(), twin.parameters())


def test_meta_gradient():
    factor = torch.tensor(3.0, requires_grad=True)
    w, b = (torch.tensor([2.0], requires_grad=True) for _ in range(2))
    optimizer = FuncOptimizer(chain(masked(scale(factor), {"w": True, "b": False}), scale(-0.5)))
    moved = optimizer.step((w**2 + b**2).sum(), {"w": w, "b": b})
    slopes = torch.autograd.grad(moved["w"].sum() + moved["b"].sum(), (factor, w, b))
    assert [slope.item() for slope in slopes] == [-2.0, 1 - 3.0, 1 - 1.0]


def test_func_grad_and_vmap():
    impl = masked(trace(0.5), (True, False))

    def two_steps(g):
        state = impl.init((g, g))
        updates, state = impl.update((g, g), state)
        updates, state = impl.update((g, g), state)
        return (updates[0] * updates[1]).sum()  # 1.5 g²

    g = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(vmap(two_steps)(g), 1.5 * g.square().sum(1))
    assert torch.equal(vmap(grad(two_steps))(g), 3 * g)


def test_compiles_into_one_graph():
    impl = masked(trace(0.5), matrices)
    compiled = torch.compile(impl.update, fullgraph=True, backend="eager")
    updates, _ = compiled(GRADS, impl.init(PARAMS), params=PARAMS)
    assert torch.equal(updates["w"], GRADS["w"])


@each_row("again", [copy.deepcopy, lambda impl: pickle.loads(pickle.dumps(impl))])
def test_copies_and_pickles(again):
    impl = again(masked(scale(3.0), matrices))
    updates, _ = impl.update(GRADS, impl.init(PARAMS), params=PARAMS)
    assert [updates["w"][0, 0].item(), updates["b"][0].item()] == [3.0, 1.0]


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="`inner` must be a GradientTransformation, got function"):
        masked(trace, matrices)
    with pytest.raises(ValueError, match="`mask` must have the structure of `params`"):
        masked(trace(0.9), [True, False]).init(PARAMS)
    with pytest.raises(TypeError, match="`mask` must have bools for leaves, got int"):
        masked(trace(0.9), {"w": 1, "b": 0}).init(PARAMS)
    with pytest.raises(TypeError, match="`mask` must have bools for leaves, got Tensor"):
        masked(trace(0.9), lambda params: params).init(PARAMS)
    impl = masked(trace(0.9), matrices)
    state = impl.init(PARAMS)
    with pytest.raises(ValueError, match="`params` must be given to `update`: the mask is a function"):
        impl.update(GRADS, state)
    with pytest.raises(ValueError, match="`params` must have the structure of `updates`"):
        impl.update(GRADS, state, params=[torch.ones(1)])
    with pytest.raises(TypeError, match="`state` must be a MaskedState, got TraceState"):
        impl.update(GRADS, state.inner_state, params=PARAMS)


@each_row("patterns", ["*.weight", ["0.weight", "2.wei*"], ("*.weight", "0.weight")])
def test_a_pattern_of_names_is_the_tree_of_bools(patterns):
    net = make()
    moved = []
    for mask in (patterns, {name: name.endswith("weight") for name, _ in net.named_parameters()}):
        adapted = todist.module_clone(net)
        optimizer = MetaOptimizer(adapted, adamw(lr=0.1, weight_decay=0.5, mask=mask))
        optimizer.step(loss_of(adapted, 1))
        optimizer.step(loss_of(adapted, 2))
        moved.append(list(adapted.parameters()))
    assert_same(*moved)


def test_patterns_in_a_nested_tree():
    tree = {"a": [torch.ones(1), torch.ones(1)], "b": (torch.ones(1), {"c": torch.ones(1)})}
    impl = masked(scale(3.0), ["a.1", "b.*.c"])
    updates, _ = impl.update(tree, impl.init(tree))
    assert [leaf.item() for leaf in pytree.flatten(updates)[0]] == [1, 3, 1, 3]


def test_patterns_that_match_nothing_are_named():
    with pytest.raises(
        ValueError, match=r"`mask` must have patterns that match .* got 'v\*'; the names are b, w"
    ):
        masked(scale(1.0), ["w", "v*"]).init(PARAMS)
    with pytest.raises(ValueError, match="a function for a list of parameters, which has no names, got 'w'"):
        Optimizer(make().parameters(), masked(adamw(lr=0.1), "w"))
