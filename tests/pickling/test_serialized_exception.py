"""``SerializedException``: an exception, there and back → one of its own class that is a ``RemoteError`` as well."""

from __future__ import annotations

import builtins
import threading
import traceback

import cloudpickle
import pytest
import torch

import torchopt_dist as todist
from tests.distributed.exceptions import (
    ERRORS,
    Counting,
    Frozen,
    New,
    Odd,
    Plain,
    Shadow,
    Silent,
    Slotted,
    caught,
)
from tests.rows import each_row
from torchopt_dist.distributed.serialization.pickling import pack, unpack
from torchopt_dist.pickling.serialized_exception import SerializedException


def there_and_back(error):
    """What the caller raises for an exception that ``error`` is on a worker."""

    def raise_it():
        raise error

    failure = SerializedException.of(caught(raise_it))
    return cloudpickle.loads(cloudpickle.dumps(failure)).to_error("worker7")


@each_row("error", ERRORS)
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


class Untold:
    """Neither ``repr`` nor ``str`` nor ``pickle`` is to be had of it."""

    def __repr__(self):
        raise ZeroDivisionError("repr")

    def __reduce__(self):
        raise TypeError("no")


class Mute(BaseException):
    def __str__(self):
        raise ZeroDivisionError("str")


def test_an_argument_that_cannot_even_be_told_ends_nothing():
    got = there_and_back(ValueError("text", Untold()))
    assert isinstance(got, ValueError)
    assert isinstance(got, todist.RemoteError)
    assert got.args == ("text", "<Untold, whose repr raises ZeroDivisionError>")
    assert "raise_it" in got.remote_traceback
    got = there_and_back(Mute())
    assert type(got) is todist.RemoteError
    assert str(got) == "Mute: <Mute, whose str raises ZeroDivisionError>"


def test_a_group_keeps_what_can_be_sent_of_it():
    group = builtins.ExceptionGroup
    got = there_and_back(group("many", [KeyError("a"), ValueError(threading.Lock())]))
    assert isinstance(got, group)
    assert isinstance(got, todist.RemoteError)
    assert isinstance(got.exceptions[0], KeyError)
    assert "lock" in str(got.exceptions[1])
    assert "raise_it" in got.remote_traceback


@pytest.mark.parametrize(
    "error",
    [
        ValueError(3, torch.empty(2, device="meta")),
        builtins.ExceptionGroup("many", [ValueError(torch.empty(2, device="meta"))]),
        UnicodeDecodeError("utf-8", b"ab", 0, 1, "bad"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_as_text_an_exception_always_travels(error):
    def raise_it():
        raise error

    words = SerializedException.of(caught(raise_it)).as_text()
    got = unpack(pack(words, main_by_name=True)).to_error("worker7")
    assert isinstance(got, todist.RemoteError)
    assert isinstance(got, type(error)) or isinstance(error, builtins.ExceptionGroup)
    assert str(error)[:4] in str(got)
    assert "raise_it" in got.remote_traceback


@each_row("error", [Slotted(3), Frozen("stiff"), Shadow(), Silent("quiet")])
def test_an_awkward_exception_arrives_all_the_same(error):
    got = there_and_back(error)
    assert isinstance(got, todist.RemoteError)
    assert isinstance(got, type(error))
    assert got.args == error.args
    assert got.worker == getattr(error, "worker", "worker7")  # an attribute of its own is left
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


@each_row(
    "kind",
    [todist.errors.SerializationError, todist.WorkerLostError, todist.CallTimeoutError, todist.RemoteError],
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

    failure = SerializedException.of(caught(chained))
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
