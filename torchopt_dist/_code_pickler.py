"""Functions and classes that the receiver cannot import → bytes, by cloudpickle, with the names of their files."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import CodeType
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


def _code_of(filename: str, make: Callable[..., CodeType], args: tuple[Any, ...]) -> CodeType:
    return make(*args).replace(co_filename=filename)


def dumps(value: object) -> bytes:
    """Pickle a value."""
    file = io.BytesIO()
    CodePickler(file).dump(value)
    return file.getvalue()
