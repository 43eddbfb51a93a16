"""A small call's message says what the pickler's message says, and takes no pickler that asks for each part."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist.distributed.messages.caller_state import CallerState
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.payload import ExecutionOptions, Payload
from torchopt_dist.distributed.messages.requests import Backward, Call, Reply
from torchopt_dist.distributed.serialization import pickling
from torchopt_dist.distributed.serialization.frames import from_frames, to_frames
from torchopt_dist.distributed.serialization.pickling import pack, unpack
from torchopt_dist.distributed.serialization.plain import LONGEST, MARK
from torchopt_dist.distributed.serialization.wire import from_wire, is_skeleton, to_wire
from torchopt_dist.pickling.serialized_exception import SerializedException

STATE = CallerState(True, (("cpu", torch.bfloat16),), torch.float64)
OPTIONS = ExecutionOptions(vectorize=True, chunk_size=3, device="auto", strict=True, hedge_after=0.5)
X, WEIGHT = torch.randn(3, 2), torch.nn.Parameter(torch.randn(2))


def function(*args, **kwargs):
    del args, kwargs


def call_of(*args, function=function, **kwargs):
    tasks = ((args, kwargs), ((1,), {}))
    return Call(
        Payload(function, tasks, (2**62, 7), STATE, OPTIONS, ticket=(0, 5), samples=19, stacked=(1, 3)),
        (1, 2**40 + 3),
        keep=True,
    )


PLAIN = {
    "constants": call_of(None, True, 3, 2.5, 1j, "text", b"bytes"),
    "tensors": call_of(X, (WEIGHT, (X, 2)), scale=X, name="x"),
    "backward": Backward(
        (1, 5),
        (X, None),
        (True, False),
        retain_graph=True,
        key=(1, 6),
        keep=False,
        state=CallerState(False, (("cpu", torch.bfloat16),), torch.float64),
        streamed=(0,),
    ),
    "reply": Reply([X, (WEIGHT, None), "done"], warning="take care", seconds=0.25, drew=False),
    "empty reply": Reply(),
}
SHARED = [1]
OTHERS = {
    "a list": call_of(SHARED, SHARED),
    "a dict in a reply": Reply([{"loss": X}]),
    "a closure": call_of(1, function=lambda: SHARED),
    "a class": call_of(1, function=int),
    "a long text": call_of("x" * (LONGEST + 1)),
    "an exception": Reply(exception=SerializedException.of(ValueError("wrong"))),
}


def sent(message):
    """The message after a transport has carried it."""
    head, *rest = to_frames(to_wire(message.detached(), whole_storages=False))
    return from_wire(from_frames(head, rest)).received()


def fields(content, message):
    """What it says, with the number of a tensor in its place."""
    numbers = {id(tensor): f"tensor {number}" for number, tensor in enumerate(message.tensors)}

    def plain(part):
        if isinstance(part, torch.Tensor):
            return numbers[id(part)]
        if isinstance(part, (tuple, list)):
            return type(part)(map(plain, part))
        if isinstance(part, dict):
            return {key: plain(value) for key, value in part.items()}
        return part

    found = dict(vars(content))
    if isinstance(content, Call):
        found |= {**vars(content.payload), "payload": None}
    return {name: plain(value) for name, value in found.items()}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_message_says_what_a_pickle_says(monkeypatch, name):
    content = PLAIN[name]
    plain = pack(content, main_by_name=True)
    monkeypatch.setattr(pickling, "plain_skeleton", lambda *_: None)
    pickled = pack(content, main_by_name=True)
    assert plain.skeleton.startswith(MARK)
    assert not pickled.skeleton.startswith(MARK)
    assert len(plain.tensors) == len(pickled.tensors)
    assert all(one is other for one, other in zip(plain.tensors, pickled.tensors, strict=True))
    assert replace(plain, skeleton=b"", tensors=[]) == replace(pickled, skeleton=b"", tensors=[])
    got, expected = sent(plain), sent(pickled)
    assert fields(unpack(got), got) == fields(unpack(expected), expected) == fields(content, plain)
    assert [(type(x), x.requires_grad) for x in got.tensors] == [
        (type(x), x.requires_grad) for x in expected.tensors
    ]


@each_row("content", [PLAIN["tensors"], PLAIN["tensors"].payload, PLAIN["backward"], PLAIN["reply"]])
def test_these_messages_show_each_field(content):
    """A field that is new, and has its default here, could be left out and nobody would see."""
    for each in dataclasses.fields(content):
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        assert each.name == "exception" or getattr(content, each.name) != default, each.name


@each_row("name", OTHERS)
def test_what_is_not_plain_is_left_to_the_pickler(name):
    message = pack(OTHERS[name], main_by_name=True)
    assert not message.skeleton.startswith(MARK)
    got = unpack(sent(message))
    if name == "a list":
        (one, other), _ = got.payload.tasks[0]
        assert one is other


def test_a_function_that_its_name_does_not_find_is_sent_with_its_code(monkeypatch):
    old = function
    monkeypatch.setitem(globals(), "function", lambda: None)
    assert not pack(call_of(1, function=old), main_by_name=True).skeleton.startswith(MARK)


def test_a_tensor_that_cannot_be_sent_is_told_also_of_a_plain_message():
    with pytest.raises(todist.errors.SerializationError, match="meta tensor of shape"):
        pack(call_of(torch.empty(3, device="meta")), main_by_name=True)


def test_a_message_without_tensors_is_its_skeleton():
    message = pack(Reply(["done"]), main_by_name=True)
    assert is_skeleton(message)
    assert unpack(Message(message.skeleton, [], [], [])) == Reply(["done"])
    device = pack(call_of(1), main_by_name=True)
    device.device = "auto"
    for other in (pack(Reply([torch.ones(1)]), main_by_name=True), device):
        assert not is_skeleton(other)
