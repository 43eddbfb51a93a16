"""``todist.remat``: values, derivatives to order 3 and what is left behind are those of the function itself."""

from __future__ import annotations

import copy
import functools
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import torchopt_dist as todist
from tests.core.cubes import Cube
from tests.rows import each_row
from torchopt_dist.core.functional import replaced
from torchopt_dist.transform._gradients import recorded_gradients

Fn = Callable[..., Any]


def doubles(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)


def derivatives(value: Tensor, inputs: list[Tensor]) -> list[Tensor | None]:
    """A value, and its derivatives of three orders; torch's own third one through normalization is wrong."""
    found: list[Tensor | None] = [value.detach()]
    for _ in range(3):
        grads = recorded_gradients(value, inputs)
        found += [None if x is None else x.detach() for x in grads]
        value = sum((x.sin().sum() for x in grads if x is not None), torch.zeros((), dtype=torch.float64))
        if not value.requires_grad:
            break
    return found


def equal(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> None:
    for x, y in zip(one, other, strict=True):
        if x is None or y is None:
            assert all(z is None or not z.any() for z in (x, y))
        else:
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def both(make: Callable[[Callable[[Fn], Fn]], tuple[Tensor, list[Tensor]]]) -> None:
    """Compare a program with ``todist.remat`` and without; something else draws in between."""
    results = []
    for door in (lambda f: f, todist.remat):
        torch.manual_seed(3)
        value, inputs = make(door)
        torch.rand(7)
        results.append(derivatives(value, inputs))
    equal(*results)
    assert len(results[0]) > 1


def closes_over(door: Callable[[Fn], Fn]) -> tuple[Tensor, list[Tensor]]:
    """Leaves, what was computed from leaves, and a name that is bound anew."""
    x, w = doubles(3), doubles(3, seed=1)
    made = w.exp()
    first = door(lambda y: (made * y).sin().sum() + (w * y).sum())(x)
    made = (w * 2).exp()
    second = door(lambda y: (made * y).sin().sum() + (w * y).sum())(x)
    made = torch.zeros(3)
    return first + second, [x, w]


class Held:
    """An object with tensors, a method, and a counter of its own."""

    def __init__(self, w: Tensor) -> None:
        self.w, self.count = [w, w * 2], 0

    def loss(self, x: Tensor) -> Tensor:
        self.count += 1
        return (self.w[1] * x).sin().sum() * self.count


def of_an_object(door: Callable[[Fn], Fn]) -> tuple[Tensor, list[Tensor]]:
    x, w = doubles(3), doubles(3, seed=1)
    held = Held(w)
    loss = door(held.loss)(x) + door(held.loss)(x * 2)
    assert held.count == 2
    return loss, [x, w]


def of_a_module(door: Callable[[Fn], Fn]) -> tuple[Tensor, list[Tensor]]:
    """Random numbers and buffers."""
    net = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 1)
    ).double()
    x = doubles(5, 3)
    value = door(net)(x).sum() + door(lambda m, x: m(x).sum())(net, x * 2)
    expected = 2
    assert int(net[1].num_batches_tracked) == expected
    return value, [x, *net.parameters()]


def trees(door: Callable[[Fn], Fn]) -> tuple[Tensor, list[Tensor]]:
    x, w = doubles(3), doubles(3, seed=1)

    def function(tree: dict[str, Any], *, power: int, index: Tensor, mask: None, name: str = "a") -> Any:
        assert mask is None
        y = (tree["x"] * tree["pair"][1])[index]
        return {"y": (y**power, [index + 1]), "none": None, name: 3, "cut": y.detach(), "same": tree["x"]}

    index = torch.tensor([2, 0])
    made = door(function)({"x": x, "pair": (1, w)}, power=3, index=index, mask=None)
    assert list(made) == ["y", "none", "a", "cut", "same"]
    assert torch.equal(made["y"][1][0], index + 1)
    assert (made["none"], made["a"], made["cut"].requires_grad) == (None, 3, False)
    assert made["same"] is x
    return made["y"][0].sum(), [x, w]


def nested(door: Callable[[Fn], Fn]) -> tuple[Tensor, list[Tensor]]:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).double()
    w, x = doubles(3), doubles(5, 3)
    inner = door(lambda y: net(y * w))
    return door(lambda y: inner(inner(y).tanh()).sum())(x), [x, w, *net.parameters()]


def a_gradient_within(door: Callable[[Fn], Fn]) -> tuple[Tensor, list[Tensor]]:
    w, x = doubles(3), doubles(3, seed=1)

    def step(x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(((w * x) ** 3).sum(), w, create_graph=True)
        return (w - 0.1 * g).sin().sum()

    return door(step)(x), [x, w]


def steps_of_a_solver(door: Callable[[Fn], Fn]) -> tuple[Tensor, list[Tensor]]:
    matrix, b = doubles(3, 3), doubles(3, seed=1)
    solve = todist.linear_solve.solve_cg(rtol=1e-13, atol=1e-13)
    return door(lambda b: solve(lambda v: matrix @ (matrix.T @ v) + 3 * v, b).sin().sum())(b), [matrix, b]


def of_an_inner_loop(door: Callable[[Fn], Fn]) -> tuple[Tensor, list[Tensor]]:
    w, start = doubles(3), doubles(3, seed=1)

    def adapted(start: Tensor) -> Tensor:
        found = todist.inner_loop(
            lambda p: ((p - w) ** 4).sum(), todist.sgd(lr=0.01), start, 2, meta=w, adjoint=todist.Recorded()
        )
        return found.params.sin().sum()

    return door(adapted)(start), [w, start]


def of_tasks(door: Callable[[Fn], Fn]) -> tuple[Tensor, list[Tensor]]:
    """Steps of a MetaOptimizer in each task."""
    net, xs = nn.Linear(3, 1).double(), doubles(2, 4, 3)

    def task(net: nn.Module, x: Tensor) -> Tensor:
        own = todist.module_clone(net)
        todist.MetaSGD(own, lr=0.1).step(own(x).pow(2).mean())
        loss: Tensor = own(x).sin().sum()
        return loss

    made: Tensor = door(lambda xs: task(net, xs[0]) + task(net, xs[1]))(xs) + door(task)(net, xs[0])
    return made, [xs, *net.parameters()]


def conditions(door: Callable[[Fn], Fn]) -> tuple[Tensor, list[Tensor]]:
    """The default dtype and replaced functions."""
    x = doubles(3)

    def function(x: Tensor) -> Tensor:
        assert torch.is_grad_enabled()
        return torch.nn.functional.gelu(x * torch.tensor([0.1])).sum()

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with replaced(F, {"gelu": lambda torchs, x: torchs(x) * 2}):
            value = door(function)(x)
    finally:
        torch.set_default_dtype(before)
    return value, [x]


@each_row(
    "make",
    [
        closes_over,
        of_an_object,
        of_a_module,
        trees,
        nested,
        a_gradient_within,
        steps_of_a_solver,
        of_an_inner_loop,
        of_tasks,
        conditions,
    ],
)
def test_values_and_derivatives_are_those_of_the_function(make: Any) -> None:
    both(make)


def test_it_is_one_node_and_keeps_its_arguments_only() -> None:
    x = doubles(3)
    made: list[int] = []

    class Noted(torch.autograd.Function):
        apply: ClassVar[Any]

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.keeps = _Alive(made)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, bar: Tensor) -> Tensor:
            return bar

    value = todist.remat(lambda x: Noted.apply(x).pow(3).sum())(x)
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    gc.collect()
    assert made == []
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], 6 * x)
    plain = Noted.apply(x)
    assert made == [1]
    del plain


class _Alive:
    def __init__(self, made: list[int]) -> None:
        self.made = made
        made.append(1)

    def __del__(self) -> None:
        self.made.pop()


def test_buffers_are_changed_once_and_are_found_as_they_were() -> None:
    class Average(nn.Module):
        mean: Tensor
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(3, dtype=torch.float64))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            self.mean.mul_(0.5).add_(x.detach())
            return (x * self.mean.clone()).sum() * self.count

    results = []
    for door in (lambda f: f, todist.remat):
        net, x = Average(), doubles(3)
        value = door(net)(x) + door(net)(x.sin())
        results.append([*torch.autograd.grad(value, x), net.mean.clone(), net.count])
        assert net.count == 2
    equal(results[0], results[1])


@each_row("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_at_the_call(dtype: torch.dtype) -> None:
    net, x = nn.Linear(4, 4), torch.randn(3, 4)

    def loss(x: Tensor) -> Tensor:
        y = net(x)
        assert y.dtype == dtype
        return y.float().pow(2).sum()

    grads = []
    for door in (lambda f: f, todist.remat):
        with torch.autocast("cpu", dtype):
            value = door(loss)(x)
        grads.append(torch.autograd.grad(value, net.weight)[0])
    torch.testing.assert_close(*grads)


def test_dropout_draws_the_same_numbers_and_leaves_the_generator_alone() -> None:
    x = torch.ones(1000, requires_grad=True)
    value = todist.remat(lambda x: F.dropout(x, 0.5))(x)
    expected = torch.rand(1)
    torch.manual_seed(0)
    (grad,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(grad, value.detach())
    torch.testing.assert_close(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(0)))
    assert expected.shape == (1,)


def test_a_second_backward_a_partial_one_and_one_in_a_thread() -> None:
    x, w = doubles(3), doubles(3, seed=1)
    value = todist.remat(lambda x: (w * x).sin().sum())(x)
    expected = (w * (w * x).cos()).detach()
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(value, x, retain_graph=True)[0], expected)
    value.backward(retain_graph=True, inputs=[w])
    assert x.grad is None
    torch.testing.assert_close(w.grad, (x * (w * x).cos()).detach())
    thread = threading.Thread(target=value.backward)
    thread.start()
    thread.join()
    torch.testing.assert_close(x.grad, expected)


def test_saved_tensors_hooks_get_the_arguments_and_nothing_else() -> None:
    x, w = doubles(3), doubles(3, seed=1)
    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x.detach())
        return x.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        value = todist.remat(lambda x: (w * x).sin().exp().sum())(x)
    kept = packed[-2:]
    assert [y.data_ptr() for y in kept] == [x.data_ptr(), w.data_ptr()]
    torch.testing.assert_close(
        torch.autograd.grad(value, w)[0], torch.autograd.grad((w * x).sin().exp().sum(), w)[0]
    )


def test_in_torch_func() -> None:
    w = doubles(3).detach()

    def f(x: Tensor) -> Tensor:
        return (w * x).sin().sum()

    xs = doubles(4, 3, seed=1).detach()
    for door in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
        torch.testing.assert_close(
            torch.vmap(door(todist.remat(f)))(xs), torch.vmap(door(f))(xs), rtol=1e-9, atol=1e-9
        )

    def outer(door: Callable[[Fn], Fn], w: Tensor) -> Tensor:
        return torch.func.grad(door(lambda x: (w * x).sin().sum()))(xs[0]).pow(2).sum()

    ours, plain = (
        torch.vmap(torch.func.grad(cast("Fn", functools.partial(outer, door))))(xs)
        for door in (todist.remat, lambda f: f)
    )
    torch.testing.assert_close(ours, plain)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(xs[0], xs[1])
        tangents = [forward_ad.unpack_dual(g(dual)).tangent for g in (f, todist.remat(f))]
        torch.testing.assert_close(*tangents)
        with pytest.raises(
            NotImplementedError, match=r"closes over a tensor of shape \(3,\) that has a tangent"
        ):
            todist.remat(lambda x: (dual * x).sum())(doubles(3))


def test_dropout_in_vmap() -> None:
    x = torch.ones(4, 50)

    def value_and_grad(x: Tensor) -> tuple[Tensor, Tensor]:
        grad, value = torch.func.grad_and_value(lambda x: todist.remat(lambda x: F.dropout(x, 0.5))(x).sum())(
            x
        )
        return value, grad

    values, grads = torch.vmap(value_and_grad, randomness="different")(x)
    torch.testing.assert_close(values, grads.sum(-1))
    assert not torch.equal(grads[0], grads[1])


def test_without_grad_mode_the_function_is_only_called() -> None:
    x = doubles(3)
    with torch.no_grad():
        assert not todist.remat(lambda x: x * 2)(x).requires_grad
    with torch.inference_mode():
        assert todist.remat(lambda x: x * 2)(x).is_inference()
    assert todist.remat(lambda x: x * 2)(x.detach()).grad_fn is None


def test_a_copy_and_its_name() -> None:
    def named(x: Tensor) -> Tensor:
        """Its docstring."""
        return x * 2

    made = todist.remat(named)
    assert (made.__name__, made.__doc__) == ("named", "Its docstring.")
    assert copy.deepcopy(made)(torch.ones(1)) == 2


def test_a_second_derivative_that_torch_refuses_or_lacks_is_an_error() -> None:
    x = doubles(4, 3)
    functions: list[tuple[Fn, str]] = [(Cube.apply, "Cube"), (lambda x: torch.cdist(x, x * 2), "cdist")]
    for function, text in functions:
        value = todist.remat(function)(x).sum()
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        with pytest.raises(RuntimeError, match=text):
            torch.autograd.grad(first.pow(2).sum(), x)


def appends(x: Tensor) -> Tensor:
    return x * _counter.add_(1)


_counter = torch.zeros(())
_leaf = torch.ones(3, requires_grad=True)
_made_before = (_leaf**3).sum()


@each_row(
    ("function", "kind", "text"),
    [
        (appends, RuntimeError, r"`appends` changes a tensor of shape \(\) in place"),
        (lambda x: x.detach().add_(1), RuntimeError, r"changes a tensor of shape \(3,\) in place"),
        (lambda x: (x * 2).sum().backward(), RuntimeError, r"calls `backward\(\)`"),
        (
            lambda x: x * torch.autograd.grad(_made_before, _leaf, create_graph=True)[0],
            ValueError,
            "a graph that was made before it was called",
        ),
        (lambda x: {x * 2}, TypeError, "got an object of type set, in which a tensor would have no gradient"),
    ],
)
def test_what_would_be_wrong_is_an_error_at_the_call(function: Fn, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        todist.remat(function)(torch.ones(3, requires_grad=True))


def test_a_function_is_needed() -> None:
    with pytest.raises(TypeError, match="`function` must be a function of tensors, got int"):
        todist.remat(3)


def test_what_has_changed_since_is_an_error_in_backward() -> None:
    x, data = doubles(3), torch.ones(3)
    value = todist.remat(lambda x: (x * data).sum())(x)
    data.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: a tensor of shape \(3,\)"):
        torch.autograd.grad(value, x)
    sizes = iter([2, 3])
    value = todist.remat(lambda x: x[: next(sizes)])(x)
    with pytest.raises(RuntimeError, match="returns something else when it runs again"):
        torch.autograd.grad(value.sum(), x)
    others = iter([doubles(3), doubles(3, seed=2)])
    value = todist.remat(lambda x: (x * next(others)).sum())(x)
    with pytest.raises(
        ValueError, match=r"takes a tensor of shape \(3,\) .*, or another one than when it was called"
    ):
        torch.autograd.grad(value, x)
