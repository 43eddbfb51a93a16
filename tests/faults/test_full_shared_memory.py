"""Where ``/dev/shm`` is full, groups start, calls and their gradients go on: nothing of ours needs it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
from torch.distributed import rpc

import torchopt_dist as todist
from tests.processes import World

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
ELEMENTS = 1 << 20


def fill_shared_memory() -> None:
    """Give this process a ``/dev/shm`` of its own, without a free byte."""
    libc = ctypes.CDLL(None, use_errno=True)
    for code in (
        libc.unshare(CLONE_NEWNS),
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=16k"),
    ):
        if code:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    left = os.statvfs("/dev/shm")
    Path("/dev/shm/full").write_bytes(bytes(left.f_bavail * left.f_frsize))
    assert os.statvfs("/dev/shm").f_bavail == 0


def call_with_a_large_tensor(shared_memory: bool) -> object:
    try:
        fill_shared_memory()
    except PermissionError as error:
        return error
    options = rpc.TensorPipeRpcBackendOptions() if shared_memory else None

    @todist.auto_init_rpc(rpc_backend_options=options)
    @todist.rank_zero_only
    def main() -> object:
        x = torch.ones(ELEMENTS, requires_grad=True)
        (y,) = todist.remote_sync_call(torch.sum, args=(x,), partitioner=1)
        y.backward()
        return y.item(), x.grad.sum().item()

    return main()


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_calls_work_where_shared_memory_is_full(transport):
    ends = World(2, env={"TODIST_TRANSPORT": transport}, rpc=False).run(
        call_with_a_large_tensor, transport == "rpc"
    )
    if isinstance(ends[0], PermissionError):
        pytest.skip(f"a process may not mount here: {ends[0]}")
    assert ends == [(ELEMENTS, ELEMENTS), None]
