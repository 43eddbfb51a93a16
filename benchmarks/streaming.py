"""How long is a call whose tensors travel over a slow network? Whole shares, and ``stream=True``, in turn in one run.

Three hosts as in ``network.py``, with 200 Mbit/s each. Rank 0 sends four tensors of 4 MB to each of the two others, and
gets the gradient of each: of tensors of a task each, or of the layers of a model. Tasks, and layers in backward, sleep,
so that the hosts run at the same time on however few cores.

    sudo python benchmarks/streaming.py [--mbit 200] [--rounds 3] [--work 0.05 0.16] [--only forward tasks layers]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from network import run_on_hosts
from torch import Tensor

import torchopt_dist as todist

PARTS, NUMBERS = 4, 2**20  # tensors of a worker, and numbers in one
WORK = (0.0, 0.05, 0.16, 0.32, 0.64)
"""Seconds of a task, or of a layer."""
WHAT = {
    "forward": "Forward: a task runs for",
    "tasks": "Backward, gradients of tasks: a task runs for",
    "layers": "Backward, gradients of a model: a layer runs for",
}


class _Slow(torch.autograd.Function):
    """The identity, whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


def forward_loss(x: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return x[:8].square().mean()


def task_loss(x: Tensor, seconds: float) -> Tensor:
    return _Slow.apply(x, seconds)[:8].square().mean()


def model_loss(layers: Sequence[Tensor], seconds: float) -> Tensor:
    x = torch.ones(())
    for layer in layers:
        x = _Slow.apply(x * layer[:8].square().mean(), seconds)
    return x


def seconds_of(run: Callable[[], Sequence[Tensor]], wanted: Sequence[Tensor]) -> float:
    started = time.perf_counter()
    found = run()
    seconds = time.perf_counter() - started
    torch.testing.assert_close([*found], [*wanted])
    return seconds


def runs(
    what: str, xs: list[Tensor], seconds: float, workers: list[int], **options: bool
) -> tuple[Callable[[], Sequence[Tensor]], Sequence[Tensor]]:
    """What is measured, and what it is to give."""

    def spread(function: Callable[..., Tensor], *tasks: object) -> Tensor:
        def to_workers() -> list[tuple[int, tuple[object, ...], dict[str, object]]]:
            each = len(tasks) // len(workers)
            return [(workers[number // each], (task, seconds), {}) for number, task in enumerate(tasks)]

        return todist.parallelize(to_workers, todist.sum_reducer, **options)(function)()

    if what == "forward":
        given = [x.detach() for x in xs]
        return lambda: [spread(forward_loss, *given)], [sum(x[:8].square().mean() for x in given)]
    if what == "tasks":
        leaves, here = xs, sum(task_loss(x, 0.0) for x in xs)
        loss = spread(task_loss, *leaves)
    else:
        leaves = xs[:PARTS]
        here = len(workers) * model_loss(leaves, 0.0)
        loss = spread(model_loss, *[leaves] * len(workers))
    wanted = torch.autograd.grad(here, leaves)
    return lambda: torch.autograd.grad(loss, leaves, retain_graph=True), wanted


@todist.rank_zero_only
def measure(mbit: float, rounds: int, which: Sequence[str], work: Sequence[float]) -> None:
    workers = list(range(1, todist.get_world_size()))
    xs = [torch.randn(NUMBERS, requires_grad=True) for _ in range(PARTS * len(workers))]
    nbytes = sum(x.nbytes for x in xs)
    sending = nbytes * 8 / (mbit * 1e6)  # one line for all workers
    print(
        f"{PARTS} tensors of {xs[0].nbytes:,} bytes for each of {len(workers)} workers: {sending:.2f} s to send"
    )
    for what in which:
        print(
            f"\n| {WHAT[what]} | whole | streamed | whole / streamed | by the bounds |\n|---|---|---|---|---|"
        )
        for seconds in work:
            ways = [runs(what, xs, seconds, workers, stream=stream) for stream in (False, True)]
            found: list[list[float]] = [[], []]
            for turn in range(rounds + 1):
                for times, way in zip(found, ways, strict=True):
                    taken = seconds_of(*way)
                    if turn > 0:
                        times.append(taken)
            whole, streamed = (statistics.median(times) for times in found)
            running = PARTS * seconds
            bound = max(sending, running) + min(sending, running) / PARTS
            print(
                f"| {seconds:g} s | {whole:.2f} s | {streamed:.2f} s | {whole / streamed:.2f} | "
                f"{(sending + running) / bound:.2f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mbit", type=float, default=200, help="Mbit/s of a host (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the first (default: %(default)s)")
    parser.add_argument("--work", nargs="+", type=float, default=WORK, help="seconds (default: %(default)s)")
    parser.add_argument("--transport", default="zmq", choices=("rpc", "zmq"), help="(default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=WHAT, default=list(WHAT), help="(default: all)")
    args = parser.parse_args()
    settings = args.mbit, args.rounds, args.only, args.work
    run_on_hosts(3, args.mbit, args.transport, measure, *settings)


if __name__ == "__main__":
    main()
