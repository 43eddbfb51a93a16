"""``parallelize(compile=True)``: what a task computes as a program is what it computes as it is.

Programs are traced, and consist of torch's own operations, so no C++ compiler is needed.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchopt_dist as todist
from tests.cuda_graphs import emulate_graphs
from torchopt_dist.core import programs
from torchopt_dist.distributed.worker import compiled

pytestmark = [
    pytest.mark.compiles,
    # torch hides this one by itself, where warnings are not errors
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
ROWS, TASKS = 6, 4
TWO = {"two": 2}


def trace_only(compiles: list[Any] | None = None) -> None:
    """Let programs of this process consist of torch's operations; a warning of a refusal is an error."""

    def kernels(_captured: bool, graph: Any, _inputs: Any) -> Any:
        if compiles is not None:
            compiles.append(graph)
        return graph

    programs.kernels = kernels
    programs.programs_of.cache_clear()
    warnings.filterwarnings("error", message=".*compile=True")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that this process compiles."""
    monkeypatch.setattr(programs, "kernels", programs.kernels)
    made: list[Any] = []
    with warnings.catch_warnings():
        trace_only(made)
        yield made
    programs.programs_of.cache_clear()


class Net(nn.Module):
    """With a tied, a frozen and an unused parameter."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = nn.Linear(3, 3)
        self.again.weight = self.first.weight
        self.last = nn.Sequential(*more, nn.Linear(3, 1))
        self.last[-1].bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.again(torch.tanh(self.first(x)))))


def adapted_loss(net: nn.Module, lr: Tensor, kind: str, x: Tensor, y: Tensor) -> Tensor:
    net = todist.module_clone(net, by="copy" if kind == "copied" else "reference")
    if kind == "adam":
        inner: Any = todist.MetaAdam(net, lr=lr, eps=0.01)
    elif kind == "own":
        inner = todist.MetaOptimizer(
            net, todist.chain(todist.transform.clip_grad_norm(0.1), todist.rmsprop(lr=lr, eps=0.1))
        )
    else:
        inner = todist.MetaSGD(net, lr=lr, momentum=0.5, weight_decay=0.1)
    for _ in range(2):
        if kind == "first order":
            inner.step(lambda: F.mse_loss(net(x), y), first_order=True)
        else:
            inner.step(F.mse_loss(net(x), y))
    return F.mse_loss(net(x), y)


def found(net: nn.Module, kind: str, function: Any = adapted_loss, **options: Any) -> list[Tensor]:
    """Losses and gradients of a call."""
    torch.manual_seed(1)
    x = torch.randn(TASKS, ROWS, 3, dtype=torch.float64)
    y = torch.randn(TASKS, ROWS, 1, dtype=torch.float64)
    lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    losses = todist.parallelize(todist.tasks, todist.stack_reducer, **options)(function)(net, lr, kind, x, y)
    given = [lr, *(p for p in net.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(losses.cos().sum(), given, allow_unused=True)
    return [losses, *(torch.zeros_like(p) if g is None else g for p, g in zip(given, grads, strict=True))]


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    ("kind", "vectorize"),
    [("sgd", False), ("adam", True), ("own", True), ("copied", False), ("first order", True)],
)
def test_a_compiled_task_has_the_same_values_and_gradients(kind: str, vectorize: bool) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = Net(nn.LayerNorm(3), nn.BatchNorm1d(3, track_running_stats=False))
        expected = found(net, kind)
        torch.testing.assert_close(found(net, kind, compile=True, vectorize=vectorize), expected)

    todist.auto_init_rpc()(body)()


@pytest.mark.parametrize("vectorize", [False, True])
def test_results_of_cuda_graphs_are_kept(vectorize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = emulate_graphs(monkeypatch)

    def body() -> None:
        torch.manual_seed(0)
        net = Net()
        expected = found(net, "sgd")
        torch.testing.assert_close(
            found(net, "sgd", compile="reduce-overhead", vectorize=vectorize), expected
        )
        assert len(captured) == 1, "a program of the loss and its gradient"

    todist.auto_init_rpc()(body)()


@pytest.mark.parametrize("vectorize", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_on_several_workers(world: Any, vectorize: bool) -> None:
    def body() -> None:
        for rank in range(3):
            todist.remote_sync_call(trace_only, partitioner=rank)
        torch.manual_seed(0)
        net = Net(*([] if vectorize else [nn.Dropout(0.5)]))
        expected = found(net, "sgd")
        for _ in range(2):
            torch.testing.assert_close(found(net, "sgd", compile=True, vectorize=vectorize), expected)

    world(3).on_zero(body)


@pytest.mark.parametrize("vectorize", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_call_without_gradients_uses_the_same_program(graphs: list[Any], vectorize: bool) -> None:
    def body() -> None:
        net = Net()
        expected = found(net, "sgd", compile=True, vectorize=vectorize)[0]
        assert len(graphs) == 1
        with torch.no_grad():
            torch.manual_seed(1)
            x = torch.randn(TASKS, ROWS, 3, dtype=torch.float64)
            y = torch.randn(TASKS, ROWS, 1, dtype=torch.float64)
            lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
            spread = todist.parallelize(todist.tasks, todist.stack_reducer, compile=True, vectorize=vectorize)
            losses = spread(adapted_loss)(net, lr, "sgd", x, y)
        assert not losses.requires_grad
        torch.testing.assert_close(losses, expected)
        assert len(graphs) == 1

    todist.auto_init_rpc()(body)()


KINDS = {
    "a loss": (lambda w, x: (w["a"] * x).sum().cos(), True),
    "a loss of one dimension": (lambda w, x: (w["a"] * x).sum().cos().reshape(1), True),
    "a loss and what has no gradient": (
        lambda w, x: {"loss": (w["a"] * x).sum().cos(), "hits": (x > 0).sum()},
        True,
    ),
    "a loss that uses a tensor twice": (
        lambda w, x: (w["a"] * w["a"] * x).sum() + w["b"] * x.sum() ** 2,
        True,
    ),
    "two losses": (lambda w, x: ((w["a"] * x).sum(), w["b"] * x.sum() ** 2), False),
    "several numbers": (lambda w, x: w["a"] * x.cos(), False),
}


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_is_one_program_with_its_gradient(graphs: list[Any], kind: str, vectorize: bool) -> None:
    """The gradients are those without the compiler, ``None`` among them, and of rows that each task has its own of."""
    task, with_gradient = KINDS[kind]

    def found(**options: Any) -> list[Any]:
        w = {"a": torch.tensor([0.3, 0.7]), "b": torch.tensor(0.2), "unused": torch.ones(2)}
        w = {name: value.double().requires_grad_() for name, value in w.items()}
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2).requires_grad_()
        made = todist.parallelize(todist.tasks, todist.stack_reducer, **options)(task)(
            todist.replicated(w), x
        )
        leaves = [leaf for leaf in optree.tree_leaves(made) if leaf.requires_grad]
        loss = sum((leaf.exp().sum() for leaf in leaves), start=torch.zeros((), dtype=torch.float64))
        first = torch.autograd.grad(loss, [*w.values(), x], retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(loss, [*w.values(), x], allow_unused=True)
        torch.testing.assert_close(first, again)
        return [made, *first]

    def body() -> None:
        torch.testing.assert_close(found(compile=True, vectorize=vectorize), found())
        assert len(graphs) == (1 if with_gradient else 2)

    todist.auto_init_rpc()(body)()


def test_gradients_of_tasks_that_would_take_much_memory_are_not_kept(
    graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ``w``, which all share, each task has a gradient; of its row of ``x`` only its own."""

    def task(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).sum().exp()

    def body() -> None:
        w, x = torch.tensor([0.3, 0.7], requires_grad=True), torch.ones(3, 2, requires_grad=True)
        call = todist.parallelize(todist.tasks, todist.sum_reducer, compile=True, vectorize=True)(task)
        for large, count in (
            (0, 2),
            (47, 2),
            (48, 1),
        ):  # 4 bytes · 2 numbers · (3 tasks + 3 rows)
            programs.programs_of.cache_clear()
            graphs.clear()
            monkeypatch.setattr(compiled, "LARGE", large)
            grads = torch.autograd.grad(call(todist.replicated(w), x), [w, x])
            torch.testing.assert_close(
                grads, (torch.full((2,), 3 * math.e), math.e * w.detach().expand(3, 2))
            )
            assert len(graphs) == count

    todist.auto_init_rpc()(body)()


def test_a_tensor_that_a_task_closes_over_has_its_gradient(graphs: list[Any]) -> None:
    """A program with its gradient is one of arguments alone, so this task gets another one."""
    closed = torch.tensor([2.0, 3.0], requires_grad=True)

    def body() -> None:
        w = torch.ones(2, requires_grad=True)
        for vectorize in (False, True):
            call = todist.parallelize(todist.tasks, todist.sum_reducer, compile=True, vectorize=vectorize)(
                lambda w, x: (w * closed.detach() * x).sum() * closed.prod()
            )
            x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
            grads = torch.autograd.grad(call(todist.replicated(w), x), [w, closed])
            torch.testing.assert_close(grads, (torch.tensor([12.0, 18.0]), torch.tensor([15.0, 10.0])))

    todist.auto_init_rpc()(body)()
    assert graphs


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("vectorize", [False, True])
def test_second_derivatives_of_a_compiled_task_are_those_of_the_task(vectorize: bool) -> None:
    def body() -> None:
        w = torch.ones(2, requires_grad=True)
        cubes = todist.parallelize(todist.tasks, todist.sum_reducer, compile=True, vectorize=vectorize)(
            lambda w, x: (w**3 * x).sum()
        )
        loss = cubes(todist.replicated(w), torch.ones(3, 2))
        grad = torch.autograd.grad(loss, w, create_graph=True)[0]
        torch.testing.assert_close(grad, torch.full((2,), 9.0))
        second = torch.autograd.grad(grad.sum() + w.sum(), w, create_graph=True)[0]
        torch.testing.assert_close(second, torch.full((2,), 19.0))
        torch.testing.assert_close(torch.autograd.grad(second.sum(), w)[0], torch.full((2,), 18.0))

    todist.auto_init_rpc()(body)()


def test_a_function_that_is_made_anew_at_each_call_is_compiled_once(graphs: list[Any]) -> None:
    def body() -> None:
        for factor in (2.0, 3.0, 4.0):
            weight = torch.tensor([factor, 1.0])

            def task(x: Tensor, weight: Tensor = weight) -> Tensor:
                return (x * weight).sum()

            call = todist.parallelize(todist.tasks, todist.sum_reducer, compile=True)(task)
            torch.testing.assert_close(call(torch.ones(3, 2)), torch.tensor(3 * (factor + 1)))
        assert len(graphs) == 1

    todist.auto_init_rpc()(body)()


def test_a_number_that_a_task_closes_over_is_never_stale(graphs: list[Any]) -> None:
    def body() -> None:
        for factor in (2.0, 3.0, 2.0):
            call = todist.parallelize(todist.tasks, todist.sum_reducer, compile=True)(times(factor))
            torch.testing.assert_close(call(torch.ones(3, 2)), torch.tensor(6 * factor))

    todist.auto_init_rpc()(body)()


SENT = """
def task(x):
    return helper(A * x.sum()) + B
def helper(x):
    return B * x
"""


def test_global_names_of_a_function_that_was_sent_are_its_own(graphs: list[Any]) -> None:
    """As on a worker of `launch`, whose main module has none of these names, or others."""
    x = torch.ones(2)
    given = [(1.0, 1.0), (2.0, 1.0), (2.0, 5.0), (1.0, 1.0), (2.0, 5.0)]
    for a, b in given:
        names: dict[str, Any] = {"A": torch.tensor([a]), "B": b, "__name__": "__main__"}
        exec(SENT, names)
        assert compiled.CompiledTask(names["task"], True)(x) == 2 * a * b + b
    assert len(graphs) == 2, "one for each `B`: the values of `A` are an input"


def test_functions_of_the_main_module_on_workers_that_do_not_have_it(world: Any) -> None:
    def helper(x: Tensor) -> Tensor:
        return TWO["two"] * x

    def body() -> None:
        for rank in range(2):
            todist.remote_sync_call(trace_only, partitioner=rank)
        for _ in range(2):
            call = todist.parallelize(todist.tasks, todist.sum_reducer, compile=True)(
                lambda x: helper(x.sum())
            )
            assert call(torch.ones(4, 3)) == 24

    world(2).on_zero(body)


def times(factor: float) -> Any:
    return lambda x: factor * x.sum()


def of_two_branches(x: Tensor) -> Tensor:
    return x.sum() if x.sum() > 1 else -x.sum()


def with_an_inner_loop(x: Tensor) -> Any:
    return todist.inner_loop(lambda w: (w**2).sum(), todist.sgd(lr=0.25), x, 2).params.sum()


@pytest.mark.parametrize("task", [of_two_branches, with_an_inner_loop])
@pytest.mark.usefixtures("graphs")
def test_what_the_compiler_refuses_runs_as_it_is(task: Any) -> None:
    def body() -> None:
        x = torch.randn(3, 2, requires_grad=True)
        with pytest.warns(
            UserWarning, match=f"the task '{task.__name__}' with compile=True runs as without it, since"
        ):
            made = todist.parallelize(todist.tasks, todist.stack_reducer, compile=True)(task)(x)
        expected = torch.stack([task(row) for row in x])
        torch.testing.assert_close(made, expected)
        torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x)[0] for each in (made, expected)))

    todist.auto_init_rpc()(body)()


def with_an_error(x: Tensor) -> Tensor:
    raise ValueError("this is the task's own")


@pytest.mark.usefixtures("graphs")
def test_an_error_of_the_task_is_its_own() -> None:
    def body() -> None:
        for options in ({}, {"vectorize": True}):
            with pytest.raises(ValueError, match="this is the task's own"):
                todist.parallelize(todist.tasks, compile=True, **options)(with_an_error)(torch.ones(3, 2))
        with pytest.raises(ValueError, match="`compile` must be True, False or"):
            todist.parallelize(todist.tasks, compile="yes")(with_an_error)(torch.ones(3, 2))

    todist.auto_init_rpc()(body)()


@pytest.mark.usefixtures("graphs")
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.filterwarnings("ignore:There is a performance drop because")  # while it is traced
@pytest.mark.parametrize("vectorize", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_weight_norm_in_a_task_is_differentiated_by_its_formula(vectorize: bool) -> None:
    """Torch takes the norms for constants, and the compiler shows the function to no mode."""

    def body() -> None:
        torch.manual_seed(0)
        net = Net(nn.utils.weight_norm(nn.Linear(3, 3)))
        expected = found(net, "sgd")
        torch.testing.assert_close(found(net, "sgd", compile=True, vectorize=vectorize), expected)

    todist.auto_init_rpc()(body)()


@pytest.mark.parametrize("by", ["reference", "copy", "deepcopy"])
def test_a_module_is_cloned_in_every_way(graphs: list[Any], by: Any) -> None:
    def task(net: nn.Module, x: Tensor) -> Tensor:
        return todist.module_clone(net, by=by)(x).sum()

    net = nn.Linear(1, 1)
    made = compiled.CompiledTask(task, True)(net, torch.ones(1))
    torch.testing.assert_close(made, task(net, torch.ones(1)))
    assert made.requires_grad
    (grad,) = torch.autograd.grad(made, net.weight, allow_unused=True)
    assert (grad is None) == (by == "deepcopy")
    assert graphs


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("vectorize", [False, True])
def test_indices_that_are_tensors_are_inputs(graphs: list[Any], vectorize: bool) -> None:
    w = torch.linspace(-1, 1, 6, requires_grad=True)

    def body() -> None:
        call = todist.parallelize(todist.tasks, todist.sum_reducer, compile=True, vectorize=vectorize)(
            lambda w, x, i: (w[i] * x).sum()
        )
        for k in range(4):
            made = call(todist.replicated(w), torch.ones(2, 3), torch.tensor([k, k + 1]))
            torch.testing.assert_close(made, 3 * (w[k] + w[k + 1]))
            (grad,) = torch.autograd.grad(made, w)
            assert grad.tolist() == [3.0 * (n in (k, k + 1)) for n in range(6)]
        assert len(graphs) == 1

    todist.auto_init_rpc()(body)()


NORMS = {
    "layer_norm": lambda z, w, b: F.layer_norm(z, (5,), w, b),
    "torch.layer_norm": lambda z, w, b: torch.layer_norm(z, (5,), w, b),
    "batch_norm": lambda z, w, b: F.batch_norm(z, None, None, w, b, True),
    "instance_norm": lambda z, w, b: F.instance_norm(z[None], None, None, w[:1].expand(ROWS), None)[0] + b,
}


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("name", NORMS)
def test_normalization_in_a_task_that_calls_torch_func_is_differentiated_by_its_formula(
    name: str,
) -> None:
    """Torch's derivative is wrong there; see ``torchopt_dist/formulas``."""

    def task(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        def loss(p: dict[str, Tensor]) -> Tensor:
            return F.mse_loss(NORMS[name](x @ p["a"], p["w"], p["b"]) @ p["c"], y)

        grads = torch.func.grad(loss)(p)
        return loss({key: p[key] - 0.1 * grads[key] for key in p})

    def body() -> None:
        torch.manual_seed(0)
        p = {"a": torch.randn(3, 5), "w": torch.rand(5), "b": torch.randn(5), "c": torch.randn(5, 1)}
        p = {key: value.double().requires_grad_() for key, value in p.items()}
        x, y = torch.randn(4, ROWS, 3).double(), torch.randn(4, ROWS, 1).double()
        results = []
        for options in ({}, {"vectorize": True, "compile": True}):
            losses = todist.parallelize(todist.tasks, todist.stack_reducer, **options)(task)(
                todist.replicated(p), x, y
            )
            results.append([losses, *torch.autograd.grad(losses.sum(), list(p.values()))])
        torch.testing.assert_close(*results)

    todist.auto_init_rpc()(body)()


def two_groups(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    net = todist.module_clone(net)
    inner = todist.MetaSGD(net[0], lr=0.1)
    inner.add_param_group(net[2], lr=0.2)
    for _ in range(2):
        inner.step(F.mse_loss(net(x), y))
    return F.mse_loss(net(x), y)


def back_again(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    net = todist.module_clone(net)
    inner = todist.MetaAdam(net, lr=0.1)
    states = todist.extract_state_dict(net, by="reference"), todist.extract_state_dict(inner)
    inner.step(F.mse_loss(net(x), y))
    first = F.mse_loss(net(x), y)
    todist.recover_state_dict(net, states[0])
    todist.recover_state_dict(inner, states[1])
    inner.step(2 * F.mse_loss(net(x), y))
    return first + F.mse_loss(net(x), y)


def computed_again(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return todist.remat(lambda x: F.mse_loss(net(x), y))(x)


def by_torch_func(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    def loss(params: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(torch.func.functional_call(net, params, (x,)), y)

    params = dict(net.named_parameters())
    grads = torch.func.grad(loss)(params)
    return loss({name: p - 0.1 * grads[name] for name, p in params.items()})


def of_several_values(net: nn.Module, x: Tensor, y: Tensor) -> Any:
    return {"made": net(x), "loss": F.mse_loss(net(x), y), "text": "a", "number": 3}


PROGRAMS: dict[str, Any] = {
    task.__name__: task for task in (two_groups, back_again, computed_again, by_torch_func, of_several_values)
}


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_tasks_do_is_compiled_and_has_second_derivatives(
    graphs: list[Any], name: str, vectorize: bool
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, y = torch.randn(TASKS, ROWS, 3).double(), torch.randn(TASKS, ROWS, 1).double()
    vectorize = vectorize and name != "of_several_values"  # `vmap` returns no texts

    def derivatives(compile: bool) -> list[Tensor]:
        call = todist.parallelize(todist.tasks, None, vectorize=vectorize, compile=compile)(PROGRAMS[name])
        leaves = [leaf for leaf in optree.tree_leaves(call(net, x, y)) if isinstance(leaf, Tensor)]
        value = sum((leaf.cos().sum() for leaf in leaves), start=torch.zeros(()).double())
        first = torch.autograd.grad(value, [*net.parameters()], create_graph=True)
        return [value, *first, *torch.autograd.grad(sum(g.sin().sum() for g in first), [*net.parameters()])]

    def body() -> None:
        expected = derivatives(False)
        torch.testing.assert_close(derivatives(True), expected)
        assert graphs

    todist.auto_init_rpc()(body)()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("task", [two_groups, computed_again])
def test_without_gradients(graphs: list[Any], mode: Any, task: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x, y = torch.randn(TASKS, ROWS, 3), torch.randn(TASKS, ROWS, 1)

    def body() -> None:
        with mode():
            found = [
                todist.parallelize(todist.tasks, todist.stack_reducer, compile=compile)(task)(net, x, y)
                for compile in (False, True)
            ]
        torch.testing.assert_close(found[1], found[0])
        assert len(graphs) == 1

    todist.auto_init_rpc()(body)()


@pytest.mark.usefixtures("graphs")
def test_a_task_that_moves_its_module_itself_is_refused() -> None:
    def task(net: nn.Module, x: Tensor) -> Tensor:
        todist.MetaSGD(net, lr=0.1).step(net(x).square().mean())
        return net(x).square().mean()

    def body() -> None:
        net, x = nn.Linear(3, 1), torch.ones(2, 4, 3)
        expected = todist.parallelize(todist.tasks, todist.stack_reducer)(task)(net, x)
        with pytest.warns(UserWarning, match=r"args\[0\]\._parameters\['weight'\] changes when it runs"):
            found = todist.parallelize(todist.tasks, todist.stack_reducer, compile=True)(task)(net, x)
        torch.testing.assert_close(found, expected)

    todist.auto_init_rpc()(body)()


@pytest.mark.parametrize("several", [False, True])
def test_statistics_that_a_task_changes_are_changed_once(graphs: list[Any], several: bool) -> None:
    """Also where the gradient, or a second derivative, computes the task again."""

    def task(net: nn.Module, x: Tensor) -> Any:
        made = net(x)
        return (made.square().mean(), made.sum()) if several else made.square().mean()

    def found(compile: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
        x = torch.randn(2, 4, 3).double()
        call = todist.parallelize(todist.tasks, None, buffers="mean", compile=compile)(task)
        values = optree.tree_leaves([call(net, x), call(net, 2 * x)])
        loss = sum((value.cos() for value in values), start=torch.zeros(()).double())
        params = [*net.parameters()]
        first = torch.autograd.grad(loss, params, create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), params)
        return [*values, *first, *second, *net.buffers()]

    def body() -> None:
        torch.testing.assert_close(found(True), found(False), rtol=1e-6, atol=1e-6)
        assert graphs

    todist.auto_init_rpc()(body)()
