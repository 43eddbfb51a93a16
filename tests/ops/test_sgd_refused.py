"""Lists that SGD cannot take → an error that says which and why, and nothing is changed, steps included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.ops.cases import needs_kernels
from torchopt_dist import ops
from torchopt_dist.ops._sgd import sgd, sgd_

FUSED = [
    False,
    pytest.param(None, marks=needs_kernels),
]
MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
IN_PLACE: dict[str, Any] = {"nesterov": False, "weight_decay": 0.0, "maximize": False}


def given(**changes: list[Any] | None) -> dict[str, Any]:
    made = {name: [torch.ones(2, 3), torch.ones(4)] for name in ("params", "grads", "momentum_buffers")} | {
        "steps": [torch.zeros(()), torch.ones(())]
    }
    return {
        name: [x.clone() if isinstance(x, Tensor) else x for x in tensors]
        for name, tensors in {**made, **changes}.items()
        if tensors is not None
    }


ONES, FOUR = torch.ones(2, 3), torch.ones(4)
LENGTHS = {
    "grads": ({"grads": [ONES]}, r"`\w+` must have the length of `(params|grads)`, [12]; got [12]"),
    "buffers": ({"momentum_buffers": [ONES]}, r"`momentum_buffers` must have the length of `\w+`, 2; got 1"),
    "no buffers": ({"momentum_buffers": None}, r"`momentum_buffers` must have the length of `\w+`, 2; got 0"),
    "steps": ({"steps": [torch.zeros(())] * 3}, r"`steps` must have the length of `\w+`, 2; got 3"),
    "no steps": ({"steps": None}, r"`steps` must have the length of `\w+`, 2; got 0"),
}
TENSORS = {
    "a sparse one": (
        {"grads": [ONES, torch.ones(5).to_sparse()]},
        r"`\w+\[1\]` must have the shape of `\w+\[1",
    ),
    "integers": (
        {"params": [ONES, FOUR.long()]},
        r"`params\[1\]` must be of a floating-point dtype; got torch.int",
    ),
    "a wider gradient": (
        {"grads": [ONES, torch.ones(5)]},
        r"`\w+\[1\]` must have the shape of `\w+\[1\]`, \([45]",
    ),
    "one to be spread": (
        {"grads": [ONES, torch.ones(1)]},
        r"`\w+\[1\]` must have the shape of `\w+\[1\]`, \([14]",
    ),
    "another sum": (
        {"momentum_buffers": [ONES, ONES]},
        r"`momentum_buffers\[1\]` must have the shape of `\w+\[1\]`",
    ),
}
DTYPES = {
    "gradient": {"grads": [ONES, FOUR.double()]},
    "sum": {"momentum_buffers": [ONES.half(), FOUR]},
}


def refused(function: Any, lists: dict[str, Any], message: str, **options: Any) -> None:
    before = {name: [x.to_dense().clone() for x in tensors] for name, tensors in lists.items()}
    versions = [x._version for tensors in lists.values() for x in tensors]
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        function(**lists, **options)
    for name, tensors in lists.items():
        for x, old in zip(tensors, before[name], strict=True):
            torch.testing.assert_close(x.to_dense(), old, rtol=0, atol=0)
    assert [x._version for tensors in lists.values() for x in tensors] == versions


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("name", [*LENGTHS, *TENSORS])
def test_in_place(name, fused):
    changes, message = {**LENGTHS, **TENSORS}[name]
    refused(sgd_, given(**changes), message, **MOMENTUM, **IN_PLACE, fused=fused)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("name", [*LENGTHS, *TENSORS])
def test_functional(name, fused):
    changes, message = {**LENGTHS, **TENSORS}[name]
    for recorded in (False, True):
        lists = given(**changes)
        lists["params"] = [
            x.clone().requires_grad_(recorded and x.is_floating_point()) for x in lists["params"]
        ]
        refused(sgd, lists, message, **MOMENTUM, fused=fused)


@pytest.mark.parametrize("name", DTYPES)
def test_other_dtypes_are_for_the_formula(name):
    """Each result has its own tensor's dtype; a kernel that is demanded is refused."""
    found = []
    for changes in (DTYPES[name], {}):
        lists = given(**changes)
        grads, sums, steps, params = (lists[k] for k in ("grads", "momentum_buffers", "steps", "params"))
        made = sgd(grads, sums, steps, params, **MOMENTUM)
        assert [x.dtype for x in made[0]] == [x.dtype for x in params]
        assert [x.dtype for x in made[1]] == [x.dtype for x in sums]
        sgd_(**lists, **MOMENTUM, **IN_PLACE)
        found += [made, (lists["params"], lists["momentum_buffers"], lists["steps"])]
    for other in found[:-1]:
        for got, want in zip(other, found[-1], strict=True):
            torch.testing.assert_close(got, want, check_dtype=False, rtol=1e-3, atol=1e-3)
    if ops.is_available("sgd"):
        message = "`fused=True` cannot be used: the kernel takes tensors of one dtype, and some that belong"
        refused(sgd_, given(**DTYPES[name]), message, **MOMENTUM, **IN_PLACE, fused=True)
        refused(sgd, given(**DTYPES[name]), message, **MOMENTUM, fused=True)


@needs_kernels
def test_what_keeps_the_kernel_from_being_used_is_said():
    one, options = [torch.ones(2)], {"lr": 0.1, "fused": True}
    with pytest.raises(
        RuntimeError, match=r"`fused=True` cannot be used: the kernel takes hyper-parameters that"
    ):
        sgd(one, lr=torch.tensor(0.1), fused=True)
    with (
        pytest.raises(RuntimeError, match=r"forward-mode differentiation is active"),
        forward_ad.dual_level(),
    ):
        sgd(one, **options)
    for dtype in (torch.int64, torch.complex64):
        with pytest.raises(RuntimeError, match=f"the kernel has no {dtype}"):
            sgd([one[0].to(dtype)], **options)
    with pytest.raises(RuntimeError, match=r"the kernel takes plain tensors; got a Sub"):
        sgd([torch.ones(2).as_subclass(Sub)], **options)


@pytest.mark.parametrize("fused", FUSED)
def test_a_sparse_gradient_is_taken_where_all_it_meets_is_dense(fused):
    def sparse() -> dict[str, Any]:
        return given(grads=[ONES, FOUR.to_sparse()])

    want, got = given(), sparse()
    sgd_(**want, **MOMENTUM, **IN_PLACE, fused=False)
    sgd_(**got, **MOMENTUM, **IN_PLACE, fused=fused)
    for name in ("params", "momentum_buffers", "steps"):
        torch.testing.assert_close(got[name], want[name])
    torch.testing.assert_close(sgd(**sparse(), **MOMENTUM, fused=fused)[0], want["params"])
    message = r"`grads\[1\]` must be a dense tensor; got layout torch.sparse_coo"
    for options in ({"weight_decay": 0.1}, {"dampening": 0.0, "nesterov": True}):
        lists = sparse()
        if "nesterov" in options:
            del lists["steps"]
        refused(sgd, lists, message, **{**MOMENTUM, **options}, fused=fused)
        refused(sgd_, lists, message, **{**MOMENTUM, **IN_PLACE, **options}, fused=fused)


class Sub(Tensor):
    """A tensor of another type."""


@pytest.mark.parametrize("fused", FUSED)
def test_lists_that_must_be_there_or_must_not(fused):
    one = [torch.ones(2)]
    with pytest.raises(ValueError, match=r"`params` must be given where `weight_decay` is not 0, got 0\.1"):
        sgd(one, lr=0.1, weight_decay=0.1, fused=fused)
    for function in (lambda **kw: sgd(one, one, **kw), lambda **kw: sgd_(one, one, one, **kw, **IN_PLACE)):
        with pytest.raises(
            ValueError, match=r"`momentum_buffers` must be left out where `momentum` is 0; got 1"
        ):
            function(lr=0.1, momentum=0.0, dampening=0.0, fused=fused)
    assert (one[0] == 1).all()


@pytest.mark.parametrize("fused", FUSED)
def test_steps_are_counted_once_the_step_is_made(fused):
    lists = given()
    want = sgd(
        lists["grads"], lists["momentum_buffers"], lists["steps"], lists["params"], **MOMENTUM, fused=False
    )
    sgd_(**lists, **MOMENTUM, **IN_PLACE, fused=fused)
    for name, tensors in zip(("params", "momentum_buffers", "steps"), want, strict=True):
        torch.testing.assert_close(lists[name], tensors)
    assert [t.item() for t in lists["steps"]] == [1.0, 2.0]
    assert [
        b[0].item() for b in (lists["momentum_buffers"][0][0], lists["momentum_buffers"][1])
    ] == pytest.approx([1.9, 1.4])


@pytest.mark.parametrize("fused", FUSED)
def test_no_tensors_at_all(fused):
    assert sgd([], lr=0.1, fused=fused) == ([],)
    assert sgd([], [], [], [], **MOMENTUM, fused=fused) == ([], [], [])
    sgd_([], [], [], [], **MOMENTUM, **IN_PLACE, fused=fused)


@pytest.mark.parametrize("fused", FUSED)
def test_steps_may_be_numbers(fused):
    """Those are the caller's to count."""
    lists = given(steps=[0, 1.0])
    want = given()
    made = sgd(
        lists["grads"], lists["momentum_buffers"], lists["steps"], lists["params"], **MOMENTUM, fused=fused
    )
    sgd_(**want, **MOMENTUM, **IN_PLACE, fused=False)
    for name, tensors in zip(("params", "momentum_buffers", "steps"), made, strict=True):
        torch.testing.assert_close(tensors, want[name])
    sgd_(**lists, **MOMENTUM, **IN_PLACE, fused=fused)
    torch.testing.assert_close(lists["params"], want["params"])
    assert lists["steps"] == [0, 1.0]
