"""Lists of tensors of every dtype and stride → the kernel's values, its refusals, and when it is not used."""

from __future__ import annotations

import copy
import random
import threading

import pytest
import torch
from torch.autograd import forward_ad

from tests.ops.cases import DTYPES, strided, threads, whole
from torchopt_dist import ops
from torchopt_dist.ops import add_scaled, library

needs_kernel = pytest.mark.skipif(
    not ops.is_available("add_scaled_"), reason=f"no kernel: {ops.why_not('add_scaled_')}"
)
both = pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_kernel)])


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        eps = torch.finfo(one.dtype).eps
        torch.testing.assert_close(whole(one), whole(other), rtol=2 * eps, atol=8 * eps)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_fuzz_against_the_reference(dtype, count):
    rng = random.Random(f"{dtype} {count}")
    torch.manual_seed(rng.randrange(2**31))
    with threads(count):
        for _ in range(100):
            shapes = [
                [rng.choice([0, 1, 2, 3, 7, 16, 33]) for _ in range(rng.randrange(5))]
                for _ in range(rng.randrange(6))
            ]
            if rng.random() < 0.1:
                shapes.append([rng.randrange(200_000, 600_000), rng.randrange(1, 4)])
            params = [strided(rng, shape, dtype) for shape in shapes]
            updates = [strided(rng, shape, dtype, expand=True) for shape in shapes]
            expected = copy.deepcopy(params)
            alpha = rng.choice([1.0, -1.0, 0.0, rng.uniform(-3, 3)])
            ops.add_scaled_(params, updates, alpha, fused=True)
            ops.add_scaled_(expected, updates, alpha, fused=False)
            assert_same(params, expected)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_closed_form(fused, dtype):
    params = [torch.tensor([1.0, 2.0], dtype=dtype), torch.tensor(3.0, dtype=dtype)]
    updates = [torch.tensor([4.0, -8.0], dtype=dtype), torch.tensor(2.0, dtype=dtype)]
    assert ops.add_scaled_(params, updates, 0.25, fused=fused) is None
    assert params[0].tolist() == [2.0, 0.0]
    assert params[1].item() == 3.5


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype):
    param, update = torch.randn(1000).to(dtype), torch.randn(1000).to(dtype)
    expected = torch.add(param.float(), update.float(), alpha=0.1).to(dtype)
    ops.add_scaled_([param], [update], 0.1, fused=True)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(param, expected, rtol=eps, atol=0)
    assert (param == expected).float().mean() > 0.99


@needs_kernel
def test_infinities_and_nans_are_kept():
    param = torch.tensor([1.0, float("inf"), float("nan"), 3.4e38])
    update = torch.tensor([float("-inf"), 1.0, 1.0, 3.4e38])
    ops.add_scaled_([param], [update], fused=True)
    torch.testing.assert_close(
        param, torch.tensor([-torch.inf, torch.inf, torch.nan, torch.inf]), equal_nan=True
    )


@both
def test_mixed_dtypes_in_one_list(fused):
    params = [torch.ones(5, dtype=dtype) for dtype in DTYPES]
    ops.add_scaled_(params, [2 * param for param in params], 2.0, fused=fused)
    assert all(param.tolist() == [5.0] * 5 for param in params)


@both
def test_many_tensors(fused):
    params = [torch.full((i % 7, 3), float(i)) for i in range(2000)]
    ops.add_scaled_(params, [torch.ones_like(param) for param in params], -1.0, fused=fused)
    assert all((param == i - 1).all() for i, param in enumerate(params))


@both
def test_nothing_to_do(fused):
    ops.add_scaled_([], [], fused=fused)
    ops.add_scaled_([torch.empty(0), torch.empty(3, 0)], [torch.empty(0), torch.empty(3, 0)], fused=fused)


@both
def test_shared_memory_follows_the_order_of_the_list(fused):
    tied = torch.ones(600_000)
    ops.add_scaled_([tied, tied, tied[10:]], [tied, tied, tied[10:]], fused=fused)
    assert (tied[:10] == 4).all()
    assert (tied[10:] == 8).all()


@both
def test_an_update_that_is_a_later_parameter(fused):
    with threads(2):
        for _ in range(20):
            first, second = torch.ones(600_000), torch.ones(600_000)
            ops.add_scaled_([first, second], [second, first], fused=fused)
            assert (first == 2).all()
            assert (second == 3).all()


@both
def test_columns_of_one_matrix(fused):
    matrix = torch.arange(20_000.0).view(-1, 2)
    expected = matrix[:, 0] + matrix[:, 1]
    ops.add_scaled_([matrix[:, 0]], [matrix[:, 1]], fused=fused)
    assert torch.equal(matrix[:, 0], expected)


@both
def test_shifted_overlap_is_refused(fused):
    base = torch.arange(9.0)
    with pytest.raises(RuntimeError, match="memory"):
        ops.add_scaled_([base[:8]], [base[1:]], fused=fused)
    assert base.tolist() == list(range(9))


ones = torch.ones(2, 3)
BAD = {
    "length": (([ones], [ones, ones]), ValueError, r"`updates` must have the length of `params`, 1; got 2"),
    "not a tensor": (([ones, 3.0], [ones, ones]), TypeError, r"`params\[1\]` must be a tensor; got float"),
    "None": (([ones], [None]), TypeError, r"`updates\[0\]` must be a tensor; got NoneType"),
    "alpha": (([ones], [ones], ones[0, 0]), TypeError, r"`alpha` must be a Python number; got Tensor"),
    "shape": (([ones], [ones.t()]), ValueError, r"the shape of `params\[0\]`, \(2, 3\); got \(3, 2\)"),
    "broadcast": (([ones], [ones[0]]), ValueError, r"the shape of `params\[0\]`, \(2, 3\); got \(3,\)"),
    "dtype": (
        ([ones], [ones.double()]),
        ValueError,
        r"the dtype of `params\[0\]`, torch.float32; got torch.float64",
    ),
    "device": (([ones], [ones.to("meta")]), ValueError, r"the device of `params\[0\]`, cpu; got meta"),
    "integers": (
        ([ones.int()], [ones.int()]),
        TypeError,
        r"`params\[0\]` must be of a floating-point or complex dty",
    ),
    "sparse": (
        ([ones], [ones.to_sparse()]),
        TypeError,
        r"`updates\[0\]` must be a dense tensor; got layout torch.spa",
    ),
    "sparse param": (([ones.to_sparse()], [ones]), TypeError, r"`params\[0\]` must be a dense tensor"),
    "expanded": (
        ([ones[:1].expand(4, 3)], [torch.ones(4, 3)]),
        ValueError,
        r"`params\[0\]` must not overlap itself",
    ),
}


@pytest.mark.parametrize("fused", [None, False, pytest.param(True, marks=needs_kernel)])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_names_the_argument_and_writes_nothing(case, fused):
    args, error, message = BAD[case]
    with pytest.raises(error, match=message):
        ops.add_scaled_(*args, fused=fused)
    assert (ones == 1).all()


@needs_kernel
def test_a_refusal_comes_before_the_first_write():
    first = torch.ones(3)
    with pytest.raises(ValueError, match=r"`updates\[1\]`"):
        ops.add_scaled_([first, ones], [torch.ones(3), ones.t()], fused=True)
    assert first.tolist() == [1.0] * 3


RAW = {
    "length": (([ones], [ones, ones]), r"`updates` must have the length of `params`, 1; got 2"),
    "shape": (
        ([ones], [ones.t()]),
        r"`updates\[0\]` must have the shape of `params\[0\]`, \(2, 3\); got \(3, 2\)",
    ),
    "dtype": (
        ([ones], [ones.double()]),
        r"`updates\[0\]` must have the dtype of `params\[0\]`, Float; got Double",
    ),
    "integers": (
        ([ones.int()], [ones.int()]),
        r"`params\[0\]` must be float64, float32, float16 or bfloat16; got In",
    ),
    "expanded": (
        ([ones[:1].expand(4, 3)], [torch.ones(4, 3)]),
        r"`params\[0\]` must not overlap itself in memory",
    ),
    "sparse": (([ones], [ones.to_sparse()]), r"SparseCPU"),
}


@needs_kernel
@pytest.mark.parametrize("case", RAW)
def test_the_raw_op_checks_too(case):
    args, message = RAW[case]
    with pytest.raises(RuntimeError, match=message):
        torch.ops.todist.add_scaled_(*args, 1.0)


def test_a_graph_is_recorded_by_the_reference():
    weight = torch.ones(3, requires_grad=True)
    param, update = torch.zeros(3), weight * 2
    ops.add_scaled_([param, torch.zeros(3)], [update, update.detach()], 3.0)
    assert torch.autograd.grad(param.sum(), weight)[0].tolist() == [6.0] * 3


@needs_kernel
def test_fused_refuses_to_record_a_graph():
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"`fused=True` cannot be kept: a graph is to be recorded"):
        ops.add_scaled_([torch.zeros(3)], [weight], fused=True)
    with torch.no_grad():
        ops.add_scaled_([weight], [torch.ones(3)], fused=True)
    assert weight.tolist() == [2.0] * 3


def test_a_leaf_that_requires_grad_keeps_torch_rule():
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        ops.add_scaled_([torch.ones(3, requires_grad=True)], [torch.ones(3)])


@both
def test_a_change_of_a_saved_tensor_is_noticed(fused):
    weight = torch.ones(3, requires_grad=True)
    loss = (weight**2).sum()
    with torch.no_grad():
        ops.add_scaled_([weight], [torch.ones(3)], fused=fused)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_torch_func_takes_the_reference():
    def loss(weight):
        params = [weight * 1.0, weight * 1.0]
        ops.add_scaled_(params, [weight * weight, weight], 2.0)
        return params[0].sum()

    weight = torch.tensor([1.0, 2.0])
    assert torch.func.grad(loss)(weight).tolist() == [5.0, 9.0]
    assert torch.func.vmap(loss)(weight[:, None]).tolist() == [3.0, 10.0]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_takes_the_reference():
    with torch.no_grad(), forward_ad.dual_level():
        param = torch.zeros(2)
        update = forward_ad.make_dual(torch.ones(2), torch.tensor([1.0, 2.0]))
        ops.add_scaled_([param, torch.zeros(2)], [update, torch.ones(2)], 3.0)
        assert forward_ad.unpack_dual(param).tangent.tolist() == [3.0, 6.0]


@needs_kernel
def test_what_the_kernel_cannot_take_takes_the_reference():
    plain, odd = (
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2).as_subclass(type("Odd", (torch.Tensor,), {})),
    )
    for params, reason in ([plain], "no torch.complex64"), ([odd], "plain tensors; got a Odd"):
        ops.add_scaled_(params, params)
        assert params[0].tolist() == [2.0, 2.0]
        with pytest.raises(RuntimeError, match=reason):
            ops.add_scaled_(params, params, fused=True)


def test_meta_tensors_take_the_reference():
    meta = [torch.empty(3, device="meta"), torch.empty(2, device="meta")]
    ops.add_scaled_(meta, meta)


@needs_kernel
def test_the_kernel_is_picked_for_lists(monkeypatch):
    calls = []
    monkeypatch.setattr(add_scaled, "_kernel", lambda *args: calls.append(args))
    ops.add_scaled_([torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(2)])
    assert len(calls) == 1


def test_without_a_kernel_fused_says_why(monkeypatch):
    monkeypatch.setattr(library, "_KERNELS", frozenset())
    monkeypatch.setattr(library, "_PROBLEM", "the kernel library was not built: no compiler")
    param = torch.ones(2)
    ops.add_scaled_([param, torch.ones(1)], [param, torch.ones(1)])
    assert param.tolist() == [2.0, 2.0]
    with pytest.raises(
        RuntimeError, match=r"`fused=True` cannot be kept: the kernel library was not built: no co"
    ):
        ops.add_scaled_([param], [param], fused=True)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    params = [torch.randn(3, 4).to(dtype), torch.randn(4, 3).to(dtype).t(), torch.empty(0, dtype=dtype)]
    updates = [torch.randn(3, 4).to(dtype), torch.ones(4).to(dtype)[:3, None].expand(3, 4), params[2].clone()]
    torch.library.opcheck(torch.ops.todist.add_scaled_.default, (params, updates, 0.5))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fused", [None, False, pytest.param(True, marks=needs_kernel)])
def test_compile(backend, fused):
    @torch.compile(fullgraph=True, backend=backend)
    def step(params, updates):
        ops.add_scaled_(params, updates, -0.5, fused=fused)
        return params[0] + params[1]

    params, updates = [torch.ones(3), torch.ones(3)], [torch.ones(3), torch.full((3,), 4.0)]
    assert step(params, updates).tolist() == [-0.5] * 3
    assert [param[0].item() for param in params] == [0.5, -1.0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_with_torch_func(backend):
    def loss(weight, update):
        params = [weight * 1.0, weight * 2.0]
        ops.add_scaled_(params, [update, update], -0.5)
        return (params[0] * params[1]).sum()

    weight, update = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0])
    step = torch.compile(torch.func.vmap(torch.func.grad(loss)), fullgraph=True, backend=backend)
    assert step(weight[:, None], update[:, None]).flatten().tolist() == [1.0, 5.0]


@needs_kernel
def test_calls_from_several_threads():
    params = [[torch.zeros(300_000), torch.zeros(3)] for _ in range(4)]

    def work(mine):
        for _ in range(20):
            ops.add_scaled_(mine, [torch.ones(300_000), torch.ones(3)], fused=True)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in params]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((param == 20).all() for mine in params for param in mine)
