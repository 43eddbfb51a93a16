"""Torch's tracer: what it is given, and which numbers a program has as inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from threading import RLock
from typing import Any

import torch
from torch import Tensor

_one_at_a_time = RLock()
"""Torch's tracer replaces a method of all modules meanwhile, for all threads."""


class Trace:
    """What stands for the inputs of a function that is traced: tensors without values, and numbers that are unknown.

    A comparison of such a number has the answer that its value gives, which is a condition of the trace.
    """

    def __init__(self) -> None:
        symbolic: Any = import_module("torch.fx.experimental.symbolic_shapes")
        self._env = symbolic.ShapeEnv(specialize_zero_one=False, duck_shape=False, allow_scalar_outputs=True)
        self._how = {"source": None, "dynamic_dim": symbolic.DimDynamic.DYNAMIC}
        self.mode: AbstractContextManager[Any] = import_module(
            "torch._subclasses.fake_tensor"
        ).FakeTensorMode(shape_env=self._env)
        self._numbers: list[Any] = []

    def tensor(self, tensor: Tensor) -> Tensor:
        """What stands for a tensor; it has no history."""
        mode: Any = self.mode
        plain = tensor.clone() if tensor.is_inference() else tensor.detach()
        made: Tensor = mode.from_tensor(plain, static_shapes=True)
        return made

    def number(self, value: float) -> Any:
        """What stands for a number among the inputs; see :meth:`of_input`."""
        name = f"__number_{len(self._numbers)}"
        self._how["source"] = import_module("torch._dynamo.source").ConstantSource(name)
        symbol = self._env.create_unspecified_symbol(value, **self._how)
        make = self._env.create_symintnode if isinstance(value, int) else self._env.create_symfloatnode
        number = make(symbol, hint=value, source=self._how["source"])
        self._numbers.append(number)
        if isinstance(value, int):
            return number
        made: Any = self.tensor(torch.tensor(value, dtype=torch.float64))
        made.item_memo = number  # as the compiler has them: it makes products and sums of tensors of them
        return made

    @staticmethod
    def of_input(value: Any) -> Any:
        """In the function: a number, of what stands for it among the inputs."""
        return value.item() if isinstance(value, Tensor) else value

    def graph(self, function: Callable[..., list[Tensor]], inputs: Sequence[Any]) -> Any:
        """The graph of a function of what stands for its inputs.

        Raises:
            Exception: of any kind, where what the function does depends on values of tensors.
        """
        make_fx: Any = import_module("torch.fx.experimental.proxy_tensor").make_fx
        with _one_at_a_time, self.mode:
            return make_fx(function)(*inputs)

    def condition(self) -> Callable[[Sequence[int | float]], bool] | None:
        """Whether other values of the numbers would make the same program; ``None`` if all do.

        It is known when the graph is compiled.
        """
        code = self._env.produce_guards_expression(self._numbers)
        if not self._numbers or code is None or code == "True":
            return None
        env = self._env
        return lambda values: bool(env.evaluate_guards_expression(code, list(values)))


def original_of(function: Any) -> Any:
    """The function that a compiled one was made of; ``None`` for one that is not.

    Without the name the answer is always ``None``: where a name that a compiled loss reads was bound anew before the
    backward pass, a copy of what the compiler has put around it may find the new meaning.
    """
    return vars(function).get("_torchdynamo_orig_callable")
