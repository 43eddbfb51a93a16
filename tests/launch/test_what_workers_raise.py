"""However an exception is made, its class or nearest base, its text and its traceback come to the launcher."""

from __future__ import annotations

import dataclasses
import os
import signal
import traceback
from pathlib import Path

import pytest

import torchopt_dist as todist
from tests.launch import exceptions
from tests.launch.exceptions import MoreSlots, Mute, NoArgs, NoDict, Own, Picked, WithMeta
from torchopt_dist.distributed.serialization.pickling import error_reply, reply_of
from torchopt_dist.launching import launch
from torchopt_dist.launching._packing import pack, pack_failure, unpack_failure, unpack_value
from torchopt_dist.pickling.serialized_exception import SerializedException

pytestmark = pytest.mark.timeout(60)

KINDS = {"plain": {}, "elastic": {"min_hosts": 1}}
AWKWARD = {
    Picked: (LookupError, ("text",)),
    WithMeta: (ValueError, ("text",)),
    NoDict: (NoDict, ("text",)),
    NoArgs: (todist.RemoteError, ("NoArgs: text",)),
    Mute: (Mute, ("text",)),
}


def caught(error):
    try:
        raise error
    except Exception as raised:
        return raised


def there_and_back(error):
    return unpack_failure(*pack_failure(caught(error)), "rank 3")


@pytest.mark.parametrize("kind", AWKWARD)
def test_a_class_with_rules_of_its_own_arrives_as_far_as_these_let_it(kind):
    base, args = AWKWARD[kind]
    got = there_and_back(kind("text"))
    assert isinstance(got, todist.RemoteError)
    assert isinstance(got, base)
    assert got.args == args
    assert got.worker == "rank 3"
    assert f"{kind.__name__}" in got.remote_traceback
    assert "raise error" in got.remote_traceback


@pytest.mark.parametrize("launches", KINDS)
@pytest.mark.parametrize("kind", [WithMeta, NoArgs, Mute])
def test_such_an_exception_comes_through_a_launch(kind, launches):
    def raise_it():
        raise kind("text")

    base, args = AWKWARD[kind]
    with pytest.raises(base) as raised:
        launch(raise_it, nproc_per_host=1, handlers=[], log_dir=None, **KINDS[launches])
    assert raised.value.args == args
    assert "in raise_it" in raised.value.remote_traceback
    assert kind.__name__ in raised.value.remote_traceback
    places = [Path(frame.filename).name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert places == [Path(__file__).name, "launcher.py", "launcher.py"]


def test_a_class_that_can_be_told_only_here_is_told_in_words(monkeypatch):
    failure = SerializedException.of(caught(NoDict("text")))
    packed = pack(failure)
    monkeypatch.setattr(
        SerializedException, "to_error", lambda failure, worker: ValueError(worker, failure.args)
    )
    in_words, _ = pack_failure(caught(NoDict("text")))
    assert unpack_failure(in_words, packed, "rank 3").args == ("rank 3", ("text",))
    monkeypatch.delattr(exceptions, "NoDict")
    (worker, (told,)) = unpack_failure(in_words, packed, "rank 3").args
    assert (worker, told) == ("rank 3", "NoDict: text")


def test_what_cannot_be_rebuilt_is_a_remote_error_with_the_whole_text(monkeypatch):
    """As pydantic's ``ValidationError``: its class, written in C, makes no instance from arguments."""
    lines = "two\nlines"
    error = caught(ExceptionGroup(lines, [ValueError(1)]))
    failure = dataclasses.replace(SerializedException.of(error), init_args=())  # which it does not take
    for got in (failure.to_error("rank 3"), unpack_failure(pack_failure(error)[0], pack(failure), "rank 3")):
        assert type(got) is todist.RemoteError
        assert str(got) == f"ExceptionGroup: {lines} (1 sub-exception)"
        assert (got.worker, got.remote_traceback) == ("rank 3", failure.traceback)
    # In a call, and where the class is not known to the caller.
    monkeypatch.setattr(
        exceptions,
        "Unknown",
        type("Unknown", (ValueError,), {"__module__": exceptions.__name__}),
        raising=False,
    )
    reply = error_reply(caught(exceptions.Unknown(lines)))
    with pytest.raises(exceptions.Unknown):
        reply_of(reply, "worker1")
    monkeypatch.delattr(exceptions, "Unknown")
    with pytest.raises(todist.RemoteError) as raised:
        reply_of(reply, "worker1")
    assert (type(raised.value), str(raised.value)) == (todist.RemoteError, f"Unknown: {lines}")
    assert (raised.value.worker, "raise error" in raised.value.remote_traceback) == ("worker1", True)


def test_slots_arrive():
    error = MoreSlots(5)
    error.more, error.other = [1], 2
    got = there_and_back(error)
    assert (got.code, got.hidden, got.more, got.other) == (5, -5, [1], 2)
    assert not hasattr(got, "unset")
    again = there_and_back(got)  # of a class that was made for it
    assert isinstance(again, MoreSlots)
    assert (again.code, again.hidden, again.more, again.other) == (5, -5, [1], 2)


def test_an_attribute_of_the_exception_s_own_is_left():
    got = there_and_back(Own())
    assert (got.worker, got.remote_traceback) == (("mine",), "mine too")
    assert "on rank 3" in str(got.__cause__)
    assert "Own: own" in str(got.__cause__)


class NoWords:
    def __repr__(self):
        raise RuntimeError("no repr")

    def __reduce__(self):
        raise NoWordsError


class NoWordsError(Exception):
    def __str__(self):
        raise RuntimeError("no str")


@pytest.mark.parametrize("launches", KINDS)
def test_what_can_neither_be_pickled_nor_told_is_a_serialization_error(launches):
    told = r"NoWords <NoWords, whose repr raises RuntimeError>.*NoWordsError: <NoWordsError, whose str raises"
    with pytest.raises(
        todist.errors.SerializationError, match=rf"`args\[0\]` must be something .* got {told}"
    ):
        launch(print, (NoWords(),), nproc_per_host=1, **KINDS[launches])
    with pytest.raises(todist.errors.SerializationError, match=f"rank 0 returned {told}"):
        launch(NoWords, nproc_per_host=1, handlers=[], log_dir=None, **KINDS[launches])


class Ends:
    """Raises an error that ends programs where it is pickled, or where it is rebuilt."""

    def __init__(self, error, where):
        self.error, self.where = error, where

    def __reduce__(self):
        if self.where == "pickled":
            raise self.error
        return _raise_it, (self.error,)


def _raise_it(error):
    raise error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
@pytest.mark.parametrize(
    ("where", "told"), [("pickled", "rank 0 returned Ends"), ("rebuilt", "what rank 0 on localhost returned")]
)
def test_an_object_that_asks_to_end_the_program_is_one_that_cannot_be_sent(error, where, told):
    with pytest.raises(
        todist.errors.SerializationError, match=rf"^{told}.* launcher: RuntimeError: {type(error).__name__}"
    ):
        launch(Ends, (error, where), nproc_per_host=1, handlers=[], log_dir=None)


def test_an_argument_that_asks_to_end_the_program_is_one_that_cannot_be_sent():
    with pytest.raises(
        todist.errors.SerializationError, match=r"`args\[0\]` must be .* RuntimeError: SystemExit 3$"
    ):
        launch(print, (Ends(SystemExit(3), "pickled"),), nproc_per_host=1)
    with pytest.raises(
        todist.errors.SerializationError, match=r"cannot be read on the worker: RuntimeError: SystemExit 3"
    ):
        launch(print, (Ends(SystemExit(3), "rebuilt"),), nproc_per_host=1, handlers=[], log_dir=None)


def test_an_exception_with_such_an_object_arrives():
    error = ValueError("text")
    error.attribute, error.__cause__ = Ends(SystemExit(3), "pickled"), None
    got = there_and_back(error)
    assert isinstance(got, ValueError)
    assert got.args == ("text",)


class Interrupted:
    def __reduce__(self):
        return os.kill, (os.getpid(), signal.SIGINT)


def test_a_real_interrupt_while_a_value_is_rebuilt_is_one():
    with pytest.raises(KeyboardInterrupt):
        unpack_value(pack(Interrupted()), "rank 0")
