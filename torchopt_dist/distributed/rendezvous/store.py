"""MASTER_ADDR and MASTER_PORT → a key-value store in which no earlier run has written.

A store can outlive the workers: torchrun's agent keeps its own across restarts, and a second RPC group of one program
meets the first one's keys. A worker that reads such a stale key would wait for a process that is gone. So every rank
first exchanges a fresh token with rank 0, and the nonce that rank 0 sends in answer to the tokens prefixes every key
from then on.

The exchange: rank r writes a fresh token under ``hello/r``. Rank 0 answers each token it sees with the nonce, under
``welcome/<token>``; a token left by a dead run is answered too, and nobody reads it. Rank r writes ``ack/<nonce>/r``
when it has its answer, and rank 0 is done when it has seen all of these.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar
from urllib.parse import urlparse

import torch.distributed as dist

from torchopt_dist.errors import InitializationError

__all__ = ["GroupEndedError", "init_timeout", "init_url", "note_end", "note_start", "rendezvous"]

T = TypeVar("T")

SCHEME = "todist"
RUNNING = "running"
"""The key of the nonce of the run that a new process for a lost worker is to join; empty if that has ended."""
POLL_SECONDS = 0.005

_stores: dict[str, dist.Store] = {}
"""By nonce, while ``init_rpc`` runs: torch passes a rendezvous handler nothing but a URL."""


class GroupEndedError(ConnectionRefusedError):
    """This worker is to replace a lost one, and the others do not need it any more."""

    def __init__(self, text: str = "the others are at their end") -> None:
        super().__init__(text)


def init_timeout() -> float:
    """Seconds that workers wait for each other at the start: ``TODIST_INIT_TIMEOUT``, or 300."""
    text = os.environ.get("TODIST_INIT_TIMEOUT", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise InitializationError(
            f"the environment variable TODIST_INIT_TIMEOUT must be a positive number of seconds, got {text!r}"
        )
    return seconds


def rendezvous(rank: int, world_size: int, init_method: str, incarnation: int = 0) -> tuple[str, dist.Store]:
    """Wait until all ranks have come, and agree on a nonce, or take the others' one; returns it, and the run's store.

    Raises ``InitializationError`` if the store cannot be reached, or ranks are missing, after :func:`init_timeout`, and
    ``GroupEndedError`` if the others have ended, or are ending, already.
    """
    if world_size == 1 and init_method == "env://":
        return uuid.uuid4().hex, dist.HashStore()  # nobody to meet, so no port is opened
    seconds = init_timeout()
    deadline = time.monotonic() + seconds
    try:
        store = _in_time(lambda: _make_store(rank, world_size, init_method, seconds), seconds)
    except (RuntimeError, ValueError, TimeoutError) as error:
        where = f"{os.environ.get('MASTER_ADDR', '(unset)')}:{os.environ.get('MASTER_PORT', '(unset)')}"
        reason = str(error).partition("\n")[0] or f"no answer within {seconds:g} s (TODIST_INIT_TIMEOUT)"
        raise InitializationError(
            f"rank {rank} of {world_size} cannot reach the store: init_method={init_method!r}, "
            f"MASTER_ADDR:MASTER_PORT={where}: {reason}"
        ) from error
    store = dist.PrefixStore("torchopt_dist", store)
    try:
        if rank == 0:
            nonce = _welcome(store, world_size, deadline)
        else:
            nonce = _say_hello(store, rank, deadline, comes_late=incarnation > 0)
    except dist.DistError as error:
        raise InitializationError(
            f"rank {rank} of {world_size} lost the store while it waited for the others: rank 0 has ended"
        ) from error
    return nonce, dist.PrefixStore(nonce, store)


def _make_store(rank: int, world_size: int, init_method: str, seconds: float) -> dist.Store:
    timeout = timedelta(seconds=seconds)
    url = urlparse(init_method)
    if url.scheme not in ("env", "tcp"):
        return next(iter(dist.rendezvous(init_method, rank, world_size, timeout=timeout)))[0]
    host, port = (
        (url.hostname or "", url.port or 0)
        if url.scheme == "tcp"
        else (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    )
    agent_holds_store = url.scheme == "env" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # In torch's own rendezvous rank 0 waits for the others here, and does not know which of them are missing.
    return dist.TCPStore(
        host,
        port,
        None,
        is_master=rank == 0 and not agent_holds_store,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _in_time(function: Callable[[], T], seconds: float) -> T:
    """Call a function that may never return, such as a store's client where another program listens at the port."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future.result(seconds)


def _welcome(store: dist.Store, world_size: int, deadline: float) -> str:
    nonce = uuid.uuid4().hex
    answered: dict[int, bytes] = {}
    missing = set(range(1, world_size))
    while missing:
        for rank in sorted(missing):
            if store.check([f"ack/{nonce}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"hello/{rank}"]):
                token = store.get(f"hello/{rank}")
                if answered.get(rank) != token:
                    store.set(f"welcome/{token.decode()}", nonce)
                    answered[rank] = token
        if missing:
            if time.monotonic() > deadline:
                raise InitializationError(
                    f"rank 0 waited {init_timeout():g} s (TODIST_INIT_TIMEOUT) for all {world_size} workers; "
                    f"missing: rank {', '.join(map(str, sorted(missing)))}"
                )
            time.sleep(POLL_SECONDS)
    return nonce


def note_start(store: dist.Store, nonce: str) -> None:
    """On rank 0: publish this run for processes that start later in place of lost workers."""
    _outer(store).set(RUNNING, nonce)


def note_end(store: dist.Store) -> None:
    """On rank 0: record that this run is over for processes that start later."""
    with contextlib.suppress(dist.DistError):  # the store has gone, and they will notice
        _outer(store).set(RUNNING, "")


def _outer(store: dist.Store) -> dist.Store:
    assert isinstance(store, dist.PrefixStore)
    return store.underlying_store


def _say_hello(store: dist.Store, rank: int, deadline: float, *, comes_late: bool = False) -> str:
    token = uuid.uuid4().hex
    store.set(f"hello/{rank}", token)
    while not store.check([f"welcome/{token}"]):
        if comes_late and store.check([RUNNING]):
            nonce = store.get(RUNNING).decode()
            if not nonce:
                raise GroupEndedError
            return nonce
        if time.monotonic() > deadline:
            raise InitializationError(
                f"rank {rank} waited {init_timeout():g} s (TODIST_INIT_TIMEOUT) for rank 0, which did not answer"
            )
        time.sleep(POLL_SECONDS)
    nonce = store.get(f"welcome/{token}").decode()
    store.set(f"ack/{nonce}/{rank}", "")
    return nonce


@contextmanager
def init_url(nonce: str, store: dist.Store) -> Iterator[str]:
    """The ``init_method`` by which ``init_rpc`` finds ``store``, until the context is left."""
    _stores[nonce] = store
    try:
        yield f"{SCHEME}://{nonce}"
    finally:
        del _stores[nonce]


def _handler(url: str, **options: object) -> Iterator[tuple[dist.Store, int, int]]:
    del options
    nonce, _, query = url.removeprefix(f"{SCHEME}://").partition("?")
    fields = dict(field.split("=") for field in query.split("&"))
    yield _stores[nonce], int(fields["rank"]), int(fields["world_size"])


dist.register_rendezvous_handler(SCHEME, _handler)
