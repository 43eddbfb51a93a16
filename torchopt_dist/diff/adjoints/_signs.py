"""The ranks of a group, its store → signs of life, and who is silent, has not come, or has raised an error."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torchopt_dist.errors import CollectiveError
from torchopt_dist.process.liveness import Liveness

__all__ = ["Signs", "named"]

END_SECONDS = 5.0
"""How long the end waits for the thread, which may wait for an answer of the store."""
_LOOP = "a loop with `parallel`"


class Signs:
    """Signs of life of the ranks of a group, in its store.

    Args:
        store: of these ranks.
        rank: of this process.
        size: the number of ranks.
        liveness: after how long a silent rank counts as lost. It is counted in looks, so that a time in which this
            process was stopped itself does not count.
    """

    def __init__(self, store: Any, rank: int, size: int, liveness: Liveness) -> None:
        self.interval = liveness.between_signs
        self.patience = max(1, round(liveness.patience / self.interval))
        self._seconds = liveness.patience
        self.lost: str | None = None
        """What is known of a rank that is lost, or has left an error."""
        self._store, self._rank, self._size = store, rank, size
        self._others = [other for other in range(size) if other != rank]
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._looks = self._seen = self._slices = self.messages = 0
        self._counted = 0.0
        self._waits_since: float | None = None

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Give signs and look at those of the others, in a thread; call a function if a rank is lost or fails."""
        if self._others:
            self._thread = threading.Thread(
                target=self._watch, args=(on_loss,), name="todist signs of life", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """Give no more signs, and wait for the thread: Python aborts if one frees a group of torch's at the end."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(END_SECONDS)

    def note_error(self, text: str) -> None:
        """Leave the text of an error of this rank for the others, whose connections may outlive it."""
        with contextlib.suppress(Exception):  # the store has gone with the first rank
            self._store.set(f"error/{self._rank}", text)
            self._store.set("error", "")

    def errors(self) -> list[str]:
        """The errors that ranks have left."""
        found = []
        with contextlib.suppress(Exception):
            for rank in range(self._size):
                if self._store.check([f"error/{rank}"]):
                    text = self._store.get(f"error/{rank}").decode(errors="replace")
                    found.append(f"rank {rank} raised {text}")
        return found

    def silent(self) -> list[int]:
        """The ranks that give no more signs, and have not said that they leave, as this one does now."""
        with contextlib.suppress(Exception):  # the store has gone with the first rank
            self._store.set(f"left/{self._rank}", "")
            before = [self._sign_of(rank) for rank in self._others]
            time.sleep(2 * self.interval)
            return [
                rank
                for rank, sign in zip(self._others, before, strict=True)
                if self._sign_of(rank) == sign and not self._store.check([f"left/{rank}"])
            ]
        return []

    @contextmanager
    def coming(self) -> Iterator[None]:
        """A context in which this rank waits for the others where a loop, or its backward pass, begins."""
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None

    def begin_message(self) -> None:
        """Note that this rank comes to its next message."""
        self.messages += 1
        if self._waits_since is not None:
            with contextlib.suppress(Exception):  # who sends a message then is told
                self._give()

    def await_all(self, limit: timedelta, ended: Callable[[], Sequence[int]]) -> None:
        """Wait until all ranks have come to the first loop.

        Args:
            limit: for how long at most.
            ended: tells the ranks whose programs have ended.

        Raises:
            CollectiveError: one has ended, or has not come within the limit, or another one has waited as long.
        """
        end, pause = time.monotonic() + limit.total_seconds(), 0.001
        with self.coming():
            try:
                self._give()
                while (known := self.errors()) or (missing := self.missing()):
                    if known:
                        raise CollectiveError(
                            f"rank {self._rank} comes to {_LOOP} in vain: {'; '.join(known)}"
                        )
                    if gone := sorted({*missing} & {*ended()}):
                        raise CollectiveError(f"{named(gone)} ended without coming to {_LOOP}")
                    if time.monotonic() > end:
                        text = f"{named(missing)} not come to {_LOOP} for {limit}, the time-out of the process group"
                        self.note_error(f"CollectiveError: {text}")
                        raise CollectiveError(text)
                    self.check()
                    time.sleep(pause)
                    pause = min(2 * pause, 0.1)
            except CollectiveError:
                raise
            except RuntimeError as error:
                raise CollectiveError(f"the store of the process group gives no answer: {error}") from error

    def check(self) -> None:
        """Raise an error if a rank is lost; warn of one that does not come to the loop. Called again and again."""
        now = time.monotonic()
        if self._looks and now - self._counted > self.interval:
            self._counted = now
            self._slices = self._slices + 1 if self._looks == self._seen else 0
            self._seen = self._looks
            if self._slices > 2 * self.patience:
                self.lost = "the store of the process group gives no answer"
        if self.lost is not None:
            raise RuntimeError(self.lost)
        if self._waits_since is not None and now - self._waits_since > self._seconds:
            self._waits_since = None  # once is enough
            if missing := self.missing():
                warnings.warn(
                    f"{named(missing)} not come to {_LOOP}, or to its backward pass, for {self._seconds:g} s, and "
                    f"rank {self._rank} waits there: all ranks of its group must run the same loops, and their "
                    "backward passes, in one order",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def missing(self) -> list[int]:
        """The ranks that are not at this message yet."""
        return [rank for rank in self._others if self._messages_of(rank) < self.messages]

    def _messages_of(self, rank: int) -> int:
        sign = self._sign_of(rank)
        return int(sign.split()[1]) if sign else -1

    def _sign_of(self, rank: int) -> bytes:
        name = f"sign/{rank}"
        return bytes(self._store.get(name)) if self._store.check([name]) else b""

    def _give(self) -> None:
        """Give a sign of life: how often this rank has looked, and how many messages it has sent."""
        self._store.set(f"sign/{self._rank}", f"{self._looks} {self.messages}")

    def _watch(self, on_loss: Callable[[], None]) -> None:
        last: dict[int, bytes] = {}
        silent = dict.fromkeys(self._others, 0)
        with contextlib.suppress(Exception):  # the store has gone with the first rank
            while not self._ended.wait(self.interval):
                self._looks += 1
                self._give()
                if self.lost is None and self._store.check(["error"]):
                    self.lost = "; ".join(self.errors())
                    on_loss()
                for rank in self._others:
                    sign = self._sign_of(rank)
                    silent[rank] = silent[rank] + 1 if sign == last.get(rank, b"") else 0
                    last[rank] = sign
                    if silent[rank] >= self.patience and self.lost is None:
                        self.lost = (
                            f"rank {rank} has given no sign of life for {self._seconds:g} s: it was stopped, its "
                            "machine cannot be reached, or its program has ended"
                        )
                        on_loss()


def named(numbers: list[int]) -> str:
    """Ranks as the subject of a sentence."""
    listed = ", ".join(map(str, numbers))
    return f"ranks {listed} have" if len(numbers) > 1 else f"rank {listed} has"
