"""Requests that this process answers itself are answered as another process would."""

from __future__ import annotations

import torch

import torchopt_dist as todist
from torchopt_dist.core.random_turns import lent
from torchopt_dist.distributed.calls.local import Beside
from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.messages.payload import ExecutionOptions, group_by_worker
from torchopt_dist.distributed.messages.requests import Call
from torchopt_dist.distributed.serialization.pickling import pack, unpack


def test_what_a_thread_of_this_process_does_for_a_lost_worker_shares_no_memory_with_the_caller():
    def body():
        x = torch.ones(20_000)
        payload, _ = group_by_worker(lambda x: x.mul_(2), [(0, (x,), {})], ExecutionOptions())[0]
        request = pack(Call(payload, (0, 1), keep=False), main_by_name=False).detached()
        with lent():  # as whoever waits for a call: the thread is a visitor, which computes only meanwhile
            reply = unpack(Beside(None, current_group()).send(0, request, 0).result(60).received())
        assert (reply.values[0] == 2).all()
        assert (x == 1).all()

    todist.auto_init_rpc()(body)()
