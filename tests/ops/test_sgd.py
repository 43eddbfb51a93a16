"""SGD's formula, its one node and its kernels: derivatives to second order, batched ones, dtypes, odd tensors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from tests.ops.cases import DTYPES, needs_kernels
from tests.rows import each_row
from torchopt_dist.ops._sgd import sgd

DOUBLE = torch.float64
FUSED = [
    False,
    pytest.param(True, marks=needs_kernels),
]
OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"maximize": True},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "maximize": True},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
]
SHAPES = (2,), (3, 1)
STEPS = 0.0, 4.0


def tensors(*shapes, dtype=DOUBLE):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=DOUBLE).to(dtype) for shape in shapes]


def columns(options, *, params=True, dtype=DOUBLE, shapes=SHAPES):
    """Gradients, sums and parameters, those that the options want; and the steps."""
    torch.manual_seed(0)
    made = [[torch.randn(shape, dtype=DOUBLE).to(dtype) for shape in shapes] for _ in range(3)]
    sums = made[1] if options.get("momentum") else None
    steps = [torch.tensor(STEPS[i % 2]) for i in range(len(shapes))] if options.get("dampening") else None
    return made[0], sums, steps, made[2] if params or options.get("weight_decay") else None


def flat(options, *, params=True, fused=False, shapes=SHAPES):
    """The leaves, and a function of them → all results."""
    grads, sums, steps, own = columns(options, params=params, shapes=shapes)
    leaves = [x.requires_grad_() for column in (grads, sums, own) for x in column or []]
    n = len(grads)

    def compute(*leaves):
        rest = [list(leaves[i : i + n]) for i in range(n, len(leaves), n)]
        given = rest.pop(0) if sums else None
        made = sgd(list(leaves[:n]), given, steps, *rest, lr=0.3, **options, fused=fused)
        return tuple(x for column in made[: 2 if sums else 1] for x in column)

    return compute, leaves


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("params", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_derivatives(options, params, fused):
    compute, leaves = flat(options, params=params, fused=fused)
    nodes = {x.grad_fn.name() for x in compute(*leaves)}
    assert ("OptimizerStepBackward" in nodes) is fused
    assert gradcheck(compute, leaves, check_batched_grad=True, check_undefined_grad=True)
    assert gradgradcheck(lambda *x: tuple(y**2 for y in compute(*(z**3 for z in x))), leaves)


@needs_kernels
@each_row("options", OPTIONS)
def test_the_node_saves_nothing_and_second_order_is_the_formula(options):
    compute, leaves = flat(options, fused=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        made = compute(*leaves)
    assert kept == []
    flows = [torch.randn_like(x, requires_grad=True) for x in made]
    found = torch.autograd.grad(made, leaves, flows, create_graph=True)
    again = torch.autograd.grad(sum((x**2).sum() for x in found), flows)
    assert all(x.abs().sum() > 0 for x in again)
    plain = torch.autograd.grad(compute(*leaves), leaves, flows)
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results_that_are_not_used_get_no_gradient_and_do_no_harm(options, fused):
    reference, leaves = flat(options)
    compute, _ = flat(options, fused=fused)
    count = len(reference(*leaves))
    for used in itertools.chain.from_iterable(itertools.combinations(range(count), k) for k in (1, 2)):
        want, got = (
            torch.autograd.grad(sum((made[i] ** 3).sum() for i in used), leaves, allow_unused=True)
            for made in (reference(*leaves), compute(*leaves))
        )
        for x, y, leaf in zip(want, got, leaves, strict=True):
            zero = torch.zeros_like(leaf)
            torch.testing.assert_close(zero if y is None else y, zero if x is None else x)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_many_gradients_at_a_time(options, fused):
    compute, leaves = flat(options, fused=fused)
    made = compute(*leaves)
    flows = [torch.randn(3, *x.shape, dtype=DOUBLE) for x in made]
    batched = torch.autograd.grad(made, leaves, flows, is_grads_batched=True, retain_graph=True)
    vmapped = torch.func.vmap(lambda *f: torch.autograd.grad(made, leaves, f, retain_graph=True))(*flows)
    for i in range(3):
        one = torch.autograd.grad(made, leaves, [f[i] for f in flows], retain_graph=True)
        for want, *got in zip(one, batched, vmapped, strict=True):
            for x in got:
                torch.testing.assert_close(x[i], want)
    jacobians = (
        torch.autograd.functional.jacobian(compute, tuple(leaves), vectorize=fast) for fast in (True, False)
    )
    torch.testing.assert_close(*jacobians)


@each_row("fused", [None, False])
@each_row("options", OPTIONS)
def test_transformations(options, fused):
    compute, leaves = flat(options, fused=fused)
    leaves = [x.detach() for x in leaves]
    stacks = [torch.stack([x, 2 * x, -x]) for x in leaves]
    made = torch.func.vmap(compute)(*stacks)
    for i in range(3):
        torch.testing.assert_close([x[i] for x in made], list(compute(*(s[i] for s in stacks))))

    def loss(*leaves):
        return sum((x**3).sum() for x in compute(*leaves))

    places = tuple(range(len(leaves)))
    found = torch.func.grad(loss, places)(*leaves)
    asked = [x.clone().requires_grad_() for x in leaves]
    torch.testing.assert_close(found, torch.autograd.grad(loss(*asked), asked))
    each = torch.func.vmap(torch.func.grad(loss, places))(*stacks)
    torch.testing.assert_close([x[0] for x in each], list(found))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@each_row("options", [OPTIONS[3], OPTIONS[6]])
def test_forward_mode(options):
    compute, leaves = flat(options, fused=None)
    leaves = [x.detach() for x in leaves]
    with forward_ad.dual_level():
        made = compute(*(forward_ad.make_dual(x, torch.ones_like(x)) for x in leaves))
        got = [forward_ad.unpack_dual(x).tangent for x in made]
    _, want = torch.func.jvp(compute, tuple(leaves), tuple(map(torch.ones_like, leaves)))
    torch.testing.assert_close(got, list(want))


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[4], OPTIONS[6]], ids=str)
def test_compiled(options):
    compute, leaves = flat(options, fused=None)
    compiled = torch.compile(compute, fullgraph=True, backend="eager")
    results = []
    for function in (compute, compiled):
        made = function(*leaves)
        results.append((made, torch.autograd.grad(sum((x**3).sum() for x in made), leaves)))
    torch.testing.assert_close(*results)


def step_and_gradients(given, options, **kwargs):
    """The results, the gradients, and these again as they are when they are recorded."""
    leaves = [[x.detach().requires_grad_() for x in column] if column else None for column in given]
    steps = leaves[2] and [x.detach() for x in leaves[2]]
    made = sgd(*leaves[:2], steps, leaves[3], **options, **kwargs)
    out = [x for column in made[: 1 + bool(leaves[1])] for x in column]
    asked = [x for column in (leaves[0], leaves[1], leaves[3]) for x in column or []]
    flows = [((torch.arange(x.numel()) % 7 - 3) / 2).reshape(x.shape).to(x.dtype) for x in out]
    return [*out, *(x for r in (False, True) for x in torch.autograd.grad(out, asked, flows, True, r))]


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dtypes_against_float64(options, dtype, fused):
    """The kernel rounds once, from float32 or float64, its recorded gradients too; the formula rounds a few times."""
    given = columns(options, dtype=dtype, shapes=((50,), (4, 5)))
    wide = [column and [x.double() for x in column] for column in given]
    want = step_and_gradients(wide, options, lr=0.3, fused=False)
    got = step_and_gradients(given, options, lr=0.3, fused=fused)
    eps, inside = torch.finfo(dtype).eps, torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    rtol, atol = (0.501 * eps, 20 * inside) if fused else (4 * eps, 4 * eps)
    for x, y in zip(want, got, strict=True):
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), x, rtol=rtol + inside, atol=atol)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_odd_tensors(options, fused):
    """Strides, expanded, 0-d, empty; and one tensor at several places of all lists."""
    torch.manual_seed(1)
    matrix = torch.randn(4, 6, dtype=DOUBLE)
    matrix.requires_grad_()
    odd = [matrix.t(), matrix[::2, ::3], matrix[:1].expand(4, 6), matrix[0, 0], matrix[:0], matrix, matrix]
    steps = [torch.tensor(STEPS[i % 2]) for i in range(len(odd))] if options.get("dampening") else None
    found = []
    for choice in (False, fused):
        made = sgd(odd, odd if options.get("momentum") else None, steps, odd, lr=0.3, **options, fused=choice)
        loss = sum((x**3).sum() for column in made[: 1 + bool(options.get("momentum"))] for x in column)
        (first,) = torch.autograd.grad(loss, matrix, create_graph=True)
        found.append((*made, first, torch.autograd.grad((first**2).sum(), matrix)[0]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("fused", FUSED)
def test_infinities_and_denormals_are_as_in_the_formula(fused):
    edges = torch.tensor([math.inf, -math.inf, math.nan, 5e-324, 1e-310, -0.0, 1e160], dtype=DOUBLE)
    g, b, p = (x.flatten() for x in torch.meshgrid(edges, edges, edges, indexing="ij"))
    for options in OPTIONS:
        steps = [torch.tensor(1.0)] if options.get("dampening") else None
        given = ([g], [b] if options.get("momentum") else None, steps, [p])
        made = [sgd(*given, lr=0.5, **options, fused=choice) for choice in (False, fused)]
        torch.testing.assert_close(*made, equal_nan=True, rtol=1e-14, atol=1e-323)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nothing_given_is_overwritten_and_no_graph_is_made_unasked(options, fused):
    given = columns(options)
    before = [[x.clone() for x in column] if column else column for column in given]
    made = sgd(*given, lr=0.3, **options, fused=fused)
    torch.testing.assert_close([c for c in given if c], [c for c in before if c], rtol=0, atol=0)
    assert not any(x.requires_grad for column in made for x in column)
    if given[2]:
        assert [t.item() for t in made[2]] == [1.0, 5.0]


@each_row("numbers", OPTIONS)
def test_hyper_parameters_that_are_tensors_get_their_gradients(numbers):
    names = ["lr", *(name for name, value in numbers.items() if isinstance(value, float))]
    rest = {name: value for name, value in numbers.items() if name not in names}
    hyper = [torch.tensor(numbers.get(name, 0.3), dtype=DOUBLE, requires_grad=True) for name in names]
    grads, sums, steps, params = columns(numbers)

    def compute(*hyper):
        made = sgd(grads, sums, steps, params, **dict(zip(names, hyper, strict=True)), **rest)
        return tuple(x for column in made[:2] for x in column if x.requires_grad)

    assert gradcheck(compute, hyper)
    assert gradgradcheck(compute, hyper)
