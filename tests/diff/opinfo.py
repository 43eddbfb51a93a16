"""Operations of torch's own database, each in an inner step → meta-gradients of two orders are those of a plain loop.

``make opinfo`` goes through all of them, at night; without ``TODIST_OPINFO`` it is a sample, of those that once were
wrong. Every ``TODIST_OPINFO_COMPILED``-th is compiled, too, and none if it is not given.
"""

from __future__ import annotations

import importlib
import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

import torchopt_dist as todist

D = torch.float64
EVERYTHING = os.environ.get("TODIST_OPINFO", "")
COMPILED = int(os.environ.get("TODIST_OPINFO_COMPILED", "0"))
SAMPLE = ("sgn", "sign", "mul", "nn.functional.layer_norm", "nn.functional.embedding", "linalg.solve", "prod")
TORCHS_THIRD_IS_WRONG = ("layer_norm", "batch_norm", "instance_norm")
"""How names end whose third derivative by a plain loop is wrong; that of ours is tried against differences in tests of
formulas."""
REFUSED = ("nn.functional.linear_cross_entropy.chunked",)
"""What has no second derivative: torch leaves it out, and a loop says so."""
SAMPLES = 3
LARGEST = 3000
ADJOINTS = {"Recorded": todist.Recorded(), "Replayed": todist.Replayed()}


def named_ops() -> dict[str, Any]:
    """By name, the operations that have a gradient of doubles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        database: Any = importlib.import_module("torch.testing._internal.common_methods_invocations").op_db
    return {
        ".".join(filter(None, (op.name, op.variant_test_name))): op
        for op in database
        if op.supports_autograd and D in op.supported_dtypes("cpu")
    }


class Case:
    """A loss of an operation's tensors, a factor of the loss, a rate, and directions for the gradients."""

    def __init__(self, op: Any, sample: Any) -> None:
        leaves, self.spec = torch_pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.places = [n for n, leaf in enumerate(leaves) if self._is_moved(leaf)]
        self.params = [leaves[n].detach().clone().contiguous().requires_grad_() for n in self.places]
        self.leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.op, self.after = op, sample.output_process_fn_grad or (lambda made: made)
        self.scale = torch.tensor(1.3, dtype=D, requires_grad=True)
        self.rate = torch.tensor(0.07, dtype=D, requires_grad=True)
        self.inputs = [*self.params, self.scale, self.rate]

    @staticmethod
    def _is_moved(leaf: Any) -> bool:
        return (
            isinstance(leaf, Tensor)
            and leaf.dtype == D
            and leaf.requires_grad
            and leaf.layout == torch.strided
        )

    def loss(self, params: Sequence[Tensor]) -> Tensor:
        leaves = list(self.leaves)
        for n, param in zip(self.places, params, strict=True):
            leaves[n] = param
        given, args, kwargs = torch_pytree.tree_unflatten(leaves, self.spec)
        made = self.after(self.op.gradcheck_wrapper(self.op.op, given, *args, **kwargs))
        total = self.scale * 0
        for k, x in enumerate(torch_pytree.tree_leaves(made)):
            if isinstance(x, Tensor) and x.requires_grad:
                real = (torch.view_as_real(x) if x.is_complex() else x).to(D)
                total = total + (real * direction(k, real) * self.scale).sum() + 0.1 * real.square().sum()
        return total

    def by_hand(self) -> list[Tensor]:
        grads = torch.autograd.grad(
            self.loss(self.params), self.params, create_graph=True, allow_unused=True, materialize_grads=True
        )
        return [p - self.rate * grad for p, grad in zip(self.params, grads, strict=True)]

    def by_hand_derivatives(self, order: int) -> list[Tensor]:
        return self.derivatives(self.by_hand(), order)

    def moved(self, adjoint: Any, **options: Any) -> list[Tensor]:
        made = todist.inner_loop(
            self.loss,
            todist.sgd(lr=self.rate),
            self.params,
            1,
            meta=self.scale,
            adjoint=adjoint,
            seed=5,
            **options,
        )
        return list(made.params)

    def derivatives(self, moved: Sequence[Tensor], order: int) -> list[Tensor]:
        options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
        outer = sum((x * direction(n, x)).sum() for n, x in enumerate(moved))
        found = torch.autograd.grad(outer, self.inputs, create_graph=order == 2, **options)  # type: ignore[arg-type]
        if order == 2 and any(x.requires_grad for x in found):
            whole = torch.stack([(x * direction(n, x)).sum() for n, x in enumerate(found)]).sum()
            found = torch.autograd.grad(whole, self.inputs, **options)
        return [x.detach() for x in found]


def direction(number: int, like: Tensor) -> Tensor:
    """Between 0.5 and 1.5."""
    count = torch.arange(like.numel(), dtype=D).reshape(like.shape)
    return 1 + 0.5 * torch.sin(1 + number + 1.7 * count)


def tried(function: Callable[[], list[Tensor]]) -> list[Tensor] | None:
    """What torch itself makes; nothing where it raises an error."""
    try:
        return function()
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        return None


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Finite in the same places, and alike there, by the largest entry."""
    for one, other in zip(found, expected, strict=True):
        finite = other.isfinite()
        if not torch.equal(one.isfinite(), finite):
            return False
        if finite.any():
            error, size = (one - other)[finite].abs().max(), other[finite].abs().max()
            if error > 1e-7 * (1e-3 + size):
                return False
    return True


OPS = named_ops()
NAMES = [name for name in OPS if EVERYTHING or name in SAMPLE]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_meta_gradients_through_an_operation_are_those_of_a_plain_loop(name: str) -> None:
    op = OPS[name]
    torch.manual_seed(0)
    wrong: list[str] = []
    samples = op.sample_inputs("cpu", D, requires_grad=True)
    for number, sample in enumerate(itertools.islice(samples, SAMPLES)):
        case = Case(op, sample)
        if not case.params or sum(p.numel() for p in case.params) > LARGEST:
            continue
        first, again = tried(case.by_hand), tried(case.by_hand)
        if first is None or again is None or not same(first, again):  # torch cannot, or draws random numbers
            continue
        for order in (1,) if name.endswith(TORCHS_THIRD_IS_WRONG) else (1, 2):
            expected = tried(partial(case.by_hand_derivatives, order))
            if expected is None:
                break
            for word, adjoint in ADJOINTS.items():
                try:
                    found = case.derivatives(case.moved(adjoint), order)
                except RuntimeError as error:
                    if name in REFUSED and "has no second derivative: write" in str(error):
                        continue
                    raise
                if not same(found, expected):
                    wrong.append(f"sample {number}, order {order}, {word}")
        if COMPILED and number == 0 and NAMES.index(name) % COMPILED == 0:
            expected = tried(partial(case.by_hand_derivatives, 1))
            if expected is not None:
                found = case.derivatives(case.moved(todist.Replayed(), compile=True), 1)
                if not same(found, expected):
                    wrong.append(f"sample {number}, compiled")
    assert not wrong
