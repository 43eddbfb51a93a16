"""``with todist.profile() as profile: ...`` → where the time of distributed calls went: a table, a trace, a picture.

Every worker records its own spans (``spans.py``) while the profile is on. At the end they are fetched, and their times
are converted to the caller's clock.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from torchopt_dist.distributed.group.group import Group, current_group
from torchopt_dist.distributed.group.spans import PHASES, Phase, Span
from torchopt_dist.errors import TodistError
from torchopt_dist.process.table import bytes_text, seconds_text, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Profile", "profile"]

T = TypeVar("T")

COMPUTING: tuple[Phase, ...] = ("run", "backward")
"""Phases in which a worker does what the user asked for."""
WAITING: tuple[Phase, ...] = ("wait", "wait back")
PINGS = 5
ANSWER_SECONDS = 60.0
COLORS = MappingProxyType(
    {
        "pack": "#8c6bb1",
        "send": "#4292c6",
        "wait": "#d9d9d9",
        "unpack": "#9ebcda",
        "wait back": "#bdbdbd",
        "receive": "#9ecae1",
        "run": "#41ab5d",
        "backward": "#ef6548",
        "reply": "#807dba",
    }
)


@contextmanager
def profile() -> Iterator[Profile]:
    """Record the distributed calls that are made inside, on all workers.

    Backward passes are recorded too, and calls that workers make in their turn. Calls that are still running at the end
    are cut off there. In each process in which ``torch.profiler.profile`` is on, the phases are ranges of that
    profiler's trace as well, such as ``todist::run``.

    Yields:
        The :class:`Profile`, which is filled in when the context is left.

    Raises:
        NotInitializedError: there is no RPC group.
        RuntimeError: another profile is on.

    Example::

        with todist.profile() as profile:
            loss_fn(model, batch).backward()
        print(profile)  # a line a worker: how long it packed, sent, ran, waited
        profile.plot("step.png")
        profile.save("step.json")  # for chrome://tracing or ui.perfetto.dev
    """
    group = current_group()
    if group.recorder.profile.on:
        raise RuntimeError(
            "a profile is on already: leave `with todist.profile()` before the next one begins"
        )
    clocks = _clocks(group)
    found = Profile(group.names)
    started = time.perf_counter()
    group.recorder.start()
    try:
        yield found
    finally:
        ended = time.perf_counter()
        spans = group.recorder.stop()
        try:
            for worker, theirs in _on_each(group, _stop).items():
                ahead = clocks.get(worker, 0.0)
                spans += [span._replace(start=span.start - ahead, end=span.end - ahead) for span in theirs]
        finally:
            found._fill(spans, started, ended)


class Profile:
    """Where the time of distributed calls went; made by :func:`profile`.

    ``print(profile)`` shows a table with a line for each worker: the seconds that it spent in each phase, the bytes
    that it sent, and how busy it was. Phases of one worker overlap where it has several threads at work.

    Attributes:
        names: the workers' names, by rank.
        seconds: how long the context lasted.
        spans: each piece of work, by when it began: the rank of its ``worker``, its ``phase``, its ``start`` and
            ``end`` in seconds since the context was entered, its ``thread``, the ``call`` that it is a part of, the
            rank of its ``peer`` at the other end, and the ``size`` in bytes of the message that it made.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.seconds = 0.0
        self.spans: list[Span] = []

    def _fill(self, spans: list[Span], started: float, ended: float) -> None:
        self.seconds = ended - started
        inside = (
            span._replace(start=max(span.start - started, 0.0), end=min(span.end - started, self.seconds))
            for span in spans
        )
        self.spans = sorted((span for span in inside if span.start <= span.end), key=lambda span: span.start)

    @property
    def calls(self) -> int:
        """The number of requests: one for each worker of a call, and one for each worker of a backward pass."""
        return len({span.call for span in self.spans if span.phase == "receive"})

    def totals(self) -> list[dict[str, float]]:
        """For each worker, by rank: the seconds of each phase, and under ``"bytes"`` the bytes of what it sent."""
        sums: list[defaultdict[str, float]] = [defaultdict(float) for _ in self.names]
        for span in self.spans:
            sums[span.worker][span.phase] += span.end - span.start
            sums[span.worker]["bytes"] += span.size
        return [dict(each) for each in sums]

    def busy(self) -> list[float]:
        """For each worker, by rank: the fraction of the time, 0 to 1, in which at least one of its threads computed."""
        return [
            _covered([span for span in self.spans if span.worker == rank and span.phase in COMPUTING])
            / (self.seconds or 1.0)
            for rank in range(len(self.names))
        ]

    def __str__(self) -> str:
        totals, busy = self.totals(), self.busy()
        phases = [phase for phase in PHASES if any(phase in each for each in totals)]
        header = ["worker", *phases, "sent", "busy"]
        rows = [
            [
                name,
                *(seconds_text(total[phase]) if phase in total else "" for phase in phases),
                bytes_text(total.get("bytes", 0)),
                f"{part:.0%}",
            ]
            for name, total, part in zip(self.names, totals, busy, strict=True)
        ]
        return f"{seconds_text(self.seconds)} in all, {self.calls} requests\n{table(header, rows)}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for ``chrome://tracing`` or https://ui.perfetto.dev, with messages as arrows.

        Args:
            path: the file, which is overwritten; its folder must exist.
        """
        Path(path).write_text(json.dumps({"traceEvents": list(self._events()), "displayTimeUnit": "ms"}))

    def _events(self) -> Iterator[dict[str, Any]]:
        for rank, name in enumerate(self.names):
            yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for span in self.spans:
            common = {"pid": span.worker, "tid": span.thread}
            peer = None if span.peer is None else self.names[span.peer]
            yield {
                "ph": "X",
                "name": span.phase,
                "cat": "wait" if span.phase in WAITING else "todist",
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {"call": span.call and list(span.call), "peer": peer, "bytes": span.size},
                **common,
            }
            if span.call is not None and span.phase in ("send", "receive"):
                sends = span.phase == "send"
                yield {
                    "ph": "s" if sends else "f",
                    "name": "request",
                    "cat": "todist",
                    "id": f"{span.call[0]}.{span.call[1]}",
                    "ts": (span.start if sends else span.end) * 1e6,
                    **({} if sends else {"bp": "e"}),
                    **common,
                }

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw a timeline for each worker; needs matplotlib.

        Args:
            path: where to save the picture, in the format that its suffix names; ``None`` saves none.

        Returns:
            The figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            raise ImportError("`plot` needs matplotlib: pip install matplotlib; or use `save`") from error
        lanes = [
            (rank, lane)
            for rank in range(len(self.names))
            for lane in _lanes_of([span for span in self.spans if span.worker == rank])
        ]
        figure = Figure(figsize=(11, 1.2 + 0.32 * len(lanes)), layout="constrained")
        axes = figure.subplots()
        ticks: dict[int, list[int]] = defaultdict(list)
        for row, (rank, spans) in enumerate(lanes):
            ticks[rank].append(row)
            for span in sorted(spans, key=lambda span: span.phase not in WAITING):
                axes.barh(
                    row,
                    (span.end - span.start) * 1e3,
                    left=span.start * 1e3,
                    height=0.45 if span.phase in WAITING else 0.8,
                    color=COLORS[span.phase],
                    linewidth=0,
                )
        axes.set_yticks(
            [sum(rows) / len(rows) for rows in ticks.values()], [self.names[rank] for rank in ticks]
        )
        axes.invert_yaxis()
        axes.set_xlim(0, self.seconds * 1e3)
        axes.set_xlabel("milliseconds")
        axes.spines[["top", "right"]].set_visible(False)
        shown = [phase for phase in PHASES if any(span.phase == phase for span in self.spans)]
        axes.legend(
            handles=[Patch(color=COLORS[phase], label=phase) for phase in shown],
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=max(len(shown), 1),
            frameon=False,
            fontsize="small",
        )
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


def _lanes_of(spans: list[Span]) -> list[list[Span]]:
    """One worker's spans, in the fewest lines in which no two threads overlap; at least one line."""
    threads: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        threads[span.thread].append(span)
    lanes: list[list[Span]] = []
    for own in threads.values():
        begin, end = own[0].start, max(span.end for span in own)
        for lane in lanes:
            if all(span.end <= begin or span.start >= end for span in lane):
                lane += own
                break
        else:
            lanes.append(own)
    return lanes or [[]]


def _covered(spans: list[Span]) -> float:
    """Seconds in which at least one of the spans, sorted by start, was under way."""
    total, reached = 0.0, 0.0
    for span in spans:
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


def _on_each(group: Group, function: Callable[[], T], workers: Iterable[int] | None = None) -> dict[int, T]:
    """What the function returns on each other worker, or each named one; a worker that is gone is left out."""
    futures = {}
    for worker in range(len(group.names)) if workers is None else workers:
        if worker != group.rank:
            with suppress(TodistError):  # the program has met, or will meet, the error itself
                futures[worker] = group.ask(worker, function, seconds=ANSWER_SECONDS)
    results = {}
    for worker, future in futures.items():
        with suppress(TodistError):
            results[worker] = future.result()[0]
    return results


def _start() -> None:
    """On a worker: record from now on."""
    current_group().recorder.start()


def _stop() -> list[Span]:
    """On a worker: the spans recorded."""
    return current_group().recorder.stop()


def _clocks(group: Group) -> dict[int, float]:
    """Let each other worker record; by how many seconds its clock is ahead of this worker's.

    Where the two are not on one machine, that is measured by the fastest of a few round trips, and off by half of the
    time which that took at most.
    """
    here = group.members[group.rank].process_table
    far = [worker for worker in _on_each(group, _start) if group.members[worker].process_table != here]
    best: dict[int, tuple[float, float]] = {}
    for _ in range(PINGS):
        for worker in far:
            sent = time.perf_counter()
            for theirs in _on_each(group, time.perf_counter, [worker]).values():
                took = time.perf_counter() - sent
                best[worker] = min(best.get(worker, (inf, 0.0)), (took, theirs - sent - took / 2))
    return {worker: offset for worker, (_, offset) in best.items()}
