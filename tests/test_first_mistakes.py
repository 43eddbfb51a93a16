"""What a person writes in the first hour that is not meant so → an error that says what to write."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch

import torchopt_dist as todist
from tests.docs.test_public_names import MODULES
from tests.rows import each_row
from torchopt_dist.distributed.parallelize import CallKwargs

untyped: Any = todist
"""For calls that a type checker would refuse."""
NET = torch.nn.Linear(2, 1)
SAMPLER: Any = todist.data.TaskSampler((torch.ones(4, 1), torch.arange(4) % 2), ways=2, shots=1, queries=1)


def first(x: torch.Tensor) -> torch.Tensor:
    return x[0]


def squares(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = net(x)
    return y.square().mean()


def no_data(net: torch.nn.Module) -> torch.Tensor:
    return squares(net, torch.ones(2))


def no_length() -> torch.Tensor:
    raise TypeError("no length")


def pairs(net: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    found: torch.Tensor = (net(x) - y).square().mean()
    return found


def outer_gradient(model: torch.nn.Module) -> None:
    todist.inner_loop(squares, todist.sgd(lr=0.1), model, [torch.ones(1, 2)]).params(
        torch.ones(2)
    ).sum().backward()


def step_of(model: torch.nn.Module) -> torch.Tensor:
    todist.MetaSGD(model, lr=0.1).step(lambda: no_data(model))
    return no_data(model)


def compiled() -> torch.nn.Module:
    made: Any = torch.compile(torch.nn.Linear(2, 1), backend="aot_eager")
    return made


def by_torchscript(make: Callable[..., Any]) -> torch.nn.Module:
    with warnings.catch_warnings(action="ignore"):  # it is deprecated
        made: torch.nn.Module = make(torch.nn.Sequential(torch.nn.Linear(2, 1)))
    return made


COMPILED = (
    "what `torch.compile` has compiled has no second derivative: give the module or function as it is, and "
    "`compile=True` to todist.inner_loop"
)


MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: untyped.data.TaskSampler((torch.ones(4, 1), torch.arange(4)), ways=2, shots=1, query=1),
        "TaskSampler got an unexpected keyword argument 'query': did you mean `queries`?",
    ),
    (
        lambda: untyped.learned(NET, rate=0.1),
        "learned got an unexpected keyword argument 'rate'; its options are model, lr, weight_decay, entries",
    ),
    (
        lambda: untyped.inner_loop(no_data, todist.sgd(lr=0.1), NET, 3, adjiont=todist.Recorded()),
        "inner_loop got an unexpected keyword argument 'adjiont': did you mean `adjoint`?",
    ),
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
        lambda: untyped.parallelize(todist.tasks, vectorise=True),
        "parallelize got an unexpected keyword argument 'vectorise': did you mean `vectorize`?",
    ),
    (
        lambda: untyped.parallelize_async(redcer=todist.mean_reducer),
        "parallelize_async got an unexpected keyword argument 'redcer': did you mean `reducer`?",
    ),
    (
        lambda: untyped.map(len, [[1]], time_out=3.0),
        "map got an unexpected keyword argument 'time_out': did you mean `timeout`?",
    ),
    (
        lambda: untyped.map(len, [[1]], zoom=3.0),
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
    (
        lambda: untyped.Launcher(nproc_per_host=1).run(len, args=([],)),
        "`run(func, *args, **kwargs)` hands its arguments on to `func`, and len takes no 'args': write `run(len, x, "
        "name=y)`, or `launch(len, (x,), {'name': y}, ...)`",
    ),
    (
        lambda: untyped.Launcher(nproc_per_host=1).run(len, [], timeout=3.0),
        "`run(func, *args, **kwargs)` hands its arguments on to `func`, and len takes no 'timeout': an option is given "
        "to the launcher, `Launcher(timeout=...).run(len, ...)`",
    ),
    (
        lambda: SAMPLER.batch(4),
        "`indices` must be the indices of the tasks, got int 4: the first four are `batch(range(4))`, and task i alone "
        "is `sampler[i]`",
    ),
    (
        lambda: untyped.inner_loop(NET, no_data, todist.sgd(lr=0.1), 3),
        "`optimizer` must be a gradient transformation, such as todist.adam(lr=0.1), got function: the order is "
        "`inner_loop(loss, optimizer, params, batches)`, and `params` is the optimizer",
    ),
    (
        lambda: untyped.inner_loop(no_data, NET, todist.sgd(lr=0.1), 3),
        "`optimizer` must be a gradient transformation, such as todist.adam(lr=0.1), got Linear: the order is "
        "`inner_loop(loss, optimizer, params, batches)`, and `params` is the optimizer",
    ),
    (
        lambda: untyped.inner_loop(todist.sgd(lr=0.1), no_data, NET, 3),
        "`loss` must be a function, got ChainedGradientTransformation: the order is "
        "`inner_loop(loss, optimizer, params, batches)`, and `loss` is the optimizer",
    ),
    (
        lambda: untyped.inner_loop(no_data, torch.optim.Adam(NET.parameters()), NET, 3),
        "`optimizer` must be a gradient transformation, such as todist.adam(lr=0.1), got torch.optim.Adam: write "
        "`todist.adam(lr=...)`",
    ),
    (
        lambda: untyped.inner_loop(no_data, torch.optim.LBFGS, NET, 3),
        "`optimizer` must be a gradient transformation, such as todist.adam(lr=0.1), got torch.optim.LBFGS",
    ),
    (
        lambda: untyped.inner_loop(no_data, todist.sgd(lr=0.1), NET, steps=3),
        "inner_loop needs `batches`: for a loss without data write the number of steps in their place, "
        "`inner_loop(loss, optimizer, params, 3)`",
    ),
    (
        lambda: todist.inner_loop(squares, todist.sgd(lr=0.1), NET, 3),
        "`loss` must take the parameters alone, `loss(params)`, since `batches` is a number of steps; a loss of a "
        "batch needs a batch for each step, `inner_loop(loss, optimizer, params, [batch] * steps)`: missing a required "
        "argument: 'x'",
    ),
    (
        lambda: todist.inner_loop(no_data, todist.sgd(lr=0.1), NET, [torch.ones(2)]),
        "`loss` must take the parameters and a batch, `loss(params, batch)`, since `batches` has batches; for a loss "
        "without data `batches` is the number of steps: too many positional arguments",
    ),
    (
        lambda: untyped.MetaSGD(NET, **todist.learned(NET, lr=0.1)),
        "learned hyper-parameters must be called for their values: write `**hyperparameters()`",
    ),
    (
        lambda: untyped.Implicit(todist.linear_solve.solve_cg),
        "`solve` must be a solver, got the function solve_cg, which makes one: call it, `solve_cg()`",
    ),
    *(
        (
            lambda make=make: make(lr=lambda step: None),
            "`lr` as a schedule must return a number or a tensor for each step, got None",
        )
        for make in (
            partial(todist.SGD, NET.parameters()),
            lambda lr: todist.inner_loop(no_data, todist.adan(lr=lr), NET, 3),
            lambda lr: todist.inner_loop(no_data, todist.adafactor(lr=lr), NET, 3),
            lambda lr: todist.inner_loop(no_data, todist.sgd(lr=lr), NET, 3),
            lambda lr: todist.inner_loop(no_data, todist.adam(lr=lr, amsgrad=True), NET, 3),
            lambda lr: todist.inner_loop(
                no_data, todist.chain(todist.transform.scale_by_learning_rate(lr)), NET, 3
            ),
        )
    ),
    (
        lambda: untyped.learned(NET, 0.1),
        "learned takes 1 without a name, got 2: by their names it takes lr, weight_decay, entries",
    ),
    (
        lambda: untyped.module_clone(NET, "copy"),
        "module_clone takes 1 without a name, got 2: by their names it takes by, detach_buffers, device",
    ),
    (
        lambda: untyped.Checkpointer("here").save(3, net=NET),
        "Checkpointer.save got an unexpected keyword argument 'net'; its options are step, objects, score, force",
    ),
    (
        lambda: untyped.launch(None, nproc_per_host=2),
        "`func` must be callable, got NoneType None: give the function itself, `main`, not what it returns, `main()`",
    ),
    (
        lambda: untyped.launch(len, 2),
        "`args` must be a tuple of arguments, got int 2: the number of workers is `nproc_per_host=2`",
    ),
    (
        lambda: untyped.launching.LaunchResult({})[0],
        "`LaunchResult` is not subscriptable: the value of rank 0 is `result.rank(0)`",
    ),
    *(
        (
            lambda make=make: make(lr=None),
            "`lr` must be a number, a tensor or a schedule, got NoneType; a tree has a number or a tensor for each "
            "parameter",
        )
        for make in (todist.sgd, todist.rmsprop, partial(todist.MetaSGD, NET))
    ),
    (
        lambda: untyped.map(len, [[1]], NET),
        "map(func, items) has two arguments without a name, got 3: what follows the item in each call is given by "
        "`args=`, such as `map(func, items, args=(model,))`",
    ),
]


OTHERS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: todist.inner_loop(
            no_data, todist.sgd(lr=todist.learned(NET, lr=0.1, weight_decay=0.1)()), NET, 3
        ),
        ValueError,
        "got a dictionary of hyper-parameters: write `**rates()` in the place of `lr=rates()`",
    ),
    (
        lambda: todist.tasks(),
        ValueError,
        "is passed on without parentheses, `todist.parallelize(todist.tasks)`",
    ),
    *(
        (mistake, AttributeError, text)
        for mistake, text in (
            (lambda: untyped.schedule.CosineAnnealingLR, "is `todist.schedule.cosine_decay` here"),
            (lambda: untyped.lr_scheduler, "torch's `lr_scheduler` is `todist.schedule` here"),
            (lambda: untyped.nn.MetaSGD, "no attribute 'MetaSGD'; it is `torchopt_dist.MetaSGD`"),
            (lambda: untyped.cosine_decay, "it is `torchopt_dist.schedule.cosine_decay`"),
            (lambda: untyped.data.Sampler, "did you mean `TaskSampler`?"),
            (lambda: SAMPLER.sample(), "'TaskSampler' object has no attribute 'sample': write `sampler[i]`"),
            (lambda: untyped.Checkpointer("here").load({}), "no attribute 'load': write `restore(objects)`"),
            (lambda: untyped.Checkpointer("here").restor({}), "did you mean `restore`?"),
        )
    ),
    (
        lambda: todist.inner_loop(
            lambda net: NET(torch.ones(2)).sum(), todist.sgd(lr=0.1), torch.nn.Linear(2, 1), 3
        ),
        ValueError,
        "the parameters as they are now (was it computed before the last step? by another module? under torch.no_grad?",
    ),
    (
        lambda: outer_gradient(by_torchscript(torch.jit.script)),
        TypeError,
        "`params` must not have parameters in TorchScript, got RecursiveScriptModule",
    ),
    (lambda: outer_gradient(compiled()), RuntimeError, COMPILED),
    (lambda: outer_gradient(torch.nn.Sequential(compiled())), RuntimeError, COMPILED),
    (lambda: step_of(todist.module_clone(compiled())).backward(), RuntimeError, COMPILED),
    (
        lambda: step_of(by_torchscript(partial(torch.jit.trace, example_inputs=torch.ones(2)))),
        RuntimeError,
        "does not show its parameters, which are TorchScript's: give the module that was scripted or traced",
    ),
    (lambda: todist.PES, AttributeError, "no attribute 'PES': did you mean `PersistentEvolutionStrategies`?"),
    (lambda: todist.Checkpoint, AttributeError, "no attribute 'Checkpoint': did you mean `Checkpointer`?"),
]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's look at it
@pytest.mark.parametrize(("mistake", "kind", "text"), OTHERS)
def test_errors_of_other_kinds_say_it_too(
    mistake: Callable[[], Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        mistake()
    assert text in str(caught.value)


def test_python_alone_tells_of_no_misspelt_option_of_what_users_call() -> None:
    """Where there are at least three to remember; Python 3.13 tells them itself."""
    seldom = {"autograd", "errors", "launching", "linalg", "nn", "ops", "pytree", "transform", "typing"}
    places = [todist, *(module for name, module in MODULES.items() if name not in seldom)]
    told, bare = [], []
    for name, thing in {name: getattr(place, name) for place in places for name in place.__all__}.items():
        if name.endswith(("Error", "Warning")) or not isinstance(thing, FunctionType | type):
            continue
        if len(inspect.signature(thing).parameters) >= 3:
            with pytest.raises(TypeError) as caught:
                thing(no_such_option=1)
            text = str(caught.value)
            told += [name] if "; its options are " in text else []
            bare += [name] if text.endswith("got an unexpected keyword argument 'no_such_option'") else []
    assert bare[0] == "apply_updates"  # in every step
    assert bare[1:] == ["GlyphSplit", "Task", "SolverInfo", "NonlinearSolverInfo"]  # results
    assert len(told) > 40


@each_row("module", [todist, *MODULES.values()])
def test_what_tells_of_misspelt_options_is_one_function_wherever_it_is_found(module: Any) -> None:
    functions = [each for name in module.__all__ if type(each := getattr(module, name)) is FunctionType]
    for function in functions:
        assert pickle.loads(pickle.dumps(function)) is function
        assert getattr(sys.modules[function.__module__], function.__name__) is function


def test_a_type_error_inside_a_loss_that_is_called_rightly_stays_as_it_is() -> None:
    with pytest.raises(TypeError, match=r"^no length$"):
        todist.inner_loop(lambda net, x: no_length(), todist.sgd(lr=0.1), NET, [1])


@each_row(("mistake", "text"), MISTAKES)
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
    with pytest.raises(
        AttributeError, match=r"torch's schedulers refuse it: give a schedule, `MetaSGD\(module, lr="
    ):
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: untyped.parallelize(todist.tasks())(first)(torch.ones(2)),
        ValueError,
        "a partitioner such as `todist.tasks` is passed on without parentheses",
    ),
    (
        lambda: todist.parallelize("tasks")(first)(torch.ones(2)),
        ValueError,
        "no worker is named 'tasks'; the workers are worker0: did you mean `todist.tasks`, without quotation marks?",
    ),
    (
        lambda: untyped.parallelize(first)(torch.ones(2)),
        TypeError,
        "got Tensor tensor([1., 1.]); `first` became its partitioner: write `parallelize()(first)`",
    ),
    (
        lambda: untyped.remote_sync_call(len, torch.ones(2)),
        TypeError,
        "has one argument without a name, got 2: write `remote_sync_call(len, args=(x,), partitioner=1)`",
    ),
    (
        lambda: untyped.remote_async_call(0, len, torch.ones(2)),
        TypeError,
        "got 3, and its first one is the function, not 0: write `remote_async_call(len, args=(x,), partitioner=1)`",
    ),
    (
        lambda: untyped.remote_call(len, torch.ones(2, 2)),
        TypeError,
        "must be a rank or a name, got Tensor tensor([[1., 1.], [1., 1.]]): write `remote_call(len, 1, x)`",
    ),
    (
        lambda: untyped.map([[1], [2]], len),
        TypeError,
        "map(func, items) takes the function first, got list: write map(len, items)",
    ),
    (
        lambda: todist.parallelize(todist.tasks, todist.mean_reducer, vectorize=True)(squares)(
            torch.nn.BatchNorm1d(2), torch.ones(2, 4, 2)
        ),
        RuntimeError,
        'update running statistics of a module that they share: write `buffers="mean"` beside it',
    ),
    (
        lambda: untyped.remote_sync_call(first, args=(torch.ones(2),), partitoner=0),
        TypeError,
        "got an unexpected keyword argument 'partitoner': did you mean `partitioner`?",
    ),
]


@each_row(("call", "kind", "text"), CALLS)
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


@each_row("function", [todist.parallelize, todist.parallelize_async, todist.remote_sync_call])
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


@each_row(
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


@each_row("adjoint", [todist.SAMA(), todist.FiniteDifference(), todist.EvolutionStrategies(2, 0.1)])
def test_a_second_derivative_of_an_estimate_is_refused_where_one_asks_for_it_alone(adjoint: Any) -> None:
    w, p = (torch.tensor([value], requires_grad=True) for value in (1.0, 2.0))
    adapted = todist.inner_loop(
        lambda p: (w * (p - 3) ** 2).sum(), todist.sgd(lr=0.1), p, 3, meta=w, adjoint=adjoint
    )
    (grad,) = torch.autograd.grad((adapted.params**2).sum(), w, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated itself"):
        torch.autograd.grad(grad.sum(), w, allow_unused=True)


ESTIMATES = [
    todist.Implicit(),
    todist.FiniteDifference(),
    todist.SAMA(),
    todist.EvolutionStrategies(2, 0.1),
    todist.PersistentEvolutionStrategies(2, 0.1, unroll=2),
]


@each_row("adjoint", ESTIMATES)
def test_a_loop_without_meta_whose_adjoint_gives_the_first_parameters_no_gradient_is_told(
    adjoint: Any,
) -> None:
    def adapted(**options: Any) -> None:
        todist.inner_loop(
            lambda net: net(torch.ones(2)).square().sum(),
            todist.sgd(lr=0.1),
            NET,
            2,
            adjoint=adjoint,
            **options,
        )

    with pytest.warns(
        UserWarning, match=rf"`{type(adjoint).__name__}\(\)` gives one only to .* in `meta`"
    ) as caught:
        adapted()
    assert caught[0].filename == __file__
    with torch.no_grad():
        adapted()


@each_row("graph", [False, True])
@each_row(
    "adjoint",
    [todist.Recorded(), todist.Replayed(), *ESTIMATES],
)
def test_a_tensor_of_meta_that_the_loss_does_not_use_gets_no_gradient(adjoint: Any, graph: bool) -> None:
    w, used, unused = (torch.tensor([value], requires_grad=True) for value in (1.0, 3.0, 5.0))
    adapted = todist.inner_loop(
        lambda w: ((w - used) ** 2).sum(), todist.sgd(lr=0.25), w, 20, meta=(used, unused), adjoint=adjoint
    ).params
    if isinstance(adjoint, todist.Implicit):
        with pytest.warns(
            UserWarning, match=r"no gradient to a tensor of shape \(1,\): .* iMAML add the distance"
        ):
            found = torch.autograd.grad(adapted.sum(), (used, unused), allow_unused=True, create_graph=graph)
    else:
        found = torch.autograd.grad(adapted.sum(), (used, unused), allow_unused=True, create_graph=graph)
    assert found[0] is not None
    assert found[0].abs().sum() > 0
    assert found[1] is None


def test_imaml_without_its_proximity_term_is_told_once_for_each_parameter() -> None:
    def outer(proximity: float | None) -> Any:
        net = torch.nn.Linear(2, 1)

        def loss(own: torch.nn.Module) -> torch.Tensor:
            fit: torch.Tensor = (own(torch.eye(2)) - 1).square().sum()
            if proximity is None:
                return fit + sum(p.square().sum() for p in own.parameters())
            pairs = zip(own.parameters(), net.parameters(), strict=True)
            return fit + proximity * sum((a - b).square().sum() for a, b in pairs)

        adapted = todist.inner_loop(loss, todist.sgd(lr=0.1), net, 100, meta=net, adjoint=todist.Implicit())
        result: torch.Tensor = adapted.params(torch.ones(2)).sum()
        result.backward()
        return net.weight.grad

    with pytest.warns(UserWarning, match=r"of shape \(1, 2\) and one of shape \(1,\)"):
        assert outer(None) is None
    assert outer(1.0).abs().sum() > 0


@each_row("vectorized", [False, True])
@each_row("graph", [False, True])
def test_implicit_far_from_a_minimum_is_told(vectorized: bool, graph: bool) -> None:
    x = torch.randn(3, 10, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.ones(10, dtype=torch.float64, requires_grad=True)

    def gradient(steps: int, **options: Any) -> torch.Tensor:
        def outer(x: torch.Tensor) -> torch.Tensor:
            result = todist.inner_loop(
                lambda w: (weights * (x @ w - 1) ** 2).mean() + w.square().sum(),
                todist.sgd(lr=0.1),
                torch.full((2,), 3.0, dtype=torch.float64, requires_grad=True),
                steps,
                meta=weights,
                adjoint=todist.Implicit(**options),
            )
            total: torch.Tensor = result.params.sum()
            return total

        total = torch.vmap(outer)(x).sum() if vectorized else outer(x[0])
        (found,) = torch.autograd.grad(total, weights, create_graph=graph)
        return found

    near = gradient(300)
    with pytest.warns(
        todist.linear_solve.ConvergenceWarning, match=r"far from one: the loss's gradient has norm \d"
    ):
        far = gradient(2)
    assert (far - near).norm() > 0.2 * near.norm()
    assert torch.equal(gradient(2, not_converged="ignore"), far)
    with pytest.raises(torch.linalg.LinAlgError, match=r"Take more steps or a larger rate"):
        gradient(2, not_converged="raise")


def test_a_loop_that_begins_at_the_minimum_is_not_accused() -> None:
    scale = torch.tensor(1.0, requires_grad=True)
    adapted = todist.inner_loop(
        lambda w: ((w - 2 * scale) ** 2).sum(),
        todist.sgd(lr=0.1),
        torch.tensor([2.0], requires_grad=True),
        1,
        meta=scale,
        adjoint=todist.Implicit(),
    )
    assert torch.autograd.grad(adapted.params.sum(), scale)[0].item() == pytest.approx(2.0)


@each_row("batches", [(torch.ones(4, 2), torch.ones(4, 1)), [torch.ones(4, 2), torch.ones(4, 1)]])
def test_inputs_and_targets_that_are_taken_for_two_batches(batches: Any) -> None:
    with pytest.raises(ValueError, match="too many values to unpack") as caught:
        todist.inner_loop(pairs, todist.sgd(lr=0.1), NET, batches)
    assert "the batches of two steps" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="not enough values") as caught:
        todist.inner_loop(pairs, todist.sgd(lr=0.1), NET, torch.ones(3, 1))
    assert not hasattr(caught.value, "__notes__")


def test_implicit_where_the_loss_has_no_minimum_names_the_weight_decay() -> None:
    x = torch.ones((), requires_grad=True)
    adapted = todist.inner_loop(
        lambda w: (x * w).cos().sum() - 3,
        todist.sgd(lr=0.1),
        torch.zeros(2).requires_grad_(),
        1,
        meta=x,
        adjoint=todist.Implicit(),
    )  # at a maximum
    with pytest.raises(torch.linalg.LinAlgError, match="write a weight decay into the loss") as caught:
        adapted.params.sum().backward()
    assert "maxiter" not in str(caught.value)


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_that_was_compiled_in_place_is_copied_without_its_program(inside: bool) -> None:
    """``model.compile()`` sets what calls the original."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(2, 1)
    model = torch.nn.Sequential(plain) if inside else plain
    wanted = step_of(todist.module_clone(model))
    (of_plain,) = torch.autograd.grad(wanted, plain.weight)
    plain.compile(backend="eager")
    result = todist.inner_loop(squares, todist.sgd(lr=0.1), model, [torch.ones(2)]).params
    for found in (step_of(todist.module_clone(model)), no_data(result)):
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found, plain.weight)[0], of_plain)


@each_row("made_by", ["inner_loop", "MetaSGD"])
def test_the_answer_of_the_faq_to_who_copies_an_adapted_module_works(made_by: str) -> None:
    net, x = torch.nn.Linear(2, 1), torch.ones(3, 2)
    if made_by == "inner_loop":
        adapted = todist.inner_loop(lambda net: net(x).square().mean(), todist.sgd(lr=0.1), net, 1).params
    else:
        adapted = todist.module_clone(net)
        todist.MetaSGD(adapted, lr=0.1).step(adapted(x).square().mean())
    average = torch.optim.swa_utils.AveragedModel
    for copied in (copy.deepcopy, average):
        with pytest.raises(RuntimeError, match="support the deepcopy protocol"):  # the FAQ has these words
            copied(adapted)
    half = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    teacher: Any = average(todist.module_clone(adapted, by="deepcopy"), multi_avg_fn=half)
    other = todist.module_clone(adapted)
    todist.MetaSGD(other, lr=0.1).step(other(x).square().mean())
    teacher.update_parameters(adapted)  # the first one copies, and the next ones average
    teacher.update_parameters(other)
    torch.testing.assert_close(teacher.module.weight, (adapted.weight + other.weight).detach() / 2)
    assert all(p.is_leaf for p in copy.deepcopy(teacher).parameters())
