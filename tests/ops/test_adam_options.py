"""Adam's functional kernels, going up and with weight decay → the textbook's formula, and its autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ops.cases import DTYPES, assert_near, kernels, needs_kernels, threads, wide
from tests.rows import each_row
from torchopt_dist.ops._adam import adam

pytestmark = needs_kernels

SHAPES = [(37,), (4, 9), (), (2, 3, 5)]
STEPS = [1, 2, 50, 1000]
"""How many steps each tensor has made: none is at the same count as another."""
B1, B2, EPS, EPS_ROOT, FACTOR = 0.9, 0.99, 1e-3, 1e-2, -0.3
LISTS = ("grads", "exp_avgs", "exp_avg_sqs", "params")
FLOWS = ("moved_grads", "exp_avg_grads", "exp_avg_sq_grads")
options = each_row("maximize", [False, True])
decays = each_row("weight_decay", [0.0, 0.2, -0.2])
kepts = each_row("kept", [1.0, 0.7])


def corrections() -> Tensor:
    rows = [[1 - b**t for t in STEPS] for b in (B1, B2)]
    return torch.tensor(rows, dtype=torch.float64).t()


def numbers(kept: float, weight_decay: float, maximize: bool) -> tuple[Any, ...]:
    return FACTOR, kept, B1, B2, EPS, EPS_ROOT, weight_decay, maximize


def random(dtype: torch.dtype = torch.float64, positive: bool = False) -> list[Tensor]:
    made = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    return [(x.square() + 0.5 if positive else x).to(dtype) for x in made]


def arguments(dtype: torch.dtype = torch.float64) -> dict[str, list[Tensor]]:
    torch.manual_seed(0)
    return {name: random(dtype, positive=name == "exp_avg_sqs") for name in LISTS}


def flows(dtype: torch.dtype = torch.float64) -> dict[str, list[Tensor]]:
    torch.manual_seed(1)
    return {name: random(dtype) for name in FLOWS}


def textbook(
    grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, param: Tensor, step: int, *given: Any
) -> tuple[Tensor, ...]:
    """Kingma and Ba 2015, algorithm 1, of the gradient that the options make."""
    factor, kept, b1, b2, eps, eps_root, weight_decay, maximize = given
    if maximize:
        grad = grad.neg()
    if weight_decay != 0:
        grad = grad.add(param.mul(weight_decay))
    exp_avg = b1 * exp_avg + (1 - b1) * grad
    exp_avg_sq = b2 * exp_avg_sq + (1 - b2) * grad.square()
    unbiased, unbiased_sq = exp_avg / (1 - b1**step), exp_avg_sq / (1 - b2**step)
    return kept * param + factor * unbiased / ((unbiased_sq + eps_root).sqrt() + eps), exp_avg, exp_avg_sq


def columns(flat: list[Tensor], n: int = len(SHAPES)) -> list[list[Tensor]]:
    assert len(flat) % n == 0
    return [flat[i : i + n] for i in range(0, len(flat), n)]


def forward(lists: dict[str, list[Tensor]], *given: Any) -> list[list[Tensor]]:
    return columns(kernels.adam(*lists.values(), corrections(), *given))


def backward(
    outer: dict[str, list[Tensor]], lists: dict[str, list[Tensor]], *given: Any
) -> list[list[Tensor]]:
    grads, exp_avgs, exp_avg_sqs, params = lists.values()
    inner = (grads, exp_avgs, exp_avg_sqs, params if given[-2] != 0 else [])
    return columns(kernels.adam_backward(*outer.values(), *inner, corrections(), *given))


def expected_backward(
    outer: dict[str, list[Tensor]], lists: dict[str, list[Tensor]], *given: Any
) -> list[list[Tensor]]:
    """What autograd makes of the formula, in float64, the parameters' column included."""
    found = []
    for i, step in enumerate(STEPS):
        leaves = [tensors[i].double().requires_grad_() for tensors in lists.values()]
        results = textbook(*leaves, step, *given)
        pairs = [(x, outer[name][i].double()) for x, name in zip(results, FLOWS, strict=True) if outer[name]]
        found.append(torch.autograd.grad([x for x, _ in pairs], leaves, [dx for _, dx in pairs]))
    return [list(column) for column in zip(*found, strict=True)]


@decays
@options
def test_the_formula_is_the_textbooks(maximize, weight_decay):
    lists, given = arguments(), numbers(1.0, weight_decay, maximize)
    options: dict[str, Any] = {"b1": B1, "b2": B2, "eps": EPS, "eps_root": EPS_ROOT, "lr": -FACTOR}
    grads, exp_avgs, exp_avg_sqs, params = lists.values()
    made = [step - 1 for step in STEPS]
    got = adam(
        grads,
        exp_avgs,
        exp_avg_sqs,
        made,
        params,
        **options,
        weight_decay=weight_decay,
        maximize=maximize,
        fused=False,
    )
    rows = zip(*lists.values(), STEPS, strict=True)
    expected = [list(column) for column in zip(*(textbook(*row, *given) for row in rows), strict=True)]
    assert_near([list(column) for column in got[:3]], expected)


@each_row("dtype", DTYPES)
@kepts
@decays
@options
def test_forward_is_the_textbooks_formula(maximize, weight_decay, kept, dtype):
    lists, given = arguments(dtype), numbers(kept, weight_decay, maximize)
    before = {name: [x.clone() for x in tensors] for name, tensors in lists.items()}
    got = forward(lists, *given)
    rows = zip(*map(wide, lists.values()), STEPS, strict=True)
    expected = [list(column) for column in zip(*(textbook(*row, *given) for row in rows), strict=True)]
    assert {x.dtype for column in got for x in column} == {dtype}
    assert_near(got, expected)
    for name, tensors in lists.items():
        assert all(torch.equal(*pair) for pair in zip(tensors, before[name], strict=True)), name
    if weight_decay == 0:  # without parameters, only the direction
        bare = forward({**lists, "params": []}, *given)
        assert_near(
            bare[:1], [[x - kept * p.double() for x, p in zip(expected[0], lists["params"], strict=True)]]
        )
        assert all(torch.equal(*pair) for k in (1, 2) for pair in zip(bare[k], got[k], strict=True))


@each_row("dtype", DTYPES)
@kepts
@decays
@options
def test_backward_is_its_autograd(maximize, weight_decay, kept, dtype):
    lists, outer, given = arguments(dtype), flows(dtype), numbers(kept, weight_decay, maximize)
    for absent in ((), ("exp_avg_grads",), ("exp_avg_sq_grads",), FLOWS[1:]):
        some = {name: [] if name in absent else tensors for name, tensors in outer.items()}
        got = backward(some, lists, *given)
        expected = expected_backward(some, lists, *given)
        assert {x.dtype for column in got for x in column} == {dtype}
        if weight_decay == 0:  # what is left to the caller
            assert len(got) == 3
            through = [kept * dx.double() for dx in outer["moved_grads"]]
            torch.testing.assert_close(expected.pop(), through)
        assert_near(got, expected)


@kepts
@decays
@options
def test_backward_is_the_slope_of_the_forward_kernel(maximize, weight_decay, kept):
    """The two kernels against each other along a random direction, by central differences."""
    lists, outer, given = arguments(), flows(), numbers(kept, weight_decay, maximize)
    torch.manual_seed(2)
    along = {name: random() for name in LISTS}
    if weight_decay == 0:
        along["params"] = [torch.zeros_like(x) for x in along["params"]]

    def along_the_way(h: float) -> Tensor:
        there = {
            name: [x + h * d for x, d in zip(tensors, along[name], strict=True)]
            for name, tensors in lists.items()
        }
        results = forward(there, *given)
        pairs = zip([x for c in results for x in c], [d for c in outer.values() for d in c], strict=True)
        return torch.stack([(x * d).sum() for x, d in pairs]).sum()

    slope = (along_the_way(1e-5) - along_the_way(-1e-5)) / 2e-5
    got = backward(outer, lists, *given)
    total = [
        (x * d).sum()
        for column, ds in zip(got, along.values(), strict=False)
        for x, d in zip(column, ds, strict=True)
    ]
    torch.testing.assert_close(torch.stack(total).sum(), slope, rtol=1e-7, atol=1e-7)


@each_row("dtype", [torch.float64, torch.float32])
@kepts
@decays
@options
def test_bit_for_bit_the_plain_kernels_of_that_gradient(maximize, weight_decay, kept, dtype):
    """The options only make another gradient, by one rounding an operation; all that follows is as without them."""
    lists, outer = arguments(dtype), flows(dtype)
    given, plain = numbers(kept, weight_decay, maximize), numbers(kept, 0.0, False)
    sign = -1 if maximize else 1
    made = [
        sign * g + p * weight_decay if weight_decay else sign * g
        for g, p in zip(lists["grads"], lists["params"], strict=True)
    ]
    for got, expected in zip(forward(lists, *given), forward({**lists, "grads": made}, *plain), strict=True):
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    of_made, *of_averages = backward(outer, {**lists, "grads": made}, *plain)
    expected = [[sign * x for x in of_made], *of_averages]
    if weight_decay:
        pairs = zip(outer["moved_grads"], of_made, strict=True)
        expected.append([dx * kept + x * weight_decay for dx, x in pairs])
    for column, values in zip(backward(outer, lists, *given), expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(column, values, strict=True))


@kepts
@options
def test_the_same_step_as_torch_makes_in_place(maximize, kept):
    """Coupled decay and maximizing are those of ``torch.optim.Adam``; decoupled decay is in ``kept``, as AdamW's."""
    for weight_decay, kind in ((0.2, torch.optim.Adam), ((1 - kept) / -FACTOR, torch.optim.AdamW)):
        lists = arguments()
        coupled, factor = (weight_decay, 1.0) if kind is torch.optim.Adam else (0.0, kept)
        settings = (FACTOR, factor, B1, B2, EPS, 0.0, coupled, maximize)
        got = forward(lists, *settings)
        params = [x.requires_grad_() for x in lists["params"]]
        optimizer = kind(params, -FACTOR, (B1, B2), EPS, weight_decay, maximize=maximize)
        columns = zip(params, STEPS, lists["grads"], lists["exp_avgs"], lists["exp_avg_sqs"], strict=True)
        for p, step, p.grad, exp_avg, exp_avg_sq in columns:
            state = {"step": torch.tensor(step - 1.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            optimizer.state[p].update(state)
        optimizer.step()
        want = [[p.detach() for p in params], lists["exp_avgs"], lists["exp_avg_sqs"]]
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def laid_out(x: Tensor, way: str) -> Tensor:
    """The same numbers, elsewhere in memory."""
    if way == "transposed":
        order = tuple(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)
    if way == "gaps":
        return torch.stack([torch.full_like(x, math.nan), x], -1)[..., 1]
    return torch.cat([x.new_full((1,), math.nan), x.flatten()])[1:].view(x.shape)  # past an offset


@each_row("dtype", DTYPES)
@each_row("weight_decay", [0.0, 0.2])
@each_row("way", ["transposed", "gaps", "offset"])
def test_strides_make_no_difference(way, weight_decay, dtype):
    lists, outer, given = arguments(dtype), flows(dtype), numbers(0.7, weight_decay, True)
    want = [*forward(lists, *given), *backward(outer, lists, *given)]
    names = [*lists, *outer]
    for name in [*names, "all"]:
        there = {
            key: [laid_out(x, way) for x in xs] if name in (key, "all") else xs
            for key, xs in {**lists, **outer}.items()
        }
        inner, flow = {key: there[key] for key in lists}, {key: there[key] for key in outer}
        got = [*forward(inner, *given), *backward(flow, inner, *given)]
        for column, values in zip(got, want, strict=True):
            assert all(torch.equal(*pair) for pair in zip(column, values, strict=True)), name
        like = ["exp_avgs", "exp_avgs", "exp_avg_sqs", "grads", "exp_avgs", "exp_avg_sqs", "params"]
        for column, key in zip(got, like[: len(got)], strict=True):
            strides = [torch.empty_like(x).stride() for x in there[key]]
            assert [x.stride() for x in column] == strides, (name, key)


def test_expanded_tensors_are_read_where_they_are():
    one = torch.tensor([0.5, -2.0], dtype=torch.float64)
    shape, given, row = (3, 2), numbers(0.7, 0.2, True), corrections()[:1]
    narrow, whole = one.expand(shape), one.expand(shape).clone()
    squares = whole.square()
    got = kernels.adam([narrow], [narrow], [squares], [narrow], row, *given)
    got += kernels.adam_backward(*[[narrow]] * 5, [squares], [narrow], row, *given)
    want = kernels.adam([whole], [whole], [squares], [whole], row, *given)
    want += kernels.adam_backward(*[[whole]] * 5, [squares], [whole], row, *given)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    assert all(x.is_contiguous() for x in got)


@each_row("weight_decay", [0.0, 0.2])
@options
def test_many_tensors_are_as_each_alone(maximize, weight_decay):
    """Results of over 8 MiB go past the cache, and are shared out; no element's numbers depend on either."""
    torch.manual_seed(3)
    count, given = 10, numbers(0.7, weight_decay, maximize)
    lists = [[torch.randn(90_001 + i) for i in range(count)] for _ in range(7)]
    lists[5] = [x.abs() for x in lists[5]]
    rows = torch.rand(count, 2, dtype=torch.float64) * 0.9 + 0.1

    def run(part: slice) -> list[list[Tensor]]:
        *inner, p = (tensors[part] for tensors in lists)
        made = kernels.adam(*inner[3:], p, rows[part], *given)
        made += kernels.adam_backward(*inner, p if weight_decay else [], rows[part], *given)
        return columns(made, len(p))

    want = [
        [x[0] for x in column] for column in zip(*(run(slice(i, i + 1)) for i in range(count)), strict=True)
    ]
    assert len(want) == (7 if weight_decay else 6)
    for workers in (1, 2):
        with threads(workers):
            for column, values in zip(run(slice(None)), want, strict=True):
                assert all(torch.equal(*pair) for pair in zip(column, values, strict=True))


@each_row("weight_decay", [0.0, 0.2])
def test_nothing_to_do(weight_decay):
    given, none = numbers(0.7, weight_decay, True), torch.empty(0, 2, dtype=torch.float64)
    assert kernels.adam([], [], [], [], none, *given) == []
    assert kernels.adam_backward([], [], [], [], [], [], [], none, *given) == []
    empty = [torch.empty(0, 3), torch.empty(2, 0)]
    rows = corrections()[:2]
    made = kernels.adam(empty, empty, empty, empty, rows, *given)
    assert [x.shape for x in made] == [x.shape for x in empty] * 3
    params = empty if weight_decay else []
    made = kernels.adam_backward(empty, [], [], empty, empty, empty, params, rows, *given)
    assert [x.shape for x in made] == [x.shape for x in empty] * (4 if weight_decay else 3)


@each_row("dtype", DTYPES)
def test_the_gradient_is_made_in_the_arithmetics_precision(dtype):
    """Neither the decay nor the sum is rounded to the tensors' dtype: these differ by less than float16 tells apart."""
    one, zero = torch.ones(40, dtype=dtype), torch.zeros(40, dtype=dtype)
    row, little = corrections()[:1], 2.0**-12
    for grad, maximize in ((-one, False), (one, True)):
        given = (1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1 + little, maximize)
        new_exp_avg = kernels.adam([grad], [zero], [zero], [one], row, *given)[1]
        assert torch.equal(new_exp_avg, torch.full_like(one, little))
        got = kernels.adam_backward([zero], [], [one], [grad], [zero], [zero], [one], row, *given)
        assert torch.equal(got[0], torch.full_like(one, 2 * little) * (-1 if maximize else 1))


@options
def test_no_decay_is_not_zero_times_the_parameter(maximize):
    param, one, row = torch.full((20,), math.inf), torch.ones(20), corrections()[:1]
    moved, exp_avg, exp_avg_sq = kernels.adam([one], [one], [one], [param], row, *numbers(1.0, 0.0, maximize))
    assert moved.isposinf().all()
    assert exp_avg.isfinite().all()
    assert exp_avg_sq.isfinite().all()


REFUSED = {
    "no parameters": (
        {"params": []},
        0.2,
        r"adam: `params` must have the length of `grads` where `weight_decay` is not 0, 4; got 0",
        r"adam_backward: `params` must have the length of `moved_grads`, 4; got 0",
    ),
    "too few": (
        {"params": [torch.ones(37)]},
        0.2,
        r"adam: `params` must have the length of `grads` where `weight_decay` is not 0, 4; got 1",
        r"adam_backward: `params` must have the length of `moved_grads`, 4; got 1",
    ),
    "another dtype": (
        {"params": [torch.ones(shape) for shape in SHAPES]},
        0.2,
        r"adam: `params\[0\]` must have the dtype of `grads\[0\]`, Double; got Float",
        r"adam_backward: `params\[0\]` must have the dtype of `moved_grads\[0\]`, Double; got Float",
    ),
    "another shape": (
        {"params": [torch.ones(37).double()] * 4},
        0.2,
        r"adam: `params\[1\]` must have the shape of `grads\[1\]`, \(4, 9\); got \(37\)",
        r"adam_backward: `params\[1\]` must have the shape of `moved_grads\[1\]`, \(4, 9\); got \(37\)",
    ),
    "no use for them": (
        {},
        0.0,
        None,
        r"adam_backward: `params` must be empty where `weight_decay` is 0; got 4 tensors",
    ),
}


@each_row("name", REFUSED)
def test_refusals_name_the_argument(name):
    changes, weight_decay, of_forward, of_backward = REFUSED[name]
    lists, given = {**arguments(), **changes}, numbers(1.0, weight_decay, False)
    if of_forward:
        with pytest.raises(RuntimeError, match=of_forward):
            kernels.adam(*lists.values(), corrections(), *given)
    with pytest.raises(RuntimeError, match=of_backward):
        kernels.adam_backward(*flows().values(), *lists.values(), corrections(), *given)


@each_row("weight_decay", [0.0, 0.2])
def test_what_torch_is_told_of_them_is_true(weight_decay):
    lists, outer, given = arguments(torch.float32), flows(torch.float32), numbers(0.7, weight_decay, True)
    lists = {name: [laid_out(x, "transposed") for x in xs] for name, xs in lists.items()}
    inner = {**lists, "params": lists["params"] if weight_decay else []}
    for op, tensors in (("adam", lists), ("adam_backward", {**outer, **inner})):
        kernel, args = getattr(kernels, op), (*tensors.values(), corrections(), *given)
        torch.library.opcheck(kernel.default, args, test_utils=("test_schema", "test_faketensor"))
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fakes = [[mode.from_tensor(x) for x in xs] for xs in tensors.values()]
            told = kernel(*fakes, mode.from_tensor(corrections()), *given)
        made = kernel(*args)
        assert [(x.shape, x.stride(), x.dtype) for x in told] == [
            (x.shape, x.stride(), x.dtype) for x in made
        ]
