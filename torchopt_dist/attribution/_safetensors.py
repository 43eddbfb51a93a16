"""Named tensors and texts ⇄ a file of the safetensors format: a length, a header in JSON, and the bytes.

The format is that of https://huggingface.co/docs/safetensors. Reading it runs nothing that a file contains.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["read", "write"]

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
_DTYPES |= {"U8": torch.uint8, "BOOL": torch.bool}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LIMIT = 100_000_000
"""So many bytes a header has at most."""


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write a file, which has its name when it is whole.

    Raises:
        OSError: it cannot be written, for example to a full disk; a file of that name is as it was.
    """
    header: dict[str, Any] = {"__metadata__": dict(texts)}
    parts, at = [], 0
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        data = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        header[name] = {
            "dtype": _NAMES[flat.dtype],
            "shape": list(flat.shape),
            "data_offsets": [at, at + len(data)],
        }
        parts.append(data)
        at += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(".tmp", f".{path.name}-", path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(len(head).to_bytes(8, "little"))
            for data in (head, *parts):
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
        OSError: the file cannot be read.
        ValueError: it is torn, or is no file of this format.
    """
    data = Path(path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    try:
        if len(data) < 8 or length > min(_LIMIT, len(data) - 8):
            raise ValueError(f"its header has {length:,} bytes, and the file {len(data):,}")
        header: dict[str, Any] = json.loads(data[8 : 8 + length])
        texts = {str(name): str(text) for name, text in header.pop("__metadata__", {}).items()}
        body, found = data[8 + length :], {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            shape, dtype = [int(size) for size in entry["shape"]], _DTYPES[entry["dtype"]]
            count = torch.Size(shape).numel()
            if not 0 <= begin <= end <= len(body) or end - begin != count * dtype.itemsize:
                raise ValueError(f"{name!r} is not all there")
            part = bytearray(body[begin:end])
            flat = torch.frombuffer(part, dtype=dtype) if count else torch.empty(0, dtype=dtype)
            found[name] = flat.reshape(shape)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{os.fspath(path)!r} is torn, or is no file of safetensors: {error}") from error
    return found, texts
