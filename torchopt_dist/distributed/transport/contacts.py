"""A store → the addresses of all workers, and the keys of those who may connect.

Workers of one user on one machine use Unix sockets in folders that only this user can enter; the kernel tells the user
of the other end. Workers of several machines use TCP with CURVE: each has a pair of keys for this run, publishes the
public one through the store, in a signed note, and refuses connections without one of the others' keys; all messages
are encrypted. The secret keys leave no process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path

import zmq
from zmq.utils import z85

from torchopt_dist.distributed.rendezvous.sealed_store import SealedStore
from torchopt_dist.distributed.transport.lent_memory import let_siblings_read
from torchopt_dist.process import network

__all__ = ["IPC_VARIABLE", "Contact", "Endpoint", "configure", "contact_of"]

IPC_VARIABLE = "TODIST_ZMQ_IPC"
"""0: TCP with CURVE between workers of one machine, too."""
LONGEST_PATH = 100
"""Bytes; systems allow a Unix socket's path little more."""
DOMAIN = "todist"
PROBE_SECONDS, PROBES, DEAD_AFTER_MS = 1, 3, 4000
HANDSHAKE_MS = 5000
RECONNECT_MS = 50


@dataclass(frozen=True)
class Contact:
    """The address of a worker.

    Attributes:
        machine: equal for workers that can reach each other's Unix sockets; unique if it has none.
        path: of its Unix socket.
        address: ``host:port``; empty where all workers are on one machine.
        key: its public key.
    """

    machine: str
    path: str
    address: str = ""
    key: str = ""


class Endpoint:
    """The listening socket of this worker, which exists while the endpoint is open."""

    socket: zmq.Socket[bytes]

    def __init__(self, rank: int, incarnation: int = 0) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self._keys: set[bytes] = set()
        self._public, self._secret = zmq.curve_keypair()
        self._folder: str | None = None
        self._machine = ""

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Make the socket."""
        self._context = context
        self.socket = context.socket(zmq.PULL)
        configure(self.socket)

    def meet(self, store: SealedStore, size: int, host: str) -> list[Contact]:
        """Listen at a host that the others reach, and publish the address; returns all contacts, not yet connected."""
        here = self._listen_at_path()
        contacts = self._exchange(store, "machine", here, size)
        if len({contact.machine for contact in contacts}) > 1:
            contacts = self._exchange(store, "address", self._listen_at(host, here), size)
            self._open_door(contacts)
        if self.incarnation:
            self._tell(store, contacts[self.rank])
        store.plain.set(f"met/{self.rank}", "")
        if self.rank == 0:  # it holds the server, from which the others have read now
            store.plain.wait([f"met/{rank}" for rank in range(size)])
        return contacts

    def meet_late(self, store: SealedStore, incarnations: Sequence[int], host: str) -> list[Contact]:
        """As :meth:`meet`, for a worker that replaces a lost one, while the others have met already.

        ``incarnations`` are those of the present processes, by rank; of this rank, that of the lost one.
        """
        here = self._listen_at_path()
        contacts = [*map(contact_of, repeat(store), range(len(incarnations)), incarnations)]
        contacts[self.rank] = here
        if len({contact.machine for contact in contacts}) > 1:
            contacts = [
                *map(contact_of, repeat(store), range(len(incarnations)), incarnations, repeat("address"))
            ]
            contacts[self.rank] = self._listen_at(host, here)
            self._open_door(contacts)
        self._tell(store, contacts[self.rank])
        return contacts

    def admit(self, contact: Contact) -> None:
        """Accept connections of a worker that has joined later."""
        if contact.key:
            self._keys.add(z85.decode(contact.key))

    def is_near(self, contact: Contact) -> bool:
        """Whether a worker is reached at its Unix socket."""
        return contact.machine == self._machine

    def connect(self, socket: zmq.Socket[bytes], contact: Contact) -> None:
        """Connect a socket to a worker."""
        if self.is_near(contact):
            _check_own(contact.path)
            socket.connect(f"ipc://{contact.path}")
        else:
            socket.ipv6 = contact.address.startswith("[")
            socket.curve_serverkey = contact.key.encode()
            socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
            socket.connect(f"tcp://{contact.address}")

    def close(self) -> None:
        """Close the socket; called in the thread that receives."""
        self.socket.close(linger=0)

    def remove_folder(self) -> None:
        """Remove the folder of this worker's socket."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def remove_of(self, contact: Contact) -> None:
        """Remove the folder of a worker of this machine that has died."""
        if self.is_near(contact) and contact.path:
            with contextlib.suppress(OSError):  # another worker was faster
                _check_own(contact.path)
                shutil.rmtree(Path(contact.path).parent, ignore_errors=True)

    def _tell(self, store: SealedStore, contact: Contact) -> None:
        store.tell(f"contact/{self.rank}/{self.incarnation}", json.dumps(asdict(contact)))

    def _exchange(self, store: SealedStore, what: str, mine: Contact, size: int) -> list[Contact]:
        store.tell(f"{what}/{self.rank}", json.dumps(asdict(mine)))
        told = store.told(*(f"{what}/{rank}" for rank in range(size)))
        return [Contact(**json.loads(text)) for text in told]

    def _listen_at_path(self) -> Contact:
        self._machine = f"{socket.gethostname()} {self._public.decode()}"
        if os.environ.get(IPC_VARIABLE, "1") != "0" and zmq.has("ipc") and hasattr(os, "getuid"):
            self._folder = tempfile.mkdtemp(prefix="todist-")  # only this user can enter it
            path = f"{self._folder}/{self.rank}"
            if len(os.fsencode(path)) <= LONGEST_PATH:
                self.socket.bind(f"ipc://{path}")
                self._machine = _machine()
                let_siblings_read()
                return Contact(self._machine, path)
        return Contact(self._machine, "")

    def _listen_at(self, host: str, here: Contact) -> Contact:
        # From now on, for the address but not for the path.
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = self._public, self._secret
        self.socket.zap_domain = DOMAIN.encode()
        self.socket.zap_enforce_domain = True  # where nobody answers who may come, nobody may
        address = network.local_address(host)
        if ":" in address:
            self.socket.ipv6, address = True, f"[{address}]"
        port = self.socket.bind_to_random_port(f"tcp://{address}")
        return Contact(here.machine, here.path, f"{address}:{port}", self._public.decode())

    def _open_door(self, contacts: Sequence[Contact]) -> None:
        """Accept connections with the key of one of these contacts only (ZeroMQ's RFC 27)."""
        keys = self._keys
        keys.update(z85.decode(contact.key) for contact in contacts)
        door = self._context.socket(zmq.REP)
        door.linger = 0
        door.bind("inproc://zeromq.zap.01")

        def work() -> None:
            with contextlib.suppress(zmq.ContextTerminated):
                while True:
                    version, request, domain, _, _, mechanism, *credentials = door.recv_multipart()
                    known = domain == DOMAIN.encode() and mechanism == b"CURVE" and credentials[0] in keys
                    verdict = (b"200", b"OK") if known else (b"400", b"unknown key")
                    door.send_multipart([version, request, *verdict, b"", b""])
            door.close(linger=0)

        threading.Thread(target=work, name="todist-door", daemon=True).start()


def contact_of(store: SealedStore, rank: int, incarnation: int, what: str = "machine") -> Contact:
    """Read the address that a process of a worker has published.

    ``what`` is read of one that has come with all the others: the ``machine`` alone, or with its ``address``.
    """
    (text,) = store.told(f"contact/{rank}/{incarnation}" if incarnation else f"{what}/{rank}")
    return Contact(**json.loads(text))


def configure(socket: zmq.Socket[bytes]) -> None:
    """Set the options that all sockets have in common."""
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0  # a sender does not wait: there are as many messages as there are calls
    # The kernel probes the other end. ZeroMQ's own heartbeat waits behind a large message on a slow network: it ends a
    # connection on which the message is under way, which is then sent again and again.
    socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, PROBES
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = PROBE_SECONDS
    socket.tcp_maxrt = DEAD_AFTER_MS
    socket.handshake_ivl = HANDSHAKE_MS
    socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS, 20 * RECONNECT_MS


def _machine() -> str:
    """A text that is equal for processes of one user that see the same network and the same temporary files."""
    parts = [socket.gethostname(), str(os.getuid())]
    with contextlib.suppress(OSError):
        parts += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/net"),
        ]
    folder = Path(tempfile.gettempdir()).stat()
    return " ".join([*parts, f"{folder.st_dev}:{folder.st_ino}"])


def _check_own(path: str) -> None:
    """Check that only this user could have made the socket."""
    folder = Path(path).parent.stat()
    if folder.st_uid != os.getuid() or stat.S_IMODE(folder.st_mode) & 0o077:
        raise PermissionError(f"the folder of the socket {path} is not this user's alone")
