"""A function that was bound sees what its names meant then, in the ways in which people write functions and names.

The programs are text, since each is a script: its names are global ones, bound anew while it runs.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
import textwrap
import traceback
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from tests.rows import each_row
from torchopt_dist.core.binding import Bindings, bind
from torchopt_dist.core.bound import Bound

SETUP = """
import dataclasses, functools, torch
import numpy as np
from torch import nn
import torch.nn.functional as F
"""

NONLOCAL = """
def make():
    x = 2.0
    {}
    def anew():
        nonlocal x
        x = 3.0
    return f, anew
f, anew = make()
"""

BOUND = {
    "a global name": "x = 1.0\ndef f(p): return p * x\ndef anew(): globals()['x'] = 3.0",
    "an equal number": "x = 1000.5\ndef f(p): return p * x\ndef anew(): globals()['x'] = 2000.5",
    "a variable of a function around it": NONLOCAL.format("def f(p): return p * x"),
    "a name that a helper of a helper reads": """
        x = 1.0
        def scaled(p): return p * x
        def helper(p): return scaled(p) + 1
        def f(p): return helper(p)
        def anew(): globals()['x'] = 3.0
    """,
    "a helper that is defined anew": """
        def helper(p): return p * 2
        def f(p): return helper(p)
        def other(p): return p * 5
        def anew(): globals()['helper'] = other
    """,
    "a function in the function": """
        x = 1.0
        def f(p): return sum((lambda q: q * x)(p) for _ in range(2))
        def anew(): globals()['x'] = 3.0
    """,
    "a partial": """
        x = 1.0
        def g(y, p, z): return p * y * z * x
        f = functools.partial(functools.partial(g, 2.0), z=3.0)
        def anew(): globals()['x'] = 3.0
    """,
    "a function that calls itself": NONLOCAL.format("def f(p, n=3): return p if n == 0 else f(p, n - 1) * x"),
    "a decorated function": """
        x = 1.0
        def twice(g):
            @functools.wraps(g)
            def wrapper(*args): return 2 * g(*args)
            return wrapper
        @twice
        def f(p): return p * x
        def anew(): globals()['x'] = 3.0
    """,
    "a function that torch decorates": """
        x = 1.0
        @torch.no_grad()
        def helper(p): return p * x
        def f(p): return helper(p)
        def anew(): globals()['x'] = 3.0
    """,
    "functions in a list": """
        t = 1.0
        losses = [lambda p: p * t, lambda p: p + t]
        def f(p): return sum(one(p) for one in losses)
        def anew(): globals()['t'] = 3.0
    """,
    "an entry of a list": "xs = [1.0, 2.0]\ndef f(p): return p * xs[0]\ndef anew(): xs[0] = 3.0",
    "a list that has grown": "xs = [1.0, 2.0]\ndef f(p): return p * sum(xs)\ndef anew(): xs.append(3.0)",
    "an element of an array": "a = np.ones(3)\ndef f(p): return p * a.sum()\ndef anew(): a[1] = 3.0",
    "an entry of a dictionary": "c = {'x': 1.0}\ndef f(p): return p * c['x']\ndef anew(): c['x'] = 3.0",
    "a default argument": """
        x = {'x': 1.0}
        def f(p, x=x, *, y=x): return p * x['x'] * y['x']
        def anew(): x['x'] = 3.0
    """,
    "a function as a default argument": """
        x = 1.0
        def helper(p): return p * x
        def f(p, helper=helper): return helper(p)
        def anew(): globals()['x'] = 3.0
    """,
    "an attribute, by a method": """
        class Task:
            def loss(self, p): return p * self.scaled()
            def scaled(self): return self.x * 2
        task = Task(); task.x = 1.0
        f = task.loss
        def anew(): task.x = 3.0
    """,
    "an attribute of a callable object": """
        class Loss:
            def __init__(self, x): self.x = x
            def __call__(self, p): return p * self.x
        f = Loss(1.0)
        def anew(): f.x = 3.0
    """,
    "an attribute of an attribute": """
        class Settings: pass
        class Task: pass
        task = Task(); task.settings = Settings(); task.settings.x = 1.0
        def f(p): return p * task.settings.x
        def anew(): task.settings.x = 3.0
    """,
    "an attribute by its name, and a property": """
        class Task:
            @property
            def double(self): return getattr(self, "x") * 2
        task = Task(); task.x = 1.0
        def f(p): return p * task.double
        def anew(): task.x = 3.0
    """,
    "a method that reads a global name": """
        x = 1.0
        class Task:
            def loss(self, p): return p * x
        f = Task().loss
        def anew(): globals()['x'] = 3.0
    """,
    "a data class that is replaced": """
        @dataclasses.dataclass(frozen=True)
        class Settings:
            x: float
        settings = Settings(1.0)
        def f(p): return p * settings.x
        def anew(): globals()['settings'] = Settings(3.0)
    """,
    "a data class with slots in a tuple": """
        @dataclasses.dataclass(frozen=True, slots=True)
        class Settings:
            loss: object
        x = 1.0
        settings = (Settings(lambda p: p * x), 1)
        def f(p): return settings[0].loss(p)
        def anew(): globals()['x'] = 3.0
    """,
    "a module of the user's": """
        import types
        config = types.ModuleType("config"); config.x = 1.0
        exec("def double(): return 2 * x", vars(config))
        def f(p): return p * config.x * config.double()
        def anew(): config.x = 3.0
    """,
    "a parameter of a module": """
        net = nn.Linear(1, 1)
        def f(p): return net(torch.ones(1)) * p
        def anew(): net.weight = nn.Parameter(torch.full((1, 1), 7.0))
    """,
    "a part of a module": """
        net = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Tanh()))
        def f(p): return net(torch.ones(1)) * p
        def anew(): net[1][0] = nn.Sigmoid()
    """,
    "a module's mode": """
        net = nn.Sequential(nn.BatchNorm1d(1, momentum=0.0))
        def f(p): return net(torch.tensor([[1.0], [3.0]])).abs().sum() * p
        def anew(): net.eval()
    """,
    "an attribute of a module": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.x = 1.0
            def forward(self, p): return p * self.x
        f = Net()
        def anew(): f.x = 3.0
    """,
}

REFUSED = {
    "a global name that a method of a data class reads": """
        x = 1.0
        @dataclasses.dataclass(frozen=True)
        class Settings:
            y: float
            def loss(self, p): return p * x
        settings = Settings(1.0)
        def f(p): return settings.loss(p)
        def anew(): globals()['x'] = 3.0
    """,
    "a global name that a method of a class reads": """
        x = 1.0
        class Net(nn.Module):
            def forward(self, p): return p * x
        net = Net()
        def f(p): return net(p)
        def anew(): globals()['x'] = 3.0
    """,
    "an attribute of a class": """
        class Task:
            x = 1.0
        def f(p): return p * Task.x
        def anew(): Task.x = 3.0
    """,
    "an attribute of a class in a function": """
        def make():
            class Task:
                x = 1.0
            def f(p): return p * Task.x
            def anew(): Task.x = 3.0
            return f, anew
        f, anew = make()
    """,
    "a name that a cached function reads": """
        x = 1.0
        @functools.lru_cache
        def helper(p): return p * x
        def f(p): return helper(p)
        def anew(): globals()['x'] = 3.0; helper.cache_clear()
    """,
    "an attribute of an object with slots": """
        class Task:
            __slots__ = ("y", "__dict__")
        task = Task(); task.x = 1.0
        def f(p): return p * task.x
        def anew(): task.x = 3.0
    """,
}


def script(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP + textwrap.dedent(text), names)
    return names


def value(function: Any) -> float:
    return float(torch.as_tensor(function(2.0)).detach())


@each_row("text", BOUND.values())
def test_a_name_means_what_it_meant(text):
    torch.manual_seed(0)
    names = script(text)
    function, bound = names["f"], bind(names["f"])
    before = value(function)
    assert value(bound) == before
    bound.settle()
    assert bound._bindings.again(function) is function
    names["anew"]()
    after = value(function)
    assert after != before
    assert value(bound) == before
    assert value(bound) == before
    assert value(function) == after  # which the copy has left alone


@each_row("text", REFUSED.values())
def test_a_name_that_cannot_be_given_back_is_an_error(text):
    names = script(text)
    bound = bind(names["f"])
    bound.settle()
    names["anew"]()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"`x`, which `.*` reads, has been bound anew"):
            bound(2.0)


COUNTING = {
    "a variable": "n = 0\ndef f(p):\n    global n\n    n += 1\n    return p * x",
    "an attribute": """
        class Count: n = 0
        count = Count()
        def f(p):
            count.n += 1
            return p * x
    """,
    "a list": "calls = []\ndef f(p):\n    calls.append(p)\n    return p * x",
    "a tensor": "n = torch.zeros(())\ndef f(p):\n    n.add_(1)\n    return p * x",
}


@each_row("text", COUNTING.values())
@each_row("calls", [0, 1])
def test_what_a_function_changes_itself_goes_on(text, calls):
    """Whether it is called before or only after it was settled."""
    names = script("x = 1.0\n" + textwrap.dedent(text))
    bound = bind(names["f"])
    for _ in range(calls):
        bound(2.0)
    bound.settle()
    for _ in range(2):
        assert value(bound) == 2.0

    def count() -> int:
        held = names.get("calls", names.get("n", names.get("count")))
        return len(held) if isinstance(held, list) else int(getattr(held, "n", held))

    assert count() == 2 + calls
    names["x"] = 3.0
    assert value(bound) == 2.0


def test_names_that_change_before_it_is_settled_stay_as_they_are_then():
    """The steps of a loop may get something from the batches, or from `stop`, by a name."""
    names = script("x = 1.0\ndef f(p): return p * x")
    bound = bind(names["f"])
    names["x"] = 3.0
    assert value(bound) == 6.0
    bound.settle()
    assert value(bound) == 6.0


IN_PLACE = {
    "a variable": "t = torch.ones(2)\ndef f(p): return (t * p).sum()",
    "a parameter": "net = nn.Linear(1, 1)\nt = net.weight\ndef f(p): return net(torch.ones(1)) * p",
    "an attribute": """
        class Task:
            def loss(self, p): return (self.t * p).sum()
        task = Task(); task.t = t = torch.ones(2)
        f = task.loss
    """,
    "an entry": "t = torch.ones(2)\nc = {'a': [(t,)]}\ndef f(p): return (c['a'][0][0] * p).sum()",
    "an argument": "t = torch.ones(2)\nf = functools.partial(lambda t, p: (t * p).sum(), t)",
}


@each_row("text", IN_PLACE.values())
def test_a_tensor_that_is_changed_in_place_is_an_error(text):
    names = script(text)
    bound = bind(names["f"])
    assert any(one is names["t"] for one in bound._bindings.tensors)
    bound(2.0)
    bound.settle()
    bound(2.0)
    with torch.no_grad():
        names["t"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: a tensor of shape"):
        bound(2.0)


@pytest.mark.compiles
def test_a_compiled_function_runs_as_it_is_where_a_name_was_bound_anew():
    names = script("""
        x = torch.tensor(1.0)
        def g(p): return p * x
        f = torch.compile(g, backend="eager")
        def h(p): return f(p) + 1
    """)
    f, h = bind(names["f"]), bind(names["h"])
    assert (value(f), value(h)) == (2.0, 3.0)
    f.settle()
    h.settle()
    names["x"] = torch.tensor(3.0)
    assert (value(names["f"]), value(names["h"])) == (6.0, 7.0)
    assert (value(f), value(h)) == (2.0, 3.0)


def test_threads_see_their_own_names():
    """Of several copies at once, and of the original."""
    names = script("""
        import threading
        x = 1.0
        meet = threading.Barrier(3)
        def f(p):
            meet.wait(30)
            return p * x
    """)
    bound = []
    for number in (1.0, 2.0):
        names["x"] = number
        bound.append(bind(names["f"]))
        bound[-1].settle()
    names["x"] = 3.0
    with ThreadPoolExecutor(3) as threads:
        found = [threads.submit(function, 2.0) for function in (*bound, names["f"])]
        assert [one.result(30) for one in found] == [2.0, 4.0, 6.0]


def test_several_functions_see_the_same_names():
    names = script("""
        x = 1.0
        def f(p):
            global y
            y = p * x
            return y
        def g(): return y * x
    """)
    names["y"] = 0.0
    both = Bindings(names["f"], names["g"])
    f, g = both.of(names["f"]), both.of(names["g"])
    f(2.0)
    both.settle()
    names["x"] = 3.0
    assert f(5.0) == 5.0
    assert g() == 5.0
    assert both.of(None) is None


def test_functions_in_a_structure():
    names = script("x = 1.0\ndef rate(step): return step * x")
    made = (types.SimpleNamespace, 1.0), {"lr": names["rate"]}
    assert Bindings(made[0]).of(made[0]) == made[0]
    assert isinstance(Bindings(made).of(made)[1]["lr"], Bound)
    structure = (pow, (2.0, names["rate"]), names["rate"])
    bindings = Bindings(structure)
    bound = bindings.of(structure)
    assert bound[2] is bound[1][1]
    net, twice = nn.ParameterDict({"w": torch.ones(2)}), (pow, names["rate"])
    structure = (net, twice, [twice], functools.partial(names["rate"], net))
    assert Bindings(structure).of(structure)[0] is net  # a parameter, not a function
    pair = (twice, (twice, 1.0))
    made = Bindings(pair).of(pair)
    assert made[0] is made[1][0]
    assert bound[0] is pow
    assert bound[1][0] == 2.0
    bindings.settle()
    names["x"] = 3.0
    assert bound[1][1](2.0) == 2.0


def test_code_of_installed_packages_is_not_followed():
    bindings = Bindings(nn.functional.cross_entropy)
    assert not bindings._places
    assert bindings.of(nn.functional.cross_entropy) is nn.functional.cross_entropy


def test_what_is_looked_at_is_bounded_and_asks_no_object():
    """Data in lists is not looked through, and an object's own ways to find attributes are not called."""
    names = script("""
        class Proxy:
            def __getattr__(self, name): raise ZeroDivisionError(name)
        proxy = Proxy()
        rows = [[[float(k) for k in range(100)] for _ in range(100)] for _ in range(100)]
        x = 1.0
        def f(p): return p * x * len(rows) * (proxy is not None)
    """)
    bound = bind(names["f"])
    assert (
        sum(len(node.thing) for node in bound._bindings._nodes.values() if type(node.thing) is list) <= 1024
    )
    bound.settle()
    names["x"] = 2.0
    assert value(bound) == 200.0


SCALE = 1.0


def of_this_module(p: float, *, more: float = 0.0) -> float:
    """A function that a pickle finds by its name."""
    return p * SCALE + more


def test_it_looks_like_the_function():
    bound = bind(of_this_module)
    assert inspect.signature(bound) == inspect.signature(of_this_module)
    assert bound.__name__ == "of_this_module"
    assert bound.__doc__ == of_this_module.__doc__
    assert bound.__kwdefaults__ == {"more": 0.0}
    assert isinstance(bound, Bound)


def test_it_is_pickled_as_the_function(monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, types.ModuleType(__name__))
    vars(sys.modules[__name__]).update(globals())
    bound = bind(of_this_module)
    bound.settle()
    assert pickle.loads(pickle.dumps(bound)) is of_this_module


def test_an_error_is_the_functions_own(monkeypatch):
    """Also in a copy: the lines are those of the file."""
    bound = bind(of_this_module)
    bound.settle()
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    with pytest.raises(TypeError, match="can't multiply") as caught:
        bound("a")
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.name, last.filename, last.line) == ("of_this_module", __file__, "return p * SCALE + more")
