"""Named tensors and texts ⇄ a file of the safetensors format, which has its name when it is whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

__all__ = ["read", "write"]

INSTALL = "the file needs safetensors, which cannot be imported: pip install 'torchopt_dist[attribution]'"


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write a file.

    Raises:
        ImportError: safetensors is not installed.
        OSError: it cannot be written, for example to a full disk; a file of that name is as it was.
    """
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise ImportError(INSTALL) from error
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, dict(texts))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(".tmp", f".{path.name}-", path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and its texts.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the file cannot be read.
        ValueError: it is torn, or is no file of this format.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(INSTALL) from error
    Path(path).open("rb").close()  # an error of the system's says more
    try:
        with safe_open(path, "pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{os.fspath(path)!r} is torn, or is no file of safetensors: {error}") from error
