"""A function whose docstring says in a word what many say → the same with the whole text, in the place of the word."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["documented"]

F = TypeVar("F", bound=Callable[..., Any])

_ENTRIES = """
lr: learning rate.
    learning rate: a number that is at least 0, a tensor of one element, a schedule (the number of steps made so
    far → a learning rate), or a tree of numbers and tensors, one for each parameter.
weight_decay: L2 penalty.
    how much of a parameter is added to its gradient (L2 penalty), at least 0; a number or a tensor of one
    element.
weight_decay: decoupled.
    decoupled, at least 0; a number or a tensor of one element.
mask: which parameters decay.
    which parameters decay: a pattern of their names, such as ``"*.weight"``, or a list of patterns; a tree of bools
    of the parameters' structure, or a function from the parameters to such a tree. All, if not given. For a class
    that moves parameters in place these are the list of a group's, which have no names.
betas: decays of the averages of the gradients and of their squares.
    decays of the running averages of the gradients and of their squares, at least 0 and below 1; numbers or tensors
    of one element.
b1: decay of the average of the gradients.
    decay of the average of the gradients; a number that is at least 0 and below 1, or a tensor of one element, which
    may require grad.
eps: added to the root.
    added to the root, at least 0; a number or a tensor of one element. The root's derivative at 0 is taken to be 0,
    which is the limit as the gradient goes to 0.
eps: added to the denominator.
    added to the denominator, at least 0; a number or a tensor of one element.
amsgrad: divide by the largest average of the squares so far.
    divide by the largest average of the squares so far. There is no kernel for it: its formula runs. [Reddi, Kale
    and Kumar 2018, On the Convergence of Adam and Beyond.]
moment_requires_grad: leaves at the start.
    make the tensors of the initial state leaves that require grad, so that one can differentiate with respect to
    them.
fused: whether a kernel runs.
    ``None`` uses a kernel where there is one and it helps, ``False`` never uses one, ``True`` raises an error where
    there is none.
"""
_TEXTS: dict[str, str] = dict(re.findall(r"^(\w+: .*)\n((?: +.*\n)+)", _ENTRIES, re.MULTILINE))
_ERRORS = """\
    TypeError: an argument has the wrong type.
    ValueError: a number is out of its range, or a tensor has more than one element.
"""


def documented(function: F) -> F:
    """Write out the docstring of a function that makes a transformation, for ``help``, editors and the documentation.

    An entry of ``Args`` such as ``lr: learning rate.`` gets the text that is here, and the errors of wrong arguments
    are listed before those that the function has beside them.
    """
    if function.__doc__ is None:  # python -OO
        return function
    text = inspect.cleandoc(function.__doc__) + "\n"
    for entry, whole in _TEXTS.items():
        written = f"{entry.partition(':')[0]}: {' '.join(whole.split())}"
        lines = textwrap.wrap(written, 106, subsequent_indent="    ", break_on_hyphens=False)
        text = text.replace(f"    {entry}\n", textwrap.indent("\n".join(lines) + "\n", "    "))
    if "Raises:\n" in text:
        text = text.replace("Raises:\n", f"Raises:\n{_ERRORS}")
    else:
        text = text.replace("Example:\n", f"Raises:\n{_ERRORS}\nExample:\n")
    function.__doc__ = text
    return function
