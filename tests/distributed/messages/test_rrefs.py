"""References of torch's RPC among arguments and results: they are of use where they arrive, and nobody keeps one."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch._C._distributed_rpc import _rref_context_get_debug_info
from torch.distributed import rpc

import torchopt_dist as todist
from torchopt_dist.distributed.serialization.pickling import pack
from torchopt_dist.distributed.transport import zmq

SECONDS = 30


def _open(held):
    """The value, from its owner or from afar; and whether this is the owner."""
    reference = held["reference"][0]
    return (reference.local_value() if reference.is_owner() else reference.to_here()), reference.is_owner()


def _make(number):
    return rpc.RRef(torch.full((2,), number)), todist.get_rank()


class Holder(nn.Module):
    def __init__(self, reference):
        super().__init__()
        self.scale = nn.Linear(1, 1, bias=False)
        self.reference = reference

    def forward(self, x):
        return self.scale(x) * self.reference.to_here()


def _counts():
    info = _rref_context_get_debug_info()
    return {name: int(count) for name, count in info.items()}


def _calls():
    own = rpc.RRef(torch.tensor([1.0, 2.0]))
    (far, at), *_ = todist.remote_sync_call(_make, args=(5.0,), partitioner=1)
    assert (far.owner().id, far.is_owner(), at) == (1, False, 1)
    torch.testing.assert_close(far.to_here(), torch.full((2,), 5.0))
    connected = rpc.RRef(torch.tensor([3.0], requires_grad=True))
    for reference, value, owner in ((own, [1.0, 2.0], 0), (far, [5.0, 5.0], 1), (connected, [3.0], 0)):
        for worker in range(3):
            for function in (_open, lambda held: _open(held)):  # the second is pickled by its code
                argument = {"reference": (reference,), "again": [reference]}
                ((got, is_owner),) = todist.remote_sync_call(function, args=(argument,), partitioner=worker)
                assert got.tolist() == value
                assert is_owner == (worker == owner)
    assert todist.remote_call(_counts, 1)["num_owner_rrefs"] > 0  # `far`
    holder = Holder(rpc.RRef(torch.tensor(3.0)))
    for _ in range(2):  # a structure that is sent once would have an old reference
        (moved,) = todist.remote_sync_call(holder, args=(torch.ones(1),), partitioner=2)
        (slope,) = torch.autograd.grad(moved, holder.scale.weight)
        assert slope.item() == 3.0
    with pytest.raises(todist.errors.SerializationError, match="cannot be sent"):
        todist.remote_sync_call(_open, args=({"reference": (own,)}, (n for n in "x")), partitioner=1)


def _calls_with_a_tree():
    """A result goes through a relay, of which torch's count is not told; with such an argument there is no tree."""
    own = rpc.RRef(torch.tensor([1.0, 2.0]))
    chain = todist.parallelize(
        lambda *args: [(worker, args, {}) for worker in range(3)], lambda results: results, fan_out=1
    )
    assert [made.to_here().tolist() for made, _ in chain(_make)(2.0)] == [[2.0, 2.0]] * 3
    assert [got.tolist() for got, _ in chain(_open)({"reference": (own,)})] == [[1.0, 2.0]] * 3


def test_rrefs_are_arguments_and_results(world):
    def body():
        if todist.get_rank() == 0:
            _calls()
        todist.barrier()
        deadline = time.monotonic() + SECONDS
        while any(_counts()[name] for name in ("num_owner_rrefs", "num_pending_users", "num_forks")):
            assert time.monotonic() < deadline, _counts()
            time.sleep(0.01)
        todist.barrier()
        if todist.get_rank() == 0:
            _calls_with_a_tree()

    world(3).run(body)


def test_only_torch_s_rpc_can_send_one():
    message = pack([1], main_by_name=True)
    message.references = [object()]
    with pytest.raises(todist.errors.SerializationError, match="ask for the transport 'rpc'"):
        zmq._frames(message)
