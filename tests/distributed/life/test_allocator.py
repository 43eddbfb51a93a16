"""A worker's memory stays where the next call finds it: in one arena of glibc's allocator, and in the process."""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
import threading
from types import SimpleNamespace

import pytest
import torch

import torchopt_dist as todist
from tests.processes import World, python
from torchopt_dist.process.resources import KEPT, keep_for_next_call

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


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def use_much(count=16, size=1 << 23):
    """Fill blocks of some MiB, and free them."""
    blocks = [torch.full((size // 4,), 1.0) for _ in range(count)]
    del blocks


FREED = """
import torchopt_dist as todist
from tests.distributed.life.test_allocator import faults, use_much

todist.auto_init_rpc()(use_much)()
use_much()
found = []
for _ in range(3):  # a block that something else has taken meanwhile is another one's place from then on
    before = faults()
    use_much()
    found.append(faults() - before)
print(min(found))
"""


@pytest.mark.nightly
def test_what_a_call_has_freed_stays_for_the_next_one():
    """In a new process: a fork's first thread may have an arena of its own, which gives freed parts back at once."""
    pages = (16 << 23) // os.sysconf("SC_PAGE_SIZE")
    assert KEPT >= 16 << 23
    done = python("-c", FREED, warm=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < pages // 4


def test_the_users_limits_and_other_allocators_are_left_alone(monkeypatch):
    set_here = []
    monkeypatch.setattr(
        ctypes,
        "CDLL",
        lambda name: SimpleNamespace(
            gnu_get_libc_version=1, mallopt=lambda *each: set_here.append(each) or 1
        ),
    )
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=3:glibc.malloc.mmap_threshold=9")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "9")
    assert keep_for_next_call() == set_here == []
    monkeypatch.delenv("GLIBC_TUNABLES")
    assert len(keep_for_next_call()) == len(set_here) == 2
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # as with musl
    assert keep_for_next_call() == []
