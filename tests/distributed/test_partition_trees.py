"""Arguments of any shape → which tensors among them are split, and which go to every worker whole."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.distributed.programs import split
from tests.rows import each_row
from torchopt_dist.distributed.partition import partition

pytestmark = pytest.mark.usefixtures("workers")


class Pair(NamedTuple):
    x: Any
    y: Any


@optree.dataclasses.dataclass(namespace="")
class Batch:
    images: torch.Tensor
    labels: torch.Tensor
    name: str = optree.dataclasses.field(default="train", pytree_node=False)


@optree.dataclasses.dataclass(namespace="", eq=False)
class Loss(nn.Module):
    weights: torch.Tensor

    def __post_init__(self):
        super().__init__()


def test_trees_are_split_leaf_by_leaf(workers):
    workers(2)
    x, y = torch.arange(4), torch.arange(4) + 10
    tree = {"pair": Pair(x, y), "list": [x, (y, None)], "ordered": OrderedDict(b=x, a="text")}
    assert split(todist.batch_partitioner, tree, 5, z=(y,), flag=True) == [
        (
            rank,
            (
                {
                    "pair": Pair(a, b),
                    "list": [a, (b, None)],
                    "ordered": OrderedDict(b=a, a="text"),
                },
                5,
            ),
            {"z": (b,), "flag": True},
        )
        for rank, a, b in ((0, [0, 1], [10, 11]), (1, [2, 3], [12, 13]))
    ]


def test_a_registered_dataclass_is_split(workers):
    workers(2)
    parts = todist.batch_partitioner(Batch(torch.arange(4), torch.arange(4) * 2, "test"))
    batches = [part.args[0] for part in parts]
    assert [type(batch) for batch in batches] == [Batch] * 2
    assert [batch.images.tolist() for batch in batches] == [[0, 1], [2, 3]]
    assert [batch.labels.tolist() for batch in batches] == [[0, 2], [4, 6]]
    assert [batch.name for batch in batches] == ["test"] * 2


class Words(UserDict):
    """As a tokenizer returns them."""

    length = 3


class Output(OrderedDict):
    """Items are attributes as well, as a model's output has them."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


class Listed(list):
    name = "none"


@dataclasses.dataclass(frozen=True)
class Sample:
    images: torch.Tensor
    names: dict[str, Any]
    label: torch.Tensor = dataclasses.field(init=False)


class Opaque:
    def __init__(self, size):
        self.inner = [{"x": torch.zeros(size)}]


def containers():
    """One of each kind, and how to get its tensor."""
    output, listed, sample = (
        Output(),
        Listed([torch.arange(4), "text"]),
        Sample(torch.arange(4), {"a": torch.arange(4)}),
    )
    output["logits"], output["loss"] = torch.arange(4), torch.tensor(2.0)
    listed.name = "some"
    return {
        "UserDict": (
            Words(ids=torch.arange(4), mask=[torch.arange(4)]),
            lambda it: [it["ids"], it.data["mask"][0]],
        ),
        "dict": (output, lambda it: [it["logits"], it.logits]),
        "list": (listed, lambda it: [it[0]]),
        "dataclass": (sample, lambda it: [it.images, it.names["a"]]),
        "nested": ([{"a": Words(x=sample)}], lambda it: [it[0]["a"]["x"].images]),
    }


@each_row("kind", containers())
@each_row("exclusive", [False, True])
def test_containers_that_are_no_trees_are_split_as_the_rest(workers, kind, exclusive):
    workers(2)
    container, tensors = containers()[kind]
    parts = todist.dim_partitioner(exclusive=exclusive)(container, torch.arange(4))
    assert len(parts) == (4 if exclusive else 2)
    for part in parts:
        assert type(part.args[0]) is type(container)
        assert vars(part.args[0]).keys() == vars(container).keys() if hasattr(container, "__dict__") else True
        for tensor in tensors(part.args[0]):
            assert tensor.tolist() == part.args[1].tolist()
    assert all(tensor.tolist() == [0, 1, 2, 3] for tensor in tensors(container))  # the caller's is as it was


def test_marks_in_containers_come_off_and_containers_without_tensors_stay(workers):
    workers(2)
    settings, weights = Words(rate=0.1), torch.arange(3)
    for part in partition(None, (Words(x=torch.arange(4), w=todist.replicated(weights)), settings), {}):
        assert part.args[0]["w"] is weights
        assert part.args[1] is settings


def test_a_container_that_holds_itself_cannot_be_split(workers):
    workers(2)
    words = Words(x=torch.arange(4))
    words["self"] = words
    with pytest.raises(TypeError, match=r"args\[0\]\['self'\] is a Words, which cannot be split"):
        todist.batch_partitioner(words)


def test_an_object_that_cannot_be_split_is_whole_unless_it_looks_like_a_batch(workers):
    workers(2)
    opaque = Opaque(100)
    parts = todist.batch_partitioner(opaque, torch.arange(4))
    assert all(part.args[0] is opaque for part in parts)
    with pytest.raises(
        TypeError, match=r"kwargs\['y'\] is a Opaque.*`inner\[0\]\['x'\]` has size 4.*replicated"
    ):
        todist.batch_partitioner(torch.arange(4), y=Opaque(4))
    (first, _) = partition(None, (todist.replicated(Opaque(4)), torch.arange(4)), {})
    assert isinstance(first.args[0], Opaque)
    optimizer = torch.optim.SGD([torch.zeros(4, requires_grad=True)], lr=1.0)
    assert todist.batch_partitioner(optimizer, torch.arange(4))[0].args[0] is optimizer


class Column:
    """An array of another library, as pandas has them."""

    def __init__(self, array):
        self.shape, self.ndim, self.__array__ = array.shape, array.ndim, lambda *_: array


def test_an_object_that_holds_an_array_of_the_batch_s_length_or_is_one_is_told():
    opaque = Opaque(100)
    opaque.labels = np.arange(4)
    with pytest.raises(TypeError, match=r"args\[1\] is a Opaque.*`labels` has size 4"):
        todist.batch_partitioner(torch.arange(4), opaque)
    with pytest.raises(TypeError, match=r"args\[1\] is a Column.* it has size 4 along .* an array of numpy"):
        todist.batch_partitioner(torch.arange(4), Column(np.arange(4)))
    assert len(todist.batch_partitioner(torch.arange(3), opaque, Column(np.arange(4)))) == 3


@each_row(
    ("partitioner", "shape"),
    [
        (todist.batch_partitioner, (4,)),
        (todist.batch_partitioner, (4, 2)),
        (todist.tasks, (4,)),
        (todist.tasks, (4, 2)),
        (todist.dim_partitioner(0, exclusive=True, keepdim=True), (4, 2)),
        (todist.dim_partitioner(1), (2, 4, 3)),
        (todist.dim_partitioner(-1, exclusive=True, keepdim=False), (2, 4)),
    ],
)
def test_arrays_of_numpy_are_split_as_tensors_are(workers, partitioner, shape):
    workers(2)
    array = np.arange(np.prod(shape)).reshape(shape)
    tensor = torch.from_numpy(array)
    batch = {"array": array, "words": Words(mask=array)}
    for part in partitioner(tensor, batch, scalar=np.array(2.0)):
        given, got = part.args
        assert got["array"].shape == got["words"]["mask"].shape == given.shape
        assert got["array"].tolist() == got["words"]["mask"].tolist() == given.tolist()
        assert np.isscalar(got["array"]) or np.shares_memory(got["array"], array)
        assert part.kwargs["scalar"].shape == ()
    assert batch["words"]["mask"] is array
    assert [part.size for part in partitioner(array)] == [part.size for part in partitioner(tensor)]


def test_arrays_of_objects_are_split_and_marked_ones_are_whole():
    names = np.array(["a", None, [1, 2]], dtype=object)
    parts = partition(todist.tasks, (names, todist.replicated(names)), {})
    assert [part.args[0] for part in parts] == ["a", None, [1, 2]]
    assert all(part.args[1] is names for part in parts)


LISTS = [
    [0, 1, 2, 3],
    [0.5] * 4,
    ["a", "b", "c", "d"],
    [True, "a", 1j, np.float32(1)],
    [("a", 1)] * 4,
    [[1], [], [2], [3, 4]],
]


@each_row("labels", [*LISTS, [{"text": "a", "label": 1}] * 4])
def test_a_list_as_long_as_the_batch_is_an_error_that_says_what_to_write(labels):
    x = torch.arange(4)
    told = (
        r"\] is a list of 4 items, which is not split.*tensor or an array of numpy.*`todist.replicated\(x\)`"
    )
    for partitioner in (todist.batch_partitioner, todist.tasks):
        with pytest.raises(TypeError, match=r"^args\[1" + told):
            partitioner(x, labels)
        with pytest.raises(TypeError, match=r"^kwargs\['y'" + told):
            partitioner(x, y=labels)
        for batch in ({"x": x, "y": labels}, Words(x=np.arange(4), y=labels)):
            with pytest.raises(TypeError, match=r"^args\[0\]\['y'" + told):
                partitioner(batch)
    (first, *_) = partition(None, (x, todist.replicated(labels)), {})
    assert first.args[1] is labels


@each_row(
    "whole",
    [
        [0, 1, 2],
        [1],
        (0, 1, 2, 3),
        "text",
        b"text",
        range(4),
        {0, 1, 2, 3},
        {"layers": [64] * 4},
        Words(layers=[64] * 4),
        dict.fromkeys("abcd", 1.0),
        [print] * 4,
        [None] * 4,
        [nn.Linear(1, 1)] * 4,
        torch.Size([1, 2, 3, 4]),
    ],
)
def test_what_is_no_list_of_items_is_not_taken_for_a_batch(whole):
    for part in todist.batch_partitioner(torch.arange(4), whole):
        assert part.args[1] == whole
    assert len(todist.dim_partitioner(1)(torch.zeros(2, 4), [0, 1, 2, 3])) == 3


def test_modules_parameters_scalars_and_marked_tensors_are_whole():
    model = nn.Linear(3, 3)
    parameter = nn.Parameter(torch.zeros(3))
    scalar = torch.tensor(2.0)
    weights = torch.arange(3.0)
    whole = (model, parameter, scalar, {"parameters": list(model.parameters())}, "text", None, 3)
    parts = todist.batch_partitioner(
        *whole, todist.replicated(weights), torch.arange(3.0), tree=todist.replicated({"w": weights})
    )
    assert len(parts) == 3
    for rank, part in enumerate(parts):
        for given_, got in zip(whole, part.args[: len(whole)], strict=True):
            assert optree.tree_all(optree.tree_map(lambda a, b: a is b, given_, got, none_is_leaf=True))
        assert part.args[-1].tolist() == [rank]
    # The marks come off on the way.
    for part in partition(todist.batch_partitioner, (todist.replicated(weights), torch.arange(3.0)), {}):
        assert part.args[0] is weights


def test_a_module_that_is_a_node_of_trees_is_whole():
    loss = Loss(torch.arange(3.0))
    assert optree.tree_leaves(loss)[0] is loss.weights
    parts = todist.batch_partitioner(loss, torch.arange(3))
    assert [part.args[0] is loss for part in parts] == [True] * 3


def test_parts_share_the_tensor_and_its_graph():
    x = torch.arange(6.0, requires_grad=True)
    parts = todist.batch_partitioner(x)
    assert parts[0].args[0].data_ptr() == x.data_ptr()
    sum((rank + 1) * part.args[0].sum() for rank, part in enumerate(parts)).backward()
    assert x.grad.tolist() == [1, 1, 2, 2, 3, 3]


@each_row(
    ("partitioner", "args", "told"),
    [
        (todist.batch_partitioner, (), ["no tensor to split"]),
        (todist.batch_partitioner, (1, "a", None), ["no tensor to split"]),
        (
            todist.batch_partitioner,
            (nn.Linear(2, 2), torch.tensor(1.0)),
            ["no tensor to split", "partitioner="],
        ),
        (todist.batch_partitioner, (todist.replicated(torch.ones(3)),), ["no tensor to split"]),
        (todist.batch_partitioner, ([1, 2], np.array(1.0)), ["no tensor to split", "nor an array", "lists"]),
        (todist.batch_partitioner, (torch.ones(0, 3),), ["empty batch", "args[0]", "size 0", "dim=0"]),
        (todist.batch_partitioner, (np.ones((0, 3)),), ["empty batch", "args[0]", "size 0", "dim=0"]),
        (
            todist.batch_partitioner,
            (torch.ones(3), np.ones(4)),
            ["one size along dim=0", "args[0] has 3", "args[1] has 4", "todist.replicated"],
        ),
        (todist.dim_partitioner(1), (np.ones((3, 2)), np.ones(3)), ["args[1]", "dim=1", "(3,)"]),
        (
            todist.dim_partitioner(0, exclusive=True, keepdim=True),
            (torch.ones(0, 3),),
            ["empty batch", "args[0]"],
        ),
        (
            todist.batch_partitioner,
            (torch.ones(3), {"x": torch.ones(4)}),
            ["one size along dim=0", "args[0] has 3", "args[1]['x'] has 4", "todist.replicated"],
        ),
        (
            todist.dim_partitioner(1),
            (torch.ones(3, 2), torch.ones(3)),
            ["args[1]", "dim=1", "(3,)", "todist.replicated"],
        ),
        (todist.dim_partitioner(-2), (torch.ones(3),), ["args[0]", "dim=-2", "(3,)"]),
        (todist.dim_partitioner(0, workers=["nobody"]), (torch.ones(3),), ["'nobody'", "worker0, worker1"]),
        (todist.dim_partitioner(0, workers=[0, 3]), (torch.ones(3),), ["[0, 3)", "got 3"]),
    ],
)
def test_arguments_that_cannot_be_split_are_named(partitioner, args, told):
    with pytest.raises(ValueError, match=re.escape(told[0])) as caught:
        partitioner(*args)
    for words in told:
        assert words in str(caught.value)


def test_a_keyword_argument_is_named():
    with pytest.raises(ValueError, match=r"args\[0\] has 3, .*kwargs\['y'\]\[1\] has 2"):
        todist.batch_partitioner(torch.ones(3), y=[torch.ones(3), torch.ones(2)])
