"""Connections over ZeroMQ: strangers are refused, what is lost with a connection is sent again, and nothing twice."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

import torchopt_dist as todist
from tests.distributed.transport.by_hand import ENCRYPTED, TRANSPORTS, echo, send
from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.serialization.frames import PIECE
from torchopt_dist.distributed.transport.contacts import Endpoint, configure
from torchopt_dist.distributed.transport.lent_memory import LARGE
from torchopt_dist.distributed.transport.mesh import Mesh

LENT = LARGE // 4

pytestmark = pytest.mark.processes


def test_strangers_at_the_port_are_refused_and_the_worker_lives(world):
    def say(address, data):
        with contextlib.suppress(OSError), socket.create_connection(address, 5) as stranger:
            stranger.settimeout(0.2)
            with contextlib.suppress(OSError):
                for _ in range(4):
                    stranger.sendall(data)
                    stranger.recv(64)

    def refused(address, server_key):
        """The event that a client without a key of the group meets; what it sends is nowhere received."""
        context = zmq.Context()
        client = context.socket(zmq.PUSH)
        client.linger = 0
        if server_key is not None:
            client.curve_serverkey = server_key
            client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        monitor = client.get_monitor_socket(zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.DISCONNECTED)
        client.connect("tcp://{}:{}".format(*address))
        assert monitor.poll(20_000)
        event = recv_monitor_message(monitor)["event"]
        client.disable_monitor()
        context.destroy(linger=0)
        return event

    def body():
        contact = current_group().transport._mesh._links[1].contact
        host, port = contact.address.rsplit(":", 1)
        address = host, int(port)
        assert host == "127.0.0.1"
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03", secrets.token_bytes(4096)):
            say(address, data)
        events = refused(address, None), refused(address, contact.key.encode())
        assert todist.remote_call(echo, 1, "well") == "well"
        return [event in (zmq.Event.HANDSHAKE_FAILED_AUTH, zmq.Event.DISCONNECTED) for event in events]

    assert world(2, env=ENCRYPTED).on_zero(body) == [True, True]


def test_a_worker_with_another_key_than_was_told_is_sent_nothing(world):
    def body():
        if todist.get_rank() == 0:
            link = current_group().transport._mesh._links[1]
            link.contact = replace(link.contact, key=zmq.curve_keypair()[0].decode())
            with pytest.raises(todist.CallTimeoutError):
                send(echo, (1,), timeout=1).result(20)
        todist.barrier()
        return True

    assert world(2, env=ENCRYPTED).run(body) == [True, True]


@pytest.mark.parametrize(
    ("name", "elements"),
    [("zmq", 50_000), ("zmq", LENT), ("zmq over TCP", 50_000), ("zmq over TCP", PIECE)],
    ids=str,
)
def test_what_is_lost_with_a_connection_is_sent_again(world, name, elements):
    """The kernel's connections are broken again and again while calls are made; every call is made once."""

    def body():
        if todist.get_rank() == 1:
            todist.barrier()
            return None
        for number in range(60):
            x = torch.full((elements,), float(number), requires_grad=True)
            future = todist.remote_async_call(count, args=(number, x), partitioner=1)
            if number % 5 == 0:
                break_connections()
            (got,) = future.wait()
            got.sum().backward()
            assert (x.grad == 2 * number).all()
        numbers = todist.remote_call(count, 1)
        todist.barrier()
        return numbers

    assert world(2, env=TRANSPORTS[name]).run(body, timeout=100)[0] == list(range(60))


def test_a_connection_on_which_a_large_message_is_under_way_is_not_given_up():
    """The kernel probes the other end: ZeroMQ's heartbeat would wait behind the message (`benchmarks/network.py`)."""
    context = zmq.Context()
    with context, context.socket(zmq.PUSH) as socket_:
        configure(socket_)
        assert socket_.heartbeat_ivl == 0
        assert socket_.tcp_keepalive == 1
        assert 0 < socket_.tcp_keepalive_idle + socket_.tcp_keepalive_intvl * socket_.tcp_keepalive_cnt <= 4
        assert 0 < socket_.tcp_maxrt <= 4000


counted: list[int] = []


def count(number=None, x=None):
    if x is None:
        return counted
    counted.append(number)
    return x.square()


def break_connections():
    """End the connections of ZeroMQ of this process, as a network that drops them does."""
    ours = [link.contact.address for link in current_group().transport._mesh._links]
    for connection in psutil.Process().net_connections("all"):
        local, remote = connection.laddr, connection.raddr
        if connection.family == socket.AF_UNIX:
            broken = "/todist-" in str(local)
        else:
            broken = not {f"{end.ip}:{end.port}" for end in (local, remote) if end}.isdisjoint(ours)
        if broken:
            with socket.socket(fileno=os.dup(connection.fd)) as end, contextlib.suppress(OSError):
                if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    end.shutdown(socket.SHUT_RDWR)


def test_messages_of_a_lost_process_are_not_taken_for_its_successor_s(tmp_path):
    contexts = [zmq.Context() for _ in range(3)]
    ends = [Endpoint(0), Endpoint(1), Endpoint(1, incarnation=1)]  # the last two have one rank
    for end, context in zip(ends, contexts, strict=True):
        end.open(context)
    here, old, new = (end._listen_at_path() for end in ends)
    meshes = [
        Mesh(contexts[0], ends[0], [here, old]),
        Mesh(contexts[1], ends[1], [here, old]),
        Mesh(contexts[2], ends[2], [here, new], [0, 1]),
    ]
    try:
        meshes[0].forget(1)
        assert not Path(old.path).parent.exists()
        assert not meshes[0].send(1, [b"to the old one"])
        meshes[0].reopen(1, 1, new)
        assert not meshes[0].send(1, [b"to the old one"], incarnation=0)
        assert meshes[1].send(0, [b"late"])  # with the number that is next
        assert meshes[2].send(0, [b"of the new one"])
        assert meshes[0].receive()[1] == b"of the new one"
        assert meshes[1].send(0, [b"later"])
        assert meshes[2].send(0, [b"its second"])
        assert meshes[0].receive()[1] == b"its second"
        assert meshes[0].send(1, [b"an answer"], incarnation=1)
        assert meshes[2].receive()[:2] == (0, b"an answer")
    finally:
        for mesh, end, context in zip(meshes, ends, contexts, strict=True):
            mesh.close_all()
            end.close()
            end.remove_folder()
            context.term()


def test_a_rank_that_may_end_at_any_moment_has_removed_the_folder_of_its_socket(world):
    """As one that another one's end ends while it sleeps in C code: it has no time for `stop`."""

    def main():
        transport = current_group().transport
        folder = Path(transport._here._folder)
        before = folder.exists()
        if todist.get_rank() == 1:
            transport.worker_lost(1, todist.WorkerLostError("the group ends"))
        return before, folder.exists()

    assert world(2).run(main, transport="zmq") == [(True, True), (True, False)]
