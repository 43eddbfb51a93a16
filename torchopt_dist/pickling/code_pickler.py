"""Functions and classes that the receiver cannot import → bytes, by cloudpickle, with the names of their files."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import cloudpickle
import torch

from torchopt_dist.pickling.wrapped_functions import reduce_wrapped

__all__ = ["CodePickler", "dumps", "name_of_op", "op_of_torch"]


class CodePickler(cloudpickle.Pickler):
    """cloudpickle's pickler; code keeps the name of its file, so that tracebacks show its lines.

    Version 3.1.3 of cloudpickle writes ``<dynamic-code>`` in its place.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Operations of torch, code and wrapped functions are made by ours, anything else as cloudpickle does."""
        if (op := name_of_op(obj)) is not None:
            return op_of_torch, (op,)
        if type(obj) is CodeType:
            # A string of its own, as cloudpickle does it: what is shared would change the bytes.
            return _code_of, ("".join(obj.co_filename), *self.dispatch_table[CodeType](obj))
        reduced = reduce_wrapped(obj, self.is_found_by_name)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced

    def is_found_by_name(self, obj: Any) -> bool:
        """Whether the receiver finds an object under its module and name."""
        name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", "")
        return cloudpickle.cloudpickle._lookup_module_and_qualname(obj, name) is not None

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


_KINDS_OF_OPS = frozenset((type(torch.ops.aten.relu), type(torch.ops.aten.relu.default)))


def name_of_op(obj: object) -> str | None:
    """The path under ``torch.ops`` of what is there, such as ``aten.relu.default`` or ``aten.relu``."""
    return str(obj) if type(obj) in _KINDS_OF_OPS else None


def op_of_torch(path: str) -> Any:
    """What is under ``torch.ops``, which pickle itself cannot send."""
    found: Any = torch.ops
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _code_of(filename: str, make: Callable[..., CodeType], args: tuple[Any, ...]) -> CodeType:
    return make(*args).replace(co_filename=filename)


class _ForeignPickler(CodePickler):
    """For a receiver that runs another program: modules that only this program can have are sent by value."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType):
            if not _is_importable(obj.__name__):
                state = {name: part for name, part in vars(obj).items() if name not in _OF_IMPORT}
                return cloudpickle.cloudpickle.dynamic_subimport, (obj.__name__, state)
        elif isinstance(obj, (type, FunctionType, TypeVar)) and not _is_importable(obj.__module__):
            if isinstance(obj, TypeVar):
                theirs = cloudpickle.cloudpickle
                return theirs._make_typevar, theirs._decompose_typevar(obj)
            reduced = reduce_wrapped(obj, self.is_found_by_name)
            if reduced is not NotImplemented:
                return reduced
            if isinstance(obj, type):
                return cloudpickle.cloudpickle._dynamic_class_reduce(obj)
            return self._dynamic_function_reduce(obj)
        return super().reducer_override(obj)

    def is_found_by_name(self, obj: Any) -> bool:
        return _is_importable(obj.__module__) and super().is_found_by_name(obj)


_OF_IMPORT = {"__builtins__", "__loader__", "__spec__"}


def _main_names() -> set[str]:
    """The names of the module that runs as a script; a child of ``multiprocessing`` has it under two."""
    main = sys.modules.get("__main__")
    return {"__main__", *(["__mp_main__"] if sys.modules.get("__mp_main__") is main else [])}


def _is_importable(name: str | None) -> bool:
    """Whether another program that has the same ``sys.path`` can import a loaded module.

    It cannot where the module's package was put into ``sys.modules`` by hand, from a file that no path leads to.
    """
    module = sys.modules.get(name or "")
    if module is None:
        return True  # cloudpickle's to decide
    if name in _main_names():
        return False
    file = getattr(module, "__file__", None)
    package = str(name).partition(".")[0]
    return file is None or _is_found(package, tuple(sys.path), len(sys.meta_path))


@lru_cache(maxsize=1024)
def _is_found(package: str, path: tuple[str, ...], finders: int) -> bool:
    """Whether there is a module or a package of that name; ``sys.modules`` is not asked."""
    del path, finders  # others, another answer
    found = (finder.find_spec(package, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return any(spec is not None for spec in found)


def dumps(value: object) -> bytes:
    """Pickle a value for another program, such as a worker that a launch starts."""
    file = io.BytesIO()
    _ForeignPickler(file).dump(value)
    return file.getvalue()
