"""However a rank ends, all end, in time and with the root cause; a death that is caught or allowed ends nobody."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
import time
import warnings

import psutil
import pytest
import torch

import torchopt_dist as todist
from tests.distributed.finally_program import is_whole, write_slowly
from tests.distributed.programs import rank_of_worker
from tests.functions import spin
from tests.processes import ROOT, World, start_torchrun
from tests.waits import say, soon, watch
from torchopt_dist.distributed.group.group import current_group


def wait_in_a_call():
    # The function waits on another worker than the one that fails.
    todist.remote_sync_call(time.sleep, args=(60,), partitioner=2)


BUSY = {
    "asleep": lambda: time.sleep(60),
    "in one C++ call": lambda: torch.ones(1).expand(2**42).sum(),
    "waiting in a remote call": wait_in_a_call,
    "waiting in a barrier": lambda: todist.barrier(),
    "waiting for a lock": lambda: threading.Event().wait(),
    "at its end": lambda: None,
}


def end_of(runner, tmp_path, main, seconds=1.0):
    """How the ranks of ``main`` end when one raises, and what they say; all within ``seconds`` from then."""

    def on_each(*args):
        with (tmp_path / f"stderr{os.environ['RANK']}").open("w") as file:
            os.dup2(file.fileno(), 2)
        return main(*args)

    endings = runner.endings(on_each, timeout=100)
    took = time.monotonic() - float((tmp_path / "raised").read_text())
    assert took < soon(seconds), f"the last rank ended {took:.2f} s after the raise"
    for ending in endings:
        assert ending.exitcode not in (0, None, -signal.SIGKILL), ending
    return endings, [ending.trace + (tmp_path / f"stderr{ending.rank}").read_text() for ending in endings]


def raise_now(tmp_path, error):
    assert all(watch(tmp_path / f"stderr{rank}") for rank in range(todist.get_world_size()))
    say(tmp_path / "raised", str(time.monotonic()))
    raise error


@pytest.mark.parametrize("busy", BUSY.values(), ids=BUSY.keys())
def test_a_rank_that_raises_ends_all_at_once_with_its_traceback(world, tmp_path, busy):
    def main():
        if todist.get_rank() == 1:
            assert watch(tmp_path / "busy")
            raise_now(tmp_path, ValueError("the root of it"))
        if todist.get_rank() == 0:
            say(tmp_path / "busy")
            busy()

    endings, said = end_of(world(3), tmp_path, main)
    assert isinstance(endings[1].error, ValueError)
    for rank in (0, 2):
        assert endings[rank].value is None
        assert "rank 1 failed" in said[rank]
        assert "ValueError: the root of it" in said[rank]
        assert "raise_now" in said[rank]  # its frames, not only its message


def call_the_one_that_fails():
    todist.remote_sync_call(hang, partitioner=1)


WITH_A_FINALLY = {
    "in pure Python": (spin, ()),
    "waiting in a call to it": (call_the_one_that_fails, ()),
    "waiting in a call to another": (wait_in_a_call, ()),
    "waiting in a barrier": (lambda: todist.barrier(), ()),
    "handling an error": (lambda: 1 / 0, (ZeroDivisionError,)),
}


@pytest.mark.parametrize("busy", WITH_A_FINALLY)
def test_when_another_rank_fails_main_ends_its_finally_block(world, tmp_path, busy):
    keep_busy, caught = WITH_A_FINALLY[busy]

    def main():
        if todist.get_rank() == 1:
            assert watch(tmp_path / "busy")
            raise_now(tmp_path, ValueError("the root of it"))
        if todist.get_rank() == 0:
            try:
                say(tmp_path / "busy")
                keep_busy()
            except caught:
                write_slowly(tmp_path / "written")
                todist.barrier()
            finally:
                if not caught:
                    write_slowly(tmp_path / "written")

    endings, said = end_of(world(3), tmp_path, main, seconds=3.0)
    assert is_whole(tmp_path / "written"), said[0]
    assert type(endings[0].error) is todist.PeerFailedError
    assert "raise_now" in said[0]


def test_a_finally_block_that_does_not_end_is_ended(tmp_path, limits):
    def main():
        if todist.get_rank() == 1:
            assert watch(tmp_path / "busy")
            raise_now(tmp_path, ValueError("the root of it"))
        try:
            say(tmp_path / "busy")
            spin()
        finally:
            say(tmp_path / "unwinding")
            hang()

    def program():
        limits(finally_seconds=0.2)
        todist.auto_init_rpc()(main)()

    endings, said = end_of(World(2, rpc=False), tmp_path, program, seconds=1.5)
    assert (tmp_path / "unwinding").exists()
    assert endings[0].error is None
    assert "is ended, since rank 1 failed: ValueError: the root of it" in said[0]


def test_under_torchrun_rank_zero_ends_its_finally_block_and_the_root_cause_is_told(tmp_path):
    program = ROOT / "tests/distributed/finally_program.py"
    job = start_torchrun("--standalone", "--nproc-per-node=2", program, tmp_path)
    with contextlib.closing(job):
        done = job.finish(timeout=100)
    assert done.returncode == 1
    assert is_whole(tmp_path / "written"), done.stdout
    assert done.stdout.count("\nValueError: the root of it\n") == 1
    root = done.stdout.partition("Root Cause (first observed failure):")[2]
    assert "ValueError: the root of it" in root


def test_rank_zero_that_raises_ends_all(world, tmp_path):
    def main():
        if todist.get_rank() == 0:
            assert watch(tmp_path / "busy")
            raise_now(tmp_path, KeyError("lost"))
        if todist.get_rank() == 1:
            say(tmp_path / "busy")
            spin()

    endings, said = end_of(world(3), tmp_path, main)
    assert isinstance(endings[0].error, KeyError)
    for rank in (1, 2):
        assert "rank 0 failed" in said[rank]
        assert "KeyError: 'lost'" in said[rank]


def test_worker_init_fn_that_raises_on_one_rank_ends_all(tmp_path):
    def init():
        if todist.get_rank() == 1:
            raise_now(tmp_path, OSError(2, "no such data"))

    def main():
        say(tmp_path / "main")

    def program():
        return todist.auto_init_rpc(init)(main)()

    endings, said = end_of(World(3, rpc=False), tmp_path, program)
    assert isinstance(endings[1].error, FileNotFoundError)
    assert all(isinstance(endings[rank].error, todist.PeerFailedError) for rank in (0, 2))
    assert all("no such data" in text and "raise_now" in text for text in said)
    assert not (tmp_path / "main").exists()


def test_all_ranks_that_raise_keep_their_own_errors(world, tmp_path):
    def main():
        say(tmp_path / f"ready{todist.get_rank()}")
        assert all(watch(tmp_path / f"ready{rank}") for rank in range(3))
        raise_now(tmp_path, ValueError(f"of rank {todist.get_rank()}"))

    endings, said = end_of(world(3), tmp_path, main)
    for rank, ending in enumerate(endings):
        # A rank may hear of another's failure while it unwinds; it does not lose its own.
        assert f"ValueError: of rank {rank}" in said[rank], ending


def test_an_interrupt_on_one_rank_ends_all(world, tmp_path):
    def main():
        if todist.get_rank() == 1:
            assert watch(tmp_path / "busy")
            raise_now(tmp_path, KeyboardInterrupt())
        if todist.get_rank() == 0:
            say(tmp_path / "busy")
            time.sleep(60)

    endings, said = end_of(world(2), tmp_path, main)
    assert isinstance(endings[1].error, KeyboardInterrupt)
    assert "KeyboardInterrupt" in said[0]


def test_an_interrupt_by_signal_ends_all(world, tmp_path):
    def main():
        if todist.get_rank() == 1:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            assert watch(tmp_path / "busy")
            say(tmp_path / "raised", str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        say(tmp_path / "busy")
        todist.barrier()

    endings, said = end_of(world(2), tmp_path, main)
    assert isinstance(endings[1].error, KeyboardInterrupt)
    assert isinstance(endings[0].error, todist.PeerFailedError)
    assert "KeyboardInterrupt" in said[0]


def test_a_function_running_for_another_does_not_hold_the_end(world, tmp_path):
    def main():
        if todist.get_rank() == 0:
            future = todist.remote_async_call(linger, partitioner=1)
            assert watch(tmp_path / "serving")
            raise_now(tmp_path, ValueError("enough"))
            future.wait()

    def linger():
        say(tmp_path / "serving")
        time.sleep(60)

    endings, said = end_of(world(2), tmp_path, main)
    assert isinstance(endings[0].error, ValueError)
    assert "enough" in said[1]


@pytest.mark.parametrize("code", [0, None])
def test_exit_with_zero_is_a_good_end(tmp_path, code):
    def main():
        if todist.get_rank() == 1:
            sys.exit(code)
        return todist.remote_sync_call(rank_of_worker, partitioner=1)

    endings = World(2, rpc=False).endings(todist.auto_init_rpc()(main))
    assert [ending.exitcode for ending in endings] == [0, 0]
    assert endings[0].value == [1]
    assert isinstance(endings[1].error, SystemExit)


@pytest.mark.parametrize("code", [3, "a message"])
def test_exit_with_anything_else_ends_all(tmp_path, code):
    def main():
        if todist.get_rank() == 1:
            assert watch(tmp_path / "busy")
            raise_now(tmp_path, SystemExit(code))
        say(tmp_path / "busy")
        spin()

    endings, said = end_of(World(2, rpc=False), tmp_path, lambda: todist.auto_init_rpc()(main)())
    assert endings[1].error.code == code
    assert endings[1].exitcode == (3 if code == 3 else 1)
    assert f"SystemExit: {code}" in said[0]


def test_an_error_that_main_handles_is_none(world):
    def fail():
        raise ValueError("handled")

    def main():
        if todist.get_rank() == 0:
            with pytest.raises(ValueError, match="handled"):
                todist.remote_sync_call(fail, partitioner=1)
        todist.barrier()
        return todist.get_rank()

    assert world(2).run(main) == [0, 1]


def test_a_world_leaves_no_process_and_no_thread(tmp_path):
    def program():
        before = {thread.name for thread in threading.enumerate()}
        todist.auto_init_rpc()(lambda: todist.remote_sync_call(rank_of_worker, partitioner=1))()
        deadline = time.monotonic() + 10
        while (
            after := {thread.name for thread in threading.enumerate()}
        ) - before:  # a group's threads are ending
            if time.monotonic() > deadline:
                break
            time.sleep(0.002)
        return after - before, [child.name() for child in psutil.Process().children()]

    assert World(2, rpc=False).run(program) == [(set(), [])] * 2


def test_a_bad_name_on_one_rank_ends_all(tmp_path):
    def name(*, world_rank, **_):
        return "" if world_rank == 1 else "fine"

    def program():
        if os.environ["RANK"] == "1":
            say(tmp_path / "raised", str(time.monotonic()))
        todist.auto_init_rpc(worker_name_format=name)(rank_of_worker)()

    endings, _ = end_of(World(2, env={"TODIST_INIT_TIMEOUT": "2"}, rpc=False), tmp_path, program, seconds=5)
    assert isinstance(endings[1].error, todist.errors.InitializationError)
    assert "''" in str(endings[1].error)


def hang():
    threading.Event().wait()


def hang_after(place):
    say(place)
    hang()


GIVEN_UP = {
    "after a time-out": todist.CallTimeoutError,
    "after a Ctrl-C": KeyboardInterrupt,
    "whose future nobody waits for": (),
}


@pytest.mark.parametrize("how", GIVEN_UP)
def test_a_function_that_hangs_does_not_keep_the_world_alive(tmp_path, limits, how):
    def main():
        if todist.get_rank() == 1:
            return "all is well"
        place = tmp_path / f"hangs{time.monotonic_ns()}"
        call = functools.partial(todist.remote_async_call, hang_after, args=(place,), partitioner=1)
        with contextlib.suppress(GIVEN_UP[how]):
            if how == "after a time-out":
                call(timeout=0.2).wait()
            elif how == "after a Ctrl-C":
                future = call()
                assert watch(place)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.kill(os.getpid(), signal.SIGINT)
                future.wait()
            else:
                call()
        assert watch(place)
        return "all is well"

    def program():
        limits(shutdown_seconds=0.3)
        told = []
        for _ in range(2):  # the second group of the process has nothing of the first
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert todist.auto_init_rpc()(main)() == "all is well"
            told += [str(each.message) for each in caught if each.category is RuntimeWarning]
        return told

    def on_each():
        told = program()
        (tmp_path / f"told{os.environ['RANK']}").write_text("\n".join(told))
        sys.exit(5)  # the exit code is the program's own

    endings = World(2, rpc=False).endings(on_each, timeout=60)
    assert [ending.exitcode for ending in endings] == [5, 5]
    told = (tmp_path / "told0").read_text().splitlines()
    assert len(told) == (0 if how == "after a time-out" else 2)
    assert all("calls to worker1 were not answered within 0.3 s" in each for each in told)
    assert (tmp_path / "told1").read_text() == ""


class Endless(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, place):
        ctx.place = place
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        say(ctx.place.with_suffix(f".{todist.get_rank()}"))
        spin()


def endless_gradient(x, place):
    return torch.autograd.grad(Endless.apply(x, place).sum(), x)


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_ranks_whose_threads_run_python_in_a_backward_end_by_their_own_exit_codes(tmp_path, transport):
    """Both the own share and another worker's run in threads, and the interpreter ends as that of a program does."""

    def main():
        if todist.get_rank() == 0:
            x = torch.ones(2, requires_grad=True)
            todist.remote_async_call(endless_gradient, args=(x, tmp_path / "in"))
            assert all(watch(tmp_path / f"in.{rank}") for rank in range(2))
            raise KeyError("the root of it")

    def program():
        try:
            todist.auto_init_rpc(transport=transport)(main)()
        except (KeyError, todist.PeerFailedError):
            ctypes.pythonapi.Py_Exit(7)

    assert [ending.exitcode for ending in World(2, rpc=False).endings(program, timeout=200)] == [7, 7]


def test_a_call_that_nobody_waits_for_is_answered_before_the_end(world, tmp_path):
    def answer():
        assert watch(tmp_path / "main has returned")
        say(tmp_path / "answer", str(todist.remote_sync_call(rank_of_worker, partitioner=2)))

    def main():
        transport = current_group().transport
        usual = transport.wait_for_replies

        def wait_for_replies(timeout):
            say(tmp_path / "main has returned")
            return usual(timeout)

        if todist.get_rank() == 0:
            transport.wait_for_replies = wait_for_replies
            todist.remote_async_call(answer, partitioner=1)

    world(3).run(main)
    assert (tmp_path / "answer").read_text() == "[2]"
