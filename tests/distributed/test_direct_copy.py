"""A message that stays in this process is rebuilt as one that is pickled, or is left to the pickle."""

from __future__ import annotations

import collections
import copyreg
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.distributed.programs import Net, mlp
from torchopt_dist.distributed._caller_state import CallerState
from torchopt_dist.distributed._direct_copy import packed_directly
from torchopt_dist.distributed._protocol import Backward, Reply
from torchopt_dist.distributed._serialization import pack, unpack


class Point(NamedTuple):
    x: int


def named(x):
    return x


class Keeps(nn.Module):
    """Holds a module twice, itself, what it shares with others, tensors in containers; its state has no ``cache``."""

    def __init__(self, shared):
        super().__init__()
        self.part = nn.Linear(2, 2)
        self.again = [self.part, shared]
        self.table = {"own": torch.zeros(3), ("a", 1): {1, 2}}
        self.function = named
        self.register_buffer("count", torch.zeros(()))
        self.register_forward_pre_hook(before)
        self.cache = object()
        vars(self)["me"] = self

    def __getstate__(self):
        return {name: value for name, value in super().__getstate__().items() if name != "cache"}


def before(module, args):
    return args


class Reduced(nn.Module):
    def __reduce__(self):
        return Reduced, ()


def both(values):
    """What is made of a reply's values with a pickle, and without one."""
    made = []
    for message in (
        pack(Reply(values), main_by_name=True),
        packed_directly(Reply(values), main_by_name=True),
    ):
        assert message is not None
        made.append((unpack(message.detached().received()).values, message))
    return made


def shape_of(obj, seen):
    """An object's structure, with the number of each object that can change and the content of tensors."""
    if isinstance(obj, torch.Tensor):
        number = seen.setdefault(id(obj), len(seen))
        return type(obj), number, obj.detach().tolist(), obj.requires_grad
    if isinstance(obj, (list, dict, set, nn.Module)):
        if id(obj) in seen:
            return "again", seen[id(obj)]
        seen[id(obj)] = len(seen)
    if isinstance(obj, nn.Module):
        return type(obj), [(name, shape_of(part, seen)) for name, part in vars(obj).items()]
    if isinstance(obj, dict):
        return type(obj), [(key, shape_of(part, seen)) for key, part in obj.items()]
    if isinstance(obj, (list, tuple)):
        return type(obj), [shape_of(part, seen) for part in obj]
    return obj


def test_all_is_what_a_pickle_makes_of_it():
    shared, leaf = [1, "a"], torch.ones(2, requires_grad=True)
    cycle = [leaf, (leaf * 2, None)]
    cycle.append(cycle)
    keeps = Keeps(shared)
    keys = collections.OrderedDict(a=leaf)
    values = [
        keeps,
        shared,
        cycle,
        [keeps.part, Net(), mlp()],
        (1.5, (2j, b"x", torch.Size([1])), torch.float64),
    ]
    values += [keys, {"n": named, "t": Keeps}, set(), {3}]
    (want, pickled), (got, direct) = both(values)
    assert direct.skeleton == b""
    assert shape_of(got, {}) == shape_of(want, {})
    assert got[0] is not keeps
    assert not hasattr(got[0], "cache")
    assert got[0].again[1] is got[1] is not shared
    assert got[0].me is got[0]
    held = [{m.tensors[number].data_ptr() for number in m.buffers} for m in (direct, pickled)]
    assert held[0] == held[1]
    shared.append("later")
    assert unpack(direct).values[1] == [1, "a"]  # as it was when it was packed
    got[1].append("there")
    assert unpack(direct).values[1] == [1, "a"]


def test_a_backward_is_what_it_was():
    request = Backward(
        (0, 1), (torch.ones(2), None), (True, False), True, (0, 2), False, CallerState.capture()
    )
    message = packed_directly(request, main_by_name=True)
    again = unpack(message.detached().received())
    assert torch.equal(again.output_grads[0], torch.ones(2))
    assert vars(again).keys() == vars(request).keys()
    assert [*vars(again).values()][2:] == [*vars(request).values()][2:]
    assert (again.graph, again.output_grads[1]) == (request.graph, None)


@pytest.mark.parametrize(
    "value",
    [
        lambda: None,
        Point(1),
        np.ones(2),
        object(),
        {Point(1): 2},
        Reduced(),
        parametrizations.weight_norm(nn.Linear(1, 1)),
        collections.Counter("a"),
        [].append,
        copyreg,
    ],
)
def test_what_is_not_plain_is_left_to_the_pickle(value):
    assert packed_directly(Reply([value]), main_by_name=True) is None
    assert packed_directly(Reply([{"a": (value,)}]), main_by_name=True) is None
