"""A process group in which ranks run loops → messages among them that end with an error when a rank fails.

Each rank gives signs of life in the group's store, and reads those of the others. One that raises an error leaves its
text there and closes its connections, so that nobody waits for it. One that lives and does not come is waited for as
long as the caller's group waits. The members of a team need no signs: the call that the team answers tells them.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchopt_dist.collectives.watched_group import PATIENCE, TookTooLongError, WatchedGroup, watched_group
from torchopt_dist.diff.adjoints._signs import Signs, named
from torchopt_dist.errors import CollectiveError
from torchopt_dist.process.liveness import Liveness, ended_ranks
from torchopt_dist.torch_private import engine_run, outside_of_transforms, time_out_of, when_run_fails

__all__ = ["RankGroup", "group_for_loops"]


class RankGroup:
    """The messages of the ranks that run one loop.

    Args:
        group: their process group; ``None`` for a team of one, which sends nothing.
        signs: what they know of each other; ``None`` for a team.
    """

    def __init__(self, group: WatchedGroup | None, signs: Signs | None = None) -> None:
        self._group, self._signs = group, signs
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.parts = 1 if signs is None else self.size
        """Of how many ranks a rank's own tensors have the gradient: the caller of a team takes the mean himself."""
        self._last: Any = None
        self.is_agreed = False
        """Whether an error that is raised now is raised on all ranks."""
        self._tells = 0
        """In how many contexts of :meth:`failing` this rank is: they know the error."""
        self._run = -1
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

    def any(self, flag: bool, like: Tensor) -> bool:
        """Whether it is true on any rank; the same on all of them, who ask on the device of a tensor."""
        count = torch.tensor([float(flag)], device=like.device)
        with outside_of_transforms():
            self.all_reduce(count)
            return bool(count > 0)

    def agreed(self, value: Any) -> list[Any]:
        """As :meth:`exchanged`, where a loop or its backward pass begins; a warning names ranks that come late."""
        if self._signs is None:
            return self.exchanged(value)
        with self._signs.coming():
            return self.exchanged(value)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """A context in which an error ends the group, so that the others get an error, too, and need not wait."""
        self.is_agreed = False
        self._tells += 1
        try:
            yield
            self._drain()
        except BaseException as error:
            if self._signs is not None and self._group is not None and not self.is_agreed:
                self._close(error, self._group, self._signs)
            raise
        finally:
            self._tells -= 1

    def in_backward(self) -> None:
        """Note that the backward that runs in this thread sends messages: if it fails anywhere, the others are told.

        The error may be that of a node of torch's or of the caller's, so that no code of this package sees it.
        """
        run = engine_run()
        if self._signs is not None and not self._tells and run not in (-1, self._run):
            self._run, self.is_agreed = run, False
            when_run_fails(partial(_backward_failed, weakref.ref(self)))

    def _backward_failed(self) -> None:
        if self._signs is not None and self._group is not None and not self.is_agreed:
            self._signs.note_error("an error in its backward pass, outside of what a loop runs again")
            self._close(None, self._group, self._signs)

    def _done(self, collective: str, tensor: Tensor, *args: Any) -> None:
        """Make a collective, and wait until it is done, or until a rank is known to have failed."""
        try:
            if self._group is None:
                raise RuntimeError("the group of these ranks was closed after an error")
            if self._signs is not None:
                self._signs.begin_message()
            work = self._group.run(collective, *args)
            self._last = work if tensor.is_cuda else None
            work.wait()
        except RuntimeError as error:
            raise self._ended_by(error) from error

    def _drain(self) -> None:
        """Where a collective is only queued, wait for the last one: after a loss it would be without an error."""
        work, self._last = self._last, None
        begun = time.monotonic()
        while work is not None and self._group is not None and not work.is_completed():
            try:
                self._group.check()
                if time.monotonic() - begun > self._group.limit.total_seconds():
                    raise TookTooLongError(f"a collective has taken {self._group.limit}")
            except RuntimeError as error:
                raise self._ended_by(error) from error
            time.sleep(0.0005)

    def _ended_by(self, error: RuntimeError) -> CollectiveError:
        """The error of a message that has failed, after which there are no more."""
        group, signs = self._group, self._signs
        known = [] if signs is None or signs.lost else signs.errors()
        texts = known or [str(error).strip().partition("\n")[0]]
        if signs is not None and group is not None:
            if isinstance(error, TookTooLongError) and (missing := self._missing(signs)):
                texts = [
                    f"{named(missing)} not come to it for {group.limit}, the time-out of the process group"
                ]
                signs.note_error(f"CollectiveError: {texts[0]}")
            elif not known and signs.lost is None and (silent := signs.silent()):
                texts = signs.errors() or [f"{named(silent)} given no sign of life since", *texts]
            self._close(None, group, signs)
        return CollectiveError(
            f"a message among the {self.size} ranks that run one loop failed on rank {self.rank}, since another rank "
            f"has died, has raised an error, or waits elsewhere: {'; '.join(texts)}"
        )

    def _missing(self, signs: Signs) -> list[int]:
        """The ranks that are not at this message, by signs that have been given since."""
        time.sleep(2 * signs.interval)
        with contextlib.suppress(Exception):  # the store has gone with the first rank
            return signs.missing()
        return []

    def _close(self, error: BaseException | None, group: WatchedGroup, signs: Signs) -> None:
        if not isinstance(error, CollectiveError | None):
            text = str(error).strip().partition("\n")[0]
            signs.note_error(f"{type(error).__name__}: {text}")
        signs.end()
        group.fail()
        group.shutdown()
        self._group = self._last = None


def _backward_failed(group: weakref.ref[RankGroup]) -> None:
    if (found := group()) is not None:
        found._backward_failed()


def group_for_loops(group: Any, number: int) -> RankGroup:
    """A group of their own for the loops of the ranks of a process group; all of them call this.

    Args:
        group: the process group.
        number: how many such groups there were before; earlier ones are closed.

    Raises:
        CollectiveError: the program of a rank has ended, or a rank has not come within the time-out of the group.
    """
    store = dist.PrefixStore(f"torchopt_dist/loops/{number}", _connected_anew(group))
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    limit = time_out_of(group, PATIENCE)
    signs = Signs(store, rank, size, Liveness.from_environment())
    world = _connected_anew(dist.group.WORLD)
    of_world = dist.get_process_group_ranks(group)
    signs.await_all(
        limit, lambda: [dist.get_group_rank(group, ended) for ended in ended_ranks(world, of_world)]
    )
    made = watched_group(rank, size, number, store, signs.check, limit)
    ranks = RankGroup(made, signs)
    ranks.exchanged(None)  # all are connected before one of them may close its connections
    signs.watch(made.fail)
    return ranks


def _connected_anew(group: Any) -> Any:
    """The store of a process group by a connection of its own: other threads may wait in that of the group."""
    store = group.get_group_store()
    with contextlib.suppress(RuntimeError):
        return store.clone()
    return store
