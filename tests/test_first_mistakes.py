"""What a person writes in the first hour that is not meant so → an error that says what to write."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchopt_dist as todist
from torchopt_dist.distributed.parallelize import CallKwargs

NET = torch.nn.Linear(2, 1)
MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: todist.parallelize(todist.mean_reducer),
        "partitioner must not be a reducer, got mean_reducer: write `reducer=todist.mean_reducer`",
    ),
    (
        lambda: todist.parallelize(todist.dim_partitioner, todist.sum_reducer),
        "partitioner must be what dim_partitioner returns: write `todist.dim_partitioner(0)`",
    ),
    (
        lambda: todist.MetaSGD(NET, learning_rate=0.1),
        "MetaSGD: got an unexpected keyword argument 'learning_rate'; its arguments are module, lr, momentum, "
        "dampening, weight_decay, nesterov, moment_requires_grad, maximize, fused",
    ),
    (
        lambda: todist.MetaSGD(NET.parameters(), lr=0.1),
        "`module` must be a torch.nn.Module, got generator: give the module itself, not its parameters",
    ),
    (
        lambda: todist.SGD(NET, lr=0.1),
        "`params` must be tensors, got the module Linear: give `module.parameters()`",
    ),
    (
        lambda: todist.FuncOptimizer(todist.MetaAdam),
        "`impl` must be a GradientTransformation, got type MetaAdam: the function `adam(...)` makes one",
    ),
    (
        lambda: todist.MetaOptimizer(NET, torch.optim.SGD),
        "`impl` must be a GradientTransformation, got type SGD",
    ),
    (
        lambda: todist.chain(todist.transform.clip_grad_norm(1.0), todist.adam),
        "`transformations[1]` must be a GradientTransformation, got function adam: call it with its arguments",
    ),
    (
        lambda: todist.parallelize(todist.tasks, vectorise=True),  # type: ignore[call-overload]
        "parallelize got an unexpected keyword argument 'vectorise': did you mean `vectorize`?",
    ),
    (
        lambda: todist.parallelize_async(redcer=todist.mean_reducer),  # type: ignore[call-overload]
        "parallelize_async got an unexpected keyword argument 'redcer': did you mean `reducer`?",
    ),
    (
        lambda: todist.map(len, [[1]], time_out=3.0),  # type: ignore[call-overload]
        "map got an unexpected keyword argument 'time_out': did you mean `timeout`?",
    ),
    (
        lambda: todist.map(len, [[1]], zoom=3.0),  # type: ignore[call-overload]
        "map got an unexpected keyword argument 'zoom'; its options are args, kwargs, reducer, workers, balance, "
        "timeout, vectorize, chunk_size, compile, device, isolate_own_share, strict, retries, hedge_after, progress, "
        "fan_out, buffers, team",
    ),
    (
        lambda: todist.MetaAdam(NET, lr=0.1, beta=(0.9, 0.9)),
        "MetaAdam: got an unexpected keyword argument 'beta': did you mean `betas`?; its arguments are module, lr, "
        "betas, eps, weight_decay, amsgrad, eps_root, moment_requires_grad, maximize, fused",
    ),
    (
        lambda: todist.inner_loop(lambda net: net(torch.ones(2)).sum(), todist.sgd(lr=0.1), NET, 1)(3),
        "`InnerLoopResult` is not callable: the adapted module is `result.params`",
    ),
    (
        lambda: todist.launch(len, ([],), nproc_per_node=2),
        "launch got an unexpected keyword argument 'nproc_per_node': did you mean `nproc_per_host`?",
    ),
    (
        lambda: todist.launch(len, ([],), time_out=2),
        "launch got an unexpected keyword argument 'time_out': did you mean `timeout`?",
    ),
]


@pytest.mark.parametrize(("mistake", "text"), MISTAKES)
def test_the_error_says_what_to_write(mistake: Callable[[], Any], text: str) -> None:
    with pytest.raises(TypeError) as caught:
        mistake()
    assert str(caught.value) == text


def test_meta_optimizers_say_why_they_have_no_zero_grad() -> None:
    optimizer: Any = todist.MetaSGD(torch.nn.Linear(1, 1), lr=0.1)
    with pytest.raises(
        AttributeError, match=r"MetaSGD has no `zero_grad`: `step\(loss\)` takes the gradient of this"
    ):
        optimizer.zero_grad()
    with pytest.raises(AttributeError, match=r"^'MetaSGD' object has no attribute 'zero'$"):
        optimizer.zero()


def first(x: torch.Tensor) -> torch.Tensor:
    return x[0]


CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: todist.parallelize(todist.tasks())(first)(torch.ones(2)),  # type: ignore[arg-type]
        ValueError,
        "a partitioner such as `todist.tasks` is passed on without parentheses",
    ),
    (
        lambda: todist.parallelize("tasks")(first)(torch.ones(2)),
        ValueError,
        "no worker is named 'tasks'; the workers are worker0: did you mean `todist.tasks`, without quotation marks?",
    ),
    (
        lambda: todist.parallelize(first)(torch.ones(2)),  # type: ignore[arg-type, type-var]
        TypeError,
        "got Tensor tensor([1., 1.]); `first` became its partitioner: write `parallelize()(first)`",
    ),
    (
        lambda: todist.remote_sync_call(first, args=(torch.ones(2),), partitoner=0),  # type: ignore[call-arg]
        TypeError,
        "got an unexpected keyword argument 'partitoner': did you mean `partitioner`?",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), CALLS)
def test_a_call_says_what_to_write(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        todist.auto_init_rpc()(call)()
    assert text in str(caught.value)


def test_without_a_group_the_error_knows_both_launchers() -> None:
    with pytest.raises(
        todist.errors.NotInitializedError,
        match=r"auto_init_rpc.*workers of `todist.launch`, give it `rpc=True`",
    ):
        todist.parallelize()(first)(torch.ones(2))


@pytest.mark.parametrize("function", [todist.parallelize, todist.parallelize_async, todist.remote_sync_call])
def test_help_lists_every_option(function: Callable[..., Any]) -> None:
    text = inspect.getdoc(function) or ""
    for option in ("partitioner", "reducer", "timeout", *CallKwargs.__annotations__):
        assert f"\n    {option}: " in text, option


def test_rank_zero_only_above_the_function_that_connects_all_ranks_is_an_error_on_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = todist.rank_zero_only(todist.auto_init_rpc()(lambda: 3))
    assert main() == 3  # one process waits for nobody
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(TypeError, match=r"write `@rank_zero_only`.*below `@auto_init_rpc"):
            main()


def test_rates_that_are_not_called_are_told() -> None:
    rates = todist.learned(NET, lr=0.1)
    with pytest.raises(TypeError, match=r"are called without arguments.*\*\*hyperparameters\(\)"):
        todist.inner_loop(lambda net: net(torch.ones(2)).sum(), todist.sgd(lr=rates), NET, 1)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (1.0, 'numbers must be a dictionary from names to numbers, got float 1.0: write `write(step, {"loss'),
        ({"train": {"loss": 1.0}}, "numbers['train'] must be a number, got dict"),
        ({"a": torch.ones(3)}, "numbers['a'] must be one number, got a tensor of shape (3,)"),
    ],
)
def test_a_wrong_number_of_a_curve_is_named_also_without_a_folder(numbers: Any, text: str) -> None:
    with todist.scalar_writer(None) as write, pytest.raises((TypeError, ValueError)) as caught:
        write(0, numbers)
    assert text in str(caught.value)


def test_running_statistics_that_stay_in_the_module_of_an_inner_loop_are_told() -> None:
    def task(net: torch.nn.Module, x: torch.Tensor, back: bool) -> torch.Tensor:
        adapted = todist.inner_loop(lambda net: net(x).square().mean(), todist.sgd(lr=0.1), net, 3).params
        if back:
            for own, new in zip(net.buffers(), adapted.buffers(), strict=True):
                own.copy_(new)
        return adapted(x).square().mean()

    @todist.auto_init_rpc()
    def main() -> None:
        net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        spread = todist.parallelize(todist.tasks, todist.mean_reducer, buffers="mean")(task)
        x = 5 + torch.randn(2, 8, 2)
        with pytest.warns(UserWarning, match=r"found none that the tasks have changed.*own.copy_"):
            spread(net, x, False)
        spread(net, x, True)
        assert int(net.get_buffer("1.num_batches_tracked")) == 3
        spread(net.eval(), x, False)  # nothing is to change, and nothing is said

    main()


@pytest.mark.parametrize(
    "adjoint", [todist.SAMA(), todist.FiniteDifference(), todist.EvolutionStrategies(2, 0.1)]
)
def test_a_second_derivative_of_an_estimate_is_refused_where_one_asks_for_it_alone(adjoint: Any) -> None:
    w, p = (torch.tensor([value], requires_grad=True) for value in (1.0, 2.0))
    adapted = todist.inner_loop(
        lambda p: (w * (p - 3) ** 2).sum(), todist.sgd(lr=0.1), p, 3, meta=w, adjoint=adjoint
    )
    (grad,) = torch.autograd.grad((adapted.params**2).sum(), w, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated itself"):
        torch.autograd.grad(grad.sum(), w, allow_unused=True)
