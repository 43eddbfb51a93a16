"""What fails on workers → what the caller raises and prints, and the group goes on."""

from __future__ import annotations

import sys
import traceback

import pytest
import torch

import torchopt_dist as todist
from tests.distributed.exceptions import ERRORS, Odd, Plain


def raise_number(number):
    raise ERRORS[number]


def raise_all_elsewhere():
    """What arrived instead of each error, by number; nothing if all is well."""
    wrong = {}
    for number, error in enumerate(ERRORS):
        with pytest.raises(todist.RemoteError) as caught:
            todist.remote_sync_call(raise_number, args=(number,), partitioner="worker1")
        got = caught.value
        if not (
            isinstance(got, type(error))
            and (str(got), got.args, got.worker) == (str(error), error.args, "worker1")
            and "in raise_number" in got.remote_traceback
        ):
            wrong[number] = repr(got)
    return wrong


def test_each_kind_arrives_from_a_worker(world):
    assert world(2).on_zero(raise_all_elsewhere) == {}


def test_a_class_made_in_a_function_arrives_from_a_worker(world):
    class Local(Exception):
        pass

    def fail():
        raise Local("text")

    def main():
        with pytest.raises(Local, match="text") as caught:
            todist.remote_sync_call(fail, partitioner=1)
        return isinstance(caught.value, todist.RemoteError)

    assert world(2).on_zero(main)


def test_an_exit_in_a_function_ends_neither_worker_nor_caller(world):
    def interrupt():
        raise KeyboardInterrupt

    def main():
        with pytest.raises(todist.RemoteError, match="SystemExit: 3"):
            todist.remote_sync_call(sys.exit, args=(3,), partitioner=1)
        with pytest.raises(todist.RemoteError, match="KeyboardInterrupt"):
            todist.remote_sync_call(interrupt, partitioner=1)
        return todist.remote_sync_call(todist.get_rank, partitioner=1)

    assert world(2).on_zero(main) == [1]


def test_a_call_of_a_call_tells_both_workers(world):
    def fail():
        raise Odd(7, reason="deep")

    def ask(partitioner):
        return todist.remote_sync_call(fail, partitioner=partitioner)

    def main():
        with pytest.raises(Odd) as caught:
            todist.remote_sync_call(ask, args=(2,), partitioner=1)
        error = caught.value
        assert isinstance(error, todist.RemoteError)
        assert (str(error), error.code, error.worker) == ("odd 7", 7, "worker1")
        # The worker in the middle tells where the error came from.
        assert "on worker2" in error.remote_traceback
        assert "in fail" in error.remote_traceback
        assert "in ask" in error.remote_traceback
        return len("".join(traceback.format_exception(error)).splitlines())

    assert world(3).on_zero(main) < 60


def test_the_printed_traceback_is_short_and_shows_both_sides(world):
    def deep(x):
        return x / 0

    def loss_fn(x):
        return deep(x)

    def main():
        try:
            todist.remote_sync_call(loss_fn, args=(1,), partitioner=1)
        except ZeroDivisionError:
            return traceback.format_exc()

    told = world(2).on_zero(main)
    lines = told.rstrip().splitlines()
    assert len(lines) < 30, told
    assert "on worker1" in told
    assert "in loss_fn" in told
    assert "in deep" in told
    assert "in main" in told
    assert lines[-1].endswith("ZeroDivisionError: division by zero")


def test_a_failing_parallel_function_says_so_briefly(world):
    def loss_fn(x):
        if todist.get_rank() == 1:
            raise ValueError("of rank 1")
        return x.mean()

    def main():
        parallel = todist.parallelize(todist.batch_partitioner, todist.mean_reducer)(loss_fn)
        try:
            parallel(torch.ones(4))
        except ValueError:
            return traceback.format_exc()

    told = world(2).on_zero(main)
    assert len(told.splitlines()) < 30, told
    assert "on worker1" in told
    assert "ValueError: of rank 1" in told


def test_all_workers_that_fail_are_told(world):
    def fail(x):
        if todist.get_rank() > 0:
            raise ValueError(f"of rank {todist.get_rank()}")
        return x

    def main():
        try:
            todist.remote_sync_call(fail, args=(torch.ones(4),))
        except ValueError as error:
            return error.worker, "".join(traceback.format_exception(error))

    worker, told = world(4).on_zero(main)
    assert worker in ("worker1", "worker2", "worker3")
    assert "2 more workers failed" in told
    for rank in (1, 2, 3):
        assert f"ValueError: of rank {rank}" in told


class Exits:
    def __reduce__(self):
        return sys.exit, (3,)


class ExitsWhenItIsSent:
    def __getstate__(self):
        sys.exit(4)


def test_objects_that_exit_when_they_are_sent_or_rebuilt_end_no_wait(world):
    def body():
        for worker in (0, 1):
            for function, args, text in (
                (len, ([Exits()],), "SystemExit: 3"),
                (Exits, (), "SystemExit: 3"),
                (len, ([ExitsWhenItIsSent()],), "SystemExit: 4"),
                (ExitsWhenItIsSent, (), "SystemExit: 4"),
            ):
                with pytest.raises(todist.errors.SerializationError, match=text):
                    todist.remote_sync_call(function, args=args, partitioner=worker, timeout=30)

    world(2).on_zero(body)


def test_an_error_of_the_caller_s_own_share_is_its_own(world):
    def fail(x):
        if todist.get_rank() == 0:
            raise Plain("here")
        return x

    def main():
        with pytest.raises(Plain, match="here") as caught:
            todist.remote_sync_call(fail, args=(torch.ones(2),))
        return isinstance(caught.value, todist.RemoteError)

    assert world(2).on_zero(main) is False


def test_a_failed_call_leaves_the_group_as_it_was(world):
    def fail(x):
        raise ValueError("again")

    def main():
        for _ in range(30):
            with pytest.raises(ValueError, match="again"):
                todist.remote_sync_call(fail, args=(torch.ones(3, requires_grad=True),))
        w = torch.ones(3, requires_grad=True)
        todist.remote_sync_call(torch.sum, args=(w,), reducer=todist.sum_reducer).backward()
        return w.grad.tolist()

    assert world(2).on_zero(main) == [1.0, 1.0, 1.0]


def holds_what_cannot_be_sent():
    raise ValueError(torch.empty(2, device="meta"))


def test_an_error_that_holds_what_cannot_be_sent_arrives_as_text(world):
    def body():
        with pytest.raises(todist.RemoteError) as raised:
            todist.remote_sync_call(holds_what_cannot_be_sent, partitioner=1)
        assert "ValueError" in "".join(traceback.format_exception(raised.value))

    world(2).on_zero(body)


class Immovable(torch.Tensor):
    """A tensor for which there is no room where it arrives."""

    def to(self, *_args, **_kwargs):
        raise torch.OutOfMemoryError("no room")


def test_an_error_while_arguments_or_a_result_arrive_is_itself(world):
    def body():
        with pytest.raises(torch.OutOfMemoryError, match="no room") as raised:
            todist.remote_sync_call(torch.sum, args=(torch.ones(3).as_subclass(Immovable),), partitioner=1)
        assert isinstance(raised.value, todist.RemoteError)
        assert raised.value.worker == "worker1"
        with pytest.raises(torch.OutOfMemoryError, match="no room") as raised:
            todist.remote_sync_call(lambda: torch.ones(3).as_subclass(Immovable), partitioner=1)
        assert not isinstance(raised.value, todist.RemoteError)
        assert todist.remote_sync_call(todist.get_rank, partitioner=1) == [1]

    world(2).on_zero(body)
