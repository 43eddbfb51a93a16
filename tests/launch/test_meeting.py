"""Where workers meet, with machines that are threads of this one."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

import torchopt_dist as todist
from tests.launch.descriptors import no_new_descriptors
from tests.worlds import free_port
from torchopt_dist.launch import meeting
from torchopt_dist.launch.machine import Machine, ThisMachine
from torchopt_dist.launch.meeting import LOOPBACK, Meeting
from torchopt_dist.launch.messages import Hold, Listen, Listening, Reach, pair, receive, send

pytestmark = pytest.mark.timeout(60)

ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")


class Fake(Machine):
    """A machine that is a thread. The first has `ADDRESSES`; another reaches `reaches` of them."""

    here = False

    def __init__(self, name, reaches=ADDRESSES, address="", launcher_address=""):
        self.name, self.reaches = name, reaches
        self.address, self.launcher_address = address, launcher_address
        self.threads = []

    def open_meeting(self):
        ours, theirs = pair()
        thread = threading.Thread(target=meeting.serve, args=(theirs,), daemon=True)
        thread.machine = self
        thread.start()
        self.threads.append(thread)
        return ours

    def request_agent(self, env):
        raise NotImplementedError

    def kill_agent(self, pid):
        raise NotImplementedError


@pytest.fixture(autouse=True)
def addresses(monkeypatch):
    reach = meeting._reach

    def reach_some(where, seconds):
        return reach(where, seconds) & frozenset(threading.current_thread().machine.reaches)

    monkeypatch.setattr(meeting, "_own_addresses", lambda: list(ADDRESSES))
    monkeypatch.setattr(meeting, "_reach", reach_some)


def use(place):
    """Two clients meet at the store."""
    for _ in range(2):
        store = dist.TCPStore(place.address, place.port, None, False, timedelta(seconds=10), False)
        store.set("key", "value")
        assert store.get("key") == b"value"


def listens(address, port):
    try:
        socket.create_connection((address, port), 2.0).close()
    except OSError:
        return False
    return True


def assert_silent(*places, seconds=5.0):
    deadline = time.monotonic() + seconds
    while any(listens(*place) for place in places):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# One machine.


def test_this_machine_alone_meets_at_the_loopback_address():
    place = Meeting([ThisMachine()], 0)
    assert place.address == LOOPBACK
    use(place)
    place.close()
    assert_silent((LOOPBACK, place.port))


def test_another_machine_alone_meets_at_its_loopback_address():
    far = Fake("far", address="127.0.0.2")
    place = Meeting([far, far], 0)
    assert place.address == LOOPBACK
    use(place)
    assert not any(listens(address, place.port) for address in ADDRESSES[1:])
    place.close()
    assert_silent((LOOPBACK, place.port))


@pytest.mark.parametrize("machines", [[ThisMachine()], [Fake("far")], [Fake("a"), Fake("b")]], ids=len)
def test_a_port_that_is_asked_for_is_taken(machines):
    port = free_port()
    place = Meeting(machines, port)
    assert place.port == port
    use(place)
    place.close()


def test_a_taken_port_is_an_error_that_says_where():
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        rule = rf"`master_port` must be free on 127\.0\.0\.1, or 0 for any free port, got {port}: Address already"
        with pytest.raises(todist.InitializationError, match=rule):
            Meeting([ThisMachine()], port)
        with pytest.raises(todist.InitializationError, match=rf"{rule} in use on far"):
            Meeting([Fake("far")], port)


def test_a_port_that_is_taken_at_another_address_is_taken():
    """Were the address only left out, the other host could not reach the first one, and nobody would know why."""
    with socket.create_server(("127.0.0.3", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            todist.InitializationError, match=rf"must be free on 127\.0\.0\.3, .* got {port}.* on a"
        ):
            Meeting([Fake("a"), Fake("b", reaches=("127.0.0.3",))], port)
        assert not any(listens(address, port) for address in ("127.0.0.1", "127.0.0.2", "127.0.0.4"))


def test_a_free_port_is_free_at_all_addresses(monkeypatch):
    """A port that the first address has free may be in use at another."""
    listen, tried = meeting.listen, []

    def listen_later(address, port):
        if address == "127.0.0.3" and len(tried) < 3:
            tried.append(port)
            with socket.create_server((address, port)):
                return listen(address, port)
        return listen(address, port)

    monkeypatch.setattr(meeting, "listen", listen_later)
    place = Meeting([Fake("a"), Fake("b", reaches=("127.0.0.3",))], 0)
    assert place.address == "127.0.0.3"
    assert len(tried) == 3
    use(place)
    place.close()


def test_an_address_that_is_not_ready_is_left_out(monkeypatch):
    """As one of IPv6 is in its first second."""
    monkeypatch.setattr(meeting, "_own_addresses", lambda: [LOOPBACK, "192.0.2.77", "127.0.0.2"])
    for port in (0, free_port()):
        place = Meeting([Fake("a"), Fake("b")], port)
        assert place.address == "127.0.0.2"
        place.close()


# Several machines.


def test_the_address_is_one_that_the_others_reach():
    place = Meeting([Fake("a"), Fake("b", reaches=("127.0.0.3",))], 0)
    assert place.address == "127.0.0.3"
    use(place)
    assert not any(listens(address, place.port) for address in ADDRESSES if address != place.address)
    place.close()
    assert_silent(*((address, place.port) for address in ADDRESSES))


def test_the_address_is_one_that_all_others_reach():
    others = [Fake("b", reaches=("127.0.0.2", "127.0.0.3")), Fake("c", reaches=("127.0.0.3", "127.0.0.4"))]
    place = Meeting([Fake("a"), *others], 0)
    assert place.address == "127.0.0.3"
    place.close()


def test_the_address_by_which_the_launcher_reaches_the_first_is_the_likeliest():
    first = Fake("a", address="127.0.0.4")
    for reaches, address in ((ADDRESSES, "127.0.0.4"), (ADDRESSES[:3], "127.0.0.2")):
        place = Meeting([first, Fake("b", reaches)], 0)
        assert place.address == address
        place.close()


def test_the_address_by_which_the_other_reaches_the_launcher_is_the_likeliest_if_that_is_the_first():
    this = ThisMachine()
    place = Meeting([this, Fake("b", launcher_address="127.0.0.3"), this], 0)
    assert place.address == "127.0.0.3"
    use(place)
    place.close()
    # Behind a jump host it is an address of that one.
    place = Meeting([this, Fake("b", launcher_address="192.0.2.1")], 0)
    assert place.address == "127.0.0.2"
    place.close()


def test_a_loopback_address_is_no_place_to_meet():
    with pytest.raises(todist.InitializationError, match="b cannot reach a"):
        Meeting([Fake("a"), Fake("b", reaches=(LOOPBACK,))], 0)


def test_hosts_that_reach_no_address_are_named():
    machines = [Fake("a"), Fake("b", reaches=()), Fake("c"), Fake("d", reaches=())]
    rule = r"b, d cannot reach a, where rank 0 is, at port \d+ of any of its addresses 127.* firewall"
    with pytest.raises(todist.InitializationError, match=rule):
        Meeting(machines, 0)
    for machine in machines:
        for thread in machine.threads:
            thread.join(5)
            assert not thread.is_alive()


def test_hosts_that_reach_different_addresses_are_an_error():
    machines = [Fake("a"), Fake("b", reaches=("127.0.0.2",)), Fake("c", reaches=("127.0.0.3",))]
    with pytest.raises(
        todist.InitializationError, match="b, c reach no address of a, where rank 0 is, that all of them"
    ):
        Meeting(machines, 0)


def test_a_host_that_is_lost_meanwhile_is_named(monkeypatch):
    monkeypatch.setattr(meeting, "ANSWER_SECONDS", 0.3)

    class Lost(Fake):
        def open_meeting(self):
            ours, theirs = pair()
            theirs.close()
            return ours

        def why_lost(self):
            return "its relay was ended by SIGKILL"

    class Silent(Fake):
        def open_meeting(self):
            ours, self.theirs = pair()
            return ours

    with pytest.raises(todist.AgentFailedError, match=r"b gave no answer .*: its relay was ended by SIGKILL"):
        Meeting([Fake("a"), Lost("b")], 0)
    with pytest.raises(todist.AgentFailedError, match=r"a gave no answer .*: its relay was ended by SIGKILL"):
        Meeting([Lost("a"), Fake("b")], 0)
    silent = Silent("b")
    with pytest.raises(todist.AgentFailedError, match=r"b gave no answer .*: 0\.3 s have passed"):
        Meeting([Fake("a"), silent], 0)
    assert has_ended(silent.theirs)
    silent.theirs.close()


def has_ended(channel):
    while (message := receive(channel)) is not None:
        assert isinstance(message[0], Reach)
    return True


def test_nothing_is_kept_of_a_meeting():
    Meeting([Fake("a"), Fake("b")], 0).close()
    threads = set(threading.enumerate())
    with no_new_descriptors():
        for _ in range(5):
            place = Meeting([Fake("a"), Fake("b")], 0)
            use(place)
            place.close()
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive()


# The door.


@pytest.fixture
def door():
    """A channel to the first host, and where that listens."""
    host = Fake("a")
    with contextlib.closing(host.open_meeting()) as channel:
        channel.settimeout(10)
        send(channel, Listen(0))
        where, _ = receive(channel)
        yield channel, where


def test_a_stranger_gets_a_token_and_nothing_else(door):
    channel, where = door
    for said in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(1 << 16)):
        with socket.create_connection((where.addresses[1], where.port), 5) as stranger:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(said)
            heard = b""
            with contextlib.suppress(ConnectionError):
                while more := stranger.recv(1 << 16):
                    heard += more
            assert heard in (where.token, b"")
            assert heard or said  # what is not read before the end may cost the stranger the token
    with socket.create_connection((where.addresses[1], where.port), 5):
        pass  # nor does one matter who leaves at once
    threading.current_thread().machine = Fake("b")
    assert meeting._reach(where, 5.0) == frozenset(ADDRESSES)
    send(channel, Hold(where.addresses[2]))
    receive(channel)
    store = dist.TCPStore(where.addresses[2], where.port, None, False, timedelta(seconds=10), False)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_tokens_differ(door):
    with contextlib.closing(Fake("other").open_meeting()) as channel:
        send(channel, Listen(0))
        other, _ = receive(channel)
    assert len(other.token) == len(door[1].token) == 16
    assert other.token != door[1].token


def reach(port, token=b"t" * 16, seconds=1.0):
    threading.current_thread().machine = Fake("b")
    start = time.monotonic()
    found = meeting._reach(Listening(("127.0.0.2",), port, token), seconds)
    assert time.monotonic() - start < seconds + 2.0
    return found


def test_another_machine_with_the_same_address_is_told_apart(door):
    """In a network of its own it may have one of the first host's addresses, and listen at that port."""
    _, where = door
    assert reach(where.port, where.token) == {"127.0.0.2"}
    assert reach(where.port) == frozenset()


@pytest.mark.parametrize(
    "says", [b"", b"t", b"t" * 15 + b"T", None], ids=["nothing", "some", "wrong", "silent"]
)
def test_another_program_there_is_told_apart(says):
    with socket.create_server(("127.0.0.2", 0)) as server:

        def answer():
            caller = server.accept()[0]
            if says is None:
                gone.wait(10)
            else:
                caller.sendall(says)
            caller.close()

        gone = threading.Event()
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert reach(server.getsockname()[1]) == frozenset()
        gone.set()
        thread.join(5)


def test_a_port_where_nobody_listens_is_not_reached():
    assert reach(free_port()) == frozenset()


def test_own_addresses_are_those_of_interfaces_that_are_up(monkeypatch):
    monkeypatch.undo()
    found = meeting._own_addresses()
    assert found[0] == LOOPBACK
    assert not any(address.startswith("127.") or address == "::1" or "%" in address for address in found[1:])
    known = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    assert set(found) <= known
    monkeypatch.setattr(psutil, "net_if_stats", dict)
    assert meeting._own_addresses() == [LOOPBACK]
