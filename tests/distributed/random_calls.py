"""A call of a random program → its results: on workers, with all its options, or as plain calls in this process.

A call is plain data: what code it runs, where, on which registers, and in which *forms* these travel, such as views,
complex tensors, copies of more than a MiB or handles of ``put``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import torchopt_dist as todist
from torchopt_dist import pytree

Instruction = Any
Interpreter = Callable[..., list[Tensor]]

HEDGES = bool(os.environ.get("TODIST_FUZZ_HEDGES"))
"""Whether shares begin on two workers. Another share may then run in this process, since its worker has two others."""
COPIES = 20_000
"""Of each column, side by side, in the form "wide"."""


@dataclass(frozen=True)
class Call:
    """A call.

    Attributes:
        kind: "sync", "async", "closure" and "forgotten" run on one worker, "spread" on each of several, "split" and
            "exclusive" on rows of the arguments, "map" on one argument after another. The others are failures.
        workers: the ranks.
        code: the instructions of the function.
        arguments: registers of the caller, and their forms.
        results: registers of the function, and their forms; those of rows have one, the last.
        shared: a register that all tasks get whole; ``None`` if there is none.
        reducer: of rows; of a failure the rank that fails.
        options: of the call.
        balanced: whether faster workers get more.
        graded: whether it is made with gradients enabled.
        number: how many registers it adds.
    """

    kind: str
    workers: tuple[int, ...]
    code: list[Instruction]
    arguments: list[tuple[int, str]]
    results: list[tuple[int, str]]
    shared: int | None = None
    reducer: str = "sum"
    options: dict[str, Any] = field(default_factory=dict)
    balanced: bool = False
    graded: bool = True
    number: int = 1

    @property
    def plain_here(self) -> bool:
        """Whether the caller's own share is a plain call."""
        return self.options.get("isolate_own_share") is False


# ------------------------------------------------------------------------------------------------------------ forms


def _beside(x: Tensor) -> Any:
    rows = len(x)
    return {
        "x": x,
        "flags": torch.arange(rows) % 2 == 0,
        "numbers": (torch.arange(rows), [3, None, "text"]),
        "single": torch.linspace(0, 1, rows, dtype=torch.float32),
        "nothing": torch.zeros(rows, 0, dtype=torch.int16),
    }


def _from_beside(tree: Any) -> Tensor:
    assert tree["numbers"][1] == [3, None, "text"]
    assert tree["nothing"].numel() == 0
    column = (tree["flags"] * tree["single"]).double() + tree["numbers"][0]
    x: Tensor = tree["x"]
    return x + 0.1 * column.unsqueeze(-1)


FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "plain": (lambda x: x, lambda x: x),
    "strided": (lambda x: torch.stack([x, 2 * x], -1)[..., 0], lambda x: x),
    "expanded": (lambda x: x.unsqueeze(1).expand(-1, 3, -1), lambda x: x.mean(1)),
    "parts": (lambda x: (x[:, :1], [x[:, 1:]]), lambda parts: torch.cat([parts[0], *parts[1]], -1)),
    "views": (lambda x: {"x": x, "y": x.view_as(x)}, lambda both: both["x"] + 0.5 * both["y"]),
    "twice": (lambda x: [x, (x,)], lambda both: both[0] * torch.sin(both[1][0])),
    "empty": (lambda x: (x, x[:, :0]), lambda both: both[0] + both[1].sum()),
    "scalar": (lambda x: (x, x.mean()), lambda both: both[0] * both[1].cos()),
    "complex": (lambda x: torch.complex(x, x.sin()), lambda z: z.real + 0.5 * z.imag),
    "conjugate": (lambda x: torch.complex(x, x.sin()).conj(), lambda z: (z * z.cos()).imag + z.real),
    "negative": (lambda x: torch.complex(x, x).conj().imag, lambda x: x.cos() - x),
    "beside": (_beside, _from_beside),
    "wide": (lambda x: x.repeat(1, COPIES), lambda x: x.unflatten(-1, (COPIES, -1)).mean(-2)),
    # Of these two the first dimension is not that of the rows.
    "transposed": (lambda x: x.t(), lambda x: x.t()),
}
WHOLE = [form for form in FORMS if form != "wide"]
"""The forms that are not as rare as the others."""
OF_ROWS = [form for form in WHOLE if form != "transposed"]
"""Forms that can be split by rows, and whose values are made of rows."""


def formed(form: str, x: Tensor, put: Callable[[Tensor], Any]) -> Any:
    """A tensor in a form."""
    return put(x.detach()) if form == "handle" else FORMS[form][0](x)


def restored(form: str, tree: Any) -> Tensor:
    """The tensor of a form; of the same shape as that which went into the form."""
    x: Tensor = tree if form == "handle" else FORMS[form][1](tree)
    return x


# ------------------------------------------------------------------------------------- functions that workers run


def block(
    call: Call, given: list[Any], module: nn.Module, share: int, *, runner: Here | There | None = None
) -> dict[str, Any]:
    """The function of a call that is not of rows: some of its registers, beside what is no tensor."""
    interpret: Interpreter = _interpreter()
    registers = [restored(form, tree) for (_, form), tree in zip(call.arguments, given, strict=True)]
    registers[0] = registers[0] * (1 + 0.25 * share) if share else registers[0]
    found = interpret(call.code, registers, module, runner or There())
    return {
        "text": "beside tensors",
        "results": [formed(form, found[i], torch.detach) for i, form in call.results],
    }


def rows(
    call: Call,
    given: list[Any],
    module: nn.Module,
    shared: list[Tensor],
    *,
    runner: Here | There | None = None,
) -> Any:
    """The function of a call of rows."""
    interpret: Interpreter = _interpreter()
    registers = [restored(form, tree) for (_, form), tree in zip(call.arguments, given, strict=False)]
    value = interpret(call.code, [*registers, *shared], module, runner or There())[-1]
    if call.reducer != "concatenate":
        value = value.sum(0)
    return value


def item(
    task: dict[str, Any],
    call: Call,
    module: nn.Module,
    shared: list[Tensor],
    *,
    runner: Here | There | None = None,
) -> Any:
    """The function of one item of a map."""
    interpret: Interpreter = _interpreter()
    x = restored(task["form"], task["x"])
    value = interpret(call.code, [x, *shared], module, runner or There())[-1]
    return {"sum": value.sum(0) * (1 + 0.25 * task["number"])}


class _Failing(torch.autograd.Function):
    """The identity; its backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ArithmeticError("in backward")


def failing(x: Tensor, what: str, fails: bool) -> Any:
    """The function of a call in which one worker fails."""
    if fails and what == "in forward":
        raise ArithmeticError("in forward")
    if fails and what == "late":
        time.sleep(0.3)
    if fails and what == "unsendable":
        return threading.Lock()
    return (_Failing.apply(x) if fails and what == "in backward" else x).sin().sum()


FAILURES = {
    "in forward": ArithmeticError,
    "in backward": ArithmeticError,
    "late": todist.CallTimeoutError,
    "unsendable": todist.errors.SerializationError,
}


def _interpreter() -> Interpreter:
    from tests.distributed.random_programs import interpret

    return interpret


# ----------------------------------------------------------------------------------------------------------- runners


class Here:
    """Runs calls as plain ones, in this process.

    Args:
        rank: as which rank.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def put(self, x: Tensor, call: Call) -> Any:
        del call
        return x

    def call(self, call: Call, given: list[Any], module: nn.Module, shared: list[Tensor]) -> list[Tensor]:
        """The results of a call."""
        if call.kind in FAILURES:
            return []
        with torch.set_grad_enabled(torch.is_grad_enabled() and call.graded):
            if call.kind in ("split", "exclusive"):
                return [self._split(call, given, module, shared)]
            if call.kind == "map":
                items = items_of(call, given)
                return [added_up([item(each, call, module, shared, runner=self) for each in items])]
            found = []
            for share, worker in enumerate(call.workers):
                plain = call.plain_here and worker == self.rank
                tree = given if plain else apart(given)
                value = block(call, tree, module, share, runner=Here(worker))["results"]
                found.append(value if plain else apart(value))
            return _results(call, found)

    def _split(self, call: Call, given: list[Any], module: nn.Module, shared: list[Tensor]) -> Tensor:
        leaves = [x for x in pytree.flatten(given)[0] if isinstance(x, Tensor) and x.ndim]
        number = len(leaves[0])
        parts = number if call.kind == "exclusive" else min(number, len(call.workers))
        values = []
        for part in range(parts):
            tree = pytree.map_tensors(
                lambda x, part=part: x.tensor_split(parts)[part] if x.ndim else x, given
            )
            values.append(rows(call, tree, module, shared, runner=self))
        if call.reducer == "concatenate":
            return torch.cat(values)
        sizes = [len(part) for part in leaves[0].tensor_split(parts)]
        weights = [size / number if call.reducer == "mean" else 1.0 for size in sizes]
        return sum((w * value for w, value in zip(weights, values, strict=True)), torch.tensor(0.0))


def apart(tree: Any) -> Any:
    """The same values, in which one that is made from another cannot be differentiated with respect to it.

    So it is with what travels: a worker does not know how the caller made an argument, nor the caller how a result
    was made. A tensor that is there twice stays one tensor.
    """
    copies: dict[int, Tensor] = {}

    def copy(x: Tensor) -> Tensor:
        if id(x) not in copies:
            with torch.enable_grad():
                copies[id(x)] = x.clone() if x.requires_grad else x
        return copies[id(x)]

    return pytree.map_tensors(copy, tree)


def items_of(call: Call, given: list[Any]) -> list[dict[str, Any]]:
    """The items of a map."""
    same = call.options.get("vectorize")
    return [
        {"x": x, "form": form, "number": 0 if same else number, "more": [None, "text"]}
        for number, (x, (_, form)) in enumerate(zip(given, call.arguments, strict=True))
    ]


def added_up(values: list[dict[str, Tensor]]) -> Tensor:
    """The reducer of a map."""
    return torch.stack([value["sum"] for value in values]).sum(0)


def _results(call: Call, found: Sequence[list[Any]]) -> list[Tensor]:
    """The sum over the shares, for each result."""
    return [
        sum((restored(form, each[k]) for each in found[1:]), restored(form, found[0][k]))
        for k, (_, form) in enumerate(call.results)
    ]


class There:
    """Runs calls on workers."""

    def __init__(self) -> None:
        self.held: list[Any] = []  # handles, which live as long as the program may use them
        self.forgotten: list[threading.Event] = []
        self.balance = todist.Balance()

    def put(self, x: Tensor, call: Call) -> Any:
        handle = todist.put(x, self._partitioner(call) if call.kind in ("split", "exclusive") else None)
        self.held.append(handle)
        return handle

    def call(self, call: Call, given: list[Any], module: nn.Module, shared: list[Tensor]) -> Any:
        """The results of a call, or a future of them."""
        if call.kind in FAILURES:
            self._fail(call)
            return []
        with torch.set_grad_enabled(torch.is_grad_enabled() and call.graded):
            match call.kind:
                case "split" | "exclusive":
                    value = todist.remote_sync_call(
                        rows,
                        args=(call, given, module, todist.replicated(shared)),
                        partitioner=self._partitioner(call),
                        reducer=getattr(todist, f"{call.reducer}_reducer"),
                        **call.options,
                    )
                    return [value]
                case "map":
                    value = todist.map(
                        item,
                        items_of(call, given),
                        args=(call, module, shared),
                        reducer=added_up,
                        workers=call.workers,
                        balance=self.balance if call.balanced else None,
                        **call.options,
                    )
                    return [value]
            return self._block(call, given, module)

    def _block(self, call: Call, given: list[Any], module: nn.Module) -> Any:
        def partitioner(*shared: Any) -> list[Any]:
            return [(worker, (*shared, share), {}) for share, worker in enumerate(call.workers)]

        def reducer(values: list[dict[str, Any]]) -> list[Tensor]:
            assert all(value["text"] == "beside tensors" for value in values)
            return _results(call, [value["results"] for value in values])

        settings = {"partitioner": partitioner, "reducer": reducer, **call.options}
        if call.kind in ("sync", "spread"):
            return todist.remote_sync_call(block, args=(call, given, module), **settings)
        if call.kind == "closure":
            settings["partitioner"] = call.workers[0]
            return todist.remote_sync_call(lambda: block(call, given, module, 0), **settings)
        future = todist.remote_async_call(block, args=(call, given, module), **settings)
        if call.kind == "async":
            return future
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        self.forgotten.append(done)
        return []

    def _fail(self, call: Call) -> None:
        """Check that a failure is raised, and leaves no gradient."""
        x, fails = torch.linspace(0, 1, 5).requires_grad_(), int(call.reducer)
        if call.kind == "unsendable" and call.plain_here and fails == todist.get_rank():
            return  # and a plain call sends nothing
        error: BaseException | None = None
        try:
            todist.remote_sync_call(
                failing,
                partitioner=lambda: [(each, (x, call.kind, each == fails), {}) for each in call.workers],
                reducer=todist.sum_reducer if call.kind != "unsendable" else None,
                **call.options,
            ).backward()
        except Exception as raised:
            error = raised.with_traceback(None)
        assert isinstance(error, FAILURES[call.kind]), f"{call.kind}: {error!r}"
        assert x.grad is None, f"{call.kind}: {x.grad}"
        moves = "hedge_after" in call.options or (HEDGES and "retries" in call.options)
        if call.kind == "in forward" and not moves and fails != todist.get_rank():
            assert isinstance(error, todist.RemoteError)
            assert error.worker == f"worker{fails}", error.worker

    def settle(self) -> None:
        """Wait until nothing runs that was forgotten."""
        for done in self.forgotten:
            assert done.wait(60), "a call that nobody waits for has not ended after 60 s"

    def _partitioner(self, call: Call) -> Any:
        return todist.dim_partitioner(
            0,
            exclusive=call.kind == "exclusive",
            workers=call.workers,
            balance=self.balance if call.balanced else None,
        )
