"""A worker's memory stays where the next call finds it: its threads share one arena of glibc's allocator."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading

import pytest

import torchopt_dist as todist
from tests.processes import World
from torchopt_dist.distributed.life.allocator import share_one_arena

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="needs glibc's allocator"
)


def arenas():
    """How many arenas there are, by glibc's own account."""
    library = ctypes.CDLL(None)
    library.fdopen.restype = ctypes.c_void_p
    with tempfile.TemporaryFile() as file:
        stream = ctypes.c_void_p(library.fdopen(os.dup(file.fileno()), b"w"))
        assert library.malloc_info(0, stream) == 0
        library.fclose(stream)
        file.seek(0)
        return file.read().count(b"<heap nr=")


def arenas_of_threads(count=8):
    """The same while so many new threads have memory."""
    library, together, done = ctypes.CDLL(None), threading.Barrier(count + 1), threading.Event()
    library.malloc.restype = ctypes.c_void_p

    def allocate():
        library.free(ctypes.c_void_p(library.malloc(1000)))
        together.wait(30)
        done.wait(30)

    threads = [threading.Thread(target=allocate) for _ in range(count)]
    for thread in threads:
        thread.start()
    together.wait(30)
    found = arenas()
    done.set()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("asked", [None, "4"])
def test_the_threads_of_a_worker_share_an_arena(asked):
    def program():
        if asked is not None:
            os.environ["MALLOC_ARENA_MAX"] = asked  # the program's own limit stays
        before = arenas()
        return arenas_of_threads() - before if todist.auto_init_rpc()(lambda: True)() else None

    grown = World(2, rpc=False).run(program)
    assert all((more == 0) is (asked is None) for more in grown), grown


def test_another_limit_or_allocator_is_left_alone(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=3")
    assert not share_one_arena()
    monkeypatch.delenv("GLIBC_TUNABLES")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # as with musl
    assert not share_one_arena()
