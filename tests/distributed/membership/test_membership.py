"""All ranks know who is there: who joins, waits at a barrier, fails or dies is known to all, and to no stranger."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import pickle
import socket
import struct
import subprocess
import threading
import time

import pytest

import torchopt_dist as todist
from tests.waits import soon, wait_until
from torchopt_dist.distributed.membership.hub import START
from torchopt_dist.distributed.membership.link import DIED, Link
from torchopt_dist.distributed.membership.members import Failure, Member
from torchopt_dist.distributed.membership.stopped import StoppedProcesses, process_table
from torchopt_dist.distributed.rendezvous.store import GroupEndedError
from torchopt_dist.process import out_of_memory

# Joining.


@pytest.mark.parametrize("names", [("a",), ("a", "b"), ("a", "b", "c", "d")])
def test_every_rank_knows_all_the_members(lines, names):
    line = lines(*names, joined=False)
    expected = tuple(Member(rank, name, "program.py", "here") for rank, name in enumerate(names))
    assert [future.result() for future in line.join()] == [expected] * len(names)


def test_two_workers_of_one_name_are_told_to_all(lines):
    line = lines("a", "b", "a", joined=False)
    for future in line.join():
        with pytest.raises(
            todist.errors.InitializationError, match=r"ranks 0 and 2 the same name 'a'.*unique"
        ):
            future.result()


def test_a_rank_that_does_not_join_is_an_error_in_time(lines):
    line = lines("a", "b", "c", joined=False)
    for future in line.join(ranks=(0, 2), timeout=0.2):
        with pytest.raises((todist.errors.InitializationError, TimeoutError), match=r"waited 0\.2 s"):
            future.result()


def test_a_hub_that_is_not_there_is_named(lines):
    line = lines("a", "b", joined=False)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    line.store.tell("membership", json.dumps({"host": "127.0.0.1", "port": port}))
    line.store.make_token("membership")
    with pytest.raises(
        todist.errors.InitializationError, match=rf"rank 1 cannot reach .*127\.0\.0\.1:{port}"
    ):
        line.ends[1].join(line.store, "127.0.0.1", 1.0)
    # So that the fixture can close it as any other.
    line.store.plain.delete_key("membership")
    for future in line.join():
        future.result()


# Barriers.


def test_a_barrier_opens_when_all_have_come(lines):
    line = lines("a", "b", "c")
    first = [line.barrier(rank, range(3)) for rank in (0, 1)]
    wait_until(lambda: any(len(arrived) == 2 for arrived in line.ends[0]._hub._arrived.values()))
    assert not any(future.done() for future in first)
    for future in [*first, line.barrier(2, range(3))]:
        future.result()


@pytest.mark.parametrize("group", [(0, 1), (1, 2), (2, 0), (1,), (0,)])
def test_a_barrier_of_some_needs_these_only(lines, group):
    line = lines("a", "b", "c")
    for _ in range(3):
        for future in [line.barrier(rank, group) for rank in group]:
            future.result()


def test_the_order_and_the_number_of_ranks_given_do_not_matter(lines):
    line = lines("a", "b")
    for future in (line.barrier(0, [1, 0, 1]), line.barrier(1, (0, 1))):
        future.result()


def test_barriers_for_different_purposes_do_not_meet(lines):
    line = lines("a", "b")
    start, end = line.barrier(0, [0, 1], purpose="start"), line.barrier(1, [0, 1], purpose="end")
    wait_until(lambda: len(line.ends[0]._hub._arrived) == 2)
    assert not start.done()
    assert not end.done()
    line.ends[1].barrier([0, 1], purpose="start")
    line.ends[0].barrier([0, 1], purpose="end")
    start.result()
    end.result()


def test_a_thousand_barriers_in_a_row(lines):
    line = lines("a", "b", "c")
    counts = [0, 0, 0]

    def work(rank):
        for step in range(300):
            counts[rank] = step
            line.ends[rank].barrier(range(3))
            assert min(counts) >= step
            line.ends[rank].barrier(range(3), purpose="again")

    for future in [line.threads.submit(work, rank) for rank in range(3)]:
        future.result()


def test_a_barrier_has_a_timeout_if_asked(lines):
    line = lines("a", "b")
    with pytest.raises(
        todist.WorkerLostError, match=r"rank 1 waited 0\.1 s for ranks \[0, 1\] to come to a barrier"
    ):
        line.ends[1].barrier([0, 1], timeout=0.1)


# Failures and deaths.


@pytest.mark.parametrize("failing", [0, 1])
def test_a_report_reaches_all_the_others_and_ends_their_waits(lines, failing):
    line = lines("a", "b", "c")
    others = [rank for rank in range(3) if rank != failing]
    waits = [line.barrier(rank, range(3)) for rank in others]
    line.ends[failing].fail("Traceback:\n  the root of it\n")
    for future in waits:
        with pytest.raises(
            todist.PeerFailedError, match=rf"rank {failing} failed:\n\nTraceback:\n  the root"
        ):
            future.result()
    failure = Failure(failing, "Traceback:\n  the root of it\n", worker="abc"[failing], host="here")
    wait_until(lambda: all(line.heard[rank] for rank in others))
    assert line.heard == [[] if rank == failing else [failure] for rank in range(3)]


def test_a_report_counts_for_barriers_of_others_too(lines):
    line = lines("a", "b", "c")
    line.ends[2].fail("lost")
    wait_until(lambda: line.heard[0] and line.heard[1])
    for future in [line.barrier(rank, [0, 1]) for rank in (0, 1)]:
        with pytest.raises(todist.PeerFailedError, match="rank 2 failed"):
            future.result()


def test_a_rank_fails_once(lines):
    line = lines("a", "b")
    for number in range(3):
        line.ends[1].fail(f"report {number}")
    line.cut(1)
    wait_until(lambda: line.heard[0])
    for future in [line.barrier(0, [0])]:
        with pytest.raises(todist.PeerFailedError, match="report 0"):
            future.result()
    assert line.heard[0] == [Failure(1, "report 0", worker="b", host="here")]


def test_a_long_report_with_any_characters_arrives(lines):
    line = lines("a", "b")
    report = 'é \U0001f40d \x00 "quoted" \\ \n' * 20_000
    line.ends[1].fail(report)
    wait_until(lambda: line.heard[0])
    assert line.heard[0] == [Failure(1, report, worker="b", host="here")]


def test_a_death_ends_the_waits_for_the_dead_at_once(lines):
    line = lines("a", "b", "c")
    waits = [line.barrier(rank, range(3)) for rank in (0, 1)]
    started = time.monotonic()
    line.cut(2)
    for future in waits:
        with pytest.raises(todist.WorkerLostError, match="rank 2 died"):
            future.result()
    assert time.monotonic() - started < soon(0.5)
    assert line.heard[0] == line.heard[1] == [Failure(2, "", worker="c", host="here")]


def test_a_death_before_a_barrier_is_an_error_at_once(lines):
    line = lines("a", "b", "c")
    line.cut(2)
    wait_until(lambda: line.heard[0] and line.heard[1])
    with pytest.raises(todist.WorkerLostError, match="rank 2 died"):
        line.ends[0].barrier(range(3))


def test_a_death_after_it_has_come_is_an_error_for_who_still_waits(lines):
    line = lines("a", "b", "c")
    line.barrier(2, range(3))
    wait_until(lambda: line.ends[0]._hub._arrived)
    line.cut(2)
    wait_until(lambda: line.heard[0])
    with pytest.raises(todist.WorkerLostError, match="rank 2 died"):
        line.ends[0].barrier(range(3))


def test_the_living_go_on_without_the_dead(lines):
    line = lines("a", "b", "c")
    line.cut(2)
    wait_until(lambda: line.heard[0] and line.heard[1])
    for _ in range(2):
        for future in [line.barrier(rank, [0, 1]) for rank in (0, 1)]:
            future.result()


def test_who_waits_at_a_barrier_is_told_that_this_worker_has_left(lines):
    line = lines("a", "b")
    wait = line.barrier(0, range(2))
    wait_until(lambda: line.ends[0]._hub._arrived)
    line.ends.pop(0).close()
    with pytest.raises(GroupEndedError, match="rank 0 left the group while it waited for ranks"):
        wait.result(10)


def test_with_continue_barriers_skip_the_dead(lines):
    line = lines("a", "b", "c", on_loss="continue")
    waits = [line.barrier(rank, range(3)) for rank in (0, 1)]
    wait_until(lambda: any(len(arrived) == 2 for arrived in line.ends[0]._hub._arrived.values()))
    assert not any(wait.done() for wait in waits)
    line.cut(2)
    for wait in waits:
        wait.result(10)
    for future in [line.barrier(0, range(3)), line.barrier(1, range(3)), line.barrier(1, [1, 2])]:
        future.result(10)
    for future in [line.threads.submit(line.ends[rank].final_barrier) for rank in (0, 1)]:
        future.result(10)
    (lost,) = line.ends[1].lost.values()
    lost = pickle.loads(pickle.dumps(lost))
    assert (lost.rank, lost.worker, lost.host, lost.cause) == (2, "c", "here", "died")
    assert str(lost) == "rank 2 died: the process of c on here ended without a report"


def test_with_continue_a_report_and_the_loss_of_rank_zero_are_errors_still(lines):
    line = lines("a", "b", "c", on_loss="continue")
    line.cut(2)
    wait = line.barrier(1, range(3))
    line.ends[0].fail("the root of it")
    with pytest.raises(todist.PeerFailedError, match="rank 0 failed") as caught:
        wait.result(10)
    assert caught.value.rank == 0
    line = lines("a", "b", "c", on_loss="continue")
    wait = line.barrier(1, range(3))
    hub = line.ends[0]
    hub._loop.call_soon_threadsafe(
        lambda: [link.writer.transport.abort() for link in hub._hub._links.values()]
    )
    with pytest.raises(todist.WorkerLostError, match="rank 0 died"):
        wait.result(10)


def test_with_continue_a_death_before_the_start_is_an_error(lines):
    line = lines("a", "b", "c", joined=False)
    for end in line.ends:
        end.me = dataclasses.replace(end.me, on_loss="continue")
    line.ends[0]._hub._skips_dead = True
    for future in line.join():
        future.result()
    waits = [line.barrier(rank, range(3), purpose=START) for rank in (0, 1)]
    line.cut(2)
    for wait in waits:
        with pytest.raises(todist.WorkerLostError, match="rank 2 died"):
            wait.result(10)


def test_workers_that_differ_in_on_loss_are_told(lines):
    line = lines("a", "b", joined=False)
    line.ends[1].me = dataclasses.replace(line.ends[1].me, on_loss="continue")
    for future in line.join():
        with pytest.raises(
            todist.errors.InitializationError, match="on_loss must be the same on all workers"
        ):
            future.result()


class Middlebox:
    """Something between the workers and the hub that passes on what they say, and can reset all connections."""

    def __init__(self, store):
        address = json.loads(store.told("membership")[0])
        self._hub = (address["host"], address["port"])
        self._listener = socket.create_server(("127.0.0.1", 0))
        store.tell("membership", json.dumps({**address, "port": self._listener.getsockname()[1]}))
        self._pairs, self.accepted, self.closed = [], 0, False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                one = self._listener.accept()[0]
                try:
                    if self.closed:
                        raise ConnectionAbortedError
                    pair = (one, socket.create_connection(self._hub))
                except OSError:
                    one.close()
                    continue
                for end in pair:
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._pairs.append(pair)
                self.accepted += 1
                for source, target in (pair, pair[::-1]):
                    threading.Thread(target=self._pass_on, args=(source, target, pair), daemon=True).start()

    def _pass_on(self, source, target, pair):
        with contextlib.suppress(OSError):
            while data := source.recv(50):
                target.sendall(data)
            if pair in self._pairs:
                target.shutdown(socket.SHUT_WR)

    def reset(self):
        """Drop what is under way, and let both ends know."""
        pairs, self._pairs = self._pairs, []
        for one in itertools.chain.from_iterable(pairs):
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.shutdown(socket.SHUT_RD)
                one.close()

    def close(self):
        self.closed = True  # a worker connects again when its connection is reset
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.reset()


@pytest.fixture
def behind_a_middlebox(lines):
    made = []

    def make(*names, **options):
        line = lines(*names, joined=False, **options)
        joining = line.join(ranks=[0])
        made.append(Middlebox(line.store))
        for future in joining + line.join(ranks=range(1, len(names))):
            future.result()
        return line, made[-1]

    yield make
    for box in made:
        box.close()


def test_a_connection_that_is_reset_is_made_again_and_loses_nothing(behind_a_middlebox, limits):
    limits(again_seconds=20.0)
    line, box = behind_a_middlebox("a", "b", "c")

    def work(rank):
        for _ in range(200):
            line.ends[rank].barrier(range(3))

    working = [line.threads.submit(work, rank) for rank in range(3)]
    for resets in range(1, 6):
        box.reset()
        wait_until(lambda resets=resets: box.accepted == 2 + 2 * resets)
    for future in working:
        future.result(60)
    assert line.heard == [[], [], []]
    line.ends[2].fail("the root of it")
    wait_until(lambda: line.heard[0] and line.heard[1])
    assert line.heard[1] == [Failure(2, "the root of it", worker="c", host="here")]


class Sent:
    """A writer that keeps what is written."""

    def __init__(self):
        self.lines = []

    def write(self, line):
        self.lines.append(line)


def test_what_comes_again_over_a_new_connection_counts_once():
    sender, receiver, heard = Link(), Link(), []

    async def hear(lines):
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(lines))
        reader.feed_eof()

        async def handle(message):
            heard.append(message["text"])

        assert await receiver.receive_all(reader, handle) == "died"

    first, second = Sent(), Sent()
    sender.attach(first, 0)
    for text in "ab":
        sender.put({"text": text})
    known = receiver.received  # when the connection is made again, what is under way has not come yet
    asyncio.run(hear(first.lines))
    sender.attach(second, known)
    sender.put({"text": "c"})
    assert len(second.lines) == 3
    asyncio.run(hear(second.lines))
    assert heard == ["a", "b", "c"]


def test_a_connection_that_is_reset_and_not_made_again_is_a_loss(behind_a_middlebox, limits):
    limits(again_seconds=0.1)
    line, box = behind_a_middlebox("a", "b")
    line.ends[1]._to_hub._liveness = todist.Liveness(0.1, 0.3)
    box.closed = True
    box.reset()
    wait_until(lambda: line.heard[0] and line.heard[1])
    assert [line.heard[rank][0].rank for rank in range(2)] == [1, 0]


def test_a_message_after_the_hub_is_gone_is_no_bare_error_of_a_socket(lines):
    line = lines("a", "b")
    line.cut(1)
    wait_until(lambda: line.ends[1].failures)
    with pytest.raises(todist.WorkerLostError, match="rank 0"):
        line.ends[1].barrier([1])


def test_when_the_hub_dies_all_are_told(lines):
    line = lines("a", "b", "c")
    waits = [line.barrier(rank, [1, 2, 0]) for rank in (1, 2)]
    hub = line.ends[0]
    hub._loop.call_soon_threadsafe(
        lambda: [link.writer.transport.abort() for link in hub._hub._links.values()]
    )
    for future in waits:
        with pytest.raises(todist.WorkerLostError, match="rank 0 died"):
            future.result()


def test_a_death_for_lack_of_memory_is_named(lines, monkeypatch, tmp_path):
    monkeypatch.setattr(out_of_memory, "COUNTS", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 3\n")
    line, other = lines("a", "b", "c"), lines("a", "b")
    line.cut(2)
    wait_until(lambda: line.ends[1].failures)
    assert str(line.ends[1].lost[2]).endswith("ended without a report")
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 4\n")
    other.cut(1)
    wait_until(lambda: other.ends[0].failures)
    assert str(other.ends[0].lost[1]).endswith(
        "report; the kernel has killed processes there for lack of memory"
    )


def test_leaving_is_no_death(lines):
    line = lines("a", "b", "c")
    line.ends[2].close()
    for future in [line.barrier(rank, [0, 1]) for rank in (0, 1)]:
        future.result()
    assert line.heard == [[], [], []]
    line.ends.pop()


def test_a_process_that_ends_is_a_loss_though_its_connection_stays_open_unless_it_has_left(lines):
    with subprocess.Popen(["sleep", "60"]) as process:
        about = {"pid": process.pid, "process_table": process_table()}
        line = lines("a", "b", "c", "d", joined=False, **about)
        for end in line.ends:
            end._liveness = todist.Liveness(interval=0.05, patience=60)
        for future in line.join():
            future.result()
        line.ends.pop().close()
        process.kill()
    wait_until(lambda: line.ends[0].failures.keys() >= {1, 2})
    wait_until(lambda: all(0 in end.failures for end in line.ends[1:]))
    assert not any(3 in end.failures for end in line.ends)
    assert "died" in str(line.ends[0].lost[1])


def test_a_process_that_had_ended_before_it_was_watched_is_a_loss_too():
    with subprocess.Popen(["true"]) as process:
        process.wait()
    watched = StoppedProcesses({1: process.pid}, todist.Liveness())
    watched.kill(1)  # nobody is there
    assert [watched.look() for _ in range(3)] == [[], [(1, DIED)], []]


def test_a_wait_for_a_thread_ends_with_the_thread_or_with_the_world(lines):
    line = lines("a", "b")
    go = threading.Event()
    for _ in range(2):
        thread = threading.Thread(target=go.wait, daemon=True)
        thread.start()
        wait = line.threads.submit(line.ends[0].wait_for, thread, 60)
        if not go.is_set():
            assert not wait.done()
            go.set()
        wait.result()
    stuck = threading.Event()
    thread = threading.Thread(target=stuck.wait, daemon=True)
    thread.start()
    wait = line.threads.submit(line.ends[0].wait_for, thread, 60)
    line.cut(1)
    with pytest.raises(todist.WorkerLostError, match="rank 1 died"):
        wait.result()
    stuck.set()


def test_rank_zero_is_waited_for_until_it_leaves_or_fails(lines):
    line = lines("a", "b", "c")
    line.ends[1].fail("Traceback: of b")
    wait_until(lambda: line.heard[0])
    waits = [line.threads.submit(line.ends[rank].wait_for_hub, 60) for rank in (1, 2)]
    line.ends[0].wait_for_hub(60)  # itself
    assert not any(wait.done() for wait in waits)
    line.ends.pop(0).close()
    for wait in waits:
        wait.result(timeout=10)
    failed = lines("a", "b")
    failed.ends[0].fail("Traceback: of a")
    wait_until(lambda: failed.heard[1])
    failed.threads.submit(failed.ends[1].wait_for_hub, 60).result(timeout=10)


def test_closing_ends_the_thread(lines):
    line = lines("a", "b")
    line.ends[1].close()
    assert not line.ends[1]._thread.is_alive()
    line.ends.pop()


def test_a_rank_that_dies_as_soon_as_all_have_started_is_a_loss_of_a_running_group(lines):
    line = lines("a", "b", joined=False, on_loss="end")
    for end in line.ends:
        end.me = dataclasses.replace(end.me, on_loss="continue")
    for future in line.join():
        future.result()
    end = line.ends[0]
    end._receive({"release": [START, [0, 1], 1]})  # its thread has yet to see that
    end._receive({"failed": 1, "report": ""})
    line.barrier(0, [0, 1], purpose=START).result(5.0)
