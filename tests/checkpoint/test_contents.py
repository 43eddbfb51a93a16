"""What a checkpoint can hold: a program that goes on from one computes what an undisturbed one does, bit for bit."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import torchopt_dist as todist

X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Network(nn.Module):
    """Draws from torch's generator in each call, and counts calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.layers(x + 0.1 * random.random() + 0.1 * float(np.random.rand()))


class Sampler:
    """Hands out the numbers below 10 in random order, again and again."""

    def __init__(self):
        self.order, self.place = np.random.default_rng(0).permutation(10), 0

    def __iter__(self):
        while True:
            self.place += 1
            yield int(self.order[self.place % 10])

    def state_dict(self):
        return {"order": self.order, "place": self.place, "kept": defaultdict(list, {0: [np.float64(0.5)]})}

    def load_state_dict(self, state):
        assert state["kept"] == {0: [0.5]}
        self.order, self.place = state["order"], state["place"]


def by_optimizer(make_optimizer, make_scheduler):
    def make():
        net = Network()
        optimizer = make_optimizer(net.parameters())
        scheduler, sampler = make_scheduler(optimizer), Sampler()
        numbers = iter(sampler)

        def step():
            loss = (net(X) * next(numbers) / 10).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step(*([loss.item()] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))

        def result(objects):
            return [*net.state_dict().values(), torch.tensor(optimizer.param_groups[0]["lr"])]

        return {"net": net, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}, step, result

    return make


def by_meta_optimizer(make_optimizer):
    def make():
        net = Network()
        optimizer = make_optimizer(net)

        def step():
            optimizer.step(net(X).pow(2).mean())
            todist.stop_gradient(net)
            todist.stop_gradient(optimizer)

        return {"net": net, "optimizer": optimizer}, step, lambda objects: list(net.state_dict().values())

    return make


def of_a_tree(objects):
    return [objects["params"]["w"], *objects["params"]["b"]]


def tree():
    return {"w": torch.randn(3, 4, requires_grad=True), "b": (torch.zeros(4, requires_grad=True),)}


def tree_loss(params):
    return ((X @ params["w"] + params["b"][0]) * torch.rand(4)).pow(2).mean()


def by_functional_optimizer():
    objects = {"params": tree(), "optimizer": todist.FuncOptimizer(todist.adam(lr=0.1))}

    def step():
        objects["params"] = objects["optimizer"].step(tree_loss(objects["params"]), objects["params"])
        todist.stop_gradient(objects["params"])
        todist.stop_gradient(objects["optimizer"])

    return objects, step, of_a_tree


def by_transformation():
    transformation = todist.chain(
        todist.transform.clip_grad_norm(1.0), todist.adamw(lr=todist.schedule.linear_schedule(0.1, 0.01, 5))
    )
    params = tree()
    objects = {"params": params, "state": transformation.init(params)}

    def step():
        leaves = of_a_tree(objects)
        w, b = torch.autograd.grad(tree_loss(objects["params"]), leaves)
        grads = {"w": w, "b": (b,)}
        updates, objects["state"] = transformation.update(grads, objects["state"], params=objects["params"])
        objects["params"] = todist.apply_updates(objects["params"], updates, inplace=False)
        todist.stop_gradient(objects["params"])

    return objects, step, of_a_tree


def by_tensors_that_an_optimizer_holds():
    params = tree()
    optimizer = torch.optim.SGD([params["w"], *params["b"]], lr=0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        tree_loss(params).backward()
        optimizer.step()

    return {"params": params, "optimizer": optimizer}, step, lambda objects: [params["w"], *params["b"]]


PROGRAMS = {
    "Adam, cosine": by_optimizer(
        lambda p: todist.Adam(p, lr=0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, 8)
    ),
    "SGD, several": by_optimizer(
        lambda p: todist.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [1, 2])], [2]
        ),
    ),
    "RMSprop, ScheduleLR": by_optimizer(
        lambda p: todist.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
        lambda o: todist.schedule.ScheduleLR(o, todist.schedule.linear_schedule(0.1, 0.0, 8)),
    ),
    "torch's AdamW, OneCycleLR": by_optimizer(
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), lambda o: lr_scheduler.OneCycleLR(o, 0.1, 9)
    ),
    "torch's NAdam, ReduceLROnPlateau": by_optimizer(
        lambda p: torch.optim.NAdam(p, lr=0.1), lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0)
    ),
    "MetaAdam": by_meta_optimizer(lambda net: todist.MetaAdam(net, lr=0.1)),
    "MetaSGD": by_meta_optimizer(lambda net: todist.MetaSGD(net, lr=0.1, momentum=0.9)),
    "differentiable NAdam": by_meta_optimizer(
        lambda net: todist.differentiable(torch.optim.NAdam, net, lr=0.1)
    ),
    "FuncOptimizer": by_functional_optimizer,
    "transformation": by_transformation,
    "tensors that an optimizer holds": by_tensors_that_an_optimizer_holds,
}


def seed(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_goes_on_bit_for_bit(program, tmp_path):
    make = PROGRAMS[program]
    seed(0)
    objects, step, result = make()
    for _ in range(6):
        step()
    expected = [tensor.clone() for tensor in result(objects)]
    assert all(torch.isfinite(tensor).all() for tensor in expected)

    seed(0)
    objects, step, result = make()
    for _ in range(3):
        step()
    todist.Checkpointer(tmp_path).save(3, objects)
    step()

    seed(1)
    objects, step, result = make()
    assert not torch.equal(result(objects)[0], expected[0])
    start, restored = todist.Checkpointer(tmp_path).restore(objects)
    assert start == 3
    objects.update(restored)
    for _ in range(3):
        step()
    got = result(objects)
    assert [tensor.dtype for tensor in got] == [tensor.dtype for tensor in expected]
    assert all(map(torch.equal, got, expected))


def roundtrip(folder, value, given=None):
    todist.Checkpointer(folder).save(1, {"value": value})
    return todist.Checkpointer(folder).restore({"value": value if given is None else given}).objects["value"]


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator().manual_seed(3), lambda g: torch.rand(3, generator=g).tolist()),
        (np.random.default_rng(3), lambda g: g.normal(size=3).tolist()),
        (np.random.Generator(np.random.MT19937(3)), lambda g: g.normal(size=3).tolist()),
        (np.random.RandomState(3), lambda g: g.normal(size=3).tolist()),
        (random.Random(3), lambda g: [g.gauss(0, 1) for _ in range(3)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_generators_go_on(generator, draw, tmp_path):
    todist.Checkpointer(tmp_path).save(1, {"generator": generator})
    expected = draw(generator)
    assert draw(generator) != expected
    assert todist.Checkpointer(tmp_path).restore({"generator": generator}).objects["generator"] is generator
    assert draw(generator) == expected


class Flag(IntEnum):
    ON = 1


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 2**200, 0.1, float("inf"), 1 + 2j, "text", b"\xff\x00", bytearray(b"x")),
        *(torch.float16, torch.device("cpu"), torch.Size([2, 3])),
        [1, [2.5, ("a", None)], {"b": {3}, 4: (), ("x", 1): 5}],
        *(OrderedDict(b=1, a=2), Counter("abca")),
    ],
    ids=repr,
)
def test_plain_values_come_back_as_they_are(value, tmp_path):
    got = roundtrip(tmp_path, value)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize("dtype", ["float32", "complex128", "uint32", "bool", "int8"])
def test_arrays_of_numpy_come_back(dtype, tmp_path):
    array = np.arange(6).reshape(2, 3)[:, ::-1].astype(dtype)
    state = {"array": array, "zero": np.ones((), dtype), "number": array[0, 0]}
    got = roundtrip(tmp_path, state)
    for name in ("array", "zero"):
        assert isinstance(got[name], np.ndarray)
        assert got[name].dtype == state[name].dtype
        assert np.array_equal(got[name], state[name])
    assert got["number"] == array[0, 0]


def test_plain_values_may_change_their_structure(tmp_path):
    assert roundtrip(tmp_path, [{"loss": 1.0}, {"loss": 0.5}], given=[]) == [{"loss": 1.0}, {"loss": 0.5}]
    assert roundtrip(tmp_path, 0.5, given={"a": 1}) == 0.5


class Pair(NamedTuple):
    first: object
    second: object


def test_a_tree_comes_back_in_its_structure(tmp_path):
    net, other = nn.Linear(2, 1), nn.Linear(2, 1)
    held = torch.ones(2, requires_grad=True)
    value = Pair([net, None], {"held": held, "tensor": torch.arange(3), "count": 5, "moved": held * 2})
    todist.Checkpointer(tmp_path).save(1, {"value": value})
    mine, tensor = torch.zeros(2, requires_grad=True), torch.zeros(3)
    given = Pair([other, None], {"held": mine, "tensor": tensor, "count": 0, "moved": mine * 1})
    got = todist.Checkpointer(tmp_path).restore({"value": given}).objects["value"]
    assert isinstance(got, Pair)
    assert got.first == [other, None]
    assert torch.equal(other.weight, net.weight)
    assert got.second["held"] is mine
    assert mine.tolist() == [1.0, 1.0]
    assert got.second["tensor"].tolist() == [0, 1, 2]
    assert got.second["tensor"].dtype == torch.float32
    assert tensor.tolist() == [0, 0, 0], "a tensor that requires no grad is not written"
    assert got.second["count"] == 5
    assert got.second["moved"].tolist() == [2.0, 2.0]
    assert got.second["moved"].is_leaf
    assert got.second["moved"].requires_grad


def test_one_tensor_at_two_places_stays_one_only_if_it_was_one(tmp_path):
    start = torch.zeros(2, requires_grad=True)
    apart = [torch.ones(2, requires_grad=True), torch.full((2,), 2.0, requires_grad=True)]
    got = roundtrip(tmp_path / "apart", apart, given=[start, start])
    assert [tensor.tolist() for tensor in got] == [[1.0, 1.0], [2.0, 2.0]]
    one = roundtrip(tmp_path / "one", [apart[1], apart[1]], given=[start, start])
    assert one[0] is one[1] is start
    assert start.tolist() == [2.0, 2.0]


def test_tied_weights_and_views_are_kept_once_and_alone(tmp_path):
    net = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False))
    net[1].weight = net[0].weight
    base = torch.randn(1000, 1000)
    rest = {
        "net": net,
        "view": base[3, 5:9],
        "strided": base.t()[:3, :4],
        "none": torch.ones(0),
        "wide": base[:1, :1].expand(50, 60),
    }
    checkpointer = todist.Checkpointer(tmp_path)
    checkpointer.save(1, rest)
    (path,) = tmp_path.iterdir()
    assert 160_000 < path.stat().st_size < 200_000
    given = {name: torch.zeros(value.shape) for name, value in rest.items() if name != "net"}
    got = checkpointer.restore(
        {**given, "net": nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False))}
    ).objects
    assert torch.equal(got["net"][0].weight, net[1].weight)
    for name in given:
        assert torch.equal(got[name], rest[name])


def test_unusual_tensors(tmp_path):
    value = [
        torch.eye(3).to_sparse(),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor(True),
    ]
    got = roundtrip(tmp_path, value)
    assert torch.equal(got[0].to_dense(), torch.eye(3))
    assert got[1].tolist() == [1 - 2j]
    assert all(mine.dtype == its.dtype for mine, its in zip(got, value, strict=True))


def lambda_scheduler():
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    return lr_scheduler.LambdaLR(optimizer, Lambda())


class Lambda:
    def __init__(self):
        self.fraction = Fraction(1, 2)

    def __call__(self, step):
        return 1.0


class Stateless:
    def state_dict(self):
        return {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"`value` has no state: it must have `state_dict` and `load_state_dict`, .* got object"),
        ([nn.ReLU(), len], r"`value`\[1\] has no state.* got builtin_function_or_method"),
        (nn.Linear, r"`value` has no state.* got type"),
        (Stateless(), r"`value` has no state.* got Stateless"),
        (Flag.ON, r"`value` has no state.* got Flag"),
        ({"a": {Fraction(1, 2)}}, r"`value`\['a'\] has no state.* got set"),
        (np.array(["text"]), "`value` must be an array of numbers, got one of <U4"),
        (np.datetime64("2026-01-01"), "`value` must be numbers, texts, .* got datetime64"),
        (lambda_scheduler(), r"`value`\['lr_lambdas'\]\[0\]\['fraction'\] must be numbers, .* got Fraction"),
        (nn.LazyLinear(2), r"`value`\['weight'\] has no shape yet: run its module once"),
        (torch.ones(2, device="meta"), "`value` must be a plain tensor, .* got a meta tensor"),
        (nn.Linear(2, 2, device="meta"), r"`value`\['weight'\] must be a plain tensor, .* got a meta tensor"),
        ({"todist: numpy array": 1}, "`value` has the key 'todist: numpy array', which is this module's own"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_kept_is_refused_by_name(value, message, tmp_path):
    with pytest.raises(TypeError, match=message):
        todist.Checkpointer(tmp_path).save(1, {"value": value})
    assert list(tmp_path.iterdir()) == []


def test_an_object_without_a_state_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(TypeError, match="`loss` has no state"):
        todist.Checkpointer(tmp_path).restore({"loss": lambda x: x})


class Spread(torch.Tensor):
    """A tensor of a class of its own."""


def test_a_tensor_of_another_class_is_refused(tmp_path):
    with pytest.raises(
        TypeError, match="`value` must be a plain tensor, whose values are in this process, got a Spread"
    ):
        todist.Checkpointer(tmp_path).save(1, {"value": torch.ones(2).as_subclass(Spread)})


SAVED = {
    "net": (lambda: nn.Linear(2, 2)),
    "count": (lambda: 5),
    "tree": (lambda: {"a": torch.ones(2, requires_grad=True), "b": torch.ones(())}),
    "random": (lambda: random.Random(0)),
}


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"count": None},
            ValueError,
            r"`objects` must have the names that were saved: missing `count`; `partial=True` restores a part of what",
        ),
        (
            {"more": lambda: 1},
            ValueError,
            r"`objects` must have the names .*: additional `more`$",
        ),
        (
            {"tree": lambda: {"a": torch.ones(2)}},
            ValueError,
            r"`tree` must have the parts .*: missing `b`$",
        ),
        (
            {"tree": lambda: {"a": torch.ones(2), "b": torch.ones(()), "c": 1}},
            ValueError,
            r"saved: additional `c`$",
        ),
        (
            {"tree": lambda: {"a": torch.ones(3), "b": torch.ones(())}},
            ValueError,
            r"`tree`\['a'\] must have the shape that was saved, \(2,\), got \(3,\)",
        ),
        (
            {"tree": list},
            ValueError,
            r"`tree` must have the parts that were saved: missing `a`, `b`, additional `the object itself`; what was "
            r"saved is a dict of these, such as a `state_dict\(\)`",
        ),
        (
            {"tree": lambda: {"a": nn.Linear(1, 1), "b": torch.ones(())}},
            TypeError,
            r"`tree`\['a'\] must be of the kind that was saved, tensor, got Linear",
        ),
        ({"count": lambda: torch.ones(())}, TypeError, "`count` was saved as plain values, got Tensor"),
        ({"net": lambda: 5}, TypeError, "`net` must be of the kind that was saved, state_dict, got int"),
        (
            {"random": lambda: torch.Generator()},
            TypeError,
            "`random` must be of the kind that was saved, random Random, got Generator",
        ),
        (
            {"net": lambda: nn.Linear(2, 3)},
            ValueError,
            r"`net`, a Linear, refuses the saved state: (?s:.*)size mismatch for weight",
        ),
        (
            {"net": lambda: nn.Linear(2, 2, bias=False)},
            ValueError,
            r"(?s)`net`, a Linear, refuses .*Unexpected key.*\"bias\"",
        ),
    ],
)
def test_what_does_not_match_is_refused_by_name_and_changes_nothing(changes, kind, message, tmp_path):
    todist.Checkpointer(tmp_path).save(1, {name: make() for name, make in SAVED.items()})
    given = {name: make() for name, make in {**SAVED, **changes}.items() if make is not None}
    before = {}
    with torch.no_grad():
        if isinstance(given["net"], nn.Linear):
            before["net"] = given["net"].weight.clone()
        if "tree" not in changes:
            before["tree"] = given["tree"]["a"].zero_().clone()
    seed(2)
    drawn = torch.rand(1)
    seed(2)
    with pytest.raises(kind, match=message):
        todist.Checkpointer(tmp_path).restore(given)
    assert torch.equal(torch.rand(1), drawn), "the random state has been restored"
    for name in {"net", "tree"} - changes.keys() if "refuses" not in message else ():
        tensor = given[name].weight if name == "net" else given[name]["a"]
        assert torch.equal(tensor, before[name]), f"{name} has been restored"
