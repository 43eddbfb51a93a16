"""What does a call cost over a raw ``rpc_async`` of the same bytes, by each transport? No-op, 1 KiB, 1 MiB, 64 MiB.

Nothing of ours is in the column "floor": a raw ``rpc_async`` that is answered in a thread of a pool, so that functions
may call each other as deep as they like, and is waited for at a lock, so that Ctrl-C ends the wait.
"""

from __future__ import annotations

import os
from concurrent.futures import Future

import torch
import torch.distributed as dist
from page import ratio, table
from torch.distributed import rpc
from workers import interleaved, start_workers

import torchopt_dist as todist
from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.rendezvous.sealed_store import SealedStore
from torchopt_dist.distributed.transport.base import Transport
from torchopt_dist.distributed.transport.zmq import ZMQTransport

BY_TCP = "TODIST_ZMQ_IPC"


def receive(x: torch.Tensor | None) -> None:
    del x


@rpc.functions.async_execution
def receive_beside(x: torch.Tensor | None) -> torch.futures.Future[None]:
    future: torch.futures.Future[None] = torch.futures.Future()
    current_group().threads.run(lambda: future.set_result(receive(x)))
    return future


def floor(x: torch.Tensor | None) -> None:
    reply: Future[None] = Future()
    sent = rpc.rpc_async("worker1", receive_beside, (x,))
    sent.add_done_callback(lambda done: reply.set_result(done.value()))
    reply.result()


def call(x: torch.Tensor | None, transport: Transport) -> None:
    current_group().transport = transport
    todist.remote_sync_call(receive, args=(x,), partitioner=1)


def started(store: dist.Store, ipc: str) -> ZMQTransport:
    """ZeroMQ beside torch's RPC, so that both can be timed in turn."""
    os.environ[BY_TCP] = ipc
    transport = ZMQTransport(current_group())
    transport.start(SealedStore(dist.PrefixStore(f"ipc {ipc}", store)), 60.0)
    return transport


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
def main() -> None:
    rank, group = todist.get_rank(), current_group()
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    ours = {"RPC": group.transport, "ZeroMQ": started(store, "1"), "TCP, CURVE": started(store, "0")}
    if rank == 0:
        rows = []
        for label, size, rounds in (
            ("none", 0, 400),
            ("1 KiB", 2**10, 400),
            ("1 MiB", 2**20, 200),
            ("64 MiB", 2**26, 15),
        ):
            x = torch.zeros(size // 4) if size else None
            raw = {
                "raw": lambda x=x: rpc.rpc_async("worker1", receive, (x,)).wait(),
                "floor": lambda x=x: floor(x),
            }
            seconds = interleaved(
                {**raw, **{name: lambda x=x, by=by: call(x, by) for name, by in ours.items()}}, rounds
            )
            over = {name: f"{seconds[name] / seconds['raw']:.2f}" for name in ("floor", *ours)}
            rows.append([label, f"{seconds['raw'] * 1e6:,.0f} µs", *over.values()])
            if label in ("none", "64 MiB"):
                question = "a call without arguments" if label == "none" else f"a call with {label}"
                answer = f"{over['RPC']}; over ZeroMQ {over['ZeroMQ']}"
                ratio(question, "raw `rpc_async`", answer)
        header = ["argument", "raw `rpc_async`", "floor over RPC", *(f"ours over {name}" for name in ours)]
        table(header, rows)
        group.transport = ours["RPC"]
    todist.barrier()
    for name in ("ZeroMQ", "TCP, CURVE"):
        ours[name].stop(in_order=True)


if __name__ == "__main__":
    start_workers(2)
    main()
