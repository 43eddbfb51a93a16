"""The values of all workers → a value by rank, or by host and local rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar

from torchopt_dist.arguments.missing_names import missing_methods
from torchopt_dist.errors import AgentFailedError, WorkerFailedError
from torchopt_dist.launching.options import check_integer

__all__ = ["LaunchResult"]

T = TypeVar("T")


@missing_methods(values="results", value="rank(0)", result="rank(0)")
@dataclass(frozen=True)
class LaunchResult(Generic[T]):
    """The values that the function returned on the workers.

    Attributes:
        results: host → the values of its workers, by local rank. Hosts are in the order of ``hosts``; the second entry
            of the same host is called ``"<name>#2"``. The value of a worker that was lost (``on_loss="continue"``) is
            the error that says how.
        lost: the ranks of the workers that were lost → these errors.
        replaced: the ranks that were given to new processes (``on_loss="replace"``) → the errors of the earlier
            processes. The value of such a rank is that of its last process, or ``None`` if this process started when
            the others were ending.

    Example:
        >>> result = LaunchResult({"localhost": ["a", "b"], "localhost#2": ["c"]})
        >>> result.rank(2), result.index("localhost", 1)
        ('c', 'b')
    """

    results: dict[str, list[T]]
    lost: dict[int, WorkerFailedError | AgentFailedError] = field(default_factory=dict)
    replaced: dict[int, list[WorkerFailedError]] = field(default_factory=dict)

    def rank(self, rank: int) -> T:
        """The value of a rank.

        Raises:
            WorkerFailedError: the rank was lost, as was its host if it is an :class:`AgentFailedError`.
            IndexError: there is no such rank.
            TypeError: ``rank`` is not an integer.
        """
        values = [value for values in self.results.values() for value in values]
        check_integer("rank", rank)
        if not 0 <= rank < len(values):
            raise IndexError(f"`rank` must be in [0, {len(values)}), got {rank}")
        if int(rank) in self.lost:
            raise self.lost[int(rank)]
        return values[rank]

    def __getitem__(self, rank: Any) -> NoReturn:
        """Raise ``TypeError``: the value of a rank is ``rank(i)``."""
        raise TypeError(
            f"`LaunchResult` is not subscriptable: the value of rank {rank!r} is `result.rank({rank!r})`"
        )

    def index(self, host: str, local_rank: int) -> T:
        """The value of a host's worker.

        Raises:
            WorkerFailedError: the worker was lost; see :meth:`rank`.
            KeyError: there is no such host.
            IndexError: it has no such worker.
            TypeError: ``host`` is no name, or ``local_rank`` no integer.
        """
        if not isinstance(host, str):
            raise TypeError(f"`host` must be a name, got {type(host).__name__} {host!r:.200}")
        check_integer("local_rank", local_rank)
        if host not in self.results:
            raise KeyError(f"`host` must be one of {', '.join(self.results)}, got {host!r}")
        values = self.results[host]
        if not 0 <= local_rank < len(values):
            raise IndexError(f"`local_rank` must be in [0, {len(values)}) on {host}, got {local_rank}")
        value: object = values[local_rank]
        if any(value is error for error in self.lost.values()):
            assert isinstance(value, Exception)
            raise value
        return values[local_rank]
