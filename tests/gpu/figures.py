"""``python -m tests.gpu.figures [--dry]`` → figures of the GPU, each a line of JSON as soon as it is known.

The kernels' share of the bandwidth of a copy; MAML in a loop, vectorized, compiled and as CUDA graphs, beside JAX where
it is installed; the gradient of examples' weights through the training of a GPT, and what scores for some queries cost
beside that training; and second derivatives of attention. ``--dry`` runs all in a small size, on whatever device there
is.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchopt_dist as todist
from tests.gpu.record import told
from torchopt_dist.attribution import Training
from torchopt_dist.formulas.attention import attention_by_formula
from torchopt_dist.ops._adam import adam
from torchopt_dist.ops._rmsprop import rmsprop

ROOT = Path(__file__).resolve().parents[2]
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def wait() -> None:
    """Until the device has computed all."""
    if GPU:
        torch.cuda.synchronize()


def seconds(function: Callable[[], object], rounds: int = 9, repeats: int = 5) -> float:
    """The median of some rounds, each the mean of some calls."""
    for _ in range(2):
        function()
    found = []
    for _ in range(rounds):
        wait()
        started = time.perf_counter()
        for _ in range(repeats):
            function()
        wait()
        found.append((time.perf_counter() - started) / repeats)
    return statistics.median(found)


def peak_of(function: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a second call, and the GB above what there was before."""
    function()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if GPU else 0
    wait()
    started = time.perf_counter()
    function()
    wait()
    took = time.perf_counter() - started
    return took, (torch.cuda.max_memory_allocated() - before) / 1e9 if GPU else 0.0


def kernels(numel: int) -> None:
    """Bytes that each kernel must move over its time, as a share of what a copy moves in its time."""
    source, target = (torch.randn(numel, device=DEVICE) for _ in range(2))
    copied = 8 * numel / seconds(lambda: target.copy_(source))

    def line(name: str, took: float, rate: float) -> None:
        numbers = {"milliseconds": f"{1e3 * took:.3f}", "of the copy": f"{rate / copied:.2f}"}
        told(f"Kernels, {numel:,} float32 numbers", kernel=name, **numbers, **{"TB/s": f"{rate / 1e12:.2f}"})

    def row(name: str, size: int, function: Callable[[], object]) -> None:
        """``size``: bytes of an element that the kernel reads and writes."""
        took = seconds(function)
        line(name, took, size * numel / took)

    line("a copy", 8 * numel / copied, copied)
    numbers: dict[str, Any] = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "eps_root": 0.0}
    counts = [torch.tensor(3.0)]
    g, m, v = (torch.randn(numel, device=DEVICE) for _ in range(3))
    v.square_()
    row("ours, Adam's direction", 24, lambda: adam([g], [m], [v], counts, **numbers))
    bars = [torch.randn_like(g) for _ in range(3)]

    def backward(size: int, given: list[Tensor], step: Callable[..., Any]) -> None:
        leaves = [x.clone().requires_grad_() for x in given]
        made = [column[0] for column in step(*([x] for x in leaves))[: len(given)]]
        again = partial(torch.autograd.grad, made, leaves, bars[: len(given)], retain_graph=True)
        row("ours, its backward", size, again)

    backward(36, [g, m, v], lambda g, m, v: adam(g, m, v, counts, **numbers))
    row("ours, RMSprop's direction", 16, lambda: rmsprop([g], [v], alpha=0.9, eps=1e-8))
    backward(24, [g, v], lambda g, v: rmsprop(g, v, alpha=0.9, eps=1e-8))
    param = torch.randn(numel, device=DEVICE, requires_grad=True)
    param.grad = g
    steps: tuple[tuple[str, Any, str, int, dict[str, Any]], ...] = (
        ("torch, fused Adam in place", torch.optim, "Adam", 28, {"fused": True}),
        ("ours, Adam in place (torch's kernel)", todist, "Adam", 28, {}),
        ("torch, fused SGD in place", torch.optim, "SGD", 20, {"fused": True, "momentum": 0.9}),
        ("ours, SGD in place (torch's kernel)", todist, "SGD", 20, {"momentum": 0.9}),
        ("torch, foreach RMSprop in place", torch.optim, "RMSprop", 28, {"foreach": True, "momentum": 0.9}),
        ("ours, RMSprop in place", todist, "RMSprop", 28, {"momentum": 0.9}),
    )
    for name, library, kind, size, options in steps:
        row(name, size, getattr(library, kind)([param], lr=1e-4, **options).step)


def benchmark(name: str) -> Any:
    """A program of ``benchmarks/`` as a module."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module(name)


MODES = {"loop": None, "vectorized": False, "compiled": True, "captured": "reduce-overhead"}


def of_jax(case: str) -> None:
    """In a process of its own: the time of a gradient in JAX, on its default device, and the gradient's norm."""
    (gradient,) = benchmark("compiled").theirs(case).values()
    for _ in range(3):
        found = gradient()
    times = []
    for _ in range(9):
        started = time.perf_counter()
        for _ in range(5):
            found = gradient()
        times.append((time.perf_counter() - started) / 5)
    norm = sum(float((one**2).sum()) for one in found) ** 0.5
    print(json.dumps({"seconds": statistics.median(times), "norm": norm}))


def maml(case: str, modes: dict[str, Any]) -> None:
    """A MAML gradient of all tasks, in each way."""
    table = f"MAML, {case}, milliseconds a gradient"
    found: dict[str, float] = {}

    def measured() -> None:
        ways = benchmark("compiled").ours(case, DEVICE, modes)
        norms = []
        for name, way in ways.items():
            started = time.perf_counter()
            norms.append(sum(float(one.square().sum()) for one in way()) ** 0.5)
            first = time.perf_counter() - started
            found[name] = seconds(way)
            assert abs(norms[-1] - norms[0]) < 1e-2 * norms[0], f"{name}: another gradient"
            told(table, way=f"ours, {name}", milliseconds=f"{1e3 * found[name]:.2f}", first=f"{first:.1f} s")
        if importlib.util.find_spec("jax") is None:
            return
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        command = [sys.executable, "-m", "tests.gpu.figures", "--jax", case]
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=90
        )
        if done.returncode:
            told(table, way="JAX, jit", milliseconds=done.stderr.strip().splitlines()[-1][:80], first="")
            return
        theirs = json.loads(done.stdout.splitlines()[-1])
        assert abs(theirs["norm"] - norms[0]) < 1e-2 * norms[0], "JAX has another gradient"
        told(table, way="JAX, jit", milliseconds=f"{1e3 * theirs['seconds']:.2f}", first="")

    todist.auto_init_rpc()(measured)()


class Block(nn.Module):
    """One of GPT-2's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        made: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return made


class GPT(nn.Module):
    """GPT-2, whose last layer is its embedding."""

    def __init__(self, tokens: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Parameter(torch.zeros(length, width))
        nn.init.normal_(self.token.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, sequences: Tensor) -> Tensor:
        """The mean loss of each sequence's tokens."""
        hidden = self.norm(self.blocks(self.token(sequences[:, :-1]) + self.place[: sequences.shape[1] - 1]))
        logits = hidden @ self.token.weight.T
        each = F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten(), reduction="none")
        return each.unflatten(0, hidden.shape[:2]).mean(1)


SIZES: dict[str, dict[str, int]] = {
    "GPT of 10 M": {"tokens": 8192, "length": 128, "width": 256, "layers": 8, "heads": 4},
    "GPT-2 small, 124 M": {"tokens": 50257, "length": 128, "width": 768, "layers": 12, "heads": 12},
}
DRY = {"tokens": 64, "length": 16, "width": 32, "layers": 2, "heads": 2}


def metagradient(
    name: str, size: dict[str, int], batch: int, steps: int, ways: dict[str, Any], *, half: bool
) -> None:
    """The gradient of the examples' weights through steps of Adam; memory is the peak above the model."""
    torch.manual_seed(0)
    model = GPT(**size).to(DEVICE)
    length = size["length"] + 1
    data = torch.randint(size["tokens"], (2 * batch, length), device=DEVICE)
    weights = torch.ones(2 * batch, device=DEVICE, requires_grad=True)

    def batch_of(step: int) -> Tensor:
        return (torch.arange(batch, device=DEVICE) + step * batch) % (2 * batch)

    def loss(model: nn.Module, chosen: Tensor) -> Tensor:
        return (weights[chosen] * model(data[chosen]).float()).mean()

    first: Tensor | None = None
    for way, options in ways.items():
        made: list[Tensor] = []

        def gradient(options: dict[str, Any] = options, kept: list[Tensor] = made) -> None:
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=half):
                result = todist.inner_loop(
                    loss,
                    todist.adam(lr=1e-4, eps=1e-6),
                    model,
                    batch_of,
                    steps=steps,
                    meta=weights,
                    **options,
                )
                kept[:] = torch.autograd.grad(result.params(data[:batch]).float().mean(), weights)

        table = f"A metagradient through {steps} steps of Adam, {batch} sequences of {size['length']} tokens"
        row = {"model": name, "precision": "bfloat16" if half else "float32", "way": way}
        try:
            took, peak = peak_of(gradient)
        except torch.OutOfMemoryError:
            told(table, **row, seconds="out of memory", GB="", **{"tokens a second": ""})
            continue
        speed = f"{steps * batch * size['length'] / took:,.0f}"
        told(table, **row, seconds=f"{took:.2f}", GB=f"{peak:.1f}", **{"tokens a second": speed})
        first = made[0] if first is None else first
        error = ((made[0] - first).norm() / first.norm()).item()
        assert error < (0.3 if half else 0.05), f"{way}: another gradient, by {error:.2g} of its norm"


def attribution(
    name: str, size: dict[str, int], batch: int, steps: int, together: dict[int, int], *, half: bool
) -> None:
    """What scores of all examples cost beside the training; ``together``: of how many queries, and how many at once."""
    torch.manual_seed(0)
    model = GPT(**size).to(DEVICE)
    most = max(together)
    data = torch.randint(size["tokens"], (2 * batch + most, size["length"] + 1), device=DEVICE)
    batches = [(torch.arange(batch, device=DEVICE) + step * batch) % (2 * batch) for step in range(steps)]

    def loss(model: nn.Module, index: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=half):
            losses: Tensor = model(data[index])
        return losses.float()

    training = Training(loss, todist.adamw(lr=1e-4, eps_root=1e-8), model, batches)

    def train() -> None:
        with torch.no_grad():
            training.run(training.weights(), todist.FirstOrder())

    def ask(queries: int) -> None:
        places = torch.arange(queries, device=DEVICE) + 2 * batch
        todist.attribute(training, lambda model: loss(model, places), together=together[queries])

    table = f"Scores of {2 * batch} sequences of {size['length']} tokens, through {steps} steps of AdamW"
    row = {"model": name, "precision": "bfloat16" if half else "float32"}
    alone, memory = peak_of(train)
    told(
        table,
        **row,
        way="the training alone",
        seconds=f"{alone:.2f}",
        **{"of the training": "1.0", "GB": f"{memory:.1f}"},
    )
    for count, at_once in together.items():
        way = "1 query" if count == 1 else f"{count} queries, {at_once} in one way back"
        try:
            took, memory = peak_of(partial(ask, count))
        except torch.OutOfMemoryError:
            told(table, **row, way=way, seconds="out of memory", **{"of the training": "", "GB": ""})
            continue
        cells = {"of the training": f"{took / alone:.1f}", "GB": f"{memory:.1f}"}
        told(table, **row, way=way, seconds=f"{took:.2f}", **cells)


def attention(lengths: list[int]) -> None:
    """A second derivative of causal attention of 8 heads of 64, in tiles and by the formula."""
    table = "Second derivatives of causal attention, 8 heads of 64, float32"
    for length in lengths:
        inputs = [torch.randn(1, 8, length, 64, device=DEVICE, requires_grad=True) for _ in range(3)]

        def second(inputs: list[Tensor] = inputs) -> None:
            value = F.scaled_dot_product_attention(*inputs, is_causal=True)
            grads = torch.autograd.grad(value.square().sum(), inputs, create_graph=True)
            torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)

        for way, surroundings in (
            ("torch's formula", lambda: sdpa_kernel(SDPBackend.MATH)),
            ("ours, in tiles", attention_by_formula),
        ):
            try:
                with surroundings():
                    took, memory = peak_of(second)
            except torch.OutOfMemoryError:
                told(table, tokens=f"{length:,}", way=way, milliseconds="out of memory", GB="")
                continue
            told(table, tokens=f"{length:,}", way=way, milliseconds=f"{1e3 * took:.1f}", GB=f"{memory:.2f}")


def main() -> None:
    """All figures, from the most to the least important."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.figures", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="in a small size")
    parser.add_argument("--jax", metavar="CASE", help="time JAX alone")
    args = parser.parse_args()
    if args.jax:
        return of_jax(args.jax)
    torch.backends.cuda.matmul.allow_tf32 = True
    kernels(1 << (12 if args.dry else 26))
    ways: dict[str, Any] = {
        "Recorded()": {"adjoint": todist.Recorded()},
        "Replayed()": {"adjoint": todist.Replayed()},
        'Replayed(blocks="auto")': {"adjoint": todist.Replayed(blocks="auto")},
    }
    if args.dry:
        metagradient("GPT, dry", DRY, 4, 3, ways, half=False)
        attribution("GPT, dry", DRY, 4, 3, {1: 1, 4: 2}, half=False)
        attention([64])
        maml("tiny", {"loop": None, "vectorized": False})
        return None
    small, large = SIZES.items()
    metagradient(*small, 64, 16, ways, half=False)
    metagradient(*large, 64, 16, {name: ways[name] for name in list(ways)[1:]}, half=True)
    attribution(*small, 64, 16, {1: 1, 24: 24}, half=False)
    attribution(*large, 64, 16, {1: 1, 8: 8}, half=True)
    attention([2048, 8192])
    for case in ("tiny", "digits"):
        maml(case, MODES)
    return None


if __name__ == "__main__":
    main()
