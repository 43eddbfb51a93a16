"""Operations of torch's own database, each in a call → value, and gradients of two orders, of a local one.

``make opinfo`` goes through all of them, at night, also those without a gradient, and a sample with complex numbers of
each. One world makes all calls, and its findings are then tests, one an operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

import torchopt_dist as todist
from tests.diff.opinfo import EVERYTHING, SAMPLE, database, derivatives, direction, name_of, samples_of, tried
from tests.processes import World

OPS = {name_of(op): op for op in database()}
REFUSED = {
    "sparse.sampled_addmm": "only dense tensors can",
    "sparse.mm.reduce": "only dense tensors can",
    "to_sparse": "only dense tensors can",
    "nn.functional.linear_cross_entropy.chunked": "has no second derivative: write",
    "linalg.eig": "linalg_eig_backward",
}
"""What an error says of: the last one is torch's, of a loss that is the same for all phases, though its parts are not,
and a worker has the second derivative in parts."""
OF_A_STORAGE = ("as_strided.partial_views",)
"""What reads beyond the tensor that it is given, of which only the elements are sent."""
UNSET = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""What returns memory as it is, which may be twice alike."""
NAMES = [name for name in OPS if name not in OF_A_STORAGE + UNSET and (EVERYTHING or name in SAMPLE)]
KINDS = {torch.float64: 2, torch.complex128: 1}
"""How many samples of each."""


def over_calls(names: Sequence[str]) -> dict[str, tuple[int, list[str]]]:
    """By name, how many calls were compared, and what was wrong; on rank 0, which calls rank 1."""
    return {name: compared(OPS[name]) for name in names}


def compared(op: Any) -> tuple[int, list[str]]:
    count, wrong = 0, []
    for dtype, number in KINDS.items():
        if dtype not in op.supported_dtypes("cpu"):
            continue
        for place, sample in enumerate(tried(partial(samples_of, op, dtype, count=number)) or []):
            leaves = [
                x for x in torch_pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if is_free(x)
            ]
            here, there = (partial(made, op, sample, way) for way in (op.op, by_call(op.op)))
            slopes_here, slopes_there = (partial(slopes, way, leaves) for way in (here, there))
            expected, again = tried(here), tried(here)
            if expected is None or again is None or not alike(expected, again):  # torch cannot, or draws
                continue
            count += 1
            try:
                found = there()
                if not alike(found, expected):
                    wrong.append(f"{dtype}, sample {place}: the value")
                if [x.requires_grad for x in found] != [x.requires_grad for x in expected]:
                    wrong.append(f"{dtype}, sample {place}: requires_grad")
                for order in (1, 2):
                    gradients = tried(partial(slopes_here, order))
                    if not gradients:
                        break
                    if not alike(slopes_there(order), gradients, 1e-7):
                        wrong.append(f"{dtype}, sample {place}: order {order}")
            except Exception as error:
                if name_of(op) not in REFUSED or REFUSED[name_of(op)] not in str(error):
                    wrong.append(f"{dtype}, sample {place}: {type(error).__name__}: {str(error)[:300]}")
    return count, wrong


def by_call(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return todist.remote_sync_call(function, args=args, kwargs=kwargs, partitioner=1)[0]

    return functools.wraps(function)(call) if hasattr(function, "__name__") else call


def made(op: Any, sample: Any, way: Callable[..., Any]) -> list[Tensor]:
    """The tensors that an operation returns."""
    torch.manual_seed(7)
    result = op.gradcheck_wrapper(way, sample.input, *sample.args, **sample.kwargs)
    if sample.output_process_fn_grad is not None:
        result = sample.output_process_fn_grad(result)
    return [x for x in torch_pytree.tree_leaves(result) if isinstance(x, Tensor)]


def is_free(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def slopes(way: Callable[[], list[Tensor]], leaves: Sequence[Tensor], order: int) -> list[Tensor]:
    """Gradients of a loss of what is returned; none where nothing has one."""
    reals = [real(x) for x in way() if x.requires_grad and (x.is_floating_point() or x.is_complex())]
    if not reals or not leaves:
        return []
    value = torch.stack(
        [(x * direction(n, x)).sum() + 0.1 * x.square().sum() for n, x in enumerate(reals)]
    ).sum()
    return derivatives(value, leaves, order)


def real(x: Tensor) -> Tensor:
    x = x if x.layout == torch.strided else x.to_dense()
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double()


def alike(found: Sequence[Tensor], expected: Sequence[Tensor], within: float = 1e-12) -> bool:
    """Of the same shapes, dtypes and layouts, finite in the same places, and alike there, by the largest entry."""
    if len(found) != len(expected):
        return False
    for x, y in zip(found, expected, strict=True):
        if (x.shape, x.dtype, x.layout) != (y.shape, y.dtype, y.layout):
            return False
        if not (y.is_floating_point() or y.is_complex()):
            if not torch.equal(x, y):
                return False
            continue
        one, other = real(x.detach()), real(y.detach())
        finite = other.isfinite()
        if not torch.equal(one.isfinite(), finite):
            return False
        if finite.any() and (one - other)[finite].abs().max() > within * (1e-6 + other[finite].abs().max()):
            return False
    return True


@pytest.fixture(scope="module")
def findings() -> dict[str, tuple[int, list[str]]]:
    told: dict[str, tuple[int, list[str]]] = World(2).on_zero(over_calls, NAMES, timeout=1100)
    return told


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_in_a_call_is_that_in_this_process(
    findings: dict[str, tuple[int, list[str]]], name: str
) -> None:
    count, wrong = findings[name]
    assert not wrong
    if not count:
        pytest.skip("torch has no sample on the CPU that it computes twice alike")
