"""Transports by name, and a function and its tasks → a request to worker 1, sent by hand."""

from __future__ import annotations

import itertools

from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.messages.caller_state import CallerState
from torchopt_dist.distributed.messages.payload import ExecutionOptions, Payload
from torchopt_dist.distributed.messages.requests import Call
from torchopt_dist.distributed.serialization.pickling import pack

TRANSPORTS = {
    "rpc": {"TODIST_TRANSPORT": "rpc"},
    "zmq": {"TODIST_TRANSPORT": "zmq"},
    "zmq over TCP": {"TODIST_TRANSPORT": "zmq", "TODIST_ZMQ_IPC": "0"},
}
"""Name → the environment that chooses it."""
ENCRYPTED = TRANSPORTS["zmq over TCP"]

NUMBERS = itertools.count(10**9)  # none of the calls'


def request_for(function, *tasks):
    payload = Payload(
        function,
        tuple((task, {}) for task in tasks),
        (0,) * len(tasks),
        CallerState.capture(),
        ExecutionOptions(),
    )
    return pack(Call(payload, (0, next(NUMBERS)), keep=False), main_by_name=True).detached()


def send(function, *tasks, timeout=0.0):
    return current_group().transport.send(1, request_for(function, *tasks), timeout)


def echo(x):
    return x
