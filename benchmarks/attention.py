"""What does a second-order gradient through attention take? Tiles that are computed again, against torch's formula.

One head of 64, float32: the gradient of a gradient's square with respect to queries, keys and values, as an inner step
has it. The rivals are ``SDPBackend.MATH``, the only backend of torch's that has a second derivative, and the formula as
a program writes it, ``softmax(q kᵀ / √d) v``. Each runs in a process of its own, in turn, and the one with the least
processor time of some counts; memory is the process's peak above what it had before, with all that the C library keeps.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from page import ratio, table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchopt_dist as todist
from torchopt_dist.formulas.attention import attention_by_formula

LENGTHS = (2048, 4096, 8192)
WIDTH = 64

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with attention_by_formula():
        return F.scaled_dot_product_attention(q, k, v)


def backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v


WAYS: dict[str, Attend] = {"tiles": tiles, "SDPBackend.MATH": backend, "written out": written_out}


def second_order(attend: Attend, *tensors: Tensor) -> tuple[Tensor, ...]:
    first = torch.autograd.grad(attend(*tensors).pow(2).sum(), tensors, create_graph=True)
    return torch.autograd.grad(torch.stack([x.pow(2).sum() for x in first]).sum(), tensors)


def measure(way: str, length: int) -> None:
    """Print the mebibytes and the seconds of one gradient."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    small = [torch.randn(1, 8, 4, requires_grad=True) for _ in range(3)]
    for attend in (
        written_out,
        todist.remat(written_out),
    ):  # what torch loads at its first use is not counted
        second_order(attend, *small)
    tensors = [torch.randn(1, length, WIDTH, requires_grad=True) for _ in range(3)]
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    second_order(WAYS[way], *tensors)
    seconds = time.process_time() - started
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, seconds)


def measured(way: str, length: int) -> tuple[float, float]:
    command = [sys.executable, __file__, "--way", way, "--length", str(length)]
    mebibytes, seconds = map(
        float, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    )
    return mebibytes, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--way", choices=WAYS, help="measure this one, in this process")
    parser.add_argument(
        "--length", type=int, default=LENGTHS[0], help="the number of queries and keys for --way"
    )
    options = parser.parse_args()
    if options.way:
        measure(options.way, options.length)
        return
    rows = []
    for length in LENGTHS:
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                found[way].append(measured(way, length))
        best = {way: min(seconds for _, seconds in all_of_it) for way, all_of_it in found.items()}
        peak = {way: max(mebibytes for mebibytes, _ in all_of_it) for way, all_of_it in found.items()}
        rows.append([f"{length:,}", *(f"{peak[way]:,.0f} MiB, {best[way]:.2f} s" for way in WAYS)])
        if length == LENGTHS[-1]:
            peers = {"SDPBackend.MATH": "`SDPBackend.MATH`", "written out": "the formula, written out"}
            for way, peer in peers.items():
                question = f"second-order gradient of attention, {length:,} tokens"
                answer = f"{best['tiles'] / best[way]:.2f} of the time, {peak['tiles'] / peak[way]:.2f} of the memory"
                ratio(question, peer, answer)
    table(["tokens", *WAYS], rows)


if __name__ == "__main__":
    main()
