"""Where the hub listens: who shows no token is refused, said once in the log, and takes the place of nobody."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import socket

import pytest

from tests.waits import wait_until
from torchopt_dist.distributed.membership import listener


def talk(address, data, *, shut=True):
    """Send ``data`` as a stranger; what comes back until the other side closes."""
    with socket.create_connection((address["host"], address["port"]), timeout=5) as stranger:
        try:
            stranger.sendall(data)
            if shut:
                stranger.shutdown(socket.SHUT_WR)
            return stranger.recv(1000)
        except ConnectionError:  # refused before all was said
            return b""


STRANGERS = {
    "a wrong token": b"0" * 32 + b'\n{"failed": 1, "report": "a lie"}\n',
    "no token": b'{"failed": 1, "report": "a lie"}\n',
    "nothing": b"",
    "a line without an end": b"GET / HTTP/1.1",
    "bytes that are no text": bytes(range(128, 256)) * 100 + b"\n",
    "an endless line": b"x" * (listener.MAX_LINE + 100_000),
}


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_connection_without_the_token_is_refused_and_logged_and_does_no_harm(lines, caplog, data):
    line = lines("a", "b")
    with caplog.at_level(logging.WARNING, listener.__name__):
        assert talk(line.hub(), data) == b""
        wait_until(lambda: "refused a connection without the token" in caplog.text)
    assert [record.levelname for record in _logged(caplog)] == ["WARNING"]
    assert line.ends[0]._hub._listener.token not in caplog.text
    for future in [line.barrier(rank, [0, 1]) for rank in range(2)]:
        future.result()
    assert line.heard == [[], []]


def _logged(caplog):
    """What the listener has logged: other tests' threads may log beside it."""
    return [record for record in caplog.records if record.name == listener.__name__]


def test_a_silent_connection_is_refused_after_a_while(lines, caplog, limits):
    limits(token_seconds=0.2)
    line = lines("a", "b")
    with caplog.at_level(logging.WARNING, listener.__name__):
        assert talk(line.hub(), b"", shut=False) == b""
        wait_until(lambda: "refused a connection without the token" in caplog.text)
    for future in [line.barrier(rank, [0, 1]) for rank in range(2)]:
        future.result()


def test_many_connections_without_a_token_keep_nobody_out_and_fill_no_log(lines, caplog):
    line = lines("a", "b")
    most = 2 + listener.MORE_STRANGERS
    with contextlib.ExitStack() as opened:
        address = (line.hub()["host"], line.hub()["port"])
        strangers = [opened.enter_context(socket.create_connection(address, 5)) for _ in range(3 * most)]
        for oldest in strangers[: 2 * most]:
            with contextlib.suppress(ConnectionError):
                assert oldest.recv(1) == b""  # ended, long before the time for the token is over
        line.cut(1)
        wait_until(lambda: line.ends[0].failures)
        assert len(line.ends[0]._hub._listener._strangers) == most
    logged = _logged(caplog)
    assert 1 <= len(logged) <= 3
    assert {record.levelname for record in logged} == {"WARNING"}


def test_a_moment_without_free_descriptors_delays_who_connects(lines, caplog, monkeypatch, limits):
    limits(retry_seconds=0.02)
    line = lines("a", "b", joined=False)
    loop, errors = line.ends[0]._loop, itertools.repeat(OSError(errno.EMFILE, "Too many open files"), 5)
    accept = loop.sock_accept

    async def sock_accept(listening):
        for error in errors:
            raise error
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", sock_accept)
    for future in line.join():
        future.result()
    assert [record.message for record in _logged(caplog)] == [
        "the membership hub cannot accept a connection: [Errno 24] Too many open files"
    ]


def test_refused_connections_do_not_take_the_place_of_workers_still_to_come(lines, caplog):
    line = lines("a", "b", joined=False)
    hub = line.join(ranks=[0])[0]
    join = json.dumps({"join": {"rank": 1, "name": "evil", "program": ""}}).encode()
    assert talk(line.hub(), b"0" * 32 + b"\n" + join + b"\n") == b""
    (other,) = line.join(ranks=[1])
    assert [member.name for member in hub.result()] == ["a", "b"]
    assert [member.name for member in other.result()] == ["a", "b"]


def test_the_hub_listens_at_the_given_address_only(lines):
    line = lines("a", "b")
    address = line.hub()
    assert address["host"] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", address["port"]), timeout=2)


def test_every_run_has_a_token_of_its_own(lines):
    tokens = {lines("a", "b").ends[0]._hub._listener.token for _ in range(3)}
    assert len(tokens) == 3
    assert all(len(token) == 32 for token in tokens)


def test_a_run_of_one_listens_nowhere(lines):
    assert lines("a").ends[0]._hub._listener._socket is None
