import copy
import math
import pickle

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jacrev, vmap
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from tests.rows import each_row
from torchopt_dist.optim import FuncOptimizer, MetaOptimizer, Optimizer, adam
from torchopt_dist.transform.base import EmptyState, chain
from torchopt_dist.transform.clip import clip_grad_norm, clip_grad_value
from torchopt_dist.transform.scale import scale

ORDERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, math.inf, -1.0, -math.inf]
SMOOTH = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, math.inf, -1.0, -math.inf]


def apply(impl, *grads):
    return tuple(impl.update(list(grads), impl.init(list(grads)))[0])


def by_torch(function, grads, *args, **kwargs):
    params = [torch.zeros_like(grad, requires_grad=True) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.detach().clone()
    function(params, *args, **kwargs)
    return [param.grad for param in params]


def draw(*shapes, dtype=torch.float64, requires_grad=False):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).requires_grad_(requires_grad) for shape in shapes]


def derivatives(output, inputs):
    """The first derivative, and that of its weighted sum."""
    first = torch.autograd.grad(output, inputs, create_graph=True)
    weighted = sum((weight * part).sum().real for weight, part in enumerate(first, 1))
    return first, torch.autograd.grad(weighted, inputs)


@each_row("recorded", [False, True])
@each_row("max_norm", [0.0, 0.5, 1e3, math.inf])
@each_row("order", [*ORDERS, "inf", "-inf", 2])
def test_values_are_torchs(order, max_norm, recorded):
    grads = draw((3,), (2, 2), (), dtype=torch.float32)
    with torch.set_grad_enabled(recorded):
        got = apply(clip_grad_norm(max_norm, order), *grads)
    want = by_torch(clip_grad_norm_, grads, max_norm, order)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-7, atol=0)


@each_row("order", ORDERS)
@each_row(
    "dtypes",
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float64),
        (torch.float16, torch.float16),
        (torch.float64, torch.complex64),
    ],
)
def test_mixed_and_complex_dtypes_are_as_in_torch(dtypes, order):
    grads = [torch.tensor([3.0, -2.0]).to(dtypes[0]), torch.tensor([2.0, 1.5]).to(dtypes[1])]
    if dtypes[1].is_complex:
        grads[1] = grads[1] * (1 + 2j)
    got = apply(clip_grad_norm(0.75, order), *grads)
    sizes = [grad.abs() for grad in grads]  # torch's norm of complex gradients warns
    factor = (0.75 / (get_total_norm(sizes, order) + 1e-6)).clamp(max=1.0)
    for one, grad in zip(got, grads, strict=True):
        assert one.dtype == grad.dtype
        torch.testing.assert_close(one, grad.clone().mul_(factor), rtol=1e-7, atol=0)


@each_row("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_clips_as_in_torch_or_is_an_error(bad):
    grads = [torch.tensor([1.0, bad]), torch.tensor([2.0])]
    for one, other in zip(
        apply(clip_grad_norm(1.0), *grads), by_torch(clip_grad_norm_, grads, 1.0), strict=True
    ):
        torch.testing.assert_close(one, other, equal_nan=True)
    with pytest.raises(RuntimeError, match="non-finite"):
        apply(clip_grad_norm(1.0, error_if_nonfinite=True), *grads)
    apply(clip_grad_norm(1.0, error_if_nonfinite=True), torch.ones(2))


def test_the_anchor_a_norm_clipped_to_a_constant_has_no_derivative_along_the_gradient():
    w = torch.tensor([3.0, 4.0], dtype=torch.float64, requires_grad=True)
    (clipped,) = apply(clip_grad_norm(1.0), w)
    (slope,) = torch.autograd.grad(clipped @ (w / w.norm()).detach(), w)
    assert slope.abs().max() < 1e-6  # a norm held constant would give 1/5 of the direction


@each_row("max_norm", [0.7, 1e3], ids=["clipped", "within"])
@each_row("order", [0.0, *SMOOTH])
def test_derivatives(order, max_norm):
    grads = draw((3,), (2, 2), requires_grad=True)
    limit = torch.tensor(max_norm, dtype=torch.float64, requires_grad=True)

    def clipped(limit, *grads):
        return apply(clip_grad_norm(limit, order), *grads)

    assert gradcheck(clipped, (limit, *grads))
    assert gradgradcheck(clipped, (limit, *grads))


@each_row("order", [1.0, 2.0, 3.0, math.inf])
def test_derivatives_of_complex_gradients(order):
    grads = draw((2,), (2,), dtype=torch.complex128, requires_grad=True)

    def clipped(*grads):
        return apply(clip_grad_norm(0.5, order), *grads)

    assert gradcheck(clipped, grads)
    assert gradgradcheck(clipped, grads)


def test_derivatives_where_one_gradient_is_all_zeros():
    """The norm of both is smooth there, though that of the one is not."""
    some, zeros = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    grads = [some.requires_grad_(), zeros.requires_grad_()]

    def clipped(*grads):
        return apply(clip_grad_norm(1.0), *grads)

    assert gradcheck(clipped, grads)
    assert gradgradcheck(clipped, grads)


@each_row("dtype", [torch.float32, torch.complex64])
@each_row("max_norm", [0.0, 1.0])
@each_row("order", ORDERS)
def test_derivatives_are_finite_where_all_gradients_are_zero(order, max_norm, dtype):
    grads = [
        torch.zeros(2, dtype=dtype, requires_grad=True),
        torch.zeros((), dtype=dtype, requires_grad=True),
    ]
    limit = torch.tensor(max_norm, requires_grad=True)
    out = apply(clip_grad_norm(limit, order), *grads)
    total = sum(part.sum().real for part in out) * limit
    with torch.autograd.set_detect_anomaly(True):  # not even on the way
        first, second = derivatives(total, [limit, *grads])
    assert all(part.isfinite().all() for part in (*first, *second))
    factor = min(1.0, max_norm / 1e-6)
    assert torch.equal(first[1], torch.full_like(first[1], max_norm * factor))


@each_row("order", [0.5, 1.0, 1.5, 2.0, 3.0, math.inf])
def test_derivatives_are_finite_where_some_entries_are_zero(order):
    grads = [torch.tensor([0.0, 3.0, -4.0], requires_grad=True), torch.zeros(2, requires_grad=True)]
    first, second = derivatives(sum(part.sum() for part in apply(clip_grad_norm(1.0, order), *grads)), grads)
    assert all(part.isfinite().all() for part in (*first, *second))


def test_an_even_order_is_smooth_at_zero():
    """``1 / (x⁴ + 1)^(1/4) = 1 - x⁴/4 + …``."""
    x = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    slope = apply(clip_grad_norm(1.0, 4), x)[0][1]
    for _ in range(4):
        slope = torch.autograd.grad(slope, x, create_graph=True)[0][0]
    assert slope.item() == pytest.approx(-6.0, rel=1e-5)


def test_entries_that_share_the_largest_size_get_equal_parts():
    grads = [torch.tensor([2.0, -2.0, 1.0], requires_grad=True), torch.tensor([2.0], requires_grad=True)]
    out = apply(clip_grad_norm(1.0, "inf"), *grads)
    slopes = torch.autograd.grad(out[0][2], grads)  # 1 * g / norm
    torch.testing.assert_close(slopes[0], torch.tensor([-1 / 12, 1 / 12, 1 / 2]), rtol=1e-5, atol=0)
    torch.testing.assert_close(slopes[1], torch.tensor([-1 / 12]), rtol=1e-5, atol=0)


@each_row("size", [1e-4, 1.0, 1e18])
def test_derivatives_neither_overflow_nor_vanish(size):
    w = torch.tensor([3.0, 4.0]).mul(size).requires_grad_()
    (clipped,) = apply(clip_grad_norm(size), w)
    (slope,) = torch.autograd.grad(clipped[0], w)
    want = torch.tensor([0.64, -0.48]) / 5  # of w / |w|
    torch.testing.assert_close(slope, want, rtol=1e-2, atol=0)


def test_half_precision_has_derivatives_to_its_precision():
    w = torch.tensor([300.0, 400.0], dtype=torch.float16, requires_grad=True)
    (clipped,) = apply(clip_grad_norm(100.0), w)
    (slope,) = torch.autograd.grad(clipped[0], w)
    want = torch.tensor([0.64, -0.48], dtype=torch.float16) / 5
    torch.testing.assert_close(slope, want, rtol=2e-2, atol=1e-3)


@each_row(
    ("dtype", "order"),
    [
        (torch.bfloat16, 1.0),  # in float16 this norm is above the largest number, in torch too
        (torch.bfloat16, 2.0),
        (torch.bfloat16, math.inf),
        (torch.float16, 2.0),
        (torch.float16, math.inf),
    ],
)
def test_many_entries_in_half_precision(dtype, order):
    w = torch.ones(70_000, dtype=dtype, requires_grad=True)
    (clipped,) = apply(clip_grad_norm(0.5, order), w)
    assert torch.equal(clipped, by_torch(clip_grad_norm_, [w], 0.5, order)[0])
    (slope,) = torch.autograd.grad(clipped[0], w)
    assert slope[0] > 0
    assert slope.isfinite().all()


@each_row("order", [2.0, math.inf])
def test_a_limit_of_infinity_changes_nothing(order):
    (w,) = draw((3,), requires_grad=True)
    (same,) = apply(clip_grad_norm(math.inf, order), w)
    assert torch.equal(same, w)
    assert torch.equal(torch.autograd.grad(same[0], w)[0], torch.eye(3, dtype=w.dtype)[0])


def test_the_greatest_numbers_are_clipped_by_the_largest_entry_as_in_torch():
    w = torch.full((4,), 3e38, requires_grad=True)
    assert torch.equal(apply(clip_grad_norm(1.0, "inf"), w)[0], by_torch(clip_grad_norm_, [w], 1.0, "inf")[0])


def test_none_and_empty_gradients_are_left_out():
    impl = clip_grad_norm(1.0, "inf")
    updates, _ = impl.update({"a": None, "b": torch.tensor([4.0]), "c": torch.ones(0)}, EmptyState())
    assert updates["a"] is None
    assert updates["b"].item() == pytest.approx(1.0)
    assert updates["c"].shape == (0,)
    assert impl.update([None, torch.ones(0)], EmptyState())[0][0] is None


def test_gradients_are_not_overwritten():
    grad = torch.tensor([3.0, 4.0])
    with torch.no_grad():
        for impl in (clip_grad_norm(1.0), clip_grad_value(1.0)):
            impl.update([grad], EmptyState(), inplace=True)
    assert torch.equal(grad, torch.tensor([3.0, 4.0]))


@each_row("order", [1.0, 2.0, math.inf])
def test_func_hessian_equals_autograds(order):
    (w,) = draw((4,))

    def clipped(w):
        return apply(clip_grad_norm(0.5, order), w, 2 * w)[1][0]

    torch.testing.assert_close(jacrev(jacrev(clipped))(w), torch.autograd.functional.hessian(clipped, w))


@each_row(
    "impl", [clip_grad_norm(0.5), clip_grad_norm(0.5, "inf"), clip_grad_value(0.5)], ids=["2", "inf", "value"]
)
def test_vmap_equals_a_loop(impl):
    (grads,) = draw((3, 4))

    def clipped(grad):
        return apply(impl, grad, 2 * grad)[0]

    torch.testing.assert_close(vmap(clipped)(grads), torch.stack([clipped(grad) for grad in grads]))


@pytest.mark.parametrize("impl", [clip_grad_norm(0.5), clip_grad_value(0.5)], ids=["norm", "value"])
def test_compiles_into_one_graph_forward_and_backward(impl):
    grads = draw((3,), (2,), requires_grad=True)
    compiled = torch.compile(lambda *grads: apply(impl, *grads), fullgraph=True, backend="eager")
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded):
            torch.testing.assert_close(compiled(*grads), apply(impl, *grads))
    got, want = (sum(part.sum() for part in out) for out in (compiled(*grads), apply(impl, *grads)))
    torch.testing.assert_close(torch.autograd.grad(got, grads), torch.autograd.grad(want, grads))


@each_row("impl", [clip_grad_norm(0.5, "inf"), clip_grad_value(0.5)], ids=["norm", "value"])
@each_row("again", [copy.deepcopy, lambda impl: pickle.loads(pickle.dumps(impl))])
def test_copies_and_pickles(impl, again):
    grads = draw((3,), (2,))
    assert all(
        torch.equal(*pair) for pair in zip(apply(again(impl), *grads), apply(impl, *grads), strict=True)
    )


@each_row(
    ("impl", "twin_of"),
    [(scale(-0.1), torch.optim.SGD), (adam(0.1), torch.optim.Adam)],
    ids=["sgd", "adam"],
)
def test_in_front_of_an_optimizer_it_is_what_torch_does_before_the_step(impl, twin_of):
    torch.manual_seed(0)
    net, twin = (torch.nn.Linear(3, 1) for _ in range(2))
    twin.load_state_dict(net.state_dict())
    ours = Optimizer(net.parameters(), chain(clip_grad_norm(0.1), impl))
    theirs = twin_of(twin.parameters(), 0.1)
    for step in range(3):
        for model, optimizer in ((net, ours), (twin, theirs)):
            optimizer.zero_grad()
            (0.05 * model(torch.arange(6.0).reshape(2, 3)).square().sum() * 10**-step).backward()
            if model is twin:
                clip_grad_norm_(twin.parameters(), 0.1)
            optimizer.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_meta_gradient_goes_through_the_norm():
    """``w - g / |g|`` with ``g = a w``: the step does not depend on ``a``."""
    a = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    w = torch.tensor([3.0, 4.0], dtype=torch.float64, requires_grad=True)
    loss = a * (w**2).sum() / 2
    impl = chain(clip_grad_norm(1.0), scale(-1.0))
    moved = FuncOptimizer(impl).step(loss, (w,))[0]
    torch.testing.assert_close(moved, w - w / 5, rtol=1e-6, atol=0)
    assert torch.autograd.grad(moved.sum(), a)[0].abs() < 1e-6

    net = torch.nn.Linear(2, 1, bias=False).double()
    torch.nn.init.constant_(net.weight, 3.0)
    MetaOptimizer(net, impl).step(a * (net.weight**2).sum() / 2)
    assert torch.autograd.grad(net.weight.sum(), a)[0].abs() < 1e-5


@each_row(
    ("args", "error", "message"),
    [
        ((-1,), ValueError, "`max_norm` must be at least 0, got -1"),
        ((math.nan,), ValueError, "`max_norm` must be at least 0, got nan"),
        ((torch.ones(2),), ValueError, "`max_norm` as a tensor must have one element"),
        (("1",), TypeError, "`max_norm` must be a number or a tensor of one element, got str"),
        ((1.0, "two"), ValueError, "`norm_type` must be a number or 'inf', got 'two'"),
        ((1.0, math.nan), ValueError, "`norm_type` must be a number or 'inf', got nan"),
        ((1.0, None), TypeError, "`norm_type` must be a number or 'inf', got NoneType"),
    ],
)
def test_bad_arguments_of_clip_grad_norm_are_refused(args, error, message):
    with pytest.raises(error, match=message):
        clip_grad_norm(*args)


@each_row("dtype", [torch.float32, torch.float64, torch.bfloat16])
@each_row("limit", [0.0, 0.5, math.inf])
def test_clamped_values_are_torchs_bit_for_bit(limit, dtype):
    grads = [*draw((5,), (2, 2), dtype=dtype), torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)]
    want = by_torch(clip_grad_value_, grads, limit)
    for clip_value in (limit, torch.tensor([limit], dtype=torch.float64)):
        for got, other in zip(apply(clip_grad_value(clip_value), *grads), want, strict=True):
            torch.testing.assert_close(got, other, rtol=0, atol=0, equal_nan=True)


def test_derivatives_of_the_clamp():
    grad = torch.tensor([-2.0, -0.3, 0.2, 1.5], dtype=torch.float64, requires_grad=True)
    limit = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)

    def clipped(limit, grad):
        return apply(clip_grad_value(limit), grad)

    assert gradcheck(clipped, (limit, grad))
    slope, along = torch.autograd.grad(
        clipped(limit, grad)[0].square().sum(), (limit, grad), create_graph=True
    )
    assert slope.item() == pytest.approx(2.0)  # d(2 limit²)
    assert torch.equal(along, torch.tensor([0.0, -0.6, 0.4, 0.0], dtype=torch.float64))
    assert gradgradcheck(clipped, (limit, grad))


def test_complex_gradients_are_refused_as_by_torch():
    grad = torch.tensor([3 + 4j])
    with pytest.raises(RuntimeError, match="clamp is not supported for complex types"):
        by_torch(clip_grad_value_, [grad], 1.0)
    with pytest.raises(RuntimeError, match="clamp is not supported for complex types"):
        apply(clip_grad_value(1.0), grad)


def test_clamping_leaves_none_alone():
    updates, _ = clip_grad_value(1.0).update([None, torch.tensor([4.0])], EmptyState())
    assert updates == [None, torch.ones(1)]


@each_row(
    ("value", "error", "message"),
    [
        (-1, ValueError, "`clip_value` must be at least 0, got -1"),
        (None, TypeError, "`clip_value` must be a number or a tensor of one element, got NoneType"),
    ],
)
def test_bad_arguments_of_clip_grad_value_are_refused(value, error, message):
    with pytest.raises(error, match=message):
        clip_grad_value(value)
