"""What cannot be sent is an error that names its place: as an argument or a result, here or on any worker."""

from __future__ import annotations

import functools
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist.distributed.serialization.pickling import place_of


def fake():
    with FakeTensorMode():
        return torch.ones(3)


def masked():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MaskedTensor calls itself a prototype
        return masked_tensor(torch.ones(3), torch.tensor([True, False, True]))


def parts(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


UNSENDABLE = {
    "FakeTensor": (fake, "class FakeTensor cannot be sent"),
    "TwoTensor": (lambda: TwoTensor(torch.ones(3), torch.ones(3)), "class TwoTensor cannot be sent"),
    "MaskedTensor": (masked, "class MaskedTensor cannot be sent"),
    "uint4": (lambda: torch.empty(3, dtype=torch.uint4), r"of torch\.uint4 cannot be sent"),
    "nested": (lambda: parts(torch.strided), "a nested tensor cannot be sent"),
    "jagged": (lambda: parts(torch.jagged), "a nested tensor cannot be sent"),
    "sparse": (
        lambda: torch.eye(3).to_sparse(),
        r"a torch\.sparse_coo tensor of shape \(3, 3\) cannot be sent",
    ),
    "lock": (threading.Lock, "cannot pickle '_thread.lock' object"),
}


def returns(maker):
    return {"x": [maker()]}


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_what_cannot_be_sent_is_an_error_of_its_own_and_no_lost_worker(world, transport):
    def body():
        for rank in (0, 1):
            for maker, text in UNSENDABLE.values():
                where = rf"arguments cannot be sent to worker{rank}: kwargs\['batch'\]\[1\]: .*{text}"
                with pytest.raises(todist.errors.SerializationError, match=where):
                    todist.remote_call(len, rank, batch=[1, maker()])
                call = todist.parallelize(rank, retries=1)(returns)
                with pytest.raises(
                    todist.errors.SerializationError,
                    match=rf"result cannot be sent: result\['x'\]\[0\]: .*{text}",
                ):
                    call(maker)
            with pytest.raises(
                todist.errors.SerializationError, match=r"args\[1\]\.1\.weight: .* lazy module"
            ):
                todist.remote_call(len, rank, 0, nn.Sequential(nn.Flatten(), nn.LazyLinear(2)))
        return todist.alive()

    assert world(2).on_zero(body, transport=transport, on_loss="continue") == (0, 1)


@dataclass
class Batch:
    x: Any


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.inner.lock = threading.Lock()


def closure():
    lock = threading.Lock()
    return lambda: lock


@each_row(
    ("value", "place"),
    [
        (threading.Lock(), "result: "),
        ({"a": (1, [threading.Lock()])}, "result['a'][1][0]: "),
        (Batch(threading.Lock()), "result.x: "),
        (Locked(), "result.inner.lock: "),
        (closure(), "`lock` of result: "),
        (functools.partial(print, threading.Lock()), "result: "),
        ([torch.ones(2)], ""),
    ],
)
def test_the_place_is_that_of_the_smallest_part(value, place):
    assert place_of([("result", 1), ("result", value)], main_by_name=True) == place


def test_the_search_ends_in_what_contains_itself():
    batch = Batch(None)
    batch.x = {"again": batch, "lock": threading.Lock()}
    assert place_of([("result", batch)], main_by_name=True) == "result.x['lock']: "
