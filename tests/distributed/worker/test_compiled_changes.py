"""``parallelize(compile=True)`` after a change of what a task means: results are those of the task as it now is.

Programs are traced, and consist of torch's own operations. Each row of the table makes a task in several versions.
"""

from __future__ import annotations

import functools
import pickle
import sys
import types
import warnings
from collections.abc import Callable
from threading import Barrier, Lock, Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.distributed.worker.test_compiled import graphs
from tests.rows import each_row
from torchopt_dist.core import programs
from torchopt_dist.core.meaning import Family, Meaning
from torchopt_dist.distributed.worker import compiled

__all__ = ["graphs"]

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Branch(nn.Module):
    """Doubles in training mode; has an attribute, and a number of its class."""

    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.register_buffer("shift", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * 2 if self.training else x) * self.scale * self.of_class + self.shift


class Scale:
    """An object that is called."""

    def __init__(self, by: Any) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by

    def shifted(self, x: Tensor) -> Tensor:
        return x + self.by


def network(norm: type[nn.Module] = nn.LayerNorm) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), norm(2), Branch()).double()


def loss(net: nn.Module, w: Tensor, x: Tensor) -> Tensor:
    return (net(x) * w).sum().cos()


def of_globals(source: str, **names: Any) -> Any:
    """A task in a module of the sender's alone."""
    given = {"__name__": "__main__", "torch": torch, **names}
    exec(source, given)
    return given["task"]


def scaled(by: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


def with_default(value: Any) -> Callable[[Tensor], Tensor]:
    def helper(x: Tensor, by: Any = value) -> Tensor:
        return x * by

    return helper


def with_keyword(value: Any) -> Callable[[Tensor], Tensor]:
    def helper(x: Tensor, *, by: Any = value) -> Tensor:
        return x * by

    return helper


def calls(helper: Any) -> Any:
    return lambda net, w, x: (helper(x) * w).sum().cos()


def of_helpers(helpers: list[Any]) -> Any:
    return lambda net, w, x: (helpers[0](x) * w).sum().cos()


def with_attribute(value: Any) -> Any:
    def helper(x: Tensor) -> Tensor:
        return x * helper.by

    helper.by = value
    return helper


TASK = "def task(net, w, x): return "
HELPER = TASK + "(helper(x) * w).sum().cos()"
MODULE = types.ModuleType("module_of_a_test")
exec("def helper(x): return x * NUMBER", vars(MODULE))


def through_a_module(value: Any) -> Any:
    vars(MODULE)["NUMBER"] = value
    return lambda net, w, x: (MODULE.helper(x) * w).sum().cos()


def keyword_only(value: Any) -> Any:
    def task(net: nn.Module, w: Tensor, x: Tensor, *, by: Any = value) -> Tensor:
        return (x * by * w).sum().cos()

    return task


def default(value: Any) -> Any:
    def task(net: nn.Module, w: Tensor, x: Tensor, by: Any = value) -> Tensor:
        return (x * by * w).sum().cos()

    return task


def of_a_set(value: Any) -> Any:
    names = {"a", "b", value}
    return lambda net, w, x: ((x * 5 if 2.0 in names else x) * w).sum().cos()


def cached(value: Any) -> Any:
    @functools.lru_cache
    def helper() -> Any:
        return value

    return lambda net, w, x: (x * helper() * w).sum().cos()


def recursive(value: Any) -> Any:
    def helper(x: Tensor, depth: int = 2) -> Tensor:
        return x * value if depth == 0 else helper(x, depth - 1) * value

    return lambda net, w, x: (helper(x) * w).sum().cos()


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "a number in a closure": lambda v: calls(scaled(v)),
    "a default": default,
    "a default of a keyword": keyword_only,
    "a default of a helper": lambda v: calls(with_default(v)),
    "a default of a helper's keyword": lambda v: calls(with_keyword(v)),
    "a helper in a closure's list": lambda v: of_helpers([scaled(v), scaled(9.0)]),
    "a helper in a helper": lambda v: calls(functools.partial(lambda inner, x: inner(x), scaled(v))),
    "an attribute of a helper": lambda v: calls(with_attribute(v)),
    "a function that calls itself": recursive,
    "a global number": lambda v: of_globals(TASK + "(x * NUMBER * w).sum().cos()", NUMBER=v),
    "a global helper": lambda v: of_globals(HELPER, helper=scaled(v)),
    "a global helper's default": lambda v: of_globals(HELPER, helper=with_default(v)),
    "a global helper's keyword": lambda v: of_globals(HELPER, helper=with_keyword(v)),
    "a global list of functions": lambda v: of_globals(
        TASK + "(F[0](x) * w).sum().cos()", F=[scaled(v), scaled(9.0)]
    ),
    "a global dictionary": lambda v: of_globals(TASK + "(x * D['n'] * w).sum().cos()", D={"n": v}),
    "a global tuple": lambda v: of_globals(TASK + "(T[1](x) * w).sum().cos()", T=(0, scaled(v))),
    "a global partial": lambda v: of_globals(HELPER, helper=functools.partial(with_default(1.0), by=v)),
    "a global object": lambda v: of_globals(HELPER, helper=Scale(v)),
    "a global object's method": lambda v: of_globals(HELPER, helper=Scale(v).shifted),
    "a global object's function": lambda v: of_globals(
        TASK + "(o.by(x) * w).sum().cos()", o=Scale(scaled(v))
    ),
    "a global module": lambda v: of_globals(TASK + "(net[0](x) * w * m.scale).sum()", m=with_scale(v)),
    "a set": of_a_set,
    "a function with a cache": cached,
    "an attribute of a module of Python's": through_a_module,
}


BY_VALUE = ("a set", "a function with a cache", "an attribute of a module of Python's")
"""Where a number is always a constant."""


def with_scale(value: Any) -> nn.Module:
    made = Branch()
    made.scale = value
    return made


def results(task: Any, net: nn.Module, **options: Any) -> list[Any]:
    """Losses, gradients, and the statistics that are brought back if asked for."""
    torch.manual_seed(1)
    x = torch.randn(2, 3, 2, dtype=torch.float64)
    w = torch.linspace(0.5, 1, 2, dtype=torch.float64).requires_grad_()
    made = todist.parallelize(todist.tasks, todist.stack_reducer, **options)(task)(
        net, todist.replicated(w), x
    )
    given = [w, *net.parameters()]
    return [made, *torch.autograd.grad(made.sum(), [p for p in given if p.requires_grad], allow_unused=True)]


def agree(task: Any, net: nn.Module, **options: Any) -> None:
    expected, made = results(task, net), results(task, net, compile=True, **options)
    assert made[0].dtype == expected[0].dtype
    torch.testing.assert_close(made, expected)


def in_a_world(body: Callable[[], None]) -> None:
    sys.modules[MODULE.__name__] = MODULE
    vars(MODULE)["__file__"] = __file__
    try:
        todist.auto_init_rpc()(body)()
    finally:
        del sys.modules[MODULE.__name__]


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_what_a_function_means_is_never_stale(graphs: list[Any], kind: str) -> None:
    """The second version is a program that has the number as an input."""

    def body() -> None:
        net = network()
        for value in (2.0, 3.0):
            agree(FUNCTIONS[kind](value), net)
        made = len(graphs)
        assert made == 2
        for value in (3.0, 2.0):
            agree(FUNCTIONS[kind](value), net)
        assert len(graphs) == made
        agree(FUNCTIONS[kind](4.0), net)
        assert len(graphs) == made + (kind in BY_VALUE)

    in_a_world(body)


@pytest.mark.parametrize(
    "kind", [kind for kind in FUNCTIONS if kind not in ("a set", "a function with a cache")]
)
def test_values_of_tensors_are_inputs_wherever_they_are(graphs: list[Any], kind: str) -> None:
    """Of all kinds but the two that hold no tensor."""

    def body() -> None:
        net = network()
        for value in (2.0, 3.0, 4.0):
            agree(FUNCTIONS[kind](torch.full((2,), value, dtype=torch.float64)), net)
        assert len(graphs) == 1

    in_a_world(body)


def scaled_by_array(by: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * torch.as_tensor(by)


ARRAYS: dict[str, Callable[[Any], Any]] = {
    "in a closure": lambda k: calls(scaled_by_array(k)),
    "a global": lambda k: of_globals(TASK + "(x * torch.from_numpy(K) * w).sum().cos()", K=k),
    "in a global list": lambda k: of_globals(TASK + "(x * torch.from_numpy(K[0]) * w).sum().cos()", K=[k]),
    "of an object": lambda k: of_globals(TASK + "(x * torch.tensor(O.by) * w).sum().cos()", O=Scale(k)),
    "of a module": lambda k: of_globals(
        TASK + "(x * torch.asarray(M.scale) * w).sum().cos()", M=with_scale(k)
    ),
    "a default": lambda k: functools.partial(with_array, by=k),
}


def with_array(net: nn.Module, w: Tensor, x: Tensor, by: Any = None) -> Tensor:
    return (x * torch.as_tensor(by) * w).sum().cos()


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("kind", ARRAYS)
def test_values_of_arrays_are_inputs_wherever_they_are(graphs: list[Any], kind: str) -> None:
    def body() -> None:
        net = network()
        for value in (2.0, 3.0):
            agree(ARRAYS[kind](np.full(2, value)), net)
        assert len(graphs) == 1
        agree(ARRAYS[kind](np.full(2, 4.0, np.float32)), net)
        assert len(graphs) == 2

    in_a_world(body)


def test_arrays_and_whole_numbers_of_numpys_may_be_arguments(graphs: list[Any]) -> None:
    def task(w: Tensor, k: Any, n: Any) -> Tensor:
        return (w * torch.from_numpy(k)).sum() * n + w[n]

    def body() -> None:
        w = torch.ones(3, requires_grad=True)
        for value in (1, 2, 1):
            given = np.full((2, 3), value, np.float32), np.int64(value)
            made = []
            for compile in (False, True):
                call = todist.parallelize(todist.tasks, todist.stack_reducer, compile=compile)
                made.append(call(task)(torch.stack([w, 2 * w]), *given))
            assert made[0].dtype == made[1].dtype
            torch.testing.assert_close(made[1], made[0])

    in_a_world(body)


def scale_of_branch(net: nn.Sequential) -> None:
    net[-1].scale = 3.0


def hooked(net: nn.Sequential) -> None:
    net[0].register_forward_hook(lambda module, given, made: made * 3)


def hooked_before(net: nn.Sequential) -> None:
    net[-1].register_forward_pre_hook(lambda module, given: (given[0] * 3,))


def hooked_with_keywords(net: nn.Sequential) -> None:
    net.register_forward_hook(lambda module, given, named, made: made * 3, with_kwargs=True)


def other_structure(net: nn.Sequential) -> None:
    net[0] = nn.Sequential(net[0], nn.Tanh())


def other_activation(net: nn.Sequential) -> None:
    net.insert(1, nn.Tanh())


def frozen(net: nn.Sequential) -> None:
    net[0].weight.requires_grad_(False)


def tied(net: nn.Sequential) -> None:
    net[1].weight = net[1].bias


def own_forward(net: nn.Sequential) -> None:
    vars(net[-1])["forward"] = lambda x: x * 7


def other_values(net: nn.Sequential) -> None:
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.mul_(2)


MODULES: dict[str, Callable[[Any], Any]] = {
    "a hook": hooked,
    "a hook before": hooked_before,
    "a hook with keywords": hooked_with_keywords,
    "evaluation": lambda net: net.eval(),
    "a part's evaluation": lambda net: net[-1].eval(),
    "an attribute": scale_of_branch,
    "another structure": other_structure,
    "another part": other_activation,
    "a frozen parameter": frozen,
    "tied parameters": tied,
    "a forward of its own": own_forward,
}


@pytest.mark.parametrize("where", ["argument", "closure"])
@pytest.mark.parametrize("kind", MODULES)
def test_what_a_module_is_made_of_is_never_stale(graphs: list[Any], kind: str, where: str) -> None:
    def task(net: nn.Module) -> Any:
        return loss if where == "argument" else lambda _, w, x: loss(net, w, x)

    def body() -> None:
        net = network()
        agree(task(net), net)
        made = len(graphs)
        MODULES[kind](net)
        agree(task(net), net)
        assert len(graphs) > made
        made = len(graphs)
        other_values(net)
        agree(task(net), net)
        assert len(graphs) == made
        again = network()
        agree(task(again), again)
        assert len(graphs) == made

    in_a_world(body)


@each_row("kind", [*FUNCTIONS, *MODULES])
def test_the_key_alone_tells_versions_apart(kind: str) -> None:
    """Also where the compiler would look itself, eight times."""
    family = Family()

    def key(version: float) -> Any:
        net = nets.get(version) or network()
        task = FUNCTIONS[kind](version) if kind in FUNCTIONS else loss
        meaning = Meaning(family, [("task", task), ("net", net)], None)
        kept.append((task, meaning))
        return meaning.record.key, meaning.record.numbers

    kept: list[Any] = []
    nets: dict[float, nn.Module] = {}
    if kind in MODULES:
        nets[3.0] = network()
        MODULES[kind](nets[3.0])
    sys.modules[MODULE.__name__] = MODULE
    try:
        assert key(2.0) == key(2.0) != key(3.0) == key(3.0)
    finally:
        del sys.modules[MODULE.__name__]


@pytest.mark.usefixtures("graphs")
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_hook_of_all_modules_and_its_end_are_seen() -> None:
    def body() -> None:
        net = network()
        agree(loss, net)
        handle = nn.modules.module.register_module_forward_hook(lambda module, given, made: made * 2)
        try:
            agree(loss, net)
        finally:
            handle.remove()
        agree(loss, net)

    in_a_world(body)


@pytest.mark.usefixtures("graphs")
def test_what_a_task_leaves_in_a_global_does_not_outlive_the_call() -> None:
    source = "def task(net, w, x):\n    SEEN['n'] += 1\n    return (x * w * SEEN['n']).sum()"

    def body() -> None:
        seen = {"n": 0}
        task = of_globals(source, SEEN=seen)
        with pytest.warns(UserWarning, match=r"`SEEN`\['n'\] changes when it runs"):
            agree(task, network())
        for _ in range(2):
            agree(task, network())
        assert seen == {"n": 0}

    in_a_world(body)


@pytest.mark.parametrize("reducer", [None, todist.mean_reducer])
@pytest.mark.parametrize("with_more", [False, True])
def test_buffers_of_a_compiled_task_come_back(graphs: list[Any], reducer: Any, with_more: bool) -> None:
    def task(net: nn.Module, x: Tensor) -> Any:
        made = net(x).square().mean()
        return (made, {"seen": x.sum()}) if with_more else made

    def found(compile: bool) -> list[Any]:
        net, x = (
            network(nn.BatchNorm1d),
            torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 3, 2).cos(),
        )
        call = todist.parallelize(todist.tasks, reducer, buffers="mean", compile=compile)(task)
        made = [call(net, x) for _ in range(2)]
        return [made, dict(net.named_buffers())]

    def body() -> None:
        torch.testing.assert_close(found(True), found(False))
        assert len(graphs) == 1

    in_a_world(body)


@pytest.mark.usefixtures("graphs")
def test_buffers_of_one_vmap_are_refused_by_name() -> None:
    def body() -> None:
        net, x = network(nn.BatchNorm1d), torch.randn(2, 3, 2, dtype=torch.float64)
        spread = functools.partial(todist.parallelize, todist.tasks, buffers="first", compile=True)
        with pytest.warns(UserWarning, match="runs as without it, since `buffers` is given and"):
            spread(vectorize=True)(lambda net, x: net(x).sum())(net, x)

    in_a_world(body)


UNKNOWN = {
    "a lock": Lock(),
    "an object with a lock": types.SimpleNamespace(lock=Lock()),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_has_no_key_is_refused_by_name_once(graphs: list[Any], kind: str) -> None:
    source = TASK + "(x * (2 if THING is not None else 1) * w).sum()"
    task = of_globals(source, THING=UNKNOWN[kind])
    given = None, torch.ones(2), torch.ones(3, 2)
    with pytest.warns(
        UserWarning, match="task 'task' with compile=True .* since the global `THING`.* is a _thread"
    ):
        assert compiled.CompiledTask(task, True)(*given) == 12
    for _ in range(3):  # where warnings are errors
        assert compiled.CompiledTask(task, True)(*given) == 12
    assert not graphs


@pytest.mark.usefixtures("graphs")
def test_a_method_of_a_class_that_was_sent_has_its_own_globals() -> None:
    source = "class Scaled:\n    def __call__(self, x): return x * BY\ndef task(x): return SCALED(x)"
    for by in (2.0, 3.0):
        names: dict[str, Any] = {"__name__": "__main__", "BY": by}
        exec(source, names)
        names["SCALED"] = names["Scaled"]()
        assert compiled.CompiledTask(names["task"], True)(torch.ones(1)) == by


ENVIRONMENTS = {
    "os.environ": "import os\ndef task(x): return x * float(os.environ['TODIST_OF_A_TEST'])",
    "os.getenv": "import os\ndef task(x): return x * float(os.getenv('TODIST_OF_A_TEST'))",
    "environ": "from os import environ\ndef task(x): return x * float(environ['TODIST_OF_A_TEST'])",
    "getenv": "from os import getenv\ndef task(x): return x * float(getenv('TODIST_OF_A_TEST'))",
}


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_a_variable_of_the_environment_is_never_stale(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = of_globals(ENVIRONMENTS[kind])
    for value in ("2", "3"):
        monkeypatch.setenv("TODIST_OF_A_TEST", value)
        assert compiled.CompiledTask(task, True)(torch.ones(1)) == float(value)


class Aliased(nn.Module):
    """A module that reaches a part by an attribute, too."""

    def __init__(self, alias: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2).double(), nn.Linear(2, 2).double()
        object.__setattr__(self, "alias", alias(self))

    def part(self, x: Tensor) -> Tensor:
        return self.b(x)

    def forward(self, x: Tensor) -> Tensor:
        alias = self.alias
        made = torch.tanh(self.a(x))
        if isinstance(alias, Tensor):
            return made @ alias
        while not callable(alias):
            alias = alias.by if isinstance(alias, types.SimpleNamespace) else alias[0]
        return alias(made)


ALIASES: dict[str, Callable[[Any], Any]] = {
    "a list": lambda net: [net.b],
    "a dictionary": lambda net: {0: net.b},
    "a method": lambda net: net.part,
    "a tuple": lambda net: (net.b,),
    "an object": lambda net: [types.SimpleNamespace(by=net.b)],
    "a tensor": lambda net: net.b.weight,
}


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("kind", ALIASES)
def test_a_part_that_is_in_another_attribute_too(graphs: list[Any], kind: str, vectorize: bool) -> None:

    def task(net: nn.Module, w: Tensor, x: Tensor) -> Tensor:
        net = todist.module_clone(net)
        todist.MetaSGD(net, lr=0.1).step((net(x) * w).sum().cos())
        return (net(x) * w).sum().cos()

    def body() -> None:
        torch.manual_seed(0)
        net = Aliased(ALIASES[kind])
        agree(task, net, vectorize=vectorize)
        assert len(graphs) == 1

    in_a_world(body)


def test_an_attribute_that_is_no_part_is_not_refused(graphs: list[Any]) -> None:
    def body() -> None:
        net = Aliased(lambda net: [nn.Linear(2, 2).double().requires_grad_(False)])
        agree(lambda net, w, x: loss(todist.module_clone(net), w, x), net)
        assert graphs

    in_a_world(body)


COMMON = {
    "LSTM": lambda: nn.LSTM(2, 2),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    "containers": lambda: nn.ModuleDict({"a": nn.ParameterList([torch.ones(1)]), "b": nn.ModuleList()}),
}


@pytest.mark.parametrize("kind", COMMON)
def test_modules_of_torch_have_a_key(kind: str) -> None:
    sent = pickle.dumps(COMMON[kind]())
    family, both = Family(), [pickle.loads(sent) for _ in range(2)]
    keys = [Meaning(family, [("net", net)], None).record.key for net in both]
    assert keys[0] == keys[1]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_thing_that_cannot_be_asked_is_refused(graphs: list[Any]) -> None:
    net = nn.LazyLinear(1)
    with pytest.warns(UserWarning, match="runs as without it, since Attempted to use an uninitialized"):
        compiled.CompiledTask(lambda net, x: net(x).sum(), True)(net, torch.ones(1, 2))
    assert not graphs


def test_a_task_that_binds_a_global_name_is_refused(graphs: list[Any]) -> None:
    task = of_globals("def task(x):\n    global N\n    N = N + 1\n    return x * N", N=1)
    with pytest.warns(UserWarning, match="assigns the global name `N`"):
        assert compiled.CompiledTask(task, True)(torch.ones(1)) == 2
    assert not graphs


def test_one_variant_more_disables_none(graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "LIMIT", 4)

    def run(rows: int) -> None:
        call = todist.parallelize(todist.tasks, compile=True)(lambda w, x: w.sum() * x.sum())
        assert float(call(torch.ones(1, 2), torch.ones(rows, 1).T)[0]) == 2 * rows

    def body() -> None:
        for rows in range(1, 5):
            run(rows)
        assert len(graphs) == 4
        with pytest.warns(UserWarning, match=r"since args\[1\] differs .* its 4 programs"):
            run(5)
        for rows in range(1, 7):
            run(rows)
        assert len(graphs) == 4

    in_a_world(body)


@pytest.mark.usefixtures("graphs")
def test_what_was_sent_has_its_own_functions_after_the_call() -> None:
    names: dict[str, Any] = {"__name__": "__main__", "BY": 2.0}
    exec("F = [lambda x: x * BY]\ndef task(x): return F[0](x)", names)
    before = names["F"][0]
    assert compiled.CompiledTask(names["task"], True)(torch.ones(1)) == 2
    assert names["F"] == [before]
    names["BY"] = 3.0
    assert names["task"](torch.ones(1)) == compiled.CompiledTask(names["task"], True)(torch.ones(1)) == 3


def test_calls_at_the_same_time_have_their_own_globals(graphs: list[Any]) -> None:
    task = "def task(x): return (x * T).sum()"
    compiled.CompiledTask(of_globals(task, T=torch.ones(1)), True)(torch.ones(1))
    start, found = Barrier(4), [0] * 4

    def run(number: int) -> None:
        start.wait()
        for _ in range(20):
            own = of_globals(task, T=torch.full((1,), float(number)))
            found[number] += int(compiled.CompiledTask(own, True)(torch.ones(1)) == number)

    threads = [Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [20] * 4
    assert len(graphs) == 1


def test_an_argument_that_cannot_be_asked_is_refused(graphs: list[Any]) -> None:
    lazy = nn.LazyLinear(1).weight
    with pytest.warns(UserWarning, match="runs as without it, since Attempted to use an uninitialized"):
        assert (
            compiled.CompiledTask(lambda x, w: x.sum() if w is not None else x, True)(torch.ones(2), lazy)
            == 2
        )
    assert not graphs


def test_meanings_that_change_at_each_call_are_not_kept_for_ever(
    graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_NUMBERED", 4)
    monkeypatch.setenv("TODIST_COMPILE_LIMIT", "6")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for text in map(str, range(12)):
            names: dict[str, Any] = {"TEXT": text, "__name__": "__main__"}
            exec("def task(x): return x.sum() * len(TEXT) + int(TEXT)", names)
            for _ in range(2):
                assert compiled.CompiledTask(names["task"], True)(torch.ones(2)) == 2 * len(text) + int(text)
    assert len(graphs) == 6
    assert len(compiled.CompiledTask(names["task"], True)._programs._meanings) == 4
