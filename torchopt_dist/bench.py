"""This installation → how long a step, a differentiable loop and a call take, beside what torch has, in seconds.

It gives a first impression of a machine and needs nothing but the package. ``benchmarks/`` in the repository has a
program for each question.
"""

from __future__ import annotations

import argparse
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import rpc

import torchopt_dist as todist
from torchopt_dist.process.resources import usable_cores

__all__ = ["Row", "collect", "interleaved", "machine", "main", "to_text"]

CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Row:
    """What was timed, and the peer that does the same work in the same rounds."""

    what: str
    seconds: float
    """The median of the rounds."""
    peer: str
    peer_seconds: float

    @property
    def ratio(self) -> float:
        """This package's time divided by the peer's: below 1 this package is faster."""
        return self.seconds / self.peer_seconds


def collect(rounds: int = 30, workers: int = 2) -> Iterator[Row]:
    """Time all pairs, with one thread in each process. Before a pair is timed, both must give the same numbers.

    The peer of a call is torch's RPC; where torch is built without it, calls are left out.

    Args:
        rounds: how often each function is timed; the two of a pair take turns.
        workers: the number of processes for the calls; with 1 nothing is sent.

    Yields:
        Each row as soon as it has been timed.

    Raises:
        ValueError: ``rounds`` or ``workers`` is below 1.
        RuntimeError: the two of a pair do not give the same numbers.
    """
    for name, value in (("rounds", rounds), ("workers", workers)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from (_step(rounds), _loop(rounds))
        if not rpc.is_available():
            return
        if workers == 1:
            yield from todist.auto_init_rpc(transport="rpc")(_calls)(rounds)
        else:
            launcher = todist.Launcher(
                hosts=["localhost"], nproc_per_host=workers, rpc=True, env={"TODIST_TRANSPORT": "rpc"}
            )
            yield from launcher.run(_on_worker, rounds).rank(0)
    finally:
        torch.set_num_threads(threads)


def to_text(row: Row) -> str:
    """A row as a line of text, in milliseconds."""
    return (
        f"{row.what:42} {row.seconds * 1e3:9.2f} ms   {row.ratio:5.2f} of {row.peer} "
        f"({row.peer_seconds * 1e3:.2f} ms)"
    )


def machine() -> str:
    """Where and with what the figures were taken, in one line."""
    found = re.search(
        r"^model name\s*: (.*)", CPU_INFO.read_text() if CPU_INFO.exists() else "", re.MULTILINE
    )
    cores, system = usable_cores(), platform.system()
    gpus = f", {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    return (
        f"{cores} cores of {found[1] if found else platform.machine()}{gpus}, {system}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def interleaved(
    functions: Mapping[str, Callable[[], object]], rounds: int, warmups: int = 2
) -> dict[str, float]:
    """The median seconds of each function, all of them timed in turn in every round.

    Args:
        functions: name → the function to time.
        rounds: how many timed rounds there are.
        warmups: how many rounds run before these, untimed.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmups + rounds):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if turn >= warmups:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def main(argv: list[str] | None = None, prog: str = "torchopt-dist bench") -> int:
    """Print the machine and the table.

    Args:
        argv: the command line; ``None`` means that of this process.
        prog: the command as the user typed it, for its usage and errors.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Time an optimizer's step, a differentiable inner loop, and a call to a worker, each beside a "
        "peer that does the same work: torch's own optimizer, the loop written by hand, a raw rpc_async.",
    )
    parser.add_argument("--rounds", type=_positive, default=30, help="how often each is timed (default: 30)")
    parser.add_argument("--workers", type=_positive, default=2, help="processes for the calls (default: 2)")
    options = parser.parse_args(argv)
    print(f"torchopt_dist {todist.__version__}, {machine()}", flush=True)
    for row in collect(options.rounds, options.workers):
        print(to_text(row), flush=True)
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return int(text)


def _pair(what: str, ours: Callable[[], object], peer: str, theirs: Callable[[], object], rounds: int) -> Row:
    seconds = interleaved({"ours": ours, "theirs": theirs}, rounds)
    return Row(what, seconds["ours"], peer, seconds["theirs"])


def _check_same(what: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-6):
            off = (one - other).abs().max().item()
            raise RuntimeError(f"{what}: the two differ by up to {off:g}, so nothing is timed")


def _step(rounds: int, tensors: int = 100, numel: int = 10_000) -> Row:
    what = f"a step of Adam, {tensors} tensors of {numel:,}"
    generator = torch.Generator().manual_seed(0)
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    for _ in range(tensors):
        value, gradient = torch.randn(2, numel, generator=generator)
        for params in (ours, theirs):
            params.append(value.clone().requires_grad_())
            params[-1].grad = gradient
    optimizer = todist.Adam(ours, lr=1e-3)
    peer = torch.optim.Adam(theirs, lr=1e-3, foreach=True)
    optimizer.step()
    peer.step()
    _check_same(what, ours, theirs)
    return _pair(what, optimizer.step, "torch.optim's foreach", peer.step, rounds)


def _loop(rounds: int, steps: int = 5, width: int = 64, depth: int = 10) -> Row:
    """Steps of Adam on a tanh MLP, and the gradient through them of where they began."""
    what = f"{steps} differentiable steps of Adam, {depth} layers"
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(width, width, generator=generator) / width**0.5 for _ in range(depth)]
    x = torch.randn(16, width, generator=generator)
    for param in start:
        param.requires_grad_()
    transformation = todist.adam(lr=1e-2)

    def loss(params: Sequence[Tensor]) -> Tensor:
        hidden = x
        for param in params:
            hidden = torch.tanh(hidden @ param)
        return hidden.square().mean()

    def ours() -> tuple[Tensor, ...]:
        params, state = list(start), transformation.init(start)
        for _ in range(steps):
            gradients = list(torch.autograd.grad(loss(params), params, create_graph=True))
            updates, state = transformation.update(gradients, state, params=params, inplace=False)
            params = todist.apply_updates(params, updates, inplace=False)
        return torch.autograd.grad(loss(params), start)

    def by_hand() -> tuple[Tensor, ...]:
        params: list[Tensor] = list(start)
        mean = [torch.zeros_like(param) for param in start]
        square = [torch.zeros_like(param) for param in start]
        for step in range(1, steps + 1):
            gradients = torch.autograd.grad(loss(params), params, create_graph=True)
            for i, gradient in enumerate(gradients):
                mean[i] = 0.9 * mean[i] + 0.1 * gradient
                square[i] = 0.999 * square[i] + 0.001 * gradient * gradient
                root = (square[i] / (1 - 0.999**step)).sqrt() + 1e-8
                params[i] = params[i] - 1e-2 * (mean[i] / (1 - 0.9**step)) / root
        return torch.autograd.grad(loss(params), start)

    _check_same(what, ours(), by_hand())
    return _pair(what, ours, "the formula by hand", by_hand, max(rounds // 3, 1))


def _on_worker(rounds: int) -> list[Row]:
    """On each worker: the first makes the calls, the others answer."""
    torch.set_num_threads(1)
    return _calls(rounds) if todist.get_rank() == 0 else []


def _calls(rounds: int) -> list[Row]:
    worker = min(1, todist.get_world_size() - 1)
    rows = []
    for what, numel, times in (("without arguments", 0, 10 * rounds), ("with 1 MiB", 2**18, 5 * rounds)):
        x = torch.zeros(numel)

        def ours(x: Tensor = x) -> object:
            return todist.remote_sync_call(_numel, args=(x,), partitioner=worker)

        def raw(x: Tensor = x) -> object:
            return rpc.rpc_async(f"worker{worker}", _numel, (x,)).wait()

        rows.append(_pair(f"a call {what}", ours, "a raw rpc_async", raw, times))
    return rows


def _numel(x: Tensor) -> int:
    return x.numel()
