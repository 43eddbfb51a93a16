"""What a step does not take: the error says why, and nothing has changed; or the formula does it instead."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.ops.cases import needs_kernels
from tests.rows import each_row
from torchopt_dist.ops._adam import adam, adam_

NUMBERS = {"b1": 0.9, "b2": 0.99, "eps": 1e-8}
FUSED = [False, pytest.param(None, marks=needs_kernels), pytest.param(True, marks=needs_kernels)]
OPTIMIZERS = {
    "Adam": (todist.Adam, {}),
    "AdamW": (todist.AdamW, {}),
    "SGD": (todist.SGD, {"momentum": 0.9}),
    "RMSprop": (todist.RMSprop, {}),
}


def columns(count=2):
    return [[torch.rand(3) for _ in range(count)] for _ in range(4)]


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ((2, 1, 3, 2), "`exp_avgs` must have the length of `grads`, 2; got 1"),
        ((2, 2, 1, 2), "`exp_avg_sqs` must have the length of `grads`, 2; got 1"),
        ((2, 2, 2, 1), "`steps` must have the length of `grads`, 2; got 1"),
    ],
)
def test_lists_of_different_length(fused, graph, lengths, said):
    *given, steps = ([torch.rand(3, requires_grad=graph) for _ in range(count)] for count in lengths)
    with pytest.raises(ValueError, match=said):
        adam(*given, [step.detach().sum() for step in steps], **NUMBERS, eps_root=0.0, fused=fused)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (torch.ones(1), (ValueError, RuntimeError)),
        (torch.ones(3, device="meta"), (ValueError, RuntimeError)),
        (torch.ones(3, dtype=torch.int64), (TypeError, RuntimeError)),
        (torch.ones(3).to_sparse(), (TypeError, RuntimeError)),
        (None, (TypeError, RuntimeError)),
    ],
    ids=["shape", "meta", "integers", "sparse", "None"],
)
@pytest.mark.parametrize("place", [1, 3], ids=["grads", "exp_avg_sqs"])
def test_a_refused_step_changes_nothing(fused, wrong, error, place):
    given, steps = columns(), [torch.zeros(()), torch.zeros(())]
    before = [[x.clone() for x in column] for column in given]
    given[place][1] = wrong
    with pytest.raises(error):
        adam_(*given, steps, lr=0.1, **NUMBERS, fused=fused)
    assert [step.item() for step in steps] == [0, 0]
    for column, old in zip(given, before, strict=True):
        for x, y in zip(column, old, strict=True):
            assert x is wrong or torch.equal(x, y)


@each_row("name", OPTIMIZERS)
def test_a_state_of_another_dtype_is_for_the_formula(name):
    kind, options = OPTIMIZERS[name]
    ends = []
    for fused in (False, None):
        p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = kind([p], lr=0.1, fused=fused, **options)
        for _ in range(2):
            p.grad = torch.full((3,), 0.5, dtype=torch.bfloat16)
            optimizer.step()
            for key, value in optimizer.state[p].items():
                optimizer.state[p][key] = value.float()
        ends.append(p.detach().clone())
    torch.testing.assert_close(ends[1], ends[0])


@each_row("fused", [False, None])
def test_sparse_gradients(fused):
    """Torch's SGD takes them, and so does ours; Adam and RMSprop have no formula for them."""
    start = torch.rand(5, 2)

    def stepped(kind, **options):
        rows = nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=True)
        rows(torch.tensor([1, 2])).sum().backward()
        kind(rows.parameters(), lr=0.1, **options).step()
        return rows.weight.detach()

    torch.testing.assert_close(stepped(todist.SGD, fused=fused), stepped(torch.optim.SGD))
    for kind in (todist.Adam, todist.AdamW):
        with pytest.raises(
            TypeError, match=r"`grads\[0\]` must be a dense tensor; got layout torch.sparse_coo"
        ):
            stepped(kind, fused=fused)


@needs_kernels
def test_sparse_gradients_are_not_for_the_kernel():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="cannot be used: the kernel takes dense tensors"):
        todist.SGD([p], lr=0.1, fused=True).step()


@each_row("fused", ["yes", 0, 1])
def test_a_choice_that_is_none(fused):
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(TypeError, match="`fused` must be True, False or None; got"):
        todist.Adam([p], fused=fused).step()


def test_in_place_records_nothing_by_either_way():
    for fused in (None, False):
        (p,), *rest = columns(1)
        p.requires_grad_()
        adam_([p], *rest, [torch.zeros(())], lr=0.1, **NUMBERS, fused=fused)
        assert p.is_leaf


@each_row(
    ("given", "error", "said"),
    [
        ((torch.ones(2), [1.0], torch.ones(2)), TypeError, "`nu` must be a dense tensor .* got list"),
        ((torch.ones(2), torch.ones(2), torch.ones(2).long()), TypeError, "`updates` must .* torch.int64"),
        (
            (torch.ones(2).to_sparse(), torch.ones(2), torch.ones(2)),
            TypeError,
            "`mu` must .* torch.sparse_coo",
        ),
    ],
    ids=["list", "integers", "sparse"],
)
def test_adam_op_says_what_it_does_not_take(given, error, said):
    with pytest.raises(error, match=said):
        todist.ops.AdamOp()(*given, 1)


def test_adam_op_without_a_gradient_is_torchopts():
    mu, nu = torch.rand(2), torch.rand(2)
    got = todist.ops.AdamOp()(mu, nu, None, 3)
    assert got[0] is mu
    assert got[1] is nu
    assert got[2] is None


def test_adam_op_counts_in_full_precision_and_under_vmap():
    mu, nu, g = torch.rand(3), torch.rand(3), torch.rand(3)
    want = todist.ops.AdamOp(inplace=False)(mu, nu, g, 299)[2]
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.testing.assert_close(todist.ops.AdamOp(inplace=False)(mu, nu, g, 299)[2], want)
    finally:
        torch.set_default_dtype(torch.float32)
    op = todist.ops.AdamOp(inplace=False)
    counts = torch.tensor([1.0, 299.0])
    both = torch.func.vmap(lambda count: op(mu, nu, g, count)[2])(counts)
    torch.testing.assert_close(both[1], want)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3), torch.tensor(3.0, dtype=torch.float64)], ids=str)
def test_steps_are_numbers_or_tensors_of_any_dtype(fused, count):
    count = copy.deepcopy(count)
    p, g, m, v = columns(1)
    want = adam(g, m, v, [torch.tensor(3.0)], **NUMBERS, eps_root=0.0, fused=False)
    got = adam(g, m, v, [count], **NUMBERS, eps_root=0.0, fused=fused)
    assert got[3][0].item() == 4
    for one, other in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(one, other)
    moved = p[0] - 0.1 * want[0][0]
    adam_(p, g, m, v, [count], lr=0.1, **NUMBERS, fused=fused)
    torch.testing.assert_close(p[0], moved)
    assert count == (4 if isinstance(count, torch.Tensor) else 3)
