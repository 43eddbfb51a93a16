"""A seed → a program of remote calls in float64, and what it computes: on workers, or in one process.

A program is plain data: a list of instructions over registers, each of which holds a tensor of one shape. An
instruction may be a call of another such list, in one of many ways (``random_calls.py``).
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.distributed.random_calls import HEDGES, OF_ROWS, WHOLE, Call, Here, There, formed
from torchopt_dist.distributed.calls import tree
from torchopt_dist.distributed.group.chunks import CHUNK
from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.serialization.wire import SMALL

Instruction = Any

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "softmax": lambda x: torch.softmax(x, -1),
    "square": lambda x: 0.3 * x * x,
    "flip": lambda x: x.flip(-1),
    "in place": lambda x: _in_place(x.clone()),
    "view": lambda x: x.t().contiguous().t(),
    "detached": lambda x: x + (x.detach() > 1.2345) * x.detach().float(),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "scaled": lambda x, y: x * torch.cos(y.mean()),
    "rows": lambda x, y: torch.tanh(x + y[:1]),
    "matrix": lambda x, y: x @ torch.tanh(y.t() @ y),
}
HEDGE_SECONDS = [0.0, 0.001, 60.0] if HEDGES else [60.0]
"""Seconds. What begins on two workers at once depends on the moment, so it is drawn only if it is asked for."""
INSIDE, ROWWISE = 3, ("tanh", "sin", "softmax", "square", "flip", "in place")


def _in_place(y: Tensor) -> Tensor:
    y.mul_(0.9).add_(0.1)
    y[..., 0] = torch.sin(y[..., 0] + y[..., -1])
    return y


@dataclass(frozen=True)
class Thresholds:
    """What counts as large, on all workers.

    Attributes:
        small: bytes up to which tensors share a buffer, and are copied.
        chunk: bytes of a chunk.
        far: whether all workers are on machines of their own.
    """

    small: int = SMALL
    chunk: int = CHUNK
    far: bool = False


@dataclass(frozen=True)
class Program:
    """What :func:`draw` makes of a seed.

    Attributes:
        rows: the first dimension of all tensors.
        columns: the second.
        leaves: how many leaves require grad, besides the module's parameters.
        code: the caller's instructions.
        losses: for each loss the registers that it is the sum of functions of.
        wanted: the leaves whose gradients are asked for.
        order: how often is differentiated.
        how: "grad", "again" for each gradient twice, "backward", "inputs" for a backward to some leaves only, "more"
            for one that is added to another, or "apart" for each loss on its own, one after another.
        thresholds: what counts as large.
    """

    rows: int
    columns: int
    leaves: int
    code: list[Instruction]
    losses: list[list[int]]
    wanted: list[int]
    order: int
    how: str
    thresholds: Thresholds


class _Random(random.Random):
    """Random choices; ``wide`` says whether tensors of a MiB may be drawn, which go in few chunks."""

    wide = True


def draw(seed: int, workers: int) -> Program:
    """The program of a seed, for so many workers."""
    r = _Random(seed)
    leaves, rows, columns = r.randint(1, 3), r.randint(2, 5), r.randint(1, 3)
    code: list[Instruction] = []
    registers = leaves
    thresholds = Thresholds()
    if r.random() < 0.7:  # so that the smallest tensors go the ways of large ones
        thresholds = Thresholds(r.choice([16, 40, 1 << 10]), r.choice([8, 50, CHUNK]), r.random() < 0.8)
        r.wide = thresholds.chunk == CHUNK
    for _ in range(r.randint(2, 6)):
        instruction = (
            _call(r, registers, workers, 0) if r.random() < 0.7 else _plain(r, registers, module=True)
        )
        code.append(instruction)
        registers += _number(instruction)
    if registers == leaves:  # all calls are forgotten
        code.append(_plain(r, registers, module=True))
        registers += 1
    computed = range(leaves, registers)
    losses = [r.choices(computed, k=r.randint(1, 3)) for _ in range(r.randint(1, 3))]
    wanted = sorted(
        r.sample(range(leaves + 1), r.randint(1, leaves + 1))
    )  # the last one is the module's weight
    how = r.choice(["grad", "grad", "grad", "again", "backward", "inputs", "more", "apart"])
    order = r.choice([1, 2, 2, 3]) if how in ("grad", "again") else 1
    return Program(rows, columns, leaves, code, losses, wanted, order, how, thresholds)


def _number(instruction: Instruction) -> int:
    """How many registers an instruction adds."""
    number: int = instruction.number if isinstance(instruction, Call) else instruction[-1]
    return number


def _plain(r: _Random, registers: int, *, module: bool) -> Instruction:
    """One that leaves a tensor in one more register: the last item of an instruction says how many."""
    kind = r.choice(["unary", "binary", "binary", "inner", "direct", "module" if module else "unary"])
    i, j = r.randrange(registers), r.randrange(registers)
    if kind == "unary":
        return ("unary", r.choice(list(UNARY)), i, 1)
    if kind == "binary":
        return ("binary", r.choice(list(BINARY)), i, j, 1)
    return (kind, i, j, 1)


def _form(r: _Random, forms: list[str], *, handle: bool = True) -> str:
    if r.random() < 0.4:
        return "plain"
    if handle and r.random() < 0.1:
        return "handle"
    return "wide" if r.wide and r.random() < 0.06 else r.choice(forms)


def _call(r: _Random, registers: int, workers: int, depth: int) -> Call:
    kind = r.choice(["sync", "sync", "async", "closure", "spread", "split", "exclusive", "map"])
    if not depth and r.random() < 0.06:
        return _failure(r, workers)
    graded = r.random() < 0.95
    if kind in ("split", "exclusive", "map"):
        return _call_of_rows(r, kind, registers, workers, depth, graded=graded)
    if kind == "async" and not depth and r.random() < 0.2:
        kind = "forgotten"
    handle = kind != "closure"  # in a closure a handle stays one
    arguments = [(r.randrange(registers), _form(r, WHOLE, handle=handle)) for _ in range(r.randint(1, 3))]
    function: list[Instruction] = []
    inside = len(arguments)
    if r.random() < 0.4:  # the last register may depend on the first argument
        arguments.append((registers - 1, _form(r, WHOLE, handle=handle)))
        function, inside = [("direct", 0, len(arguments) - 1, 1)], len(arguments) + 1
    for _ in range(r.randint(1, INSIDE)):
        nested = depth < 2 and r.random() < 0.25
        function.append(_call(r, inside, workers, depth + 1) if nested else _plain(r, inside, module=True))
        inside += _number(function[-1])
    results = [(i, _form(r, WHOLE, handle=False)) for i in r.choices(range(inside), k=r.randint(1, 3))]
    number = 0 if kind == "forgotten" else len(results)
    several = r.sample(range(workers), r.randint(1, workers)) if kind == "spread" else [r.randrange(workers)]
    options = _options(r, depth, several=kind == "spread")
    return Call(
        kind, tuple(several), function, arguments, results, options=options, graded=graded, number=number
    )


def _call_of_rows(r: _Random, kind: str, registers: int, workers: int, depth: int, *, graded: bool) -> Call:
    """One whose rows have nothing to do with one another, but for what they share."""
    options = _options(r, depth, several=True)
    if kind != "split" and r.random() < 0.3:
        options["vectorize"] = True
        if r.random() < 0.3:
            options["chunk_size"] = r.randint(1, 3)
    arguments = [
        (r.randrange(registers), _form(r, OF_ROWS)) for _ in range(r.randint(1, 5 if kind == "map" else 3))
    ]
    if kind == "map" and "vectorize" in options:
        arguments = [(i, arguments[0][1]) for i, _ in arguments]
    inside = 1 if kind == "map" else len(arguments)
    code: list[Instruction] = [("unary", r.choice(ROWWISE), r.randrange(inside), 1)]
    shared = r.randrange(registers) if r.random() < 0.5 else None
    last = inside + (shared is not None)
    code.append(("binary", r.choice(["add", "mul"]), r.randrange(inside), last, 1))
    if r.random() < 0.3:
        code.append(("module", last + 1, last, 1))
    if shared is not None:
        code.append(("binary", "scaled", last + len(code) - 1, inside, 1))
    balanced = r.random() < 0.2 and not (kind == "split" and any(form == "handle" for _, form in arguments))
    reducer = r.choice(["sum", "concatenate"] if balanced else ["sum", "mean", "concatenate"])
    chosen = tuple(r.sample(range(workers), r.randint(1, workers)))
    return Call(kind, chosen, code, arguments, [(0, "plain")], shared, reducer, options, balanced, graded)


def _failure(r: _Random, workers: int) -> Call:
    """A call in which one worker fails."""
    chosen = tuple(r.sample(range(workers), r.randint(1, workers)))
    what = r.choice(["in forward", "in backward", "unsendable"] * 3 + ["late"])
    options = _options(r, 0, several=True)
    if what == "late":
        options |= {"timeout": 0.02, "isolate_own_share": True}
    return Call(what, chosen, [], [], [], reducer=str(r.choice(chosen)), options=options, number=0)


def _options(r: _Random, depth: int, *, several: bool) -> dict[str, Any]:
    """The options of a call, which change no result."""
    options: dict[str, Any] = {}
    kind = r.choice(["plain", "tree", "tree", "hedge" if r.random() < 0.3 else "retries"])
    if kind == "tree" and several:
        options["fan_out"] = r.choice([1, 2, 3, "auto", None])
    elif kind == "hedge":
        options["hedge_after"] = r.choice(HEDGE_SECONDS)
    if kind == "retries" or (kind == "tree" and r.random() < 0.3):
        options["retries"] = r.randint(1, 2)
    if r.random() < 0.2:
        options["timeout"] = 100.0
    if not depth and r.random() < 0.15:  # deeper it may run elsewhere, and then be isolated
        options["isolate_own_share"] = False
    if r.random() < 0.1:
        options["strict"] = True
    if r.random() < 0.1:
        options["device"] = "auto"
    return options


def interpret(
    code: list[Instruction], given: list[Tensor], module: nn.Module, runner: Here | There
) -> list[Tensor]:
    """The values of all registers."""
    registers: list[Any] = list(given)
    waiting: dict[int, Any] = {}

    def get(i: int) -> Tensor:
        if registers[i] is None:
            first, call, future = waiting[i]
            values = future.wait() if isinstance(future, torch.futures.Future) else future
            for k, value in enumerate(values):
                registers[first + k] = _as_recorded(value, call)
        value: Tensor = registers[i]
        return value

    for instruction in code:
        match instruction:
            case Call():
                call = instruction
                tree = [
                    formed(form, get(i), lambda x, call=call: runner.put(x, call))
                    for i, form in call.arguments
                ]
                shared = [] if call.shared is None else [get(call.shared)]
                future = runner.call(call, tree, module, shared)
                for k in range(call.number):
                    waiting[len(registers)] = (len(registers) - k, call, future)
                    registers.append(None)
                if call.number == 1 and call.kind in ("split", "exclusive", "map"):
                    registers[-1] = _as_recorded(future[0], call).expand_as(registers[0])
            case ("unary", name, i, _):
                registers.append(UNARY[name](get(i)))
            case ("binary", name, i, j, _):
                registers.append(BINARY[name](get(i), get(j)))
            case ("module", i, j, _):
                registers.append(torch.tanh(module(get(i))) * get(j))
            case ("inner", i, j, _):  # one step of gradient descent
                with torch.enable_grad():
                    start = get(i) + 0.0
                    if not start.requires_grad:
                        start.requires_grad_()
                    loss = (torch.sin(start) * get(j) + start**3 / 3).sum()
                    (slope,) = torch.autograd.grad(loss, start, create_graph=True)
                registers.append(start - 0.1 * slope)
            case ("direct", i, j, _):  # where the second depends on the first, so does the slope
                start = get(i)
                if start.requires_grad and torch.is_grad_enabled():
                    loss = (torch.sin(start) * get(j)).sum()
                    (slope,) = torch.autograd.grad(loss, start, create_graph=True)
                    start = start - 0.1 * slope
                registers.append(start)
    order = range(len(registers))
    for i in order if len(code) % 2 else reversed(order):
        get(i)
    return registers


def _as_recorded(value: Tensor, call: Call) -> Tensor:
    """A result; that of a call which records nothing may be an argument, which requires grad."""
    return value if call.graded else value.detach()


def evaluate(program: Program, seed: int, runner: Here | There, scale: float = 1.0) -> list[Tensor | None]:
    """The losses of a program, and all its derivatives; ``scale`` is a factor of all that it begins with."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    leaves = [(scale * normal(program.rows, program.columns)).requires_grad_() for _ in range(program.leaves)]
    module = nn.Linear(program.columns, program.columns, dtype=torch.float64)
    for parameter in module.parameters():
        parameter.data.copy_(scale * normal(*parameter.shape))
    registers = interpret(program.code, list(leaves), module, runner)
    losses = [
        torch.stack(
            [(torch.cos(registers[i]) * normal(program.rows, program.columns)).sum() for i in used]
        ).sum()
        for used in program.losses
    ]
    everything = [*leaves, module.weight]
    wanted = [everything[i] for i in program.wanted]
    found: list[Tensor | None] = list(losses)
    losses = [loss for loss in losses if loss.requires_grad]
    if program.how in ("backward", "inputs", "more"):
        inputs = wanted if program.how == "inputs" else None
        for number, loss in enumerate(losses):
            for turn in range(times := 2 if program.how == "more" else 1):
                retain = number < len(losses) - 1 or turn < times - 1
                loss.backward(retain_graph=retain, inputs=inputs)
                for leaf in everything:  # torch gives two leaves one memory, where views lead to them
                    leaf.grad = None if leaf.grad is None else leaf.grad.clone()
        found += [leaf.grad for leaf in everything]
    elif program.how == "apart":
        for number, loss in enumerate(losses):
            found += torch.autograd.grad(
                loss, wanted, retain_graph=number < len(losses) - 1, allow_unused=True
            )
    else:
        value = sum(losses, torch.zeros((), dtype=torch.float64))
        for order in range(1, program.order + 1):
            if not value.requires_grad:
                break
            if program.how == "again":
                found += torch.autograd.grad(value, wanted, retain_graph=True, allow_unused=True)
            grads = torch.autograd.grad(value, wanted, create_graph=order < program.order, allow_unused=True)
            found += grads
            value = sum(
                ((torch.sin(g) * normal(*g.shape)).sum() for g in grads if g is not None),
                torch.zeros((), dtype=torch.float64),
            )
    return [None if tensor is None else tensor.detach() for tensor in found]


def check(program: Program, seed: int, found: list[Tensor | None]) -> None:
    """Raise ``AssertionError`` unless that is what the program computes, but for the last digits."""
    expected = evaluate(program, seed, Here())
    try:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    except AssertionError:  # a little change of what it begins with tells how many digits have a meaning
        near = evaluate(program, seed, Here(), 1 + 1e-13)
        tensors = [(x, y) for x, y in zip(expected, near, strict=True) if x is not None and y is not None]
        atol = max([1e-10, *(float((x - y).abs().nan_to_num(torch.inf).max()) for x, y in tensors)])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=atol, equal_nan=True)


# ------------------------------------------------------------------------------------------------- on the workers


def set_thresholds(thresholds: Thresholds) -> None:
    """On a worker: from now on, this is large."""
    values = {"SMALL": thresholds.small, "CHUNK": thresholds.chunk}
    for name, module in list(sys.modules.items()):
        if name.startswith("torchopt_dist.distributed."):
            for constant in values.keys() & vars(module).keys():
                setattr(module, constant, values[constant])
    far = thresholds.far
    tree.AUTO_WORKERS, tree.AUTO_BYTES, tree.MUCH_BYTES = (0, 8, 100) if far else (4, 1 << 20, 1 << 22)


class LeftOverError(Exception):
    """A call has left something behind."""


def left_over() -> dict[str, int]:
    """On a worker: what is left of calls."""
    group = current_group()
    held = {
        "kept graphs": group.kept_graphs,
        "chunks": vars(group.streams)["_arriving"],
        "residents": group.residents,
    }
    return {name: len(each) for name, each in held.items() if len(each)}


def nothing_is_left(workers: Sequence[int]) -> None:
    """Raise ``AssertionError`` unless all calls have ended, and nothing of them is left on any worker."""
    until = time.monotonic() + 30
    turn = 0
    while True:
        left: dict[int, Any] = {rank: todist.remote_call(left_over, rank) for rank in workers}
        requests = [worker.requests for worker in todist.status()]
        if not any(left.values()) and not any(requests):
            return
        if time.monotonic() > until:
            raise LeftOverError(f"left over: {left}, requests {requests}")
        turn += 1
        if turn in (10, 20):  # errors refer to frames, and frames to tensors
            for rank in workers:
                todist.remote_call(gc.collect, rank)
        time.sleep(0.001 * turn)


def differences(first_seed: int, number: int, workers: int) -> list[str]:
    """What differs between workers and one process, for so many programs; to be called on rank 0."""
    told = []
    for seed in range(first_seed, first_seed + number):
        program = draw(seed, workers)
        for rank in range(workers):
            todist.remote_call(set_thresholds, rank, program.thresholds)
        try:
            runner = There()
            found = evaluate(program, seed, runner)
            runner.settle()
            del runner
            check(program, seed, found)
            nothing_is_left(range(workers))
        except Exception as error:
            told.append(f"seed {seed}, {workers} workers: {type(error).__name__}: {error}\n{program}")
            if isinstance(error, LeftOverError):  # it would still be there after the next one
                break
    return told
