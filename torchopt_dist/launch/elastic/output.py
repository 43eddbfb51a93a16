"""The workers' pipes, and news → lines on this host's standard output that say whose they are."""

from __future__ import annotations

import json
import os
import selectors
import threading
from typing import Self

from torchopt_dist.launch.elastic.records import Place
from torchopt_dist.launch.logs import LineReader

__all__ = ["Output"]

LONGEST_PART = 1 << 19
"""Characters of a worker's line in one of ours."""


class Output:
    """The standard output of a host, on which its workers are heard, too.

    Args:
        place: which host this is.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._ranks: dict[tuple[int, str], int] = {}
        self._readers = {
            (local_rank, stream): LineReader(self, 0, local_rank, place.name, stream)
            for local_rank in range(place.workers)
            for stream in ("stdout", "stderr")
        }
        self._stop, self._stopped = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._pump, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._stopped, b"\n")  # closing it would not do: what workers have forked holds it too
        self._thread.join()
        for reader in self._readers.values():
            reader.drain()

    def tell(self, **news: object) -> None:
        """Tell the launcher."""
        self._say(f"!{json.dumps(news)}")

    def become_worker(self, local_rank: int, rank: int) -> None:
        """In a worker: write into its pipes, whose first line is its rank."""
        for descriptor, stream in ((1, "stdout"), (2, "stderr")):
            end = self._readers[local_rank, stream].for_worker
            os.write(end, f"{self._place.mark}{rank}\n".encode())
            os.dup2(end, descriptor)

    def write(self, line: str, rank: int, local_rank: int, host: str, stream: str) -> None:
        """Hand on a worker's line: what a :class:`LineReader` calls."""
        del rank, host
        begun, mark, new_rank = line.rpartition(self._place.mark)
        if not mark or begun:  # which an earlier world's worker has not finished
            place = f"{stream[3]}{self._ranks.get((local_rank, stream), 0)} {local_rank}"
            text = begun if mark else line
            for start in range(0, max(len(text), 1), LONGEST_PART):
                self._say(f"{place} {text[start : start + LONGEST_PART]}")
        if mark:
            self._ranks[local_rank, stream] = int(new_rank)

    def _say(self, text: str) -> None:
        data = memoryview(f"{self._place.mark}{text}\n".encode("utf-8", "replace"))
        with self._lock:
            while data:
                data = data[os.write(1, data) :]

    def _pump(self) -> None:
        with selectors.DefaultSelector() as selector:
            for reader in self._readers.values():
                selector.register(reader, selectors.EVENT_READ, reader)
            selector.register(self._stop, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    key.data.read()
