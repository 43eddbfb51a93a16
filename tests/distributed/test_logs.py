"""Records of workers at rank 0: their rank, level, text and traceback, from ``main`` and from inside tasks."""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchopt_dist as todist
from tests.processes import ON_TWO
from torchopt_dist.distributed import logs

FEW = 3000


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def wait_for(self, number: int) -> list[logging.LogRecord]:
        """So many records; a time-out of the test ends this."""
        while len(self.records) < number:
            time.sleep(0.005)
        return list(self.records)


@contextlib.contextmanager
def kept(name: str | None = None) -> Iterator[Kept]:
    logger, handler = logging.getLogger(name), Kept()
    before = list(logger.handlers), logger.level
    logger.handlers[:] = [handler]
    try:
        yield handler
    finally:
        logger.handlers[:], logger.level = before[0], before[1]


def start(name: str | None = None) -> None:
    todist.log_to_rank_zero("INFO", name)


def speak(text: str) -> torch.Tensor:
    logging.getLogger("mine.of_tasks").warning("%s of %d", text, todist.get_rank())
    return torch.rand(())


def fail() -> None:
    try:
        raise ValueError("so it is")
    except ValueError:
        logging.getLogger("mine").exception("caught")
    logging.getLogger("mine").debug("too low")
    for number in range(FEW):
        logging.getLogger("mine").info("number %d", number)


def test_records_of_tasks_arrive_in_order_with_rank_level_and_traceback(world: Any) -> None:
    def body() -> None:
        with kept("mine") as handler:
            todist.remote_sync_call(start, args=("mine",), partitioner=1)
            start("mine")
            speak("own")
            todist.remote_sync_call(speak, args=("other",), partitioner=1)
            todist.remote_sync_call(fail, partitioner=1)
            own, other, caught, *numbers = handler.wait_for(FEW + 3)
        assert (own.rank, own.worker, own.getMessage()) == (0, "worker0", "own of 0")  # type: ignore[attr-defined]
        assert (other.rank, other.worker, other.levelname) == (1, "worker1", "WARNING")  # type: ignore[attr-defined]
        assert (other.name, other.getMessage(), other.funcName) == ("mine.of_tasks", "other of 1", "speak")
        assert "ValueError: so it is" in (caught.exc_text or "")
        assert (
            logging.Formatter(logs.FORMAT).format(caught).startswith("[rank 1] ERROR mine: caught\nTraceback")
        )
        assert [record.getMessage() for record in numbers] == [f"number {number}" for number in range(FEW)]

    world(2).on_zero(body)


def test_random_numbers_are_those_without_logging(world: Any) -> None:
    def drawn() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [*todist.map(speak, ["a", "b", "c"]), torch.rand(())]

    def body() -> None:
        with kept("mine") as handler:
            before = drawn()
            todist.remote_sync_call(start, args=("mine",), partitioner=1)
            start("mine")
            assert all(map(torch.equal, before, drawn()))
            handler.wait_for(5)

    world(2).on_zero(body)


def last_words() -> None:
    for number in range(100):
        logging.getLogger("mine").info("last %d", number)


def speaks_at_the_end() -> int:
    handler = Kept()
    logging.getLogger("mine").handlers[:] = [handler]
    todist.log_to_rank_zero(logging.INFO, "mine")
    if todist.get_rank() == 1:
        last_words()
    logging.getLogger("kept").handlers[:] = [handler]
    return todist.get_rank()


def number_of_words(rank: int) -> int:
    del rank
    (handler,) = logging.getLogger("kept").handlers
    logging.getLogger("mine").handlers[:] = []
    assert isinstance(handler, Kept)
    return len(handler.records)


def test_what_is_logged_last_arrives_too() -> None:
    def run() -> int:
        return number_of_words(todist.auto_init_rpc()(speaks_at_the_end)())

    assert ON_TWO.run(run).rank(0) == 100


def test_in_one_process_there_is_a_handler_with_the_rank() -> None:
    @todist.auto_init_rpc(worker_init_fn=todist.log_to_rank_zero)
    def main() -> None:
        todist.log_to_rank_zero()  # once more
        logging.getLogger("mine").info("hello")

    root = logging.getLogger()
    before, level, err = list(root.handlers), root.level, io.StringIO()
    root.handlers[:] = []
    try:
        with contextlib.redirect_stderr(err):
            main()
    finally:
        root.handlers[:], root.level = before, level
    assert err.getvalue() == "[rank 0] INFO mine: hello\n"


def test_what_cannot_be_sent_is_written_and_other_handlers_stay(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("mine.unsent")
    logger.propagate, sender = False, logs._Sender(3, "worker3")
    logger.handlers[:] = [sender]
    try:
        logger.warning("nobody is there: %s", 5)
    finally:
        logger.handlers[:] = []
    assert capsys.readouterr().err == "[rank 3] WARNING mine.unsent: nobody is there: 5\n"


def test_wrong_arguments() -> None:
    with pytest.raises(todist.errors.NotInitializedError):
        todist.log_to_rank_zero()
    with pytest.raises(ValueError, match="LOUD"):
        todist.auto_init_rpc()(todist.log_to_rank_zero)("LOUD")
    with pytest.raises(TypeError, match="`logger` must be the name of a logger, got int 3"):
        todist.auto_init_rpc()(todist.log_to_rank_zero)(10, 3)  # type: ignore[arg-type]
