"""What a module shares with the rest of its message → it is one on the receiver too; all else stays cached."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import ClassVar

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.distributed.programs import mlp
from torchopt_dist.distributed.serialization.pickling import pack, unpack


class Config:
    """Compared by what it is set to, so that its hash does not tell that it changes."""

    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        return isinstance(other, Config) and self.scale == other.scale

    def __hash__(self):
        return hash(self.scale)


class Scaled(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.dtype, self.device, self.shape = torch.float32, torch.device("cpu"), torch.Size([1])
        self.names = ("in", "out", frozenset({"a"}), 1 << 80, 2.5)

    def forward(self, x):
        return self.config.scale * x


class Recorder:
    """A hook that is a method, of an object that the loss reads."""

    def __init__(self):
        self.model = nn.Linear(2, 2)
        self.seen = []
        self.model.register_forward_hook(self.hook)

    def hook(self, module, args, output):
        self.seen.append(output)

    def loss(self, x):
        self.seen.clear()
        y = self.model(x).sum()
        return y + sum((seen**2).sum() for seen in self.seen)


def copied(value, *, main_by_name=True):
    """What arrives, and whether its modules are packed apart."""
    message = pack(value, main_by_name=main_by_name)
    return unpack(message), bool(message.structures)


def hooked(seen):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    return model


def test_a_list_that_a_hook_fills_is_the_one_that_the_loss_reads(world):
    seen = []

    def loss(model, x):
        seen.clear()
        return model(x).sum() + 10 * sum((output**2).sum() for output in seen)

    model, x = hooked(seen), torch.ones(3, 2)
    (remote,) = world(2).on_zero(lambda: todist.remote_sync_call(loss, args=(model, x), partitioner=1))
    assert torch.allclose(remote, loss(model, x))


@pytest.mark.parametrize("bound", [False, True])
def test_an_object_whose_method_is_a_hook_stays_one(bound):
    recorder, x = Recorder(), torch.ones(1, 2)
    call = functools.partial(recorder.loss, x) if bound else functools.partial(Recorder.loss, recorder, x)
    got, _ = copied(call)
    assert torch.allclose(got(), call())


def test_an_object_that_a_module_holds_and_an_argument_is_stays_one():
    config = Config(1.0)
    (model, got), _ = copied((Scaled(config), config))
    got.scale = 5.0
    assert model(2.0) == 10.0


def test_an_object_that_two_modules_hold_stays_one():
    config = Config(1.0)
    (first, second), _ = copied((Scaled(config), Scaled(config)))
    first.config.scale = 5.0
    assert second(2.0) == 10.0


def test_a_global_variable_that_a_hook_counts_in_is_the_one_that_is_read():
    notebook = ModuleType("__main__")
    exec(
        "calls = 0\n"
        "def count(*_):\n"
        "    global calls\n"
        "    calls += 1\n"
        "def read(model, x):\n"
        "    model(x)\n"
        "    return calls\n",
        vars(notebook),
    )
    model = nn.Linear(2, 2)
    model.register_forward_hook(notebook.count)
    (read, part), _ = copied((notebook.read, model), main_by_name=False)
    assert read(part, torch.ones(2)) == 1


def test_what_a_function_holds_as_an_attribute_stays_one():
    def count(*_):
        count_of["n"].n += 1

    count_of = {"n": count}
    count.n = 0
    model = nn.Linear(2, 2)
    model.register_forward_hook(count)
    (got, part), _ = copied((count, model))
    part(torch.ones(2))
    assert got.n == 1


def test_what_cannot_change_may_be_shared():
    one, two = Scaled(Config(1.0)), Scaled(Config(2.0))
    _, apart = copied((one, two, one.names, one.dtype, one.device, one.shape, Scaled, torch.relu, "config"))
    assert apart


def test_a_module_and_its_clone_are_apart():
    model = mlp()
    for by in ("copy", "reference", "deepcopy"):
        _, apart = copied((model, todist.module_clone(model, by=by), torch.ones(3)))
        assert apart, by


def test_a_class_made_in_a_function_may_be_shared():
    class Local(nn.Module):
        sizes: ClassVar[list[int]] = [1, 2]

        def __init__(self, width: int, *, bias: bool = True) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width, bias=bias)

        def forward(self, x):
            return self.linear(x)

    def loss(model, x):
        assert isinstance(model, Local)
        return model(x).sum()

    (got, model), apart = copied((loss, Local(3)))
    assert apart
    got(model, torch.ones(3))


class Tagged(torch.Tensor):
    """A tensor class that a worker finds by its name."""


def test_a_tensor_of_a_class_made_in_a_function_is_refused():
    class Local(torch.Tensor):
        pass

    with pytest.raises(
        todist.errors.SerializationError, match=r"Local cannot be sent: .* find that class by name"
    ):
        pack([torch.ones(2).as_subclass(Local)], main_by_name=True)
    assert type(copied(torch.ones(2).as_subclass(Tagged))[0]) is Tagged


def test_a_tensor_class_of_a_main_that_the_worker_has_not_is_refused(monkeypatch):
    import sys

    notebook = ModuleType("__main__")
    exec("import torch\nclass Mine(torch.Tensor):\n    pass", vars(notebook))
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    tensor = torch.ones(2).as_subclass(notebook.Mine)
    pack(tensor, main_by_name=True)
    with pytest.raises(todist.errors.SerializationError, match="Mine"):
        pack(tensor, main_by_name=False)
