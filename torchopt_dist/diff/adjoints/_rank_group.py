"""A process group in which ranks run loops → messages among them that end with an error when a rank fails.

Each rank gives signs of life in the group's store, and reads those of the others. One that raises an error leaves its
text there and closes its connections, so that nobody waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_dist._liveness import Liveness
from torchopt_dist._team import Team
from torchopt_dist._torch_private import outside_of_transforms
from torchopt_dist.errors import CollectiveError

__all__ = ["RankGroup", "RanksOfTeam", "Signs"]


class RankGroup:
    """A process group of its own for the loops of some ranks.

    Args:
        group: the process group; nobody else uses it.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        backends = str(dist.get_backend_config(group))
        self._is_on_cpu = "gloo" in backends or "mpi" in backends
        store = group.get_group_store()
        with contextlib.suppress(RuntimeError):  # a connection of its own: other threads may wait in that one
            store = store.clone()
        self._store = dist.PrefixStore("torchopt_dist/loops", store)
        # Where torch cannot be told to give up waiting, its group is aborted.
        abort = None if self._is_on_cpu else group.abort
        self.signs = Signs(self._store, self.rank, self.size, Liveness.from_environment(), abort)
        weakref.finalize(self, self.signs.end)
        self._last: Any = None
        self.is_agreed = False
        """Whether an error that is raised now is raised on all ranks."""
        self.exchanged(None)  # all are connected before one of them may close its connections

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._group is not None

    @property
    def parts(self) -> int:
        """Of how many ranks a rank's own tensors have the gradient: that of the mean over all of them."""
        return self.size

    def all_reduce(self, flat: Tensor) -> None:
        """Replace a vector by the sum of those of all ranks."""
        self._done(lambda group: dist.all_reduce(flat, group=group, async_op=True))

    def all_gather(self, whole: list[Tensor], part: Tensor) -> None:
        """Fill vectors of the same size with those of all ranks."""
        self._done(lambda group: dist.all_gather(whole, part, group=group, async_op=True))

    def reduce_scatter(self, part: Tensor, rows: Tensor) -> None:
        """Fill a vector with the sum of this rank's row of all ranks."""
        scatter = (
            getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        )  # before torch 2.13
        self._done(lambda group: scatter(part, rows, group=group, async_op=True))

    def exchanged(self, value: Any) -> list[Any]:
        """One value of each rank, on all of them."""
        device = "cpu" if self._is_on_cpu else torch.device("cuda", torch.cuda.current_device())
        with outside_of_transforms():
            own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
            sizes = list(torch.zeros(self.size, 1, dtype=torch.int64, device=device).unbind())
            self.all_gather(sizes, torch.tensor([len(own)], device=device))
            counts = [int(size) for size in sizes]
            room = own.new_zeros(max(counts))
            room[: len(own)] = own
            found = list(own.new_zeros(self.size, len(room)).unbind())
            self.all_gather(found, room)
            texts = [one[:count].cpu().numpy().tobytes() for one, count in zip(found, counts, strict=True)]
        return [pickle.loads(text) for text in texts]

    @contextmanager
    def failing(self) -> Iterator[None]:
        """A context in which an error ends the group, so that the others get an error, too, and need not wait."""
        self.is_agreed = False
        try:
            yield
            self._drain()
        except BaseException as error:
            if not self.is_agreed:
                self._close(error)
            raise

    def _done(self, begin: Callable[[Any], Any]) -> None:
        """Make a collective, and wait until it is done, or until a rank is known to have failed."""
        try:
            if self._group is None:
                raise RuntimeError("the group of these ranks was closed after an error")
            if self.signs.lost is not None:
                raise RuntimeError(self.signs.lost)
            self._last = work = begin(self._group)
            if self._is_on_cpu:
                self._wait(work)
            else:  # in the order of the stream
                work.wait()
        except RuntimeError as error:
            raise self._named(error) from error

    def _wait(self, work: Any) -> None:
        slices = 0
        while True:
            try:
                work.wait(timedelta(seconds=self.signs.interval))
            except RuntimeError:
                if work.is_completed():
                    raise
                slices = slices + 1 if self.signs.looks == self.signs.seen else 0
                self.signs.seen = self.signs.looks
                if slices > 2 * self.signs.patience:
                    self.signs.lost = "the store of the process group gives no answer"
                if self.signs.lost is not None:
                    raise RuntimeError(self.signs.lost) from None
            else:
                return

    def _drain(self) -> None:
        """Where a collective is only queued, wait for the last one: after a loss it would be without an error."""
        work, self._last = self._last, None
        if self._is_on_cpu or work is None:
            return
        while not work.is_completed():
            if self.signs.lost is not None:
                raise self._named(RuntimeError(self.signs.lost))
            time.sleep(0.0005)

    def _named(self, error: RuntimeError) -> CollectiveError:
        known = [] if self.signs.lost else self.signs.errors()
        texts = known or [str(self.signs.lost or error).strip().partition("\n")[0]]
        return CollectiveError(
            f"a message among the {self.size} ranks that run one loop failed on rank {self.rank}, since another rank "
            f"has died, has raised an error, or waits elsewhere: {'; '.join(texts)}"
        )

    def _close(self, error: BaseException) -> None:
        if self._group is None:
            return
        if not isinstance(error, CollectiveError):
            text = str(error).strip().partition("\n")[0]
            self.signs.note_error(f"{type(error).__name__}: {text}")
        self.signs.end()
        group, work, self._group, self._last = self._group, self._last, None, None
        if self._is_on_cpu and work is not None and not work.is_completed():
            # Gloo would wait for the message, here or at the end of the program: the group is never freed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            return
        with contextlib.suppress(Exception):  # it may be gone, or broken
            if not self._is_on_cpu:
                group.abort()
            dist.destroy_process_group(group)


class RanksOfTeam(RankGroup):
    """The members of a team, whose process group ends with an error by itself when one of them fails.

    Args:
        team: the team; one of one member has no process group, and sends nothing.
    """

    def __init__(self, team: Team) -> None:
        self._group, self.rank, self.size = team.group, team.rank, team.size
        self._is_on_cpu, self.is_agreed = True, False

    @property
    def parts(self) -> int:
        """One: the caller takes the mean over the members."""
        return 1

    def all_gather(self, whole: list[Tensor], part: Tensor) -> None:
        """See :meth:`RankGroup.all_gather`."""
        if self._group is None:
            whole[0].copy_(part)
        super().all_gather(whole, part)

    def reduce_scatter(self, part: Tensor, rows: Tensor) -> None:
        """See :meth:`RankGroup.reduce_scatter`."""
        if self._group is None:
            part.copy_(rows.view_as(part))
        super().reduce_scatter(part, rows)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """See :meth:`RankGroup.failing`; the call that the team answers tells the other members."""
        yield

    def _done(self, begin: Callable[[Any], Any]) -> None:
        if self._group is None:
            return
        try:
            begin(self._group).wait()
        except RuntimeError as error:
            text = str(error).strip().partition("\n")[0]
            raise CollectiveError(
                f"a message among the {self.size} members of a team failed on member {self.rank}: {text}"
            ) from error


class Signs:
    """Signs of life of the ranks of a group, in its store.

    Args:
        store: of these ranks.
        rank: of this process.
        size: the number of ranks.
        liveness: after how long a silent rank counts as lost. It is counted in looks, so that a time in which this
            process was stopped itself does not count.
        abort: called when a rank is lost.
    """

    def __init__(
        self, store: Any, rank: int, size: int, liveness: Liveness, abort: Callable[[], None] | None
    ) -> None:
        self.interval = liveness.between_signs
        self.patience = max(1, round(liveness.patience / self.interval))
        self._seconds = liveness.patience
        self.lost: str | None = None
        """What is known of a rank that is lost."""
        self.looks = self.seen = 0
        self._store, self._rank, self._size, self._abort = store, rank, size, abort
        self._ended = threading.Event()
        if size > 1:
            threading.Thread(target=self._watch, name="todist signs of life", daemon=True).start()

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

    def _watch(self) -> None:
        others = [rank for rank in range(self._size) if rank != self._rank]
        last: dict[int, bytes] = {}
        silent = dict.fromkeys(others, 0)
        with contextlib.suppress(Exception):  # the store has gone with the first rank
            while not self._ended.wait(self.interval):
                self.looks += 1
                self._store.set(f"sign/{self._rank}", str(self.looks))
                for rank in others:
                    name = f"sign/{rank}"
                    sign = self._store.get(name) if self._store.check([name]) else b""
                    silent[rank] = silent[rank] + 1 if sign == last.get(rank, b"") else 0
                    last[rank] = sign
                    if silent[rank] >= self.patience and self.lost is None:
                        self.lost = (
                            f"rank {rank} has given no sign of life for {self._seconds:g} s: it was stopped, its "
                            "machine cannot be reached, or its program has ended"
                        )
                        if self._abort is not None:
                            self._abort()
