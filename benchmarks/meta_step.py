"""How long do five differentiable steps of Adam and the outer gradient take? Against TorchOpt and plain functional SGD.

A tanh MLP of some width and depth, batch 16, one thread. Functional SGD, written by hand, is the floor: it does what
cannot be left out. The same by ``torch.func``: ``grad`` through ``grad``, and for 16 tasks at a time in ``vmap``.
TorchOpt is timed if it is installed (``pip install --no-deps torchopt``).

And what a step costs beside the arithmetic, on a module so small that it shows: an MLP 1-40-40-1 and five steps of SGD,
in CPU time, against the same loop by hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from page import ratio, table
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from workers import interleaved

import torchopt_dist as todist

try:
    import torchopt
except ImportError:
    torchopt = None

SIZES = ((32, 10), (256, 10), (1024, 4))
SIZES_OF_TASKS = ((32, 4), (128, 4))
STEPS, BATCH, LR, TASKS = 5, 16, 1e-3, 16
FLOOR, FORMULA = "functional SGD, the floor", "our adam, by its formula"


def build(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers)


def loss_of(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (net(x) - x.flip(0)).square().mean()


def outer_gradient(
    library: object, optimizer: str, net: nn.Module, x: Tensor, **options: float
) -> list[Tensor]:
    first = list(net.parameters())
    adapted = library.module_clone(net, by="reference", detach_buffers=True)  # type: ignore[attr-defined]
    inner = getattr(library, optimizer)(adapted, lr=LR, **options)
    for _ in range(STEPS):
        inner.step(loss_of(adapted, x))
    return list(torch.autograd.grad(loss_of(adapted, x), first))


def functional_sgd(net: nn.Module, x: Tensor) -> list[Tensor]:
    first = dict(net.named_parameters())
    params = first
    for _ in range(STEPS):
        loss = loss_of(lambda x, params=params: functional_call(net, params, (x,)), x)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        params = {name: p - LR * g for (name, p), g in zip(params.items(), grads, strict=True)}
    return list(
        torch.autograd.grad(loss_of(lambda x: functional_call(net, params, (x,)), x), list(first.values()))
    )


def by_torch_func(net: nn.Module, x: Tensor, adam: Any = None) -> list[Tensor]:
    """The gradient through the steps of a functional optimizer, or of SGD; summed up over tasks if ``x`` has them."""
    names, first = zip(*net.named_parameters(), strict=True)

    def loss(params: Sequence[Tensor], x: Tensor) -> Tensor:
        named = dict(zip(names, params, strict=True))
        return loss_of(lambda x: functional_call(net, named, (x,)), x)

    def adapted(params: Sequence[Tensor], x: Tensor) -> Tensor:
        state = None if adam is None else adam.init(tuple(params))
        for _ in range(STEPS):
            grads = grad(loss)(tuple(params), x)
            if adam is None:
                params = [p - LR * g for p, g in zip(params, grads, strict=True)]
            else:
                updates, state = adam.update(grads, state, params=params, inplace=False)
                params = tuple(p + u for p, u in zip(params, updates, strict=True))
        return loss(params, x)

    if x.dim() == 2:
        return list(grad(adapted)(first, x))
    return list(grad(lambda params: vmap(adapted, in_dims=(None, 0))(params, x).sum())(first))


def compare_by_torch_func() -> None:
    rows = []
    for width, depth, tasks in [(*size, ()) for size in SIZES] + [
        (*size, (TASKS,)) for size in SIZES_OF_TASKS
    ]:
        net, x = build(width, depth), torch.randn(*tasks, BATCH, width)
        adams = {"our adam": todist.adam(lr=LR), FORMULA: todist.adam(lr=LR, fused=False)}
        if torchopt is not None and not tasks:  # in `vmap` it raises
            adams["TorchOpt's adam"] = torchopt.adam(lr=LR)
        seconds = interleaved(
            {
                name: lambda net=net, x=x, adam=adam: by_torch_func(net, x, adam)
                for name, adam in {"SGD, the floor": None, **adams}.items()
            },
            rounds=9,
        )
        floor, ours = seconds["SGD, the floor"], seconds["our adam"]
        their = seconds.get("TorchOpt's adam")
        rows.append(
            [
                f"{width} x {depth}" + (f", {tasks[0]} tasks" if tasks else ""),
                f"{floor * 1e3:.0f} ms",
                *(f"{seconds[n] * 1e3:.0f} ms ({seconds[n] / floor:.2f})" for n in ("our adam", FORMULA)),
                f"{their * 1e3:.0f} ms: ours {ours / their:.2f} of it" if their else "",
            ]
        )
    print(
        "By `torch.func`, `grad` through `grad`, and for 16 tasks at a time in `vmap`; in brackets of the floor:"
    )
    table(["width x depth, tasks", "floor, SGD", "our `adam`", "its formula", "TorchOpt's `adam`"], rows)


def compare_beside_the_arithmetic(rounds: int = 400) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    x, y = torch.randn(10, 1), torch.randn(10, 1)
    sgd = todist.sgd(lr=LR)

    def loss(net: Callable[[Tensor], Tensor]) -> Tensor:
        return F.mse_loss(net(x), y)

    def by_functions() -> list[Tensor]:
        params = list(net.parameters())
        for _ in range(STEPS):
            w1, b1, w2, b2, w3, b3 = params
            hidden = F.linear(F.linear(x, w1, b1).tanh(), w2, b2).tanh()
            grads = torch.autograd.grad(F.mse_loss(F.linear(hidden, w3, b3), y), params, create_graph=True)
            params = list(torch._foreach_add(params, grads, alpha=-LR))
        return params

    def by_modules() -> list[Tensor]:
        adapted = todist.module_clone(net)
        places = [(part._parameters, name) for part in adapted.modules() for name in part._parameters]
        params: list[Any] = list(net.parameters())
        for _ in range(STEPS):
            grads = torch.autograd.grad(loss(adapted), params, create_graph=True)
            params = list(torch._foreach_add(params, grads, alpha=-LR))
            for (held, name), tensor in zip(places, params, strict=True):
                held[name] = tensor
        return params

    def by_meta_sgd() -> list[Tensor]:
        adapted = todist.module_clone(net)
        inner = todist.MetaSGD(adapted, lr=LR)
        for _ in range(STEPS):
            inner.step(loss(adapted))
        return list(adapted.parameters())

    def by_recorded() -> list[Tensor]:
        made = todist.inner_loop(loss, sgd, net, STEPS, adjoint=todist.Recorded())
        return list(made.params.parameters())

    ways = {
        "by hand, of functions": by_functions,
        "by hand, of a clone": by_modules,
        "our `MetaSGD`": by_meta_sgd,
        "our `inner_loop`, `Recorded()`": by_recorded,
    }
    for name, way in ways.items():
        torch.testing.assert_close(way(), by_functions(), msg=lambda text, n=name: f"{n}: {text}")
    times: dict[str, list[int]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.thread_time_ns()
            made = way()
            del made
            times[name].append(time.thread_time_ns() - start)
    # Of what disturbs a run of a millisecond, little is left in the fifth that was fastest.
    per_step = {name: sorted(spent)[rounds // 5] / STEPS / 1e3 for name, spent in times.items()}
    floor, modules, *ours = per_step.values()
    print(f"What a step of {STEPS} takes on an MLP 1-40-40-1, CPU time:")
    table(
        ["", "a step", "beside the first", "beside the second", "times the first"],
        [
            [
                name,
                f"{spent:.0f} µs",
                f"{spent - floor:.0f} µs",
                f"{spent - modules:.0f} µs",
                f"{spent / floor:.2f}",
            ]
            for name, spent in per_step.items()
        ],
    )
    answer = f"`MetaSGD` {ours[0] / floor:.2f}, `inner_loop` {ours[1] / floor:.2f}"
    ratio("five steps of SGD on a tiny module, recorded", "by hand, of functions", answer)


def main() -> None:
    torch.set_num_threads(1)
    rows, over_floor, over_torchopt = [], [], []
    for width, depth in SIZES:
        net, x = build(width, depth), torch.randn(BATCH, width)
        ways: dict[str, Callable[[], list[Tensor]]] = {
            FLOOR: lambda net=net, x=x: functional_sgd(net, x),
            "our MetaSGD": lambda net=net, x=x: outer_gradient(todist, "MetaSGD", net, x),
            "our MetaSGD, momentum": lambda net=net, x=x: outer_gradient(
                todist, "MetaSGD", net, x, momentum=0.9
            ),
            "our MetaAdam": lambda net=net, x=x: outer_gradient(todist, "MetaAdam", net, x),
        }
        peers = {"our MetaSGD": FLOOR}
        if torchopt is not None:
            ways["TorchOpt's MetaSGD"] = lambda net=net, x=x: outer_gradient(torchopt, "MetaSGD", net, x)
            ways["TorchOpt's MetaSGD, momentum"] = lambda net=net, x=x: outer_gradient(
                torchopt, "MetaSGD", net, x, momentum=0.9
            )
            ways["TorchOpt's MetaAdam"] = lambda net=net, x=x: outer_gradient(torchopt, "MetaAdam", net, x)
            peers["our MetaAdam"] = "TorchOpt's MetaAdam"
        for ours, theirs in peers.items():
            error = max(
                ((a - b).abs().max() / b.abs().max()).item()
                for a, b in zip(ways[ours](), ways[theirs](), strict=True)
            )
            assert error < 1e-2, (
                f"{width} x {depth}: {ours} and {theirs} differ by {error:.1e} of the largest"
            )
        seconds = interleaved(ways, rounds=15, warmups=3)
        floor, ours = seconds[FLOOR], seconds["our MetaAdam"]
        their = seconds.get("TorchOpt's MetaAdam")
        over_floor.append(ours / floor)
        over_torchopt += [ours / their] if their else []
        names = ("our MetaSGD", "our MetaSGD, momentum", "our MetaAdam")
        rows.append(
            [
                f"{width} x {depth}",
                f"{floor * 1e3:.1f} ms",
                *(f"{seconds[name] * 1e3:.1f} ms ({seconds[name] / floor:.2f})" for name in names),
                f"{their * 1e3:.1f} ms: ours {ours / their:.2f} of it" if their else "",
            ]
        )
    print("In brackets of the floor, which is plain functional SGD by hand:")
    ours_columns = ("our `MetaSGD`", "with momentum", "our `MetaAdam`")
    table(["width x depth", "floor", *ours_columns, "TorchOpt's `MetaAdam`"], rows)
    question = "five differentiable steps of Adam"
    if over_torchopt:
        part = f"{min(over_torchopt):.2f} to {max(over_torchopt):.2f}"
        ratio(question, "TorchOpt's `MetaAdam`", part)
    ratio(question, "plain functional SGD", f"{min(over_floor):.2f} to {max(over_floor):.2f}")
    compare_beside_the_arithmetic()
    compare_by_torch_func()  # last: it leaves an allocator that has memory to give


if __name__ == "__main__":
    main()
