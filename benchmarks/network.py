"""How fast is a step where the network is slow? Star, tree and mirror, on hosts that have 200 Mbit/s each, both ways.

Each host is a network namespace of this machine, with one worker; a bridge joins all. A model of 16 MB goes to all
workers, and its gradient comes back. The bytes into and out of rank 0's host are those that its interface has counted.

With ``--recorded`` trees of two children are compared with and without ``create_graph=True`` in their backward.

    sudo python benchmarks/network.py [--hosts 8] [--mbit 200] [--rounds 3] [--recorded]
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from page import ratio
from torch import Tensor, nn
from torch.distributed import rpc

import torchopt_dist as todist

CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
SIDE = 2048  # 16 MiB of float32
FAN_OUTS = (2, 3)


# --- Hosts ----------------------------------------------------------------------------------------------------


def command(*words: object) -> None:
    """Run a command of iproute2; raises what it says on standard error."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(map(str, words))}`: {done.stderr.strip()}")


def address(host: int) -> str:
    return f"10.66.0.{host + 1}"


@contextmanager
def hosts(count: int, mbit: float) -> Iterator[list[str]]:
    """Make namespaces that are joined by a bridge, each behind a line of its own; yields their names."""
    switch, *names = [f"bench{os.getpid()}{name}" for name in ("s", *map(str, range(count)))]
    try:
        for name in (switch, *names):
            command("ip", "netns", "add", name)
            command("ip", "-n", name, "link", "set", "lo", "up")
        command("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        command("ip", "-n", switch, "link", "set", "bridge", "up")
        for host, name in enumerate(names):
            port = f"port{host}"
            ends = (["netns", switch, "name", port], ["netns", name, "name", "net"])
            command("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            command("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            command("ip", "-n", name, "address", "add", f"{address(host)}/24", "dev", "net")
            command("ip", "-n", name, "link", "set", "net", "up")
            # One on each end: what leaves the host, and what comes to it. The burst holds a packet of 64 kB in one.
            line = ("rate", f"{mbit}mbit", "burst", "256kb", "latency", "400ms")
            command("tc", "-n", name, "qdisc", "add", "dev", "net", "root", "tbf", *line)
            command("tc", "-n", switch, "qdisc", "add", "dev", port, "root", "tbf", *line)
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def run_on_hosts(count: int, mbit: float, transport: str, program: Callable[..., None], *args: Any) -> None:
    """Run ``program(*args)`` with a worker on each of so many hosts; ends this process where one fails."""
    context = multiprocessing.get_context("fork")
    with hosts(count, mbit) as names:
        workers = [
            context.Process(target=work, args=(name, rank, count, transport, program, *args), daemon=True)
            for rank, name in enumerate(names)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        failed = [rank for rank, worker in enumerate(workers) if worker.exitcode]
    if failed:
        sys.exit(f"ranks {failed} have failed")


def work(
    namespace: str, rank: int, size: int, transport: str, program: Callable[..., None], *args: Any
) -> None:
    """In a process of its own: be the worker of a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    if libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(f"host{rank}")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR=address(0), MASTER_PORT="29400")
    choose: Any = transport
    options = None
    if transport == "rpc":  # by default TensorPipe copies memory from process to process, past the line
        options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    todist.auto_init_rpc(lambda: torch.set_num_threads(1), transport=choose, rpc_backend_options=options)(
        program
    )(*args)


# --- What is measured -----------------------------------------------------------------------------------------


def task_loss(model: nn.Linear, x: Tensor) -> Tensor:
    return (model.weight * x).mean()


def counted() -> tuple[int, int]:
    """Bytes that this host's interface has sent and received."""
    counters = psutil.net_io_counters(pernic=True)["net"]
    return counters.bytes_sent, counters.bytes_recv


class Row:
    """The figures of one way: seconds, bytes out of rank 0 and into it; of forward, and of backward with the step."""

    def __init__(self) -> None:
        self.forward: list[tuple[float, int, int]] = []
        self.backward: list[tuple[float, int, int]] = []

    @contextmanager
    def phase(self, figures: list[tuple[float, int, int]]) -> Iterator[None]:
        """Add the figures of the body."""
        out, into = counted()
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        sent, received = counted()
        figures.append((seconds, sent - out, received - into))

    def text(self, nbytes: int) -> str:
        """The medians; bytes in models."""
        cells = []
        for figures in (self.forward, self.backward):
            seconds, out, into = (statistics.median(column) for column in zip(*figures, strict=True))
            cells += [f"{seconds:.2f} s", f"{out / nbytes:.2f} M", f"{into / nbytes:.2f} M"]
        cells.append(f"{self.seconds():.2f} s")
        return " | ".join(cells)

    def seconds(self) -> float:
        """Of both phases, by the medians."""
        return sum(statistics.median(row[0] for row in figures) for figures in (self.forward, self.backward))


@todist.rank_zero_only
def measure(rounds: int, recorded: bool) -> None:
    model = nn.Linear(SIDE, SIDE, bias=False)
    nbytes = model.weight.nbytes
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    held = nn.Linear(SIDE, SIDE, bias=False)
    mirror = todist.mirror(held, torch.optim.SGD(held.parameters(), lr=1e-3))
    x = torch.ones(todist.get_world_size())

    def way(
        model: nn.Module, step: Callable[[], None], *, create_graph: bool = False, **options: Any
    ) -> Callable[[Row], None]:
        spread: Any = todist.parallelize(todist.tasks, todist.mean_reducer, **options)(task_loss)

        def run(row: Row) -> None:
            with row.phase(row.forward):
                loss = spread(model, x)
            model.zero_grad()
            with row.phase(row.backward):
                if recorded:
                    torch.autograd.grad(loss, [*model.parameters()], create_graph=create_graph)
                else:
                    loss.backward()
                    step()

        return run

    ways = {"star": way(model, optimizer.step, create_graph=recorded, fan_out=None)}
    if recorded:
        for create_graph in (False, True):
            name = f"tree, fan_out=2, create_graph={create_graph}"
            ways[name] = way(model, optimizer.step, create_graph=create_graph, fan_out=2)
    else:
        for fan_out in FAN_OUTS:
            ways[f"tree, fan_out={fan_out}"] = way(model, optimizer.step, fan_out=fan_out)
        ways["mirror"] = way(mirror, mirror.step)
    rows = {name: Row() for name in ways}
    for turn in range(rounds + 1):
        for name, run in ways.items():
            row = Row() if turn == 0 else rows[name]
            run(row)
            print(f"# round {turn}, {name}: {row.text(nbytes)}", file=sys.stderr, flush=True)
    print(f"{todist.get_world_size()} hosts, a model of M = {nbytes:,} bytes; medians of {rounds} rounds")
    print("| way | forward | out of rank 0 | into it | backward, step | out | into | together |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row.text(nbytes)} |")
    print()
    if not recorded:
        tree = f"tree, fan_out={FAN_OUTS[0]}"
        part = {name: row.seconds() / rows["star"].seconds() for name, row in rows.items()}
        ratio(
            f"forward and backward of {nbytes / 1e6:.0f} MB on {todist.get_world_size()} hosts with slow lines",
            "the model to each worker",
            f"a tree of {FAN_OUTS[0]}: {part[tree]:.2f}; `mirror`: {part['mirror']:.2f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--hosts", type=int, default=8, help="hosts, with a worker each (default: %(default)s)"
    )
    parser.add_argument("--mbit", type=float, default=200, help="Mbit/s of a host (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the first (default: %(default)s)")
    parser.add_argument("--transport", default="zmq", choices=("rpc", "zmq"), help="(default: %(default)s)")
    parser.add_argument("--recorded", action="store_true", help="compare backwards with create_graph=True")
    args = parser.parse_args()
    run_on_hosts(args.hosts, args.mbit, args.transport, measure, args.rounds, args.recorded)


if __name__ == "__main__":
    main()
