"""Records of ``logging`` on any worker → the handlers of rank 0, with the worker's rank."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from torchopt_dist.distributed.group.group import current_group, find_group
from torchopt_dist.process.future import Future

__all__ = ["log_to_rank_zero"]

FORMAT = "[rank %(rank)d] %(levelname)s %(name)s: %(message)s"
MOST_WAITING = 10_000
_SENT: tuple[str, ...] = (
    "name",
    "levelno",
    "levelname",
    "created",
    "msecs",
    "pathname",
    "filename",
    "module",
    "lineno",
    "funcName",
)
_SENT += ("process", "processName", "thread", "threadName")


def log_to_rank_zero(level: int | str = logging.INFO, logger: str | None = None) -> None:
    """Let the records that are logged on this rank be handled by rank 0's handlers, with this rank.

    Call it on every rank, in ``main`` or as ``auto_init_rpc(worker_init_fn=todist.log_to_rank_zero)``. On rank 0 each
    record then has the attributes ``rank`` and ``worker``, for formats such as ``"%(rank)d: %(message)s"``; if no
    handler is there, one writes to standard error, with rank, level, logger and message. On the other ranks records are
    sent to rank 0, also from inside tasks, in the place of being written to standard output or error there; handlers
    that write to files stay. A record is sent as text, with a traceback if it has one. It draws no random
    number, and waits for nothing. What cannot be sent any more, for example after ``main``, is written to standard
    error.

    Args:
        level: the least level that is logged.
        logger: the name of the logger whose records these are; the root logger's, if not given.

    Raises:
        NotInitializedError: there is no RPC group.
        ValueError: there is no such level.
        TypeError: ``level`` is neither a number nor a text, or ``logger`` not a text.

    Example:
        >>> import logging, torchopt_dist as todist
        >>> @todist.auto_init_rpc(worker_init_fn=todist.log_to_rank_zero)
        ... def main():
        ...     logging.getLogger("mine").info("from %s", todist.get_rank())
    """
    group = current_group()
    if logger is not None and not isinstance(logger, str):
        raise TypeError(f"`logger` must be the name of a logger, got {type(logger).__name__} {logger!r:.80}")
    chosen = logging.getLogger(logger)
    chosen.setLevel(level)
    if group.rank == 0:
        if not chosen.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter(FORMAT))
            chosen.addHandler(handler)
        for each in _handlers_of(chosen):
            if _add_rank not in each.filters:
                each.addFilter(_add_rank)
        return
    for each in _handlers_of(chosen):
        if isinstance(each, _Sender):
            group.before_leaving.append(each.wait)
            return
    terminals = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    for each in list(chosen.handlers):
        if isinstance(each, logging.StreamHandler) and each.stream in terminals:
            chosen.removeHandler(each)
    sender = _Sender(group.rank, group.names[group.rank])
    group.before_leaving.append(sender.wait)
    chosen.addHandler(sender)


def _handlers_of(logger: logging.Logger) -> list[logging.Handler]:
    """The handlers that get a logger's records."""
    found: list[logging.Handler] = []
    each: logging.Logger | None = logger
    while each is not None:
        found += each.handlers
        each = each.parent if each.propagate else None
    return found


def _add_rank(record: logging.LogRecord) -> bool:
    """Give a record of rank 0's own the attributes that those of others have."""
    if not hasattr(record, "rank"):
        group = find_group()
        record.rank, record.worker = 0, "worker0" if group is None else group.names[0]
    return True


class _Sender(logging.Handler):
    """Sends records to rank 0, and never raises."""

    def __init__(self, rank: int, worker: str) -> None:
        super().__init__()
        self.rank, self.worker = rank, worker
        self.setFormatter(logging.Formatter(FORMAT))
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._waiting: list[dict[str, Any]] = []
        self._under_way = False
        """Whether a message is; what is logged meanwhile goes with the next one, so that the order stays."""
        self._left_out = 0
        self._sending = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, or let it wait until those before it have arrived."""
        if getattr(self._sending, "now", False):  # of the sending itself
            return
        try:
            plain = self._plain(record)
            with self._lock:
                if len(self._waiting) < MOST_WAITING:
                    self._waiting.append(plain)
                else:
                    self._left_out += 1
            self._send()
        except Exception:
            self.handleError(record)

    def _plain(self, record: logging.LogRecord) -> dict[str, Any]:
        plain = {name: getattr(record, name) for name in _SENT}
        text = record.exc_text
        if record.exc_info and not text:
            text = logging.Formatter().formatException(record.exc_info)
        return {
            **plain,
            "msg": record.getMessage(),
            "exc_text": text,
            "stack_info": record.stack_info,
            "rank": self.rank,
            "worker": self.worker,
        }

    def _send(self) -> None:
        with self._lock:
            if not self._waiting or self._under_way:
                return
            records, self._waiting = self._waiting, []
            if self._left_out:
                told = f"{self._left_out} records were left out, since too many were waiting to be sent"
                records.append(
                    {**records[-1], "levelno": logging.WARNING, "levelname": "WARNING", "msg": told}
                )
                self._left_out = 0
            self._under_way = True
        self._sending.now = True
        try:
            group = find_group()
            if group is None or group.ending or group.is_forked():
                raise ConnectionError("the group has ended")
            asked: Future[list[Any]] = group.ask(0, _handle, records)
        except Exception:
            self._under_way = False
            self._write(records)
            return
        finally:
            self._sending.now = False
        asked.add_done_callback(lambda done: self._answered(done, records))

    def _answered(self, done: Future[list[Any]], records: list[dict[str, Any]]) -> None:
        if done.exception() is not None:
            self._write(records)
        with self._lock:
            self._under_way = False
            self._idle.notify_all()
        self._send()

    def wait(self, seconds: float) -> None:
        """Wait until all records have arrived, at most so many seconds."""
        with self._lock:
            self._idle.wait_for(lambda: not self._under_way and not self._waiting, seconds)

    def _write(self, records: list[dict[str, Any]]) -> None:
        """Write what cannot be sent to this process's standard error."""
        try:
            for plain in records:
                print(self.format(logging.makeLogRecord(plain)), file=sys.stderr, flush=True)
        except (OSError, ValueError, AttributeError):
            pass  # it is closed, or there is none


def _handle(records: list[dict[str, Any]]) -> None:
    """On rank 0: handle what another rank has logged."""
    for plain in records:
        record = logging.makeLogRecord(plain)
        logging.getLogger(record.name).handle(record)
