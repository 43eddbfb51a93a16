"""Large frames of a process of this machine → the same bytes in another one, by one copy that the kernel makes.

The sender lends its memory: it tells where the bytes are and leaves them there until the message is confirmed or its
link is closed. The receiver reads them out of the sender's memory. Nothing has a name or a descriptor, so nothing can
be left behind.

A loan has a token, which lies in the sender's memory, too, and is read after the bytes. It is another one if the number
of the process is another process's, as in another container; and it is erased before the memory is used for anything
else. In both cases the bytes are refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchopt_dist.distributed.serialization.frames import Frame, new_memory

__all__ = ["LARGE", "can_lend", "erase", "lend", "let_siblings_read", "new_token", "read"]

LARGE = 1 << 18
"""Bytes of a message from which on its large frames are lent."""
PR_SET_PTRACER = 0x59616D61
TOKEN = 16
_PLACE = struct.Struct("<QQ")
_LOAN = struct.Struct(f"<QQ{TOKEN}s")
"""The sender's process, and its token with its place; then follow the places of the frames."""

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

_LIBRARY: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
if hasattr(_LIBRARY, "process_vm_readv"):
    _PLACES = ctypes.c_void_p, ctypes.c_ulong
    _LIBRARY.process_vm_readv.argtypes = ctypes.c_int, *_PLACES, *_PLACES, ctypes.c_ulong
    _LIBRARY.process_vm_readv.restype = ctypes.c_ssize_t


def can_lend() -> bool:
    """Whether this system lets a process read another one's memory at all."""
    return hasattr(_LIBRARY, "process_vm_readv")


def let_siblings_read() -> None:
    """Let the processes that this one's parent has started read its memory, where only ancestors may (Yama's 1)."""
    with contextlib.suppress(OSError):
        if _YAMA.read_text().strip() == "1":
            _LIBRARY.prctl(PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def new_token() -> ctypes.Array[ctypes.c_char]:
    """A token for loans, valid until it is erased."""
    return ctypes.create_string_buffer(secrets.token_bytes(TOKEN), TOKEN)


def erase(token: ctypes.Array[ctypes.c_char]) -> None:
    """End all loans with this token."""
    token.raw = bytes(TOKEN)


def lend(frames: Sequence[Frame], token: ctypes.Array[ctypes.c_char]) -> bytes:
    """What the receiver has to know to read these frames, which stay as they are as long as the token is valid."""
    places = (_PLACE.pack(_address(frame), len(frame)) for frame in frames)
    return b"".join([_LOAN.pack(os.getpid(), ctypes.addressof(token), token.raw), *places])


def read(loan: Frame) -> list[Frame]:
    """The lent frames, copied here; raises ``OSError`` if they cannot be read, or not any more."""
    process, address, token = _LOAN.unpack_from(loan)
    frames: list[Frame] = [
        _copy(process, *place) for place in _PLACE.iter_unpack(memoryview(loan)[_LOAN.size :])
    ]
    if bytes(_copy(process, address, TOKEN)) != token:
        raise OSError(errno.ESTALE, f"process {process} does not lend this memory")
    return frames


def _address(frame: Frame) -> int:
    return int(np.frombuffer(frame, np.uint8).ctypes.data)


def _copy(process: int, address: int, size: int) -> memoryview:
    """Bytes of a process, in memory of this one that begins where a tensor's does."""
    memory = new_memory(size)
    done = 0
    while done < size:
        here, there = (
            (ctypes.c_size_t * 2)(place + done, size - done) for place in (memory.ctypes.data, address)
        )
        count = _LIBRARY.process_vm_readv(process, here, 1, there, 1, 0)
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"the memory of process {process} cannot be read: {os.strerror(number)}")
        done += count
    return memory.data
