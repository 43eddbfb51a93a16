"""A process group in which ranks run loops → messages among them that end with an error when a rank fails.

Each rank gives signs of life in the group's store, and reads those of the others. One that raises an error leaves its
text there and closes its connections, so that nobody waits for it. The members of a team need no signs: the call that
the team answers tells them.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_dist._liveness import Liveness
from torchopt_dist._torch_private import outside_of_transforms
from torchopt_dist._watched_group import PATIENCE, WatchedGroup, watched_group
from torchopt_dist.errors import CollectiveError

__all__ = ["RankGroup", "Signs", "group_for_loops"]


class RankGroup:
    """The messages of the ranks that run one loop.

    Args:
        group: their process group; ``None`` for a team of one, which sends nothing.
        signs: what they know of each other; ``None`` for a team.
    """

    def __init__(self, group: WatchedGroup | None, signs: Signs | None = None) -> None:
        self._group, self._signs = group, signs
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.number = 0 if group is None else group.number
        self.parts = 1 if signs is None else self.size
        """Of how many ranks a rank's own tensors have the gradient: the caller of a team takes the mean himself."""
        self._last: Any = None
        self.is_agreed = False
        """Whether an error that is raised now is raised on all ranks."""
        if signs is not None:
            weakref.finalize(self, signs.end)

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._group is not None

    def all_reduce(self, flat: Tensor) -> None:
        """Replace a vector by the sum of those of all ranks."""
        if self.size > 1:
            self._done("allreduce", flat, [flat])

    def all_gather(self, whole: list[Tensor], part: Tensor) -> None:
        """Fill vectors of the same size with those of all ranks."""
        if self.size > 1:
            self._done("allgather", part, [whole], [part])
        else:
            whole[0].copy_(part)

    def reduce_scatter(self, part: Tensor, rows: Tensor) -> None:
        """Fill a vector with the sum of this rank's row of all ranks."""
        if self.size > 1:
            self._done("_reduce_scatter_base", part, part, rows)
        else:
            part.copy_(rows.view_as(part))

    def exchanged(self, value: Any) -> list[Any]:
        """One value of each rank, on all of them."""
        with outside_of_transforms():
            own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            sizes = list(torch.zeros(self.size, 1, dtype=torch.int64).unbind())
            self.all_gather(sizes, torch.tensor([len(own)]))
            counts = [int(size) for size in sizes]
            room = own.new_zeros(max(counts))
            room[: len(own)] = own
            found = list(own.new_zeros(self.size, len(room)).unbind())
            self.all_gather(found, room)
            texts = [one[:count].numpy().tobytes() for one, count in zip(found, counts, strict=True)]
        return [pickle.loads(text) for text in texts]

    def agreed(self, value: Any) -> list[Any]:
        """As :meth:`exchanged`, where a loop begins; a warning names ranks that do not come to it for long."""
        if self._signs is None:
            return self.exchanged(value)
        with self._signs.coming():
            return self.exchanged(value)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """A context in which an error ends the group, so that the others get an error, too, and need not wait."""
        self.is_agreed = False
        try:
            yield
            self._drain()
        except BaseException as error:
            if self._signs is not None and self._group is not None and not self.is_agreed:
                self._close(error, self._group, self._signs)
            raise

    def _done(self, collective: str, tensor: Tensor, *args: Any) -> None:
        """Make a collective, and wait until it is done, or until a rank is known to have failed."""
        try:
            if self._group is None:
                raise RuntimeError("the group of these ranks was closed after an error")
            work = self._group.run(collective, *args)
            self._last = work if tensor.is_cuda else None
            work.wait()
        except RuntimeError as error:
            raise self._named(error) from error

    def _drain(self) -> None:
        """Where a collective is only queued, wait for the last one: after a loss it would be without an error."""
        work, self._last = self._last, None
        while work is not None and self._group is not None and not work.is_completed():
            try:
                self._group.check()
            except RuntimeError as error:
                raise self._named(error) from error
            time.sleep(0.0005)

    def _named(self, error: RuntimeError) -> CollectiveError:
        known = [] if self._signs is None or self._signs.lost else self._signs.errors()
        texts = known or [str(error).strip().partition("\n")[0]]
        return CollectiveError(
            f"a message among the {self.size} ranks that run one loop failed on rank {self.rank}, since another rank "
            f"has died, has raised an error, or waits elsewhere: {'; '.join(texts)}"
        )

    def _close(self, error: BaseException, group: WatchedGroup, signs: Signs) -> None:
        if not isinstance(error, CollectiveError):
            text = str(error).strip().partition("\n")[0]
            signs.note_error(f"{type(error).__name__}: {text}")
        signs.end()
        group.fail()
        group.shutdown()
        self._group = self._last = None


def group_for_loops(group: Any, number: int) -> RankGroup:
    """A group of their own for the loops of the ranks of a process group; all of them call this.

    Args:
        group: the process group.
        number: how many such groups there were before; earlier ones are closed.

    Raises:
        CollectiveError: a rank has not come within half an hour.
    """
    store = group.get_group_store()
    with contextlib.suppress(RuntimeError):  # a connection of its own: other threads may wait in that one
        store = store.clone()
    store = dist.PrefixStore(f"torchopt_dist/loops/{number}", store)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    signs = Signs(store, rank, size, Liveness.from_environment())
    with signs.coming():
        signs.await_all()
    made = watched_group(rank, size, number, store, signs.check)
    ranks = RankGroup(made, signs)
    ranks.exchanged(None)  # all are connected before one of them may close its connections
    signs.watch(made.fail)
    return ranks


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
        """What is known of a rank that is lost."""
        self._store, self._rank, self._size = store, rank, size
        self._others = [other for other in range(size) if other != rank]
        self._ended = threading.Event()
        self._looks = self._seen = self._slices = self._loops = 0
        self._counted = 0.0
        self._waits_since: float | None = None

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Give signs and look at those of the others, in a thread; call a function when a rank is lost."""
        if self._others:
            thread = threading.Thread(
                target=self._watch, args=(on_loss,), name="todist signs of life", daemon=True
            )
            thread.start()

    def end(self) -> None:
        """Give no more signs."""
        self._ended.set()

    def note_error(self, text: str) -> None:
        """Leave the text of an error of this rank for the others."""
        with contextlib.suppress(Exception):  # the store has gone with the first rank
            self._store.set(f"error/{self._rank}", text)

    def errors(self) -> list[str]:
        """The errors that ranks have left."""
        found = []
        with contextlib.suppress(Exception):
            for rank in range(self._size):
                if self._store.check([f"error/{rank}"]):
                    text = self._store.get(f"error/{rank}").decode(errors="replace")
                    found.append(f"rank {rank} raised {text}")
        return found

    @contextmanager
    def coming(self) -> Iterator[None]:
        """A context in which this rank waits for the others where a loop begins."""
        self._loops += 1
        with contextlib.suppress(Exception):  # who sends a message then is told
            self._store.set(f"loop/{self._rank}", str(self._loops))
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None

    def await_all(self) -> None:
        """Wait until all ranks have come to the first loop."""
        end, pause = time.monotonic() + PATIENCE.total_seconds(), 0.001
        while missing := self._not_come():
            if time.monotonic() > end:
                raise CollectiveError(f"{_ranks(missing)} not come to a loop with `parallel` for {PATIENCE}")
            self.check()
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

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
            if missing := self._not_come():
                warnings.warn(
                    f"{_ranks(missing)} not come to a loop with `parallel` for {self._seconds:g} s, and rank "
                    f"{self._rank} waits there: all ranks of its group must run the same loops, and their backward "
                    "passes, in one order",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _not_come(self) -> list[int]:
        """The ranks that are not at this loop yet."""
        names = {rank: f"loop/{rank}" for rank in self._others}
        there = {
            rank: self._store.check([name]) and int(self._store.get(name)) for rank, name in names.items()
        }
        return [rank for rank, loops in there.items() if loops < self._loops]

    def _watch(self, on_loss: Callable[[], None]) -> None:
        last: dict[int, bytes] = {}
        silent = dict.fromkeys(self._others, 0)
        with contextlib.suppress(Exception):  # the store has gone with the first rank
            while not self._ended.wait(self.interval):
                self._looks += 1
                self._store.set(f"sign/{self._rank}", str(self._looks))
                for rank in self._others:
                    name = f"sign/{rank}"
                    sign = self._store.get(name) if self._store.check([name]) else b""
                    silent[rank] = silent[rank] + 1 if sign == last.get(rank, b"") else 0
                    last[rank] = sign
                    if silent[rank] >= self.patience and self.lost is None:
                        self.lost = (
                            f"rank {rank} has given no sign of life for {self._seconds:g} s: it was stopped, its "
                            "machine cannot be reached, or its program has ended"
                        )
                        on_loss()


def _ranks(numbers: list[int]) -> str:
    listed = ", ".join(map(str, numbers))
    return f"ranks {listed} have" if len(numbers) > 1 else f"rank {listed} has"
