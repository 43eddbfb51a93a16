"""A message carries objects with their tensors beside the pickle: each shared thing once, and nothing is copied."""

from __future__ import annotations

import gc
import importlib
import io
import sys
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.distributed.programs import Net, mlp
from tests.rows import each_row
from torchopt_dist.distributed.messages.message import Late
from torchopt_dist.distributed.messages.requests import Reply
from torchopt_dist.distributed.serialization.pickling import pack, reply_of, unpack
from torchopt_dist.distributed.serialization.wire import from_wire, to_wire
from torchopt_dist.pickling.code_pickler import CodePickler
from torchopt_dist.pickling.code_pickler import dumps as code_of
from torchopt_dist.pickling.serialized_exception import SerializedException


class Wire(NamedTuple):
    skeleton: bytes
    structures: tuple[bytes, ...]
    buffers: list[torch.Tensor]


def travel(value):
    message = pack(value, main_by_name=True)
    wire = to_wire(message.detached())
    return unpack(from_wire(wire).received()), Wire(message.skeleton, message.structures, wire.buffers)


def size(wire):
    return (
        len(wire.skeleton)
        + sum(b.numel() * b.element_size() for b in wire.buffers)
        + sum(map(len, wire.structures))
    )


def test_what_is_shared_travels_once():
    model, extra = mlp(), torch.randn(10_000)
    _, one = travel([(model, extra)])
    _, many = travel([(model, extra)] * 32)
    assert size(many) < size(one) + 1000
    (first, _), (second, _) = travel([(model, extra)] * 2)[0]
    assert first is second


def test_tied_weights_and_flags_survive():
    net, _ = travel(Net().eval())
    assert net.tied.weight is net.first.weight
    assert isinstance(net.first.weight, nn.Parameter)
    assert not net.frozen.weight.requires_grad
    assert not net.training
    assert torch.equal(net.shift, torch.full((6,), 0.5, dtype=torch.float64))
    assert "shift" not in net.state_dict()


def test_two_modules_of_one_structure_stay_two():
    a, b = mlp(), mlp()
    (x, y), wire = travel((a, b))
    assert x is not y
    assert len(wire.structures) == 1
    clone = todist.module_clone(a, by="reference")
    x, y = travel((a, clone))[0]
    assert x is not y
    assert x[0].weight is y[0].weight


def test_a_module_beside_a_part_of_itself_stays_its_part():
    net = mlp()
    for pair in ((net, net[0]), (net[0], net)):
        both, _ = travel(pair)
        whole, part = both if isinstance(both[0], nn.Sequential) else both[::-1]
        assert whole[0] is part


@each_row(
    "tensor",
    [
        torch.zeros(0, 3),
        torch.tensor(3.5),
        torch.arange(6).reshape(2, 3).T,
        torch.ones(1).expand(5, 4),
        torch.randn(100_000)[::2],
        torch.randn(300, 300)[:, 5],
        torch.randn(4, 4, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(3, dtype=torch.float16),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    ],
)
def test_any_dense_tensor_arrives_as_it_is(tensor):
    got, wire = travel({"x": [tensor]})
    assert got["x"][0].dtype == tensor.dtype
    assert torch.equal(got["x"][0], tensor)
    assert all(
        b.untyped_storage().nbytes() <= b.numel() * b.element_size() for b in wire.buffers
    )  # nothing but what was asked for


def test_small_tensors_share_a_buffer_and_nothing_else():
    leaves = [torch.randn(3, requires_grad=True) for _ in range(50)]
    got, wire = travel(leaves)
    assert len(wire.buffers) == 1
    assert {leaf.untyped_storage().nbytes() for leaf in got} == {12}  # whoever keeps one does not keep all
    loss = sum((leaf**2).sum() for leaf in got)
    with torch.no_grad():
        got[0].add_(1)  # changes no other leaf, so what was saved for the others is good
    gradient = torch.autograd.grad(loss, got[1])[0]
    assert torch.equal(gradient, 2 * leaves[1].detach())


@each_row("dtype", ["float32", "float64", "int8", "uint32", "bool", "complex64"])
def test_large_arrays_travel_beside_the_pickle(dtype):
    array = (np.arange(200_000) % 7).astype(dtype).reshape(500, 400)
    (got, again, module), wire = travel([array, array, Net().requires_grad_(False)])
    assert len(wire.skeleton) < 20_000
    assert got is again
    assert got.dtype == array.dtype
    assert got.flags.writeable
    np.testing.assert_array_equal(got, array)
    assert isinstance(module, Net)


@each_row(
    "array",
    [
        np.arange(200_000.0).reshape(500, 400).T,
        np.arange(200_000.0)[::-1],
        np.array(["word"] * 50_000),
        np.arange(100_000).astype("datetime64[s]"),
        np.arange(100_000.0).astype(">f8"),
        np.frombuffer(bytes(200_000)),
        np.zeros(20_000, dtype=[("a", "f8"), ("b", "i4")]),
    ],
)
def test_other_arrays_travel_in_the_pickle(array):
    got, _ = travel(array)
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got, array)


@each_row("kind", [bytes, bytearray, str])
def test_long_bytes_arrive_as_they_were_packed_and_stay_one_object(kind):
    size = 2_000_000
    long = "é" * (size // 2) if kind is str else kind(bytes(range(250)) * (size // 250))
    local = {"long": long}
    message = pack([long, "a", local, long, lambda: local], main_by_name=True)
    if kind is bytearray:
        local["long"] = long.copy()
        long[:] = b"changed, and shorter"
    wire = to_wire(message.detached())
    assert [buffer.nbytes > size for buffer in wire.buffers] == [True]  # a transport copies no long pickle
    assert not wire.content[0]
    got, letter, held, again, function = unpack(from_wire(wire).received())
    assert type(got) is kind
    assert got == local["long"]
    assert got is again is held["long"]
    assert function() is held
    assert letter == "a"


@each_row("op", [torch.ops.aten.relu, torch.ops.aten.slice.Tensor])
def test_what_is_under_torch_ops_travels_by_its_name(op):
    assert travel([op])[0] == [op]
    names = {"op": op}
    exec("def f(x): return op(x)", names)  # of no module, so that its code travels
    assert travel(names["f"])[0].__globals__["op"] is op
    assert cloudpickle.loads(code_of(names["f"])).__globals__["op"] is op


def test_functions_behind_decorators_are_named_not_copied():
    from tests.distributed import test_parallelize

    hidden = test_parallelize.module_level.__wrapped__
    assert travel(hidden)[0] is hidden
    assert len(pack(hidden, main_by_name=True).skeleton) < 200


def test_a_notebook_s_functions_and_classes_travel_as_code(monkeypatch):
    import sys
    from types import ModuleType

    notebook = ModuleType("__main__")
    exec(
        "class Layer:\n"
        "    scale = 3\n"
        "def helper(x):\n"
        "    return x * Layer.scale\n"
        "def cell(x):\n"
        "    return helper(x) + 1\n",
        vars(notebook),
    )
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    message = pack((notebook.cell, notebook.Layer()), main_by_name=False)
    by_name = pack(notebook.cell, main_by_name=True)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # the worker has no such cell
    function, layer = unpack(message)
    assert function(2) == 7
    assert layer.scale == 3
    with pytest.raises(todist.errors.SerializationError, match="cell"):
        unpack(by_name)


def test_what_an_object_is_rebuilt_with_is_there_in_time(monkeypatch):
    """Before the global variables that hold tensors: these come last."""
    import sys
    from types import ModuleType

    notebook = ModuleType("__main__")
    exec(
        "from torch import nn, ones\n"
        "import math\n"
        "SCALES, NET, ALSO = {'a': 4.0}, nn.Linear(2, 2), [ones(3)]\n"
        "class Unit:\n"
        "    kinds = set()\n"
        "    def __init__(self, name):\n"
        "        super().__init__()\n"
        "        self.name, self.scale = name, math.sqrt(SCALES[name])\n"
        "    def __reduce__(self):\n"
        "        return made, (self.name,)\n"
        "    def __hash__(self):\n"
        "        return hash(root(self.scale))\n"
        "def root(x, of=lambda x: math.sqrt(x)):\n"
        "    return of(x)\n"
        "def made(name):\n"
        "    return Unit(name)\n"
        "def net(x):\n"
        "    return NET(x) * len(both(ALSO))\n"
        "def both(held):\n"
        "    return [*held, *ALSO, NET]\n",
        vars(notebook),
    )
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    message = pack(({notebook.made("a")}, notebook.net), main_by_name=False)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    (unit,), net = unpack(message)
    assert unit.scale == 2.0
    assert unit.kinds == set()
    torch.testing.assert_close(net(torch.ones(2)), 3 * notebook.NET(torch.ones(2)))
    assert net.__globals__["both"](())[0] is net.__globals__["ALSO"][0]


def test_what_was_rebuilt_is_freed_at_once():
    """Not when the garbage collector comes: a worker would hold the models of many calls until then."""
    message = pack({"model": nn.Linear(2, 2), "x": torch.ones(3)}, main_by_name=True)
    gc.collect()
    gc.disable()
    try:
        rebuilt = unpack(message.detached().received())
        held = [
            weakref.ref(rebuilt["model"]),
            weakref.ref(rebuilt["model"].weight),
            weakref.ref(rebuilt["x"]),
        ]
        del rebuilt
        assert [each() for each in held] == [None, None, None]
    finally:
        gc.enable()


def test_a_message_inside_another_one_has_its_tensors_there():
    x, other = torch.randn(3, requires_grad=True), nn.Parameter(torch.randn(2))
    inner = pack((x, "text", b"b" * (1 << 20), other), main_by_name=True)
    inner.late = Late((0,), ((3,),), 1, 2.0)
    outer = pack([other, inner, x], main_by_name=True)
    assert len(outer.tensors) == 2
    parameter, found, y = unpack(outer.detached().received())
    assert found.late == inner.late
    assert found.late_tensors() == [y]
    rebuilt = unpack(found)
    assert rebuilt[0] is y
    assert rebuilt[1:3] == ("text", b"b" * (1 << 20))
    assert rebuilt[3] is parameter
    assert [*map(type, found.tensors)].count(nn.Parameter) == 1
    assert y.requires_grad


def test_a_reply_says_that_it_is_an_exception_before_it_is_rebuilt():
    message = pack(Reply(exception=SerializedException.of(ValueError("wrong"))), main_by_name=True)
    assert from_wire(to_wire(message)).told == ("ValueError: wrong", "ValueError: wrong\n", "")
    with pytest.raises(ValueError, match="wrong"):
        reply_of(message, "worker1")
    for values in ([1], [[1]], [{"x": torch.ones(2)}]):
        assert pack(Reply(values), main_by_name=True).told is None


def test_the_parts_of_a_package_that_a_function_names_go_with_it(tmp_path: Path, monkeypatch: Any) -> None:
    """The receiver imports them; also one that was imported after the function had been sent once."""
    package = tmp_path / "a_package_of_parts"
    (package / "deep").mkdir(parents=True)
    for name in ("__init__", "first", "second", "deep/__init__", "deep/third"):
        (package / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("", ".first"):
        importlib.import_module(f"{package.name}{name}")
    names: dict[str, Any] = {"__name__": "__main__", "a_package_of_parts": sys.modules[package.name]}
    exec("def function():\n    return a_package_of_parts.first, a_package_of_parts.deep.third", names)

    def sent() -> set[str]:
        found = cloudpickle.Pickler(io.BytesIO()).reducer_override(names["function"])[2][1]
        ours = CodePickler(io.BytesIO()).reducer_override(names["function"])[2][1]
        modules = [{one.__name__ for one in each["_cloudpickle_submodules"]} for each in (found, ours)]
        assert modules[0] == modules[1]
        return modules[1]

    assert sent() == {"a_package_of_parts.first"}
    for name in ("second", "deep.third"):
        importlib.import_module(f"{package.name}.{name}")
    assert sent() == {f"a_package_of_parts.{name}" for name in ("first", "deep", "deep.third")}
