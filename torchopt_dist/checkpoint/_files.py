"""A folder → its checkpoints; contents → a checkpoint, whole or not at all; a checkpoint → its contents, or an error.

A checkpoint is one file, which ``torch.load(path, weights_only=True)`` reads. Its name has the step, the score if there
is one, and the first 16 digits of the SHA-256 of its bytes, so one rename makes all of them visible, and ``sha256sum``
checks it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import pickle
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from torchopt_dist.errors import CheckpointError

__all__ = ["CheckpointFile", "CorruptFileError", "best", "find", "prune", "read", "write"]

_NAME = re.compile(
    r"step-(\d+)(?:-score_(-?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|inf)))?-([0-9a-f]{16})\.pt", re.ASCII
)
_TEMPORARY = ".step-", ".tmp"
_DIGITS = 16


class CorruptFileError(Exception):
    """A file does not have the bytes that were written; the message says how this was found."""


class CheckpointFile(NamedTuple):
    """A file that has the name of a checkpoint."""

    step: int
    checksum: str
    path: Path
    score: float | None = None


class _HashingFile(io.FileIO):
    """A file that computes the SHA-256 of what is written.

    An error of a write is kept for :meth:`check`, as torch's writer would turn it into one of its own.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb")
        self._hash = hashlib.sha256()
        self._error: OSError | None = None

    def write(self, data: Any, /) -> int:
        view = memoryview(data)
        try:
            count = len(view) if self._error is not None else super().write(view)
        except OSError as error:
            self._error, count = error, len(view)
        self._hash.update(view[:count])
        return count

    def check(self) -> None:
        """Raise the first error there was."""
        if self._error is not None:
            raise self._error

    def checksum(self) -> str:
        return self._hash.hexdigest()[:_DIGITS]


def find(folder: Path) -> list[CheckpointFile]:
    """The checkpoints of a folder, the highest step first; of two of one step the one written last."""
    found: list[tuple[int, int, CheckpointFile]] = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is not None and entry.is_file():
                with contextlib.suppress(FileNotFoundError):  # pruned by another process meanwhile
                    score = None if match[2] is None else float(match[2])
                    file = CheckpointFile(int(match[1]), match[3], Path(entry.path), score)
                    found.append((file.step, entry.stat().st_mtime_ns, file))
    return [file for _, _, file in sorted(found, reverse=True)]


def best(files: Iterable[CheckpointFile]) -> CheckpointFile | None:
    """The file of the highest score, of equal ones the first; ``None`` if none has a score."""
    scored = [(file.score, file) for file in files if file.score is not None]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


def write(folder: Path, step: int, contents: dict[str, Any], score: float | None = None) -> CheckpointFile:
    """Write a checkpoint: to a temporary file, and to the disk, before it gets its name.

    Raises:
        OSError: the file cannot be written, for example to a full disk; the folder is as it was.
    """
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        prefix, suffix = _TEMPORARY
        descriptor, temporary = tempfile.mkstemp(suffix, prefix, folder)  # of mode 0600
        hashing = _HashingFile(descriptor)
        with io.BufferedWriter(hashing) as file:
            with contextlib.suppress(OSError):  # a file system without locks
                _lock(file, wait=True)
            torch.save(contents, file)
            file.flush()
            hashing.check()
            os.fsync(file.fileno())
            scored = "" if score is None else f"-score_{score!r}"
            path = folder / f"step-{step:09d}{scored}-{hashing.checksum()}.pt"
            os.rename(temporary, path)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, OSError) and error.errno is not None:
            told = f"{error.strerror}: the checkpoint of step {step} is not written, and the older ones are still there"
            raise OSError(error.errno, told, str(folder)) from error
        raise
    _sync(folder)
    return CheckpointFile(step, hashing.checksum(), path, score)


def read(file: CheckpointFile) -> Any:
    """The contents of a checkpoint, its tensors on the CPU.

    Raises:
        CorruptFileError: the file's bytes are not those that were written, or cannot be read.
        CheckpointError: the file is whole, but holds something else than plain values and tensors.
    """
    try:
        with file.path.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()[:_DIGITS]
            if found != file.checksum:
                size = os.fstat(opened.fileno()).st_size
                raise CorruptFileError(
                    f"the SHA-256 of its {size} bytes begins with {found}, and not as its name says"
                )
            opened.seek(0)
            try:
                return torch.load(opened, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                raise CheckpointError(
                    f"{file.path} must have plain values and tensors only, and no code, got something else: it was not "
                    "written by a Checkpointer"
                ) from error
    except OSError as error:
        if error.errno == errno.EIO:
            raise CorruptFileError(f"the disk cannot read it: {error.strerror}") from error
        raise


def prune(folder: Path, written: CheckpointFile, keep: int | None, corrupt: set[str]) -> None:
    """Remove what a new checkpoint makes superfluous; the best one stays.

    Args:
        folder: the folder.
        written: the new checkpoint; others of its step go.
        keep: how many to keep; ``None`` means all.
        corrupt: names of files that are known to be corrupt; these go, and do not count.
    """
    others = [file for file in find(folder) if file.path != written.path]
    superfluous = [file for file in others if file.step == written.step or file.path.name in corrupt]
    if keep is not None:
        rest = [file for file in others if file not in superfluous]
        stays = best([written, *rest])
        superfluous += [file for file in rest[keep - 1 :] if file is not stays]
    for file in superfluous:
        with contextlib.suppress(FileNotFoundError):
            file.path.unlink()


def _remove_abandoned(folder: Path) -> None:
    """Remove temporary files of writers that were killed; those of living ones are locked."""
    prefix, suffix = _TEMPORARY
    for path in folder.glob(f"{prefix}*{suffix}"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            _lock(file, wait=False)
            path.unlink()


def _lock(file: IO[bytes], *, wait: bool) -> None:
    """Lock a file; Windows has no such lock, and lets nobody unlink a file that is open.

    Raises:
        OSError: another process has it locked, and ``wait`` is false; or there are no locks.
    """
    with contextlib.suppress(ImportError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _sync(folder: Path) -> None:
    """Write the names in a folder to the disk (``fsync``), where folders can be opened: not on Windows."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
