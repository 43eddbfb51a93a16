"""Arrays, scalars of numpy, indices and numbers of batches: which are inputs of a compiled step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.diff.compiled_runs import MARKS, X, both, made
from torchopt_dist.core import programs

pytestmark = MARKS


NUMPYS: dict[str, Any] = {
    "scalar": (np.float64, lambda w, k: w.sum() * k),
    "scalar of 32 bits": (np.float32, lambda w, k: w.sum() * k),
    "entry": (lambda k: [np.float64(k)], lambda w, k: w.sum() * k[0]),
    "part": (lambda k: (np.float64(k),), lambda w, k: w.sum() * k[0]),
    "function": (lambda k: np.sqrt if k > 2 else np.exp, lambda w, k: w.sum() * k(2.0)),
    "module": (lambda k: np if k > 2 else np.linalg, lambda w, k: w.sum() * len(k.__name__)),
    "array of another class": (lambda k: np.ma.masked_array([k]), lambda w, k: w.sum() * k[0]),
}


@pytest.mark.parametrize("where", ["closure", "batch"])
@pytest.mark.parametrize("name", NUMPYS)
def test_what_is_numpys_is_a_constant(name: str, where: str) -> None:
    make, of = NUMPYS[name]
    w = torch.ones(2, requires_grad=True)
    seen = []
    for number in (2.0, 3.0):
        k = make(number)

        def run(compile: bool, k: Any = k) -> list[Tensor]:
            def loss(w: Tensor, batch: Any) -> Tensor:
                return of(w, batch[1] if where == "batch" else k)

            batch = (X, k) if where == "batch" else X
            result = todist.inner_loop(loss, todist.sgd(lr=0.1), w, [batch] * 2, compile=compile)
            return [result.losses, result.params]

        seen.append(both(run)[0])
    assert made
    assert not torch.equal(*seen)


ARRAY = np.arange(6.0, dtype=np.float32).reshape(2, 3)
ARRAYS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "from_numpy": lambda w, k: (w * torch.from_numpy(k)).sum(),
    "as_tensor": lambda w, k: (w * torch.as_tensor(k)).sum(),
    "as_tensor of a dtype": lambda w, k: (w * torch.as_tensor(k, dtype=torch.float64)).sum(),
    "asarray": lambda w, k: (w * torch.asarray(k).double()).sum(),
    "tensor": lambda w, k: (w * torch.tensor(k)).sum(),
    "several": lambda w, k: (w * torch.stack([torch.from_numpy(k), torch.as_tensor(k)])).sum(),
    "shape": lambda w, k: (w * k.shape[1]).sum() + torch.from_numpy(k).sum(),
    "index": lambda w, k: (w[:, k.shape[0] - 2] * torch.from_numpy(k).sum()).sum(),
}
OTHER_ARRAYS: Sequence[Callable[[Any], Any]] = [
    lambda k: k.astype(np.float64),
    np.asfortranarray,
    lambda k: k[:1].copy(),
]
"""Of another dtype, other strides, another shape: each is another program, from wherever the array is."""
AS_NUMPY: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "entry": lambda w, k: w.sum() * k[0, 1],
    "row": lambda w, k: (w * torch.from_numpy(k[0])).sum(),
    "sum": lambda w, k: w.sum() * k.sum(),
    "arithmetic": lambda w, k: (w * torch.from_numpy(k + 1)).sum(),
    "item": lambda w, k: w.sum() * k.item(1),
    "branch": lambda w, k: w.sum() * (2 if k[0, 0] > 1 else 3),
    "loop": lambda w, k: torch.stack([w.sum() * one for one in k[0]]).sum(),
    "Tensor": lambda w, k: (w * torch.Tensor(k)).sum(),
}


class Held(nn.Module):
    """A module that has an array."""

    def __init__(self, k: Any, loss: Any) -> None:
        super().__init__()
        self.k, self.of = k, loss

    def forward(self, w: Tensor) -> Tensor:
        made: Tensor = self.of(w, self.k)
        return made


def held(where: str, of: Any, k: Any) -> tuple[Callable[..., Tensor], Any]:
    """A loss that has an array from somewhere, and batches."""
    if where == "batch":
        return lambda w, b: of(w, b[1]), [(X, k), (X, k + 1)]
    if where == "global":
        globals()["ARRAY"] = k
        return lambda w, b: of(w, ARRAY), [X, X]
    if where == "default":
        return lambda w, b, k=k: of(w, k), [X, X]
    if where == "module":
        module = Held(k, of)
        return lambda w, b: module(w), [X, X]
    return lambda w, b: of(w, k), [X, X]


def of_array(where: str, of: Any, k: Any, compile: bool) -> list[Tensor]:
    w = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
    loss, batches = held(where, of, k)
    result = todist.inner_loop(
        lambda w, b: loss(w, b).cos(),
        todist.sgd(lr=0.1),
        w,
        batches,
        adjoint=todist.Replayed(),
        compile=compile,
    )
    return [result.losses.detach(), *torch.autograd.grad(result.params.sum(), w)]


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("where", ["closure", "global", "default", "module", "batch"])
def test_an_array_is_an_input(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ARRAY", ARRAY)
    for name in ARRAYS if where == "closure" else list(ARRAYS)[:1]:
        programs.programs_of.cache_clear()
        k = np.arange(6.0, dtype=np.float32).reshape(2, 3)
        seen = []
        for value in (0.0, 1.0, 2.0):
            k[0, 1] = value
            seen.append(both(functools.partial(of_array, where, ARRAYS[name], k)))
            count = len(made)
        assert not torch.equal(seen[0][0], seen[1][0]), name
        assert len(made) == count
        for other in OTHER_ARRAYS if name == "from_numpy" else ():
            both(functools.partial(of_array, where, ARRAYS[name], other(k)))


def test_an_array_that_is_used_as_one_is_refused() -> None:
    """Of an array's entry torch takes the value, and the compiler the dtype, too."""
    for name, of in AS_NUMPY.items():
        programs.programs_of.cache_clear()
        with pytest.warns(UserWarning, match="runs as without it, since the compiler refuses it"):
            both(functools.partial(of_array, "closure", of, ARRAY.astype(np.float64)))
        assert not made, name
    programs.programs_of.cache_clear()
    with pytest.warns(UserWarning, match=r"as it is: make a tensor of it first.*, in `.*k\[0, 1\].*`"):
        both(functools.partial(of_array, "batch", AS_NUMPY["entry"], ARRAY))


def test_whole_numbers_and_indices_of_numpys_in_a_batch_are_inputs() -> None:
    w = torch.ones(4, requires_grad=True)
    meta = torch.linspace(-1, 1, 6, requires_grad=True)
    draw = np.random.default_rng(0)
    given = [(draw.permutation(6)[:4], draw.integers(6)) for _ in range(6)]

    def run(compile: bool) -> list[Tensor]:
        result = todist.inner_loop(
            lambda w, b: ((w * meta[b[0]] - meta[b[1]] / (b[1] + 1)) ** 2).sum() + torch.tensor(b[1]) / 3,
            todist.sgd(lr=0.1),
            w,
            given,
            meta=meta,
            compile=compile,
        )
        return [result.losses.detach(), *torch.autograd.grad(result.params.sum(), (w, meta))]

    both(run)
    assert len(made) <= 3


@pytest.mark.parametrize("kind", [np.float64, np.int32, np.bool_])
def test_numpys_other_scalars_of_a_batch_are_constants(kind: Any) -> None:
    w = torch.ones(2, requires_grad=True)

    def run(compile: bool) -> list[Tensor]:
        given = [(X, kind(value)) for value in (2, 0, 3)]
        result = todist.inner_loop(
            lambda w, b: w.sum() * torch.as_tensor(b[1]).sum(), todist.sgd(lr=0.1), w, given, compile=compile
        )
        return [result.losses, result.params]

    both(run)
    assert made


def indexed(w: Tensor, batch: Any, of: Tensor) -> Tensor:
    x, i = batch
    return (of.sigmoid()[i] * (w * x - 1) ** 2).sum()


INDICES: dict[str, Callable[[], Any]] = {
    "tensors": lambda: [(X[0] + i, torch.tensor(i)) for i in range(6)],
    "negative tensors": lambda: [(X[0] + i, torch.tensor(-1 - i)) for i in range(6)],
    "numbers": lambda: [(X[0] + i, i) for i in range(6)],
    "a function": lambda: lambda step: (X[0] + step, step),
    "random tensors": lambda: lambda _: (X[0], torch.randint(0, 6, ())),
    "vectors": lambda: [(X[0] + i, torch.tensor([i, 5 - i])) for i in range(6)],
}


@pytest.mark.parametrize("adjoint", [todist.Replayed(), todist.Recorded()], ids=repr)
@pytest.mark.parametrize("name", INDICES)
def test_indices_of_a_batch_are_one_program(name: str, adjoint: Any) -> None:
    w = torch.ones(1, requires_grad=True)
    meta = torch.linspace(-1, 1, 6, requires_grad=True)

    def run(compile: bool) -> list[Tensor]:
        result = todist.inner_loop(
            lambda w, batch: indexed(w, batch, meta),
            todist.adam(lr=0.1),
            w,
            INDICES[name](),
            steps=6,
            meta=meta,
            seed=1,
            adjoint=adjoint,
            compile=compile,
        )
        return [result.losses.detach(), *torch.autograd.grad(result.params.sum(), (w, meta))]

    both(run)
    assert len(made) <= 3  # a step, its derivative, and that of the first one, however many steps there are


SELECTIONS: Sequence[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, i: x[i],
    lambda x, i: x[:, i],
    lambda x, i: x[..., i],
    lambda x, i: x[i, 1],
    lambda x, i: x[1, i, None],
    lambda x, i: x[None, i, ..., i],
    lambda x, i: x[i, i, i],
    lambda x, i: x[i : i + 1],
]


@pytest.mark.parametrize("number", range(len(SELECTIONS)))
def test_a_tensor_that_is_an_index_selects_what_its_number_does(number: int) -> None:
    select = SELECTIONS[number]
    w = torch.arange(27.0).reshape(3, 3, 3).requires_grad_()

    def run(compile: bool) -> list[Tensor]:
        result = todist.inner_loop(
            lambda w, i: (select(w, i) ** 2).sum(),
            todist.sgd(lr=0.01),
            w,
            [torch.tensor(1), torch.tensor(-2, dtype=torch.int32)],
            compile=compile,
        )
        return [result.losses.detach(), result.params.detach()]

    both(run)


def test_a_whole_number_that_decides_is_part_of_the_key() -> None:
    w = torch.ones(2, requires_grad=True)

    def loss(w: Tensor, n: int) -> Tensor:
        return torch.stack([(w ** (k + 1)).sum() for k in range(n)]).sum() * (3 if n > 2 else 1)

    def run(compile: bool) -> list[Tensor]:
        result = todist.inner_loop(loss, todist.sgd(lr=0.01), w, [1, 2, 3, 1, True], compile=compile)
        return [result.losses, result.params]

    both(run)


def test_other_numbers_of_a_batch_are_an_input_of_the_second_program() -> None:
    w = torch.ones(2, requires_grad=True)

    def run(compile: bool) -> list[Tensor]:
        given = [(X, factor) for factor in (0.5, 1.5, 2.5, 0.5, 3.5)]
        result = todist.inner_loop(
            lambda w, b: b[1] * (w**2).sum(), todist.sgd(lr=0.01), w, given, compile=compile
        )
        return [result.losses, result.params]

    both(run)
    assert len(made) == 2
