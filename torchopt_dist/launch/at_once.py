"""A function, items → what it makes of each of them, all at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["at_once"]

T = TypeVar("T")
R = TypeVar("R")


def at_once(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Call a function with each item, each in a thread.

    An interrupt ends the wait, and the program need not wait for the threads, as it would for those of
    :class:`~concurrent.futures.ThreadPoolExecutor`.

    Args:
        function: called once for each item.
        items: its arguments.

    Returns:
        The values, in the order of the items.

    Raises:
        BaseException: what a call raised, as soon as it did.

    Example:
        >>> at_once(len, ["one", "three"])
        [3, 5]
    """
    ended: queue.SimpleQueue[tuple[int, list[R], BaseException | None]] = queue.SimpleQueue()

    def call(index: int, item: T) -> None:
        try:
            ended.put((index, [function(item)], None))
        except BaseException as error:
            ended.put((index, [], error))

    for index, item in enumerate(items):
        threading.Thread(target=call, args=(index, item), name=f"todist {index}", daemon=True).start()
    values: dict[int, R] = {}
    for _ in items:
        index, value, error = ended.get()
        if error is not None:
            raise error
        (values[index],) = value
    return [values[index] for index in range(len(items))]
