"""Every raw op of the kernel library → the numbers of its formula, written with torch's ops in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from torchopt_dist import ops

pytestmark = pytest.mark.skipif(not ops.is_available("adam_"), reason=f"no kernel: {ops.why_not('adam_')}")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
kernels: Any = torch.ops.todist


def root(x: Tensor) -> Tensor:
    """The square root, with a derivative of 0 at 0."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())


def adam(g, m, v, p, c, factor, kept, b1, b2, eps, eps_root):
    m, v = m + (1 - b1) * (g - m), b2 * v + (1 - b2) * g * g
    u = factor * (m / c[0]) / (root(v / c[1] + eps_root) + eps)
    return u if p is None else kept * p + u, m, v


def adam_(p, g, m, v, c, lr, b1, b2, eps, eps_root, weight_decay, decoupled, maximize):
    g = -g if maximize else g
    if decoupled:
        p = p * (1 - lr * weight_decay)
    elif weight_decay:
        g = g + weight_decay * p
    m, v = m + (1 - b1) * (g - m), b2 * v + (1 - b2) * g * g
    return p - lr / c[0] * m / ((v + eps_root * c[1]).sqrt() / c[1].sqrt() + eps), m, v


def sgd_(p, g, b, taken, lr, momentum, nesterov, weight_decay, maximize):
    g = -g if maximize else g
    g = g + weight_decay * p if weight_decay else g
    if b is None:
        return p - lr * g, None
    b = momentum * b + taken * g
    return p - lr * (g + momentum * b if nesterov else b), b


def rmsprop(g: Tensor, v: Tensor, a: Tensor | None, alpha: float, eps: float) -> tuple:
    v = alpha * v + (1 - alpha) * g * g
    if a is None:
        return g / (root(v) + eps), v, None
    a = a + (1 - alpha) * (g - a)
    return g / (root(v - a * a) + eps), v, a


def rmsprop_(p, g, v, a, b, lr, alpha, eps, momentum, nesterov, weight_decay, maximize):
    g = -g if maximize else g
    g = g + weight_decay * p if weight_decay else g
    s, v, a = rmsprop(g, v, a, alpha, eps)
    if b is not None:
        b = momentum * b + s
        s = s + momentum * b if nesterov else b
    return p - lr * s, v, a, b


@dataclass
class Case:
    """A call of a raw op, and what is to come of it."""

    op: str
    lists: dict[str, list[Tensor]]
    args: tuple[Any, ...]
    expected: list[list[Tensor]]
    written: list[str] = field(default_factory=list)

    def run(self) -> list[list[Tensor]]:
        flat = getattr(kernels, self.op)(*self.lists.values(), *self.args)
        if self.written:
            assert flat is None
            return [self.lists[name] for name in self.written]
        n = len(next(iter(self.lists.values())))
        return [flat[i * n : (i + 1) * n] for i in range(len(self.expected))]


def strided(rng: random.Random, shape: list[int], dtype: torch.dtype, positive: bool, expand: bool) -> Tensor:
    """A tensor of this shape with an offset, permuted dimensions, steps and, if asked, expanded ones."""
    order = rng.sample(range(len(shape)), len(shape)) if rng.random() < 0.5 else list(range(len(shape)))
    gaps = rng.random() < 0.3
    steps = [rng.choice([1, 2, 3]) if gaps else 1 for _ in shape]
    flat = [expand and rng.random() < 0.2 for _ in shape]
    offset = rng.randrange(3)
    sizes = [1 if flat[d] else shape[d] * steps[d] for d in order]
    numbers = torch.randn(offset + math.prod(sizes))
    tensor = (numbers.abs() + 1 if positive else numbers).to(dtype)[offset:].view(sizes)
    tensor = tensor.permute([order.index(d) for d in range(len(shape))])
    return tensor[tuple(slice(None, None, 1 if flat[d] else steps[d]) for d in range(len(shape)))].expand(
        shape
    )


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


def rows(formula: Callable[..., tuple], *columns: Any) -> list[list[Tensor]]:
    """A formula over lists, entry by entry → a list of each of its results; those that are None left out."""
    n = next(len(column) for column in columns if column)
    results = [formula(*(column[i] if column else None for column in columns)) for i in range(n)]
    return [list(result) for result in zip(*results, strict=True) if result[0] is not None]


def case(op: str, rng: random.Random, shapes: list[list[int]], dtypes: list[torch.dtype]) -> Case:
    """Random arguments for an op, and what its formula makes of them."""

    def make(positive: bool = False, expand: bool = False) -> list[Tensor]:
        return [
            strided(rng, shape, dtype, positive, expand) for shape, dtype in zip(shapes, dtypes, strict=True)
        ]

    n = len(shapes)
    b1, b2, eps = rng.choice([0.0, 0.5, 0.9]), rng.choice([0.5, 0.9, 0.99]), rng.choice([1e-8, 1e-2])
    lr, momentum, nesterov = rng.uniform(-1, 1), rng.choice([0.0, 0.9]), rng.random() < 0.5
    weight_decay, maximize = rng.choice([0.0, 0.1]), rng.random() < 0.5
    corrections = torch.rand(2, n, dtype=torch.float64).t() * 0.9 + 0.1
    g = make(expand=True)
    if op == "adam_":
        numbers = (lr, b1, b2, eps, rng.choice([0.0, 1e-3]), weight_decay, rng.random() < 0.5, maximize)
        lists = {"params": make(), "grads": g, "exp_avgs": make(), "exp_avg_sqs": make(positive=True)}
        expected = rows(lambda *x: adam_(*x, *numbers), *map(wide, lists.values()), list(corrections))
        return Case(op, lists, (corrections, *numbers), expected, ["params", "exp_avgs", "exp_avg_sqs"])
    if op == "adam":
        settings = (lr, rng.choice([1.0, 0.9]), b1, b2, eps, rng.choice([0.0, 1e-3]))
        lists = {
            "grads": g,
            "exp_avgs": make(),
            "exp_avg_sqs": make(positive=True),
            "params": rng.choice([[], make(expand=True)]),
        }
        expected = rows(lambda *x: adam(*x, *settings), *map(wide, lists.values()), list(corrections))
        return Case(op, lists, (corrections, *settings), expected)
    if op == "adam_backward":
        settings = (lr, b1, b2, eps, rng.choice([0.0, 1e-3]))
        lists = {
            "moved_grads": make(expand=True),
            "exp_avg_grads": rng.choice([[], make(expand=True)]),
            "exp_avg_sq_grads": rng.choice([[], make(expand=True)]),
            "grads": g,
            "new_exp_avgs": make(),
            "new_exp_avg_sqs": make(positive=True),
        }
        expected = rows(
            lambda *x: adam_gradients(*x, *settings), *map(wide, lists.values()), list(corrections)
        )
        return Case(op, lists, (corrections, *settings), expected)
    if op == "sgd_":
        sums = make() if momentum else []
        taken = torch.rand(n if momentum else 0, 2, dtype=torch.float64)[:, 0]
        lists = {"params": make(), "grads": g, "momentum_buffers": sums}
        numbers = (lr, momentum, nesterov, weight_decay, maximize)
        expected = rows(lambda *x: sgd_(*x, *numbers), *map(wide, lists.values()), list(taken))
        return Case(op, lists, (taken, *numbers), expected, ["params", "momentum_buffers"][: 1 + bool(sums)])
    centered = rng.random() < 0.5
    squares = [square + 30 for square in make(positive=True)] if centered else make(positive=True)
    if op == "rmsprop_":
        lists = {
            "params": make(),
            "grads": g,
            "square_avgs": squares,
            "grad_avgs": make() if centered else [],
            "momentum_buffers": make() if momentum else [],
        }
        numbers = (lr, b2, eps, momentum, nesterov, weight_decay, maximize)
        expected = rows(lambda *x: rmsprop_(*x, *numbers), *map(wide, lists.values()))
        written = [name for name, tensors in lists.items() if tensors and name != "grads"]
        return Case(op, lists, numbers, expected, written)
    if op == "rmsprop":
        lists = {"grads": g, "square_avgs": squares, "grad_avgs": make() if centered else []}
        return Case(op, lists, (b2, eps), rows(lambda *x: rmsprop(*x, b2, eps), *map(wide, lists.values())))
    lists = {
        "direction_grads": make(expand=True),
        "square_avg_grads": rng.choice([[], make(expand=True)]),
        "grad_avg_grads": rng.choice([[], make(expand=True)]) if centered else [],
        "grads": g,
        "new_square_avgs": [square + 30 for square in make(positive=True)],
        "new_grad_avgs": make() if centered else [],
    }
    expected = rows(lambda *x: rmsprop_gradients(*x, b2, eps), *map(wide, lists.values()))
    return Case("rmsprop_backward", lists, (b2, eps), expected)


def adam_gradients(du, dm, dv, g, m, v, c, factor, b1, b2, eps, eps_root):
    """What autograd makes of the formula, from the new averages on."""
    m, v = m.clone().requires_grad_(), v.clone().requires_grad_()
    with torch.enable_grad():
        u = factor * (m / c[0]) / (root(v / c[1] + eps_root) + eps)
        to_m, to_v = torch.autograd.grad(u, (m, v), du)
    to_m, to_v = to_m + (0 if dm is None else dm), to_v + (0 if dv is None else dv)
    return (1 - b1) * to_m + 2 * (1 - b2) * g * to_v, b1 * to_m, b2 * to_v


def rmsprop_gradients(du, dv, da, g, v, a, alpha, eps):
    """What autograd makes of the formula, from the new averages on."""
    g, v = g.clone().requires_grad_(), v.clone().requires_grad_()
    a = None if a is None else a.clone().requires_grad_()
    with torch.enable_grad():
        u = g / (root(v if a is None else v - a * a) + eps)
        leaves = [g, v] if a is None else [g, v, a]
        to_g, to_v, *to_a = torch.autograd.grad(u, leaves, du)
    to_v = to_v + (0 if dv is None else dv)
    to_g = to_g + 2 * (1 - alpha) * g.detach() * to_v
    if not to_a:
        return to_g, alpha * to_v, None
    (a_grad,) = to_a
    a_grad = a_grad + (0 if da is None else da)
    return to_g + (1 - alpha) * a_grad, alpha * to_v, alpha * a_grad


OPS = ["adam_", "adam", "adam_backward", "sgd_", "rmsprop_", "rmsprop", "rmsprop_backward"]


def assert_near(got: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for tensors, values in zip(got, expected, strict=True):
        for tensor, value in zip(tensors, values, strict=True):
            arithmetic = torch.finfo(torch.promote_types(tensor.dtype, torch.float32)).eps
            scale = 1 + float(value.abs().max()) if value.numel() else 1
            torch.testing.assert_close(
                tensor.double(), value, rtol=torch.finfo(tensor.dtype).eps, atol=32 * arithmetic * scale
            )


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("op", OPS)
def test_fuzz_against_the_formula(op):
    rng = random.Random(op)
    torch.manual_seed(rng.randrange(2**31))
    for _ in range(150):
        shapes = [
            [rng.choice([0, 1, 2, 3, 7, 16, 33]) for _ in range(rng.randrange(4))]
            for _ in range(rng.randrange(1, 5))
        ]
        if rng.random() < 0.05:
            shapes.append([rng.randrange(30_000, 90_000), rng.randrange(1, 4)])
        call = case(op, rng, shapes, [rng.choice(DTYPES) for _ in shapes])
        untouched = {
            name: [tensor.clone() for tensor in tensors]
            for name, tensors in call.lists.items()
            if name not in call.written
        }
        assert_near(call.run(), call.expected)
        for name, before in untouched.items():
            assert all(torch.equal(*pair) for pair in zip(before, call.lists[name], strict=True)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_each_dtype_in_long_rows(op, dtype):
    torch.manual_seed(1)
    for seed in range(4):
        call = case(op, random.Random(seed), [[1003], [64, 65]], [dtype] * 2)
        got = call.run()
        assert {tensor.dtype for tensors in got for tensor in tensors} == {dtype}
        assert_near(got, call.expected)


FEW = [[70_001], [3], [9, 20_000]], [torch.float32, torch.float64, torch.float32]
MANY = [[65_536 + i] for i in range(36)], DTYPES * 9
"""Results of over 8 MiB, which go past the cache, in tensors too small to have just come from the system."""


@pytest.mark.parametrize(("shapes", "dtypes"), [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("op", OPS)
def test_threads_and_strides_make_no_difference(op, shapes, dtypes):
    """Bit for bit: no element's numbers depend on where it lies, on who works on it or on how it is written."""
    torch.manual_seed(2)
    call = case(op, random.Random(3), shapes, dtypes)
    outs = []
    for count, spread in ((1, False), (2, False), (2, True)):
        lists = {}
        for name, tensors in call.lists.items():
            copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
            if spread:
                copies = [torch.stack([copy, copy], -1)[..., 1] for copy in copies]
            lists[name] = copies
        with threads(count):
            outs.append(Case(op, lists, call.args, call.expected, call.written).run())
    for other in outs[1:]:
        for tensors, values in zip(outs[0], other, strict=True):
            assert all(torch.equal(*pair) for pair in zip(tensors, values, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_no_tensors(op):
    empty = case(op, random.Random(0), [[0], [2, 0]], [torch.float32] * 2)
    assert all(tensor.numel() == 0 for tensors in empty.run() for tensor in tensors)
    if not op.startswith("rmsprop"):  # without a tensor, torch has no device to choose a kernel by
        numbers = torch.empty((0,) if op == "sgd_" else (0, 2), dtype=torch.float64)
        call = Case(op, {name: [] for name in empty.lists}, (numbers, *empty.args[1:]), [[]], empty.written)
        assert call.run() == [[]] * max(len(empty.written), 1)


def test_new_tensors_keep_the_strides_that_leave_no_gaps():
    matrix, gaps = torch.randn(3, 4).t(), torch.randn(4, 6)[:, ::2]
    flat = torch.randn(1, 3).expand(4, 3)
    out = kernels.adam(
        [flat, matrix],
        [matrix, gaps],
        [flat, flat],
        [],
        torch.ones(2, 2).double(),
        1.0,
        1.0,
        0.9,
        0.9,
        0.1,
        0.0,
    )
    assert [tensor.stride() for tensor in out] == [(1, 4), (3, 1), (1, 4), (3, 1), (3, 1), (3, 1)]


@pytest.mark.parametrize("op", ["adam_", "sgd_", "rmsprop_"])
def test_a_gradient_may_be_the_tensor_that_is_written(op):
    call = case(op, random.Random(5), [[40]], [torch.float64])
    own = Case(op, {**call.lists, "grads": call.lists["params"]}, call.args, call.expected, call.written)
    apart = Case(
        op,
        {name: [tensor.clone() for tensor in tensors] for name, tensors in own.lists.items()},
        call.args,
        call.expected,
        call.written,
    )
    for tensors, values in zip(own.run(), apart.run(), strict=True):
        assert torch.equal(tensors[0], values[0])


def test_tied_parameters_are_stepped_in_their_order():
    tied, grads = torch.ones(150_000), [torch.ones(150_000), torch.ones(150_000)]
    with threads(2):
        kernels.sgd_([tied, tied], grads, [], torch.empty(0).double(), 0.5, 0.0, False, 0.5, False)
    assert (tied == 1 - 0.5 * 1.5 - 0.5 * (1 + 0.5 * 0.25)).all()


def adam_call(**changes: Any) -> tuple[tuple[Any, ...], dict[str, list[Tensor]]]:
    lists = {
        name: [torch.ones(2, 3), torch.ones(4)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")
    }
    numbers: dict[str, Any] = {"corrections": torch.ones(2, 2, dtype=torch.float64)}
    for name, value in changes.items():
        (numbers if name in numbers else lists)[name] = value
    return (*lists.values(), *numbers.values(), 0.1, 0.9, 0.9, 1e-8, 0.0, 0.0, False, False), lists


ones, four = torch.ones(2, 3), torch.ones(4)
BAD = {
    "length": ({"grads": [ones]}, r"`grads` must have the length of `params`, 2; got 1"),
    "shape": (
        {"exp_avgs": [ones, ones]},
        r"`exp_avgs\[1\]` must have the shape of `params\[1\]`, \(4\); got \(2, 3",
    ),
    "dtype": (
        {"grads": [ones, four.double()]},
        r"`grads\[1\]` must have the dtype of `params\[1\]`, Float; got Do",
    ),
    "integers": (
        {
            name: [torch.ones(2, 3), torch.ones(4).long()]
            for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")
        },
        r"`params\[1\]` must be float64, float32, float16 or bfloat16; got Long",
    ),
    "complex": (
        {
            name: [torch.ones(2, 3), torch.ones(4).cfloat()]
            for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")
        },
        r"`params\[1\]` must be float64, float32, float16 or bfloat16; got ComplexFloat",
    ),
    "expanded": (
        {"exp_avg_sqs": [ones, four[:1].expand(4)]},
        r"`exp_avg_sqs\[1\]` must not overlap itself in mem",
    ),
    "corrections' shape": (
        {"corrections": torch.ones(2).double()},
        r"`corrections` must have the shape \(2, 2\); g",
    ),
    "corrections' dtype": ({"corrections": torch.ones(2, 2)}, r"`corrections` must be float64; got Float"),
    "sparse": ({"grads": [ones, four.to_sparse()]}, r"SparseCPU"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lists_are_named_and_nothing_is_written(name):
    changes, message = BAD[name]
    args, lists = adam_call(**changes)
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        kernels.adam_(*args)
    for tensors in lists.values():
        assert all((tensor.to_dense() == 1).all() for tensor in tensors)


def test_memory_shared_by_two_that_are_written():
    base = torch.ones(9)
    shifted, same = [base[:4], base[3:7]], [base[:4], base[:4]]
    strips = torch.ones(4, 2)
    for one, other in (shifted, same, [strips[:, 0], strips[:, 0]]):
        args, _ = adam_call(params=[ones, one], exp_avgs=[torch.ones(2, 3), other])
        with pytest.raises(
            RuntimeError, match=r"adam_: `exp_avgs\[1\]` must not share memory with `params\[1\]`$"
        ):
            kernels.adam_(*args)
    args, _ = adam_call(params=[ones.clone(), shifted[0]], grads=[ones, shifted[1]])
    with pytest.raises(
        RuntimeError, match=r"`grads\[1\]` must not share memory with `params\[1\]` unless it is the"
    ):
        kernels.adam_(*args)
    assert (base == 1).all()
    assert (ones == 1).all()
    args, _ = adam_call(params=[ones.clone(), strips[:, 0]], exp_avgs=[torch.ones(2, 3), strips[:, 1]])
    kernels.adam_(*args)
    assert (strips[:, 1] == 1).all()
    assert (strips[:, 0] < 1).all()


def test_another_device_changes_nothing_on_this_one():
    args, lists = adam_call(grads=[torch.ones(2, 3), torch.ones(4, device="meta")])
    with suppress(RuntimeError, NotImplementedError):  # torch's refusal; a fake kernel does nothing
        kernels.adam_(*args)
    assert (lists["params"][0] == 1).all()


def test_lists_that_must_not_be_there():
    empty = torch.empty(0, dtype=torch.float64)
    with pytest.raises(
        RuntimeError, match=r"sgd_: `momentum_buffers` must be empty where `momentum` is 0; got 1 te"
    ):
        kernels.sgd_([four], [four], [four], empty, 0.1, 0.0, False, 0.0, False)
    with pytest.raises(
        RuntimeError, match=r"sgd_: `momentum_buffers` must have the length of `params`, 1; got 0"
    ):
        kernels.sgd_([four], [four], [], empty.new_ones(1), 0.1, 0.9, False, 0.0, False)
    with pytest.raises(RuntimeError, match=r"sgd_: `taken` must have the shape \(1\); got \(0\)"):
        kernels.sgd_([four], [four], [four.clone()], empty, 0.1, 0.9, False, 0.0, False)
    with pytest.raises(
        RuntimeError, match=r"rmsprop_: `momentum_buffers` must be empty where `momentum` is 0"
    ):
        kernels.rmsprop_([four], [four], [four.clone()], [], [four], 0.1, 0.9, 0.1, 0.0, False, 0.0, False)
    with pytest.raises(RuntimeError, match=r"`grad_avg_grads` must be empty where `new_grad_avgs` is"):
        kernels.rmsprop_backward([four], [], [four], [four], [four], [], 0.9, 0.1)
    with pytest.raises(RuntimeError, match=r"`grad_avgs` must have the length of `grads`, 1; got 2"):
        kernels.rmsprop([four], [four], [four, four], 0.9, 0.1)
    assert (four == 1).all()


EDGES = [
    0.0,
    -0.0,
    5e-324,
    1e-310,
    1e-300,
    1e-160,
    1e-30,
    1.0,
    -2.0,
    1e30,
    1e160,
    math.inf,
    -math.inf,
    math.nan,
]


def edges(count: int) -> list[Tensor]:
    """Every combination of the edges, a tensor for each place."""
    return list(torch.cartesian_prod(*[torch.tensor(EDGES, dtype=torch.float64)] * count).unbind(-1))


def assert_same_edges(got: list[Tensor], expected: tuple) -> None:
    """To the last digits, denormals among them; NaN or infinite at the same places."""
    for tensor, value in zip(got, expected, strict=True):
        assert torch.equal(tensor.isfinite(), value.isfinite())
        finite = value.isfinite()
        torch.testing.assert_close(tensor[finite], value[finite], rtol=1e-12, atol=1e-323)


@pytest.mark.parametrize("eps_root", [0.0, 1e-3])
def test_adam_backward_at_the_edges_is_autograd(eps_root):
    du, g, m, v = edges(4)
    keep = ~(v < 0)
    du, g, m, v = du[keep], g[keep], m[keep], v[keep]
    c, settings = torch.tensor([[0.1, 0.01]], dtype=torch.float64), (1.0, 0.9, 0.99, 1e-8, eps_root)
    got = kernels.adam_backward([du], [], [], [g], [m], [v], c, *settings)
    assert_same_edges(got, adam_gradients(du, None, None, g, m, v, c[0], *settings))


@pytest.mark.parametrize("centered", [False, True])
def test_rmsprop_backward_at_the_edges_is_autograd(centered):
    du, g, v, *rest = edges(3 + centered)
    keep = ~(v < 0)
    du, g, v, a = du[keep], g[keep], v[keep], rest[0][keep] if centered else None
    got = kernels.rmsprop_backward([du], [], [], [g], [v], [a] if centered else [], 0.9, 1e-8)
    expected = rmsprop_gradients(du, None, None, g, v, a, 0.9, 1e-8)
    assert_same_edges(got, expected if centered else expected[:2])


def test_a_gradient_of_zero_gives_no_nan():
    zero, two = torch.zeros(3, dtype=torch.float64), torch.full((3,), 2.0, dtype=torch.float64)
    c = torch.tensor([[0.1, 0.01]], dtype=torch.float64)
    for eps in (1e-8, 1.0):
        got = kernels.adam_backward([two], [two], [two], [zero], [zero], [zero], c, 1.0, 0.9, 0.99, eps, 0.0)
        to_m = 2 + 2 / 0.1 / eps
        for tensor, value in zip(got, (0.1 * to_m, 0.9 * to_m, 0.99 * 2), strict=True):
            torch.testing.assert_close(tensor, torch.full_like(zero, value))
        got = kernels.rmsprop_backward([two], [two], [two], [zero], [zero], [zero], 0.9, eps)
        for tensor, value in zip(got, (2 / eps + 0.1 * 2, 0.9 * 2, 0.9 * 2), strict=True):
            torch.testing.assert_close(tensor, torch.full_like(zero, value))


@pytest.mark.parametrize("op", ["adam", "rmsprop"])
def test_the_whole_of_forward_and_backward_is_autograd(op):
    """The formula from its inputs on, not from its new averages, all three results used."""
    torch.manual_seed(0)
    g, m, v, *flows = [torch.randn(50, dtype=torch.float64) for _ in range(6)]
    inputs = [g.requires_grad_(), v.square().add(3).requires_grad_(), m.requires_grad_()]
    if op == "adam":
        g, v, m = inputs
        c = torch.tensor([0.3, 0.2], dtype=torch.float64)
        settings = (-0.3, 0.9, 0.99, 1e-8, 1e-3)
        p = torch.randn(50, dtype=torch.float64)
        results = adam(g, m, v, p, c, settings[0], 0.8, *settings[1:])
        expected = torch.autograd.grad(results, (g, m, v), flows)
        with torch.no_grad():
            made = kernels.adam([g], [m], [v], [p], c[None], settings[0], 0.8, *settings[1:])
            got = kernels.adam_backward(*([f] for f in flows), [g], [made[1]], [made[2]], c[None], *settings)
    else:
        results = rmsprop(*inputs, 0.9, 1e-8)
        expected = torch.autograd.grad(results, inputs, flows)
        with torch.no_grad():
            made = kernels.rmsprop(*([x] for x in inputs), 0.9, 1e-8)
            got = kernels.rmsprop_backward(
                *([f] for f in flows), [inputs[0]], [made[1]], [made[2]], 0.9, 1e-8
            )
    for tensor, value in zip(made, results, strict=True):
        torch.testing.assert_close(tensor, value.detach())
    for tensor, value in zip(got, expected, strict=True):
        torch.testing.assert_close(tensor, value)


def test_an_infinite_parameter_does_not_reach_the_averages():
    """A decay of 0 is no decay, not 0 times infinity."""
    param, exp_avg, square = torch.full((20,), math.inf), torch.zeros(20), torch.zeros(20)
    c = torch.ones(1, 2, dtype=torch.float64)
    kernels.adam_(
        [param], [torch.ones(20)], [exp_avg], [square], c, 0.1, 0.9, 0.9, 1e-8, 0.0, 0.0, False, False
    )
    assert exp_avg.isfinite().all()
    assert param.isposinf().all()


@pytest.mark.parametrize("op", OPS)
def test_schemas_name_what_is_written(op):
    call = case(op, random.Random(9), [[3], [2, 2]], [torch.float32] * 2)
    torch.library.opcheck(
        getattr(kernels, op).default,
        (*call.lists.values(), *call.args),
        test_utils=("test_schema", "test_faketensor"),
    )
