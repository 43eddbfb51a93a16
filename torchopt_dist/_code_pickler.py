"""Functions and classes that the receiver cannot import → bytes, by cloudpickle, with the names of their files."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

__all__ = ["CodePickler", "dumps"]


class CodePickler(cloudpickle.Pickler):
    """cloudpickle's pickler; code keeps the name of its file, so that tracebacks show its lines.

    Version 3.1.3 of cloudpickle writes ``<dynamic-code>`` in its place.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is CodeType:
            # A string of its own, as cloudpickle does it: what is shared would change the bytes.
            return _code_of, ("".join(obj.co_filename), *self.dispatch_table[CodeType](obj))
        return super().reducer_override(obj)

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        """As cloudpickle's, which looks through all modules at each call, a millisecond where torch has compiled."""
        if _state_of is None:
            return super()._dynamic_function_reduce(func)
        theirs = cloudpickle.cloudpickle
        made = self._function_getnewargs(func)
        return theirs._make_function, made, _state_of(func), None, None, theirs._function_setstate


def _submodules_of(code: CodeType, values: Iterable[Any]) -> list[ModuleType]:
    """The loaded parts of packages that a function names."""
    packages = tuple(one for one in values if isinstance(one, ModuleType) and bool(one.__package__))
    if not packages:
        return []
    loaded = len(sys.modules), next(reversed(sys.modules))
    return list(_submodules(packages, frozenset(code.co_names), loaded))


@lru_cache(maxsize=256)
def _submodules(
    packages: tuple[ModuleType, ...], names: frozenset[str], loaded: tuple[int, str]
) -> tuple[ModuleType, ...]:
    del loaded  # other modules, another answer
    modules = dict(sys.modules)
    return tuple(
        modules[name]
        for package in packages
        for name in modules
        if name.startswith(f"{package.__name__}.")
        and names.issuperset(name.split(".")[package.__name__.count(".") + 1 :])
    )


def _with_a_memory() -> Callable[[FunctionType], Any] | None:
    """How cloudpickle takes a function apart, with our lookup of modules; ``None`` where it has changed."""
    theirs: Any = cloudpickle.cloudpickle
    state = getattr(theirs, "_function_getstate", None)
    needed = ("_find_imported_submodules", "_make_function", "_function_setstate")
    if not isinstance(state, FunctionType) or not all(hasattr(theirs, name) for name in needed):
        return None
    return FunctionType(state.__code__, {**vars(theirs), needed[0]: _submodules_of})


_state_of = _with_a_memory()


def _code_of(filename: str, make: Callable[..., CodeType], args: tuple[Any, ...]) -> CodeType:
    return make(*args).replace(co_filename=filename)


def dumps(value: object) -> bytes:
    """Pickle a value."""
    file = io.BytesIO()
    CodePickler(file).dump(value)
    return file.getvalue()
