"""A seed → a program of remote calls in float64, and what it computes: on workers, or in one process.

A program is plain data: a list of instructions over registers, each of which holds a tensor of one shape. An
instruction may be a call of another such list, on one worker, split over several, in the background, or nested in
another call.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import torchopt_dist as todist

Instruction = tuple[Any, ...]

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "softmax": lambda x: torch.softmax(x, -1),
    "square": lambda x: 0.3 * x * x,
    "flip": lambda x: x.flip(-1),
    "view": lambda x: x.t().contiguous().t(),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "scaled": lambda x, y: x * torch.cos(y.mean()),
    "rows": lambda x, y: torch.tanh(x + y[:1]),
    "matrix": lambda x, y: x @ torch.tanh(y.t() @ y),
}
INSIDE, ROWWISE = 3, ("tanh", "sin", "softmax", "square", "flip")


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
        how: "grad", "backward", or "apart": each loss on its own, one after another.
    """

    rows: int
    columns: int
    leaves: int
    code: list[Instruction]
    losses: list[list[int]]
    wanted: list[int]
    order: int
    how: str


def draw(seed: int, workers: int) -> Program:
    """The program of a seed, for so many workers."""
    r = random.Random(seed)
    leaves, rows, columns = r.randint(1, 3), r.randint(2, 5), r.randint(1, 3)
    code: list[Instruction] = []
    registers = leaves
    for _ in range(r.randint(2, 6)):
        instruction = (
            _call(r, registers, workers, 0) if r.random() < 0.7 else _plain(r, registers, module=True)
        )
        code.append(instruction)
        registers += instruction[-1]
    computed = range(leaves, registers)
    losses = [r.choices(computed, k=r.randint(1, 3)) for _ in range(r.randint(1, 3))]
    wanted = sorted(
        r.sample(range(leaves + 1), r.randint(1, leaves + 1))
    )  # the last one is the module's weight
    how = r.choice(["grad", "grad", "backward", "apart"])
    return Program(
        rows, columns, leaves, code, losses, wanted, r.choice([1, 2, 2, 3]) if how == "grad" else 1, how
    )


def _plain(r: random.Random, registers: int, *, module: bool) -> Instruction:
    """One that leaves a tensor in one more register: the last item of an instruction says how many."""
    kind = r.choice(["unary", "binary", "binary", "inner", "direct", "module" if module else "unary"])
    i, j = r.randrange(registers), r.randrange(registers)
    if kind == "unary":
        return ("unary", r.choice(list(UNARY)), i, 1)
    if kind == "binary":
        return ("binary", r.choice(list(BINARY)), i, j, 1)
    return (kind, i, j, 1)


def _call(r: random.Random, registers: int, workers: int, depth: int) -> Instruction:
    arguments = [r.randrange(registers) for _ in range(r.randint(1, 3))]
    kind = r.choice(["sync", "sync", "async", "split", "exclusive"])
    if kind in ("split", "exclusive"):  # of rows, which may have nothing to do with one another
        function = [("unary", r.choice(ROWWISE), r.randrange(len(arguments)), 1)]
        function += [("binary", r.choice(["add", "mul"]), r.randrange(len(arguments)), len(arguments), 1)]
        chosen = r.sample(range(workers), r.randint(1, workers))
        return (kind, chosen, r.choice(["sum", "mean", "concatenate"]), function, arguments, 1)
    function, inside = [], len(arguments)
    if r.random() < 0.4:  # the last register may depend on the first argument
        arguments.append(registers - 1)
        function, inside = [("direct", 0, len(arguments) - 1, 1)], len(arguments) + 1
    for _ in range(r.randint(1, INSIDE)):
        nested = depth < 2 and r.random() < 0.25
        function.append(_call(r, inside, workers, depth + 1) if nested else _plain(r, inside, module=True))
        inside += function[-1][-1]
    results = r.choices(range(inside), k=r.randint(1, 3))
    return (kind, r.randrange(workers), results, function, arguments, len(results))


class Here:
    """Runs calls as plain ones, in this process."""

    def call(self, kind: str, worker: int, *args: Any) -> Any:
        del kind, worker
        code, results, tree, *module = args
        tree = {"in a tree": _apart(tree["in a tree"])}
        return _apart(block(code, results, tree, *module, runner=self)["results"])

    def split(
        self, kind: str, workers: list[int], reducer: str, code: list[Instruction], given: list[Tensor]
    ) -> Tensor:
        rows = given[0].shape[0]
        parts = rows if kind == "exclusive" else min(rows, len(workers))
        columns = [torch.tensor_split(x, parts) for x in given]
        values = [interpret(code, list(part), None, self)[-1] for part in zip(*columns, strict=True)]
        if reducer == "concatenate":
            return torch.cat(values)
        weights = [len(value) / (rows if reducer == "mean" else 1) for value in values]
        if reducer == "sum":
            weights = [1.0] * parts
        return sum((w * value.sum(0) for w, value in zip(weights, values, strict=True)), torch.tensor(0.0))


def _apart(tensors: list[Tensor]) -> list[Tensor]:
    """The same values, in which one that is made from another cannot be differentiated with respect to it.

    So it is with what travels: a worker does not know how the caller made an argument, nor the caller how a result
    was made. A tensor that is there twice stays one tensor.
    """
    copies = {id(x): x + 0.0 for x in tensors}
    return [copies[id(x)] for x in tensors]


class There:
    """Runs calls on workers."""

    def call(self, kind: str, worker: int, *args: Any) -> Any:
        if kind == "async":
            return todist.remote_async_call(block, args=args, partitioner=worker, reducer=_results_of_one)
        return todist.remote_sync_call(block, args=args, partitioner=worker, reducer=_results_of_one)

    def split(
        self, kind: str, workers: list[int], reducer: str, code: list[Instruction], given: list[Tensor]
    ) -> Tensor:
        partitioner = todist.dim_partitioner(0, exclusive=kind == "exclusive", workers=workers)
        reduce = getattr(todist, f"{reducer}_reducer")
        value: Tensor = todist.remote_sync_call(
            rows, args=(code, given, reducer != "concatenate"), partitioner=partitioner, reducer=reduce
        )
        return value


def _results_of_one(values: list[dict[str, Any]]) -> list[Tensor]:
    assert values[0]["text"] == "beside tensors"
    results: list[Tensor] = values[0]["results"]
    return results


def block(
    code: list[Instruction],
    results: list[int],
    arguments: dict[str, list[Tensor]],
    module: nn.Module,
    *,
    runner: Here | There | None = None,
) -> dict[str, Any]:
    """The function of a call: some of its registers, beside what is no tensor."""
    registers = interpret(code, arguments["in a tree"], module, runner or There())
    return {"text": "beside tensors", "results": [registers[i] for i in results]}


def rows(code: list[Instruction], arguments: list[Tensor], summed: bool) -> Tensor:
    """The function of a call that is split by rows."""
    value = interpret(code, arguments, None, There())[-1]
    return value.sum(0) if summed else value


def interpret(
    code: list[Instruction], given: list[Tensor], module: nn.Module | None, runner: Here | There
) -> list[Tensor]:
    """The values of all registers."""
    registers: list[Any] = list(given)
    waiting: dict[int, Any] = {}

    def get(i: int) -> Tensor:
        if registers[i] is None:
            first, future = waiting[i]
            for k, value in enumerate(future.wait() if isinstance(future, torch.futures.Future) else future):
                registers[first + k] = value
        value: Tensor = registers[i]
        return value

    for instruction in code:
        match instruction:
            case ("unary", name, i, _):
                registers.append(UNARY[name](get(i)))
            case ("binary", name, i, j, _):
                registers.append(BINARY[name](get(i), get(j)))
            case ("module", i, j, _):
                assert module is not None
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
                if start.requires_grad:
                    loss = (torch.sin(start) * get(j)).sum()
                    (slope,) = torch.autograd.grad(loss, start, create_graph=True)
                    start = start - 0.1 * slope
                registers.append(start)
            case ("sync" | "async" as kind, worker, results, function, arguments, number):
                tree = {"in a tree": [get(i) for i in arguments]}
                future = runner.call(kind, worker, function, results, tree, module)
                for k in range(number):
                    waiting[len(registers)] = (len(registers) - k, future)
                    registers.append(None)
            case ("split" | "exclusive" as kind, workers, reducer, function, arguments, _):
                value = runner.split(kind, workers, reducer, function, [get(i) for i in arguments])
                registers.append(value if reducer == "concatenate" else value.expand_as(registers[0]))
    return [get(i) for i in range(len(registers))]


def evaluate(program: Program, seed: int, runner: Here | There) -> list[Tensor | None]:
    """The losses of a program, and all its derivatives."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    leaves = [normal(program.rows, program.columns).requires_grad_() for _ in range(program.leaves)]
    module = nn.Linear(program.columns, program.columns, dtype=torch.float64)
    for parameter in module.parameters():
        parameter.data.copy_(normal(*parameter.shape))
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
    if program.how == "backward":
        for number, loss in enumerate(losses):
            loss.backward(retain_graph=number < len(losses) - 1)
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
            grads = torch.autograd.grad(value, wanted, create_graph=order < program.order, allow_unused=True)
            found += grads
            value = sum(
                ((torch.sin(g) * normal(*g.shape)).sum() for g in grads if g is not None),
                torch.zeros((), dtype=torch.float64),
            )
    return [None if tensor is None else tensor.detach() for tensor in found]


def differences(first_seed: int, number: int, workers: int) -> list[str]:
    """What differs between workers and one process, for so many programs; to be called on rank 0."""
    told = []
    for seed in range(first_seed, first_seed + number):
        program = draw(seed, workers)
        try:
            here, there = evaluate(program, seed, Here()), evaluate(program, seed, There())
            torch.testing.assert_close(there, here, rtol=1e-9, atol=1e-10)
        except Exception as error:
            told.append(f"seed {seed}, {workers} workers: {type(error).__name__}: {error}\n{program}")
    return told
