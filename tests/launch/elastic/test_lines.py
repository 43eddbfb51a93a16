"""What workers print comes to the launcher as it is, and handlers that raise end the launch."""

from __future__ import annotations

import logging
import os
import time

import pytest

from tests.functions import MyError
from tests.launch.elastic.worlds import launch

pytestmark = pytest.mark.timeout(30)


def lines_of(main, **options):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    launch(main, hosts=["localhost"], handlers=[handler], **options)
    return [(record.rank, record.getMessage()) for record in records]


@pytest.mark.parametrize("line", ['\x1e{"step": 1}', "\x1e7", "\x1e", '\x1e!{"news": "done"}'])
def test_a_line_that_starts_with_a_record_separator_is_a_line(line):
    def main():
        print("before")
        print(line)
        print("after")

    assert [text for _, text in lines_of(main)] == ["before", line, "after"]


def test_a_line_that_was_not_finished_keeps_its_rank_and_the_next_world_its_own():
    def main():
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "0":
                print("not finished", end="", flush=True)
                time.sleep(0.5)  # until it is in the pipe
                raise MyError(code=1)
            time.sleep(60)
        print("finished by", os.environ["RANK"])

    lines = lines_of(main, nproc=2, max_restarts=1)
    assert sorted(lines) == [(0, "finished by 0"), (0, "not finished"), (1, "finished by 1")]


def test_what_a_handler_raises_ends_the_launch_and_is_no_lost_host(caplog):
    class Broken(logging.Handler):
        def emit(self, record):
            raise ConnectionRefusedError("my log server is gone")

    def main():
        print("text")
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(ConnectionRefusedError, match=r"^my log server is gone$"):
        launch(main, handlers=[Broken()])
    assert time.monotonic() - started < 15.0
    assert not [record for record in caplog.records if "is lost" in record.getMessage()]
