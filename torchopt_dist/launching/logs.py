"""The standard output and error of workers → lines → logging handlers, files, and the last lines in errors."""

from __future__ import annotations

import codecs
import collections
import contextlib
import io
import logging
import os
import secrets
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TextIO

from torchopt_dist.launching.options import check_handler, check_integer

__all__ = ["LineSplitter", "TerminalHandler", "WorkerLogs", "log_folder", "on_ranks"]

log = logging.getLogger(__package__)

VARIABLE, DEFAULT = "TODIST_LOG_DIR", "todist_logs"
LONGEST_LINE = 1 << 20
TAIL_LINES = 100
LEVELS = {"stdout": logging.INFO, "stderr": logging.WARNING}


class TerminalHandler(logging.Handler):
    """Writes each line to the launcher's standard output or error, after the worker's rank in brackets."""

    def __init__(self) -> None:
        super().__init__()
        self._gone: set[str] = set()
        """Streams that nobody reads any more."""

    @classmethod
    def of_first_workers(cls) -> logging.Handler:
        """A handler that writes only the lines of the first worker of each host."""
        handler = cls()
        handler.addFilter(lambda record: getattr(record, "local_rank", None) == 0)
        return handler

    def emit(self, record: logging.LogRecord) -> None:
        """Write a worker's line, unless the output is closed."""
        name = "stdout" if getattr(record, "stream", "") == "stdout" else "stderr"
        stream = getattr(sys, name)
        if stream is None or name in self._gone:
            return
        line = f"[rank {getattr(record, 'rank', '?')}] {record.getMessage()}\n"
        try:
            try:
                stream.write(line)
            except UnicodeEncodeError:  # the terminal knows fewer characters than the worker
                stream.write(line.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
            stream.flush()
        except BrokenPipeError:  # as of `| head`
            self._gone.add(name)
        except Exception:  # as every handler does: a broken terminal does not end the work
            self.handleError(record)


def on_ranks(
    handler: logging.Handler, ranks: Sequence[int] | None = None, stream: str | None = None
) -> logging.Handler:
    """Restrict a handler to the lines of some ranks or of one stream.

    Args:
        handler: any handler of ``logging``; a filter is added to it.
        ranks: the ranks whose lines it gets; ``None`` means all.
        stream: ``"stdout"`` or ``"stderr"``; ``None`` means both.

    Returns:
        The same handler.

    Example:
        >>> import sys, logging
        >>> from torchopt_dist.launching import on_ranks
        >>> handler = on_ranks(logging.StreamHandler(sys.stdout), ranks=[1], stream="stderr")
    """
    if stream not in (None, *LEVELS):
        raise ValueError(f'`stream` must be "stdout", "stderr" or None, got {stream!r}')
    check_handler("handler", "be a logging.Handler", handler)
    if ranks is not None and (not isinstance(ranks, Collection) or isinstance(ranks, (str, bytes))):
        raise TypeError(f"`ranks` must be a list of integers, got {type(ranks).__name__} {ranks!r:.200}")
    for rank in ranks or ():
        check_integer("ranks", rank, "hold integers")
    chosen = None if ranks is None else frozenset(ranks)

    def wanted(record: logging.LogRecord) -> bool:
        return (chosen is None or getattr(record, "rank", None) in chosen) and (
            stream is None or getattr(record, "stream", None) == stream
        )

    handler.addFilter(wanted)
    return handler


def log_folder(option: str | Path | None) -> Path | None:
    """The folder for the files of a launch.

    Args:
        option: the launcher's ``log_dir``.

    Raises:
        OSError: the folder cannot be made.
    """
    if option is None or option == "none":
        return None
    if option != "auto":
        Path(option).mkdir(parents=True, exist_ok=True)
        return Path(option)
    root = Path(os.environ.get(VARIABLE) or DEFAULT).absolute()
    return root / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{secrets.token_hex(2)}"


class _File:
    """A file that is made, with its folder, for the first line; only the user can read it.

    If it cannot be written, as on a full disk, there is one warning, and the work goes on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._file: TextIO | None = None
        self._given_up = False

    def write(self, line: str) -> None:
        """Write a line, at once."""
        if self._given_up:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.touch(0o600)
                self._file = self._path.open("a", encoding="utf-8", buffering=1)
            self._file.write(f"{line}\n")
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close it, if it was made."""
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._given_up = True
        if self._file is None:
            log.warning("there will be no %s: %s", self._path, error.strerror)
            return
        log.warning("%s is not complete: %s", self._path, error.strerror)
        with contextlib.suppress(OSError):
            self._file.close()


class WorkerLogs:
    """Takes the lines of one launch, and passes them to handlers and files.

    Args:
        handlers: each gets a record for each line, with the attributes ``rank``, ``local_rank``, ``host`` and
            ``stream``.
        folder: the folder of the files ``rank<n>.log``, to which lines are appended; ``None`` means no files.
        ranks: all ranks.
    """

    def __init__(self, handlers: Sequence[logging.Handler], folder: Path | None, ranks: range) -> None:
        self._handlers = tuple(handlers)
        self._files: dict[int, _File] = {}
        self._tails: dict[int, collections.deque[str]] = {
            rank: collections.deque(maxlen=TAIL_LINES) for rank in ranks
        }
        if folder is not None:
            self._files = {rank: _File(folder / f"rank{rank}.log") for rank in ranks}

    def write(self, line: str, rank: int, local_rank: int, host: str, stream: str) -> None:
        """Pass one line on."""
        self._tails[rank].append(line)
        if rank in self._files:
            self._files[rank].write(line)
        if not self._handlers:
            return
        record = logging.LogRecord(__package__, LEVELS[stream], "", 0, line, None, None)
        vars(record).update(rank=rank, local_rank=local_rank, host=host, stream=stream)
        for handler in self._handlers:
            if record.levelno >= handler.level:
                handler.handle(record)

    def tail(self, rank: int) -> tuple[str, ...]:
        """The last lines of a rank."""
        return tuple(self._tails[rank])

    def forget_tails(self) -> None:
        """Forget the last lines, since the workers are about to be started again."""
        for tail in self._tails.values():
            tail.clear()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


class LineSplitter:
    """Bytes that a worker and its child processes have written into one stream → lines.

    A progress bar's carriage return ends a line, too.

    Args:
        logs: takes the lines.
        rank: the worker's.
        local_rank: its rank on its host.
        host: the name of its host.
        stream: ``"stdout"`` or ``"stderr"``.
    """

    def __init__(self, logs: WorkerLogs, rank: int, local_rank: int, host: str, stream: str) -> None:
        self._logs, self._place = logs, (rank, local_rank, host, stream)
        utf_8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder = io.IncrementalNewlineDecoder(utf_8, translate=True)
        self._part = ""

    def feed(self, data: bytes) -> None:
        """Pass on the lines that are complete with these bytes."""
        *lines, self._part = (self._part + self._decoder.decode(data)).split("\n")
        if len(self._part) > LONGEST_LINE:
            lines.append(self._part)
            self._part = ""
        for line in lines:
            self._logs.write(line, *self._place)

    def finish(self) -> None:
        """Pass on an unfinished line, if there is one."""
        part, self._part = self._part + self._decoder.decode(b"", final=True), ""
        if part:
            self._logs.write(part.removesuffix("\n"), *self._place)
