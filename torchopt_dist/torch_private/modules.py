"""Modules of ``torch.nn``: the dictionaries in which they keep what is theirs, and the record of their backward hooks.

A graph holds this record, and the record its module. The parameters of a moved clone are of that graph, so the two hold
each other, by nodes in C++ through which Python's garbage collector does not see.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchopt_dist.core.types import TensorContainer
from torchopt_dist.torch_private.lookup import find


def parameters_of(module: nn.Module) -> TensorContainer:
    """The dictionary in which a module keeps its own parameters, sub-modules' not among them.

    A tensor with a history can be put in; assigning one to the module's attribute is refused by torch.

    Raises:
        RuntimeError: the name is missing; then no module can be cloned, recovered or stepped differentiably.
    """
    try:
        return module._parameters  # type: ignore[return-value]
    except AttributeError:
        raise _missing(module, "_parameters") from None


def set_parameters(module: nn.Module, parameters: TensorContainer) -> None:
    """Put another dictionary in the place of :func:`parameters_of`, and fail as it does without the name."""
    own = vars(module)
    if "_parameters" not in own:
        raise _missing(module, "_parameters")
    own["_parameters"] = parameters


def buffers_of(module: nn.Module) -> TensorContainer:
    """The dictionary in which a module keeps its own buffers; otherwise as :func:`parameters_of`."""
    try:
        return module._buffers
    except AttributeError:
        raise _missing(module, "_buffers") from None


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dictionary in which a module keeps its own sub-modules; otherwise as :func:`parameters_of`."""
    try:
        return module._modules
    except AttributeError:
        raise _missing(module, "_modules") from None


def drop_compiled_call(attributes: dict[str, Any]) -> None:
    """Drop what ``module.compile()`` has set from a copy of a module's attributes: it calls that module.

    Without the name a copy of such a module computes with the parameters of the original.
    """
    attributes.pop("_compiled_call_impl", None)


_REGISTERS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_OF_ALL = frozenset(vars(nn.Module())) - {"training", *_REGISTERS}


def attributes_for_forward(module: nn.Module) -> tuple[list[str], list[dict[Any, Any]]]:
    """The names of a module's attributes that may mean something for its forward; the dictionaries among them.

    Without the names the dictionaries are found as other attributes are, as far as they are short.
    """
    own = vars(module)
    registers = [own.get(name) for name in _REGISTERS]  # those of TorchScript are no dictionaries
    return [name for name in own if name not in _OF_ALL], [one for one in registers if isinstance(one, dict)]


def hooks_of_all_modules() -> list[dict[Any, Any]]:
    """The hooks that torch calls for each module, of each kind of which there are any.

    Without the names there are none: a program then does not know that one was added.
    """
    every = vars(nn.modules.module)
    names = [name for name in every if name.startswith("_global_") and name.endswith("_hooks")]
    return [every[name] for name in names if every[name]]


def has_forward_hook(module: nn.Module, hook: Any) -> bool:
    """Whether a function is among the hooks of a module that get its results.

    Without the name it never is: a hook of which one is enough is registered once more.
    """
    return hook in getattr(module, "_forward_hooks", {}).values()


def _missing(module: nn.Module, name: str) -> RuntimeError:
    if isinstance(module, torch.jit.ScriptModule):
        return RuntimeError(
            f"a {type(module).__name__} does not show its parameters, which are TorchScript's: give the module that "
            "was scripted or traced, or `todist.module_clone` of this one"
        )
    return RuntimeError(
        f"torchopt_dist needs the attribute `{name}` of torch.nn.Module, which a {type(module).__name__} does not "
        f"have in torch {torch.__version__}: use another version of torch"
    )


_originals: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
"""The parts of clones that have backward hooks → those of the modules that were cloned."""


def let_graphs_drop(parts: Sequence[nn.Module], originals: Sequence[nn.Module]) -> None:
    """Have graphs not hold the parts of a clone by their backward hooks; a hook is given the original in its place.

    While the clone lives, its hooks are given its own parts. Without the names a clone with backward hooks stays in
    memory for good.

    Args:
        parts: those of the clone.
        originals: those of the module, in the same order.
    """
    for part, original in zip(parts, originals, strict=True):
        if getattr(part, "_backward_hooks", None) or getattr(part, "_backward_pre_hooks", None):
            _originals[part] = _originals.get(original, original)
            _let_go()


def _let_go() -> None:
    """Put the other class where modules look for torch's: among their own names, or, in some versions, in its home."""
    for home in map(find, ("nn.modules.module", "utils.hooks")):
        plain = getattr(home, "BackwardHook", None)
        if plain is not None and not hasattr(plain, "lets_clones_go"):
            home.BackwardHook = _letting_go(plain)


def _letting_go(plain: Any) -> Any:
    class BackwardHook(plain):
        """As torch's, but for clones."""

        lets_clones_go = True

        @property
        def module(self) -> nn.Module | None:
            part = self._part()
            return self._original if part is None else part

        @module.setter
        def module(self, part: nn.Module) -> None:
            self._original = _originals.get(part)
            self._part = (lambda: part) if self._original is None else weakref.ref(part)

    return BackwardHook
