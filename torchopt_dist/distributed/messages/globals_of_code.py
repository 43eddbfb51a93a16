"""Functions that are sent as code → which tensors only their global variables hold, and a warning if these take much.

Python's pickler is not told where a part of an object belongs. So the global variables of a function are pickled
between two objects, and whatever is met for the first time between these is met in global variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

__all__ = ["MUCH_CODE", "Beginning", "End", "GlobalsOfCode", "description_of_much", "enclosed"]

MUCH_CODE = 1 << 20
"""Bytes from which on the global variables that go with the code of a function are warned of."""


class GlobalsOfCode:
    """What a pickler meets in the global variables of functions whose code it sends.

    Attributes:
        depth: of how many functions the global variables are being pickled, one inside another.
        numbers: of the tensors that have been met nowhere else.
        pickled: how many bytes of the pickle the variables take.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.numbers: set[int] = set()
        self.variables: dict[str, Any] = {}
        self.pickled = 0
        self._began = 0

    def begin(self, variables: dict[str, Any], position: int) -> None:
        """The pickler comes to the variables of a function, at this position of its file."""
        if not self.depth:
            self._began = position
        self.depth += 1
        self.variables.update(variables)

    def end(self, position: int) -> None:
        """The pickler has written them."""
        self.depth -= 1
        if not self.depth:
            self.pickled += position - self._began

    def met(self, number: int, *, is_new: bool, elsewhere: bool) -> None:
        """A tensor is met, in global variables or elsewhere."""
        if not elsewhere and is_new:
            self.numbers.add(number)
        elif elsewhere:
            self.numbers.discard(number)

    def nbytes(self, tensors: Sequence[Tensor]) -> int:
        """How many bytes they take, of the pickle and of tensors."""
        return self.pickled + sum(tensors[number].nbytes for number in self.numbers)

    def matter(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it is of importance that they are met nowhere else."""
        needed = any(tensors[number].requires_grad for number in self.numbers)
        return needed or self.nbytes(tensors) > MUCH_CODE


class Beginning:
    """In a pickle: the global variables of a function, which begin here."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self.variables = variables


class End:
    """In a pickle: the end of these variables."""


def enclosed(variables: dict[str, Any], end: None) -> dict[str, Any]:
    """In a pickle: the variables that an :class:`End` follows."""
    del end
    return variables


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
