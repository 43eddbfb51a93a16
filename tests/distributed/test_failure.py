from __future__ import annotations

import builtins
import json
import pickle
import sys
import threading
import traceback
import urllib.error
from pathlib import Path

import cloudpickle
import pytest
import torch

import torchopt_dist as todist
from torchopt_dist.failure import RemoteFailure

pytestmark = pytest.mark.timeout(40)


class Plain(Exception):
    pass


class Odd(Exception):
    """Its arguments are not those of its ``__init__``."""

    def __init__(self, code, *, reason):
        super().__init__(f"code {code}: {reason}")
        self.code = code
        self.reason = reason

    def __str__(self):
        return f"odd {self.code}"


class Counting(ValueError):
    """Its ``__init__`` must not run a second time."""

    made = 0

    def __init__(self):
        Counting.made += 1
        super().__init__("counted")


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code):
        super().__init__(code)
        self.code = code


class New(Exception):
    def __new__(cls, code, extra):
        return super().__new__(cls, code)

    def __init__(self, code, extra):
        super().__init__(code)
        self.extra = extra


class Two(KeyError, AttributeError):
    pass


class Frozen(Exception):
    def __setattr__(self, name, value):
        raise AttributeError("frozen")


class Shadow(Exception):
    """It has attributes of its own by the names that a remote error has."""

    def __init__(self):
        super().__init__("shadow")
        self.worker = "mine"


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("cannot be told")


def caught(function):
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def there_and_back(error):
    """What the caller raises for an exception that ``error`` is on a worker."""

    def raise_it():
        raise error

    failure = RemoteFailure.of(caught(raise_it))
    return cloudpickle.loads(cloudpickle.dumps(failure)).to_error("worker7")


ERRORS = [
    ValueError("a", 1),
    ValueError(),
    KeyError("key"),
    IndexError(3),
    ZeroDivisionError("zero"),
    StopIteration(5),
    AssertionError(),
    NotImplementedError("later"),
    RecursionError("deep"),
    MemoryError("much"),
    OSError(2, "no such file", "data.pt"),
    PermissionError(13, "no", "a", None, "b"),
    ConnectionResetError(104, "reset"),
    TimeoutError("late"),
    BlockingIOError(11, "again"),
    UnicodeDecodeError("utf-8", b"\xff\xfe", 0, 1, "invalid start byte"),
    UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range"),
    SyntaxError("bad", ("file.py", 3, 7, "x = = 1")),
    ImportError("no module", name="missing", path="/missing"),
    ModuleNotFoundError("no module", name="gone"),
    AttributeError("no attribute", name="x", obj=None),
    NameError("no name", name="y"),
    caught(lambda: json.loads("{")),
    caught(lambda: int("x")),
    caught(lambda: {}["gone"]),
    caught(lambda: b"\xff".decode()),
    caught(lambda: Path("/no/such/file").read_text()),
    caught(lambda: torch.ones(2) @ torch.ones(3)),
    caught(lambda: torch.ones(2)[5]),
    TimeoutError("late"),
    pickle.PicklingError("cannot"),
    torch.cuda.OutOfMemoryError("much"),
    urllib.error.URLError("unreachable"),
    Plain("text"),
    Plain(),
    Odd(7, reason="why"),
    Counting(),
    New(3, "more"),
    Two("both"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_exception_arrives_as_itself_and_as_a_remote_error(error):
    got = there_and_back(error)
    assert isinstance(got, todist.RemoteError)
    assert isinstance(got, type(error))
    assert type(got).__name__ == type(error).__name__
    assert got.args == error.args
    assert str(got) == str(error)
    assert got.worker == "worker7"
    assert "raise_it" in got.remote_traceback
    for name in vars(error):
        assert getattr(got, name) == getattr(error, name)


def test_what_lives_in_c_arrives():
    error = there_and_back(OSError(2, "no such file", "a", None, "b"))
    assert isinstance(error, FileNotFoundError)
    assert (error.errno, error.strerror, error.filename, error.filename2) == (2, "no such file", "a", "b")
    error = there_and_back(UnicodeDecodeError("utf-8", b"ab\xff", 2, 3, "bad"))
    assert (error.encoding, error.object, error.start, error.end, error.reason) == (
        "utf-8",
        b"ab\xff",
        2,
        3,
        "bad",
    )
    assert there_and_back(StopIteration(5)).value == 5
    assert there_and_back(SyntaxError("bad", ("file.py", 3, 7, "x"))).lineno == 3


def test_attributes_arrive_and_no_init_runs_again():
    error = there_and_back(Odd(7, reason="why"))
    assert (error.code, error.reason) == (7, "why")
    made = Counting.made
    assert str(there_and_back(Counting())) == "counted"
    assert Counting.made == made + 1
    assert there_and_back(New(3, "more")).extra == "more"


def test_attributes_that_cannot_be_sent_are_left_out_and_arguments_told():
    error = Plain("text", threading.Lock(), 3)
    error.lock, error.fine = threading.Lock(), [1]
    got = there_and_back(error)
    assert (got.args[0], got.args[2]) == ("text", 3)
    assert "lock" in got.args[1]
    assert not hasattr(got, "lock")
    assert got.fine == [1]


@pytest.mark.parametrize(
    "error", [Slotted(3), Frozen("stiff"), Shadow(), Silent("quiet")], ids=lambda error: type(error).__name__
)
def test_an_awkward_exception_arrives_all_the_same(error):
    got = there_and_back(error)
    assert isinstance(got, todist.RemoteError)
    assert isinstance(got, type(error))
    assert got.args == error.args
    assert got.worker == "worker7"
    assert "raise_it" in got.remote_traceback


def test_a_class_that_cannot_be_sent_is_its_nearest_base():
    class Base(LookupError):
        pass

    class Unsendable(Base):
        lock = threading.Lock()

    got = there_and_back(Unsendable("text"))
    assert isinstance(got, todist.RemoteError)
    assert isinstance(got, Base)
    assert not isinstance(got, Unsendable)
    assert str(got) == "text"
    assert "Unsendable: text" in got.remote_traceback


def test_classes_made_in_a_function_or_in_main_are_the_caller_s():
    class Local(Exception):
        pass

    main = {"__name__": "__main__"}
    exec("class Mine(Exception):\n    pass", main)
    assert isinstance(there_and_back(Local("text")), Local)
    assert isinstance(there_and_back(main["Mine"]("text")), main["Mine"])


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("stop"), GeneratorExit()])
def test_what_ends_a_worker_does_not_end_the_caller(error):
    got = there_and_back(error)
    assert type(got) is todist.RemoteError
    assert isinstance(got, Exception)
    assert type(error).__name__ in str(got)


def test_a_remote_error_sent_on_keeps_its_class():
    inner = there_and_back(ValueError("deep"))
    outer = there_and_back(inner)
    assert isinstance(outer, ValueError)
    assert isinstance(outer, todist.RemoteError)
    assert str(outer) == "deep"
    assert outer.worker == "worker7"
    assert "raise_it" in outer.remote_traceback


@pytest.mark.parametrize(
    "kind", [todist.SerializationError, todist.WorkerLostError, todist.CallTimeoutError, todist.RemoteError]
)
def test_the_package_s_own_errors_arrive(kind):
    got = there_and_back(kind("text"))
    assert isinstance(got, kind)
    assert str(got) == "text"


def test_groups_of_exceptions_arrive():
    group = builtins.ExceptionGroup
    got = there_and_back(group("many", [ValueError("a"), group("more", [KeyError("b")])]))
    assert isinstance(got, group)
    assert isinstance(got, todist.RemoteError)
    assert [type(error) for error in got.exceptions] == [ValueError, group]
    assert got.exceptions[0].args == ("a",)
    assert "many" in str(got)


def test_causes_are_told_in_the_traceback():
    def chained():
        try:
            {}["first"]
        except KeyError as error:
            raise ValueError("second") from error

    failure = RemoteFailure.of(caught(chained))
    told = failure.to_error("worker1").remote_traceback
    assert told.index("KeyError: 'first'") < told.index("direct cause") < told.index("ValueError: second")


def test_notes_arrive():
    error = ValueError("text")
    error.__notes__ = ["a note"]
    got = there_and_back(error)
    assert got.__notes__ == ["a note"]
    assert "a note" in "".join(traceback.format_exception(got))


def test_a_remote_error_can_be_pickled():
    error = there_and_back(OSError(2, "no such file", "a"))
    again = cloudpickle.loads(cloudpickle.dumps(error))
    assert isinstance(again, FileNotFoundError)
    assert isinstance(again, todist.RemoteError)
    assert (again.errno, again.worker) == (2, "worker7")


def test_one_class_of_the_caller_is_made_a_kind():
    assert type(there_and_back(Plain("a"))) is type(there_and_back(Plain("b")))


# Over the wire.


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
