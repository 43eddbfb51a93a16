"""What changes between compiled loops, or between their steps, changes what they compute, as without a compiler."""

from __future__ import annotations

import functools
import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import torchopt_dist as todist
from torchopt_dist.core import programs
from torchopt_dist.diff.adjoints._loop import Loop

pytestmark = [
    pytest.mark.compiles,
    # torch hides these two by itself, where warnings are not errors
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
X = torch.tensor([[2.0]])
SCALE = 2.0
TABLE = {"scale": 2.0}
made: list[Any] = []
"""The graphs of the programs that were made."""


@pytest.fixture(autouse=True)
def _traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs run torch's ops, and none is there yet."""

    def noted(_captured: bool, graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph

    monkeypatch.setattr(programs, "kernels", noted)
    programs.programs_of.cache_clear()
    made.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*compile=True")
        yield


def layer(*more: nn.Module) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(1, 1, bias=False), *more)
    nn.init.ones_(next(net.parameters()))
    return net


class Case(SimpleNamespace):
    """A module, an object and functions, which a loss may use."""

    scale = 2.0

    def scaled(self, x: Tensor) -> Tensor:
        return self.scale * x


class Scaled:
    """An object that has nothing but its class."""

    scale = 2.0

    def times(self, x: Tensor) -> Tensor:
        return self.scale * x


def helper(x: Tensor, by: float = 2.0, *, more: float = 1.0) -> Tensor:
    return by * more * x


def other_helper(x: Tensor, by: float = 2.0, *, more: float = 1.0) -> Tensor:
    return by * more * x + 1


def output(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).sum()


def tripled(_module: nn.Module, _inputs: Any, result: Tensor) -> Tensor:
    return 3 * result


def row(loss: Callable[..., Any], change: Callable[[Any, pytest.MonkeyPatch], Any]) -> Any:
    return loss, change


CHANGES: dict[str, Any] = {
    "hook": row(output, lambda net, _: net.register_forward_hook(tripled)),
    "hook before": row(
        output, lambda net, _: net.register_forward_pre_hook(lambda _, given: (3 * given[0],))
    ),
    "hook of a part": row(output, lambda net, _: net[0].register_forward_hook(tripled)),
    "forward of torch's class": row(
        output, lambda _, patch: patch.setattr(nn.Linear, "forward", lambda own, x: 3 * x * own.weight)
    ),
    "mode of a part": row(output, lambda net, _: net[1].eval()),
    "mode": row(output, lambda net, _: net.eval()),
    "part": row(output, lambda net, _: net.append(nn.Tanh())),
    "number of a part": row(output, lambda net, _: setattr(net[1], "p", 0.0)),
    "global number": row(
        lambda net, x: SCALE * output(net, x), lambda _, patch: patch.setitem(globals(), "SCALE", 3.0)
    ),
    "entry": row(
        lambda net, x: TABLE["scale"] * output(net, x), lambda _, patch: patch.setitem(TABLE, "scale", 3.0)
    ),
    "helper": row(
        lambda net, x: helper(output(net, x)),
        lambda _, patch: patch.setitem(globals(), "helper", other_helper),
    ),
    "helper's defaults": row(
        lambda net, x: helper(output(net, x)), lambda _, patch: patch.setattr(helper, "__defaults__", (3.0,))
    ),
    "helper's keyword": row(
        lambda net, x: helper(output(net, x)),
        lambda _, patch: patch.setattr(helper, "__kwdefaults__", {"more": 3.0}),
    ),
    "helper's code": row(
        lambda net, x: helper(output(net, x)),
        lambda _, patch: patch.setattr(helper, "__code__", other_helper.__code__),
    ),
    "number of a class": row(
        lambda net, x: Scaled().times(output(net, x)), lambda _, patch: patch.setattr(Scaled, "scale", 3.0)
    ),
    "method of a class": row(
        lambda net, x: Scaled().times(output(net, x)),
        lambda _, patch: patch.setattr(Scaled, "times", lambda _, x: 3 * x),
    ),
    "method of a class by an object": row(
        functools.partial(lambda scaled, net, x: scaled.times(output(net, x)), Scaled()),
        lambda _, patch: patch.setattr(Scaled, "times", lambda _, x: 3 * x),
    ),
}


def both(run: Callable[[bool], Any]) -> Any:
    expected, found = run(False), run(True)
    torch.testing.assert_close(found, expected)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_two_loops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, change = CHANGES[name]
    net = layer(nn.Dropout(1.0)) if "mode" in name or name == "number of a part" else layer()

    def run(compile: bool) -> list[Tensor]:
        result = todist.inner_loop(loss, todist.sgd(lr=0.1), net, [X, X], compile=compile)
        return [result.losses.detach(), *(p.detach() for p in result.params.parameters())]

    before = both(run)
    assert made
    change(net, monkeypatch)
    assert not torch.equal(both(run)[0], before[0])


def test_a_hook_that_is_taken_away_and_one_of_another_module() -> None:
    net, other = layer(), layer()
    handles = [module.register_forward_hook(tripled) for module in (net, other)]

    def run(compile: bool) -> list[Tensor]:
        def loss(net: nn.Module, x: Tensor) -> Tensor:
            return (net(x) * other(x).detach()).sum()

        return [todist.inner_loop(loss, todist.sgd(lr=0.01), net, [X], compile=compile).losses]

    both(run)
    for handle in handles:
        handle.remove()
        both(run)


def test_hooks_for_all_modules() -> None:
    net = layer()

    def run(compile: bool) -> list[Tensor]:
        return [todist.inner_loop(output, todist.sgd(lr=0.1), net, [X], compile=compile).losses]

    before = both(run)
    handle = nn.modules.module.register_module_forward_hook(tripled)
    try:
        assert not torch.equal(both(run)[0], before[0])
    finally:
        handle.remove()
    assert torch.equal(both(run)[0], before[0])


def test_a_module_that_gets_a_parametrization() -> None:
    class Tripled(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 3 * w

    net = layer()

    def run(compile: bool) -> list[Tensor]:
        return [todist.inner_loop(output, todist.sgd(lr=0.1), net, [X], compile=compile).losses]

    both(run)
    nn.utils.parametrize.register_parametrization(net[0], "weight", Tripled())
    both(run)


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


@pytest.mark.parametrize("adjoint", [todist.Replayed(), todist.Recorded()], ids=repr)
def test_where_compiling_does_not_pay_it_is_said_once_with_both_times(
    adjoint: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    w = torch.ones(1, requires_grad=True)
    seconds = {"without": 0.0}

    def timed(function: Callable[[], Any]) -> tuple[Any, float]:
        return function(), seconds.get(function.__name__, 0.003)

    def run(steps: int, compile: bool) -> list[Tensor]:
        torch.manual_seed(0)
        result = todist.inner_loop(
            lambda w: (w * torch.rand(1)).square().sum(),
            todist.sgd(lr=0.1),
            w,
            steps,
            adjoint=adjoint,
            compile=compile,
        )
        return [result.losses.detach(), torch.rand(1)]

    monkeypatch.setattr(programs, "timed", timed)
    for plain, steps, count in ((0.004, 30, 0), (0.002, 10, 0), (0.002, 11, 1), (0.001, 30, 1)):
        if count == 0:
            programs.programs_of.cache_clear()
        seconds["without"] = plain
        both(functools.partial(run, steps))
        said = [one.getMessage() for one in caplog.records if one.name == "torchopt_dist"]
        assert len(said) == count
    assert said == [
        "an inner loop with compile=True takes 3 ms a step, and 2 ms without it: "
        "unless its backward pass gains by it, it does not pay here"
    ]


NUMBER = 2.0
WHOLE = 2


def of_global(w: Tensor) -> Tensor:
    return NUMBER * (w**2).sum()


def of_whole_global(w: Tensor) -> Tensor:
    return WHOLE * (w**2).sum()


def with_global(name: str, value: Any) -> Any:
    globals()[name] = value
    return of_whole_global if name == "WHOLE" else of_global, todist.sgd(lr=0.01)


def with_default(value: Any) -> Any:
    def loss(w: Tensor, by: Any = value) -> Tensor:
        return by * (w**2).sum()

    return loss, todist.sgd(lr=0.01)


class Powers(nn.Module):
    """A module that has a number."""

    def __init__(self, by: Any) -> None:
        super().__init__()
        self.by = by

    def forward(self, w: Tensor) -> Tensor:
        return self.by * (w**2).sum()


NUMBERS: dict[str, Callable[[int], Any]] = {
    "a learning rate": lambda k: (lambda w: (w**2).sum(), todist.sgd(lr=0.01 * k)),
    "a number of momentum": lambda k: (lambda w: (w**2).sum(), todist.sgd(lr=0.01, momentum=0.1 * k)),
    "a schedule's": lambda k: (lambda w: (w**2).sum(), todist.sgd(lr=lambda step: 0.01 * k * 0.9**step)),
    "a closure's": lambda k: (lambda w: 0.5 * k * (w**2).sum(), todist.sgd(lr=0.01)),
    "a whole one": lambda k: (lambda w: k * (w**2).sum(), todist.sgd(lr=0.01)),
    "an entry": lambda k: (
        functools.partial(lambda of, w: of[0] * (w**2).sum(), [0.5 * k]),
        todist.sgd(lr=0.01),
    ),
    "a global": lambda k: with_global("NUMBER", 0.5 * k),
    "a whole global": lambda k: with_global("WHOLE", k),
    "a default": lambda k: with_default(0.5 * k),
    "a whole default": with_default,
    "a module's": lambda k: (Powers(0.5 * k), todist.sgd(lr=0.01)),
    "a whole one of a module": lambda k: (Powers(k), todist.sgd(lr=0.01)),
    "an index": lambda k: (lambda w: w[k % 2] ** 2 + w.sum(), todist.sgd(lr=0.01)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_changes_is_an_input_of_the_second_program(name: str) -> None:
    w = torch.ones(2, requires_grad=True)
    counts = []
    for k in (3, 4, 5, 6, 3):

        def run(compile: bool, k: int = k) -> list[Tensor]:
            loss, optimizer = NUMBERS[name](k)
            result = todist.inner_loop(loss, optimizer, w, 2, compile=compile)
            return [result.losses, result.params]

        both(run)
        counts.append(len(made))
    assert counts == [counts[0], *[2 * counts[0]] * 4]  # momentum has one more, of the first step


def test_one_program_too_many_switches_no_other_off(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a number decides, so it is no input."""
    monkeypatch.setattr(programs, "LIMIT", 3)
    w = torch.ones(2, requires_grad=True)

    def run(times: int, compile: bool) -> list[Tensor]:
        def loss(w: Tensor) -> Tensor:
            return torch.stack([(w**2).sum() for _ in range(times)]).sum()

        result = todist.inner_loop(loss, todist.sgd(lr=0.01), w, 5, compile=compile)
        return [result.losses, result.params]

    for times in (1, 2, 3):
        both(functools.partial(run, times))
    assert len(made) == 3
    with pytest.warns(UserWarning, match="since `times` differs from that in each of its 3 programs"):
        both(functools.partial(run, 4))
    both(functools.partial(run, 5))  # said once
    monkeypatch.setattr(Loop, "recorded_step", None)
    for times in (1, 2, 3):
        run(times, True)
    assert not [record for record in caplog.records if "limit" in record.getMessage()]


def test_one_shape_too_many_switches_no_other_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is that of the environment variable, which may rise while the process runs."""
    monkeypatch.setenv("TODIST_COMPILE_LIMIT", "2")
    w = torch.ones(1, requires_grad=True)

    def run(rows: int, compile: bool) -> list[Tensor]:
        given = [torch.ones(rows)] * 2
        return [
            todist.inner_loop(
                lambda w, x: (w * x).sum() ** 2, todist.sgd(lr=0.01), w, given, compile=compile
            ).losses
        ]

    for rows in (1, 2):
        both(functools.partial(run, rows))
    with pytest.warns(
        UserWarning,
        match="since its batch differs from that in each of its 2 programs: .* TODIST_COMPILE_LIMIT=4",
    ):
        both(functools.partial(run, 3))
    for rows in (1, 2):
        both(functools.partial(run, rows))
    assert len(made) == 2
    monkeypatch.setenv("TODIST_COMPILE_LIMIT", "3")
    for rows in (3, 2, 1):
        both(functools.partial(run, rows))
    assert len(made) == 3
    for wrong in ("0", "many", "-1"):
        monkeypatch.setenv("TODIST_COMPILE_LIMIT", wrong)
        with pytest.raises(
            ValueError, match=f"TODIST_COMPILE_LIMIT must be a number from 1 on, got '{wrong}'"
        ):
            run(1, True)


def test_what_is_one_too_many_is_told_by_the_program_that_is_most_like_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TODIST_COMPILE_LIMIT", "2")
    w = torch.ones(2, requires_grad=True)

    def run(mode: str, power: bool, x: Tensor, compile: bool) -> list[Tensor]:
        def loss(w: Tensor, x: Tensor) -> Tensor:
            made = (w * x).sum() ** (2 if power else 1)
            return made if mode == "a" else -made

        return [todist.inner_loop(loss, todist.sgd(lr=0.01), w, [x], compile=compile).losses]

    for mode, power in (("a", True), ("b", False)):
        both(functools.partial(run, mode, power, X[0]))
    with pytest.warns(UserWarning, match="since `power` differs from that in each of its 2 programs"):
        both(functools.partial(run, "a", False, X[0]))


class Noted:
    """An object that somebody writes to."""

    last: Any = None


def noted(kind: str) -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    """A loss that does more than to compute, and what it has done."""
    log: list[Any] = []
    table: dict[str, Any] = {"n": 0}
    thing, count = Noted(), 0

    def loss(w: Tensor) -> Tensor:
        nonlocal count
        value = (w**2).sum()
        if kind == "a list":
            log.append(value.detach())
        elif kind == "a dictionary":
            table["n"] += 1
        elif kind == "an attribute":
            thing.last = value.detach()
        elif kind == "a variable":
            count += 1
        elif kind == "Python's random numbers":
            value = value * random.random()
        elif kind == "numpy's random numbers":
            value = value * np.random.rand()
        else:
            value = value * torch.rand((), generator=generator)
        return value

    generator = torch.Generator().manual_seed(0)
    return loss, lambda: [log, table, thing.last, count]


@pytest.mark.parametrize(
    ("kind", "why"),
    {
        "a list": "`log` changes when it runs",
        "a dictionary": r"`table`\['n'\] changes",
        "an attribute": "`thing`.* changes",
        "a variable": "`count` changes",
        "Python's random numbers": "random numbers of Python's",
        "numpy's random numbers": "or of numpy's",
        "a generator": "[gG]enerator",
    }.items(),
)
def test_a_loss_that_does_more_than_to_compute_is_refused_and_does_it_once(kind: str, why: str) -> None:
    """What the compiler's run of it has done is undone, and so are the numbers that it has drawn."""
    w = torch.ones(2, requires_grad=True)

    def run(compile: bool) -> list[Tensor]:
        random.seed(0)
        np.random.seed(0)
        loss, done = noted(kind)
        result = todist.inner_loop(loss, todist.sgd(lr=0.1), w, 3, compile=compile)
        return [
            result.losses.detach(),
            *torch.autograd.grad(result.params.sum(), w),
            torch.tensor(str(done()).count("tensor")),
        ]

    with pytest.warns(UserWarning, match=why):
        both(run)
    both(run)  # said once
    assert not made


def test_a_tensor_that_a_loss_changes_in_place_is_changed_once_a_step() -> None:
    w = torch.ones(2, requires_grad=True)

    def run(compile: bool) -> list[Tensor]:
        mean = torch.zeros(1, 1)
        batches = [X, 2 * X, 3 * X]

        def loss(w: Tensor, x: Tensor) -> Tensor:
            mean.mul_(0.5).add_(x)
            return (w * x).sum() ** 2

        result = todist.inner_loop(loss, todist.sgd(lr=0.01), w, batches, compile=compile)
        grads = torch.autograd.grad(result.params.sum(), w)
        return [result.losses.detach(), *grads, mean]

    both(run)
    assert made


@pytest.mark.parametrize("optimizer", [todist.adam(lr=0.05), todist.sgd(lr=0.05, momentum=0.9)])
def test_second_and_third_derivatives_of_recorded_steps(optimizer: Any) -> None:
    w = torch.tensor([0.5, -0.4], dtype=torch.float64, requires_grad=True)
    meta = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)

    def run(compile: bool) -> list[Tensor]:
        result = todist.inner_loop(
            lambda w: ((w - meta.sin()) ** 4).sum() + (w * meta).sum().cos(), optimizer, w, 3, compile=compile
        )
        first = torch.autograd.grad(result.params.cos().sum(), (w, meta), create_graph=True)
        second = torch.autograd.grad(sum(x.sin().sum() for x in first), (w, meta), create_graph=True)
        third = torch.autograd.grad(sum(x.exp().sum() for x in second), (w, meta))
        return [result.losses.detach(), *(x.detach() for x in (*first, *second, *third))]

    both(run)
    assert made


def test_names_that_are_bound_anew_before_the_backward_pass() -> None:
    """A program of the gradient is made of what was meant; where there is none yet, it is an error."""
    w = torch.ones(2, requires_grad=True)
    scale = 2.0

    def loss(w: Tensor) -> Tensor:
        return scale * (w**2).sum()

    kept = []
    for number in (2.0, 3.0):
        scale = number
        kept.append(todist.inner_loop(loss, todist.sgd(lr=0.1), w, 1, compile=True))
    for number, result in zip((2.0, 3.0), kept, strict=True):
        if number == 3.0:
            (grad,) = torch.autograd.grad(result.params.sum(), w)
            torch.testing.assert_close(grad, torch.full((2,), 1 - 0.2 * number))
        else:
            with pytest.raises(
                RuntimeError, match="`scale` has changed between a call with compile=True and"
            ):
                torch.autograd.grad(result.params.sum(), w, retain_graph=True)
            scale = number
            (grad,) = torch.autograd.grad(result.params.sum(), w)
            torch.testing.assert_close(grad, torch.full((2,), 1 - 0.2 * number))
            scale = 3.0


@pytest.mark.parametrize("order", [1, 2])
def test_a_tensor_that_is_bound_anew_before_the_backward_pass(order: int) -> None:
    """The gradient is that of the tensor that was meant, whether its program is there already or not."""
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def once(compile: bool) -> list[Tensor]:
        meta = first = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
        result = todist.inner_loop(
            lambda w: ((w * meta) ** 3).sum(), todist.sgd(lr=0.1), w, 2, compile=compile
        )
        meta = torch.tensor([5.0, 6.0], dtype=torch.float64, requires_grad=True)
        grads = torch.autograd.grad(result.params.cos().sum(), (w, first), create_graph=order > 1)
        if order > 1:
            grads = torch.autograd.grad(sum(x.sin().sum() for x in grads), (w, first))
        return [x.detach() for x in grads]

    def run(compile: bool) -> list[Tensor]:
        return [*once(compile), *once(compile)]

    both(run)
    assert made


def test_a_compiled_loop_in_the_loss_of_a_compiled_loop_is_a_part_of_its_program() -> None:
    """Without random numbers of its own; with them it is refused."""
    w = torch.tensor([0.5, -0.5], requires_grad=True)

    def run(seed: int | None, compile: bool) -> list[Tensor]:
        def loss(w: Tensor) -> Tensor:
            inner = todist.inner_loop(
                lambda v: ((v - w) ** 2).sum(), todist.sgd(lr=0.1), w * 2, 2, seed=seed, compile=compile
            )
            return inner.params.cos().sum()

        result = todist.inner_loop(loss, todist.sgd(lr=0.1), w, 2, compile=compile)
        return [result.losses.detach(), *torch.autograd.grad(result.params.sum(), w)]

    both(functools.partial(run, 0))
    assert made
    with pytest.warns(UserWarning, match="it draws a seed, as calls and inner loops do"):
        both(functools.partial(run, None))


def test_a_generator_of_this_thread_is_as_without_the_word_after_a_program_was_made() -> None:
    w = torch.ones(2, requires_grad=True)
    after = []
    for compile in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        todist.inner_loop(lambda w: (w * torch.rand(2)).sum(), todist.sgd(lr=0.1), w, 3, compile=compile)
        after.append((torch.rand(1).item(), random.random()))
    assert after[0] == after[1]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_where_tensors_have_tangents_the_loop_runs_as_it_is() -> None:
    def tangent(compile: bool) -> Tensor:
        with forward_ad.dual_level():
            w = forward_ad.make_dual(torch.tensor([1.0, 2.0]).requires_grad_(), torch.ones(2))
            result = todist.inner_loop(lambda w: (w**3).sum(), todist.sgd(lr=0.1), w, 2, compile=compile)
            return forward_ad.unpack_dual(result.params).tangent

    with pytest.warns(UserWarning, match="it is inside of a level of forward-mode differentiation"):
        torch.testing.assert_close(tangent(True), tangent(False))


def test_the_graph_of_a_loop_is_let_go_of_with_its_result() -> None:
    """Without a search for garbage."""
    net, w = layer(nn.Tanh()), torch.ones(1, requires_grad=True)

    def run() -> weakref.ref[Any]:
        result = todist.inner_loop(
            lambda net, x: (w * net(x)).sum() ** 2, todist.adam(lr=0.1), net, [X, X], meta=w, compile=True
        )
        torch.autograd.grad(result.params(X).sum(), w)
        return weakref.ref(result.params)

    run()
    gc.collect()
    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()
