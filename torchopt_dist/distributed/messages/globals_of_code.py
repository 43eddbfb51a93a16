"""Functions that are sent as code → the tensors that only their global variables hold, and a warning of much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

__all__ = ["MUCH_CODE", "GlobalsOfCode", "description_of_much"]

MUCH_CODE = 1 << 20
"""Bytes from which on the global variables that go with the code of a function are warned of."""


@dataclass
class GlobalsOfCode:
    """What a pickler meets in the global variables of functions whose code it sends.

    Attributes:
        inside: whether it is at these variables now.
        numbers: of the tensors that have been met nowhere else.
        pickled: how many bytes of the pickle the variables take.
    """

    inside: bool = False
    numbers: set[int] = field(default_factory=set)
    variables: dict[str, Any] = field(default_factory=dict)
    pickled: int = 0

    def met(self, number: int, *, is_new: bool) -> None:
        """A tensor is met, in global variables or elsewhere."""
        if not self.inside:
            self.numbers.discard(number)
        elif is_new:
            self.numbers.add(number)

    def nbytes(self, tensors: Sequence[Tensor]) -> int:
        """How many bytes they take, of the pickle and of tensors."""
        return self.pickled + sum(tensors[number].nbytes for number in self.numbers)


def description_of_much(
    name: str, globals_of_code: GlobalsOfCode, nbytes: int, size: Callable[[Any], int]
) -> str:
    """The warning that the code of a function takes much with it; ``size`` tells how many bytes an object takes."""
    sizes = {
        variable: size(value)
        for variable, value in globals_of_code.variables.items()
        if not isinstance(value, (FunctionType, ModuleType))
    }
    largest = sorted(sizes, key=lambda variable: -sizes[variable])[:3]
    listed = ", ".join(
        f"`{variable}` ({sizes[variable] / 1e6:.1f} MB)"
        for variable in largest
        if 10 * sizes[variable] >= sizes[largest[0]]
    )
    return (
        f"`{name}` is sent as code, since the workers do not find it by name, and with it {nbytes / 1e6:.1f} MB of "
        f"global variables{listed and ': '}{listed}. This is sent in each call: make it an argument, which "
        "`todist.put` sends once, or keep it in a module that the workers import"
    )
