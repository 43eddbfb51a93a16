"""At DEBUG each call is one line of the log, whose bytes are those of a profile; otherwise nothing is counted."""

from __future__ import annotations

import logging

import pytest
import torch

import torchopt_dist as todist
from torchopt_dist.distributed.group import call_log
from torchopt_dist.process.table import bytes_text


def scaled(weight, x):
    return weight * x


def fails(x):
    raise KeyError(f"{x:g}")


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def logged_calls():
    spread = todist.parallelize(todist.dim_partitioner(exclusive=True), todist.mean_reducer)(scaled)
    weight, x = torch.ones(1000, requires_grad=True), torch.ones(3, 1000)
    handler = Lines()
    logger = logging.getLogger("torchopt_dist")
    logger.addHandler(handler)
    spread(todist.replicated(weight), x)
    assert not handler.lines
    logger.setLevel(logging.DEBUG)
    with todist.profile() as profile:
        spread(todist.replicated(weight), x).sum().backward()
        forward = [line for line in handler.lines if line.startswith("scaled")]
        todist.remote_async_call(scaled, args=(2.0, 3.0), partitioner=1).wait()
        with pytest.raises(KeyError):
            todist.remote_call(fails, 1, 1.0)
    lines = [line for line in handler.lines if line.startswith(("scaled", "fails"))]
    return profile.spans, forward, lines


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_a_line_has_the_workers_and_the_bytes_of_the_profile(transport, world):
    spans, forward, lines = world(2).on_zero(logged_calls, transport=transport)
    # The requests, and the replies to them, of the forward are the first of each kind to worker 1 and from it.
    sent = [span.size for span in spans if span.phase == "pack" and span.worker == 0 and span.peer == 1]
    came = [span.size for span in spans if span.phase == "reply" and span.worker == 1]
    assert sent[0] > 4 * 2 * 1000
    start = "scaled: tasks 2 on worker0 (here), 1 on worker1; "
    assert [line.rpartition(", ")[0] for line in forward] == [
        f"{start}{bytes_text(sent[0])} out, {bytes_text(came[0])} in"
    ]
    assert len(lines) == 3  # and none of the backward
    assert lines[1].startswith("scaled: tasks 1 on worker1; ")
    assert lines[2].startswith("fails: tasks 1 on worker1; ")
    assert lines[2].endswith("; failed with KeyError")


def test_without_a_reader_nothing_is_made(monkeypatch):
    def made(*_):
        raise AssertionError("the log of a call that nobody reads")

    monkeypatch.setattr(call_log.CallLog, "__init__", made)

    @todist.auto_init_rpc()
    def main():
        return todist.remote_call(abs, 0, -1)

    assert main() == 1
