"""Two ferries over one stream, in threads; what is sent by one and taken from the other."""

from __future__ import annotations

import os
import queue
import socket
import threading

from torchopt_dist.launch.ferry import Ferry
from torchopt_dist.launch.messages import LARGEST, MOST_DESCRIPTORS, pair

SECONDS = 20.0
"""For what comes at once."""


class End:
    """One ferry in a thread, and the channels that the other has opened."""

    def __init__(self, descriptor, odd, patience, opener="pair", early=b""):
        self.opened = queue.Queue()
        options = {"odd": odd, "patience": patience, "early": early}
        opener = self.open_pair if opener == "pair" else opener
        self.ferry = Ferry(descriptor, descriptor, opener=opener, **options)
        self.why = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        self.why = self.ferry.run()

    def open_pair(self, payload):
        ours, theirs = pair()
        self.opened.put((payload, theirs))
        return ours

    def ended(self, seconds=SECONDS):
        """Why it has ended."""
        self.thread.join(seconds)
        assert not self.thread.is_alive()
        return self.why


class Ferries:
    """``near`` and ``far``, and channels between them that are closed at the end."""

    def __init__(self, patience=SECONDS, opener="pair"):
        near, far = socket.socketpair()
        self.near = End(near.detach(), True, patience)
        self.far = End(far.detach(), False, patience, opener)
        self.sockets = []

    def channel(self, payload=b"agent"):
        """Both ends of a new channel."""
        ours = self.keep(self.near.ferry.open(payload))
        said, theirs = self.far.opened.get(timeout=SECONDS)
        assert said == payload
        return ours, self.keep(theirs)

    def keep(self, end):
        end.settimeout(SECONDS)
        self.sockets.append(end)
        return end

    def close(self):
        for end in (self.near, self.far):
            end.ferry.close()
            end.ended()
        for end in self.sockets:
            end.close()


def silent_partner(patience):
    """A ferry whose partner says nothing, and the partner's end of the stream."""
    stream, other = socket.socketpair()
    return End(stream.detach(), True, patience), other


def give(channel, data, *descriptors):
    """Send, and close the descriptors here."""
    socket.send_fds(channel, [data], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


def take(channel, number=0):
    """The next message's data, and so many descriptors."""
    data, descriptors, _, _ = socket.recv_fds(channel, LARGEST, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    assert len(descriptors) == number
    return (data, *descriptors)


def take_and_answer(here, there):
    here.send(b"still there")
    there.send(take(there)[0])
    return take(here)[0]


def pipe_across(channel):
    """A pipe's end to read from here, and that to write into which has arrived there."""
    reader, writer = os.pipe()
    give(channel[0], b"write into it", writer)
    return reader, take(channel[1], 1)[1]


def memory_file(content):
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    return descriptor


def content_of(descriptor):
    return os.pread(descriptor, os.fstat(descriptor).st_size + 1, 0)


def read_all(descriptor):
    """What comes out of a pipe until its end."""
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def has_ended(channel):
    """Wait for the end of a channel."""
    channel.settimeout(SECONDS)
    try:
        return channel.recv(1) == b""
    except ConnectionError:
        return True
