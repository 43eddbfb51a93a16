"""What does the gradient of an inner loop cost? Peak memory and time of adjoints, over recording all steps.

Each case is a process of its own, on one thread. Memory is the most that it held above what it held after a small loop
of the same kind, by which torch loads what it needs; "tensors" is the most that its tensors took at a time, counted in
another run. A transformer (d=128, 16 sequences of 64 tokens, or as many as are said) and a network of a million
parameters are adapted by Adam with a learning rate and weights of the examples to learn. "checkpoint" is
``torch.utils.checkpoint`` around each step of the recorded loop, the reentrant one, as the other cannot go back through
a gradient that is taken inside. With blocks, the outer loss has a checkpoint around each block, for all adjoints: it is
the caller's and no adjoint can do it for him.

The network of a million parameters has a row "floor": what every exact replay has to compute, by torch alone and
without the numbers. A plain step has 5 products of matrices (forward 2, backward 3, as the input has no gradient) and a
pass of torch's fused Adam; gradients are kept, in new memory. To go back through a step takes 11 products: forward 2,
its tangent 3, backward without the weights' gradients 1, its tangent 2, the tangents of the weights' gradients 3. And
it takes two passes over parameters and state, one to come to the state again and one for the derivative of the update;
torch's fused Adam stands for each, since it moves 7 numbers an element and the derivative moves 9. These cases run by
turns, and the fastest of three runs counts.

    python benchmarks/inner_loop.py [transformer|budget|blocks|many|first_order] [steps]
"""

from __future__ import annotations

import json
import operator
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import torchopt_dist as todist

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.adjoints import PeakMemory

ADJOINTS = {
    "recorded": todist.Recorded(),
    "replayed, all": todist.Replayed(),
    "replayed, 20": todist.Replayed(snapshots=20),
    "replayed, 4": todist.Replayed(snapshots=4),
    "blocks, all": todist.Replayed(blocks="auto"),
    "blocks, 80 MB": todist.Replayed(memory="80MB", blocks="auto"),
    "blocks, 1": todist.Replayed(snapshots=1, blocks="auto"),
    "first order": todist.FirstOrder(),
}


def transformer(layers: int, sequences: int = 16, tokens: int = 64) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    made = [
        nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True, norm_first=True) for _ in range(layers)
    ]
    return nn.Sequential(*made, nn.Linear(128, 128)), torch.randn(sequences, tokens, 128)


def million() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1000), nn.Tanh(), nn.Linear(1000, 512)), torch.randn(16, 512)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measured(run: Callable[[int], list[Tensor]], steps: int) -> dict[str, Any]:
    """Seconds of CPU time, bytes and gradients of a run, after a short one; bytes of tensors of another."""
    before = resident()
    run(1)
    start = time.process_time()  # which others on the machine disturb less
    grads = run(steps)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    norms = [grad.double().norm().item() for grad in grads]
    del grads
    with PeakMemory() as memory:
        run(steps)
    return {"seconds": seconds, "bytes": peak, "tensors": memory.peak, "norms": norms}


def case(kind: str, name: str, steps: int) -> dict[str, Any]:
    """Run one case; a kind is ``million``, or layers and sequences: ``16x64``, ``16x64 by blocks``."""
    torch.set_num_threads(1)
    if kind == "million":
        model, x = million()
        small = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(2, 8)
    else:
        layers, sequences = map(int, kind.split()[0].split("x"))
        small = transformer(2, 2, 2)
        model, x = transformer(layers, sequences)
    outer = by_blocks if kind.endswith("by blocks") else nn.Module.__call__
    problem(name, *small, outer)(1)
    found = measured(problem(name, model, x, outer), steps)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {**found, "tensors": found["tensors"] - size, "parameters": size}


def floor(model: nn.Module, x: Tensor) -> Callable[[int], list[Tensor]]:
    """As :func:`problem`, for what the row "floor" is made of."""
    (w1, b1), (w2, b2) = ([p.detach().clone() for p in layer.parameters()] for layer in (model[0], model[2]))

    def run(count: int) -> list[Tensor]:
        params = [w1.clone(), b1.clone(), w2.clone(), b2.clone()]
        bars = [torch.ones_like(p) for p in params]
        training, again, pulled = (
            torch.optim.Adam(tensors, lr=1e-6, fused=True) for tensors in (params, params, bars)
        )
        kept = []
        for _ in range(count):
            hidden, error = forward(params)
            of_hidden = (error @ params[2]) * (1 - hidden * hidden)
            kept.append([of_hidden.t() @ x, of_hidden.sum(0), error.t() @ hidden, error.sum(0)])
            passed(training, params, kept[-1])
        while kept:
            grads = kept.pop()
            passed(again, params, grads)
            passed(pulled, bars, grads)
            hidden, error = forward(params)
            slope = 1 - hidden * hidden
            moved = torch.addmm(grads[1], x, grads[0].t()) * slope
            moved_error = torch.addmm(grads[3], hidden, grads[2].t()).addmm_(moved, params[2].t())
            of_hidden = error @ params[2]
            moved_of_hidden = (moved_error @ params[2]).addmm_(error, grads[2])
            moved_of_hidden = moved_of_hidden * slope - 2 * of_hidden * hidden * moved
            bars[0].addmm_(moved_of_hidden.t(), x)
            bars[2].addmm_(moved_error.t(), hidden).addmm_(error.t(), moved)
        return []

    def forward(params: list[Tensor]) -> tuple[Tensor, Tensor]:
        hidden = torch.addmm(params[1], x, params[0].t()).tanh()
        return hidden, torch.addmm(params[3], hidden, params[2].t()).sub_(x)

    def passed(optimizer: torch.optim.Optimizer, tensors: list[Tensor], grads: list[Tensor]) -> None:
        for tensor, grad in zip(tensors, grads, strict=True):
            tensor.grad = grad
        optimizer.step()

    return run


def problem(
    name: str, model: nn.Module, x: Tensor, outer_call: Callable[[Any, Tensor], Tensor]
) -> Callable[[int], list[Tensor]]:
    """An adjoint's name, what is adapted, its input → a function of the number of steps, which gives gradients."""
    if name == "floor":
        return floor(model, x)
    lr = torch.tensor(1e-3, requires_grad=True)
    weights = torch.ones(len(x), requires_grad=True)

    def loss(model: Callable[[Tensor], Tensor]) -> Tensor:
        errors = (model(x) - x).square().flatten(1).mean(1)
        return (weights * errors).mean()

    def adapt(count: int) -> list[Tensor]:
        if name == "plain":
            copy = todist.module_clone(model, by="deepcopy")
            optimizer = todist.Adam(copy.parameters(), lr=1e-3)
            for _ in range(count):
                optimizer.zero_grad()
                loss(copy).backward()
                optimizer.step()
            return []
        if name == "checkpoint":
            params: Any = checkpointed(model, lr, loss, count)
            adapted = functional_call(model, params, (x,))
        else:
            moved = todist.inner_loop(
                loss, todist.adam(lr=lr), model, count, meta=weights, adjoint=ADJOINTS[name]
            ).params
            adapted = outer_call(moved, x)
            del moved
        outer = (adapted - x).square().mean()
        if name == "checkpoint":  # within the reentrant one only `backward` works
            lr.grad = weights.grad = None
            outer.backward()
            assert lr.grad is not None
            assert weights.grad is not None
            return [lr.grad, weights.grad]
        return [g for g in torch.autograd.grad(outer, [lr, weights], allow_unused=True) if g is not None]

    return adapt


def by_blocks(net: nn.Sequential, x: Tensor) -> Tensor:
    """A net's output, of which the boundaries of its blocks are kept."""
    for block in net:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def checkpointed(model: nn.Module, lr: Tensor, loss: Any, steps: int) -> dict[str, Tensor]:
    """The recorded loop with a checkpoint around each step, which is a function of all that it changes."""
    names = [name for name, _ in model.named_parameters()]
    optimizer = todist.adam(lr=lr)
    params = [p.detach().requires_grad_() for p in model.parameters()]
    leaves, spec = todist.pytree.flatten(optimizer.init(params))

    @torch.enable_grad()
    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        params = [t if t.requires_grad else t.detach().requires_grad_() for t in tensors[: len(names)]]
        state = todist.pytree.unflatten(spec, list(tensors[len(names) :]))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            value = loss(lambda x: functional_call(model, dict(zip(names, params, strict=True)), (x,)))
            grads = torch.autograd.grad(value, params, create_graph=True)
        updates, state = optimizer.update(list(grads), state, params=params, inplace=False)
        moved = todist.apply_updates(params, updates, inplace=False)
        return (*moved, *todist.pytree.flatten(state)[0])

    for _ in range(steps):
        made = checkpoint(step, *params, *leaves, use_reentrant=True)
        params, leaves = list(made[: len(names)]), list(made[len(names) :])
    return dict(zip(names, params, strict=True))


SCALES = {"bytes": 1e-6, "tensors": 1e-6, "seconds": 1.0}


def table(title: str, kind: str, names: list[str], steps: int, rounds: int = 1) -> None:
    heads = ("peak MB", "of first", "tensors", "of first", "CPU s", "of first")
    print(f"\n{title}, {steps} steps\n{'':16}" + "".join(f"{head:>10}" for head in heads))
    first: dict[str, Any] = {}
    made = [{name: measure(kind, name, steps) for name in names} for _ in range(rounds)]
    for name in names:
        found = min((of_round[name] for of_round in made), key=operator.itemgetter("seconds"))
        first = first or found
        for one, other in zip(found["norms"], first["norms"], strict=False):
            assert abs(one - other) <= 1e-2 * abs(other) + 1e-5, (name, one, other)
        columns = [(found[key], found[key] / first[key], scale) for key, scale in SCALES.items()]
        print(
            f"{name:16}" + "".join(f"{x * s:10.{2 * (s == 1)}f}{r:10.2f}" for x, r, s in columns), flush=True
        )
    if title.endswith("blocks"):
        floor = 8 * first["parameters"]
        print(
            f"{'floor':16}{'':20}{floor / 1e6:10.0f}{floor / first['tensors']:10.2f}  without any activation: the "
            "parameters, Adam's state and the inner gradient, and the gradients of these four"
        )


def measure(kind: str, name: str, steps: int) -> dict[str, Any]:
    """A case in a process of its own."""
    command = [sys.executable, __file__, "--case", kind, name, str(steps)]
    made: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    )
    return made


def within_a_budget(budget: int = 2**30, times: int = 8) -> None:
    """Many more steps than recording has room for, replayed in the same memory."""
    short, long = (measure("4x16", "recorded", steps)["bytes"] for steps in (4, 8))
    room = 4 + int((budget - short) * 4 / (long - short))
    peak = measure("4x16", "replayed, 20", times * room)["bytes"]
    print(
        f"\nin {budget / 2**30:.0f} GiB, transformer of 4 layers: recorded {room} steps (by the peaks of 4 and of 8); "
        f"{times} times as many, {times * room}, replayed from 20 snapshots, peak at {peak / 2**30:.2f} GiB"
    )
    assert peak <= budget


def first_order(repeats: int = 200) -> None:
    """A step of first-order MAML against a loop by hand."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64))
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    names = [name for name, _ in model.named_parameters()]

    def ours() -> Tensor:
        made = todist.inner_loop(
            lambda net: (net(x) - y).square().mean(),
            todist.sgd(lr=0.1),
            model,
            5,
            adjoint=todist.FirstOrder(),
        )
        return (made.params(y) - x).square().mean()

    def by_hand() -> Tensor:
        params = list(model.parameters())
        for _ in range(5):
            moved = dict(zip(names, params, strict=True))
            grads = torch.autograd.grad((functional_call(model, moved, (x,)) - y).square().mean(), params)
            params = [p - 0.1 * g for p, g in zip(params, grads, strict=True)]
        return (functional_call(model, dict(zip(names, params, strict=True)), (y,)) - x).square().mean()

    times: dict[str, list[float]] = {"ours": [], "by hand": []}
    for _ in range(repeats):
        for name, run in (("ours", ours), ("by hand", by_hand)):
            start = time.thread_time()
            run().backward()
            times[name].append(time.thread_time() - start)
            model.zero_grad()
    one, other = (sorted(times[name])[repeats // 2] for name in ("ours", "by hand"))
    print(
        f"\nfirst-order MAML, 5 steps: {one * 1e3:.2f} ms, by hand {other * 1e3:.2f} ms, ratio {one / other:.2f}"
    )


def main(which: str, steps: int | None) -> None:
    if which in ("transformer", ""):
        names = ["recorded", "checkpoint", "replayed, all", "replayed, 4"]
        table("transformer of 4 layers", "4x16", names, steps or 32)
    if which in ("budget", ""):
        within_a_budget()
    if which in ("blocks", ""):
        names = ["recorded", "replayed, all", "blocks, all", "blocks, 80 MB", "blocks, 1"]
        for sequences in (16, 64):
            title = f"transformer of 16 layers, {sequences} sequences, by blocks"
            table(title, f"16x{sequences} by blocks", names, steps or 4)
    if which in ("many", ""):
        names = ["plain", "floor", "replayed, all", "replayed, 20"]
        table("a million parameters", "million", names, steps or 1000, rounds=3)
    if which in ("first_order", ""):
        first_order()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(case(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "", int(sys.argv[2]) if len(sys.argv) > 2 else None)
