"""Programs of users → what mypy says of them: which calls it refuses, and the types that it finds."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import torchopt_dist as todist
from torchopt_dist.distributed.messages.payload import ExecutionKwargs, ExecutionOptions

ROOT = Path(__file__).resolve().parents[1]
HEAD = """
import torch
from torch import Tensor, nn
import torchopt_dist as todist

net = nn.Linear(1, 1)
params = list(net.parameters())
rate = torch.tensor(0.1, requires_grad=True)

def loss(model: nn.Module, x: Tensor, *, scale: float = 1.0) -> Tensor:
    return model(x).sum() * scale

def count(results: list[Tensor]) -> int:
    return len(results)

def weigh(results: list[Tensor], sizes: list[int]) -> dict[int, Tensor]:
    return dict(zip(sizes, results))

def length(name: str, factor: float = 1.0) -> int:
    return len(name)

"""

TARGETS = {todist.Optimizer: "params", todist.MetaOptimizer: "net"}
CLASSES = [
    (name, target, thing)
    for name, thing in vars(todist).items()
    if isinstance(thing, type)
    for base, target in TARGETS.items()
    if issubclass(thing, base) and thing.transformation is not None
]


def required(cls: type) -> list[str]:
    """The arguments that a class of optimizers cannot do without, as they are written in a call."""
    _, *rest = inspect.signature(cls).parameters.values()
    return [f"{parameter.name}=0.1" for parameter in rest if parameter.default is parameter.empty]


CALL = "def (model: Module, x: Tensor, *, scale: float =) -> "

PROGRAM: list[tuple[str, str | None]] = [
    ("todist.MetaSGD(net, 0.1, momentum=0.9)", None),
    ("todist.MetaSGD(net)", None),
    ("todist.MetaSGD(lr=0.1)", 'Too few arguments for "MetaSGD"'),
    ("todist.MetaAdam(net, betas=(0.9, rate), lr=rate)", None),
    ("todist.MetaAdam(net, betas=0.9)", 'Argument "betas" to "MetaAdam" has incompatible type "float"'),
    ("todist.MetaSGD(params, lr=0.1)", 'Argument 1 to "MetaSGD" has incompatible type'),
    ("todist.MetaSGD(net, lr=0.1).step(net(rate))", None),
    ('todist.SGD([{"params": params, "lr": 0.2}], lr=lambda step: 0.1 / (1 + step))', None),
    ("reveal_type(todist.parallelize()(loss))", CALL + "list[Tensor]"),
    ("reveal_type(todist.parallelize(todist.tasks, todist.mean_reducer)(loss))", CALL + "Tensor"),
    ("reveal_type(todist.parallelize(reducer=todist.sum_reducer)(loss))", CALL + "Tensor"),
    ("reveal_type(todist.parallelize(reducer=count, timeout=3)(loss))", CALL + "int"),
    ("reveal_type(todist.parallelize(1, weigh, vectorize=True)(loss))", CALL + "dict[int, Tensor]"),
    ("reveal_type(todist.parallelize(1, lambda results, sizes: sum(sizes))(loss))", CALL + "int"),
    ("reveal_type(todist.parallelize(reducer=torch.stack)(loss))", CALL + "Tensor"),
    ("reveal_type(todist.parallelize_async()(loss))", CALL + "Future[list[Tensor]]"),
    ("reveal_type(todist.parallelize_async(reducer=todist.mean_reducer)(loss))", CALL + "Future[Tensor]"),
    ("todist.parallelize()(loss)(net)", "Too few arguments"),
    ("todist.parallelize()(loss)(net, rate, scal=2)", 'Unexpected keyword argument "scal"'),
    ("todist.parallelize(reducer=count)(length)", "has incompatible type"),
    ("todist.parallelize(vectorise=True)", '"vectorise"'),
    ('reveal_type(todist.map(length, ["a", "bc"]))', "list[int]"),
    ('reveal_type(todist.map(length, ["a"], kwargs={"factor": 2}, reducer=len, device="auto"))', "int"),
    ('reveal_type(todist.map(length, ["a"], reducer=lambda results, sizes: str(sizes)))', "str"),
    ("todist.map(length, [3])", 'Argument 1 to "map" has incompatible type'),
    ("reveal_type(todist.remote_call(loss, 1, net, rate, scale=2))", "Tensor"),
    ("todist.remote_call(loss, 1, net)", 'Missing positional argument "x"'),
    ("reveal_type(todist.auto_init_rpc()(loss))", CALL + "Tensor"),
    ("reveal_type(todist.typing.Restored(3, {}).step)", "int"),
    ("todist.paralelize()", 'Module has no attribute "paralelize"'),
    ("todist.parallelize_sync()", 'Module has no attribute "parallelize_sync"'),
    *(
        (f"todist.{name}({', '.join([target, *required(thing)])}, learning_rate=0.1)", "learning_rate")
        for name, target, thing in CLASSES
    ),
    *((f"todist.{name}({', '.join([target, *required(thing)])})", None) for name, target, thing in CLASSES),
]


def said_of_lines(folder: Path) -> dict[int, str]:
    """What mypy says of each line of the program, by its index; types without the names of modules."""
    file = folder / "program_of_a_user.py"
    file.write_text(HEAD + "\n".join(line for line, _ in PROGRAM) + "\n")
    # In the root, and so with its configuration and the cache that `make types` has filled.
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--no-pretty", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert not done.stderr, done.stderr
    found: dict[int, str] = {}
    # What is kept in the cache names the file as it was called then.
    for where, text in re.findall(rf"^.*{re.escape(file.name)}:(\d+): (.*)$", done.stdout, re.MULTILINE):
        index = int(where) - HEAD.count("\n") - 1
        found[index] = found.get(index, "") + re.sub(r"\b(?:\w+\.)+(?=\w)|(?<= =) \.\.\.", "", text) + "\n"
    assert not {index for index in found if index < 0}, done.stdout
    return found


def as_expected(line: str, expected: str | None, said: str) -> bool:
    """Whether mypy says of a line of the program what it should."""
    if expected is None:
        return not said
    if line.startswith("reveal_type"):
        return said.strip() == f'note: Revealed type is "{expected}"'
    return expected in said and "error: " in said


def test_mypy(tmp_path: Path) -> None:
    said = said_of_lines(tmp_path)
    wrong = [
        (line, expected, said.get(index))
        for index, (line, expected) in enumerate(PROGRAM)
        if not as_expected(line, expected, said.get(index, ""))
    ]
    assert not wrong


def test_a_class_takes_the_arguments_of_its_own_transformation() -> None:
    for _, _, cls in CLASSES:
        found = re.search(
            r"transformation=(\w+).*@arguments_of\((\w+), \w+\)", inspect.getsource(cls), re.DOTALL
        )
        assert found is not None, cls
        assert found[1] == found[2]


def test_overloads_have_all_options() -> None:
    hints = typing.get_type_hints(ExecutionOptions)
    assert hints == typing.get_type_hints(ExecutionKwargs)
    for decorator in (todist.parallelize, todist.parallelize_async):
        parameters = list(inspect.signature(decorator).parameters.values())
        overloads = typing.get_overloads(decorator)
        assert len(overloads) == 3
        for overload in overloads:
            names = [*inspect.signature(overload).parameters]
            assert names == [p.name for p in parameters]
