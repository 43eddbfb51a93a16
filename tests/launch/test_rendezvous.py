"""Where workers meet: what the launcher makes of the agents' answers, and what the agents do for that."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

import torchopt_dist as todist
from tests.launch.descriptors import no_new_descriptors
from tests.processes import ON_TWO, free_port
from torchopt_dist.launching import Launcher
from torchopt_dist.launching import _store as store
from torchopt_dist.launching._hosts import agree
from torchopt_dist.launching._messages import Listening, ToAgent
from torchopt_dist.launching._store import Listeners, store_at
from torchopt_dist.process.network import LOOPBACK

pytestmark = pytest.mark.timeout(60)

ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")


@pytest.fixture(autouse=True)
def addresses(monkeypatch):
    monkeypatch.setattr(store, "_own_addresses", lambda: list(ADDRESSES))


@dataclass(eq=False)
class Place:
    here: bool
    address: str
    launcher_address: str


class Fake:
    """An agent. The first listens at `ADDRESSES`; another reaches `reaches` of them."""

    def __init__(self, name, reaches=ADDRESSES, address="", launcher_address="", here=False):
        self.name, self.reaches = name, reaches
        self.machine = Place(here, address, launcher_address)

    def answer(self, question, *args):
        if question is ToAgent.listen:
            self.listeners = Listeners(*args)
            return self.listeners.where
        where, _ = args
        assert len(where.token) == 16
        return frozenset(where.ports) & frozenset(self.reaches)


def meet(agents, port=0):
    def ask(asked, question, *args):
        return [agent.answer(question, *args) for agent in asked]

    try:
        return agree(agents, port, ask)
    finally:
        for agent in agents:
            if hasattr(agent, "listeners"):
                agent.listeners.close()


# What the launcher makes of the answers.


def test_one_machine_meets_at_its_loopback_address():
    assert meet([Fake("far", address="127.0.0.2")])[0] == LOOPBACK
    twice = Fake("here", here=True)
    again = Fake("here#2")
    again.machine = twice.machine
    assert meet([twice, again])[0] == LOOPBACK


def test_the_address_is_one_that_all_others_reach():
    assert meet([Fake("a"), Fake("b", reaches=("127.0.0.3",))])[0] == "127.0.0.3"
    others = [Fake("b", reaches=("127.0.0.2", "127.0.0.3")), Fake("c", reaches=("127.0.0.3", "127.0.0.4"))]
    assert meet([Fake("a"), *others])[0] == "127.0.0.3"


def test_the_address_by_which_the_launcher_reaches_the_first_is_the_likeliest():
    first = Fake("a", address="127.0.0.4")
    assert meet([first, Fake("b")])[0] == "127.0.0.4"
    assert meet([first, Fake("b", ADDRESSES[:3])])[0] == "127.0.0.2"


def test_the_address_by_which_the_other_reaches_the_launcher_is_the_likeliest_if_that_is_the_first():
    this = Fake("here", here=True)
    assert meet([this, Fake("b", launcher_address="127.0.0.3")])[0] == "127.0.0.3"
    # Behind a jump host it is an address of that one.
    assert meet([this, Fake("b", launcher_address="192.0.2.1")])[0] == "127.0.0.2"


def test_a_loopback_address_is_no_place_to_meet():
    with pytest.raises(todist.errors.InitializationError, match="b cannot reach a"):
        meet([Fake("a"), Fake("b", reaches=(LOOPBACK,))])


def test_hosts_that_reach_no_address_are_named():
    rule = r"b, d cannot reach a, where rank 0 is, at any of its addresses 127\.0\.0\.2 port \d+, .* firewall"
    with pytest.raises(todist.errors.InitializationError, match=rule):
        meet([Fake("a"), Fake("b", reaches=()), Fake("c"), Fake("d", reaches=())])


def test_hosts_that_reach_different_addresses_are_an_error():
    agents = [Fake("a"), Fake("b", reaches=("127.0.0.2",)), Fake("c", reaches=("127.0.0.3",))]
    with pytest.raises(
        todist.errors.InitializationError,
        match="b, c reach no address of a, where rank 0 is, that all of them",
    ):
        meet(agents)


def test_a_port_that_is_asked_for_is_taken():
    for agents in ([Fake("a")], [Fake("a"), Fake("b")]):
        port = free_port()
        assert meet(agents, port)[1] == port


# How an agent listens.


def test_a_taken_port_is_an_error_that_says_where():
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        rule = rf"`master_port` must be free on 127\.0\.0\.1, or 0 for any free port, got {port}: Address already"
        for everywhere in (False, True):
            with pytest.raises(todist.errors.InitializationError, match=rule):
                Listeners(port, everywhere)


def listens(address, port):
    try:
        socket.create_connection((address, port), 2.0).close()
    except OSError:
        return False
    return True


def test_a_port_that_is_taken_at_another_address_is_taken():
    """Were the address only left out, the other host could not reach the first one, and nobody would know why."""
    with socket.create_server(("127.0.0.3", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(todist.errors.InitializationError, match=rf"free on 127\.0\.0\.3, .* got {port}"):
            Listeners(port, True)
        assert not any(listens(address, port) for address in ("127.0.0.1", "127.0.0.2", "127.0.0.4"))


def test_an_address_that_is_not_ready_is_left_out(monkeypatch):
    """As one of IPv6 is in its first second."""
    monkeypatch.setattr(store, "_own_addresses", lambda: [LOOPBACK, "192.0.2.77", "127.0.0.2"])
    for port in (0, free_port()):
        with contextlib.closing(Listeners(port, True)) as listeners:
            assert list(listeners.where.ports) == [LOOPBACK, "127.0.0.2"]
            assert port == 0 or set(listeners.where.ports.values()) == {port}


def test_own_addresses_are_those_of_interfaces_that_are_up(monkeypatch):
    monkeypatch.undo()
    found = store._own_addresses()
    assert found[0] == LOOPBACK
    assert not any(address.startswith("127.") or address == "::1" or "%" in address for address in found[1:])
    known = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    assert set(found) <= known
    monkeypatch.setattr(psutil, "net_if_stats", dict)
    assert store._own_addresses() == [LOOPBACK]


def test_a_store_is_held_at_one_of_the_addresses_and_nothing_of_it_is_kept():
    def hold():
        listeners = Listeners(0, True)
        others = list(listeners.where.ports.items())
        address, port = others.pop(2)
        held = store_at(listeners.keep(address))
        for _ in range(2):
            client = dist.TCPStore(address, port, None, False, timedelta(seconds=10), False)
            client.set("key", "value")
            assert client.get("key") == b"value"
        assert not any(listens(*other) for other in others)
        del held

    hold()
    with no_new_descriptors():
        hold()


# How an agent reaches another.


class Greeting:
    """Listeners that greet, in a thread."""

    def __enter__(self):
        self.listeners = Listeners(0, True)
        self.where = self.listeners.where
        self._threads = [
            threading.Thread(target=self._greet, args=(each,), daemon=True) for each in self.listeners
        ]
        for thread in self._threads:
            thread.start()
        return self

    def _greet(self, listener):
        listener.setblocking(True)
        while not hasattr(self, "ended"):
            self.listeners.greet(listener)

    def __exit__(self, *_):
        self.ended = True
        for place in self.where.ports.items():
            socket.create_connection(place).close()
        for thread in self._threads:
            thread.join(10)
        self.listeners.close()


def reach(ports, token=b"t" * 16, seconds=1.0):
    start = time.monotonic()
    found = store.reach(Listening(ports, token), seconds, lambda: True)
    assert time.monotonic() - start < seconds + 2.0
    return found


def test_a_stranger_gets_a_token_and_nothing_else():
    with Greeting() as host:
        where, place = host.where, list(host.where.ports.items())[1]
        for said in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(1 << 16)):
            with socket.create_connection(place, 5) as stranger:
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(said)
                heard = b""
                with contextlib.suppress(ConnectionError):
                    while more := stranger.recv(1 << 16):
                        heard += more
                assert heard in (where.token, b"")
                assert heard or said  # what is not read before the end may cost the stranger the token
        with socket.create_connection(place, 5):
            pass  # nor does one matter who leaves at once
        assert reach(where.ports, where.token, 10.0) == frozenset(ADDRESSES)


def test_another_machine_with_the_same_address_is_told_apart():
    """In a network of its own it may have one of the first host's addresses, and listen at that port."""
    with Greeting() as host, Greeting() as other:
        place = {"127.0.0.2": host.where.ports["127.0.0.2"]}
        assert len(other.where.token) == len(host.where.token) == 16
        assert other.where.token != host.where.token
        assert reach(place, host.where.token, 10.0) == {"127.0.0.2"}
        assert reach(place, other.where.token) == frozenset()


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
        assert reach({"127.0.0.2": server.getsockname()[1]}, seconds=0.3) == frozenset()
        gone.set()
        thread.join(5)


def test_a_port_where_nobody_listens_is_not_reached():
    assert reach({"127.0.0.2": free_port()}) == frozenset()


# In a launch.


def test_the_port_is_free_again_after_a_launch():
    launcher = Launcher(nproc_per_host=1, master_port=free_port(), handlers=[])
    for _ in range(3):
        assert launcher.run(os.getenv, "MASTER_PORT").rank(0) == str(launcher.master_port)


def test_the_store_outlives_the_worker_of_rank_zero():
    """It is the agent that holds it, so the others can still end in order."""

    def main():
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        client = dist.TCPStore(host, port, None, False, timedelta(seconds=10), False)
        if os.environ["RANK"] == "0":
            client.set("pid", str(os.getpid()))
            return None
        pid = int(client.get("pid"))
        deadline = time.monotonic() + 10
        while psutil.pid_exists(pid):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return client.get("pid") == str(pid).encode()

    assert ON_TWO.run(main).rank(1) is True
