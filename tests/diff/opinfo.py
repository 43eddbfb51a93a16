"""Operations of torch's own database, each in an inner step → meta-gradients of two orders are those of a plain loop.

So are those of tasks with a step each that run in one ``vmap``. ``make opinfo`` goes through all operations, at night;
without ``TODIST_OPINFO`` it is a sample, of those that once were wrong. Every ``TODIST_OPINFO_COMPILED``-th is
compiled, too, and none if it is not given. What torch itself has no gradient of is skipped, and says so.
"""

from __future__ import annotations

import importlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

import torchopt_dist as todist

T = TypeVar("T")
D = torch.float64
EVERYTHING = os.environ.get("TODIST_OPINFO", "")
COMPILED = int(os.environ.get("TODIST_OPINFO_COMPILED", "0"))
SAMPLE = ("sgn", "sign", "mul", "nn.functional.layer_norm", "nn.functional.embedding", "linalg.solve", "prod")
TORCHS_THIRD_IS_WRONG = (
    "layer_norm",
    "batch_norm",
    "instance_norm",
    "_native_batch_norm_legit",
    "logcumsumexp",
)
"""How names end whose third derivative by a plain loop is wrong; that of ours is tried against differences in tests of
formulas."""
UNDEFINED = ("norm", "linalg.norm", "linalg.norm.subgradients_at_zero", "masked.norm", "masked.logaddexp")
"""Of which a sample is at a special point, where torch's gradient is not a number; tests of formulas try ours there."""
TORCHS_VMAP_IS_WRONG = ("select_scatter",)
"""What has another gradient in ``torch.vmap`` than outside."""
REFUSED = ("nn.functional.linear_cross_entropy.chunked",)
"""What has no second derivative: torch leaves it out, and a loop says so."""
SAMPLES = 3
LARGEST = 3000
ADJOINTS = {"Recorded": todist.Recorded(), "Replayed": todist.Replayed()}


def database() -> list[Any]:
    """Torch's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(importlib.import_module("torch.testing._internal.common_methods_invocations").op_db)


def name_of(op: Any) -> str:
    return ".".join(filter(None, (op.name, op.variant_test_name)))


def samples_of(op: Any, dtype: torch.dtype = D, *, count: int = SAMPLES) -> list[Any]:
    torch.manual_seed(0)
    made = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd)
    return list(itertools.islice(made, count))


class Case:
    """A loss of an operation's tensors, a factor of the loss, a rate, and directions for the gradients."""

    def __init__(self, op: Any, sample: Any) -> None:
        leaves, self.spec = torch_pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.places = [n for n, leaf in enumerate(leaves) if self._is_moved(leaf)]
        self.params = [leaves[n].detach().clone().contiguous().requires_grad_() for n in self.places]
        self.leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.gradcheck_wrapper, self.op = op.gradcheck_wrapper, op.op
        self.name = (
            op.name if getattr(torch, op.name, None) is op.op else None
        )  # looked up again, as programs do
        self.after = sample.output_process_fn_grad or (lambda made: made)
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
        op = self.op if self.name is None else getattr(torch, self.name)
        made = self.after(self.gradcheck_wrapper(op, given, *args, **kwargs))
        total = self.scale * 0
        for k, x in enumerate(torch_pytree.tree_leaves(made)):
            if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
                real = (torch.view_as_real(x) if x.is_complex() else x).to(D)
                total = total + (real * direction(k, real) * self.scale).sum() + 0.1 * real.square().sum()
        return total

    def by_hand(self, params: Sequence[Tensor] | None = None) -> list[Tensor]:
        params = self.params if params is None else params
        grads = torch.autograd.grad(
            self.loss(params), params, create_graph=True, allow_unused=True, materialize_grads=True
        )
        return [p - self.rate * grad for p, grad in zip(params, grads, strict=True)]

    def by_hand_derivatives(self, order: int) -> list[Tensor]:
        return self.derivatives(self.by_hand(), order)

    def moved(self, adjoint: Any, params: Sequence[Tensor] | None = None, **options: Any) -> list[Tensor]:
        made = todist.inner_loop(
            self.loss,
            todist.sgd(lr=self.rate),
            self.params if params is None else list(params),
            1,
            meta=self.scale,
            adjoint=adjoint,
            seed=5,
            **options,
        )
        return list(made.params)

    def derivatives(self, moved: Sequence[Tensor], order: int) -> list[Tensor]:
        return derivatives(outer(moved), self.inputs, order)


def outer(moved: Sequence[Tensor]) -> Tensor:
    """A loss of parameters after a step."""
    return torch.stack([(x * direction(n, x)).sum() for n, x in enumerate(moved)]).sum()


def derivatives(value: Tensor, inputs: Sequence[Tensor], order: int = 1) -> list[Tensor]:
    """The gradients; of the second order, those of a loss of them."""
    found = torch.autograd.grad(value, inputs, create_graph=order == 2, materialize_grads=True)
    if order == 2 and any(x.requires_grad for x in found):
        found = torch.autograd.grad(outer(found), inputs, materialize_grads=True)
    return [x.detach() for x in found]


def direction(number: int, like: Tensor) -> Tensor:
    """Between 0.5 and 1.5."""
    count = torch.arange(like.numel(), dtype=D).reshape(like.shape)
    return 1 + 0.5 * torch.sin(1 + number + 1.7 * count)


def tried(function: Callable[[], Sequence[T]]) -> Sequence[T] | None:
    """What torch itself makes; nothing where it raises an error."""
    try:
        return function()
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, AssertionError):
        return None


def same(found: Sequence[Tensor], expected: Sequence[Tensor], *, undefined: bool = False) -> bool:
    """Alike, by the largest entry, where what is expected is finite; nowhere else finite, unless that is undefined."""
    for one, other in zip(found, expected, strict=True):
        finite = other.isfinite()
        if not (undefined or torch.equal(one.isfinite(), finite)):
            return False
        if finite.any():
            error, size = (one - other)[finite].abs().max(), other[finite].abs().max()
            if error > 1e-7 * (1e-3 + size):
                return False
    return True


OPS = {name_of(op): op for op in database() if op.supports_autograd and D in op.supported_dtypes("cpu")}
NAMES = [name for name in OPS if EVERYTHING or name in SAMPLE]


def cases(op: Any) -> Iterator[tuple[int, Case]]:
    """Those of an operation of which torch has a gradient, which is the same twice, and whose loss is of parameters."""
    for number, sample in enumerate(samples_of(op)):
        case = Case(op, sample)
        if not case.params or sum(p.numel() for p in case.params) > LARGEST:
            continue
        first, again = tried(case.by_hand), tried(case.by_hand)
        if first is None or again is None or not same(first, again):
            continue
        grads = torch.autograd.grad(case.loss(case.params), case.params, allow_unused=True)
        if any(grad is not None for grad in grads):
            yield number, case


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_meta_gradients_through_an_operation_are_those_of_a_plain_loop(name: str) -> None:
    wrong: list[str] = []
    compared = 0
    for number, case in cases(OPS[name]):
        for order in (1,) if name.endswith(TORCHS_THIRD_IS_WRONG) else (1, 2):
            expected = tried(partial(case.by_hand_derivatives, order))
            if expected is None:
                break
            for word, adjoint in ADJOINTS.items():
                compared += 1
                try:
                    found = case.derivatives(case.moved(adjoint), order)
                except RuntimeError as error:
                    if name in REFUSED and "has no second derivative: write" in str(error):
                        continue
                    raise
                if not same(found, expected, undefined=name in UNDEFINED):
                    wrong.append(f"sample {number}, order {order}, {word}")
        if COMPILED and number == 0 and NAMES.index(name) % COMPILED == 0:
            expected = tried(partial(case.by_hand_derivatives, 1))
            if expected is not None:
                found = case.derivatives(case.moved(todist.Replayed(), compile=True), 1)
                if not same(found, expected):
                    wrong.append(f"sample {number}, compiled")
    assert not wrong
    if not compared:
        pytest.skip("torch has no second derivative of a sample, or draws random numbers")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in TORCHS_VMAP_IS_WRONG])
def test_meta_gradients_of_vectorized_tasks_are_those_of_plain_loops(name: str) -> None:
    wrong: list[str] = []
    compared = 0
    for number, case in cases(OPS[name]):
        stacked = [
            torch.stack([p, p + 0.05 * direction(3, p)]).detach().requires_grad_() for p in case.params
        ]
        inputs = [*stacked, case.scale, case.rate]

        def by_hand(case: Case = case, stacked: Any = stacked, inputs: Any = inputs) -> list[Tensor]:
            alone = [
                outer(case.by_hand([x.clone() for x in params])) for params in zip(*stacked, strict=True)
            ]
            return derivatives(alone[0] + 2 * alone[1], inputs)

        def inside(*params: Tensor, case: Case = case) -> tuple[Tensor, ...]:
            return case.loss(params), torch.func.grad(lambda moved: case.loss(moved))(params)

        expected = tried(by_hand)
        if expected is None or tried(partial(torch.vmap(inside), *stacked)) is None:
            continue
        for word, adjoint in ADJOINTS.items():
            compared += 1

            def task(params: list[Tensor], case: Case = case, adjoint: Any = adjoint) -> Tensor:
                return outer(case.moved(adjoint, params))

            many = todist.parallelize(
                todist.tasks, todist.stack_reducer, vectorize=True, isolate_own_share=False
            )(task)
            value = todist.auto_init_rpc()(many)(stacked)
            found = derivatives(value[0] + 2 * value[1], inputs)
            if not same(found, expected, undefined=name in UNDEFINED):
                wrong.append(f"sample {number}, {word}")
    assert not wrong
    if not compared:
        pytest.skip(
            "torch has no second derivative of a sample, draws random numbers, or has no rule for `vmap`"
        )
