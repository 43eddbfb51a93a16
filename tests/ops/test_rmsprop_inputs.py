"""What RMSprop's ops are given → float32's numbers in half precision; errors for what does not go together."""

from __future__ import annotations

import contextlib
import pickle

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.ops import formulas
from tests.ops.cases import needs_kernels
from tests.rows import each_row
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops._rmsprop import rmsprop, rmsprop_

FUSED = [False, pytest.param(None, marks=needs_kernels)]
ALL = [*FUSED, pytest.param(True, marks=needs_kernels)]
NUMBERS = {"alpha": 0.9, "eps": 1e-2}
STEP = {**NUMBERS, "lr": 0.1, "nesterov": False, "weight_decay": 0.0, "maximize": False}


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("value", [1e-4, 4e-3, 2e-2])
def test_half_precision_is_float32_rounded(fused, dtype, create_graph, centered, value):
    """In float16 the square of 1e-4 is 0; neither the step nor its derivative may be that of an average of 0."""
    found = []
    for kind in (dtype, torch.float32):
        given = torch.tensor([value, -value], dtype=dtype).to(kind)
        leaves = [given.clone(), torch.zeros(2, dtype=kind), given * 0.125, given * 2, given + 1]
        g, v, a, b, p = (x.requires_grad_() for x in leaves)
        made = rmsprop(
            [g], [v], [a] if centered else None, [b], [p], **NUMBERS, momentum=0.5, lr=0.1, fused=fused
        )
        leaves = [g, a, b, p] if centered else [g, b, p]
        slopes = torch.autograd.grad(made[0][0].sum(), leaves, create_graph=create_graph)
        assert {x.dtype for x in (*slopes, *(column[0] for column in made))} == {kind}
        found.append([x.float() for x in (*slopes, *(column[0] for column in made))])
        if create_graph:
            (bend,) = torch.autograd.grad((slopes[0] / 100).pow(2).sum(), g)
            assert bend.dtype == kind
            found[-1].append(bend.float())
    for half, single in zip(*found, strict=True):
        limit = torch.finfo(dtype).max
        torch.testing.assert_close(half, single.clamp(-limit, limit).to(dtype).float(), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_variance_is_at_least_zero(fused, loop, dtype, momentum):
    """Averages as rounding leaves them: variances below 0, of 0, above, and no number; derivatives of order 2, too."""
    values = [0.5] * 4, [0.125, 0.25, 1.0, float("nan")], [0.5, 0.5, 0.25, 0.5]
    g, v, a = (torch.tensor(x, dtype=dtype, requires_grad=True) for x in values)
    sums = [torch.zeros(4, dtype=dtype)] if momentum else None
    numbers = {**NUMBERS, "alpha": 0.5}  # the variance of 0 is then exact
    with foreach.in_loops() if loop else contextlib.nullcontext():
        made = rmsprop([g], [v], [a], sums, **numbers, momentum=momentum, fused=fused)[0][0]
        slopes = torch.autograd.grad(made.sum(), (g, v, a), create_graph=True)
        bends = torch.autograd.grad(sum(x.sum() for x in slopes), (g, v, a))
    assert made[:2].tolist() == pytest.approx([50, 50])
    assert slopes[0][:2].tolist() == pytest.approx([100, 100])
    assert not any(x[:2].any() for x in (*slopes[1:], *bends))
    leaves = [x.detach().double().requires_grad_() for x in (g, v, a)]
    want = formulas.rmsprop(*leaves, None, None, 1.0, 0.5, 1e-2, 0.0, False)[
        0
    ]  # a sum that begins is the direction
    want_slopes = torch.autograd.grad(want.sum(), leaves, create_graph=True)
    want_bends = torch.autograd.grad(sum(x.sum() for x in want_slopes), leaves)
    tolerance = {"rtol": 1e-9 if dtype == torch.float64 else 2e-2, "atol": 0.0, "equal_nan": True}
    pairs = zip((made, *slopes, *bends), (want, *want_slopes, *want_bends), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got.double(), expected, **tolerance)
    assert want_bends[0][2] != 0
    p, held = torch.ones(4, dtype=dtype), [x.detach().clone() for x in (v, a)]
    step = {**STEP, "alpha": 0.5, "momentum": momentum, "fused": fused}
    with foreach.in_loops() if loop else contextlib.nullcontext():
        rmsprop_([p], [g.detach()], [held[0]], [held[1]], sums or (), **step)
    torch.testing.assert_close(p.double(), 1 - 0.1 * want.detach(), **{**tolerance, "atol": 1e-2})


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_may_be_overwritten(fused, dtype):
    """And is computed in float32, as without a graph, too: in float16 the square of 1e-4 is 0."""
    values = [1e-4, -1e-4, 0.5, 0.25], [1.0] * 4, [0.0] * 4, [0.5, 0.0, 1.0, 0.25]
    g, v, a, b = (torch.tensor(x, dtype=dtype) for x in values)
    numbers = {"alpha": 0.9, "eps": 1e-6, "momentum": 0.5, "fused": fused}
    want = rmsprop([g], [v - 1], [a], [b], **numbers)
    single = rmsprop([g.float()], [v.float() - 1], [a.float()], [b.float()], **numbers)
    v -= 1
    made = rmsprop([g], [v], [a], [b], **numbers, inplace=True)
    for got, column, exact in zip(made, want, single, strict=True):
        assert torch.equal(got[0], column[0])
        torch.testing.assert_close(got[0], exact[0].to(dtype))
    if fused is False:
        assert [column[0] is x for column, x in zip(made[1:], (v, a, b), strict=True)] == [True] * 3
    assert made[0][0].data_ptr() != made[3][0].data_ptr()


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("name", ["grads", "square_avgs", "grad_avgs"])
def test_an_input_that_is_changed_before_the_backward(fused, name):
    given = {key: torch.rand(3) + 1 for key in ("grads", "square_avgs", "grad_avgs", "momentum_buffers")}
    given["grads"].requires_grad_()
    made = rmsprop(**{key: [x * 1] for key, x in given.items()}, **NUMBERS, momentum=0.5, fused=fused)
    made[0][0].sum().backward()
    columns = {key: [x * 1] for key, x in given.items()}
    made = rmsprop(**columns, **NUMBERS, momentum=0.5, fused=fused)
    columns[name][0].detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made[0][0].sum().backward()


LENGTHS = [
    ({"square_avgs": 1}, "`square_avgs` must have the length of `%s`, 2; got 1"),
    ({"square_avgs": 1, "grad_avgs": 3}, "`square_avgs` must have the length of `%s`, 2; got 1"),
    ({"grad_avgs": 3}, "`grad_avgs` must have the length of `%s`, 2; got 3"),
    ({"momentum_buffers": 1}, "`momentum_buffers` must have the length of `%s`, 2; got 1"),
    ({"momentum_buffers": None}, "`momentum_buffers` must be given: `momentum` is 0.5"),
]


@pytest.mark.parametrize("fused", ALL)
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("changes", "said"), [*LENGTHS, ({"params": 1}, "`params` must have the length of")])
def test_lists_of_different_length(fused, graph, changes, said):
    counts = {"grads": 2, "square_avgs": 2, "grad_avgs": 2, "momentum_buffers": 2, "params": 2, **changes}
    given = {
        name: count and [torch.rand(3).requires_grad_(graph) for _ in range(count)]
        for name, count in counts.items()
    }
    with pytest.raises(ValueError, match=said.replace("%s", "grads")):
        rmsprop(**given, **NUMBERS, momentum=0.5, lr=0.1, fused=fused)


@pytest.mark.parametrize("fused", ALL)
@pytest.mark.parametrize(("changes", "said"), [*LENGTHS, ({"grads": 1}, "`grads` must have the length of")])
def test_a_step_of_lists_of_different_length_changes_nothing(fused, changes, said):
    counts = {"params": 2, "grads": 2, "square_avgs": 2, "grad_avgs": 2, "momentum_buffers": 2, **changes}
    given = {name: [torch.ones(3) for _ in range(count or 0)] for name, count in counts.items()}
    with pytest.raises(ValueError, match=said.replace("%s", "params")):
        rmsprop_(*given.values(), **STEP, momentum=0.5, fused=fused)
    assert all((x == 1).all() for column in given.values() for x in column)


@pytest.mark.parametrize("fused", ALL)
def test_running_sums_without_a_momentum(fused):
    one = [torch.ones(2)]
    with pytest.raises(ValueError, match="`momentum_buffers` must be left out where `momentum` is 0"):
        rmsprop(one, one, momentum_buffers=one, **NUMBERS, fused=fused)
    with pytest.raises(ValueError, match="`momentum_buffers` must be left out where `momentum` is 0"):
        rmsprop_(one, one, one, momentum_buffers=one, **STEP, momentum=0.0, fused=fused)


@pytest.mark.parametrize("fused", ALL)
@pytest.mark.parametrize("wrong", [torch.ones(1), torch.ones(3).long(), torch.ones(3).to_sparse(), None])
@pytest.mark.parametrize("name", ["grads", "square_avgs", "grad_avgs"])
def test_tensors_that_do_not_go_together(fused, wrong, name):
    given = {key: [torch.ones(3), torch.ones(3)] for key in ("params", "grads", "square_avgs", "grad_avgs")}
    given[name][1] = wrong
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        rmsprop_(**given, **STEP, momentum=0.0, fused=fused)
    del given["params"]
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        rmsprop(**given, **NUMBERS, fused=fused)
    assert all(x is wrong or (x == 1).all() for column in given.values() for x in column)


@pytest.mark.parametrize("fused", ALL)
def test_no_tensors(fused):
    assert rmsprop([], [], **NUMBERS, fused=fused) == ([], [])
    assert rmsprop([], [], [], [], [], **NUMBERS, momentum=0.5, fused=fused) == ([], [], [], [])
    rmsprop_([], [], [], **STEP, momentum=0.0, fused=fused)
    rmsprop_([], [], [], **STEP, momentum=0.5, fused=fused)


@pytest.mark.parametrize("fused", FUSED)
def test_in_place_equals_the_recorded_step_and_records_nothing(fused):
    torch.manual_seed(0)
    p, g, v, a, b = ([torch.rand(5), torch.rand(2, 3)] for _ in range(5))
    v = [x + 1 for x in v]
    want = rmsprop(g, v, a, b, p, **NUMBERS, momentum=0.5, nesterov=True, lr=0.1, fused=fused)
    p = [x.requires_grad_() for x in p]
    rmsprop_(p, g, v, a, b, **{**STEP, "nesterov": True}, momentum=0.5, fused=fused)
    for column, expected in zip((p, v, a, b), want, strict=True):
        torch.testing.assert_close([x.detach() for x in column], expected)
    assert all(x.is_leaf for x in p)


def test_hyper_parameters_that_are_tensors_have_derivatives():
    learned = {"alpha": 0.9, "eps": 0.05, "momentum": 0.6}
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in learned.values()]
    g, v, b = (torch.rand(3, dtype=torch.float64) + 1 for _ in range(3))

    def compute(*leaves):
        return rmsprop([g], [v], None, [b], **dict(zip(learned, leaves, strict=True)), nesterov=True)[0][0]

    assert torch.autograd.gradcheck(compute, leaves)
    assert torch.autograd.gradgradcheck(compute, leaves)


@each_row("centered", [False, True])
@each_row("momentum", [0.0, 0.5])
def test_an_optimizer_of_the_chain_goes_on_as_one_node(centered, momentum):
    """Saved by one, loaded by the other, with a frozen parameter, an unused one and a complex one."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Parameter(torch.tensor([1.0, -2.0]))
            self.unused = nn.Parameter(torch.ones(2))
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
            self.wave = nn.Parameter(torch.tensor([1 + 2j]))

        def forward(self):
            return self.used.pow(2).sum() + (self.wave * self.wave.conj()).real.sum()

    ends = []
    for rates in ((0.1, torch.tensor(0.1)), (torch.tensor(0.1), 0.1)):  # a tensor: the chain
        net = Net()
        options = {"momentum": momentum, "centered": centered}
        first, second = (todist.MetaRMSprop(net, lr=lr, **options) for lr in rates)
        first.step(net())
        saved = pickle.loads(pickle.dumps(todist.pytree.map_tensors(torch.detach, first.state_dict())))
        second.load_state_dict(saved)
        second.step(net())
        impl = pickle.loads(pickle.dumps(second.impl))
        assert todist.pytree.flatten(impl.init(dict(net.named_parameters())))[1] is not None
        ends.append([*(x.detach() for x in dict(net.named_parameters()).values())])
    for got, want in zip(*ends, strict=True):
        torch.testing.assert_close(got, want)
